"""Random rounding: what else the same program could have computed in the same precision.

Results of operators that round are moved to a neighbouring value at random, up and down
alike, in the dtype they have. Operators that add up many terms are moved by what rounding
each term does, which is much more than a neighbouring value where the terms cancel. Kernels
that sum and subtract inside, such as a normalisation, run as their parts. Float32 islands in
a float64 case are thus perturbed as float32.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table

from spmd_verify.noise import rounded_layer_norm
from spmd_verify.reference.float64_mode import EagerMode, note_island

# Operators whose floating results are rounded. Everything that moves, selects, masks or
# compares values is exact and left alone. Names without the trailing `_` of in-place forms.
_NAMES: Final = """
mm addmm bmm baddbmm addbmm addmv mv dot convolution convolution_backward
mkldnn_convolution _slow_conv2d_forward add sub rsub mul div pow exp expm1 log log1p log2
sqrt rsqrt reciprocal tanh sigmoid silu gelu softplus mish elu celu hardswish erf erfc
sin cos sinh cosh atan atan2 logsumexp _softmax _log_softmax _softmax_backward_data
_log_softmax_backward_data tanh_backward sigmoid_backward gelu_backward silu_backward
softplus_backward mish_backward elu_backward hardswish_backward
native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
native_batch_norm native_batch_norm_backward _native_batch_norm_legit
_fused_rms_norm _fused_rms_norm_backward
sum mean var std var_mean prod cumsum cumprod norm linalg_vector_norm
_scaled_dot_product_flash_attention_for_cpu
_scaled_dot_product_flash_attention_for_cpu_backward
nll_loss_forward nll_loss2d_forward mse_loss mse_loss_backward binary_cross_entropy
binary_cross_entropy_with_logits smooth_l1_loss huber_loss
embedding_dense_backward index_add scatter_add index_put _index_put_impl _unsafe_index_put
addcmul addcdiv lerp _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_rnn_layer
grid_sampler_2d upsample_bilinear2d upsample_bicubic2d avg_pool2d _adaptive_avg_pool2d
_fft_r2c _fft_c2r _fft_c2c cdist
_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_addcmul _foreach_addcdiv
_foreach_lerp _foreach_sqrt _foreach_pow _foreach_norm _fused_adamw _fused_adam _fused_sgd
"""
ROUNDING_OPERATORS: Final = frozenset(_NAMES.split())
# Operators that add up products or values: the sum of squares of their terms is the operator
# itself on squared operands.
ADDING_OPERATORS: Final = frozenset(
    (
        *("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "sum", "cumsum"),
        *("convolution", "convolution_backward", "embedding_dense_backward", "index_add"),
        *("scatter_add", "avg_pool2d", "_adaptive_avg_pool2d"),
    )
)
# Operators whose kernel sums and subtracts inside: rounding in there is as large as what is
# subtracted, however small the result, and a mean that is off moves every element alike. Torch's
# own decompositions run instead, each of their operators perturbed. Moving results alone left a
# floor of zero for the gradient of a batch norm of two samples, and a third of the noise of one
# over images. Private `torch._decomp`: the only table of them.
DECOMPOSED_OPERATORS: Final = frozenset(
    (
        *("native_layer_norm", "native_layer_norm_backward", "native_group_norm"),
        *("native_group_norm_backward", "native_batch_norm", "native_batch_norm_backward"),
        *("_softmax_backward_data", "_log_softmax_backward_data"),
    )
)
# Likewise, of those without a decomposition: they are given moved operands.
CANCELLING_OPERATORS: Final = frozenset(
    (
        *("_native_batch_norm_legit", "_fused_rms_norm_backward", "var", "std", "var_mean"),
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        *("linalg_inv_ex", "_linalg_solve_ex", "linalg_cholesky_ex", "linalg_lu_factor_ex"),
        *("linalg_qr", "_linalg_svd", "_linalg_eigh", "_linalg_slogdet", "_linalg_det"),
        *("linalg_solve_triangular", "triangular_solve", "cholesky_solve"),
    )
)
# Which of their operands: the value, or the gradient and the value. Later ones are statistics
# that kernels write to.
MOVED_OPERANDS: Final = 2
# Share of their elements moved: a variance of 2/3 ulp^2 is that of eight roundings, about
# what such a kernel does.
MOVED_OPERAND_SHARE: Final = 2.0 / 3.0
# Standard deviation of the rounding of one term, in u. A product that is rounded to nearest
# and added with one more rounding: sqrt(2) / sqrt(3).
TERM_DEVIATION: Final = 0.8
# Share of elements moved. One in six by one ulp gives a variance of ulp^2 / 6, that of
# stochastic rounding, which rounds each result up or down in proportion to its distance.
MOVED_SHARE: Final = 1.0 / 6.0
# Draws are made once per process and read from random offsets; also the elements that are
# perturbed at once, so that what is read and written stays in the cache: a tensor of 2^19
# elements took 4 times as long in one piece.
_POOL_SIZE: Final = 1 << 16
_POOL_SEED: Final = 20_11
# Several results of one operator are perturbed in one call where they have at most so many
# elements: beyond, copying them costs as much as the calls.
SMALL: Final = 1 << 12
# float16 overflows when values above 256 are squared.
_SQUARABLE: Final = (torch.float32, torch.float64, torch.bfloat16)
# Products of at least so many terms get the variances of their sums from row and column sums;
# below, running the operator twice takes less time than the calls for those.
MARGINAL_TERMS: Final = 1 << 20


class _Plan(NamedTuple):
    """What is done with one operator; decided once for each."""

    name: str
    is_decomposed: bool
    is_cancelling: bool
    is_adding: bool
    is_rounding: bool
    is_in_place: bool
    is_product: bool


_LAYER_NORM: Final[Mapping[str, Callable[..., Any]]] = {
    "native_layer_norm": rounded_layer_norm.forward,
    "native_layer_norm_backward": rounded_layer_norm.backward,
}


@lru_cache(maxsize=4096)
def _plan(func: Any) -> _Plan:
    """Return what is done with an operator."""
    name = func.overloadpacket.__name__
    return _Plan(
        name=name,
        is_decomposed=name in DECOMPOSED_OPERATORS,
        is_cancelling=name in CANCELLING_OPERATORS,
        is_adding=name in ADDING_OPERATORS,
        is_rounding=name.rstrip("_") in ROUNDING_OPERATORS,
        is_in_place=name.endswith("_"),
        is_product=name in ("mm", "addmm"),
    )


@lru_cache(maxsize=16)
def _sign_pool(dtype: torch.dtype, share: float) -> Tensor:
    """Return entries of -u, 0 or u, of which a share is not 0, twice over, [2 * _POOL_SIZE]."""
    draws = torch.rand(_POOL_SIZE, generator=torch.Generator().manual_seed(_POOL_SEED))
    half = share / 2
    signs = (draws < half).to(dtype) - (draws > 1 - half).to(dtype)
    scaled = signs * (torch.finfo(dtype).eps / 2)
    return torch.cat([scaled, scaled])


@lru_cache(maxsize=16)
def _normal_pool(dtype: torch.dtype) -> Tensor:
    """Return normal draws with the deviation of one term's rounding, twice over, in `dtype`."""
    draws = torch.randn(_POOL_SIZE, generator=torch.Generator().manual_seed(_POOL_SEED + 1))
    scaled = draws.to(dtype) * (TERM_DEVIATION * torch.finfo(dtype).eps / 2)
    return torch.cat([scaled, scaled])


