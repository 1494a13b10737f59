"""Models for the tests of the judge, each with what makes it hard, and their cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spmd_verify.cases.address import Address
from spmd_verify.cases.case import DTYPES, CaseSettings, LoadedCase
from spmd_verify.cases.hooks import Case


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(12, 24),
            nn.GELU(),
            nn.LayerNorm(24),
            nn.Linear(24, 24),
            nn.ReLU(),
            nn.Linear(24, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class BatchNormNet(nn.Module):
    """A convolution with a bias in front of BatchNorm: the bias's gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.conv(x))).flatten(1))


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(12, 24), nn.Dropout(0.3), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


class Contrastive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.normalize(self.left(x), dim=-1), F.normalize(self.right(x), dim=-1)
        return F.cross_entropy(left @ right.T / 0.2, torch.arange(len(x)))


class Masked(nn.Module):
    """Attention with a [T, T] mask as an input; T equals the batch size on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, attn_mask=mask, need_weights=False)[0])


class Transformer(nn.Module):
    """Attention with its own key bias, whose gradient is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 16)
        self.q, self.k, self.v = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return x @ self.tokens.weight.T


class TwoSamples(nn.Module):
    """Batch normalisation of two samples: +-1 forward, rounding alone backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).relu())


class Chaotic(nn.Module):
    """A shift that no gradient sees and every later step depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 8)
        self.shift = nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.first(x) + self.shift).softmax(-1)
        return self.head(weights * (1.0 + 300.0 * self.shift.detach()))


class Recurrent(nn.Module):
    """An LSTM, which torch runs as one kernel, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.lstm = nn.LSTM(6, 10, batch_first=True)
        self.head = nn.Linear(10, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(ids))[0][:, -1])


def clipped_step(model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    """Train once by hand, so that no split of the batch can be tried."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def _vectors() -> list[Tensor]:
    return [torch.randn(8, 12)]


def _classes() -> Tensor:
    return torch.randint(0, 5, (8,))


def _masked_inputs() -> list[Tensor]:
    return [
        torch.randn(6, 6, 8),
        torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf),
    ]


CASES: dict[str, dict[str, Any]] = {
    "mlp": {"model": Mlp, "inputs": _vectors, "targets": _classes, "loss": F.cross_entropy},
    "batch_norm": {
        "model": BatchNormNet,
        "inputs": lambda: [torch.randn(8, 2, 4, 4)],
        "targets": _classes,
        "loss": F.cross_entropy,
    },
    "two_samples": {
        "model": TwoSamples,
        "inputs": lambda: [torch.randn(2, 12)],
        "targets": lambda: torch.randint(0, 5, (2,)),
        "loss": F.cross_entropy,
    },
    "chaotic": {"model": Chaotic, "inputs": _vectors, "targets": _classes, "loss": F.cross_entropy},
    "dropout": {"model": Dropout, "inputs": _vectors, "targets": _classes, "loss": F.cross_entropy},
    "contrastive": {"model": Contrastive, "inputs": _vectors},
    "mask": {
        "model": Masked,
        "inputs": _masked_inputs,
        "targets": lambda: torch.randint(0, 5, (6, 6)),
        "loss": lambda output, targets: F.cross_entropy(output.flatten(0, 1), targets.flatten()),
    },
    "recurrent": {
        "model": Recurrent,
        "inputs": lambda: [torch.randint(0, 11, (8, 10))],
        "targets": _classes,
        "step": clipped_step,
    },
    "transformer": {
        "model": Transformer,
        "inputs": lambda: [torch.randint(0, 11, (8, 6))],
        "targets": lambda: torch.randint(0, 11, (8, 6)),
        "loss": lambda output, targets: F.cross_entropy(output.flatten(0, 1), targets.flatten()),
    },
}

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "adam": lambda params: torch.optim.Adam(params, lr=1e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True),
}


def make_case(
    name: str, *, dtype: str, optimizer: str = "adamw", seed: int = 0, steps: int = 3, **more: Any
) -> LoadedCase:
    """Return one of `CASES`, or a case of the given hooks where the name is none of them."""
    fields = {"optimizer": OPTIMIZERS[optimizer], **CASES.get(name, {}), **more}
    return LoadedCase(
        Address(f"{name}.py", "file", f"{name}.py", None, None),
        Case(name=name, **fields),
        CaseSettings(dtype=DTYPES[dtype], seed=seed, steps=steps, overrides={}),
        source_hash="",
    )
