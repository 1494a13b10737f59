"""What an operator adds up at most, and on which grid: the rules of the exactness proof.

A rule turns the terms of an operator's operands into those of its results. All tensors are
global, bounds float64. Normative: docs/design.md part 3.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.exact.grid import is_power

# The grid of nothing but zeros: coarser than anything, also after a few products.
NO_GRID: Final = -(1 << 20)
_MANTISSA: Final = 53


class Inexact(Exception):
    """An operator rounds, or nobody knows that it does not; the text says why."""


@dataclass(frozen=True)
class Term:
    """A tensor's S and the grid 2^-grid that everything added up in it lies on.

    `bound` broadcasts to the tensor's shape.
    """

    bound: Tensor
    grid: int


@dataclass(frozen=True)
class Call:
    """One operator call as rules see it.

    Attributes:
        func: The operator, out of place.
        args: Its positional arguments, as they were before it ran.
        kwargs: Its keyword arguments.
        results: What it returned, flat.
        known: Gives the term of a floating tensor.
    """

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    results: list[Any]
    known: Callable[[Tensor], Term]

    def term(self, value: Any) -> Term:
        """Return the term of an operand: a tensor of any kind, or a number."""
        if isinstance(value, Tensor) and value.is_floating_point():
            return self.known(value)
        return seen(torch.as_tensor(value))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument given by position or by name."""
        if len(self.args) > position:
            return self.args[position]
        return self.kwargs.get(name, default)

    def run(self, args: Sequence[Any]) -> list[Any]:
        """Run the operator on other arguments, in float64."""
        named = {key: value for key, value in self.kwargs.items() if key != "dtype"}
        return pytree.tree_leaves(self.func(*args, **named))


Terms = list[Term | None]
Rule = Callable[[Call], Terms]


def seen(value: Tensor) -> Term:
    """Return the term of a value that is complete: itself."""
    size = value.detach().to(torch.float64).abs()
    return Term(size.masked_fill(~size.isfinite(), 0.0), grid_of(value))


def grid_of(value: Tensor) -> int:
    """Return the least q such that all finite elements are multiples of 2^-q."""
    flat = value.detach().to(torch.float64).reshape(-1)
    flat = flat[flat.isfinite() & (flat != 0)]
    if not flat.numel():
        return NO_GRID
    mantissa, exponent = torch.frexp(flat)
    whole = (mantissa * 2.0**_MANTISSA).to(torch.int64)
    _, lowest = torch.frexp((whole & -whole).to(torch.float64))
    return -int((exponent - _MANTISSA + lowest - 1).min())


def bits_of(term: Term) -> int:
    """Return the bits a term needs: the least b with max S * 2^grid <= 2^b."""
    largest = float(term.bound.max()) if term.bound.numel() else 0.0
    if largest == 0.0 or term.grid <= NO_GRID // 2:
        return 0
    # S of float64 cases is itself a rounded sum.
    return max(math.ceil(math.log2(largest * (1 + 1e-12)) + term.grid), 0)


# -- rules ---------------------------------------------------------------------------------------


def _complete(call: Call) -> Terms:
    """Select, compare or make values: the operands were complete, so the results are."""
    return [seen(r) if _is_floating(r) else None for r in call.results]


def _moved(call: Call) -> Terms:
    """Move values: S moves along."""
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    grids = [call.term(x).grid for x in leaves if _is_floating(x) or type(x) is float]
    bounds = pytree.tree_map(lambda x: call.term(x).bound if _is_floating(x) else x, call.args)
    return _like(call, call.run(bounds), max(grids, default=NO_GRID))


def _converted(call: Call) -> Terms:
    """Convert a dtype, or copy."""
    if not _is_floating(call.args[0]):
        return _complete(call)
    return [call.term(call.args[0]) if _is_floating(r) else None for r in call.results]


def _overwritten(call: Call) -> Terms:
    """Stand for `copy_(target, source)`."""
    return [call.term(call.args[1])]


def _filled(call: Call) -> Terms:
    """Stand for `masked_fill(x, mask, number)` and `where` with numbers."""
    kept, number = call.term(call.args[0]), call.term(call.args[2])
    bound = torch.where(call.args[1], number.bound, kept.bound)
    return [Term(bound, max(kept.grid, number.grid))]


