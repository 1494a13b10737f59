"""Exact stand-ins for operators that round, as a dispatch mode around a training step.

Below autograd, so that forward, backward and what composite operators are made of are all
seen; above the tracer, so that a captured graph holds the stand-ins. Nothing here reads a
value: fake tensors pass. Normative: docs/design.md part 3.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify import exact_layers as layers
from spmd_verify.exact_grid import (
    few_bits,
    is_power,
    near_sum,
    nearest_power,
    power_of_two,
    probability,
    quantised,
)
from spmd_verify.exact_places import Places

aten = torch.ops.aten
Handler = Callable[[Any, Sequence[Any], dict[str, Any]], Any]


class Surrogates(TorchDispatchMode):
    """Replaces operators that round by exact ones.

    Attributes:
        replaced: "operator at file:line" of what was replaced, in order.
    """

    def __init__(self, replaced: dict[str, None]) -> None:
        """Note replacements in `replaced`."""
        super().__init__()
        self.replaced = replaced
        self._places = Places()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator or what stands in for it."""
        named, place = dict(kwargs or {}), self._places.here()
        name = func.overloadpacket.__name__
        is_in_place = name in _IN_PLACE
        base = name.removesuffix("_") if is_in_place else name
        handler = _HANDLERS.get(base)
        if handler is None:
            return func(*args, **named)
        plain = getattr(getattr(aten, base), func._overloadname) if is_in_place else func
        made = handler(plain, args, named)
        if made is NotImplemented:
            return func(*args, **named)
        self.replaced.setdefault(f"{base.strip('_')} at {place}")
        return args[0].copy_(made) if is_in_place else made


# -- handlers: a result, or NotImplemented to leave the operator alone ---------------------------


