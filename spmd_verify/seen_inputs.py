"""Which slices of the global inputs reached forward on each rank, told by their content.

A rank may take its part itself, in an order of its own, or in several calls. A slice that no
rank saw, or that some saw more often than others, is a fault of the data, whoever made it.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from spmd_verify.cases.batches import TARGETS
from spmd_verify.cases.case import LoadedCase
from spmd_verify.dumps.dump import Dump
from spmd_verify.layouts import Coordinate
from spmd_verify.parts import map_leaves
from spmd_verify.stored.store import Store
from spmd_verify.styles.inference import match_slices

_CALL: Final = re.compile(r"#(\d+)$")


@dataclass(frozen=True)
class Argument:
    """One argument of forward over all ranks and calls.

    Attributes:
        dim: Along which slices were recognised.
        size: Global size of the dim.
        indices: Per rank, the global index of every slice seen, None for an unknown one.
        lengths: Per rank, how many of them each call saw.
        stride: Micro-steps of the reference, whose calls have every so many-th slice.
    """

    dim: int
    size: int
    indices: Mapping[Coordinate, tuple[int | None, ...]]
    lengths: Mapping[Coordinate, tuple[int, ...]]
    stride: int = 1

    def of_call(self, coordinate: Coordinate, call: int | None) -> tuple[int | None, ...]:
        """Return the slices of one call of a rank, or of all: the batch that gives these calls."""
        lengths = self.lengths[coordinate]
        if call is None:
            if self.stride == 1 or len(lengths) != self.stride:
                return self.indices[coordinate]
            calls = [self.of_call(coordinate, each) for each in range(len(lengths))]
            rows = range(max(lengths))
            return tuple(each[row] for row in rows for each in calls if row < len(each))
        start = sum(lengths[:call])
        return self.indices[coordinate][start : start + lengths[call]]

    def interleaved(self, stride: int) -> Argument:
        """Return the same, known of a reference whose calls have every `stride`-th slice.

        Positions in its calls, one after the other, become positions in the whole batch.
        """
        order = [index for first in range(stride) for index in range(first, self.size, stride)]
        indices = {
            coordinate: tuple(None if index is None else order[index] for index in seen)
            for coordinate, seen in self.indices.items()
        }
        return replace(self, indices=indices, stride=stride)

    @property
    def is_known(self) -> bool:
        """Say whether every slice seen is one of the global input's."""
        return all(index is not None for seen in self.indices.values() for index in seen)

    def counts(self) -> Counter[int]:
        """Count how often every slice was seen."""
        counted = Counter(dict.fromkeys(range(self.size), 0))
        for seen in self.indices.values():
            counted.update(index for index in seen if index is not None)
        return counted

    def reached(self) -> int:
        """Count the slices that reached forward, on all ranks together."""
        return sum(len(seen) for seen in self.indices.values())

    def missing(self) -> list[int]:
        """Return the slices that no rank saw."""
        return [index for index, times in self.counts().items() if not times]

    def doubled(self) -> list[int]:
        """Return the slices seen more often than the rarest that was seen."""
        counted = self.counts()
        usual = min((times for times in counted.values() if times), default=0)
        return [index for index, times in counted.items() if times > usual]


