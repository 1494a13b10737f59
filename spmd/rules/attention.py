"""Scaled dot product attention: batch and head dims are free, sequence and width are whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd.rules.base import Call, DimRule, Label, Rule, rule

aten = torch.ops.aten


def _labels(x: Tensor, batch: int, heads: int, free_heads: bool) -> list[Label | None]:
    """Label [batch, heads, ...] of a query, key, mask or statistic; broadcast dims have none."""
    labels: list[Label | None] = [None] * x.dim()
    if x.dim() >= 1 and x.shape[0] == batch and x.dim() >= 3:
        labels[0] = "batch"
    if free_heads and x.dim() >= 3 and x.shape[1] == heads:
        labels[1] = "head"
    return labels


def _attention(call: Call, query: Tensor, key: Tensor) -> Rule:
    batch, heads = query.shape[0], query.shape[1]
    free_heads = key.shape[1] == heads and query.shape[2] != heads
    mask = {call.argument(name) for name in ("attn_mask", "attn_bias")} - {None}
    nodes = _operand_nodes(call)
    inputs = []
    for node, x in zip(nodes, call.operands, strict=True):
        if node in mask and x.dim() < 3:
            inputs.append([None] * x.dim())
        else:
            inputs.append(_labels(x, batch, heads, free_heads))
    outputs = [
        _labels(o, batch, heads, free_heads) if isinstance(o, Tensor) else [] for o in call.outputs
    ]
    return DimRule(inputs, outputs)


def _operand_nodes(call: Call) -> list[Any]:
    found: list[Any] = []

    def visit(node: Any) -> Any:
        if isinstance(node.meta.get("val"), Tensor):
            found.append(node)
        return node

    torch.fx.node.map_arg((call.node.args, call.node.kwargs), visit)
    return found


@rule(aten._scaled_dot_product_flash_attention_for_cpu)
def _forward(call: Call) -> Rule:
    return _attention(call, call.operands[0], call.operands[1])


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _backward(call: Call) -> Rule:
    return _attention(call, call.operands[1], call.operands[2])
