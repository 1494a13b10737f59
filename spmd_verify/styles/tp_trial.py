"""Try on one device what a split of linear layers would compute on several ranks.

Whether q, k and v can stay split until the output projection, or whether the halves of a
feed-forward layer meet again as they should, depends on the code between them. It is not read
but run: once whole, once with every rank's slices one after the other, on random weights. What
does not give the whole's result, or leaves a gradient that no rank would reduce, is not split so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from spmd_verify.styles.tp_watch import Call

_SEED: Final = 20
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Linear:
    """A module that computes `x @ weight.T + bias`, or `x @ weight + bias`.

    Attributes:
        path: Its path.
        module: It.
        is_transposed: The weight is `[in, out]`, as in `x @ weight`.
    """

    path: str
    module: Any
    is_transposed: bool = False

    @property
    def num_inputs(self) -> int:
        """Return the last size of its input."""
        return int(self.module.weight.shape[0 if self.is_transposed else 1])

    @property
    def num_outputs(self) -> int:
        """Return the last size of its output."""
        return int(self.module.weight.shape[1 if self.is_transposed else 0])

    def weight(self) -> Tensor:
        """Return the weight as `[out, in]`, detached."""
        weight: Tensor = self.module.weight.detach()
        return weight.T if self.is_transposed else weight

    def bias(self) -> Tensor | None:
        """Return the bias, detached."""
        bias = getattr(self.module, "bias", None)
        return None if bias is None else bias.detach()


def linear_of(path: str, module: nn.Module, calls: Sequence[Call]) -> Linear | None:
    """Return a module as a linear layer if that is what it computes on what it was called with."""
    own = {name: value for name, value in module.named_parameters() if value is not None}
    weight = own.get("weight")
    if weight is None or set(own) - {"weight", "bias"} or weight.ndim != 2:
        return None
    if not calls or not all(_is_simple(call) for call in calls):
        return None
    x = calls[0].args[0].detach()
    for is_transposed in (False, True):
        found = Linear(path, module, is_transposed)
        if x.shape[-1] != found.num_inputs or x.dtype != weight.dtype:
            continue
        with torch.no_grad():
            actual, expected = module(x), F.linear(x, found.weight(), found.bias())
        if isinstance(actual, Tensor) and is_near(actual, expected):
            return found
    return None


def _is_simple(call: Call) -> bool:
    """Say whether a call has one floating tensor with a last dim, and nothing else."""
    has_one = len(call.args) == 1 and not call.kwargs and isinstance(call.args[0], Tensor)
    return has_one and call.args[0].is_floating_point() and call.args[0].ndim > 0


def is_near(actual: Tensor, expected: Tensor) -> bool:
    """Say whether two tensors agree to half of their dtype's digits; NaN agrees with nothing."""
    actual, expected = actual.detach(), expected.detach()
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not actual.is_floating_point():
        return torch.equal(actual, expected)
    scale = float(expected.double().norm())
    error = float((actual.double() - expected.double()).norm())
    return error <= torch.finfo(actual.dtype).eps ** 0.5 * scale


def can_stay_split(
    model: nn.Module,
    outer: nn.Module,
    call: Call,
    columns: Sequence[Linear],
    row: Linear,
    ranks: int,
) -> bool:
    """Say whether columns may hand their local outputs to a row-wise layer without a gather.

    Args:
        model: The whole model; its weights are left as they were.
        outer: The module that calls all of the layers.
        call: What it was called with.
        columns: Layers split along their output.
        row: The layer split along its input, whose output is summed over ranks.
        ranks: How many there are.
    """
    args, kwargs = pytree.tree_map_only(Tensor, _as_leaf, (call.args, call.kwargs))
    with _random_weights(outer):
        try:
            whole = _run(outer, args, kwargs, {})
            partial, counts = [], []
            for rank in range(ranks):
                seen: list[Tensor] = []
                patches = _slices(columns, rank, ranks)
                patches[row.module] = _recorder(row, rank, ranks, seen)
                _run(outer, args, kwargs, patches)
                counts.append(len(seen))
                if len(seen) != 1 or (rank == 0 and _leaks(model, columns, args, kwargs, seen[0])):
                    return False
                partial.append(F.linear(seen[0].detach(), _row_weight(row, rank, ranks)))
            total = torch.stack(partial).sum(0)
            bias = row.bias()
            total = total if bias is None else total + bias
            for rank in range(ranks):
                patches = _slices(columns, rank, ranks)
                patches[row.module] = lambda _: total
                if not _agree(_run(outer, args, kwargs, patches), whole):
                    return False
        except Exception:  # noqa: BLE001 - the user's code does not run on slices: no such split
            return False
    return True