@dataclass(frozen=True)
class SeenInputs:
    """The arguments of one step's forwards.

    Attributes:
        case: The case.
        arguments: By path; those that no dim explains are absent.
    """

    case: LoadedCase
    arguments: Mapping[str, Argument]

    @classmethod
    def of(cls, case: LoadedCase, store: Store, dump: Dump, run: str, step: int) -> SeenInputs:
        """Recognise what every rank's forward saw in a step."""
        found = {}
        for name in store.names(step, "inputs"):
            if _CALL.search(name) or name.partition(".")[0] == TARGETS:
                continue
            names = [n for n in store.names(step, "inputs") if _CALL.sub("", n) == name]
            wholes = [store.expected(step, "inputs", n) for n in sorted(names, key=_call_number)]
            calls = _calls(dump, f"{run}|{step}|inputs|{name}")
            dim, stride = case.input_batch_dims.get(name), case.variants.accumulate
            argument = _recognised(wholes, calls, dim)
            if argument is not None and stride > 1 and argument.dim == dim:
                argument = argument.interleaved(stride)
            if argument is not None:
                found[name] = argument
        if not found:
            found = _by_first_output(case, store, dump, run, step)
        return cls(case, found)

    def part(self, batch: Any, coordinate: Coordinate, call: int | None = None) -> Any:
        """Return what a rank's forward saw of a batch, targets cut alike; None if unknown.

        Args:
            batch: The global batch.
            coordinate: The rank's.
            call: Only of this call of forward, from 0.
        """
        known = {
            path: argument
            for path, argument in self.arguments.items()
            if argument.is_known and coordinate in argument.indices
        }
        split = [a for a in known.values() if len(a.of_call(coordinate, call)) != a.size]
        if not known or not split:
            return None
        first = split[0]

        def change(path: str, leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = known.get(path)
            dim = self.case.input_batch_dims.get(path)
            if own is None and dim is None:
                dim = first.dim if leaf.ndim > first.dim else None
            elif own is not None:
                dim = own.dim
            used = own or first
            if dim is None or leaf.shape[dim] != used.size:
                return leaf
            rows = [index for index in used.of_call(coordinate, call) if index is not None]
            return leaf.index_select(dim, torch.tensor(rows, dtype=torch.int64))

        return map_leaves(self.case, batch, change)

    def is_wrong(self, name: str) -> bool | None:
        """Say whether slices of an input are missing, doubled or altered; None if nobody knows."""
        argument = self.arguments.get(name)
        if argument is None:
            return None
        return not argument.is_known or bool(argument.missing() or argument.doubled())

    def samples(self, coordinate: Coordinate) -> list[int]:
        """Return which samples a rank's forwards saw; empty where that is unknown."""
        for path, argument in self.arguments.items():
            if argument.is_known and argument.dim == self.case.input_batch_dims.get(path):
                return [index for index in argument.indices[coordinate] if index is not None]
        return []

    def calls(self, coordinate: Coordinate) -> int:
        """Return how often a rank's forward was called; 0 where that is unknown."""
        known = [a for a in self.arguments.values() if a.is_known and coordinate in a.lengths]
        return max((len(argument.lengths[coordinate]) for argument in known), default=0)


def _by_first_output(
    case: LoadedCase, store: Store, dump: Dump, run: str, step: int
) -> dict[str, Argument]:
    """Recognise samples by the first module's outputs, where the root's forward never ran."""
    for name in store.names(step, "module_outputs"):
        entry = store.entry(step, "module_outputs", name)
        assert entry is not None, "it was listed"
        if _CALL.search(name) or not entry.shape or entry.shape[0] != case.batch_size:
            continue
        whole = store.exact(run, step, "module_outputs", name).to(torch.float64).flatten(1)
        calls = _calls(dump, f"{run}|{step}|module_outputs|{name}")
        if not calls or any(
            t.shape[1:] != tuple(entry.shape[1:]) for c in calls.values() for t in c
        ):
            continue
        floor = entry.floors[run].noise if run in entry.floors else 0.0
        indices: dict[Coordinate, tuple[int | None, ...]] = {}
        for coordinate, locals_ in calls.items():
            near = torch.cdist(torch.cat(locals_).to(torch.float64).flatten(1), whole)
            best = near.min(dim=1)
            indices[coordinate] = tuple(
                int(i) if float(d) <= 4.0 * floor else None
                for d, i in zip(best.values, best.indices, strict=True)
            )
        lengths = {at: tuple(t.shape[0] for t in locals_) for at, locals_ in calls.items()}
        argument = Argument(0, case.batch_size, indices, lengths)
        return {name: argument} if argument.is_known else {}
    return {}


def _calls(dump: Dump, key: str) -> dict[Coordinate, list[Tensor]]:
    """Return what every rank passed for an argument, call by call."""
    found: dict[Coordinate, list[Tensor]] = {}
    numbered = [k for k in dump if k == key or _CALL.sub("", k) == key]
    for each in sorted(numbered, key=_call_number):
        for coordinate, local in dump.locals(each).items():
            found.setdefault(coordinate, []).append(local)
    return found


def _call_number(key: str) -> int:
    """Return which call of a step a key belongs to."""
    found = _CALL.search(key)
    return int(found[1]) if found else 1


def _recognised(
    wholes: list[Tensor], calls: Mapping[Coordinate, list[Tensor]], batch_dim: int | None
) -> Argument | None:
    """Return the dim along which the slices are known; the batch dim where several are.

    Several calls, on either side, are slices one after the other.
    """
    dims = list(range(wholes[0].ndim))
    if batch_dim is not None:
        dims.sort(key=lambda dim: dim != batch_dim)
    best: tuple[float, Argument] | None = None
    for dim in dims:
        if not all(_fits(t, wholes[0], dim) for t in itertools.chain(wholes, *calls.values())):
            continue
        whole = torch.cat(wholes, dim)
        indices = {
            coordinate: tuple(match_slices(torch.cat(locals_, dim), whole, dim))
            for coordinate, locals_ in calls.items()
        }
        lengths = {at: tuple(t.shape[dim] for t in locals_) for at, locals_ in calls.items()}
        flat = [index for seen in indices.values() for index in seen]
        share = sum(index is not None for index in flat) / len(flat) if flat else 0.0
        if share == 1.0:
            return Argument(dim, whole.shape[dim], indices, lengths)
        if share >= 0.5 and (best is None or share > best[0]):
            best = share, Argument(dim, whole.shape[dim], indices, lengths)
    return None if best is None else best[1]


def _fits(local: Tensor, whole: Tensor, dim: int) -> bool:
    """Say whether a local tensor may be slices of a dim of the whole."""
    if local.ndim != whole.ndim:
        return False
    others = [i for i in range(whole.ndim) if i != dim]
    return all(local.shape[i] == whole.shape[i] for i in others)
