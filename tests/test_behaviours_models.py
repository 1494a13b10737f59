"""Behaviours 24-31, 33-35, 50: models, losses and optimizers, against DDP and one device.

Each case runs under gradient_reduction="mean" on real ranks against
DistributedDataParallel, and under the default in lock-step against one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lockstep_check import check
from ranked import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from training import MANY_STEPS, assert_same, built, momentum, part, sgd, state_of, train_step

import spmd

Batch = tuple[Tensor, ...]


class BatchDims(nn.Module):
    """The reshapes of the original's batch_dim_analysis test."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(10, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().view(-1).view(x.shape[0], 10)
        x = torch.unsqueeze(torch.squeeze(x), 0).squeeze(0)
        rows = torch.arange(x.shape[0], device=x.device).float()
        bias = torch.ones(x.shape[0], 8) + torch.zeros(8)
        repeated = torch.arange(8.0).unsqueeze(0).repeat(x.shape[0], 1)
        hidden = torch.relu(self.fc1(x)) + bias + repeated / 8
        return self.fc2(hidden.view(x.shape[0], -1)) + 0 * rows.unsqueeze(1)


class Transposed(nn.Module):
    """The batch is dim 1 of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.t().contiguous()).t()


class Positions(nn.Module):
    """Token and position embeddings, LayerNorm, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(12, 16), nn.Embedding(20, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(0, x.shape[1], device=x.device).unsqueeze(0)
        return self.head(self.norm(self.wte(x) + self.wpe(positions)))


class Tied(nn.Module):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(12, 16), nn.Linear(16, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))


class Factories(nn.Module):
    """Tensors made in the step, with the batch's size and without it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y = y + torch.full((x.shape[0], 10), 2.0) + torch.arange(0, 10).float()
        y = y * torch.full(x.shape, float(x.numel()) / x.shape[0])
        y = y + x.stride(0) + torch.scalar_tensor(3.0)
        y = torch.cat([y] * 5 + [x], 1)
        y = torch.stack([y, torch.ones_like(y)], 1)
        return y[:, :1].squeeze(1) / (x.shape[1] + 2)


class Conv(nn.Module):
    """A convolution and a normalisation over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).mean((2, 3)))


class Regularised(nn.Module):
    """Holds a 0-dim parameter and a 0-dim buffer beside a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(10, 4), nn.Parameter(torch.tensor(0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        return self.scale * self.fc(x)


def tokens(rows: int = 8, length: int = 6) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 12, (rows, length), generator=generator)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(6))


def token_loss(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), x.roll(1, 1).reshape(-1))


def nll_loss(model: nn.Module, x: Tensor) -> Tensor:
    return F.nll_loss(F.log_softmax(model(x), -1).reshape(-1, 12), x.reshape(-1))


def sum_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum()


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def weight_loss(model: nn.Module, x: Tensor) -> Tensor:
    decay = sum(p.square().sum() for p in model.parameters())
    return model(x).square().mean() + 0.1 * decay


def clipped(model: nn.Module, optimizer: Any, *batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = sum_loss(model, *batch)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def accumulated(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    for _ in range(2):
        mean_loss(model, x).backward()
    optimizer.step()
    return x.sum()


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    listed = list(parameters)
    groups = [{"params": listed[:1], "lr": 0.3}, {"params": listed[1:]}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def decayed(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 4))
    model[0].weight.requires_grad_(False)
    return model


@dataclass
class Case:
    """One model with its loss.

    Attributes:
        make: Makes the model.
        x: Global batch.
        step: The training step.
        optimizer: Makes the optimizer.
        dim: Dim of the batch.
    """

    make: Callable[[], nn.Module]
    x: Tensor
    step: Any
    optimizer: Any = sgd
    dim: int = 0


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 4))


def square() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


CASES = {
    "24-log-softmax-nll": Case(Positions, tokens(), train_step(nll_loss)),
    "24-factories-arithmetic": Case(Factories, drawn(8, 10), train_step(mean_loss)),
    "25-batch-dims": Case(BatchDims, drawn(8, 10), train_step(sum_loss)),
    "26-batch-dim-1": Case(Transposed, drawn(10, 8), train_step(mean_loss), dim=1),
    "28-position-embedding": Case(Positions, tokens(), train_step(token_loss)),
    "29-mean-loss": Case(linear, drawn(8, 10), train_step(mean_loss)),
    "30-batch-is-hidden": Case(square, drawn(8, 8), train_step(mean_loss)),
    "31-tied": Case(Tied, tokens(), train_step(token_loss), momentum),
    "33-cold-momentum": Case(linear, drawn(8, 10), train_step(mean_loss), momentum),
    "33-cold-adam": Case(linear, drawn(8, 10), train_step(mean_loss), decayed),
    "34-frozen": Case(frozen, drawn(8, 10), train_step(mean_loss), momentum),
    "35-two-groups": Case(linear, drawn(8, 10), train_step(mean_loss), two_groups),
    "50-conv-batch-norm": Case(Conv, drawn(8, 2, 5, 5), train_step(mean_loss)),
    "50-clipping": Case(linear, drawn(8, 10), clipped),
    "50-accumulation": Case(linear, drawn(8, 10), accumulated),
    "50-0-dim": Case(Regularised, drawn(8, 10), train_step(mean_loss), momentum),
    "H9-weights-in-loss": Case(linear, drawn(8, 10), train_step(weight_loss), momentum),
}


def run_as_ddp(name: str) -> None:
    case = CASES[name]
    expected, optimizer = built(case.make, case.optimizer, warm=False)
    # DDP broadcasts rank 0's buffers before each forward; here each rank keeps its own.
    wrapped = DistributedDataParallel(expected, broadcast_buffers=False)
    for _ in range(3):
        case.step(wrapped, optimizer, part(case.x, case.dim))
    for style in ("replicate", "fully_shard"):
        model, ours = built(case.make, case.optimizer, warm=False)
        mode = spmd.DataParallel(style, input_batch_dim=case.dim, gradient_reduction="mean")
        step = spmd.compile(parallel_mode=mode)(case.step)
        for _ in range(3):
            step(model, ours, part(case.x, case.dim))
        assert_same(state_of(model, ours), state_of(wrapped, optimizer), **MANY_STEPS)
        for (key, buffer), theirs in zip(model.named_buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(buffer, theirs, msg=key)
        if name.startswith("31"):
            assert model.head.weight is model.embed.weight


@pytest.mark.dist
@pytest.mark.parametrize("name", CASES)
def test_mean_is_ddp(on_ranks: Ranks, name: str) -> None:
    on_ranks(run_as_ddp, name)


@pytest.mark.parametrize("name", CASES)
def test_global_is_one_device(name: str) -> None:
    case = CASES[name]

    def make() -> nn.Module:
        return case.make().double()

    x = case.x.double() if case.x.is_floating_point() else case.x
    dims = {"input_batch_dim": case.dim}
    modes: list[Any] = [
        (style, spmd.DataParallel(style, mesh={"dp": 2}, **dims))
        for style in ("replicate", "fully_shard", "default")
    ]
    if case.dim == 0:
        modes.append(("expand", spmd.DTensorExpandMode(mesh={"dp": 2})))
    check(make, case.optimizer, case.step, [x], modes=modes, tol=1e-11)
