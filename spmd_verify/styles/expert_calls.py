"""Call a function on the one rank that owns its parameters: tokens go there and come back.

Every rank calls alike, with whole tensors. The owner computes on all rows in their order, so the
function need not be row-wise; the other ranks wait for its results and have a graph of the same
shape, so that the collectives of backward meet in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.styles.token_exchange import Route, returned, route, sent


@dataclass(frozen=True)
class _Shown:
    """What the owner tells of one result: a tensor's description, or another value itself."""

    value: Any = None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    requires_grad: bool = False


def at_owner(
    function: Callable[..., Any],
    owner: int,
    group: dist.ProcessGroup,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    used: Sequence[Tensor] = (),
) -> Any:
    """Return `function(*args, **kwargs)`, computed by one rank. Collective.

    Random numbers are the owner's; the generator of every rank then stands where one device's
    would.

    Args:
        function: Called on the owner only.
        owner: Rank within the group.
        group: The ranks.
        args: Tensors are whole and the same on every rank.
        kwargs: Likewise.
        used: This rank's tensors that one device uses in the call: they get a gradient of zeros
            where the function does not use them.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    moved = {at: _sent(leaf, owner, group) for at, leaf in enumerate(leaves) if _is_tensor(leaf)}
    results: list[Any] = []
    told: list[Any] = [None]
    if group.rank() == owner:
        here = [moved[at].reshape(leaf.shape) if at in moved else leaf
                for at, leaf in enumerate(leaves)]  # fmt: skip
        owned_args, owned_kwargs = pytree.tree_unflatten(here, spec)
        before = torch.get_rng_state()
        results, result_spec = pytree.tree_flatten(function(*owned_args, **owned_kwargs))
        after = torch.get_rng_state()
        drawn = None if torch.equal(before, after) else after
        told = [([_shown(result) for result in results], result_spec, drawn)]
    dist.broadcast_object_list(told, dist.get_global_rank(group, owner), group=group)
    shown, result_spec, drawn = told[0]
    if drawn is not None:
        torch.set_rng_state(drawn)
    if group.rank() != owner:
        device = next((leaf.device for leaf in leaves if _is_tensor(leaf)), torch.device("cpu"))
        results = [_stand_in(each, device) for each in shown]
    made = _Made(shown, owner, group)
    return pytree.tree_unflatten(made.whole(results, [*moved.values(), *used]), result_spec)


@dataclass(frozen=True)
class _Made:
    """Results on their way back."""

    shown: list[_Shown]
    owner: int
    group: dist.ProcessGroup

    def whole(self, results: list[Any], inputs: list[Tensor]) -> list[Any]:
        """Return the results on every rank, tied to what came in."""
        live = [at for at, each in enumerate(self.shown) if each.requires_grad]
        tied = list(results)
        if live:
            waiting = [each for each in inputs if each.requires_grad]
            for at, value in zip(
                live, _Tied.apply(len(live), *(results[at] for at in live), *waiting), strict=True
            ):
                tied[at] = value
        return [self._whole(each, value) for each, value in zip(self.shown, tied, strict=True)]

    def _whole(self, shown: _Shown, value: Any) -> Any:
        """Return one result on every rank."""
        if shown.shape is None:
            return shown.value
        rows = value.reshape(-1, *shown.shape[1:]) if shown.shape else value.reshape(-1)
        if not shown.requires_grad:
            rows = rows.detach()
        count = shown.shape[0] if shown.shape else 1
        return returned(rows, _way(count, self.owner, self.group, rows)).reshape(shown.shape)


class _Tied(torch.autograd.Function):
    """Results as they are; backward reaches every input, so that all ranks return all gradients."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inputs = [(each.shape, each.dtype, each.device) for each in tensors[count:]]
        return tuple(each.clone() for each in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.inputs
        )
        return None, *gradients, *zeros


def _sent(whole: Tensor, owner: int, group: dist.ProcessGroup) -> Tensor:
    """Send every row of a tensor to one rank; the others get none."""
    rows = whole if whole.ndim else whole.reshape(1)
    return sent(rows, _way(len(rows), owner, group, rows))


def _way(rows: int, owner: int, group: dist.ProcessGroup, like: Tensor) -> Route:
    """Return the route of rows that one rank owns."""
    return route(torch.full((rows,), owner, device=like.device), group)


def _shown(result: Any) -> _Shown:
    """Describe a result of the owner for the other ranks."""
    if not _is_tensor(result):
        return _Shown(value=result)
    return _Shown(None, tuple(result.shape), result.dtype, result.requires_grad)


def _stand_in(shown: _Shown, device: torch.device) -> Any:
    """Return no rows of a tensor that another rank has made."""
    if shown.shape is None:
        return shown.value
    return torch.empty(
        (0, *shown.shape[1:]), dtype=shown.dtype, device=device, requires_grad=shown.requires_grad
    )


def _is_tensor(value: Any) -> bool:
    """Say whether a leaf travels."""
    return isinstance(value, Tensor)
