"""Everything that is known of a failing cell, in one process: see docs/design.md 3.7.

All tensors are float64. Locals are what ranks hold; "global" is the single-device tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.cases.case import LoadedCase
from spmd_verify.causes.part_runs import PartRuns, Term
from spmd_verify.compare import layouts
from spmd_verify.dumps.dump import Dump
from spmd_verify.layouts import (
    Coordinate,
    Region,
    partial_axes,
    put_region,
    region,
    take_region,
)
from spmd_verify.measure import digest
from spmd_verify.noise.members import map_batch
from spmd_verify.norms import as_real
from spmd_verify.parts import rank_part
from spmd_verify.record import Row
from spmd_verify.reference.trajectory import StepRecord
from spmd_verify.seen_inputs import SeenInputs
from spmd_verify.stored.store import Store
from spmd_verify.style_ids import DATA_AXES
from spmd_verify.verdict import Verdict, limit

# Samples of a batch that are run one by one.
MOST_SAMPLES = 32
_MISMATCH = str(Verdict.MISMATCH)


@dataclass(frozen=True)
class Piece:
    """One forward of one rank, run alone on one device.

    Attributes:
        coordinate: The first rank that has this part.
        call: Which call of the step.
        batch: Its samples.
        record: What they give, float64.
    """

    coordinate: Coordinate
    call: int
    batch: Any
    record: StepRecord


@dataclass
class Exhibit:
    """One failing cell.

    Attributes:
        case: The case.
        store: The reference.
        dump: What the ranks held.
        style: Its name.
        axes: Mesh axes, `{name: ranks}`.
        facts: What processes said of the style, one value per process.
        rows: All rows of the cell, in order; settled before causes are looked for.
        run: Of the first divergence.
        step: Likewise.
        experiments: What other runs told: whether the cell passes there, None if unknown.
        is_unclipped: Whether a clipping by hand has been divided out of the gradients.
    """

    case: LoadedCase
    store: Store
    dump: Dump
    style: str
    axes: Mapping[str, int]
    facts: Mapping[str, Sequence[Any]]
    rows: list[Row]
    run: str
    step: int
    experiments: Mapping[str, bool | None] = field(default_factory=dict)
    is_unclipped: bool = False

    def __post_init__(self) -> None:
        """Index the rows."""
        self.shape = tuple(self.axes.values())
        self.by_key = {(r.run, r.step, r.stage, r.name): r for r in self.rows}
        self._guesses: dict[tuple[str, int, str, str], dict[Coordinate, Region]] = {}
        self._locals: dict[tuple[str, int, str, str], dict[Coordinate, Tensor]] = {}

    # -- rows --------------------------------------------------------------------------------

    def mismatches(self, stage: str, step: int | None = None) -> list[Row]:
        """Return the rows of a stage that are mismatches in the step."""
        at = self.step if step is None else step
        return [
            r
            for r in self.rows
            if r.stage == stage and r.step == at and r.verdict == _MISMATCH and self.is_known(r)
        ]

    def mismatches_of_numbers(self, step: int) -> list[Row]:
        """Return the hyper-parameters that differ before a step."""
        rows = (r for r in self.rows if r.stage == "inputs" and r.step == step)
        return [r for r in rows if r.verdict == _MISMATCH and not self.is_known(r)]

    def stage_rows(self, stage: str, step: int | None = None) -> list[Row]:
        """Return all rows of a stage of the step."""
        at = self.step if step is None else step
        return [r for r in self.rows if r.stage == stage and r.step == at and self.is_known(r)]

    def is_known(self, row: Row) -> bool:
        """Say whether one device has the tensor at all."""
        return self.store.entry(row.step, row.stage, row.name) is not None

    def is_right(self, stage: str) -> bool:
        """Say whether a stage has no mismatch in the step."""
        return not self.mismatches(stage)

    def tolerance(self, row: Row) -> float:
        """Return the error that is still noise, as a norm."""
        dtype = row.dtype if row.dtype.startswith(("float", "bfloat", "complex")) else "float32"
        return limit(dtype, "tensor") * max(row.noise or 0.0, 1e-300)

    def multiple(self, row: Row, left: float) -> float:
        """Return a norm as a multiple of the row's noise; inf where there is none."""
        return left / row.noise if row.noise else math.inf

    # -- tensors -----------------------------------------------------------------------------

    def reference(self, row: Row, step: int | None = None) -> Tensor:
        """Return what the row is judged against, or the same tensor of another step."""
        at = row.step if step is None else step
        value = self.store.exact(row.run, at, row.stage, row.name)
        return as_real(value).to(torch.float64)

    def locals(self, row: Row, step: int | None = None) -> dict[Coordinate, Tensor]:
        """Return what the ranks held, by coordinate; the first tensor of a name each."""
        key = (row.run, row.step if step is None else step, row.stage, row.name)
        if key not in self._locals:
            text = "|".join(map(str, key))
            held = self.dump.locals(text) if text in self.dump else {}
            self._locals[key] = {at: as_real(local).to(torch.float64) for at, local in held.items()}
        return self._locals[key]

    def called(self, stage: str, base: str) -> list[dict[Coordinate, Tensor]]:
        """Return what ranks held of every call of a module, one device had or not."""
        prefix = f"{self.run}|{self.step}|{stage}|{base}"
        keys = [key for key in self.dump if key.partition("#")[0] == prefix]
        return [
            {at: as_real(local).to(torch.float64) for at, local in self.dump.locals(key).items()}
            for key in keys
        ]

    def region(self, row: Row, coordinate: Coordinate) -> Region | None:
        """Return what a rank's tensor is of the global one; None where nothing fits."""
        text = f"{row.run}|{row.step}|{row.stage}|{row.name}"
        layout = self.dump.layout(text, coordinate)
        if layout is not None and not partial_axes(layout):
            return region(row.shape, layout, self.shape, coordinate)
        return self._guessed(row).get(coordinate)

    def _guessed(self, row: Row) -> dict[Coordinate, Region]:
        """Return the parts that undeclared tensors are closest to, one layout for all ranks."""
        key = (row.run, row.step, row.stage, row.name)
        if key in self._guesses:
            return self._guesses[key]
        held, whole = self.locals(row), self.reference(row)
        best: tuple[float, dict[Coordinate, Region]] = (math.inf, {})
        for layout in layouts(row.shape, self.shape):
            parts = {at: region(row.shape, layout, self.shape, at) for at in held}
            if any(parts[at].shape != tuple(local.shape) for at, local in held.items()):
                continue
            # Right parts count first: a fault of some ranks must not hide what the layout is.
            errors = [
                float((local - take_region(whole, parts[at])).norm()) for at, local in held.items()
            ]
            wrong = sum(error > self.tolerance(row) for error in errors)
            found = (wrong + math.tanh(math.fsum(errors)), parts)
            best = min(best, found, key=lambda each: each[0])
        self._guesses[key] = best[1]
        return best[1]

    def regions(self, row: Row) -> dict[Region, list[Coordinate]]:
        """Return the ranks that hold each part."""
        found: dict[Region, list[Coordinate]] = {}
        for coordinate in self.locals(row):
            part = self.region(row, coordinate)
            if part is not None:
                found.setdefault(part, []).append(coordinate)
        return found

    def assembled(self, row: Row, step: int | None = None) -> Tensor | None:
        """Return the candidate's global tensor; of copies the first rank's. None with holes."""
        held = self.locals(row, step)
        value = torch.full(tuple(self.reference(row).shape), math.nan, dtype=torch.float64)
        for part, coordinates in self.regions(row).items():
            local = held.get(coordinates[0])
            if local is None:
                return None
            put_region(value, part, local)
        return None if bool(value.isnan().any()) else value

    def divided(self, factors: Mapping[Coordinate, float]) -> Exhibit:
        """Return the exhibit with every rank's gradients divided by a factor of its own."""
        other = replace(self, is_unclipped=True)
        for row in self.stage_rows("gradients"):
            key = (row.run, row.step, row.stage, row.name)
            held = self.locals(row).items()
            other._locals[key] = {at: local / factors[at] for at, local in held}
        return other

    def settle(self, stage: str, names: Iterable[str]) -> None:
        """Note that tensors of the step are right after all."""
        known = set(names)
        self.rows = [
            msgspec.structs.replace(r, verdict=str(Verdict.ROUNDING))
            if r.stage == stage and r.step == self.step and r.name in known
            else r
            for r in self.rows
        ]

    def copies_differ(self, row: Row) -> bool:
        """Say whether ranks that should hold the same part do not."""
        tolerance, held = self.tolerance(row), self.locals(row)
        return any(
            float((held[at] - held[group[0]]).norm()) > tolerance
            for group in self.regions(row).values()
            for at in group[1:]
        )

    def lines(self, axis: str, coordinates: Iterable[Coordinate]) -> list[list[Coordinate]]:
        """Return the groups of ranks that differ only along an axis, complete ones."""
        at = list(self.axes).index(axis)
        groups: dict[Coordinate, list[Coordinate]] = {}
        for coordinate in coordinates:
            groups.setdefault((*coordinate[:at], *coordinate[at + 1 :]), []).append(coordinate)
        return [group for group in groups.values() if len(group) == self.axes[axis]]

    @property
    def wide_axes(self) -> list[str]:
        """Return the axes of more than one rank."""
        return [axis for axis, size in self.axes.items() if size > 1]

    def is_data_axis(self, axis: str) -> bool:
        """Say whether ranks of an axis train on other samples."""
        return axis in DATA_AXES

    def rank_of(self, coordinate: Coordinate) -> int:
        """Return a coordinate's rank."""
        return self.dump.ranks[coordinate]

    def fact(self, name: str) -> Any:
        """Return a fact of the first process that has it."""
        return next((value for value in self.facts.get(name, ()) if value is not None), None)

    # -- what one device makes of parts ------------------------------------------------------

    @cached_property
    def runs(self) -> PartRuns:
        """Return the maker of single-device steps."""
        return PartRuns(self.case, self.store, self.run, self.step)

    @cached_property
    def batch(self) -> Any:
        """Return the global batch of the step."""
        return self.case.batch(self.step)

    @cached_property
    def seen(self) -> SeenInputs:
        """Return which slices of the global inputs reached each rank's forward."""
        return SeenInputs.of(self.case, self.store, self.dump, self.run, self.step)

    @cached_property
    def part_batches(self) -> dict[Coordinate, Any]:
        """Return each rank's part of the batch: what its forward saw, else what it was given."""
        found = {}
        for coordinate in self.dump.ranks:
            given = rank_part(self.case, self.style, self.axes, coordinate, self.batch)
            found[coordinate] = self.seen.part(self.batch, coordinate) or given
        return found

    @cached_property
    def _by_part(self) -> tuple[dict[str, Any], dict[Coordinate, str]]:
        """Return the distinct parts by a digest, and each rank's."""
        distinct: dict[str, Any] = {}
        owner: dict[Coordinate, str] = {}
        for coordinate, part in self.part_batches.items():
            key = _digest(part)
            distinct.setdefault(key, part)
            owner[coordinate] = key
        return distinct, owner

    @cached_property
    def part_records(self) -> dict[Coordinate, StepRecord]:
        """Return what one device computes on each rank's part; ranks whose part fails lack."""
        return self._of_parts(in_float64=True)

    @cached_property
    def rounded_part_records(self) -> dict[Coordinate, StepRecord]:
        """Return the same in the case's dtype."""
        return self._of_parts(in_float64=False)

    def _of_parts(self, *, in_float64: bool) -> dict[Coordinate, StepRecord]:
        """Return one device's step on each rank's part."""
        distinct, owner = self._by_part
        records = {k: self.runs.record(part, in_float64=in_float64) for k, part in distinct.items()}
        found = {at: records[key] for at, key in owner.items()}
        return {at: record for at, record in found.items() if record is not None}

    @cached_property
    def alike(self) -> dict[str, list[Coordinate]]:
        """Return the ranks of every distinct part of the batch, in rank order."""
        found: dict[str, list[Coordinate]] = {}
        for coordinate, key in self._by_part[1].items():
            found.setdefault(key, []).append(coordinate)
        return found

    @cached_property
    def distinct_parts(self) -> list[Coordinate]:
        """Return one rank per distinct part of the batch, in rank order."""
        return [same[0] for same in self.alike.values() if same[0] in self.part_records]

    @cached_property
    def pieces(self) -> list[Piece]:
        """Return what each forward of each rank gives alone: distinct parts, cut by calls.

        Every piece counts with a weight in the reference; see `weights`.
        """
        found = []
        several = [at for at in self.distinct_parts if self.seen.calls(at) > 1]
        for at in several or self.distinct_parts:
            calls = self.seen.calls(at)
            if calls < 2:
                found.append(Piece(at, 0, self.part_batches[at], self.part_records[at]))
                continue
            for call in range(calls):
                batch = self.seen.part(self.batch, at, call)
                record = None if batch is None else self.runs.record(batch, is_micro=True)
                if record is None:
                    return [Piece(a, 0, self.part_batches[a], self.part_records[a])
                            for a in self.distinct_parts]  # fmt: skip
                found.append(Piece(at, call, batch, record))
        return found

    @cached_property
    def samples(self) -> list[Piece]:
        """Return what each sample of the batch gives alone; empty for large batches."""
        size = self.case.batch_size_of(self.batch)
        found = []
        for i in range(size if 1 < size <= MOST_SAMPLES else 0):
            batch = map_batch(self.case, self.batch, partial(_sample, i))
            record = self.runs.record(batch, is_micro=True)
            if record is None:
                return []
            owner = next((at for at in self.part_batches), ())
            found.append(Piece(owner, i, batch, record))
        return found

    @cached_property
    def weights(self) -> list[float] | None:
        """Return the weights with which the pieces' gradients give the reference's, if any do."""
        return self.weights_of(self.pieces)

    def weights_of(self, pieces: Sequence[Piece]) -> list[float] | None:
        """Return the weights with which the gradients of some pieces give the reference's."""
        parts = [piece.record["gradients"] for piece in pieces]
        if len(parts) < 2:
            return [1.0] if parts else None
        names = self.store.names(self.step, "gradients")
        whole = torch.cat([self._flat_reference(name) for name in names])
        columns = [
            torch.cat([_flat(part.get(name), self._flat_reference(name)) for name in names])
            for part in parts
        ]
        return fit(columns, whole, 1e-6)

    def _flat_reference(self, name: str) -> Tensor:
        """Return a reference gradient as a vector."""
        value = self.store.exact(self.run, self.step, "gradients", name)
        return as_real(value).to(torch.float64).reshape(-1)

    @cached_property
    def draws(self) -> bool:
        """Say whether the step draws random numbers on one device."""
        self.case.seed_step(self.step)
        before = torch.get_rng_state()
        self.runs.record(self.batch)
        self_seeded = torch.get_rng_state()
        return not torch.equal(before, self_seeded)

    @property
    def is_chance_open(self) -> bool:
        """Say whether random numbers may be to blame and no run without them has been made."""
        return "no_random" not in self.experiments and self.draws

    @cached_property
    def raw_gradients(self) -> dict[str, Tensor]:
        """Return the whole batch's gradients before the case's own step changed them."""
        return self.runs.raw_gradients(self.batch) or {}

    @cached_property
    def terms(self) -> list[Term]:
        """Return the 0-dim values the whole batch's loss is made of."""
        return self.runs.terms(self.batch)


def fit(columns: Sequence[Tensor], whole: Tensor, tolerance: float) -> list[float] | None:
    """Return the least-squares weights of columns, None where they leave more than a share."""
    matrix = torch.stack([column.reshape(-1) for column in columns], dim=1)
    target = whole.reshape(-1, 1)
    solved = torch.linalg.lstsq(matrix, target, driver="gelsd").solution
    left = float((matrix @ solved - target).norm())
    return None if left > tolerance * float(target.norm()) else solved[:, 0].tolist()


def _flat(value: Tensor | None, like: Tensor) -> Tensor:
    """Return a gradient as a vector, zeros where it is missing."""
    return torch.zeros_like(like) if value is None else as_real(value).reshape(-1).nan_to_num()


def _sample(index: int, leaf: Tensor, dim: int) -> Tensor:
    """Return one sample of an input."""
    return leaf.narrow(dim, index, 1)


def _digest(batch: Any) -> str:
    """Return what tells two parts of a batch apart."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
    return "/".join(digest(leaf) for leaf in leaves)


def subsets(axes: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Give the non-empty sets of axes, small ones first."""
    for size in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, size)
