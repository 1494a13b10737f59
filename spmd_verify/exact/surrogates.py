"""Exact stand-ins for operators that round, as a dispatch mode around a training step.

Below autograd, so that forward, backward and what composite operators are made of are all
seen; above the tracer, so that a captured graph holds the stand-ins. Nothing here reads a
value: fake tensors pass. Normative: docs/design.md part 3.8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.exact import layers
from spmd_verify.exact.grid import (
    FEWEST_GRADIENT_BITS,
    GRADIENT_BITS,
    Gradients,
    Replaced,
    few_bits,
    is_power,
    near_sum,
    nearest_power,
    power_of_two,
    probability,
    quantised,
)
from spmd_verify.exact.places import Places

aten = torch.ops.aten
Handler = Callable[[Replaced], Any]


class Surrogates(TorchDispatchMode):
    """Replaces operators that round by exact ones.

    Attributes:
        replaced: "operator at file:line" of what was replaced, in order.
    """

    def __init__(self, replaced: dict[str, None], dtype: torch.dtype) -> None:
        """Note replacements in `replaced`.

        Args:
            replaced: See above.
            dtype: The case's: how many bits there are.
        """
        super().__init__()
        self.replaced = replaced
        self._gradients = Gradients(GRADIENT_BITS.get(dtype, FEWEST_GRADIENT_BITS))
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
        made = handler(Replaced(plain, args, named, self._gradients))
        if made is NotImplemented:
            return func(*args, **named)
        self.replaced.setdefault(f"{base.strip('_')} at {place}")
        return args[0].copy_(made) if is_in_place else made


# -- handlers: a result, or NotImplemented to leave the operator alone ---------------------------


def _gridded(call: Replaced) -> Any:
    return quantised(call.run())


def _shared(call: Replaced) -> Any:
    return probability(call.run())


def _powered(call: Replaced) -> Any:
    return power_of_two(call.run(), is_signed=call.func is aten.reciprocal.default)


def _derivative(call: Replaced) -> Any:
    """Multiply the gradient by the derivative on the grid; both have the gradient's shape."""
    slope = call.func(torch.ones_like(call.args[0]), *call.args[1:], **call.kwargs)
    return call.gradients.coarse(aten.mul.Tensor(call.gradient, quantised(slope)))


def _coarse_gradient(call: Replaced) -> Any:
    """Let the kernel, which is exact on values of the grid, take and give few bits."""
    return call.gradients.coarse(call.func(call.gradient, *call.args[1:], **call.kwargs))


def _log_sigmoid(call: Replaced) -> Any:
    value, buffer = call.run()
    return quantised(value), buffer


def _log_softmax_backward(call: Replaced) -> Any:
    """Return `gradient - p * sum(gradient)`, p on the grid of probabilities."""
    gradient, output, dim = call.args[:3]
    share = probability(aten.exp.default(output))
    total = aten.sum.dim_IntList(gradient, [dim], True)
    return aten.sub.Tensor(gradient, aten.mul.Tensor(share, total))


def _pow(call: Replaced) -> Any:
    """Let roots and inverses be powers of two; leave other exponents to the proof."""
    value, exponent = call.args
    root = _ROOTS.get(exponent) if type(exponent) in (int, float) else None
    return NotImplemented if root is None else _powered(replace(call, func=root, args=[value]))


def _constant_product(call: Replaced) -> Any:
    """Give a product with a Python number a number of few bits."""
    value, number = call.args[:2]
    if type(number) is not float or few_bits(number) == number:
        return NotImplemented
    return call.func(value, few_bits(number), **call.kwargs)


def _constant_sum(call: Replaced) -> Any:
    """Give a sum with a Python number a number on the grid; alpha few bits.

    Numbers that the engine lifted, such as a learning rate, are not Python's and stay.
    """
    value, number, *rest = call.args
    alpha = call.kwargs.get("alpha", 1)
    is_off = type(number) is float and near_sum(number) != number
    is_long = type(alpha) is float and few_bits(alpha) != alpha
    if not is_off and not is_long:
        return NotImplemented
    named = {**call.kwargs, "alpha": few_bits(alpha)} if is_long else call.kwargs
    return call.func(value, near_sum(number) if is_off else number, *rest, **named)


def _constant_bounds(call: Replaced) -> Any:
    """Give a clamp bounds on the grid."""

    def near(bound: Any) -> Any:
        return near_sum(bound) if type(bound) is float else bound

    args = [near(bound) for bound in call.args]
    named = {key: near(bound) for key, bound in call.kwargs.items()}
    return _with_constants(call, args, named)


def _constant_fill(call: Replaced) -> Any:
    """Give a mask, a slope or a new tensor numbers of few bits."""
    args = [few_bits(x) if type(x) is float else x for x in call.args]
    return _with_constants(call, args, call.kwargs)