class RandomRounding(EagerMode):
    """Perturb the results of rounding operators; has a random stream of its own.

    Attributes:
        islands: Places that computed in a coarser dtype than the case's.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        """Seed the perturbation.

        Args:
            seed: Different seeds give different perturbations.
            dtype: The case's dtype, to tell islands.
        """
        super().__init__()
        self.islands: dict[str, None] = {}
        self._dtype = dtype
        self._random = random.Random(seed)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator and perturb its floating results in place."""
        named = dict(kwargs or {})
        plan = _plan(func)
        if plan.is_decomposed:
            own = _LAYER_NORM.get(plan.name)
            if own is not None and not named and self._is_usual(args):
                return own(self, *args)
            with self:
                return decomposition_table[func](*args, **named)
        if plan.is_cancelling:
            moved = [self.moved(value) for value in args[:MOVED_OPERANDS]]
            args = (*moved, *args[MOVED_OPERANDS:])
        result = func(*args, **named)
        note_island(self.islands, func, result, self._dtype)
        if plan.is_adding and self._perturb_terms(func, args, named, result, plan.is_product):
            return result
        if plan.is_rounding:
            written = args[0] if result is None or plan.is_in_place else result
            if isinstance(written, Tensor):
                self._perturb(written)
            elif isinstance(written, (tuple, list)):
                self._perturb_all([entry for entry in written if isinstance(entry, Tensor)])
        return result

    def _is_usual(self, args: Sequence[Any]) -> bool:
        """Say whether all tensors have the case's dtype, computed in itself, and hold anything."""
        return self._dtype in (torch.float32, torch.float64) and all(
            value.dtype is self._dtype and value.numel() > 0
            for value in args
            if isinstance(value, Tensor)
        )

    def rounded(self, value: Tensor) -> Tensor:
        """Return a result that rounds, perturbed in place."""
        self._perturb(value)
        return value

    def total(self, value: Tensor, dims: list[int], *, keepdim: bool) -> Tensor:
        """Return a sum, perturbed by what rounding its terms does."""
        found = value.sum(dims, keepdim=keepdim)
        self._add_steps(found, value.square().sum(dims, keepdim=keepdim).sqrt_())
        return found

    def moved(self, value: Any) -> Any:
        """Return a perturbed copy of a floating tensor; anything else unchanged."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        moved = value.clone()
        self._perturb(moved, MOVED_OPERAND_SHARE)
        return moved

    def _perturb_terms(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        result: Any,
        is_product: bool,
    ) -> bool:
        """Move the results of a sum by what rounding its terms does, in place.

        Returns:
            False where the squares of the operands are out of the dtype's range or tell
            nothing, as for complex operands.
        """
        results = result if isinstance(result, tuple) else (result,)
        outputs = [value for value in results if isinstance(value, Tensor)]
        if not all(value.dtype in _SQUARABLE for value in outputs) or "beta" in kwargs:
            return False
        if is_product and not kwargs and len(args) <= 3 and _num_terms(args) >= MARGINAL_TERMS:
            self._add_steps(result, *_deviations(args))
            return True
        squares = func(*[_squared(value) for value in args], **kwargs)
        for value, square in zip(
            results, squares if isinstance(squares, tuple) else (squares,), strict=True
        ):
            if isinstance(value, Tensor) and value.numel():
                self._add_steps(value, square.sqrt_())
        return True

    def _add_steps(self, value: Tensor, deviation: Tensor, columns: Tensor | None = None) -> None:
        """Add normal draws of a deviation to all elements that are not whole numbers, in place.

        Args:
            value: What is moved, any shape.
            deviation: In units of one term's rounding; the shape of `value`, or a column per
                row, [rows, 1].
            columns: Then the other factor of the deviations, [columns].
        """
        # Infinite ones stay what they are: a finite step times 0 is 0.
        deviation.clamp_(max=torch.finfo(value.dtype).max)
        rows = math.prod(value.shape[1:])
        size = max(_POOL_SIZE // max(rows, 1), 1) if value.ndim else 1
        pieces = value.split(size) if value.ndim else (value,)
        for piece, part in zip(
            pieces, deviation.split(size) if value.ndim else (deviation,), strict=True
        ):
            step = part * self._draws(piece.shape, value.dtype)
            if columns is not None:
                step.mul_(columns)
            piece.addcmul_(step, piece.round().ne_(piece))

    def _perturb_all(self, values: Sequence[Tensor]) -> None:
        """Perturb several results of one operator, small ones of one dtype together, in place."""
        small: dict[torch.dtype, list[Tensor]] = {}
        for value in values:
            if value.dtype.is_floating_point and value.numel() <= SMALL:
                small.setdefault(value.dtype, []).append(value)
            else:
                self._perturb(value)
        for group in small.values():
            flat = torch.cat([value.reshape(-1) for value in group])
            self._perturb(flat)
            moved = flat.split([value.numel() for value in group])
            for value, new in zip(group, moved, strict=True):
                value.copy_(new.view(value.shape))

    def _perturb(self, value: Tensor, share: float = MOVED_SHARE) -> None:
        """Move a share of the elements to a neighbouring value, in place.

        Whole numbers keep their value: sums of counts and positions are exact.
        """
        if value.dtype.is_complex:
            value = torch.view_as_real(value)
        if not value.dtype.is_floating_point or not value.numel():
            return
        if value.numel() <= _POOL_SIZE:
            self._perturb_piece(value, share)
        elif (flat := _flat_view(value)) is not None:
            for piece in flat.split(_POOL_SIZE):
                self._perturb_piece(piece, share)
        else:
            for piece in value:
                self._perturb(piece, share)

    def _perturb_piece(self, value: Tensor, share: float) -> None:
        """Perturb at most _POOL_SIZE elements, in place."""
        signs = self._from(_sign_pool(value.dtype, share), value.shape)
        largest = torch.finfo(value.dtype).max
        # Adding x * (eps / 2) rounds to the next value, or the one after a power of two.
        # Infinite elements stay what they are: a finite number times 0 is 0.
        moves = value.round().ne_(value).mul_(signs)
        value.addcmul_(value.clamp(-largest, largest), moves)

    def _draws(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return normal draws with the deviation of one term's rounding, of a shape."""
        return self._from(_normal_pool(dtype), shape)

    def _from(self, pool: Tensor, shape: Sequence[int]) -> Tensor:
        """Return entries of a doubled pool from a random place, of a shape."""
        count, offset = math.prod(shape), int(self._random.random() * _POOL_SIZE)
        if count > _POOL_SIZE:
            turns = -(-count // _POOL_SIZE)
            found = pool[offset : offset + _POOL_SIZE].repeat(turns)[:count]
        else:
            found = pool[offset : offset + count]
        return found.view(shape)


def _num_terms(args: Sequence[Any]) -> int:
    """Return how many products `mm` or `addmm` adds up."""
    left, right = args[-2:]
    return int(left.shape[0] * left.shape[1] * right.shape[1])


def _deviations(args: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return factors of the deviations of a product's elements, [rows, 1] and [columns].

    The variance of element (i, j) is the sum over k of (a_ik b_kj)^2. Its sums along rows and
    columns cost a matrix-vector product each; their outer product over the total has the same
    sums, so that the expected error of every row, every column and the whole is the same. It
    is the variance itself where one operand's squares are alike over k or over its other dim.

    Args:
        args: Of `mm` or `addmm` with factors of 1; an added tensor is one more term.
    """
    left, right = args[-2].square(), args[-1].square()
    rows, columns = left @ right.sum(1), left.sum(0) @ right
    if len(args) > 2:
        added = args[0].square().broadcast_to(len(rows), len(columns))
        rows, columns = rows + added.sum(1), columns + added.sum(0)
    tiny = torch.finfo(rows.dtype).tiny
    shares = columns / columns.sum().clamp(min=tiny)
    return rows.sqrt_().unsqueeze(1), shares.sqrt_()


def _flat_view(value: Tensor) -> Tensor | None:
    """Return all elements of a tensor as one dim in the order of memory, or None."""
    if value.is_contiguous():
        return value.view(-1)
    order = sorted(range(value.ndim), key=value.stride, reverse=True)
    ordered = value.permute(order)
    return ordered.view(-1) if ordered.is_contiguous() else None


@contextmanager
def without_onednn() -> Iterator[None]:
    """Turn oneDNN off; `torch.backends.mkldnn.flags` would also change what it does not name."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def _squared(value: Any) -> Any:
    """Return the square of a floating tensor; anything else unchanged."""
    return value.square() if isinstance(value, Tensor) and value.is_floating_point() else value
