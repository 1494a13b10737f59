"""What planted faults said of one cell: the certificate in the record. Torch-free."""

from __future__ import annotations

import statistics
from typing import Any, Final

import msgspec

from spmd_verify.planting.faults import Fault
from spmd_verify.record import Cell

# 1: first version.
CERTIFICATE_VERSION: Final = 1

CAUGHT: Final = "caught"
SURVIVED: Final = "survived"
EQUIVALENT: Final = "equivalent"
NOT_PLANTED: Final = "not_planted"


class Sensitivity(msgspec.Struct, frozen=True):
    """How small an error of one gradient would be seen.

    Attributes:
        tensor: The parameter.
        relative: Smallest e for which `(1 + e) g` differs beyond the noise; None for a gradient
            that is zero or zero within its noise.
        step: The step that shows it.
        update: The same of the parameter's first update. A smaller error of the gradient is
            shown, and fails the cell only where something computed from it differs too.
    """

    tensor: str
    relative: float | None
    step: int | None = None
    update: float | None = None


class Outcome(msgspec.Struct, frozen=True):
    """What became of one fault.

    Attributes:
        kind: Of the fault.
        fault: In words.
        status: `caught`, `survived`, `equivalent` or `not_planted`.
        verdict: Of the cell it was planted in.
        cause: What the cell said, empty for nothing.
        expected: What would name the fault rightly.
        first: Where the cell first differed.
        note: What else is to be said.
    """

    kind: str
    fault: str
    status: str
    verdict: str
    cause: str = ""
    expected: list[str] = []
    first: str = ""
    note: str = ""

    @property
    def is_named(self) -> bool:
        """Say whether the cause was named rightly."""
        return self.status == CAUGHT and self.cause in self.expected


class Check(msgspec.Struct, frozen=True):
    """Whether the sensitivities are true: all gradients multiplied, and how many were seen.

    Attributes:
        of: Gradients with a sensitivity.
        seen_above: Seen with twice the smallest visible error.
        seen_below: Seen with half of it.
    """

    of: int
    seen_above: int
    seen_below: int


class Certificate(msgspec.Struct, frozen=True):
    """Everything certifying one cell found; `cells[].certificate` in the record.

    Attributes:
        outcomes: One per fault of the plan.
        sensitivities: One per trainable parameter.
        check: Of the sensitivities, None where it could not be run.
        collectives: How many one step has.
        version: Of this structure.
        notes: What else is to be said.
    """

    outcomes: list[Outcome]
    sensitivities: list[Sensitivity]
    check: Check | None = None
    collectives: int = 0
    version: int = CERTIFICATE_VERSION
    notes: list[str] = []

    def count(self, status: str, kind: str | None = None) -> int:
        """Count the faults of a status."""
        return sum(o.status == status and kind in (None, o.kind) for o in self.outcomes)

    @property
    def counted(self) -> int:
        """Return how many faults changed anything."""
        return self.count(CAUGHT) + self.count(SURVIVED)

    @property
    def named(self) -> int:
        """Return how many caught faults had their cause named rightly."""
        return sum(outcome.is_named for outcome in self.outcomes)

    @property
    def kill_rate(self) -> float | None:
        """Return the share caught; None where nothing could be counted."""
        return self.count(CAUGHT) / self.counted if self.counted else None

    @property
    def median(self) -> float | None:
        """Return the median over tensors of the smallest visible error."""
        seen = [entry.relative for entry in self.sensitivities if entry.relative is not None]
        return statistics.median(seen) if seen else None

    @property
    def worst(self) -> Sensitivity | None:
        """Return the tensor in which the largest error stays unseen."""
        seen = [entry for entry in self.sensitivities if entry.relative is not None]
        return max(seen, key=lambda entry: entry.relative or 0.0, default=None)


def outcome_of(
    fault: Fault, cell: Cell, *, is_caught: bool, is_changed: bool, note: str = ""
) -> Outcome:
    """Return what became of a fault.

    Args:
        fault: What was planted.
        cell: The cell it was planted in, judged.
        is_caught: Whether the cell fails.
        is_changed: Whether any number that is compared changed.
        note: What else is to be said.
    """
    status = CAUGHT if is_caught else SURVIVED if is_changed else EQUIVALENT
    if cell.verdict == "unsupported":
        status, note = NOT_PLANTED, cell.message
    first = cell.first_divergence
    return Outcome(
        kind=fault.kind,
        fault=fault.describe(),
        status=status,
        verdict=cell.verdict,
        cause=cell.cause.kind if cell.cause is not None else "",
        expected=sorted(fault.expected_causes),
        first="" if first is None else f"step {first.step}, {first.stage}, {first.tensor}",
        note=note,
    )


def put(cell: Cell, certificate: Certificate) -> None:
    """Put a certificate into a cell, with the figures a reader looks for first."""
    plain: dict[str, Any] = msgspec.to_builtins(certificate)
    worst = certificate.worst
    plain["summary"] = {
        "counted": certificate.counted,
        "caught": certificate.count(CAUGHT),
        "survived": certificate.count(SURVIVED),
        "equivalent": certificate.count(EQUIVALENT),
        "named": certificate.named,
        "median_relative": certificate.median,
        "worst_relative": worst.relative if worst else None,
        "worst_tensor": worst.tensor if worst else None,
    }
    cell.unknown["certificate"] = plain


def is_open(cell: Cell) -> bool:
    """Say whether a cell is not certified: a fault survived, or none could be counted."""
    certificate = of(cell)
    return certificate is None or certificate.kill_rate != 1.0


def of(cell: Cell) -> Certificate | None:
    """Return the certificate of a cell of any record, None where it has none."""
    plain = cell.unknown.get("certificate")
    return None if plain is None else msgspec.convert(plain, Certificate)