def is_tokenwise(module: nn.Module, call: Call, dim: int) -> bool:
    """Say whether a module computes every index of a dim of its input on its own."""
    x = call.args[0].detach()
    with _random_weights(module):
        try:
            whole = _run(module, (x,), {}, {})
            parts = [_run(module, (part,), {}, {}) for part in x.split(1, dim)]
        except Exception:  # noqa: BLE001 - as above
            return False
    is_alone = isinstance(whole, Tensor) and whole.shape == x.shape and whole.ndim == x.ndim
    return is_alone and is_near(torch.cat(parts, dim), whole)


def _as_leaf(value: Tensor) -> Tensor:
    """Return a copy that begins a graph of its own where the value was part of one."""
    copy = value.detach().clone()
    return copy.requires_grad_(value.requires_grad)


def _run(module: nn.Module, args: Any, kwargs: Any, patches: Mapping[nn.Module, Forward]) -> Any:
    """Call a module with other forwards inside, always from the same random state."""
    with torch.random.fork_rng(), _patched(patches):
        torch.manual_seed(_SEED)
        copies, named = pytree.tree_map_only(Tensor, torch.Tensor.clone, (args, kwargs))
        return module(*copies, **named)


@contextmanager
def _patched(patches: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Give modules other forwards for a while."""
    before = {module: module.__dict__.get("forward") for module in patches}
    try:
        for module, forward in patches.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


@contextmanager
def _random_weights(module: nn.Module) -> Iterator[None]:
    """Give every parameter random values for a while: initial zeros would hide what is wrong."""
    kept = [(value, value.detach().clone()) for value in module.parameters()]
    generator = torch.Generator().manual_seed(_SEED)
    try:
        with torch.no_grad():
            for value, _ in kept:
                if value.is_floating_point():
                    drawn = torch.randn(value.shape, generator=generator, dtype=torch.float64)
                    value.copy_(drawn / max(value.shape[-1] if value.ndim else 1, 1) ** 0.5)
        yield
    finally:
        with torch.no_grad():
            for value, initial in kept:
                value.copy_(initial)


def _slices(columns: Sequence[Linear], rank: int, ranks: int) -> dict[nn.Module, Forward]:
    """Return the forwards of one rank's columns; no gradient passes them."""
    found: dict[nn.Module, Forward] = {}
    for column in columns:
        bias = column.bias()
        weight = column.weight().chunk(ranks, 0)[rank]
        part = None if bias is None else bias.chunk(ranks, 0)[rank]
        found[column.module] = _sliced(weight, part)
    return found


def _sliced(weight: Tensor, bias: Tensor | None) -> Forward:
    """Return a linear layer of these weights."""
    return lambda x: F.linear(x.detach(), weight, bias)


def _row_weight(row: Linear, rank: int, ranks: int) -> Tensor:
    """Return one rank's part of the row-wise weight, `[out, in / ranks]`."""
    return row.weight().chunk(ranks, 1)[rank]


def _recorder(row: Linear, rank: int, ranks: int, seen: list[Tensor]) -> Forward:
    """Return a forward that keeps its input and gives one rank's share of the output."""

    def forward(x: Tensor) -> Tensor:
        seen.append(x)
        return F.linear(x, _row_weight(row, rank, ranks))

    return forward


def _leaks(
    model: nn.Module, columns: Sequence[Linear], args: Any, kwargs: Any, seen: Tensor
) -> bool:
    """Say whether something else than the columns would get only one rank's part of a gradient.

    The columns pass no gradient here, so that whatever still has one was used on local values.
    """
    if not seen.requires_grad:
        return False
    own = {id(value) for column in columns for value in column.module.parameters()}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    wanted = [*others, *(value for value in inputs if value.requires_grad)]
    found = torch.autograd.grad(seen.sum(), wanted, allow_unused=True) if wanted else ()
    return any(gradient is not None for gradient in found)


def _agree(actual: Any, expected: Any) -> bool:
    """Say whether two results have the same tensors in the same places."""
    left, left_spec = pytree.tree_flatten(actual)
    right, right_spec = pytree.tree_flatten(expected)
    if left_spec != right_spec:
        return False
    return all(
        is_near(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else True
        for a, b in zip(left, right, strict=True)
    )
