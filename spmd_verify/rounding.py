"""Random rounding: what else the same program could have computed in the same precision.

Results of operators that round are moved to a neighbouring value at random, up and down
alike, in the dtype they have. Operators that add up many terms are moved by what rounding
each term does, which is much more than a neighbouring value where the terms cancel. Kernels
that sum and subtract inside, such as a normalisation, run as their parts. Float32 islands in
a float64 case are thus perturbed as float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.float64_mode import note_island

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
# Signs are drawn once and read from a random offset; drawing them per operator took two
# thirds of the time of a perturbed step (measured on a 3-layer transformer, 2 cores).
_POOL_SIZE: Final = 1 << 16
# float16 overflows when values above 256 are squared.
_SQUARABLE: Final = (torch.float32, torch.float64, torch.bfloat16)


class RandomRounding(TorchDispatchMode):
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
        self._generator = torch.Generator().manual_seed(seed)
        self._offset = 0
        self._draw_pool = torch.rand(_POOL_SIZE, generator=self._generator)
        self._pools: dict[tuple[torch.dtype, float], Tensor] = {}
        self._normal_pools: dict[torch.dtype, Tensor] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator and perturb its floating results in place."""
        named = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in DECOMPOSED_OPERATORS:
            with self:
                return decomposition_table[func](*args, **named)
        if name in CANCELLING_OPERATORS:
            moved = [self._moved(value) for value in args[:MOVED_OPERANDS]]
            args = (*moved, *args[MOVED_OPERANDS:])
        result = func(*args, **named)
        note_island(self.islands, func, result, self._dtype)
        if name in ADDING_OPERATORS and self._perturb_terms(func, args, named, result):
            return result
        if name.rstrip("_") in ROUNDING_OPERATORS:
            written = args[0] if result is None or name.endswith("_") else result
            if isinstance(written, Tensor):
                self._perturb(written)
            elif isinstance(written, (tuple, list)):
                for entry in written:
                    if isinstance(entry, Tensor):
                        self._perturb(entry)
        return result

    def _moved(self, value: Any) -> Any:
        """Return a perturbed copy of a floating tensor; anything else unchanged."""
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        moved = value.clone()
        self._perturb(moved, MOVED_OPERAND_SHARE)
        return moved

    def _perturb_terms(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any
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
        squares = func(*[_squared(value) for value in args], **kwargs)
        for value, square in zip(
            results, squares if isinstance(squares, tuple) else (squares,), strict=True
        ):
            if isinstance(value, Tensor) and value.numel():
                step = self._draws(value.numel(), value.dtype).reshape(value.shape)
                step = step * square.sqrt_()
                step.masked_fill_(value == value.round(), 0.0)
                value.add_(step)
        return True

    def _perturb(self, value: Tensor, share: float = MOVED_SHARE) -> None:
        """Move a share of the elements to a neighbouring value, in place.

        Integers keep their value: sums of counts and positions are exact.
        """
        if value.is_complex():
            value = torch.view_as_real(value)
        if not value.is_floating_point() or not value.numel():
            return
        signs = self._signs(value.numel(), value.dtype, share).reshape(value.shape)
        # Adding x * (eps / 2) rounds to the next value, or the one after a power of two.
        step = value * signs
        step.masked_fill_(value == value.round(), 0.0)
        value.add_(step)

    def _signs(self, count: int, dtype: torch.dtype, share: float) -> Tensor:
        """Return `count` entries of -u, 0 or u, [count], of which a share is not 0."""
        if (dtype, share) not in self._pools:
            draws, half = self._draw_pool, share / 2
            signs = (draws < half).to(dtype) - (draws > 1 - half).to(dtype)
            scaled = signs * (torch.finfo(dtype).eps / 2)
            self._pools[dtype, share] = torch.cat([scaled, scaled])
        return self._from(self._pools[dtype, share], count)

    def _draws(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return `count` normal draws with the deviation of one term's rounding, [count]."""
        if dtype not in self._normal_pools:
            draws = torch.randn(_POOL_SIZE, generator=self._generator)
            scaled = draws.to(dtype) * (TERM_DEVIATION * torch.finfo(dtype).eps / 2)
            self._normal_pools[dtype] = torch.cat([scaled, scaled])
        return self._from(self._normal_pools[dtype], count)

    def _from(self, pool: Tensor, count: int) -> Tensor:
        """Return the next `count` entries of a doubled pool, [count]."""
        # An odd stride through the pool: no two operators of a step see the same signs.
        self._offset = (self._offset + 40503) % _POOL_SIZE
        if count > _POOL_SIZE:
            turns = -(-count // _POOL_SIZE)
            return pool[self._offset : self._offset + _POOL_SIZE].repeat(turns)[:count]
        return pool[self._offset : self._offset + count]


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
