"""Run a step without chance: dropout keeps everything, draws give their typical value.

For one experiment of examinations: a difference that vanishes here is a matter of random
numbers. The reference and the candidate both run so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from spmd_verify.backward_mode import backward_inside

# Their result is the input: what they do in evaluation.
_DROPOUTS: Final = frozenset(
    {
        torch.dropout,
        torch.dropout_,
        torch.alpha_dropout,
        torch.alpha_dropout_,
        torch.feature_dropout,
        torch.feature_dropout_,
        torch.feature_alpha_dropout,
        torch.feature_alpha_dropout_,
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
    }
)
# Drawn values -> what stands in: the mean of the distribution.
_UNIFORM: Final = frozenset({torch.rand, torch.rand_like, Tensor.uniform_})
_NORMAL: Final = frozenset({torch.randn, torch.randn_like, Tensor.normal_, torch.normal})
_CHOICES: Final = frozenset(
    {torch.bernoulli, Tensor.bernoulli, Tensor.bernoulli_, Tensor.exponential_}
)
_INTEGERS: Final = frozenset(
    {torch.randint, torch.randint_like, Tensor.random_, torch.multinomial, Tensor.multinomial}
)


class NoRandom(TorchFunctionMode):
    """Replaces what draws."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func`, or what stands in for it."""
        named = dict(kwargs or {})
        if func is Tensor.backward:
            return backward_inside(self, args, named)
        if func in _DROPOUTS:
            return args[0] if args else named["input"]
        if func is F.scaled_dot_product_attention and len(args) <= 4:
            named["dropout_p"] = 0.0
            return func(*args, **named)
        result = func(*args, **named)
        if not isinstance(result, Tensor):
            return result
        with torch._C.DisableTorchFunction():
            if func in _UNIFORM:
                return result.detach().fill_(0.5)
            if func in _NORMAL:
                return result.detach().zero_()
            if func in _CHOICES:
                return result.detach().fill_(1.0)
            if func in _INTEGERS:
                return result.detach().zero_()
            if func is torch.randperm:
                return torch.arange(result.numel(), out=result.detach())
        return result
