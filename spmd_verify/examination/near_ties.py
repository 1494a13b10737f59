"""Near ties of the reference: decisions that its own noise could have taken otherwise.

The reference's decisions are recorded once. Then its program runs in float64 and under random
rounding, and follows them: what such a run would decide otherwise it decides as the reference
did, so that its values differ by noise alone and never by what a flip makes of it. A decision
is a near tie where its margin is within c times the noise of the row that was decided.
Docs: docs/design.md 3.10. All tensors are global.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from spmd_verify.cases.case import LoadedCase
from spmd_verify.exact.case import ExactCase
from spmd_verify.noise.members import Plain, Rounded
from spmd_verify.noise.runs import FEWEST_RUNS
from spmd_verify.record import Tie
from spmd_verify.reference.float64_mode import CaseDtypeDraws, user_place
from spmd_verify.reference.single import SingleDevice
from spmd_verify.reference.trajectory import Trajectory
from spmd_verify.runner.jobs import loaded
from spmd_verify.runner.specs import TiesReport, TiesRequest, decode, encode
from spmd_verify.runner.worker import Context, job
from spmd_verify.stored.store import Store
from spmd_verify.ties.deciding import Call
from spmd_verify.ties.deciding_mode import DecidingMode
from spmd_verify.ties.forcing import NearTie, farthest
from spmd_verify.verdict import limit, unit_roundoff

# Seeds of the random rounding, away from those of the noise runs: other draws say more.
_FIRST_SEED: Final = 101


@job
def find_ties(context: Context, payload: bytes) -> bytes:
    """Write the near ties of a case to a file: `TiesRequest -> TiesReport`."""
    request = decode(payload, TiesRequest)
    case = loaded(context, request.case)
    found: list[NearTie] = []
    if not isinstance(case, ExactCase):  # it has no noise that could decide
        has_float64 = Store(request.store_path).index.absent is None
        with case.on_one_device():
            found = near_ties(case, has_float64=has_float64)
    Path(request.path).write_bytes(encode(found))
    return encode(TiesReport([near.tie for near in found]))


def near_ties(case: LoadedCase, *, has_float64: bool = True) -> list[NearTie]:
    """Return the near ties of all steps, of the free run and of the anchored steps >= 1.

    Args:
        case: The case.
        has_float64: Whether its step can run in float64.
    """
    device = SingleDevice(case)
    recording = Recording()
    reference = device.run(modes=recording.at, evaluation=recording.again)
    found: list[NearTie] = []
    if not recording.decisions:
        return found
    for run in ("free", "anchored")[: 1 + (case.steps > 1)]:
        anchors = reference if run == "anchored" else None
        noise = _measured(device, recording, anchors, has_float64=has_float64)
        for key, decision in recording.decisions.items():
            if key in noise and not (run == "anchored" and key[0] == 0):
                found += noise[key].near_ties(run, key[0], decision)
    return found


@dataclass(frozen=True)
class Decision:
    """What the reference decided in one call.

    Attributes:
        call: The call; its operands may have been overwritten since.
        place: `file:line` of the user's code, `backward` without one.
        rows: Copies of the operands, in the case's dtype, [R, n] each.
        sides: See `deciding.Decider`, [R, m].
    """

    call: Call
    place: str
    rows: list[Tensor]
    sides: Tensor


# Step and position of a call among the decisions of that step.
Key = tuple[int, int]


@dataclass
class _Counting:
    """Counts the decisions of a step."""

    _step: int = 0
    _position: int = -1

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Return the context of a step."""
        self._step, self._position = step, -1
        with self.again():
            yield

    def again(self) -> AbstractContextManager[Any]:
        """Return the context of an eval forward, counted with the step before it."""
        return DecidingMode(self.choose)

    def choose(self, call: Call, rows: list[Tensor], sides: Tensor) -> list[Tensor] | None:
        """Look at one decision, see `deciding.Choice`."""
        self._position += 1
        return self.chosen((self._step, self._position), call, rows, sides)

    def chosen(
        self, key: Key, call: Call, rows: list[Tensor], sides: Tensor
    ) -> list[Tensor] | None:
        """Look at a decision that was counted."""
        raise NotImplementedError


@dataclass
class Recording(_Counting):
    """Keeps every decision of a run."""

    decisions: dict[Key, Decision] = field(default_factory=dict)

    def chosen(self, key: Key, call: Call, rows: list[Tensor], sides: Tensor) -> None:
        """Keep one decision."""
        kept = [row.detach().clone() for row in rows]
        self.decisions[key] = Decision(call, user_place(), kept, sides)


