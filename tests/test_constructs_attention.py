"""Attention in its forms, positional schemes and routing under all four modes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from constructs import Body, Construct, parameter, parametrise, run, tensor
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def heads(x: Tensor, count: int) -> Tensor:
    """[batch, time, width] -> [batch, count, time, width / count]."""
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """[batch, heads, time, width] -> [batch, time, heads * width]."""
    return x.transpose(1, 2).flatten(2)


def attention(function: Any, width: int = 8, key_width: int = 8, **members: Any) -> Any:
    """Return a model maker: projections around `function(module, q, k, v, *inputs)`."""

    def forward(m: Any, x: Tensor, *more: Any) -> Tensor:
        q, k, v = heads(m.q(x), 4), heads(m.k(x), key_width // 2), heads(m.v(x), key_width // 2)
        return m.o(joined(function(m, q, k, v, *more)))

    return lambda: Body(
        forward, q=nn.Linear(width, 8), k=nn.Linear(width, key_width), v=nn.Linear(width, key_width),
        o=nn.Linear(8, width), **{k: v() for k, v in members.items()},
    )  # fmt: skip


sdpa = F.scaled_dot_product_attention


def rotary(x: Tensor) -> Tensor:
    time, width = x.shape[-2], x.shape[-1]
    angle = torch.arange(time)[:, None] / 10 ** (torch.arange(width // 2) / width)
    angle = torch.cat([angle, angle], -1)
    half = torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1)
    return x * angle.cos() + half * angle.sin()


def complex_rotary(x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turn = torch.polar(
        torch.ones(x.shape[-2], pairs.shape[-1]),
        torch.arange(x.shape[-2] * 1.0)[:, None].expand(-1, pairs.shape[-1]),
    )
    return torch.view_as_real(pairs * turn).flatten(-2)  # fmt: skip


def alibi(time: int, num_heads: int) -> Tensor:
    distance = torch.arange(time)[None, :] - torch.arange(time)[:, None]
    slopes = 2.0 ** -torch.arange(1, num_heads + 1)
    return -slopes[:, None, None] * distance.abs()


def relative(m: Any, time: int) -> Tensor:
    distance = (torch.arange(time)[None, :] - torch.arange(time)[:, None]).clamp(-2, 2) + 2
    return m.bias[distance].permute(2, 0, 1)


def lengths_mask(n: int, time: int) -> Tensor:
    return torch.arange(time)[None, :] < torch.randint(1, time + 1, (n, 1))


def masked(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, 8), lengths_mask(n, 3)[:, None, None, :]


def by_hand(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    causal = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    return weights.masked_fill(~causal, float("-inf")).softmax(-1) @ v


SCALED = [
    Construct("plain", attention(lambda m, q, k, v: sdpa(q, k, v)), tensor(3, 8), sizes=(8, 7, 2, 1)),
    Construct("causal", attention(lambda m, q, k, v: sdpa(q, k, v, is_causal=True)), tensor(3, 8)),
    Construct("heads-equal-time-equal-batch", attention(lambda m, q, k, v: sdpa(q, k, v)),
              tensor(4, 8), sizes=(4,)),
    Construct("boolean-mask", attention(lambda m, q, k, v, w: sdpa(q, k, v, w)), masked),
    Construct("square-mask-of-batch-size",
              attention(lambda m, q, k, v: sdpa(q, k, v, torch.ones(7, 7, dtype=torch.bool).tril())),
              tensor(7, 8), sizes=(7,)),
    Construct("float-mask", attention(lambda m, q, k, v, w: sdpa(q, k, v, w)),
              lambda n: (torch.randn(n, 3, 8), torch.randn(n, 1, 3, 3))),
    Construct("float-mask-per-head", attention(lambda m, q, k, v, w: sdpa(q, k, v, w)),
              lambda n: (torch.randn(n, 3, 8), torch.randn(n, 4, 3, 3)), sizes=(7,)),
    Construct("mask-of-one-row", attention(lambda m, q, k, v, w: sdpa(q, k, v, w)),
              lambda n: (torch.randn(n, 3, 8), torch.randn(1, 1, 3, 3)), sizes=(7, 1)),
    Construct("learned-mask", attention(lambda m, q, k, v: sdpa(q, k, v, m.bias),
                                        bias=lambda: parameter(4, 3, 3)), tensor(3, 8)),
    Construct("grouped-queries", attention(lambda m, q, k, v: sdpa(q, k, v, enable_gqa=True),
                                           key_width=4), tensor(3, 8)),
    Construct("grouped-causal-repeated", attention(
        lambda m, q, k, v: sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True),
        key_width=4), tensor(3, 8)),
    Construct("grouped-masked", attention(lambda m, q, k, v, w: sdpa(q, k, v, w, enable_gqa=True),
                                          key_width=4), masked, sizes=(7,)),
    Construct("scaled", attention(lambda m, q, k, v: sdpa(q, k, v, scale=0.3)), tensor(3, 8), sizes=(7,)),
    Construct("by-hand", attention(by_hand), tensor(3, 8), sizes=(8, 7, 2)),
    Construct("dropout", attention(lambda m, q, k, v: sdpa(q, k, v, dropout_p=0.3)), tensor(3, 8)),
    Construct("linear-attention", attention(
        lambda m, q, k, v: q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)), tensor(3, 8)),
    Construct("einsum", attention(lambda m, q, k, v: torch.einsum(
        "bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)), tensor(3, 8)),
    Construct("einsum-ellipsis", lambda: Body(lambda m, x: torch.einsum("...ij,jk->...ik", x, m.w),
                                              w=parameter(4, 5)), tensor(2, 3, 4)),
    Construct("einsum-over-batch", lambda: Body(
        lambda m, x: torch.einsum("bi,bj->ij", m.a(x), x), a=nn.Linear(4, 3)), tensor(4)),
]  # fmt: skip

POSITIONS = [
    Construct("rotary", attention(lambda m, q, k, v: sdpa(rotary(q), rotary(k), v, is_causal=True)),
              tensor(3, 8)),
    Construct("complex-rotary", attention(
        lambda m, q, k, v: sdpa(complex_rotary(q), complex_rotary(k), v)), tensor(3, 8)),
    Construct("alibi", attention(lambda m, q, k, v: sdpa(q, k, v, alibi(3, 4))), tensor(3, 8)),
    Construct("relative-bias", attention(
        lambda m, q, k, v: (q @ k.transpose(-1, -2) + relative(m, 3)).softmax(-1) @ v,
        bias=lambda: parameter(5, 4)), tensor(3, 8)),
    Construct("relative-shift", attention(
        lambda m, q, k, v: F.pad(q @ k.transpose(-1, -2), (1, 0)).reshape(q.shape[0], 4, 4, 3)[:, :, 1:]
        .softmax(-1) @ v), tensor(3, 8)),
    Construct("learned-positions", lambda: Body(
        lambda m, x: m.a(x) + m.p[: x.shape[1]], a=nn.Linear(8, 8), p=parameter(5, 8)), tensor(3, 8)),
    Construct("position-ids", lambda: Body(
        lambda m, x: m.a(x) + m.p(torch.arange(x.shape[1])[None].expand(x.shape[0], -1)),
        a=nn.Linear(8, 8), p=nn.Embedding(5, 8)), tensor(3, 8), sizes=(7, 2)),
    Construct("cls-token", lambda: Body(
        lambda m, x: m.a(torch.cat([m.c.expand(x.shape[0], -1, -1), x], 1))[:, 0],
        a=nn.Linear(8, 8), c=parameter(1, 1, 8)), tensor(3, 8), sizes=(8, 7, 2, 1)),
]  # fmt: skip


def multihead(**options: Any) -> Any:
    return lambda: nn.MultiheadAttention(8, 2, batch_first=True, **options)


def multi(
    name: str, call: Any, batch: Any = None, sizes: Any = (7, 2), **options: Any
) -> Construct:
    def model() -> nn.Module:
        return Body(lambda m, x, *more: call(m.a, x, *more), a=multihead(**options)())

    return Construct(name, model, batch or tensor(3, 8), sizes=sizes)


LAYERS = [
    multi("multihead", lambda a, x: a(x, x, x), sizes=(8, 7, 2, 1)),
    multi("multihead-no-weights", lambda a, x: a(x, x, x, need_weights=False)[0]),
    multi("multihead-per-head-weights", lambda a, x: a(x, x, x, average_attn_weights=False)),
    multi("multihead-padding", lambda a, x, w: a(x, x, x, key_padding_mask=~w)[0],
          lambda n: (torch.randn(n, 3, 8), lengths_mask(n, 3))),
    multi("multihead-causal", lambda a, x: a(
        x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(3), is_causal=True,
        need_weights=False)[0]),
    multi("multihead-dropout", lambda a, x: a(x, x, x)[0], dropout=0.3),
    multi("multihead-cross", lambda a, x, y: a(x, y, y)[0],
          lambda n: (torch.randn(n, 3, 8), torch.randn(n, 5, 6)), kdim=6, vdim=6, sizes=(7,)),
    multi("multihead-bias-kv", lambda a, x: a(x, x, x)[0], add_bias_kv=True, add_zero_attn=True,
          sizes=(7,)),
    Construct("encoder-layer", lambda: nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.0, batch_first=True), tensor(3, 8), sizes=(8, 7, 2, 1)),
    Construct("encoder-layer-dropout", lambda: nn.TransformerEncoderLayer(
        8, 2, 12, dropout=0.2, batch_first=True, norm_first=True, activation="gelu"), tensor(3, 8)),
    Construct("encoder-causal-padding", lambda: Body(
        lambda m, x, w: m.e(x, mask=nn.Transformer.generate_square_subsequent_mask(3),
                            src_key_padding_mask=torch.zeros_like(w, dtype=x.dtype).masked_fill(
                                ~w, float("-inf")), is_causal=True),
        e=nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True), 2,
                                enable_nested_tensor=False)),
        lambda n: (torch.randn(n, 3, 8), lengths_mask(n, 3)), sizes=(7,)),
    Construct("decoder-layer", lambda: Body(
        lambda m, x, y: m.d(x, y), d=nn.TransformerDecoderLayer(8, 2, 12, 0.1, batch_first=True)),
        lambda n: (torch.randn(n, 3, 8), torch.randn(n, 2, 8)), sizes=(7,)),
    Construct("transformer", lambda: Body(
        lambda m, x, y: m.t(x, y), t=nn.Transformer(8, 2, 1, 1, 12, 0.1, batch_first=True)),
        lambda n: (torch.randn(n, 3, 8), torch.randn(n, 2, 8)), sizes=(2,)),
]  # fmt: skip


@parametrise(SCALED)
def test_attention_divides_the_batch(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(POSITIONS + LAYERS)
def test_positions_and_attention_layers_equal_one_device(construct: Construct, size: int) -> None:
    run(construct, size)
