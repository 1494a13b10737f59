"""Models, batches and runs the tests of the engine's behaviours share.

A run trains from the same seed and returns {kind: {name: global tensor}}; runs on ranks
are called by every rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import spmd

MakeModel = Callable[[], nn.Module]
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
Loss = Callable[[nn.Module, Any], Tensor]
State = dict[str, dict[str, Tensor]]

# Tolerances for float32: up to 2 steps, and 5 steps or Adam.
FEW_STEPS = {"rtol": 1.3e-6, "atol": 1e-5}
MANY_STEPS = {"rtol": 1e-4, "atol": 1e-4}


def mlp(hidden: int = 16, out: int = 8) -> nn.Module:
    """Return the two-layer network of the behaviours; all sizes divide by 2 and 4."""
    return nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, out))


def odd_mlp() -> nn.Module:
    """Return a network whose rows divide by no number of ranks; one bias has one row."""
    return nn.Sequential(nn.Linear(10, 7), nn.ReLU(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


def sum_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Return the sum loss of the behaviours."""
    return model(x).sum()


def mean_loss(model: nn.Module, x: Tensor) -> Tensor:
    """Return a mean loss with gradients everywhere."""
    return model(x).square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(parameters, lr=0.1)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum, small enough not to blow up a sum loss."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def momentum_foreach(parameters: Any) -> torch.optim.Optimizer:
    """Return the same, foreach."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, foreach=True)


def adam(parameters: Any) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(parameters, lr=0.01)


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    """Return fused Adam."""
    return torch.optim.Adam(parameters, lr=0.01, fused=True)


def train_step(loss: Loss) -> Callable[..., Tensor]:
    """Return a whole training step of `loss`."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: Any) -> Tensor:
        optimizer.zero_grad()
        value = loss(model, *batch)
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def batches(steps: int, rows: int = 8, width: int = 10) -> list[Tensor]:
    """Return global batches; every row is another one."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randn(rows, width, generator=generator) for _ in range(steps)]


def part(x: Tensor, dim: int = 0) -> Tensor:
    """Return this rank's part of a global batch."""
    parts = x.chunk(dist.get_world_size(), dim)
    rank = dist.get_rank()
    return parts[rank] if rank < len(parts) else x.narrow(dim, 0, 0)


def built(make_model: MakeModel, make_optimizer: MakeOptimizer, warm: bool) -> tuple[Any, Any]:
    """Return model and optimizer; `warm` takes one eager step, with the same data on all ranks."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters())
    if warm:
        sum_loss(model, torch.linspace(-1, 1, 20).reshape(2, 10)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def whole(value: Any) -> Any:
    """Return a global plain copy of a value as modules and optimizers hold it."""
    if isinstance(value, dist.tensor.DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return global parameters and optimizer state by name; `parameter.key` for state."""
    names = {id(p): n.removeprefix("module.") for n, p in model.named_parameters()}
    found: State = {"parameters": {}, "state": {}}
    for name, parameter in model.named_parameters():
        found["parameters"][name.removeprefix("module.")] = whole(parameter)
    for parameter, entry in optimizer.state.items():
        for key, value in entry.items():
            if value is not None:
                found["state"][f"{names[id(parameter)]}.{key}"] = whole(value)
    return found


def ddp(
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    loss: Loss,
    data: Sequence[Any],
    warm: bool = False,
) -> State:
    """Train eagerly under DistributedDataParallel on this rank's parts."""
    model, optimizer = built(make_model, make_optimizer, warm)
    wrapped = DistributedDataParallel(model)
    for batch in data:
        train_step(loss)(wrapped, optimizer, part(batch))
    return state_of(wrapped, optimizer)


def engine(
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    loss: Loss,
    data: Sequence[Any],
    mode: Any,
    warm: bool = False,
    batch: str = "local",
) -> tuple[State, Any, Any, Any]:
    """Train compiled; return the state, the compiled step, the model and the optimizer."""
    model, optimizer = built(make_model, make_optimizer, warm)
    step = spmd.compile(parallel_mode=mode, batch=batch)(train_step(loss))
    for value in data:
        step(model, optimizer, part(value) if batch == "local" else value)
    return state_of(model, optimizer), step, model, optimizer


def single(
    make_model: MakeModel,
    make_optimizer: MakeOptimizer,
    loss: Loss,
    data: Sequence[Any],
    warm: bool = False,
) -> State:
    """Train eagerly on one device with the global batch."""
    model, optimizer = built(make_model, make_optimizer, warm)
    for batch in data:
        train_step(loss)(model, optimizer, batch)
    return state_of(model, optimizer)


def assert_same(actual: State, expected: State, **tolerance: float) -> None:
    """Compare two states name by name."""
    for kind, table in expected.items():
        assert set(actual[kind]) == set(table), kind
        for name, value in table.items():
            torch.testing.assert_close(
                actual[kind][name], value, msg=lambda text, n=name: f"{n}: {text}", **tolerance
            )


def count(graph: Any, name: str) -> int:
    """Count the collectives of a name in a local graph, those over lists by their items."""
    found = 0
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", None) == "_c10d_functional":
            called = node.target._schema.name.split("::")[1]
            if called == name:
                found += 1
            if called == f"{name}_coalesced":
                found += len(node.args[0])
    return found


class Recorded:
    """A mode that keeps what `partition` returned, with the passes of the mode it wraps."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.partitioned: list[Any] = []
        self.transformed = 0
        original, transform = mode.partition, mode.transform_and_compile

        def partition(*args: Any, **kwargs: Any) -> Any:
            graph = original(*args, **kwargs)
            kept = copy.deepcopy(graph.graph)
            self.partitioned.append(torch.fx.GraphModule(graph, kept))
            self.partitioned[-1].meta.update(graph.meta)
            return graph

        def transform_and_compile(graph: Any) -> Any:
            self.transformed += 1
            return transform(graph)

        mode.partition, mode.transform_and_compile = partition, transform_and_compile
