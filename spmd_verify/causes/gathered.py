"""Causes in what forward gathers: a parameter's parts in other places, scaled, or not there.

Every hypothesis is one more run of the step on one device, with a parameter that is wrong as
the hypothesis says; it holds where the module's output is the candidate's on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor

from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import affected, module_of
from spmd_verify.causes.gradients import left_by
from spmd_verify.causes.interventions import parameters_changed
from spmd_verify.causes.words import cause, listed, meaning, number
from spmd_verify.layouts import Coordinate, take_region
from spmd_verify.norms import as_real
from spmd_verify.record import Cause, Row
from spmd_verify.reference.trajectory import named_parameters

# A module with more parameters is not one that a wrong parameter can be told for.
MOST_PARAMETERS: Final = 8

Change = Callable[[Tensor], Tensor]


def gathered(exhibit: Exhibit, row: Row) -> Cause | None:
    """`layout` or `factor`: the module is right for parameters that are gathered wrongly."""
    module = module_of(exhibit, row.name)
    if module is None or exhibit.is_chance_open or not exhibit.locals(row):
        return None
    path = row.name.partition("[")[0].partition("#")[0]
    inside = named_parameters(module)[0]
    if not 0 < len(inside) <= MOST_PARAMETERS:
        return None
    names = [name if path == "model" else f"{path}.{name}" for name in inside]
    trial = _Trial(exhibit, row)
    for name in [[each] for each in names] + [names] * (len(names) > 1):
        found = _multiple(trial, name)
        if found is not None:
            return found
    for name, axis, dim in _cuts(exhibit, names, list(inside.values())):
        found = (
            _misplaced(trial, name, axis, dim)
            or _scaled(trial, name, axis, dim)
            or _own_everywhere(trial, name, axis, dim)
        )
        if found is not None:
            return found
    return next(filter(None, (_flat_offset(trial, axis, path) for axis in exhibit.wide_axes)), None)


def _cuts(
    exhibit: Exhibit, names: list[str], parameters: list[Tensor]
) -> Iterator[tuple[list[str], str, int]]:
    """Give parameters, axis and dim of every way they may have been cut; at last all of them."""
    for axis in exhibit.wide_axes:
        size = exhibit.axes[axis]
        for name, parameter in zip(names, parameters, strict=True):
            for dim in range(min(parameter.ndim, 2)):
                if parameter.shape[dim] >= size:
                    yield [name], axis, dim
        if len(names) > 1 and all(p.ndim and p.shape[0] >= size for p in parameters):
            yield names, axis, 0


class _Trial:
    """One wrong output, and what one device gives with other parameters."""

    def __init__(self, exhibit: Exhibit, row: Row) -> None:
        """Take the output that differs."""
        self.exhibit = exhibit
        self.row = row
        self.tolerance = 4.0 * exhibit.tolerance(row)

    def output(self, changed: Mapping[str, Change]) -> Tensor | None:
        """Return the global output with changed parameters; None where it cannot be run."""
        record = self.exhibit.runs.record(self.exhibit.batch, within=parameters_changed(changed))
        value = None if record is None else record[self.row.stage].get(self.row.name)
        return None if value is None else as_real(value).to(torch.float64)

    def is_that_of(self, value: Tensor | None, only: Coordinate | None = None) -> bool:
        """Say whether the ranks, or one, hold their parts of an output."""
        if value is None:
            return False
        for at, local in self.exhibit.locals(self.row).items():
            part = self.exhibit.region(self.row, at)
            if only is not None and at != only:
                continue
            if part is None or part.shape != tuple(local.shape):
                return False
            if float((take_region(value, part) - local).norm()) > self.tolerance:
                return False
        return True

    def says(
        self,
        kind: str,
        names: list[str],
        text: str,
        axis: str | None = None,
        factor: float | None = None,
    ) -> Cause:
        """Return a cause that names output, parameters and axis."""
        return cause(
            kind, text, tensors=[self.row.name, *names, *affected(self.exhibit)], axis=axis,
            ranks=self.row.ranks, factor=factor,
        )  # fmt: skip

    def multiple_of(self, names: list[str], zeroed: Change) -> float | None:
        """Return k where the output is the right one with k x what `zeroed` takes away."""
        found, right = self.exhibit.assembled(self.row), self.exhibit.reference(self.row)
        without = self.output(dict.fromkeys(names, zeroed))
        if found is None or without is None:
            return None
        share, excess = right - without, found - right
        if not bool(share.any()):
            return None
        k = 1.0 + float((excess * share).sum() / share.square().sum())
        return k if left_by(excess, share, k - 1.0) <= self.tolerance else None


def _multiple(trial: _Trial, names: list[str]) -> Cause | None:
    """Say that forward uses a multiple of parameters."""
    k = trial.multiple_of(names, torch.zeros_like)
    if k is None:
        return None
    text = f"{trial.row.name} is computed with {number(k)} x {listed(names)}"
    said, axis = meaning(k, 1e-6, trial.exhibit.axes)
    return trial.says("factor", names, text + (f": {said}" if said else ""), axis, factor=k)


def _misplaced(trial: _Trial, names: list[str], axis: str, dim: int) -> Cause | None:
    """Say that forward uses a parameter's parts, or their rows, in other places."""
    size = trial.exhibit.axes[axis]
    for how, change in _orders(size, dim, axis):
        if trial.is_that_of(trial.output(dict.fromkeys(names, change))):
            text = f"{trial.row.name} is computed with {listed(names)} put together wrongly: {how}"
            return trial.says("layout", names, text, axis)
    return None