def _sum(call: Call) -> Terms:
    """Add up elements of one tensor; more arguments say which."""
    term = call.term(call.args[0])
    return _like(call, call.run([term.bound, *call.args[1:]]), term.grid)


def _mean(call: Call) -> Terms:
    """Add up and divide by a power of two."""
    (result,) = call.results
    count = call.args[0].numel() // max(result.numel(), 1)
    return _divided(_sum(call), count)


def _product(call: Call) -> Terms:
    """Multiply and add up: bilinear, or linear with weights."""
    terms = [call.term(x) if _is_floating(x) else None for x in call.args]
    bounds = [x if t is None else t.bound for x, t in zip(call.args, terms, strict=True)]
    return _like(call, call.run(bounds), sum(t.grid for t in terms if t is not None))


def _product_added(call: Call) -> Terms:
    """Stand for `addmm(x, a, b, beta, alpha)` and its like."""
    added, left, right = (call.term(x) for x in call.args[:3])
    beta, alpha = (call.term(call.kwargs.get(name, 1)) for name in ("beta", "alpha"))
    product = left.bound @ right.bound
    bound = beta.bound * added.bound + alpha.bound * product
    return [Term(bound, max(beta.grid + added.grid, alpha.grid + left.grid + right.grid))]


def _added(call: Call) -> Terms:
    """Add or subtract two operands, one of them times alpha."""
    left, right = call.term(call.args[0]), call.term(call.args[1])
    alpha = call.term(call.argument(2, "alpha", 1))
    bound = left.bound + alpha.bound * right.bound
    if call.func.overloadpacket.__name__ == "rsub":
        bound = right.bound + alpha.bound * left.bound
    return [Term(bound, max(left.grid, right.grid) + max(alpha.grid, 0))]


def _times(call: Call) -> Terms:
    """Multiply element by element."""
    if call.args[0] is call.args[1]:
        return _raised(call, 2)
    left, right = call.term(call.args[0]), call.term(call.args[1])
    return [Term(left.bound * right.bound, left.grid + right.grid)]


def _pow(call: Call) -> Terms:
    """Raise to a small whole power."""
    exponent = call.args[1]
    if type(exponent) not in (int, float) or exponent not in (0, 1, 2, 3):
        raise Inexact
    return _complete(call) if exponent == 0 else _raised(call, int(exponent))


def _raised(call: Call, exponent: int) -> Terms:
    term = call.term(call.args[0]) if exponent == 1 else seen(call.args[0])
    return [Term(term.bound**exponent, term.grid * exponent)]


def _divided_by(call: Call) -> Terms:
    """Divide by powers of two."""
    value, divisor = call.term(call.args[0]), torch.as_tensor(call.args[1]).to(torch.float64)
    mantissa, exponent = torch.frexp(divisor.abs())
    if call.kwargs.get("rounding_mode") is not None or not bool((mantissa == 0.5).all()):
        raise Inexact
    largest = int(exponent.max()) - 1 if exponent.numel() else 0
    return [Term(value.bound / divisor.abs(), value.grid + largest)]


def _of_gradient(call: Call) -> Terms:
    """Stand for a backward kernel that moves or masks the gradient, its first operand."""
    term = call.term(call.args[0])
    rest = [x.to(torch.float64) if _is_floating(x) else x for x in call.args[1:]]
    return _like(call, call.run([term.bound, *rest]), term.grid)


def _sloped(call: Call) -> Terms:
    """Stand for `leaky_relu(x, slope)` and its backward `(gradient, x, slope, ...)`."""
    is_backward = _is_floating(call.args[1]) if len(call.args) > 1 else False
    slope = call.term(call.argument(2 if is_backward else 1, "negative_slope", 0.01))
    term = call.term(call.args[0]) if is_backward else seen(call.args[0])
    return [Term(term.bound * max(1.0, float(slope.bound)), term.grid + max(slope.grid, 0))]


def _tanh_backward(call: Call) -> Terms:
    gradient, value = call.term(call.args[0]), seen(call.args[1])
    return [Term(gradient.bound * (1 + value.bound**2), gradient.grid + 2 * max(value.grid, 0))]


def _sigmoid_backward(call: Call) -> Terms:
    gradient, value = call.term(call.args[0]), seen(call.args[1])
    bound = gradient.bound * value.bound * (1 + value.bound)
    return [Term(bound, gradient.grid + 2 * max(value.grid, 0))]


