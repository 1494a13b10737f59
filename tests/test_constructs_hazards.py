"""Programs that give wrong numbers where a rule is careless, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from constructs import Body, Construct, parameter, parametrise, run, score, sgd, tensor
from lockstep_check import check
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def linear(
    name: str, function: Any, batch: Any = None, sizes: Any = (7, 2), **options: Any
) -> Construct:
    """A linear layer of 6 outputs, then `function(output, *inputs)`."""
    return Construct(
        name, lambda: Body(lambda m, x, *more: function(m.a(x), *more), a=nn.Linear(4, 6)),
        batch or tensor(4), sizes=sizes, **{"gathers": True} | options,
    )  # fmt: skip


def groups(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4), torch.randint(0, 3, (n,))


# A sum over the batch is partial: nothing but a linear operator may see it unreduced.
PARTIAL = [
    linear("non-linear", lambda x: [f(x.sum(0)) for f in (
        torch.relu, torch.exp, torch.abs, torch.square, torch.floor, torch.round, torch.sign, F.gelu,
        torch.sigmoid, lambda s: s**3, lambda s: s.clamp(-0.1, 0.1), lambda s: s % 0.7, torch.isfinite)]),
    linear("product-of-sums", lambda x: (x.sum(0) * x.sum(0), x.sum() * x.sum(0), x.sum(0) @ x.sum(0),
                                         torch.outer(x.sum(0), x.sum(0)), 1 / x.sum(0), x.sum(0) / x.sum(1).sum())),
    linear("number-added", lambda x: (x.sum(0) + 1.0, 1.0 - x.sum(0), x.sum() + 2, x.mean(0).add(0.5, alpha=2),
                                      torch.add(x.sum(0), x.new_ones(6)), x.sum(0) - x[0].detach())),
    linear("added-to-whole", lambda x: (x.sum(0) + torch.arange(6.0), torch.arange(6.0) - x.sum(0),
                                        torch.addmm(torch.ones(6, 6), x.t(), x), torch.lerp(x.sum(0), x.mean(0), 0.3))),
    linear("masked", lambda x: (x.sum(0).masked_fill(torch.arange(6) > 3, -2.0),
                                x.sum(0).masked_fill(torch.arange(6) > 3, 0.0),
                                torch.where(torch.arange(6) > 2, x.sum(0), torch.ones(6)),
                                torch.where(torch.arange(6) > 2, x.sum(0), x.mean(0)),
                                torch.where(x.sum(0) > 0, x.sum(0), -x.sum(0)))),
    linear("ordered", lambda x: (x.sum(0).max(), x.sum(0).argmax(), x.sum(0).sort().values, x.sum(0).topk(2),
                                 x.sum(0).softmax(0), x.sum(0).cumsum(0), x.sum(0).cummax(0), x.sum(0).norm(),
                                 x.sum(0).prod(), x.sum(0).var(), torch.maximum(x.sum(0), x.mean(0)))),
    linear("extremes", lambda x: (-x.amax(0), 2 * x.amax(0), x.amax(0) + x.amin(0), x.amax(0).sum(), x.amin(0).exp(),
                                  x.amax(0).view(2, 3).t(), x.amax(0) - x, torch.stack([x.amax(0), x.amin(0)]))),
    linear("logical", lambda x: ((x > 0).any(0), ~(x > 0).any(0), (x > 0).all(0) | (x > 0.5).any(0),
                                 (x > 0).any(0).double() * x, (x > 0).any(0).sum(), (x > 0).any(0) & (x < 0).any(0),
                                 torch.where((x > 9).any(), x, -x), x * (x > 0).all())),
    linear("integers", lambda x: (x.mean() * ((x > 0).sum() // 2), (x > 0).sum() % 3, (x > 0).sum(0) / 3,
                                  (x > 0).sum(0) * 2 + 1, (x > 0).sum() > 3, -(x > 0).sum(0), (x > 0).double().mean())),
    linear("narrowed", lambda x: (x.sum(0).float(), x.sum(0).half().float(), x.sum(0).long()), tol=1e-6),
    linear("complex", lambda x: (torch.complex(x.sum(0), x.mean(0)).abs(), (x.sum(0) * 2j).real,
                                 torch.complex(x, x).sum(0).conj(), (x.to(torch.complex128) * 1j).sum(0).angle())),
    linear("stored", lambda x: (torch.cat([x.sum(0), x.mean(0)]), torch.cat([x.sum(0), torch.ones(2)]),
                                torch.stack([x.sum(0), torch.ones(6)]), F.pad(x.sum(0), (1, 1), value=2.0),
                                F.pad(x.sum(0), (1, 1)), x.sum(0).repeat(2), x.sum(0).roll(1), x.sum(0)[2:4],
                                x.sum(0).expand(3, 6), x.sum(0)[torch.tensor([0, 0, 5])])),
]  # fmt: skip


def sum_then_add(x: Tensor, group: Tensor) -> tuple[Tensor, ...]:
    """Ranks without rows still hold their part of the tensor that is added into."""
    total = x.sum(1).sum() * torch.ones(3, 6)
    row = (x[:, :1] * torch.ones(6)).sum(0).expand(3, 6)
    index = group[:, None].expand(-1, 6)
    return (
        total.index_add(0, group, x),
        row.clone().index_add(0, group, x),
        row.clone().scatter_add(0, index, x),
        row.clone().index_put((group,), x, accumulate=True),
        row.clone().scatter_reduce(0, index, x, "amax"),
    )


ROWS = [
    linear("empty-rank-adds-nothing-but-keeps-its-part", sum_then_add, groups, sizes=(7, 5, 2, 1)),
    linear("local-size-one-is-not-a-size-of-one", lambda x: (
        x.squeeze(), x.squeeze(0), x.unsqueeze(0).squeeze(0), x[:, :1].squeeze(), x.view(x.shape[0], 1, 6).squeeze(),
        x.expand(2, *x.shape), x[:, None].expand(-1, 2, -1), x * x[:1], x.unsqueeze(1) * x.unsqueeze(0)),
        sizes=(4, 2, 1)),
    linear("dims-as-large-as-the-batch", lambda x: (
        x @ torch.arange(36.0).view(6, 6), x + torch.arange(6.0), x * torch.arange(6.0)[:, None], x.t() @ x, x @ x.t(),
        x + x.t(), x.softmax(0) @ x.softmax(1), x[torch.arange(6)], x.gather(0, torch.arange(36).view(6, 6) % 6),
        torch.einsum("ij,jk->ik", x, x), F.layer_norm(x, (6,)), x.diagonal(), x.tril()), sizes=(6,)),
    linear("views-of-other-memory-orders", lambda x: (
        x.t().reshape(-1), x.t().contiguous().view(-1), x.view(-1, 2, 3).transpose(0, 1).reshape(2, -1),
        x.view(-1, 2, 3).permute(2, 0, 1).flatten(1), x.unflatten(1, (3, 2)).flatten(0, 1),
        x.reshape(-1), x.reshape(2, -1, 3), x.view(1, -1, 6), x.flatten().unflatten(0, (-1, 2)))),
    linear("tiles-and-joins", lambda x: (
        x.repeat(2, 1).view(2, -1, 6).sum(0), torch.cat([x, x * 2]).chunk(2)[1] - x, torch.cat([x, x]).sum(0),
        x.repeat_interleave(2, 0)[::2], torch.stack([x, x], 1).flatten(0, 1), torch.cat([x, torch.ones(2, 6)]),
        torch.cat([x[:1], x]), x.split([1, x.shape[0] - 1])[1], x.tensor_split(3)[0])),
    Construct("channels-last", lambda: Body(
        lambda m, x: m.b(F.dropout(m.a(x).contiguous(memory_format=torch.channels_last), 0.3)).flatten(1),
        a=nn.Conv2d(2, 4, 2), b=nn.Conv2d(4, 3, 2)),
        lambda n: (torch.randn(n, 2, 4, 4).to(memory_format=torch.channels_last),), sizes=(7, 2, 1)),
    Construct("batch-of-one", lambda: nn.Sequential(
        nn.Conv1d(2, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(9, 4), nn.Dropout(0.2)),
        tensor(2, 4), sizes=(1,), gathers=True),
]  # fmt: skip


@parametrise(PARTIAL)
def test_only_linear_operators_see_a_partial_sum(construct: Construct, size: int) -> None:
    run(construct, size)


@parametrise(ROWS)
def test_rows_and_dims_are_told_from_structure_not_from_sizes(
    construct: Construct, size: int
) -> None:
    run(construct, size)


def clipped_and_foreach(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = score(model(x))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)
    optimizer.step()
    return loss


@pytest.mark.parametrize("make", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_lists_of_parameters_with_and_without_rows(make: str) -> None:
    """Rank 3 has no row of the short parameters and rows of the long ones."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, make)(list(parameters), lr=0.01, foreach=True)

    def model() -> nn.Module:
        return Body(lambda m, x: (m.a(x) * m.two.repeat(4) + m.one) @ m.w, a=nn.Linear(4, 8),
                    two=parameter(2), one=parameter(1), w=parameter(8, 3))  # fmt: skip

    check(model, optimizer, clipped_and_foreach, (torch.randn(7, 4),))


@pytest.mark.parametrize("size", [7, 2])
def test_draws_after_a_checkpoint_go_on_where_one_device_would(size: int) -> None:
    """The mask drawn again in backward is that of forward; later draws are not moved."""
    from torch.utils.checkpoint import checkpoint

    def step(model: nn.Module, optimizer: Any, x: Tensor) -> Any:
        optimizer.zero_grad()
        out = checkpoint(model, x, use_reentrant=False)
        loss = score(F.dropout(out, 0.3))
        loss.backward()
        optimizer.step()
        return loss, torch.rand(3), F.dropout(out.detach(), 0.5)

    model = lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3))  # noqa: E731
    check(model, sgd, step, (torch.randn(size, 4),))
