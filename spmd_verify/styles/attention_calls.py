"""See the calls of `F.scaled_dot_product_attention` in a block of code, and answer them.

A function mode sees what the model calls, also under a name it imported; but inside a Python
function of torch that a mode has seen itself (`F.multi_head_attention_forward`) modes are off.
There the name in `torch.nn.functional` is looked up, so that is replaced as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# The builtin itself: the attribute may be ours for a while.
SCALED_DOT_PRODUCT: Final = F.scaled_dot_product_attention


@dataclass(frozen=True)
class Call:
    """The arguments of one call, as the function's signature has them.

    Attributes:
        query: [..., queries, width].
        key: [..., keys, width]; fewer heads at dim -3 where `enable_gqa`.
        value: [..., keys, value width].
        attn_mask: Boolean (seen or not) or added to the scores; broadcasts to the scores.
        dropout_p: Of the shares.
        is_causal: Position i sees positions <= i.
        scale: Factor of the scores; `1 / sqrt(width)` where None.
        enable_gqa: Groups of queries share keys and values.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def plain(self) -> Tensor:
        """Return what torch gives."""
        return SCALED_DOT_PRODUCT(
            self.query,
            self.key,
            self.value,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )


Answer = Callable[[Call], Tensor]


class _Mode(TorchFunctionMode):
    """Answer the builtin; let everything else pass."""

    def __init__(self, answer: Callable[..., Tensor]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        if func is SCALED_DOT_PRODUCT:
            return self._answer(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def answered(answer: Answer) -> Iterator[None]:
    """Have `answer` compute every scaled dot product attention, recomputed ones in backward too.

    While it answers, the function is torch's own again.
    """

    def replaced(*args: Any, **kwargs: Any) -> Tensor:
        with _as(SCALED_DOT_PRODUCT), torch._C.DisableTorchFunction():
            return answer(Call(*args, **kwargs))

    with _as(replaced), _Mode(replaced):
        yield


@contextmanager
def _as(function: Any) -> Iterator[None]:
    """Bind the name in `torch.nn.functional` for a while."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = function
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