def _softmax_backward(call: Call) -> Terms:
    """Stand for `(gradient - sum(gradient * y)) * y`, in either order."""
    gradient, value, dim = call.term(call.args[0]), seen(call.args[1]), call.args[2]
    total = gradient.bound + (gradient.bound * value.bound).sum(dim, keepdim=True)
    return [Term(total * value.bound, gradient.grid + 2 * max(value.grid, 0))]


def _convolution(call: Call) -> Terms:
    value, weight = call.term(call.args[0]), call.term(call.args[1])
    bias = None if call.args[2] is None else call.term(call.args[2])
    bounds = [value.bound, weight.bound, None if bias is None else bias.bound]
    grid = max(value.grid + weight.grid, NO_GRID if bias is None else bias.grid)
    return _like(call, call.run([*bounds, *call.args[3:]]), grid)


def _convolution_backward(call: Call) -> Terms:
    gradient, value, weight = (call.term(x) for x in call.args[:3])
    found = call.func(gradient.bound, value.bound, weight.bound, *call.args[3:])
    grids = (gradient.grid + weight.grid, gradient.grid + value.grid, gradient.grid)
    return [
        None if bound is None else Term(bound, grid)
        for bound, grid in zip(found, grids, strict=True)
    ]


def _scattered(call: Call) -> Terms:
    """Add source elements at given places of a target, or put them there."""
    grids = [call.term(x).grid for x in pytree.tree_leaves(call.args) if _is_floating(x)]
    bounds = pytree.tree_map(lambda x: call.term(x).bound if _is_floating(x) else x, call.args)
    alpha = call.term(call.kwargs.get("alpha", 1))
    return _like(call, call.run(bounds), max(grids, default=NO_GRID) + max(alpha.grid, 0))


def _embedding_backward(call: Call) -> Terms:
    if call.args[4]:
        raise Inexact  # divides by how often each index comes
    return _of_gradient(call)


def _average_pool(call: Call) -> Terms:
    """Stand for `avg_pool2d(x, kernel, stride, padding, ceil, count_include_pad, divisor)`."""
    return _divided(_sum(call), _window(call, 1))


def _average_pool_backward(call: Call) -> Terms:
    return _divided(_of_gradient(call), _window(call, 2))