def _leaky_relu(call: Replaced) -> Any:
    """Give a leaky ReLU a slope of few bits; torch's default is none."""
    slope = call.args[1] if len(call.args) > 1 else 0.01
    return _with_constants(call, [call.args[0], few_bits(slope)], call.kwargs)


def _with_constants(call: Replaced, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a call with other numbers; leave it alone where they are the same."""
    pairs = [*zip(args, call.args, strict=False), *((kwargs[k], call.kwargs[k]) for k in kwargs)]
    if len(args) == len(call.args) and all(new is old or new == old for new, old in pairs):
        return NotImplemented
    return call.func(*args, **kwargs)


def _quotient(call: Replaced) -> Any:
    """Divide by the nearest power of two; a rounding division is left alone."""
    value, divisor = call.args[:2]
    if call.kwargs.get("rounding_mode") is not None or not isinstance(value, Tensor):
        return NotImplemented
    if isinstance(divisor, Tensor):
        dtype = torch.result_type(value, divisor)
        if not dtype.is_floating_point:
            return NotImplemented
        whole = aten._to_copy.default(divisor, dtype=dtype)
        return call.func(value, power_of_two(whole, is_signed=True))
    if type(divisor) not in (int, float) or divisor == 0 or is_power(divisor):
        return NotImplemented
    return call.func(value, nearest_power(divisor))


def _mean(call: Replaced) -> Any:
    """Sum and multiply by a power of two where the count is none."""
    value, dims, *keep = [*call.args, None][: max(len(call.args), 2)]
    dims = [dims] if isinstance(dims, int) else list(dims or range(value.dim()))
    count = math.prod(value.shape[dim] for dim in dims)
    if count and count == value.numel():
        call.gradients.take_mean(count)
    if not count or is_power(count):
        return NotImplemented
    total = aten.sum.dim_IntList(value, dims, *keep, **call.kwargs)
    return aten.mul.Tensor(total, 1.0 / nearest_power(count))


def _mean_loss(call: Replaced) -> Any:
    """Let `loss(value, target, mean)` be a sum times a power of two."""
    value, target, *reduction = call.args
    count = value.numel()
    if reduction not in ([], [1]) or not count:
        return NotImplemented
    call.gradients.take_mean(count)
    if is_power(count):
        return NotImplemented
    return aten.mul.Tensor(call.func(value, target, 2), 1.0 / nearest_power(count))


def _mean_loss_backward(call: Replaced) -> Any:
    """Let the backward of such a loss be that of its sum, scaled alike."""
    count = call.args[1].numel()
    if call.args[3] != 1 or not count or is_power(count):
        return NotImplemented
    return aten.mul.Tensor(call.func(*call.args[:3], 2), 1.0 / nearest_power(count))


def _nll_loss(call: Replaced) -> Any:
    """Divide by the power of two nearest to the weight of all targets that count.

    The backward kernel divides by the weight returned here, so it needs no stand-in.
    """
    value, target, weight, reduction, ignored = call.args
    if reduction != 1 or not target.numel():
        return NotImplemented
    call.gradients.take_mean(target.numel())
    total, count = call.func(value, target, weight, 2, ignored)
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
    _constant_fill: (
        *("masked_fill", "full", "full_like", "new_full", "fill", "scalar_tensor"),
        "leaky_relu_backward",
    ),
    # Backward kernels that are polynomials in the gradient and what forward gave.
    _coarse_gradient: ("tanh_backward", "sigmoid_backward", "_softmax_backward_data"),
    _nll_loss: ("nll_loss_forward", "nll_loss2d_forward"),
}
_HANDLERS: Final[dict[str, Handler]] = {
    **{name: handler for handler, names in _ROUNDING.items() for name in names},
    "log_sigmoid_forward": _log_sigmoid,
    "_log_softmax_backward_data": _log_softmax_backward,
    "leaky_relu": _leaky_relu,
    "pow": _pow,
    "mul": _constant_product,
    "div": _quotient,
    "mean": _mean,
    "mse_loss": _mean_loss,
    "mse_loss_backward": _mean_loss_backward,
    "native_layer_norm": layers.layer_norm,
    "native_layer_norm_backward": layers.layer_norm_backward,
    "native_batch_norm": layers.batch_norm,
    "native_batch_norm_backward": layers.batch_norm_backward,
    "_fused_rms_norm": layers.rms_norm,
    "_fused_rms_norm_backward": layers.rms_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu": layers.attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": layers.attention_backward,
}

# Kernels that round once and whose error is known: what goes to a grid.
ROUNDING_OPERATORS: Final = frozenset(
    (
        *(name for h in (_gridded, _shared, _powered, _derivative) for name in _ROUNDING[h]),
        *("log_sigmoid_forward", "native_layer_norm", "_fused_rms_norm", "native_batch_norm"),
    )
)