def _gridded(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return quantised(func(*args, **kwargs))


def _shared(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return probability(func(*args, **kwargs))


def _powered(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return power_of_two(func(*args, **kwargs), is_signed=func is aten.reciprocal.default)


def _derivative(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Multiply the gradient by the derivative on the grid; both have the gradient's shape."""
    slope = func(torch.ones_like(args[0]), *args[1:], **kwargs)
    return aten.mul.Tensor(args[0], quantised(slope))


def _log_sigmoid(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    value, buffer = func(*args, **kwargs)
    return quantised(value), buffer


def _log_softmax_backward(_func: Any, args: Sequence[Any], _kwargs: dict[str, Any]) -> Any:
    """Return `gradient - p * sum(gradient)`, p on the grid of probabilities."""
    gradient, output, dim = args[:3]
    share = probability(aten.exp.default(output))
    total = aten.sum.dim_IntList(gradient, [dim], True)
    return aten.sub.Tensor(gradient, aten.mul.Tensor(share, total))


def _pow(_func: Any, args: Sequence[Any], _kwargs: dict[str, Any]) -> Any:
    """Let roots and inverses be powers of two; leave other exponents to the proof."""
    exponent = args[1]
    root = _ROOTS.get(exponent) if type(exponent) in (int, float) else None
    return NotImplemented if root is None else _powered(root, args[:1], {})


def _constant_product(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Give a product with a Python number a number of few bits."""
    number = args[1]
    if type(number) is not float or few_bits(number) == number:
        return NotImplemented
    return func(args[0], few_bits(number), *args[2:], **kwargs)


def _constant_sum(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Give a sum with a Python number a number on the grid; alpha few bits.

    Numbers that the engine lifted, such as a learning rate, are not Python's and stay.
    """
    number, alpha = args[1], kwargs.get("alpha", 1)
    is_off = type(number) is float and near_sum(number) != number
    is_long = type(alpha) is float and few_bits(alpha) != alpha
    if not is_off and not is_long:
        return NotImplemented
    changed = {**kwargs, "alpha": few_bits(alpha)} if is_long else kwargs
    return func(args[0], near_sum(number) if is_off else number, *args[2:], **changed)


def _constant_bounds(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Give a clamp bounds on the grid."""

    def near(bound: Any) -> Any:
        return near_sum(bound) if type(bound) is float else bound

    bounds, named = [near(b) for b in args[1:]], {key: near(b) for key, b in kwargs.items()}
    if bounds == list(args[1:]) and named == kwargs:
        return NotImplemented
    return func(args[0], *bounds, **named)


def _constant_fill(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Fill with a number of few bits."""
    changed = [few_bits(x) if type(x) is float else x for x in args]
    if all(new is old or new == old for new, old in zip(changed, args, strict=True)):
        return NotImplemented
    return func(*changed, **kwargs)


def _constant_slope(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Give a leaky ReLU or its backward a slope of few bits."""
    changed = [few_bits(x) if type(x) is float else x for x in args]
    if func is aten.leaky_relu.default and len(args) < 2:
        changed.append(few_bits(0.01))
    return func(*changed, **kwargs)


def _quotient(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Divide by the nearest power of two; a rounding division is left alone."""
    value, divisor = args[:2]
    if kwargs.get("rounding_mode") is not None or not isinstance(value, Tensor):
        return NotImplemented
    if isinstance(divisor, Tensor):
        dtype = torch.result_type(value, divisor)
        if not dtype.is_floating_point:
            return NotImplemented
        whole = aten._to_copy.default(divisor, dtype=dtype)
        return func(value, power_of_two(whole, is_signed=True))
    if type(divisor) not in (int, float) or divisor == 0 or is_power(divisor):
        return NotImplemented
    return func(value, nearest_power(divisor))


def _mean(_func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Sum and multiply by a power of two where the count is none."""
    value, dims = args[0], args[1] if len(args) > 1 else None
    dims = [dims] if isinstance(dims, int) else list(dims or range(value.dim()))
    count = math.prod(value.shape[dim] for dim in dims)
    if not count or is_power(count):
        return NotImplemented
    total = aten.sum.dim_IntList(value, dims, len(args) > 2 and args[2], **kwargs)
    return aten.mul.Tensor(total, 1.0 / nearest_power(count))


def _mean_loss(func: Any, args: Sequence[Any], _kwargs: dict[str, Any]) -> Any:
    """Let `loss(value, target, mean)` be a sum times a power of two."""
    count, reduction = args[0].numel(), args[2] if len(args) > 2 else 1
    if reduction != 1 or not count or is_power(count):
        return NotImplemented
    return aten.mul.Tensor(func(*args[:2], 2), 1.0 / nearest_power(count))


def _mean_loss_backward(func: Any, args: Sequence[Any], _kwargs: dict[str, Any]) -> Any:
    """Let the backward of such a loss be that of its sum, scaled alike."""
    count = args[1].numel()
    if args[3] != 1 or not count or is_power(count):
        return NotImplemented
    return aten.mul.Tensor(func(*args[:3], 2), 1.0 / nearest_power(count))


def _nll_loss(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Divide by the power of two nearest to the weight of all targets that count.

    The backward kernel divides by the weight returned here, so it needs no stand-in.
    """
    value, target, weight, reduction, ignored = args
    if reduction != 1:
        return NotImplemented
    total, count = func(value, target, weight, 2, ignored, **kwargs)
    rounded = power_of_two(count)
    return aten.div.Tensor(total, rounded), rounded


_ROOTS: Final = {
    -1: aten.reciprocal.default,
    -0.5: aten.rsqrt.default,
    0.5: aten.sqrt.default,
}
_IN_PLACE: Final = frozenset(
    (
        *("mul_", "add_", "sub_", "div_", "pow_", "clamp_", "clamp_min_", "clamp_max_"),
        *("tanh_", "sigmoid_", "silu_", "gelu_", "exp_", "log_", "sqrt_", "rsqrt_"),
        *("masked_fill_", "fill_"),
    )
)
# Operators whose result goes to the grid, becomes a probability, or scales others.
_ROUNDING: Final[dict[Handler, tuple[str, ...]]] = {
    _gridded: (
        *("tanh", "sigmoid", "gelu", "silu", "softplus", "mish", "elu", "hardswish", "hardsigmoid"),
        *("exp", "expm1", "exp2", "log", "log1p", "log2", "sin", "cos", "erf", "erfc", "atan"),
        *("atan2", "sinh", "cosh", "asinh", "logsumexp", "_log_softmax"),
    ),
    _shared: ("_softmax",),
    _powered: ("sqrt", "rsqrt", "reciprocal", "linalg_vector_norm", "norm", "var", "std"),
    # Backward kernels `f(gradient, ...)` that multiply by a derivative which rounds.
    _derivative: (
        *("gelu_backward", "silu_backward", "softplus_backward", "mish_backward"),
        *("elu_backward", "hardswish_backward", "hardsigmoid_backward", "log_sigmoid_backward"),
    ),
    _constant_sum: ("add", "sub", "rsub"),
    _constant_bounds: ("clamp", "clamp_min", "clamp_max", "hardtanh", "hardtanh_backward"),
    _constant_fill: ("masked_fill", "full", "full_like", "new_full", "fill", "scalar_tensor"),
    _constant_slope: ("leaky_relu", "leaky_relu_backward"),
    _nll_loss: ("nll_loss_forward", "nll_loss2d_forward"),
}
_HANDLERS: Final[dict[str, Handler]] = {
    **{name: handler for handler, names in _ROUNDING.items() for name in names},
    "log_sigmoid_forward": _log_sigmoid,
    "_log_softmax_backward_data": _log_softmax_backward,
    "pow": _pow,
    "mul": _constant_product,
    "div": _quotient,
    "mean": _mean,
    "mse_loss": _mean_loss,
    "mse_loss_backward": _mean_loss_backward,
    "native_layer_norm": layers.layer_norm,
    "native_layer_norm_backward": layers.layer_norm_backward,
    "_fused_rms_norm": layers.rms_norm,
    "_fused_rms_norm_backward": layers.rms_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": layers.attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": layers.attention_backward,
}

# Kernels that round once and whose error is known: what goes to a grid.
ROUNDING_OPERATORS: Final = frozenset(
    (
        *(name for h in (_gridded, _shared, _powered, _derivative) for name in _ROUNDING[h]),
        *("log_sigmoid_forward", "native_layer_norm", "_fused_rms_norm"),
    )
)