def _window(call: Call, position: int) -> int:
    """Return what every element of an average pool is divided by."""
    kernel = call.args[position]
    padding = call.argument(position + 2, "padding", [0])
    is_ceil = call.argument(position + 3, "ceil_mode", False)
    counts_padding = call.argument(position + 4, "count_include_pad", True)
    divisor = call.argument(position + 5, "divisor_override")
    if is_ceil or (any(padding) and not counts_padding):
        raise Inexact
    return int(divisor or math.prod(kernel) ** (2 // len(kernel)))


def _adaptive_pool(call: Call) -> Terms:
    value, size = call.args[0], call.args[1]
    return _divided(_sum(call), _adaptive_window(value.shape[-len(size) :], size))


def _adaptive_pool_backward(call: Call) -> Terms:
    gradient, value = call.args
    inner, outer = value.shape[-2:], gradient.shape[-2:]
    return _divided(_of_gradient(call), _adaptive_window(inner, outer))


def _adaptive_window(inner: Sequence[int], outer: Sequence[int]) -> int:
    if any(n % m for n, m in zip(inner, outer, strict=True)):
        raise Inexact
    return math.prod(inner) // math.prod(outer)


def _mse_loss(call: Call) -> Terms:
    gap = seen(call.args[0] - call.args[1])
    reduction = call.argument(2, "reduction", 1)
    bound = gap.bound**2 if reduction == 0 else (gap.bound**2).sum()
    terms: Terms = [Term(bound, 2 * gap.grid)]
    return _divided(terms, gap.bound.numel()) if reduction == 1 else terms


def _mse_loss_backward(call: Call) -> Terms:
    gradient, gap = call.term(call.args[0]), seen(call.args[1] - call.args[2])
    terms: Terms = [Term(2 * gradient.bound * gap.bound, gradient.grid + gap.grid)]
    return _divided(terms, gap.bound.numel()) if call.args[3] == 1 else terms


def _nll_loss(call: Call) -> Terms:
    """Stand for `(value, target, weight, reduction, ignored) -> loss, total weight`."""
    value, weight, reduction = call.term(call.args[0]), call.args[2], call.args[3]
    factor = None if weight is None else call.term(weight)
    bounds = [value.bound, call.args[1], None if factor is None else factor.bound]
    found = call.func(*bounds, *call.args[3:])[0].abs()
    terms: Terms = [Term(found, value.grid + (0 if factor is None else factor.grid))]
    if reduction == 1:
        terms = _divided(terms, float(call.results[1]))
    return [*terms, seen(call.results[1])]


def _nll_loss_backward(call: Call) -> Terms:
    weight, reduction, total = call.args[3], call.args[4], call.args[6]
    terms = _of_gradient(call)
    if weight is not None:
        finer = max(call.term(weight).grid, 0)
        terms = [None if t is None else Term(t.bound, t.grid + finer) for t in terms]
    return _divided(terms, float(total)) if reduction == 1 else terms


def _divided(terms: Terms, count: float) -> Terms:
    """Put terms on the grid that a division by `count`, done already, needs."""
    if not count or not is_power(count):
        raise Inexact
    finer = max(round(math.log2(abs(count))), 0)
    return [None if t is None else Term(t.bound, t.grid + finer) for t in terms]


def _like(call: Call, found: Sequence[Any], grid: int) -> Terms:
    """Return one term per result, from the operator's results on bounds."""
    return [
        Term(bound.abs().nan_to_num(posinf=0.0), grid) if _is_floating(result) else None
        for bound, result in zip(found, call.results, strict=True)
    ]


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


_MOVING: Final = """
clone cat stack index_select gather index _unsafe_index embedding repeat roll flip tril triu
constant_pad_nd slice_scatter select_scatter diagonal_scatter slice_backward select_backward
diagonal_backward unfold unfold_backward im2col neg contiguous reshape lift_fresh_copy
alias_copy view_copy permute_copy where scatter as_strided_copy repeat_interleave
reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d
upsample_nearest1d upsample_nearest2d channel_shuffle pixel_shuffle pixel_unshuffle
"""
_COMPLETING: Final = """
relu abs sign floor ceil round trunc clamp clamp_min clamp_max hardtanh maximum minimum max min
amax amin sort topk kthvalue median max_pool2d_with_indices max_pool3d_with_indices
adaptive_max_pool2d zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full
scalar_tensor arange eye fill zero rand randn rand_like randn_like bernoulli uniform normal
threshold empty_like_zeros lift_fresh heaviside sgn one_hot linspace tril_indices triu_indices
isnan isinf isfinite nan_to_num
"""
_GRADIENT_MOVING: Final = """
threshold_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward
adaptive_max_pool2d_backward hardtanh_backward
"""
# Rules of operators that round nothing whatever the sizes: no bits are counted.
STILL: Final[dict[str, Rule]] = {
    **dict.fromkeys(_MOVING.split(), _moved),
    **dict.fromkeys(_COMPLETING.split(), _complete),
    **dict.fromkeys(_GRADIENT_MOVING.split(), _of_gradient),
    "copy": _overwritten,
    "masked_fill": _filled,
}
# Rules of operators that add or multiply: bits are counted.
ADDING: Final[dict[str, Rule]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot"), _product),
    **dict.fromkeys(("addmm", "baddbmm", "addmv"), _product_added),
    **dict.fromkeys(("add", "sub", "rsub"), _added),
    **dict.fromkeys(("sum", "cumsum"), _sum),
    **dict.fromkeys(("leaky_relu", "leaky_relu_backward"), _sloped),
    **dict.fromkeys(
        ("index_add", "scatter_add", "index_put", "_unsafe_index_put", "_index_put_impl"),
        _scattered,
    ),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _nll_loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _nll_loss_backward),
    "_to_copy": _converted,
    "mean": _mean,
    "mul": _times,
    "pow": _pow,
    "div": _divided_by,
    "tanh_backward": _tanh_backward,
    "sigmoid_backward": _sigmoid_backward,
    "_softmax_backward_data": _softmax_backward,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding_dense_backward": _embedding_backward,
    "upsample_nearest2d_backward": _sum,
    "avg_pool2d": _average_pool,
    "avg_pool2d_backward": _average_pool_backward,
    "_adaptive_avg_pool2d": _adaptive_pool,
    "_adaptive_avg_pool2d_backward": _adaptive_pool_backward,
    "mse_loss": _mse_loss,
    "mse_loss_backward": _mse_loss_backward,
}
