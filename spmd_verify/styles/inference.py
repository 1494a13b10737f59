"""Which part of a parameter a rank holds as a plain tensor: from its shape and first values.

Each rank holds the whole initial parameter too, so what fits can be tried; the ranks then
agree on what fits all of them. Nothing is guessed: two layouts that own different parts and
both fit are an error that names them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from spmd_verify.layouts import Coordinate, Indexed, region, take
from spmd_verify.parts import WHOLE, Chunk

# Placements by short name, as ranks exchange them: `R`, `S0`.
Layout = tuple[object, ...]


@dataclass(frozen=True)
class Held:
    """What a rank reports of one parameter; plain values, sent to the others.

    Attributes:
        shape: Local sizes.
        matching: Layouts whose part has this shape and these values.
        fitting: Layouts whose part has this shape.
        slices: Per dim, the global indices of the local slices where every slice of the
            initial value is found; absent where not.
    """

    shape: tuple[int, ...]
    matching: tuple[str, ...]
    fitting: tuple[str, ...]
    slices: tuple[tuple[int, tuple[int, ...]], ...]


class Ambiguous(Exception):
    """Two layouts fit a parameter; the message names them."""


def infer(
    local: Mapping[str, Tensor],
    initial: Mapping[str, Tensor],
    axes: Mapping[str, int],
    coordinate: Coordinate,
) -> dict[str, Layout]:
    """Return the layout of every plain parameter that this rank holds. Collective.

    Args:
        local: This rank's plain parameters by name, right after the style was applied.
        initial: The whole parameters by name, before it was.
        axes: Mesh axes, `{name: ranks}`.
        coordinate: This rank's.

    Raises:
        Ambiguous: Naming the parameter and what fits it.
    """
    mine = {
        name: _held(tensor, initial[name], axes, coordinate)
        for name, tensor in local.items()
        if name in initial
    }
    everyone: list[dict[str, Held]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, mine)
    found = {}
    for name in mine:
        held = [ranks[name] for ranks in everyone if name in ranks]
        layout = _agreed(name, held, mine[name], tuple(initial[name].shape), axes)
        if layout is not None:
            found[name] = layout
    return found


def _held(tensor: Tensor, whole: Tensor, axes: Mapping[str, int], coordinate: Coordinate) -> Held:
    """Say what fits one local tensor."""
    fitting, matching = [], []
    for text, layout in candidates(whole.ndim, len(axes)):
        part = region(whole.shape, layout, tuple(axes.values()), coordinate)
        if part.shape != tuple(tensor.shape):
            continue
        fitting.append(text)
        if torch.equal(take(whole, layout, tuple(axes.values()), coordinate), tensor):
            matching.append(text)
    slices = () if matching else tuple(_slices(tensor, whole))
    return Held(tuple(tensor.shape), tuple(matching), tuple(fitting), slices)


def candidates(ndim: int, num_axes: int) -> Iterator[tuple[str, Layout]]:
    """Give every layout of whole and chunked axes, by its text."""
    choices: list[tuple[str, object]] = [
        ("R", WHOLE),
        *((f"S({d})", Chunk(d)) for d in range(ndim)),
    ]
    for chosen in itertools.product(choices, repeat=num_axes):
        yield ",".join(text for text, _ in chosen), tuple(layout for _, layout in chosen)


def _slices(tensor: Tensor, whole: Tensor) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Give `(dim, global indices)` where every local slice of a dim is one of the whole's."""
    if tensor.ndim != whole.ndim or not tensor.numel():
        return
    for dim in range(whole.ndim):
        if (
            tensor.shape[:dim] + tensor.shape[dim + 1 :]
            != whole.shape[:dim] + whole.shape[dim + 1 :]
        ):
            continue
        at = match_slices(tensor, whole, dim)
        if all(index is not None for index in at):
            yield dim, tuple(index for index in at if index is not None)


def match_slices(local: Tensor, whole: Tensor, dim: int) -> list[int | None]:
    """Return, per slice of a dim of `local`, the index of the equal slice of `whole`.

    Equal slices are used in order, each once before any is used again.
    """
    places: dict[bytes, list[int]] = {}
    for index, content in enumerate(_contents(whole, dim)):
        places.setdefault(content, []).append(index)
    used: dict[bytes, int] = {}
    found: list[int | None] = []
    for content in _contents(local.to(whole.dtype), dim):
        known = places.get(content)
        turn = used.get(content, 0)
        used[content] = turn + 1
        found.append(None if known is None else known[turn % len(known)])
    return found


def _contents(value: Tensor, dim: int) -> list[bytes]:
    """Return the bits of every slice of a dim."""
    rows = value.detach().cpu().movedim(dim, 0).contiguous()
    flat = rows.reshape(rows.shape[0], -1) + 0  # -0.0 and 0.0 stay apart only as bits
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in flat]


def _agreed(
    name: str, held: Sequence[Held], mine: Held, shape: tuple[int, ...], axes: Mapping[str, int]
) -> Layout | None:
    """Return the layout that fits all ranks; None where none does."""
    by_text = dict(candidates(len(shape), len(axes)))
    matching = [text for text in by_text if all(text in each.matching for each in held)]
    fitting = [text for text in by_text if all(text in each.fitting for each in held)]
    if all(each.shape == shape for each in held):
        return by_text[",".join(["R"] * len(axes))]
    chosen = matching or _indexed_or(fitting, held)
    if isinstance(chosen, int):
        indices = dict(mine.slices)[chosen]
        return (Indexed(chosen, indices), *[WHOLE] * (len(axes) - 1))
    distinct = _distinct(chosen, shape, axes)
    if len(distinct) > 1:
        raise Ambiguous(
            f"{name}: shape {list(mine.shape)} of {list(shape)} may be {' or '.join(distinct)}"
        )
    return by_text[distinct[0]] if distinct else None


def _indexed_or(fitting: list[str], held: Sequence[Held]) -> int | list[str]:
    """Return the dim along which the ranks hold all slices in an order of their own, if any.

    Otherwise what the shapes allow: then the initial values differ, and the judge says so.
    """
    dims = set.intersection(*(set(dict(each.slices)) for each in held))
    for dim in sorted(dims):
        counts: dict[int, int] = {}
        for index in itertools.chain.from_iterable(dict(each.slices)[dim] for each in held):
            counts[index] = counts.get(index, 0) + 1
        size = max(counts) + 1
        if len(counts) == size and len(set(counts.values())) == 1 and _is_all(held, dim, size):
            return dim
    return fitting


def _is_all(held: Sequence[Held], dim: int, size: int) -> bool:
    """Say whether the slices found on all ranks are as many as copies of the whole have."""
    return sum(each.shape[dim] for each in held) % size == 0


def _distinct(texts: Sequence[str], shape: tuple[int, ...], axes: Mapping[str, int]) -> list[str]:
    """Return one text per set of layouts under which every rank owns the same part."""
    by_text = dict(candidates(len(shape), len(axes)))
    sizes = tuple(axes.values())
    found: dict[tuple[object, ...], str] = {}
    for text in texts:
        owned = tuple(
            region(shape, by_text[text], sizes, at)
            for at in itertools.product(*(range(size) for size in sizes))
        )
        found.setdefault(owned, text)
    return list(found.values())
