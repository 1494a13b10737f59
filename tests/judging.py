"""Models, simulated candidates and planted faults for the tests of the judge.

A candidate is a single-device run whose arithmetic is ordered otherwise, as a correct
parallel run's would be. None of it is used by the package's own noise runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.address import Address
from spmd_verify.case import DTYPES, CaseSettings, LoadedCase
from spmd_verify.compare import compare
from spmd_verify.hooks import Case
from spmd_verify.judge import Judgement, judge
from spmd_verify.members import Plain
from spmd_verify.noise import measure
from spmd_verify.rounding import without_onednn
from spmd_verify.single import Reference, SingleDevice, make_reference
from spmd_verify.store import Store, write_store
from spmd_verify.trajectory import Observed, StepRecord, Trajectory, named_parameters

# -- cases -------------------------------------------------------------------------------------


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


# -- candidates --------------------------------------------------------------------------------


class SplitContraction(TorchDispatchMode):
    """Matrix products summed over parts of the contracted dim, in the order given."""

    def __init__(self, parts: int, *, is_reversed: bool = False) -> None:
        super().__init__()
        self.parts, self.order = parts, -1 if is_reversed else 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.addmm.default and not kwargs:
            return self._product(args[1], args[2], torch.mm) + args[0]
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return self._product(args[0], args[1], func)
        return func(*args, **(kwargs or {}))

    def _product(self, left: Tensor, right: Tensor, product: Callable[..., Tensor]) -> Tensor:
        lefts, rights = left.chunk(self.parts, -1), right.chunk(self.parts, -2)
        products = [product(a, b) for a, b in zip(lefts, rights, strict=True)][:: self.order]
        total = products[0]
        for value in products[1:]:
            total = total + value
        return total


class PermutedContraction(TorchDispatchMode):
    """Matrix products with the contracted dim in another order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            left, right = args
            order = torch.arange(left.shape[-1]).flip(0)
            return func(left.index_select(-1, order), right.index_select(-2, order))
        return func(*args, **(kwargs or {}))


