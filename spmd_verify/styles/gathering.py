"""Put plain tensors together with the file's own `gather_NAME(name, local_tensors)`.

What placements cannot say - padded, interleaved, flattened parts - the author says in code. To
write a global value back, the hook is asked once more with numbers that count the elements of
all ranks: where each comes out is where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Gather = Callable[[str, list[Tensor]], Tensor | None]
# Flat indices of this rank's elements, and of the global elements they are.
Places = tuple[Tensor, Tensor]


def gathered(gather: Gather, name: str, local: Tensor) -> Tensor | None:
    """Return the global tensor, the same on every rank. Collective.

    Args:
        gather: The hook.
        name: The single-device name.
        local: What this rank holds.
    """
    parts = _everyones(local.detach().cpu())
    value = gather(name, parts)
    return None if value is None else value.detach()


def places(gather: Gather, name: str, local: Tensor, whole: Tensor) -> Places | None:
    """Return where this rank's elements are in the global tensor. Collective.

    None where the hook does more than put elements in their places.
    """
    sizes = _everyones(tuple(local.shape))
    counted, start = [], 1
    for size in sizes:
        numel = torch.Size(size).numel()
        ids = torch.arange(start, start + numel, dtype=torch.float64)
        counted.append(ids.reshape(size))
        start += numel
    found = gather(name, counted)
    rank = dist.get_rank()
    if found is None or found.shape != whole.shape:
        return None
    flat = found.reshape(-1)
    is_known = bool(((flat == flat.round()) & (flat >= 1) & (flat < start)).all())
    if not is_known:
        return None
    first = int(counted[rank].reshape(-1)[0]) if counted[rank].numel() else start
    own = (flat >= first) & (flat < first + counted[rank].numel())
    at = own.nonzero().flatten()
    return (flat[at] - first).to(torch.int64), at


def _everyones(value: Any) -> list[Any]:
    """Return a value of every rank, in rank order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
