"""The controller's side of teacher forcing: find the module that contains a fault. Torch-free.

A failing step of an eager style is run again with the reference fed in at the boundaries of
its modules up to some place. Where everything after that place is then right, the fault lies
before it; the first such place is found by bisection. Design: docs/design.md 3.10.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec

from spmd_verify.causes.words import listed
from spmd_verify.record import Cell, Row
from spmd_verify.runner.failures import Failure
from spmd_verify.runner.specs import (
    FORCING_JOB,
    JUDGE_JOB,
    Boundary,
    CellReport,
    CellSpec,
    Forcing,
    ForcingPlan,
    ForcingRequest,
    JudgeRequest,
    decode,
    encode,
)
from spmd_verify.style_ids import ENGINE
from spmd_verify.verdict import Verdict

if TYPE_CHECKING:
    from spmd_verify.run import _Run

# By the stage of the first divergence: what is fed in.
_DIRECTIONS: Final = {"module_outputs": "values", "loss": "values", "gradients": "gradients"}
ROOT: Final = "model"


class _Stopped(Exception):
    """Nothing more can be run: why."""


@dataclass(frozen=True)
class _Outcome:
    """One run with the reference fed in.

    Attributes:
        wrong: Losses and parameters whose gradient is wrong.
        off: Boundaries that deviate by more than noise, before anything was fed in there.
    """

    wrong: frozenset[str]
    off: frozenset[str]


class Teacher:
    """Locates the faults of failing cells."""

    def __init__(self, run: _Run) -> None:
        """Work with the processes of a run."""
        self.run = run

    def locate(self, spec: CellSpec, cell: Cell) -> None:
        """Name the module that contains a cell's fault in its first divergence, in place.

        Does nothing for cells that are not about the forward or backward of a real module. A
        run that fails is noted; the cell stays what it is.
        """
        first = cell.first_divergence
        is_asked = spec.style not in ENGINE and not spec.is_lockstep and spec.fault is None
        if first is None or not is_asked or cell.verdict != Verdict.MISMATCH:
            return
        if first.stage not in _DIRECTIONS or "exact" in spec.case.overrides:
            return
        if cell.cause is not None and cell.cause.kind == "reported_value":
            return
        folder = tempfile.mkdtemp(prefix="forcing-", dir=self.run.work_dir)
        search = _Search(self.run, spec, cell, folder)
        try:
            first.located, first.modules = search.found()
        except _Stopped as stop:
            cell.unknown["not_located"] = str(stop)
            self.run.progress.note(f"{cell.id}: teacher forcing named no module: {stop}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@dataclass
class _Search:
    """One cell while its fault is looked for."""

    run: _Run
    spec: CellSpec
    cell: Cell
    folder: str
    runs: int = 0
    boundaries: list[Boundary] = field(default_factory=list)
    _outcomes: dict[int, _Outcome] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note what is wrong."""
        first = self.cell.first_divergence
        assert first is not None, "only failing cells are located"
        self.step = first.step
        self.direction = _DIRECTIONS[first.stage]
        rows = [row for row in self.cell.tensors if row.step == self.step and _is_wrong(row)]
        place = (first.stage, first.tensor)
        self.run_name = next((r.run for r in rows if (r.stage, r.name) == place), "free")
        self.rows = {row.name: row for row in rows if row.stage in ("loss", "gradients")}
        self.deadline = time.monotonic() + self.spec.timeout_seconds
        self.most_runs = 0

    # -- the search --------------------------------------------------------------------------

    def found(self) -> tuple[str | None, list[str]]:
        """Return the line for the report, and the modules it names.

        Raises:
            _Stopped: A run failed, or nothing can be fed in.
        """
        plan = self._plan()
        is_forward = self.direction == "values"
        self.boundaries = plan.boundaries if is_forward else plan.boundaries[::-1]
        self.most_runs = 2 * math.ceil(math.log2(max(len(self.boundaries), 2))) + 2
        own: set[str] = set()
        places = self._places(own)
        if not places:
            raise _Stopped("no boundary of a module can be held against the reference")
        last = places[-1]
        left = self._left(last, self._outcome(last), own)
        if left and (is_forward or left == self._due(last, own)):
            return self._beyond(left, plan)
        own |= left
        low, high = self._bisected(self._places(own), own)
        high = self._extended(high, own)
        names = list(dict.fromkeys([*self._others(high), self._module_at(high)]))
        names = names if is_forward else names[::-1]
        return self._text(names, low, high), names

    def _places(self, own: set[str]) -> list[int]:
        """Return the boundaries where something can be fed in that can make a difference."""
        return [
            i
            for i, boundary in enumerate(self.boundaries)
            if boundary.finding != "unknown" and self._due(i, own)
        ]

    def _bisected(self, places: list[int], own: set[str]) -> tuple[int, int]:
        """Return the last place that leaves the fault and the first that does not.

        The first is -1 where even the first boundary removes it. Feeding what is right already
        changes nothing, so the search starts at the first boundary that is not.
        """
        at = [self.boundaries[i].finding != "right" for i in places]
        guess = at.index(True) if True in at else len(places) - 1
        low, high = guess - 1, len(places) - 1
        middle = guess
        while high - low > 1 and self._may_run():
            i = places[middle]
            if self._left(i, self._outcome(i), own):
                low = middle
            else:
                high = middle
            middle = (low + high) // 2
        return (places[low] if low >= 0 else -1), places[high]

    def _extended(self, high: int, own: set[str]) -> int:
        """Return the outermost boundary at which the sum that is missing may have been due.

        A summand is right inside a module that sums later. Where one is fed as the whole sum
        and that repairs all, the sum is missing somewhere up to the last summand in a row.
        """
        if self.boundaries[high].finding != "summand":
            return high
        chain = []
        for i in range(high + 1, len(self.boundaries)):
            boundary = self.boundaries[i]
            if boundary.finding != "summand":
                break
            # The value behind a module is the one that enters the next: the same boundary.
            if not boundary.is_repeated or boundary.is_input != (self.direction == "values"):
                chain.append(i)
        for i in chain[::-1][:2]:
            if self._may_run() and not self._left(high, self._outcome(i), own):
                return i
        return high

    def _others(self, high: int) -> list[str]:
        """Return the modules in front of a place that deviate though all they get is right."""
        off = self._outcome(high).off
        return [
            self._module_at(i)
            for i in range(high)
            if self.boundaries[i].finding == "wrong" and self.boundaries[i].key in off
        ]

    def _due(self, place: int, own: set[str]) -> set[str]:
        """Return what is wrong and computed from a boundary."""
        if self.direction == "values":
            losses = {name for name, row in self.rows.items() if row.stage == "loss"}
            return losses | {b.key for b in self.boundaries[place + 1 :] if b.finding == "wrong"}
        return {
            name
            for name, row in self.rows.items()
            if row.stage == "gradients" and name not in own and self._is_upstream(row, place)
        }

    def _left(self, place: int, outcome: _Outcome, own: set[str]) -> set[str]:
        """Return what of that is still wrong in a run."""
        return self._due(place, own) & (outcome.wrong | outcome.off)

    def _is_upstream(self, row: Row, place: int) -> bool:
        """Say whether a parameter was used up before a boundary, in forward order."""
        after = {b.module for b in self.boundaries[: place + 1] if not self._is_behind(b, place)}
        for name in (row.name, *row.aliases):
            owner = self._owner(name)
            if owner == ROOT or owner in after:
                return False
        return True

    def _is_behind(self, boundary: Boundary, place: int) -> bool:
        """Say whether a boundary is the place itself, as an output: its module is done there."""
        return boundary is self.boundaries[place] and not boundary.is_input

    def _owner(self, name: str) -> str:
        """Return the innermost module with boundaries that has a parameter."""
        known = {boundary.module for boundary in self.boundaries}
        path = name.rpartition(".")[0]
        while path and path not in known:
            path = path.rpartition(".")[0]
        return path or ROOT

    # -- words -------------------------------------------------------------------------------

    def _module_at(self, place: int) -> str:
        """Return the smallest module that contains what lies in front of a boundary.

        Between it and the nearest boundary in the direction against the flow that is right or
        was fed in.
        """
        before = next(
            (
                b
                for b in self.boundaries[:place][::-1]
                if b.finding in ("right", "wrong")
            ),
            None,
        )  # fmt: skip
        here = self.boundaries[place]
        if before is None:
            return here.module if here.is_input != (self.direction == "values") else ROOT
        earlier, later = (before, here) if self.direction == "values" else (here, before)
        return _common(
            earlier.module if earlier.is_input else _parent(earlier.module),
            _parent(later.module) if later.is_input else later.module,
            {boundary.module for boundary in self.boundaries},
        )

    def _text(self, names: list[str], low: int, high: int) -> str:
        """Return the line that names modules."""
        what = "value" if self.direction == "values" else "gradient"
        here = self.boundaries[high]
        side = "input" if here.is_input else "output"
        rest = "everything after" if what == "value" else "every gradient computed from it"
        text = (
            f"{listed(names)}: with the reference's {what} fed in at the {side} of {here.module} "
            f"{rest} is right"
        )
        if len(names) > 1:
            text = f"{listed(names)}: each is wrong although all it gets is the reference's"
        if here.finding == "summand":
            text += "; without it only each rank's summand is there"
        skipped = [b for b in self.boundaries[low + 1 : high] if b.finding == "unknown"]
        if skipped:
            text += f"; {len(skipped)} boundaries before it have no layout that is known"
        return f"{text} ({self.runs} runs)"

    def _beyond(self, left: set[str], plan: ForcingPlan) -> tuple[str, list[str]]:
        """Say that feeding in the reference everywhere repairs nothing.

        Raises:
            _Stopped: Boundaries are wrong all the same.
        """
        keys = {boundary.key for boundary in self.boundaries}
        if left & keys or any(b.finding == "wrong" for b in self.boundaries if left - keys == left
                              and self.direction == "gradients"):  # fmt: skip
            raise _Stopped(f"nothing that is fed in repairs the step ({self.runs} runs)")
        if self.direction == "values":
            return (
                f"in the loss: with the reference's value fed in at every module it is still "
                f"wrong ({self.runs} runs)"
            ), []
        owners = list(dict.fromkeys(self._owner(name) for name in self.rows if name in left))
        if len(owners) == 1:
            return (
                f"{owners[0]}: the gradient fed to it and the one it passes on are right, those "
                f"of its own parameters are not ({self.runs} runs)"
            ), owners
        scale = plan.scales[0] if plan.scales else 1.0
        scaled = f" (here {scale:.4g} x the reference's)" if abs(scale - 1.0) > 1e-3 else ""
        return (
            f"after backward: every module's own backward is right; with the reference's "
            f"gradient{scaled} fed in at every module the same gradients are wrong "
            f"({self.runs} runs)"
        ), []

    # -- runs --------------------------------------------------------------------------------

    def _may_run(self) -> bool:
        """Say whether there is time for another run."""
        return self.runs < self.most_runs and time.monotonic() < self.deadline

    def _plan(self) -> ForcingPlan:
        """Watch the boundaries of the step and learn what may be fed in."""
        watched, _ = self._ran([], is_watching=True)
        answer = self.run.solo.run(
            FORCING_JOB,
            encode(ForcingRequest(watched)),
            timeout_seconds=self.spec.timeout_seconds,
        )
        if isinstance(answer, Failure):
            raise _Stopped(answer.reason)
        plan = decode(answer[0], ForcingPlan)
        if plan.problem:
            raise _Stopped(f"one device cannot be watched: {plan.problem}")
        return plan

    def _outcome(self, place: int) -> _Outcome:
        """Return what is wrong with the reference fed in up to a boundary.

        A summand is fed in as the whole sum only where it is the last.
        """
        if place not in self._outcomes:
            fed = [b.key for b in self.boundaries[:place] if b.finding in ("right", "wrong")]
            spec, parts = self._ran([*fed, self.boundaries[place].key])
            request = JudgeRequest(spec, parts, 0.0)
            judged = decode(self.run.ask_solo(JUDGE_JOB, encode(request)), Cell)
            wrong = {
                row.name
                for row in judged.tensors
                if row.step == self.step and row.stage in ("loss", "gradients") and _is_wrong(row)
            }
            self._outcomes[place] = _Outcome(frozenset(wrong), frozenset(self._off(parts)))
        return self._outcomes[place]

    def _off(self, parts: Iterable[bytes]) -> set[str]:
        """Return the boundaries at which a rank deviates by more than noise."""
        tolerances = {boundary.key: boundary.tolerance for boundary in self.boundaries}
        found = set()
        for part in parts:
            norms: dict[str, Any] = decode(part, CellReport).facts["boundaries"]
            # Written so that NaN is a deviation.
            found |= {k for k, norm in norms.items() if not norm <= tolerances.get(k, math.inf)}
        return found

    def _ran(self, fed: list[str], *, is_watching: bool = False) -> tuple[CellSpec, list[bytes]]:
        """Run the step once more and return how, and what every rank reports."""
        self.runs += 1
        forcing = Forcing(
            self.run_name, self.step, self.folder, self.direction, fed, is_watching=is_watching
        )
        spec = msgspec.structs.replace(self.spec, forcing=forcing)
        answer = self.run.runner.run_cell(spec)
        if isinstance(answer, Failure):
            raise _Stopped(answer.reason)
        return spec, answer.parts


def _is_wrong(row: Row) -> bool:
    """Say whether a row is a mismatch."""
    return row.verdict == Verdict.MISMATCH


def _parent(module: str) -> str:
    """Return the path above a module's; the root for one of its own."""
    return module.rpartition(".")[0] or ROOT


def _common(left: str, right: str, known: set[str]) -> str:
    """Return the innermost module with boundaries that contains two."""
    if ROOT in (left, right):
        return ROOT
    shared: list[str] = []
    for one, other in zip(left.split("."), right.split("."), strict=False):
        if one != other:
            break
        shared.append(one)
    while shared and ".".join(shared) not in known:
        shared.pop()
    return ".".join(shared) or ROOT
