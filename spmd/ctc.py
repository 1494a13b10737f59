"""CTC loss with static shapes: targets in rows, one per sample, so that the batch is free.

torch sizes the loss's memory by the longest target and takes the targets of all samples
end to end; neither can be traced or divided. Here the width of the target rows is the
longest target, and what torch's kernel returns is padded to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from spmd.errors import SizeChanged
from spmd.ops import define

aten = torch.ops.aten
own = torch.ops.spmd


def _forward(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor,
    blank: int, zero_infinity: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    loss, alpha = aten._ctc_loss.default(
        log_probs, targets.contiguous(), input_lengths.tolist(), target_lengths.tolist(), blank,
        zero_infinity,
    )  # fmt: skip
    missing = 2 * targets.shape[1] + 1 - alpha.shape[2]
    return loss, torch.nn.functional.pad(alpha, (0, missing))


def _fake_forward(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    steps, batch = log_probs.shape[:2]
    alpha = log_probs.new_empty((batch, steps, 2 * targets.shape[1] + 1))
    return log_probs.new_empty((batch,)), alpha


def _backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor,
    target_lengths: Tensor, loss: Tensor, alpha: Tensor, blank: int, zero_infinity: bool,
) -> Tensor:  # fmt: skip
    lengths = target_lengths.tolist()
    alpha = alpha[:, :, : 2 * max(lengths, default=0) + 1].contiguous()
    return aten._ctc_loss_backward.default(
        grad, log_probs, targets.contiguous(), input_lengths.tolist(), lengths, loss, alpha,
        blank, zero_infinity,
    )  # fmt: skip


def _within(x: Tensor, limit: int) -> Tensor:
    largest = int(x.max()) if x.numel() else 0
    if largest > limit:
        raise SizeChanged("longest target", limit, largest)
    return x.clone()


_LENGTHS = "Tensor input_lengths, Tensor target_lengths"
define(
    f"ctc_loss(Tensor log_probs, Tensor targets, {_LENGTHS}, int blank, bool zero_infinity)"
    " -> (Tensor, Tensor)",
    _forward,
    _fake_forward,
)
define(
    f"ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, {_LENGTHS}, "
    "Tensor loss, Tensor alpha, int blank, bool zero_infinity) -> Tensor",
    _backward,
    lambda _grad, log_probs, *_: torch.empty_like(log_probs),
)
define("within(Tensor x, SymInt limit) -> Tensor", _within, lambda x, _limit: torch.empty_like(x))

Real = Callable[[Tensor], Tensor]


def _rows(targets: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """Return end-to-end targets as rows of `longest`; what is past a target is not read."""
    first = lengths.cumsum(0) - lengths
    positions = first.unsqueeze(1) + torch.arange(longest, device=targets.device)
    return targets[positions.clamp(max=max(targets.shape[0] - 1, 0))]


def _as_tensor(lengths: Any) -> Tensor:
    return lengths if isinstance(lengths, Tensor) else torch.tensor(lengths)


def traced_forward(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    zero_infinity: bool = False, *, measure: Callable[..., int], real: Real,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Stand for `aten::_ctc_loss` while a step is traced.

    Args:
        log_probs: [steps, samples, classes].
        targets: [samples, longest], or all of them end to end.
        input_lengths: Steps of each sample.
        target_lengths: Targets of each sample.
        blank: Class of the blank.
        zero_infinity: Whether infinite losses count zero.
        measure: Calls a function on real values and returns its number.
        real: Gives the real value of a traced tensor.
    """
    input_lengths, target_lengths = _as_tensor(input_lengths), _as_tensor(target_lengths)
    if targets.dim() == 1:
        longest = measure(lambda v: v.max() if v.numel() else 0, real(target_lengths))
        target_lengths = own.within(target_lengths, longest)
        targets = _rows(targets, target_lengths, longest)
    return own.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)


def traced_backward(
    grad: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any,
    loss: Tensor, alpha: Tensor, blank: int, zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """Stand for `aten::_ctc_loss_backward`; `alpha` is what `traced_forward` returned."""
    input_lengths, target_lengths = _as_tensor(input_lengths), _as_tensor(target_lengths)
    if targets.dim() == 1:
        targets = _rows(targets, target_lengths, (alpha.shape[2] - 1) // 2)
    return own.ctc_loss_backward(
        grad, log_probs, targets, input_lengths, target_lengths, loss, alpha, blank, zero_infinity
    )
