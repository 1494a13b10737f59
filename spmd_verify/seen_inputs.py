"""Which slices of the global inputs reached forward on each rank, told by their content.

A rank may take its part itself, in an order of its own, or in several calls. A slice that no
rank saw, or that some saw more often than others, is a fault of the data, whoever made it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from spmd_verify.batches import TARGETS
from spmd_verify.case import LoadedCase
from spmd_verify.dump import Dump
from spmd_verify.layouts import Coordinate
from spmd_verify.parts import map_leaves
from spmd_verify.store import Store
from spmd_verify.styles.inference import match_slices

_CALL: Final = re.compile(r"#(\d+)$")


@dataclass(frozen=True)
class Argument:
    """One argument of forward over all ranks and calls.

    Attributes:
        dim: Along which slices were recognised.
        size: Global size of the dim.
        indices: Per rank, the global index of every slice seen, None for an unknown one.
    """

    dim: int
    size: int
    indices: Mapping[Coordinate, tuple[int | None, ...]]

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
            whole = store.expected(step, "inputs", name)
            calls = _calls(dump, f"{run}|{step}|inputs|{name}")
            argument = _recognised(whole, calls, case.input_batch_dims.get(name))
            if argument is not None:
                found[name] = argument
        return cls(case, found)

    def part(self, batch: Any, coordinate: Coordinate) -> Any:
        """Return what a rank's forward saw of a batch, targets cut alike; None if unknown."""
        known = {
            path: argument
            for path, argument in self.arguments.items()
            if argument.is_known and coordinate in argument.indices
        }
        split = [a for a in known.values() if len(a.indices[coordinate]) != a.size]
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
            rows = [index for index in used.indices[coordinate] if index is not None]
            return leaf.index_select(dim, torch.tensor(rows, dtype=torch.int64))

        return map_leaves(self.case, batch, change)


def _calls(dump: Dump, key: str) -> dict[Coordinate, list[Tensor]]:
    """Return what every rank passed for an argument, call by call."""
    found: dict[Coordinate, list[Tensor]] = {}
    numbered = [k for k in dump.keys() if k == key or _CALL.sub("", k) == key]
    for each in sorted(numbered, key=_call_number):
        for coordinate, local in dump.locals(each).items():
            found.setdefault(coordinate, []).append(local)
    return found


def _call_number(key: str) -> int:
    """Return which call of a step a key belongs to."""
    found = _CALL.search(key)
    return int(found[1]) if found else 1


def _recognised(
    whole: Tensor, calls: Mapping[Coordinate, list[Tensor]], batch_dim: int | None
) -> Argument | None:
    """Return the dim along which the slices are known; the batch dim where several are."""
    dims = list(range(whole.ndim))
    if batch_dim is not None:
        dims.sort(key=lambda dim: dim != batch_dim)
    best: tuple[float, Argument] | None = None
    for dim in dims:
        indices: dict[Coordinate, tuple[int | None, ...]] = {}
        for coordinate, locals_ in calls.items():
            fitting = [t for t in locals_ if _fits(t, whole, dim)]
            if len(fitting) != len(locals_):
                break
            # Rows of several calls come after each other.
            indices[coordinate] = tuple(
                index for t in _joined(fitting, dim) for index in match_slices(t, whole, dim)
            )
        else:
            flat = [index for seen in indices.values() for index in seen]
            if not flat:
                continue
            share = sum(index is not None for index in flat) / len(flat)
            if share == 1.0:
                return Argument(dim, whole.shape[dim], indices)
            if share >= 0.5 and (best is None or share > best[0]):
                best = share, Argument(dim, whole.shape[dim], indices)
    return None if best is None else best[1]


def _fits(local: Tensor, whole: Tensor, dim: int) -> bool:
    """Say whether a local tensor may be slices of a dim of the whole."""
    if local.ndim != whole.ndim:
        return False
    others = [i for i in range(whole.ndim) if i != dim]
    return all(local.shape[i] == whole.shape[i] for i in others)


def _joined(calls: list[Tensor], dim: int) -> list[Tensor]:
    """Return the calls as one tensor, so that equal slices are told apart in order."""
    return [torch.cat(calls, dim)] if len(calls) > 1 else calls