class WiderAccumulation(TorchDispatchMode):
    """Float32 products, sums and normalisations computed in float64 and rounded once."""

    names = (
        "mm",
        "addmm",
        "bmm",
        "sum",
        "mean",
        "native_layer_norm",
        "convolution",
        "_softmax",
        "_log_softmax",
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ not in self.names or "dtype" in kwargs:
            return func(*args, **kwargs)
        first = next((a for a in args if isinstance(a, Tensor)), None)
        if first is None or first.dtype != torch.float32:
            return func(*args, **kwargs)
        wide = [
            a.double() if isinstance(a, Tensor) and a.dtype == torch.float32 else a for a in args
        ]
        found = func(*wide, **kwargs)
        if isinstance(found, Tensor):
            return found.to(torch.float32)
        return tuple(
            x.to(torch.float32) if isinstance(x, Tensor) and x.dtype == torch.float64 else x
            for x in found
        )


class Decomposed(TorchDispatchMode):
    """Normalisations, softmax, losses and activations from their primitive parts."""

    packets = (
        "native_layer_norm",
        "native_layer_norm_backward",
        "native_batch_norm",
        "_softmax",
        "_log_softmax",
        "_softmax_backward_data",
        "_log_softmax_backward_data",
        "gelu_backward",
        "nll_loss_forward",
        "native_batch_norm_backward",
        "tanh_backward",
        "var_mean",
    )

    def __init__(self) -> None:
        super().__init__()
        table = torch._decomp.core_aten_decompositions()
        self.table = {
            op: f
            for op, f in table.items()
            if getattr(op, "overloadpacket", None) is not None
            and op.overloadpacket.__name__ in self.packets
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.table.get(func, func)(*args, **(kwargs or {}))


@dataclass
class InMode(Plain):
    """A candidate whose steps run in a dispatch mode."""

    mode: Callable[[], Any] = nullcontext

    def around(self, step: int) -> Any:
        return self.mode()


class Unrolled(SplitContraction):
    """Recurrent layers step by step instead of in one kernel, products in two parts."""

    def __init__(self) -> None:
        super().__init__(2)
        self.flags = without_onednn()

    def __enter__(self) -> Any:
        self.flags.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.flags.__exit__(*error)


@dataclass
class MicroBatches(Plain):
    """A candidate that adds up the gradients of parts of the batch; for mean losses."""

    parts: int = 4
    order: tuple[int, ...] = ()

    def step(self, case: LoadedCase, index: int) -> Any:
        def step(model: nn.Module, optimizer: Any, batch: Any) -> StepRecord:
            size = case.batch_size_of(batch)
            chunks = [tuple(leaf.chunk(self.parts)[i] for leaf in batch) for i in range(self.parts)]
            total: dict[str, Tensor] = {}
            losses = []
            for i in self.order or range(self.parts):
                optimizer.zero_grad()
                args, kwargs, targets = case.split(chunks[i])
                share = len(chunks[i][0]) / size
                loss = case.loss(model(*args, **kwargs), targets)
                loss.backward()
                losses.append(loss.detach() * share)
                for name, p in model.named_parameters():
                    total[name] = total.get(name, torch.zeros_like(p)) + p.grad * share
            for name, p in model.named_parameters():
                p.grad = total[name].clone()
            optimizer.step()
            return {"loss": {"loss": sum(losses[1:], losses[0])}, "gradients": total}

        return step


@dataclass
class ScaledGradient(Plain):
    """A fault: one parameter's gradient times a factor, in every step."""

    parameter: str = ""
    factor: float = 1.0001
    _hooked: set[int] = field(default_factory=set)

    def before(self, model: nn.Module, step: int) -> None:
        if id(model) not in self._hooked:
            self._hooked.add(id(model))
            live = named_parameters(model)[0][self.parameter]
            live.register_hook(lambda gradient: gradient * self.factor)


CLEAN: dict[str, Plain] = {
    "contraction in 2": InMode("c2", lambda: SplitContraction(2)),
    "contraction in 4, reversed": InMode("c4", lambda: SplitContraction(4, is_reversed=True)),
    "contraction permuted": InMode("cp", PermutedContraction),
    "wider accumulation": InMode("wide", WiderAccumulation),
    "decomposed": InMode("decomposed", Decomposed),
    "unrolled": InMode("unrolled", Unrolled),
}


# -- judging -----------------------------------------------------------------------------------


class Whole:
    """Every rank has the whole tensor."""


@dataclass
class Bench:
    """One case with its reference and store, ready to judge candidates."""

    case: LoadedCase
    directory: Path

    def __post_init__(self) -> None:
        self.device, self.reference = make_reference(self.case)
        self.noise = measure(self.device, self.reference)
        trainable = [n for n, p in self.device.build()[0].named_parameters() if p.requires_grad]
        dtype = str(self.case.dtype).removeprefix("torch.")
        write_store(self.directory, self.reference, self.noise, dtype=dtype, trainable=trainable)
        self.store = Store(self.directory)

    def judge(self, member: Plain | None) -> Judgement:
        """Run a candidate free and anchored on one device and judge it as one rank."""
        free = self.device.run(member=member)
        anchored = self.device.run(member=member, anchors=self.reference.run)
        return judge_runs(self.store, free, anchored)


def judge_runs(store: Store, free: Trajectory, anchored: Trajectory) -> Judgement:
    """Judge two runs of a candidate of one rank."""
    statistics = []
    for run, trajectory in (("free", free), ("anchored", anchored)):
        for step, record in enumerate(trajectory.steps):
            seen = {
                stage: {n: Observed([v], (Whole(),), [(0,)]) for n, v in tensors.items()}
                for stage, tensors in record.items()
            }
            statistics += compare(store, seen, run=run, step=step, mesh_shape=(1,))
    return judge(store, statistics, axes={"dp": 1})


def failing(judgement: Judgement) -> list[str]:
    """Return the mismatches of a judgement in words."""
    return [
        f"{row.run} {row.step} {row.stage} {row.name}: {row.ratio:.2f} x noise"
        for row in judgement.rows
        if row.verdict == "mismatch"
    ]


__all__ = ["CASES", "CLEAN", "Bench", "Reference", "Sequence", "SingleDevice"]
