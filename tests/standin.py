"""A stand-in for a real style: eager data parallel with a hand-written gradient reduction.

Used to test the pipeline without the engine, right and with planted faults. A style here is
named `standin:NAME`, which `styles.find` imports inside the workers.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.errors import Unsupported
from spmd_verify.reference.observe import observed
from spmd_verify.reference.trajectory import (
    named_buffers,
    named_parameters,
    named_state,
    optimizers_of,
)
from spmd_verify.styles.base import Observation, Observed, StyleContext


@dataclass(frozen=True)
class Replicate:
    """The whole tensor on every rank."""


@dataclass(frozen=True)
class Shard:
    """The rule of torch.chunk on one dim."""

    dim: int


Fault = Callable[[int, int], None]


@dataclass(frozen=True)
class StandIn:
    """Every rank trains on its part of the batch; gradients are averaged by all_reduce.

    Attributes:
        name: Id of the style.
        scale: Factor on the reduced gradients; 1 is right.
        is_reduced: Whether the gradients are reduced at all.
        fault: Called as `fault(rank, step)` before every step.
        refusal: Reason to refuse every case.
    """

    name: str
    scale: float = 1.0
    is_reduced: bool = True
    fault: Fault | None = None
    refusal: str | None = None
    runners: frozenset[str] = frozenset({"processes"})

    def build(self, case: Any, context: StyleContext) -> StandInRun:
        if self.refusal is not None:
            raise Unsupported(self.refusal, slug="capture")
        return StandInRun(self, case, context)


class StandInRun:
    """One model per rank, whole."""

    def __init__(self, style: StandIn, case: Any, context: StyleContext) -> None:
        self.style = style
        self.case = case
        self.context = context
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.model = case.build_model()
        self.optimizer = case.optimizer(self.model)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._reduce)
        self._step = observed(case.step)

    def _reduce(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self.style.is_reduced:
            dist.all_reduce(parameter.grad)
            parameter.grad.mul_(self.style.scale / self.num_ranks)

    def _part(self, batch: Any) -> Any:
        leaves, spec = pytree.tree_flatten(batch)
        parts = [
            leaf if dim is None else leaf.chunk(self.num_ranks, dim)[self.rank]
            for leaf, dim in zip(leaves, self.case.batch_dims, strict=True)
        ]
        return pytree.tree_unflatten(parts, spec)

    def _observed(self, tensor: Tensor, placement: Any) -> Observed:
        return Observed([tensor], [placement], list(self.context.coordinates))

    def step(self, index: int, batch: Any) -> Observation:
        if self.style.fault is not None:
            self.style.fault(self.rank, index)
        record = self._step(self.model, self.optimizer, self._part(batch))
        for loss in record["loss"].values():
            dist.all_reduce(loss)
            loss.div_(self.num_ranks)
        seen: dict[str, dict[str, Observed]] = {}
        for stage, tensors in record.items():
            placement = Shard(0) if stage in ("inputs", "module_outputs") else Replicate()
            seen[stage] = {
                name: self._observed(tensor, placement)
                for name, tensor in tensors.items()
                if tensor.ndim or stage != "module_outputs"
            }
        return seen

    def state(self) -> Observation:
        state = {
            name: self._observed(mapping[key], Replicate())
            for name, mapping, key in named_state(self.model, self.optimizer)
            if isinstance(mapping[key], Tensor)
        }
        parameters, buffers = named_parameters(self.model)[0], named_buffers(self.model)[0]
        return {
            "optimizer_state": state,
            "parameters": {n: self._observed(t.data, Replicate()) for n, t in parameters.items()},
            "buffers": {n: self._observed(t, Replicate()) for n, t in buffers.items()},
        }

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return optimizers_of(self.optimizer)

    def release(self) -> None:
        """Nothing is gathered."""

    def parameter_groups(self) -> list[list[str]] | None:
        return None

    def evaluate(self, _batch: Any) -> Mapping[str, Observed] | None:
        return None

    def locate(self, _batch: Any) -> tuple[str, str | None] | None:
        return None

    def facts(self) -> Mapping[str, Any]:
        return {"fallbacks": {}, "collectives": {"all_reduce": 1}}


def _kill(rank: int, step: int) -> None:
    if (rank, step) == (1, 1):
        os.kill(os.getpid(), signal.SIGKILL)


def _raise(rank: int, step: int) -> None:
    if (rank, step) == (1, 1):
        raise ValueError("planted in step 1")


def _hang(rank: int, step: int) -> None:
    while (rank, step) == (1, 1):
        time.sleep(0.05)


RIGHT = StandIn("right")
SCALED = StandIn("scaled", scale=1.0001)
UNREDUCED = StandIn("unreduced", is_reduced=False)
KILLED = StandIn("killed", fault=_kill)
RAISING = StandIn("raising", fault=_raise)
HANGING = StandIn("hanging", fault=_hang)
REFUSING = StandIn("refusing", refusal="an operator has no rule: model.py:7")
