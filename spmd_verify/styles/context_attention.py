"""Attention with the sequence over the ranks of a group: torch's own, or the project's ring.

Tensors are whole on every rank outside, and so are their gradients. A call takes this rank's
positions of queries, keys and values, attends, and puts the output together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from spmd_verify.styles.attention_calls import Call
from spmd_verify.styles.ring_attention import Ring, attend
from spmd_verify.styles.sequence import Split, chunked, part_of, whole_of


def ring(call: Call, group: dist.ProcessGroup) -> Tensor:
    """Answer a call with ring attention.

    Dropout takes the factors that one device draws, whole, and keeps its rows: on CPU torch
    drops shares of the shape [..., queries, keys] in one draw (2.13, `MATH`).
    """
    query, key, value = _broadcast(call)
    device = query.device
    rows, columns = query.shape[-2], key.shape[-2]
    queries, keys = chunked(rows, group, device), chunked(columns, group, device)
    scale = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
    mask = None if call.attn_mask is None else _added(call.attn_mask, query, columns)
    kept = None
    if call.dropout_p > 0:
        kept = F.dropout(query.new_ones(*query.shape[:-1], columns), call.dropout_p)
    out = attend(
        part_of(query, -2, queries),
        part_of(key, -2, keys),
        part_of(value, -2, keys),
        Ring(queries, keys, call.is_causal, scale),
        None if mask is None else part_of(mask, -2, queries),
        None if kept is None else kept[..., queries.own, :],
    )
    return whole_of(out, -2, queries)


def torchs(call: Call, group: dist.ProcessGroup, mesh: Any) -> Tensor:
    """Answer a call with torch's `context_parallel`, whose buffer says which positions are ours.

    Its load balancing gives a rank positions of both ends of the sequence.
    """
    positions = torch.arange(call.query.shape[-2], device=call.query.device)
    with sdpa_kernel(SDPBackend.MATH), _sharded(mesh, positions):
        everyone = [torch.empty_like(positions) for _ in range(group.size())]
        dist.all_gather(everyone, positions, group=group)
        split = Split(group, tuple(everyone))
        query, key, value = (
            part_of(each, -2, split) for each in (call.query, call.key, call.value)
        )
        # Looked up here: the context has put its own function in place of the builtin.
        out = F.scaled_dot_product_attention(
            query, key, value, scale=call.scale, enable_gqa=call.enable_gqa
        )
    return whole_of(out, -2, split)


def torch_refuses_call(call: Call, ranks: int) -> str | None:
    """Return why torch's context parallelism does not take a call, None where it does.

    It splits the third of four dims into two parts per rank; its rules for causal attention on
    CPU are missing (2.13: `_scaled_dot_product_flash_attention_for_cpu` has none).
    """
    length = call.query.shape[-2]
    reasons = {
        "is causal": call.is_causal,
        "has a mask": call.attn_mask is not None,
        "drops shares": call.dropout_p > 0,
        "is on no four dims": call.query.ndim != 4,
        "has other keys than queries": call.key.shape[-2] != length,
        f"has {length} positions, {2 * ranks} parts": length % (2 * ranks) != 0,
        "has leading sizes that broadcast": call.query.shape[0] != call.key.shape[0],
    }
    return next((text for text, is_so in reasons.items() if is_so), None)


@contextmanager
def _sharded(mesh: Any, positions: Tensor) -> Iterator[None]:
    """Enter torch's context, which shards `positions` in place."""
    with context_parallel(
        mesh, buffers=[positions], buffer_seq_dims=[0], no_restore_buffers={positions}
    ):
        yield


def _broadcast(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value with the same leading sizes."""
    query, key, value = call.query, call.key, call.value
    if call.enable_gqa:
        heads = query.shape[-3]
        key, value = (
            each.repeat_interleave(heads // each.shape[-3], dim=-3) for each in (key, value)
        )
    leading = torch.broadcast_shapes(*(each.shape[:-2] for each in (query, key, value)))
    query, key, value = (each.expand(*leading, *each.shape[-2:]) for each in (query, key, value))
    return query, key, value


def _added(mask: Tensor, query: Tensor, columns: int) -> Tensor:
    """Return a mask as what is added to the scores, [..., queries, columns]."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, -math.inf)
    return mask.expand(*mask.shape[:-2], query.shape[-2], columns)
