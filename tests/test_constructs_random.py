"""Random operators draw the single-device stream: masks bitwise, generator state equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from constructs import Body, Construct, parametrise, run, tensor
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random(name: str, function: Any, *shape: int, sizes: Any = (7, 2), **options: Any) -> Construct:
    """A layer, then a random function of its output; the draw itself is in the result."""
    layer = {0: lambda: nn.Linear(4, 6), 1: lambda: nn.Conv1d(2, 3, 1), 2: lambda: nn.Conv2d(2, 3, 1),
             3: lambda: nn.Conv3d(2, 3, 1)}[len(shape)]  # fmt: skip
    batch = tensor(2, *shape) if shape else tensor(4)
    return Construct(
        name,
        lambda: Body(lambda m, x: function(m.layer(x)), layer=layer()),
        batch,
        sizes=sizes,
        **options,
    )


def stochastic_depth(x: Tensor) -> Tensor:
    keep = torch.empty(x.shape[0], 1).bernoulli_(0.7)
    return x + x.sin() * keep / 0.7


def drop_path(x: Tensor) -> Tensor:
    keep = (0.7 + torch.rand((x.shape[0],) + (1,) * (x.dim() - 1))).floor()
    return x + x.sin() * keep


def vae(x: Tensor) -> tuple[Tensor, Tensor]:
    mean, log_variance = x.chunk(2, -1)
    z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
    return z, -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1).mean()


def mixup(x: Tensor) -> Tensor:
    order = torch.randperm(x.shape[0])
    return 0.3 * x + 0.7 * x[order]


def transposed_dropout(x: Tensor) -> Tensor:
    """The mask of a transposed tensor is drawn in its memory order."""
    return F.dropout(x.transpose(1, 2), 0.4)


def sampled(x: Tensor) -> Tensor:
    index = torch.multinomial(x.softmax(-1), 3)
    return x.gather(1, index)


DRAWS = [
    random("dropout", lambda x: F.dropout(x, 0.4), sizes=(8, 7, 2, 1)),
    random("dropout-twice", lambda x: F.dropout(F.dropout(x, 0.4).sin(), 0.2)),
    random("dropout-of-transposed", transposed_dropout, 4),
    random("dropout-in-place", lambda x: F.dropout(x.sin(), 0.4, inplace=True)),
    random("dropout-channels-last",
           lambda x: F.dropout(x.contiguous(memory_format=torch.channels_last), 0.4), 3, 3),
    random("dropout1d", lambda x: F.dropout1d(x, 0.4), 4),
    random("dropout2d", lambda x: F.dropout2d(x, 0.4), 3, 3),
    random("dropout3d", lambda x: F.dropout3d(x, 0.4), 2, 2, 2, sizes=(7,)),
    random("alpha-dropout", lambda x: F.alpha_dropout(x, 0.4, training=True)),
    random("feature-alpha-dropout", lambda x: F.feature_alpha_dropout(x, 0.4, training=True), 3),
    random("dropout-modules", lambda x: nn.AlphaDropout(0.3)(nn.Dropout(0.3)(x))),
    random("stochastic-depth", stochastic_depth),
    random("drop-path", drop_path, 3),
    # Only negative elements draw: the stream depends on all values.
    random("rrelu", lambda x: F.rrelu(x, training=True), gathers=True),
    random("gumbel", lambda x: F.gumbel_softmax(x, 0.7)),
    random("gumbel-hard", lambda x: F.gumbel_softmax(x, 0.7, hard=True)),
    random("vae", vae, sizes=(8, 7, 2)),
    random("noise", lambda x: x + torch.randn(x.shape) * 0.1),
    random("noise-like", lambda x: x * torch.rand_like(x) + torch.randint_like(x, 3)),
    random("normal", lambda x: torch.normal(x.detach(), x.detach().abs() + 0.1) * x),
    random("in-place-draws", lambda x: x * torch.empty_like(x).uniform_() + x.new_empty(x.shape).normal_()
           + torch.empty_like(x).exponential_()),
    random("bernoulli-of-probabilities", lambda x: torch.bernoulli(x.sigmoid()) * x, gathers=True),
    random("bernoulli-of-number", lambda x: torch.bernoulli(x.detach(), 0.3) * x),
    random("bernoulli-of-transposed", lambda x: torch.bernoulli(x.detach().transpose(1, 2), 0.3)
           * x.transpose(1, 2), 3),
    random("bernoulli-in-place-tensor", lambda x: torch.empty_like(x).bernoulli_(x.detach().sigmoid()) * x, gathers=True),
    random("mixup", mixup, gathers=True),
    random("multinomial", sampled, gathers=True),
    random("poisson", lambda x: torch.poisson(x.detach().exp()) * x, gathers=True),
    random("masking-of-tokens", lambda x: torch.where(torch.rand(x.shape[:1]) < 0.5, 0.0, 1.0)[:, None] * x),
    random("distribution", lambda x: torch.distributions.Normal(x, 1.0).rsample()),
    random("attention-dropout", lambda x: F.dropout(x.transpose(1, 2) @ x, 0.3), 4),
    random("noisy-gate", lambda x: (x + torch.randn_like(x) * F.softplus(x)).softmax(-1)),
    random("lstm-dropout", lambda x: F.dropout(x, 0.3).cumsum(-1)),
    Construct("lstm-layer-dropout", lambda: Body(
        lambda m, x: m.r(x), r=nn.LSTM(3, 4, 2, dropout=0.4, batch_first=True)), tensor(2, 3)),
    Construct("gru-layer-dropout-time-first", lambda: Body(
        lambda m, x: m.r(x.transpose(0, 1))[0], r=nn.GRU(3, 4, 2, dropout=0.4)), tensor(2, 3)),
]  # fmt: skip


@parametrise(DRAWS)
def test_draws_are_those_of_one_device(construct: Construct, size: int) -> None:
    run(construct, size)
