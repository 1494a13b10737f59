"""Gathers, scatters, scans, sorts, routing and data-dependent sizes under all four modes."""

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


def indexed(
    name: str, function: Any, batch: Any = None, sizes: Any = (7, 2), **options: Any
) -> Construct:
    """A linear layer of 6 outputs, then `function(output, *inputs)`."""
    return Construct(
        name, lambda: Body(lambda m, x, *more: function(m.a(x), *more), a=nn.Linear(4, 6)),
        batch or tensor(4), sizes=sizes, **options,
    )  # fmt: skip


def picks(high: int, *shape: int) -> Any:
    return lambda n: (torch.randn(n, 4), torch.randint(0, high, (n, *shape)))


def groups(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randint(0, 3, (n,))


def segment_mean(x: Tensor, group: Tensor) -> Tensor:
    total = x.new_zeros(3, 6).index_add(0, group, x)
    count = x.new_zeros(3).index_add(0, group, torch.ones_like(x[:, 0])).clamp(min=1)
    return total / count[:, None]


def scatter_mean(x: Tensor, group: Tensor) -> Tensor:
    index = group[:, None].expand(-1, 6)
    return x.new_zeros(3, 6).scatter_reduce(0, index, x, "mean", include_self=False)


def top_k_routing(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Top-2 of 4 experts, dense dispatch, with the switch auxiliary loss."""
    gate = m.gate(x).softmax(-1)
    weight, chosen = gate.topk(2, -1)
    weight = weight / weight.sum(-1, keepdim=True)
    mask = torch.zeros_like(gate).scatter(1, chosen, weight)
    out = torch.einsum("be,beo->bo", mask, torch.einsum("bi,eio->beo", x, m.w).relu())
    fraction = F.one_hot(chosen[:, 0], 4).double().mean(0)
    return out, 4 * (fraction * gate.mean(0)).sum()


def capacity_routing(m: Any, x: Tensor) -> Tensor:
    """Top-1 with two places per expert: who is dropped depends on the whole batch."""
    gate, chosen = m.gate(x).softmax(-1).max(-1)
    one_hot = F.one_hot(chosen, 4)
    place = (one_hot.cumsum(0) - 1).gather(1, chosen[:, None]).squeeze(1)
    kept = place < 2
    slot = torch.where(kept, chosen * 2 + place, 8)
    buffer = x.new_zeros(9, x.shape[1]).index_copy(0, slot, x)[:8].view(4, 2, -1)
    out = torch.bmm(buffer, m.w).flatten(0, 1)
    out = torch.cat([out, out.new_zeros(1, out.shape[1])])
    return out[slot] * (gate * kept)[:, None]


def expert_choice(m: Any, x: Tensor) -> Tensor:
    """Every expert takes its two best rows of the batch."""
    weight, rows = m.gate(x).softmax(-1).topk(2, 0)
    out = torch.einsum("cei,eio->ceo", x[rows], m.w) * weight[..., None]
    return x.new_zeros(x.shape[0], out.shape[-1]).index_add(0, rows.flatten(), out.flatten(0, 1))


def routed(function: Any) -> Any:
    return lambda: Body(function, gate=nn.Linear(4, 4), w=parameter(4, 4, 3))


def codebook(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    nearest = torch.cdist(x, m.codes).argmin(-1)
    code = m.codes[nearest]
    return x + (code - x).detach(), F.mse_loss(code, x.detach()) + F.mse_loss(x, code.detach())


def written(x: Tensor) -> Tensor:
    y = x.sin()
    y[:, 1] = 0.5
    y[:, 2:4] *= 2
    y[0] = y[0] * 3
    return y


def scan(x: Tensor) -> Tensor:
    state, states = x.new_zeros(x.shape[0]), []
    for step in x.unbind(1):
        state = 0.5 * state + step
        states.append(state.tanh())
    return torch.stack(states, 1)


WHOLE = {"gathers": True}

GATHERS = [
    indexed("gather", lambda x, i: x.gather(1, i), picks(6, 3), sizes=(8, 7, 2)),
    indexed("gather-over-batch", lambda x: x.gather(0, torch.zeros(1, 6, dtype=torch.int64)), **WHOLE),
    indexed("gather-fewer-rows", lambda x: x.gather(1, torch.ones(2, 3, dtype=torch.int64)), **WHOLE),
    indexed("take-along", lambda x: x.take_along_dim(x.argsort(-1), -1)),
    indexed("index-select", lambda x: x.index_select(1, torch.tensor([0, 5, 0]))),
    indexed("index-select-over-batch", lambda x: x.index_select(0, torch.tensor([1, 0, 1])), **WHOLE),
    indexed("advanced", lambda x, i: x[torch.arange(x.shape[0]), i], groups),
    indexed("advanced-columns", lambda x: x[:, [3, 1]]),
    indexed("advanced-pair", lambda x: x.view(-1, 2, 3)[:, [0, 1], [2, 0]]),
    indexed("advanced-apart", lambda x: x.view(-1, 2, 3)[torch.tensor([0, 1]), :, torch.tensor([2, 0])],
            **WHOLE),
    indexed("table", lambda x, i: x * torch.arange(18.0).view(3, 6)[i], groups),
    indexed("permuted-batch", lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)], **WHOLE),
    indexed("negative-stride-slices", lambda x: x[:, ::2] * x[:, 1::2] + x[:, -3:]),
    indexed("first-row", lambda x: x[0] + x[-1], **WHOLE),
    indexed("half-of-batch", lambda x: x[: x.shape[0] // 2] * x[x.shape[0] // 2 : x.shape[0] // 2 * 2],
            **WHOLE),
    indexed("every-other-row", lambda x: x[::2].sin(), **WHOLE),
    indexed("last-token", lambda x, i: x.view(-1, 3, 2)[torch.arange(x.shape[0]), i], picks(3)),
    indexed("diagonal", lambda x: x.view(-1, 2, 3).diagonal(dim1=1, dim2=2)),
    indexed("diag-embed", lambda x: torch.diag_embed(x) @ torch.diag_embed(x).transpose(1, 2)),
    indexed("tril", lambda x: x.unsqueeze(-1).expand(-1, -1, 6).tril() + torch.triu(x[:, None] * x[..., None])),
]  # fmt: skip

SCATTERS = [
    indexed("scatter", lambda x, i: torch.zeros(x.shape[0], 8).scatter(1, i, x), picks(8, 6)),
    indexed("scatter-value", lambda x, i: x.scatter(1, i, 2.0), picks(6, 2)),
    indexed("scatter-add", lambda x, i: torch.zeros(x.shape[0], 4).scatter_add(1, i, x), picks(4, 6)),
    indexed("scatter-add-over-batch", lambda x, i: torch.zeros(3, 6).scatter_add(
        0, i[:, None].expand(-1, 6), x), groups),
    indexed("scatter-amax", lambda x, i: torch.full((x.shape[0], 4), -9.0).scatter_reduce(1, i, x, "amax"),
            picks(4, 6)),
    indexed("scatter-mean-over-batch", scatter_mean, groups, **WHOLE),
    indexed("index-add", segment_mean, groups, sizes=(8, 7, 2)),
    indexed("index-add-columns", lambda x: x.index_add(1, torch.tensor([0, 0, 3]), x[:, :3])),
    indexed("index-copy", lambda x: x.index_copy(1, torch.tensor([5, 0]), x[:, 2:4].sin())),
    indexed("index-fill", lambda x: x.index_fill(1, torch.tensor([5, 0]), 0.5)),
    indexed("index-reduce", lambda x, i: torch.ones(3, 6).index_reduce(0, i, x, "prod"), groups,
            falls_back=frozenset({"aten.index_reduce.default"})),
    indexed("index-put", lambda x, i: torch.zeros(3, 6).index_put((i,), x, accumulate=True), groups),
    indexed("index-put-rows", lambda x, i: x.index_put((torch.arange(x.shape[0]), i), x[:, 0] * 2), groups),
    indexed("written", written, gathers=True),
    indexed("masked-fill", lambda x: x.masked_fill(x > 0.3, -2.0) * x),
    indexed("masked-fill-tensor", lambda x: x.masked_fill(x > 0.3, torch.tensor(2.0)) * x),
    indexed("masked-scatter", lambda x: x.masked_scatter(x > 0, x.detach().sin()), **WHOLE),
    indexed("where", lambda x: torch.where(x > 0, x, -0.1 * x) + torch.where(x.sum() > 0, x, -x)),
    indexed("clamp", lambda x: x.clamp(-0.3, 0.4) + x.clamp(min=x.mean()) + torch.clamp(x, max=x.detach())),
    indexed("histogram-by-scatter", lambda x, i: x.mean() * torch.zeros(3).scatter_add(
        0, i, torch.ones(i.shape[0])), groups),
]  # fmt: skip

SCANS = [
    indexed("cumsum", lambda x: x.cumsum(1), sizes=(8, 7, 2)),
    indexed("cumsum-over-batch", lambda x: x.cumsum(0), **WHOLE),
    indexed("cumprod", lambda x: x.cumprod(1)),
    indexed("logcumsumexp", lambda x: x.logcumsumexp(1)),
    indexed("cummax", lambda x: x.cummax(1).values),
    indexed("sort", lambda x: x.sort(1).values * torch.arange(6.0)),
    indexed("sort-descending-indices", lambda x: x.sort(1, descending=True)),
    indexed("sort-over-batch", lambda x: x.sort(0).values, **WHOLE),
    indexed("argsort", lambda x: x.gather(1, x.argsort(1))),
    indexed("topk", lambda x: x.topk(3, 1)),
    indexed("kthvalue-median-mode", lambda x: (x.kthvalue(2, 1).values, x.median(1).values, x.mode(1).values)),
    indexed("max-min-aminmax", lambda x: (x.max(1), x.min(1), *torch.aminmax(x, dim=1))),
    indexed("prod-var-norm", lambda x: (x.prod(1), x.var(1), x.norm(dim=1), x.std(), x.prod(), x.var()), **WHOLE),
    indexed("any-all", lambda x: x * (x > 9).any() + x * (x > -9).all(0) + x * (x > 0).any(1, keepdim=True)),
    indexed("argmax", lambda x: (x.argmax(1), x.argmax(), x), **WHOLE),
    indexed("bucketize", lambda x: x * torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.5]))),
    indexed("searchsorted", lambda x: x * torch.searchsorted(torch.tensor([-0.5, 0.0, 0.5]), x.detach())),
    indexed("one-hot", lambda x, i: F.one_hot(i, 3).double() @ torch.arange(18.0).view(3, 6) * x, groups),
    indexed("one-hot-no-classes", lambda x, i: F.one_hot(i) + x[:, :1], groups),
    indexed("scan", scan),
    indexed("quantile", lambda x: x * x.quantile(0.5, dim=1, keepdim=True)),
    indexed("trapezoid-diff", lambda x: (torch.trapezoid(x, dim=1), x.diff(dim=1), x.diff(dim=0)), **WHOLE),
    indexed("repeat-tile-expand", lambda x: (x.repeat(1, 2), x.repeat(2, 1), x.tile((3,)),
                                             x[:, None].expand(-1, 3, -1))),
    indexed("repeat-interleave", lambda x: (x.repeat_interleave(2, 1), x.repeat_interleave(2, 0))),
    indexed("cat-stack-batch", lambda x: (torch.cat([x, x.sin()]), torch.stack([x, x.cos()]),
                                          torch.cat([x, x.cos()], 1))),
    indexed("split-chunk-unbind", lambda x: [*x.split([1, 5], 1), *x.chunk(3, 1), *x.unbind(1)]),
    indexed("meshgrid-outer", lambda x: torch.outer(x[:, 0], x[:, 1]), **WHOLE),
    indexed("kron-tensordot", lambda x: torch.tensordot(x, torch.arange(12.0).view(6, 2), 1)),
    indexed("dims-equal-batch", lambda x: x @ x.t() @ x, gathers=True),
]  # fmt: skip

ROUTING = [
    Construct("top-k-routing", routed(top_k_routing), tensor(4), sizes=(8, 7, 2)),
    Construct("capacity-routing", routed(capacity_routing), tensor(4), gathers=True),
    Construct("expert-choice", routed(expert_choice), tensor(4), gathers=True),
    Construct(
        "codebook",
        lambda: Body(lambda m, x: codebook(m, m.a(x)), a=nn.Linear(4, 3), codes=parameter(5, 3)),
        tensor(4),
    ),
]

SIZED = [
    indexed("boolean-indexing", lambda x: x[x[:, 0] > 0], **WHOLE),
    indexed("boolean-elements", lambda x: x[x > 0].mean(), **WHOLE),
    indexed("boolean-assignment", lambda x: torch.zeros_like(x).index_put((x > 0,), torch.tensor(2.0)) * x,
            **WHOLE),
    indexed("masked-select", lambda x: x.masked_select(x > 0).sum() / (x > 0).sum(), **WHOLE),
    indexed("nonzero", lambda x: x[(x[:, 0] > 0).nonzero(as_tuple=True)[0]], **WHOLE),
    indexed("argwhere", lambda x: x.mean() * torch.argwhere(x > 0).double().mean(), **WHOLE),
    indexed("unique", lambda x, i: x.new_zeros(3, 6).index_add(
        0, i.unique(return_inverse=True)[1], x)[: i.unique().shape[0]], groups, **WHOLE),
    indexed("unique-consecutive", lambda x, i: x.mean() * i.unique_consecutive().double(), groups, **WHOLE),
    indexed("repeats-of-tensor", lambda x, i: x.repeat_interleave(i, 0), groups, **WHOLE),
    indexed("bincount", lambda x, i: x.mean() * i.bincount(minlength=4), groups, **WHOLE),
    indexed("packed", lambda x: nn.utils.rnn.pad_sequence([x[:1], x[1:]], batch_first=True), **WHOLE),
]  # fmt: skip


@parametrise(GATHERS + SCATTERS)
def test_gathers_and_scatters_equal_one_device(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(SCANS)
def test_scans_sorts_and_joins_equal_one_device(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(ROUTING + SIZED)
def test_routing_and_data_dependent_sizes_equal_one_device(construct: Construct, size: int) -> None:
    run(construct, size)
