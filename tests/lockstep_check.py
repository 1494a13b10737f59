"""Run one step under the engine's modes in lock-step and compare it with one device.

One capture is partitioned for every mode and mesh; every output of every rank is compared
with its part of the single-device graph's output, the single-device graph with eager, and
the random generator's final state bitwise. Runs on CPU, one process.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn

from spmd.capture import Program, capture
from spmd.layout import Layout, Shard
from spmd.lifting import lift, tensor_of
from spmd.lockstep import PerRank, run_lockstep
from spmd.mesh import MeshShape
from spmd.mode import ParallelMode
from spmd.parallel_mode import DataParallel, DTensorExpandMode

MODES = ("replicate", "fully_shard", "default", "expand")
# Differences are relative to the output's largest element; smaller outputs than this are
# compared absolutely, so that rounding around an exact zero is not a failure.
SMALLEST_SCALE = 1e-3

Step = Callable[..., Any]
NamedMode = str | tuple[str, ParallelMode]


@dataclass
class Outcome:
    """What one mode on one mesh did.

    Attributes:
        mode: Name of the mode.
        ranks: Number of ranks.
        worst: Largest relative difference of any output on any rank.
        worst_output: "kind name" of that output.
        fallbacks: Operator -> calls that were gathered and replicated.
        collectives: Collective -> calls in the local graph.
        gathers: Region of the step -> all_gathers in the local graph.
        calls: Operator calls in the global graph.
        graph: The local graph after passes.
    """

    mode: str
    ranks: int
    worst: float
    worst_output: str
    fallbacks: dict[str, int]
    collectives: Counter[str]
    gathers: Counter[str]
    calls: int
    graph: fx.GraphModule = field(repr=False)


def check(
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[..., Any],
    step: Step,
    batch: Sequence[Any],
    ranks: Sequence[int] = (4,),
    tol: float = 1e-11,
    modes: Sequence[NamedMode] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> list[Outcome]:
    """Compare a step under every mode with the single-device graph, and that with eager.

    Args:
        make_model: Makes the model; called once, after seeding.
        make_optimizer: Parameters -> optimizer, or None for a step without one.
        step: Called as `step(model, optimizer, *batch, **kwargs)`.
        batch: Global arguments of the step.
        ranks: Sizes of one-axis meshes; a mode given as a pair brings its own mesh.
        tol: Allowed difference, relative to the largest element of the output.
        modes: Names of `MODES` or (name, mode) pairs; all names by default.
        kwargs: Global keyword arguments of the step.

    Returns:
        One outcome per mode and mesh.

    Raises:
        AssertionError: Names the first mode and the output that differs.
    """
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model.parameters()) if make_optimizer is not None else None
    program, inputs = captured(model, optimizer, step, batch, kwargs or {})
    expected, generator = _single_device(program, inputs)
    _compare_with_eager(
        program, expected, generator, step, (model, optimizer, batch, kwargs or {}), tol
    )
    outcomes = []
    for name, mode in _instances(modes or MODES, ranks):
        outcome = _compare(program, inputs, expected, generator, name, mode)
        assert outcome.worst <= tol, (
            f"{name} on {outcome.ranks} ranks: output {outcome.worst_output!r} differs from the "
            f"single-device graph by {outcome.worst:.2e} of its largest element, allowed {tol:.0e}"
        )
        outcomes.append(outcome)
    return outcomes


def captured(
    model: nn.Module, optimizer: Any, step: Step, batch: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Program, list[Tensor]]:
    """Return the program of a step and private copies of its example inputs."""
    args = (model, *batch) if optimizer is None else (model, optimizer, *batch)
    world = lift(step, args, kwargs)

    def copied(value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().clone()
        return tensor_of(value)

    program = capture(step, world, lambda position: copied(world.values[position]))
    values = [copied(v) for v in world.values] + [c.detach().clone() for c in program.captured]
    return program, values


def part_of(value: Tensor, layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
    """Return the part of a global tensor that the rank at `coordinate` holds."""
    for placement, index in zip(layout.placements, coordinate, strict=True):
        if isinstance(placement, Shard):
            dim, units = placement.dim, placement.units
            index %= len(units)  # fewer parts than ranks repeat
            before, after = value.shape[:dim], value.shape[dim + 1 :]
            split = value.reshape(*before, placement.outer, sum(units), *after)
            own = split.narrow(dim + 1, sum(units[:index]), units[index])
            value = own.reshape(*before, placement.outer * units[index], *after)
    return value


def difference(actual: Any, expected: Any) -> float:
    """Return the largest difference relative to the largest expected element.

    Infinite for another shape or dtype, or NaN and infinity in other places.
    """
    if not isinstance(expected, Tensor):
        expected = torch.tensor(expected)
        actual = torch.as_tensor(actual, dtype=expected.dtype)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    if expected.numel() == 0 or torch.equal(actual, expected):
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return float("inf")
    finite = expected.isfinite()
    same = torch.where(finite, torch.zeros_like(actual), actual)
    wanted = torch.where(finite, torch.zeros_like(expected), expected)
    if not torch.equal(finite, actual.isfinite()) or not torch.allclose(
        same, wanted, equal_nan=True
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    scale = max(SMALLEST_SCALE, expected[finite].abs().max().item())
    return (actual[finite] - expected[finite]).abs().max().item() / scale


def _instances(modes: Sequence[NamedMode], ranks: Sequence[int]) -> list[tuple[str, ParallelMode]]:
    made: list[tuple[str, ParallelMode]] = [m for m in modes if not isinstance(m, str)]
    for count in ranks:
        mesh = MeshShape(("dp",), (count,))
        for name in modes:
            if name == "expand":
                made.append((name, DTensorExpandMode(mesh=mesh)))
            elif isinstance(name, str):
                made.append((name, DataParallel(name, mesh=mesh)))
    return made


def _single_device(program: Program, inputs: list[Tensor]) -> tuple[list[Any], Tensor]:
    """Return the global graph's outputs and the generator's state before it ran."""
    generator = torch.get_rng_state()
    return program.graph(*[v.clone() for v in inputs]), generator


def _compare_with_eager(
    program: Program, expected: list[Any], generator: Tensor, step: Step, call: Any, tol: float
) -> None:
    """Run the real step on a copy and compare what it returns and leaves behind."""
    after = torch.get_rng_state()
    model, optimizer, batch, kwargs = copy.deepcopy(call)
    torch.set_rng_state(generator)
    args = (model, *batch) if optimizer is None else (model, optimizer, *batch)
    result = step(*args, **kwargs)
    assert torch.equal(torch.get_rng_state(), after), (
        "the graph leaves the random generator in another state than eager"
    )
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    named = {("result", i): leaf.detach() for i, leaf in enumerate(leaves)}
    named |= {("parameter", n): p.detach() for n, p in model.named_parameters()}
    named |= {("buffer", n): b for n, b in model.named_buffers()}
    named |= {("gradient", n): p.grad for n, p in model.named_parameters() if p.grad is not None}
    results = 0
    for spec, value in zip(program.graph.meta["signature"].outputs, expected, strict=True):
        key: Any = (spec.kind, spec.name)
        if spec.kind == "result":
            key, results = ("result", results), results + 1
        if key in named:
            found = difference(value, named.pop(key))
            assert found <= tol, (
                f"captured graph: '{spec.kind} {spec.name}' differs from eager by {found:.2e}"
            )
    specs = program.graph.meta["signature"].inputs
    given = {(s.kind, s.name): v for s, v in zip(specs, program.world.values, strict=False)}
    for key, value in named.items():
        if key in given:
            found = difference(given[key].detach(), value)
            assert found == 0, (
                f"captured graph does not write {key}, eager changes it by {found:.2e}"
            )
    missing = [key for key in named if key not in given and key[0] in ("result", "gradient")]
    assert not missing, f"captured graph lacks {missing}"


def _compare(
    program: Program, inputs: list[Tensor], expected: list[Any], generator: Tensor, name: str,
    mode: ParallelMode,
) -> Outcome:  # fmt: skip
    world, after = program.world, torch.get_rng_state()
    local = mode.partition(program.graph, world.model, world.optimizer, {}, {}, (), {})
    local = mode.transform_and_compile(local)
    mesh: MeshShape = local.meta["mesh"]
    parts: list[Any] = []
    for value, layout in zip(inputs, local.meta["layouts"]["inputs"], strict=True):
        pieces = PerRank(part_of(value, layout, c).clone() for c in mesh.coordinates())
        parts.append(value.clone() if layout.is_replicated else pieces)
    torch.set_rng_state(generator)
    outputs = run_lockstep(local, parts, mesh)
    assert torch.equal(torch.get_rng_state(), after), (
        f"{name} on {mesh.num_ranks} ranks leaves the random generator in another state"
    )
    worst, worst_output = 0.0, ""
    layouts = local.meta["layouts"]["outputs"]
    specs = program.graph.meta["signature"].outputs
    for spec, wanted, actual, layout in zip(specs, expected, outputs, layouts, strict=True):
        for rank, coordinate in enumerate(mesh.coordinates()):
            own = actual[rank] if isinstance(actual, PerRank) else actual
            part = part_of(wanted, layout, coordinate) if isinstance(wanted, Tensor) else wanted
            found = difference(own, part)
            if not found <= worst:
                worst, worst_output = found, f"{spec.kind} {spec.name}"
    return Outcome(
        name, mesh.num_ranks, worst, worst_output, local.meta["fallbacks"],
        *_counted(local.graph), local.meta["calls"], local,
    )  # fmt: skip


def _counted(graph: fx.Graph) -> tuple[Counter[str], Counter[str]]:
    """Count collectives by name, and all_gathers by region."""
    collectives: Counter[str] = Counter()
    gathers: Counter[str] = Counter()
    for node in graph.nodes:
        target = node.target
        if getattr(target, "namespace", None) == "_c10d_functional":
            name = target._schema.name.split("::")[1]
            if name != "wait_tensor":
                collectives[name] += 1
            if name.startswith("all_gather"):
                gathers[node.meta.get("region", "forward")] += 1
    return collectives, gathers
