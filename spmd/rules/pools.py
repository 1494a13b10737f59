"""Pools that draw their regions: the drawn numbers are split with the batch."""

from __future__ import annotations

from typing import Any

import torch

from spmd.rules.base import Call, DimRule, Rule, rule

aten = torch.ops.aten


@rule(
    aten.fractional_max_pool2d, aten.fractional_max_pool3d, aten.fractional_max_pool2d_backward,
    aten.fractional_max_pool3d_backward,
)  # fmt: skip
def _fractional(call: Call) -> Rule | None:
    """The image [batch, channel, ...]; samples [batch, channel, spatial] come last."""
    spatial = len(call.argument("output_size"))
    backward = "backward" in call.target._schema.name
    image = call.operands[1] if backward else call.operands[0]
    if image.dim() != spatial + 2:
        return None
    inputs = [["batch", *([None] * (x.dim() - 1))] for x in call.operands]
    outputs = [["batch", *([None] * (spatial + 1))] for _ in call.outputs]
    return DimRule(inputs, outputs)


@rule(aten.affine_grid_generator)
def _affine_grid(call: Call) -> Rule:
    """One matrix per sample; the size argument names the batch, so it is made local."""
    out = call.outputs[0]
    assert out is not None

    def local(emitter: Any, call: Call, args: list[Any], kwargs: Any, layouts: Any) -> None:
        size = list(args[1])
        size[0] = emitter.sizes(tuple(out.shape), layouts[0])[0]
        args[1] = size

    labels: list[Any] = ["batch", *([None] * (out.dim() - 1))]
    return DimRule([["batch", None, None]], [labels], linear=(), local_args=local)