@dataclass
class Noise:
    """Noise of the rows of one decision.

    Attributes:
        centre: The operands in float64, [R, n] each.
        error: Largest error of a value of each row over the runs, [R].
    """

    centre: list[Tensor]
    error: Tensor

    @classmethod
    def around(cls, centre: list[Tensor]) -> Noise:
        """Return what is known before any run: none."""
        return cls(centre, torch.zeros(len(centre[0]), dtype=torch.float64))

    def add(self, rows: Sequence[Tensor]) -> None:
        """Take in the rows of one run."""
        for centre, row in zip(self.centre, rows, strict=True):
            self.error = torch.maximum(self.error, farthest(row, centre))

    def near_ties(self, run: str, step: int, decision: Decision) -> Iterator[NearTie]:
        """Give the rows whose decision is within their noise.

        The noise of a row is `max(largest error, 2 u |largest value|)`, as a tensor's floor is.
        """
        dtype = str(decision.rows[0].dtype).removeprefix("torch.")
        largest = torch.stack([_finite(row).abs().amax(1) for row in self.centre]).amax(0)
        noise = torch.maximum(self.error, 2.0 * unit_roundoff(dtype) * largest)
        allowed = limit(dtype, "row") * noise
        exact = [row.to(torch.float64) for row in decision.rows]
        margins = decision.call.decider.margins(decision.call, exact)
        is_elementwise = decision.call.decider.is_elementwise
        if not is_elementwise:
            margins = margins[:, None]
        is_usable = (noise > 0) & noise.isfinite()
        near = (margins <= allowed[:, None]) & is_usable[:, None]
        for row in near.any(1).nonzero()[:, 0].tolist():
            at = near[row].nonzero()[:, 0]
            yield NearTie(
                Tie(
                    operator=decision.call.name.partition(".")[0],
                    source=decision.place,
                    step=step,
                    run=run,
                    margin=float(margins[row].min()),
                    noise=float(noise[row]),
                ),
                [value[row].tolist() for value in exact],
                [value[row].tolist() for value in self.centre],
                float(allowed[row]),
                at.tolist() if is_elementwise else [],
                (decision.sides[row, at] if is_elementwise else decision.sides[row]).tolist(),
            )


@dataclass
class Following(_Counting):
    """Decides as the reference did and measures how far its operands are from it.

    Attributes:
        decisions: The reference's.
        noise: By decision; those that no run reached are absent.
        is_exact: This run is the float64 one, whose operands are what errors are taken from.
    """

    decisions: dict[Key, Decision] = field(default_factory=dict)
    noise: dict[Key, Noise] = field(default_factory=dict)
    is_exact: bool = False
    _lost_in: int = -1

    def chosen(
        self, key: Key, call: Call, rows: list[Tensor], sides: Tensor
    ) -> list[Tensor] | None:
        """Measure one decision and take it as the reference did.

        A step that comes to another operator than the reference did is not followed further:
        its later decisions cannot be told apart.
        """
        known = self.decisions.get(key)
        shapes = None if known is None else [row.shape for row in known.rows]
        is_same = known is not None and known.call.name == call.name
        if self._lost_in == key[0] or not is_same or shapes != [row.shape for row in rows]:
            self._lost_in = key[0]
            self.noise.pop(key, None)
            return None
        assert known is not None, "it has a name"
        if self.is_exact:
            self.noise[key] = Noise.around([row.detach().to(torch.float64) for row in rows])
            self.noise[key].add(known.rows)
        elif key in self.noise:
            self.noise[key].add(rows)
        changed = sides != known.sides
        if not bool(changed.any()):
            return None
        if not call.decider.is_elementwise:
            changed = changed.any(1, keepdim=True)
        return [
            torch.where(changed, old.to(row.dtype), row)
            for old, row in zip(known.rows, rows, strict=True)
        ]


@dataclass
class _Followed(Plain):
    """Random rounding that takes the reference's decisions."""

    rounded: Rounded
    following: Following

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Run the step rounded, its decisions seen before they are."""
        with self.rounded.around(step), self.following.at(step):
            yield


def _measured(
    device: SingleDevice, recording: Recording, anchors: Trajectory | None, *, has_float64: bool
) -> dict[Key, Noise]:
    """Return the noise of every decision that the float64 run and random rounding reach."""
    case = device.case
    following = Following(decisions=recording.decisions)
    options: dict[str, Any] = {
        "anchors": anchors, "evaluation": following.again, "with_module_outputs": False,
    }  # fmt: skip
    if has_float64 and case.dtype != torch.float64:
        following.is_exact = True

        @contextmanager
        def modes(step: int) -> Iterator[None]:
            with ExitStack() as stack:
                stack.enter_context(CaseDtypeDraws(case.dtype))
                stack.enter_context(following.at(step))
                yield

        device.run(in_float64=True, modes=modes, **options)
        following.is_exact = False
    else:
        following.noise = {
            key: Noise.around([row.to(torch.float64) for row in decision.rows])
            for key, decision in recording.decisions.items()
        }
    for index in range(FEWEST_RUNS):
        rounded = Rounded(f"random rounding {index}", _FIRST_SEED + index, case.dtype)
        member = _Followed(rounded.name, rounded, following)
        device.run(member=member, **options)
    return following.noise


def _finite(value: Tensor) -> Tensor:
    """Return a tensor with zeros for infinities and NaN."""
    return value.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