def _orders(size: int, dim: int, axis: str) -> Iterator[tuple[str, Change]]:
    """Give ways to put parts along a dim together: words, and what makes the parameter so."""

    def ordered(order: list[int]) -> Change:
        return lambda value: torch.cat([_parts(value, size, dim)[i] for i in order], dim)

    for turn in range(1, size):
        order = [(i - turn) % size for i in range(size)]
        yield (
            f"along dim {dim} rank 0 of {axis} has its part where that of rank {turn} belongs",
            ordered(order),
        )
    if size > 2:
        yield (
            f"the parts of {axis} stand in reverse order along dim {dim}",
            ordered(list(reversed(range(size)))),
        )
    for by in (1, -1):
        yield (
            f"the rows of every rank's part along dim {dim} are moved by {by}, within the part",
            partial(_moved, by, size, dim),
        )
        yield (
            f"its rows along dim {dim} are moved by {by}",
            partial(_moved, by, 1, dim),
        )


def _moved(by: int, size: int, dim: int, value: Tensor) -> Tensor:
    """Move the rows of every part by some, round its end."""
    return torch.cat([part.roll(by, dim) for part in _parts(value, size, dim)], dim)


def _scaled(trial: _Trial, names: list[str], axis: str, dim: int) -> Cause | None:
    """Say that forward uses a multiple of a part: a gather that scales, or loses a rank."""
    size = trial.exhibit.axes[axis]
    for rank in range(size):
        k = trial.multiple_of(names, _zeroed(rank, size, dim))
        if k is None:
            continue
        part = f"the part of rank {rank} of {axis} along dim {dim} of {listed(names)}"
        used = f"without {part}" if abs(k) < 1e-6 else f"with {number(k)} x {part}"
        text = f"{trial.row.name} is computed {used}"
        return trial.says("factor", names, text, axis, factor=k)
    return None


def _parts(value: Tensor, size: int, dim: int) -> list[Tensor]:
    """Return the parts of a parameter as `torch.chunk` cuts it, empty ones too."""
    parts = list(value.chunk(size, dim))
    return parts + [parts[-1].narrow(dim, 0, 0)] * (size - len(parts))


def _zeroed(rank: int, size: int, dim: int) -> Change:
    """Return what sets one part of a parameter to zero."""

    def change(value: Tensor) -> Tensor:
        parts = _parts(value, size, dim)
        parts[rank] = torch.zeros_like(parts[rank])
        return torch.cat(parts, dim)

    return change


def _own_everywhere(trial: _Trial, names: list[str], axis: str, dim: int) -> Cause | None:
    """Say that every rank uses its own part in all places: nothing was gathered."""
    exhibit = trial.exhibit
    at_axis, size = list(exhibit.axes).index(axis), exhibit.axes[axis]
    outputs: dict[int, Tensor | None] = {}
    for at in exhibit.locals(trial.row):
        rank = at[at_axis]
        if rank not in outputs:
            outputs[rank] = trial.output(dict.fromkeys(names, _repeated(rank, size, dim)))
        if not trial.is_that_of(outputs[rank], only=at):
            return None
    text = (
        f"{trial.row.name} is computed with {listed(names)} put together wrongly: every rank of "
        f"{axis} uses its own part along dim {dim} in the place of all, as if nothing had been "
        f"gathered"
    )
    return trial.says("layout", names, text, axis)


def _repeated(rank: int, size: int, dim: int) -> Change:
    """Return what puts one part in the place of all; the last may be shorter."""

    def change(value: Tensor) -> Tensor:
        own = _parts(value, size, dim)[rank]
        times = -(-value.shape[dim] // max(own.shape[dim], 1))
        return torch.cat([own] * times, dim).narrow(dim, 0, value.shape[dim])

    return change


def _flat_offset(trial: _Trial, axis: str, path: str) -> Cause | None:
    """Say that parameters gathered as one flat buffer are read off by one element."""
    # Those with parts; a tied one stands under its first name only.
    values = {name: v for name, v in trial.exhibit.runs.parameters().items() if v.ndim}
    size = trial.exhibit.axes[axis]
    steps = path.split(".") if path != "model" else []
    for depth in range(len(steps), -1, -1):
        owner = ".".join(steps[:depth])
        prefix = f"{owner}." if owner else ""
        names = [name for name in values if name.startswith(prefix)]
        for by in (1, -1) if names else ():
            made = _rolled_flat({name: values[name] for name in names}, size, by)
            changed = {name: partial(_given, value) for name, value in made.items()}
            if trial.is_that_of(trial.output(changed)):
                text = (
                    f"{trial.row.name} is computed with parameters that are read {by:+d} element "
                    f"off from every rank's flat buffer of {owner or 'the model'} over {axis}"
                )
                return trial.says("layout", names, text, axis)
    return None


def _given(value: Tensor, _: Tensor) -> Tensor:
    """Replace a parameter."""
    return value


def _rolled_flat(values: Mapping[str, Tensor], size: int, by: int) -> dict[str, Tensor]:
    """Return parameters whose parts were rolled in one flat buffer per rank."""
    parts = {name: _parts(value, size, 0) for name, value in values.items()}
    rolled: dict[str, list[Tensor]] = {name: [] for name in values}
    for rank in range(size):
        own = [parts[name][rank] for name in values]
        flat = torch.cat([part.reshape(-1) for part in own]).roll(by)
        pieces = flat.split([part.numel() for part in own])
        for name, part, piece in zip(values, own, pieces, strict=True):
            rolled[name].append(piece.view(part.shape))
    return {name: torch.cat(pieces) for name, pieces in rolled.items()}
