"""Simulated candidates and planted faults for the tests of the judge.

A candidate is a single-device run whose arithmetic is ordered otherwise, as a correct
parallel run's would be. None of it is used by the package's own noise runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.cases.case import LoadedCase
from spmd_verify.compare import compare
from spmd_verify.judge import Judgement, judge
from spmd_verify.noise.members import Plain
from spmd_verify.noise.rounding import without_onednn
from spmd_verify.noise.runs import measure
from spmd_verify.reference.single import make_reference
from spmd_verify.reference.trajectory import Observed, StepRecord, Trajectory, named_parameters
from spmd_verify.stored.store import Store, write_store

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
