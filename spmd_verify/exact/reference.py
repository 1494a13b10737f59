"""The reference of a case in exact mode: every step alone, with the proof that it is exact.

All tensors are global. Normative: docs/design.md part 3.8.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor, nn

from spmd_verify.exact.case import ExactCase
from spmd_verify.exact.proof import PRECISION, ExactnessProof
from spmd_verify.noise.floors import Floor, Key
from spmd_verify.noise.members import Plain
from spmd_verify.noise.runs import Noise, measure
from spmd_verify.record import ExactInfo
from spmd_verify.reference.float64_mode import to_float64
from spmd_verify.reference.observe import INNER_STAGES
from spmd_verify.reference.single import Reference, SingleDevice, make_reference
from spmd_verify.reference.trajectory import Trajectory, named_buffers, named_parameters, same_bits

# A value may lie on the edge of a grid by chance; another draw of the step's state does not.
# Chosen, not measured.
DRAWS: Final = 5
Doubts = dict[tuple[str, str], str]  # (stage, name) -> why


@dataclass(frozen=True)
class ExactReference:
    """What one device computes of a case in exact mode.

    Attributes:
        device: Runs the first step.
        reference: All steps; `anchored` is None.
        noise: Floors of the rows in doubt; the others are compared bit for bit.
        info: What the report says.
    """

    device: SingleDevice
    reference: Reference
    noise: Noise
    info: ExactInfo

    @property
    def parts(self) -> tuple[SingleDevice, Reference, Noise, ExactInfo]:
        """Return the four attributes in order."""
        return self.device, self.reference, self.noise, self.info


@dataclass
class _Proved(Plain):
    """A run of one step that is proved; its doubts by tensor."""

    proof: ExactnessProof = field(default_factory=ExactnessProof)
    doubts: Doubts = field(default_factory=dict)

    @contextmanager
    def around(self, step: int) -> Iterator[None]:  # noqa: ARG002 - there is one step
        """Run the step under the proof."""
        with self.proof:
            yield

    def after(self, model: nn.Module, step: int) -> None:  # noqa: ARG002 - as above
        """Note what is in doubt of the model."""
        self.take("parameters", named_parameters(model)[0])
        self.take("buffers", named_buffers(model)[0])

    def take(self, stage: str, tensors: Mapping[str, Tensor]) -> None:
        """Note what is in doubt of one stage."""
        for name, tensor in tensors.items():
            if (why := self.proof.doubt_of(tensor)) is not None:
                self.doubts[stage, name] = why


@dataclass
class _Step:
    """One step of the case, a case of its own."""

    device: SingleDevice
    reference: Reference
    noise: Noise | None
    member: _Proved
    draw: int

    @classmethod
    def of(cls, case: ExactCase, index: int) -> _Step:
        """Run a step, prove it, and measure its noise where something is in doubt."""
        draw, member = _first_without_doubt(case, index)
        device, reference = make_reference(case.at(index, draw))
        for trajectory in (reference.run, reference.exact):
            if trajectory is not None:
                trajectory.steps[0].pop("eval_outputs", None)
        member.doubts |= _unconfirmed(reference, member.doubts)
        noise = measure(device, reference) if member.doubts else None
        return cls(device, reference, noise, member, draw)

    def floors(self, index: int) -> dict[Key, Floor]:
        """Return the floors of the rows in doubt, as those of step `index`."""
        measured = {} if self.noise is None else self.noise.floors["free"]
        return {
            (index, stage, name): floor
            for (_, stage, name), floor in measured.items()
            if (stage, name) in self.member.doubts
        }


def make_exact_reference(case: ExactCase) -> ExactReference:
    """Run every step of a case on one device and prove what is exact of it.

    Raises:
        ReferenceRunError: `not-deterministic`, `reference-not-finite`.
    """
    steps = [_Step.of(case, index) for index in range(case.steps)]
    references = [step.reference for step in steps]
    exact = [reference.exact for reference in references if reference.exact is not None]
    reference = Reference(
        run=_joined([reference.run for reference in references]),
        exact=_joined(exact) if len(exact) == len(steps) else None,
        anchored=None,
        absent=next((each.absent for each in references if each.absent is not None), None),
    )
    measured = [step.noise for step in steps if step.noise is not None]
    floors: dict[Key, Floor] = {}
    for index, step in enumerate(steps):
        floors |= step.floors(index)
    noise = Noise(
        floors={"free": floors, "anchored": {}},
        runs=tuple(dict.fromkeys(name for each in measured for name in each.runs)),
        dropped=tuple(dict.fromkeys(why for each in measured for why in each.dropped)),
        islands=tuple(dict.fromkeys(place for each in measured for place in each.islands)),
        undetermined=sum(each.undetermined for each in measured),
    )
    return ExactReference(steps[0].device, reference, noise, _info(case, steps))


def _first_without_doubt(case: ExactCase, index: int) -> tuple[int, _Proved]:
    """Prove draws of a step until one leaves no doubt; else the one that leaves least."""
    found: list[_Proved] = []
    for draw in range(DRAWS):
        member = _Proved("proof")
        with case.on_one_device():
            proved = SingleDevice(case.at(index, draw)).run(member=member, steps=1).steps[0]
        for stage in INNER_STAGES:
            member.take(stage, proved[stage])
        found.append(member)
        if not member.doubts:
            break
    least = min(found, key=lambda member: len(member.doubts))
    return found.index(least), least


def _info(case: ExactCase, steps: Sequence[_Step]) -> ExactInfo:
    """Put what the proofs found into the record's form."""
    proofs = [step.member.proof for step in steps]
    widest = max(proofs, key=lambda proof: proof.bits)
    named = [*(why for proof in proofs for why in proof.doubts)]
    unnamed = [why for step in steps for why in step.member.doubts.values()]
    return ExactInfo(
        bits=widest.bits,
        precision=PRECISION[case.dtype],
        where=widest.where,
        surrogates=list(case.replaced),
        # In the order in which they arose; an operator without any effect is no doubt.
        doubts=[why for why in dict.fromkeys([*named, *unnamed]) if why in unnamed],
        draws=[step.draw for step in steps],
    )


def _unconfirmed(reference: Reference, known: Doubts) -> Doubts:
    """Return the rows without doubt to which float64 gives another value."""
    if reference.exact is None:
        return {}
    twin = reference.exact.steps[0]
    return {
        (stage, name): f"float64 gives another value: {stage} {name}"
        for stage, tensors in reference.run.steps[0].items()
        for name, value in tensors.items()
        if (stage, name) not in known and name in twin.get(stage, {})
        if not same_bits(to_float64(value), to_float64(twin[stage][name]))
    }


def _joined(parts: Sequence[Trajectory]) -> Trajectory:
    """Return trajectories of one step each as one of several."""
    return Trajectory(
        steps=[step for part in parts for step in part.steps],
        hyper_parameters=[each for part in parts for each in part.hyper_parameters],
        random_states=[state for part in parts for state in part.random_states],
        aliases=parts[0].aliases,
        notes=list(dict.fromkeys(note for part in parts for note in part.notes)),
    )
