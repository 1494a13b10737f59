"""Scaled dot product attention: batch, heads and queries are free, keys and width are whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd.rules.base import Call, DimRule, Label, Rule, rule

aten = torch.ops.aten


class _Attention:
    """Labels the dims of what belongs to the queries, to the keys, and of the mask.

    A causal mask is counted from the first query of all, which a part does not know, so that
    queries are free without one only.
    """

    def __init__(self, call: Call, query: Tensor, key: Tensor) -> None:
        self.batch, self.heads, self.queries = query.shape[0], query.shape[1], query.shape[2]
        self.head: Label | None = "head" if key.shape[1] == self.heads else None
        self.query: Label | None = None if call.argument("is_causal") else "query"
        mask = call.argument("attn_mask")
        self.mask = [] if mask is None else [self._masked(mask.meta["val"])]

    def of_queries(self, ndim: int = 4) -> list[Label | None]:
        """Label [batch, head, query, width], or a statistic without the width."""
        return ["batch", self.head, self.query, None][:ndim]

    @property
    def of_keys(self) -> list[Label | None]:
        """Label [batch, head, key, width]."""
        return ["batch", self.head, None, None]

    def _masked(self, mask: Tensor) -> list[Label | None]:
        """Label [..., query, key]; dims that are repeated have none."""
        sizes = (self.batch, self.heads, self.queries)
        labels: list[Label | None] = [*self.of_queries(3), None]
        own = [
            label if size == whole and size != 1 else None
            for label, size, whole in zip(
                labels[4 - mask.dim() : 3], mask.shape[:-1], sizes[4 - mask.dim() :], strict=True
            )
        ]
        return [*own, None]


@rule(aten._scaled_dot_product_flash_attention_for_cpu)
def _forward(call: Call) -> Rule:
    query, key = call.operands[:2]
    dims = _Attention(call, query, key)
    outputs: list[Any] = [dims.of_queries(), dims.of_queries(3)]
    return DimRule([dims.of_queries(), dims.of_keys, dims.of_keys, *dims.mask], outputs)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward)
def _backward(call: Call) -> Rule:
    """Every query adds to the gradients of all keys and values."""
    query, key = call.operands[1:3]
    dims = _Attention(call, query, key)
    queries, keys = dims.of_queries(), dims.of_keys
    inputs = [queries, queries, keys, keys, queries, dims.of_queries(3), *dims.mask]
    return DimRule(inputs, [queries, keys, keys], {"query": "sum"})
