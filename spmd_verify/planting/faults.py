"""What can be planted and what a dry run sees, as plain data that crosses processes. Torch-free.

The kinds, what each does and which cause would name it rightly: docs/design.md 3.9.
"""

from __future__ import annotations

from typing import Final

import msgspec

# Changes what the ranks send in one collective, or the group they send it in.
PAYLOAD_KINDS: Final = (
    "drop",
    "double",
    "rescale",
    "wrong_operation",
    "wrong_group",
    "shift",
    "zero_rank",
)
# Changes what the ranks hold around the step.
STATE_KINDS: Final = ("stale", "skip_buffer", "reseed")
KINDS: Final = (*PAYLOAD_KINDS, *STATE_KINDS)

# Watches and plants nothing.
DRY_RUN: Final = "dry_run"
# Multiplies observed gradients; checks the sensitivities.
GRADIENT_FACTOR: Final = "gradient_factor"

# Words of `cause.kind` (verdicts.md part 7) that name a planted kind rightly; `KIND OPERATOR`
# where it differs for one collective: what is gathered is placed, not reduced.
EXPECTED_CAUSES: Final[dict[str, frozenset[str]]] = {
    "drop": frozenset({"missing_reduction", "no_sync"}),
    "double": frozenset({"factor", "double_reduction"}),
    "rescale": frozenset({"factor"}),
    "wrong_operation": frozenset({"factor"}),
    "wrong_group": frozenset({"missing_reduction", "no_sync", "factor"}),
    "shift": frozenset({"layout"}),
    "zero_rank": frozenset({"factor", "missing_reduction"}),
    "stale": frozenset({"stale"}),
    "skip_buffer": frozenset({"buffer"}),
    "reseed": frozenset({"random_stream"}),
    "drop all_gather": frozenset({"layout", "missing_reduction", "no_sync"}),
    "drop all_to_all": frozenset({"layout", "missing_reduction", "no_sync"}),
}

# Half of the ranks, as the group of a `wrong_group` where no other axis fits.
HALF: Final = "half of the ranks"


class Collective(msgspec.Struct, frozen=True):
    """One collective of one step, as every rank of its axis counts it.

    Attributes:
        operator: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`,
            `reduce`, `gather`, `scatter`, `send`.
        axis: Mesh axis it runs over; axes joined by commas for the whole mesh; else its ranks.
        nth: Which of its operator and axis, in the order of the step, from 0.
        size: Ranks in its group.
        reduction: `sum`, `avg`, ..., empty where nothing is reduced.
        payload_bytes: What this rank puts in; 0 for a step that was not run.
        rows: Length of dim 0 of the longest tensor put in, 1 for a number; 0 if not run.
        is_floating: Whether the payload rounds; assumed if not run.
        line: The user's `file:line` that asked for it, empty where none did.
        ranks: Who takes part, as far as known.
    """

    operator: str
    axis: str
    nth: int
    size: int
    reduction: str = ""
    payload_bytes: int = 0
    rows: int = 0
    is_floating: bool = True
    line: str = ""
    ranks: list[int] = []

    @property
    def key(self) -> tuple[str, str, int]:
        """Return what names it on every rank."""
        return self.operator, self.axis, self.nth

    def describe(self) -> str:
        """Return it in words."""
        where = f" at {self.line}" if self.line else ""
        return f"{self.operator} {self.nth} over {self.axis}{where}"


class Fault(msgspec.Struct, frozen=True):
    """One fault.

    Attributes:
        kind: One of `KINDS`, `DRY_RUN` or `GRADIENT_FACTOR`.
        operator: With `axis` and `nth`, the collective; see `Collective`.
        axis: See `operator`.
        nth: See `operator`.
        tensor: Name of the parameter or buffer.
        factor: What a payload is multiplied by.
        rank: The rank concerned, where it is one.
        group: The axis used instead, or `HALF`.
        factors: By gradient, what it is multiplied by.
        line: The collective's line, for people.
    """

    kind: str
    operator: str = ""
    axis: str = ""
    nth: int = 0
    tensor: str = ""
    factor: float = 1.0
    rank: int = 0
    group: str = ""
    factors: dict[str, float] = {}
    line: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """Return the name of its collective on every rank."""
        return self.operator, self.axis, self.nth

    @property
    def has_cause(self) -> bool:
        """Say whether a cell with it is asked for its cause."""
        return self.kind in KINDS

    @property
    def expected_causes(self) -> frozenset[str]:
        """Return what would name it rightly."""
        kind = EXPECTED_CAUSES.get(self.kind, frozenset())
        return EXPECTED_CAUSES.get(f"{self.kind} {self.operator}", kind)

    def describe(self) -> str:
        """Return it in words, without its kind."""
        if self.kind in ("stale", "skip_buffer"):
            who = f" on rank {self.rank}" if self.kind == "skip_buffer" else ""
            return f"{self.tensor}{who}"
        if self.kind == "reseed":
            return f"rank {self.rank}"
        where = f" at {self.line}" if self.line else ""
        what = f"{self.operator} {self.nth} over {self.axis}{where}"
        if self.kind in ("double", "rescale", "wrong_operation"):
            return f"{what}: x {self.factor:.12g}"
        if self.kind == "zero_rank":
            return f"{what}: rank {self.rank}"
        return f"{what}: {self.group}" if self.kind == "wrong_group" else what


class Watched(msgspec.Struct, frozen=True):
    """What one process of a planted cell saw.

    Attributes:
        fingerprint: Of every number it compared, in order.
        collectives: Of the first step.
        has_changed: Whether the fault changed what this process sends.
        is_graph: Whether faults are planted into a graph.
    """

    fingerprint: str
    collectives: list[Collective]
    has_changed: bool
    is_graph: bool
