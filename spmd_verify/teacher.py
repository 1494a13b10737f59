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
from spmd_verify.style_ids import ENGINE, data_ranks
from spmd_verify.verdict import Verdict

if TYPE_CHECKING:
    from spmd_verify.run import _Run

# By the stage of the first divergence: what is fed in.
_DIRECTIONS: Final = {"module_outputs": "values", "loss": "values", "gradients": "gradients"}
ROOT: Final = "model"
# A scale within this share of 1 or of the ranks of a mean is that number.
_SCALE_NOISE: Final = 0.02
# Findings of boundaries that are fed wherever they are in front of the place that is tried.
_KNOWN: Final = ("right", "wrong")


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
    scales: list[float] = field(default_factory=list)
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
        self.most_runs = self.first_open = 0

    # -- the search --------------------------------------------------------------------------

    def found(self) -> tuple[str | None, list[str]]:
        """Return the line for the report, and the modules it names.

        Raises:
            _Stopped: A run failed, or nothing can be fed in.
        """
        self._watch()
        if self.direction == "values":
            self._explain()
            if not self._is_forward_wrong():
                self.direction = "gradients"
        if self.direction == "gradients":
            self._explain()
        own: set[str] = set()
        places = self._places(own)
        if not places:
            raise _Stopped("no boundary of a module can be held against the reference")
        left = self._left(places[-1], own)
        if not self._is_repaired(places[-1], left):
            return self._beyond(places[-1])
        while left and self._may_run():
            own |= left
            places = self._places(own)
            if not places:
                raise _Stopped(f"nothing that is fed in repairs the step ({self.runs} runs)")
            left = self._left(places[-1], own)
        high = self._extended(self._bisected(places, own), own)
        names = list(dict.fromkeys([*self._others(high), self._module_at(high)]))
        names = names if self.direction == "values" else names[::-1]
        return self._text(names, high), names

    def _is_forward_wrong(self) -> bool:
        """Say whether forward is to blame: the loss or what the model returns is wrong.

        Outputs inside may differ from one device's and be right all the same.
        """
        is_loss = any(row.stage == "loss" for row in self.rows.values())
        returned = [b for b in self.boundaries if b.module == ROOT and not b.is_input]
        has_gradients = any(row.stage == "gradients" for row in self.rows.values())
        return is_loss or not has_gradients or any(b.finding == "wrong" for b in returned)

    def _is_repaired(self, place: int, left: set[str]) -> bool:
        """Say whether feeding in everything repairs anything."""
        if self.direction == "values":
            return not left
        outcome = self._outcome(place)
        return any(r.stage == "gradients" and n not in outcome.wrong for n, r in self.rows.items())

    def _places(self, own: set[str]) -> list[int]:
        """Return the boundaries where something can be fed in that can make a difference."""
        return [
            i
            for i, boundary in enumerate(self.boundaries)
            if boundary.finding != "unknown" and self._due(i, own)
        ]

    def _bisected(self, places: list[int], own: set[str]) -> int:
        """Return the first boundary that removes the fault when all up to it are fed.

        First among those whose layout is known, as is that of all before them. Feeding what is
        right already changes nothing, so that search starts at the first that is wrong. Then
        the others in front of what was found, outer modules first: a summand is right inside a
        module that sums later, and feeding it as the whole sum repairs nothing.
        """
        solid = [i for i in places if self._is_solid(i)]
        first = next((i for i in solid if self.boundaries[i].finding == "wrong"), places[-1])
        low = max((i for i in solid if i < first), default=-1)
        low, high = self._between(low, places[-1], solid, own, first)
        depths = {i: self.boundaries[i].module.count(".") for i in places if i not in solid}
        for depth in sorted(set(depths.values())):
            level = [i for i, own_depth in depths.items() if own_depth == depth]
            low, high = self._between(low, high, level, own)
        return high

    def _is_solid(self, place: int) -> bool:
        """Say whether a boundary and all before it that matters can be fed."""
        return self.boundaries[place].finding in _KNOWN and place < self.first_open

    def _open(self) -> int:
        """Return the first boundary in doubt from which the module around never recovers.

        One that is followed by what is right in the same module does not matter: a summand
        without its bias, heads in another order.
        """
        for i, boundary in enumerate(self.boundaries):
            around = _parent(boundary.module)
            if boundary.finding == "doubtful" and not any(
                later.finding == "right" and _is_inside(later.module, around)
                for later in self.boundaries[i + 1 :]
            ):
                return i
        return len(self.boundaries)

    def _between(
        self, low: int, high: int, places: list[int], own: set[str], first: int | None = None
    ) -> tuple[int, int]:
        """Bisect over some of the boundaries between one that leaves the fault and one that not.

        Args:
            low: Leaves it; -1 for none.
            high: Removes it.
            places: In order; those not between are left out.
            own: Parameters that no feeding repairs.
            first: Where to begin; in the middle if left out.
        """
        while between := [i for i in places if low < i < high]:
            if not self._may_run():
                break
            i = first if first in between else between[len(between) // 2]
            if self._left(i, own):
                low = i
            else:
                high = i
            # The one next to a good guess decides; from then on in the middle.
            first = max((j for j in between if j < i), default=None) if first == i else None
        return low, high

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
            if self._may_run() and not self._left(high, own, i):
                return i
        return high

    def _others(self, high: int) -> list[str]:
        """Return the modules in front of a place that deviate though all they get is right."""
        off = self._outcome(high).off
        return [
            self._module_at(i)
            for i in range(high)
            if self._is_solid(i) and self.boundaries[i].key in off
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

    def _left(self, place: int, own: set[str], fed_at: int | None = None) -> set[str]:
        """Return what of that is still wrong when the reference is fed in there, or elsewhere."""
        outcome = self._outcome(place if fed_at is None else fed_at)
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
        known = self._known()
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
        before = self._before(place)
        here = self.boundaries[place]
        if before is None:
            return here.module if here.is_input != (self.direction == "values") else ROOT
        if here.finding == "summand" and before.module == here.module:
            # Who should have summed it: the module, or what contains it.
            parent = _parent(here.module)
            return here.module if parent == ROOT else _common(parent, parent, self._known())
        earlier, later = (before, here) if self.direction == "values" else (here, before)
        return _common(
            earlier.module if earlier.is_input else _parent(earlier.module),
            _parent(later.module) if later.is_input else later.module,
            self._known(),
        )

    def _before(self, place: int) -> Boundary | None:
        """Return the last boundary before a place that is right or was fed in."""
        solid = (self.boundaries[i] for i in range(place)[::-1] if self._is_solid(i))
        return next(solid, None)

    def _known(self) -> set[str]:
        """Return the modules that have boundaries."""
        return {boundary.module for boundary in self.boundaries}

    def _text(self, names: list[str], high: int) -> str:
        """Return the line that names modules."""
        what, rest = "value", "everything after it is right"
        if self.direction == "gradients":
            what, rest = "gradient", "every gradient computed from it is right"
        here = self.boundaries[high]
        at = _side(here)
        if names == [ROOT] and (before := self._before(high)) is not None:
            ends = (before, here) if self.direction == "values" else (here, before)
            names = [f"{ROOT}, between the {_side(ends[0])} and the {_side(ends[1])}"]
        text = f"{names[0]}: with the reference's {what} fed in at the {at} {rest}"
        if here.finding == "summand":
            text = (
                f"{names[0]}: the {what} at the {at} is each rank's summand; with the "
                f"reference's sum fed in there {rest}"
            )
        if len(names) > 1:
            text = f"{listed(names)}: each is wrong although all it gets is the reference's {what}"
        return f"{text} ({self.runs} runs)"

    def _beyond(self, last: int) -> tuple[str, list[str]]:
        """Say that feeding in the reference everywhere repairs nothing.

        Raises:
            _Stopped: It cannot be said why.
        """
        outcome = self._outcome(last)
        left = [name for name in self.rows if name in outcome.wrong]
        told = f"({self.runs} runs)"
        if self.direction == "values":
            if all(self.rows[name].stage == "loss" for name in left) and not outcome.off:
                what = "with the reference's value fed in at every module it is still wrong"
                return f"in the loss: {what} {told}", []
            raise _Stopped(f"nothing that is fed in repairs the step {told}")
        if any(boundary.finding == "wrong" for boundary in self.boundaries):
            raise _Stopped(f"nothing that is fed in repairs the gradients {told}")
        owners = list(dict.fromkeys(self._owner(name) for name in left))
        if len(owners) == 1 and owners != [ROOT]:
            what = "the gradient fed to it and the one it passes on are right, those of its own"
            return f"{owners[0]}: {what} parameters are not {told}", owners
        scale = self.scales[0] if self.scales else 1.0
        due = (1.0, float(data_ranks(self.spec.axes)))
        where, how = "after backward", "with the reference's gradient fed in at every module"
        if all(abs(scale / k - 1.0) > _SCALE_NOISE for k in due):
            where = f"in the scale of the loss ({scale:.6g} x what enters on one device) or {where}"
        return (
            f"{where}: every module's own backward is right; {how} the same gradients are wrong "
            f"{told}"
        ), []

    # -- runs --------------------------------------------------------------------------------

    def _may_run(self) -> bool:
        """Say whether there is time for another run."""
        return self.runs < self.most_runs and time.monotonic() < self.deadline

    def _watch(self) -> None:
        """Run the step once and keep what passes every boundary."""
        self._ran([], is_watching=True)

    def _explain(self) -> None:
        """Learn what every boundary is in the direction of flow, and what may be fed in."""
        request = ForcingRequest(msgspec.structs.replace(self.spec, forcing=self._forcing([])))
        answer = self.run.solo.run(
            FORCING_JOB, encode(request), timeout_seconds=self.spec.timeout_seconds
        )
        if isinstance(answer, Failure):
            raise _Stopped(answer.reason)
        plan = decode(answer[0], ForcingPlan)
        if plan.problem:
            raise _Stopped(f"one device cannot be watched: {plan.problem}")
        is_forward = self.direction == "values"
        self.boundaries = plan.boundaries if is_forward else plan.boundaries[::-1]
        self.first_open = self._open()
        self.scales = plan.scales
        self.most_runs = 2 * math.ceil(math.log2(max(len(self.boundaries), 2))) + 2

    def _outcome(self, place: int) -> _Outcome:
        """Return what is wrong with the reference fed in up to a boundary.

        A summand is fed in as the whole sum only where it is the last.
        """
        if place not in self._outcomes:
            fed = [b.key for b in self.boundaries[:place] if b.finding in _KNOWN]
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
        forcing = self._forcing(fed, is_watching=is_watching)
        spec = msgspec.structs.replace(self.spec, forcing=forcing)
        answer = self.run.runner.run_cell(spec)
        if isinstance(answer, Failure):
            raise _Stopped(answer.reason)
        return spec, answer.parts

    def _forcing(self, fed: list[str], *, is_watching: bool = False) -> Forcing:
        """Return what a run of the step is told."""
        return Forcing(
            self.run_name, self.step, self.folder, self.direction, fed, is_watching=is_watching
        )


def _side(boundary: Boundary) -> str:
    """Return where a boundary is, `input of blocks.0`."""
    return f"{'input' if boundary.is_input else 'output'} of {boundary.module}"


def _is_wrong(row: Row) -> bool:
    """Say whether a row is a mismatch."""
    return row.verdict == Verdict.MISMATCH


def _parent(module: str) -> str:
    """Return the path above a module's; the root for one of its own."""
    return module.rpartition(".")[0] or ROOT


def _is_inside(module: str, around: str) -> bool:
    """Say whether a module is one around it or below that."""
    return around in (ROOT, module) or module.startswith(f"{around}.")


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
