"""Captured Hugging Face cases, their local graphs in lock-step, and what is counted on them."""

from __future__ import annotations

import collections
import time
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

from spmd.capture import Program, capture
from spmd.layout import Layout, Shard
from spmd.lifting import lift
from spmd.lockstep import PerRank, run_lockstep
from spmd.mesh import MeshShape
from spmd.parallel_mode import DataParallel, DTensorExpandMode
from spmd.program import signature_of
from spmd_verify.cases.case import load_case

MODES = ("replicate", "fully_shard", "default", "expand")
HOT = ("gpt2", "llama", "bert", "vit", "resnet")
_CALLS_WITH_WORK = torch._ops.OpOverload


class Captured:
    """One case's step, captured after one eager step, with its values and its reference.

    Attributes:
        program: What `capture` returned.
        seconds: What the capture took.
        values: Global values of the placeholders.
        reference: Outputs of the global graph on them.
        eager_error: Worst relative difference of the graph's parameters from eager ones.
        flops: Of the global graph, by torch's counter.
    """

    def __init__(self, address: str, dtype: str, seed: int = 0) -> None:
        case = load_case(address, dtype=dtype, seed=seed)
        self.dtype = case.dtype
        self.model = case.build_model()
        self.optimizer = case.optimizer(self.model)

        def step(model: Any, optimizer: Any, batch: Any) -> Any:
            return case.step(model, optimizer, batch)

        self.step = step
        case.seed_step(0)
        step(self.model, self.optimizer, case.batch(0))
        batch = case.batch(1)
        case.seed_step(1)
        world = lift(step, (self.model, self.optimizer, batch), {})
        start = time.process_time()
        self.program: Program = capture(step, world, lambda i: _real(world.values[i]))
        self.seconds = time.process_time() - start
        self.graph = self.program.graph
        self.signature = signature_of(self.graph)
        self.values = [_real(v) for v in world.values] + [c.detach() for c in self.program.captured]
        self.generator = torch.get_rng_state()
        with FlopCounterMode(display=False) as counter:
            self.reference = self.graph(*[v.clone() for v in self.values])
        self.flops = counter.get_total_flops()
        torch.set_rng_state(self.generator)
        step(self.model, self.optimizer, batch)
        self.eager_error = self._against_eager()

    @property
    def nodes(self) -> int:
        """Nodes of the global graph."""
        return len(self.graph.graph.nodes)

    def _against_eager(self) -> float:
        parameters = dict(self.model.named_parameters())
        worst = 0.0
        for spec, value in zip(self.signature.outputs, self.reference, strict=True):
            if spec.kind == "parameter" and spec.name in parameters and value.numel():
                worst = max(worst, _difference(value, parameters[spec.name].detach(), 0.0))
        return worst


def _real(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return torch.tensor(value, dtype=torch.float64)


def part_of(x: Tensor, layout: Layout, coordinate: tuple[int, ...]) -> Tensor:
    """Return one rank's part of a global tensor."""
    for placement, index in zip(layout.placements, coordinate, strict=True):
        if isinstance(placement, Shard):
            d = placement.dim
            split = x.reshape(
                *x.shape[:d], placement.outer, sum(placement.units), *x.shape[d + 1 :]
            )
            index %= len(placement.units)  # fewer parts than ranks repeat
            own = split.narrow(d + 1, placement.offsets()[index], placement.units[index])
            x = own.reshape(*x.shape[:d], placement.local_sizes()[index], *x.shape[d + 1 :])
    return x


def _difference(got: Tensor, expected: Tensor, floor: float) -> float:
    if got.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not (expected.is_floating_point() or expected.is_complex()):
        return float((got != expected).any())
    scale = max(floor, expected.abs().max().item(), 1e-30)
    if torch.equal(got, expected):
        return 0.0
    return (got - expected).abs().max().item() / scale


def make_mode(name: str, mesh: MeshShape) -> Any:
    """Return a mode by its name in `MODES`."""
    if name == "expand":
        return DTensorExpandMode(mesh=mesh)
    return DataParallel(name, mesh=mesh)


def partitioned(captured: Captured, name: str, ranks: int) -> fx.GraphModule:
    """Return the local graph `partition` gives, before any pass."""
    mode = make_mode(name, MeshShape(("dp",), (ranks,)))
    graph = captured.graph
    return mode.partition(graph, captured.model, captured.optimizer, {}, {}, (), {})


def run_local(
    captured: Captured, local: fx.GraphModule, ranks: int
) -> tuple[list[Any], float, Any]:
    """Run a local graph in lock-step; return outputs, FLOPs of one rank and where they are."""
    mesh = MeshShape(("dp",), (ranks,))
    inputs: list[Any] = []
    for value, layout in zip(captured.values, local.meta["layouts"]["inputs"], strict=True):
        if layout.is_replicated:
            inputs.append(value)
        else:
            inputs.append(PerRank(part_of(value, layout, c).clone() for c in mesh.coordinates()))
    torch.set_rng_state(captured.generator)
    per_rank, before = 0.0, 0.0
    undivided: collections.Counter[str] = collections.Counter()
    with FlopCounterMode(display=False) as counter:

        def visit(node: fx.Node, parts: list[Any]) -> list[Any]:
            nonlocal per_rank, before
            if not isinstance(node.target, _CALLS_WITH_WORK):
                return parts
            total = counter.get_total_flops()
            done, before = total - before, total
            # What is one object on every rank was computed once, but every rank has to do it.
            shared = ranks > 1 and parts[0] is parts[1]
            per_rank += done if shared else done / ranks
            if done and shared:
                undivided[f"{node.target} {node.meta.get('global')}"] += done
            return parts

        outputs = run_lockstep(local, inputs, mesh, visit)
    return outputs, per_rank, undivided


def undetermined(captured: Captured) -> set[str]:
    """Return the parameters whose gradient is rounding noise: zero in exact arithmetic.

    Adam's update of such a parameter is noise divided by noise, so it has no right value.
    """
    sizes = {
        s.name: v.abs().max().item()
        for s, v in zip(captured.signature.outputs, captured.reference, strict=True)
        if s.kind == "gradient" and isinstance(v, Tensor) and v.numel()
    }
    tiny = 1e-10 if captured.dtype == torch.float64 else 1e-5
    return {name for name, size in sizes.items() if size < tiny * max(sizes.values())}


def worst_output(captured: Captured, local: fx.GraphModule, outputs: list[Any], ranks: int) -> Any:
    """Return the largest relative difference from the global graph, and the output's name.

    The scale of an output is its largest element, at least 1e-6 of the largest of its kind.
    Rows of `undetermined` parameters are left out.
    """
    noise = undetermined(captured)
    specs = captured.signature.outputs
    largest: dict[str, float] = collections.defaultdict(float)

    def kind(spec: Any) -> str:
        return f"{spec.kind}.{spec.name.rpartition('.')[2] if spec.kind == 'state' else ''}"

    for spec, value in zip(specs, captured.reference, strict=True):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            largest[kind(spec)] = max(largest[kind(spec)], value.abs().max().item())
    worst = (0.0, "")
    layouts = local.meta["layouts"]["outputs"]
    coordinates = MeshShape(("dp",), (ranks,)).coordinates()
    for spec, expected, got, layout in zip(
        specs, captured.reference, outputs, layouts, strict=True
    ):
        if not isinstance(expected, Tensor) or _owner(spec) in noise:
            continue
        floor = 1e-6 * largest[kind(spec)]
        for index, coordinate in enumerate(coordinates):
            own = got[index] if isinstance(got, PerRank) else got
            difference = _difference(own, part_of(expected, layout, coordinate), floor)
            if not difference <= worst[0]:
                worst = (difference, f"{spec.kind} {spec.name}")
    return worst


def _owner(spec: Any) -> str:
    name: str = spec.name
    return name.rpartition(".")[0] if spec.kind == "state" else name


_COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "all_to_all_single",
)


def collectives(local: fx.GraphModule) -> list[tuple[str, fx.Node]]:
    """Return (name, node) of every collective of a local graph."""
    found = []
    for node in local.graph.nodes:
        target = node.target
        if isinstance(target, _CALLS_WITH_WORK) and target.namespace == "_c10d_functional":
            name = target._schema.name.split("::")[1]
            if name in _COLLECTIVES:
                found.append((name, node))
    return found


def source_of(node: fx.Node) -> fx.Node:
    """Return the placeholder or operator whose result a collective moves: through views."""
    source = node.args[0]
    keep = ("contiguous", "reshape", "constant_pad_nd", "slice", "cat", "view", "_to_copy")
    while isinstance(source, fx.Node) and source.op == "call_function":
        if not any(
            source.target is getattr(torch.ops.aten, k, None)
            or str(source.target).startswith(f"aten.{k}.")
            for k in keep
        ):
            break
        first = source.args[0]
        source = first[0] if isinstance(first, list | tuple) else first
    return source


def activation_gathers(local: fx.GraphModule, global_graph: fx.GraphModule) -> list[str]:
    """List the all_gathers of something that is not a parameter (or of its state)."""
    signature = signature_of(global_graph)
    names = [n.name for n in global_graph.graph.find_nodes(op="placeholder")]
    placeholders = {n for n, s in zip(names, signature.inputs, strict=True) if s.kind != "argument"}
    optimizer = {
        n.name
        for n in global_graph.graph.nodes
        if n.meta.get("custom", {}).get("region") == "optimizer"
    }
    found = []
    for name, node in collectives(local):
        if name != "all_gather_into_tensor":
            continue
        source = source_of(node)
        if source.op == "placeholder" and source.name in placeholders:
            continue
        if node.meta.get("global") in optimizer:
            continue
        found.append(f"{source.name} for {node.meta.get('global')} at {node.meta.get('line')}")
    return found


def collective_faults(local: fx.GraphModule, global_graph: fx.GraphModule) -> list[str]:
    """List gradients reduced more than once, and parameters gathered twice in one region.

    A gradient may have no reduction of its own where it is computed from statistics that
    were reduced before (the weight of a batch normalisation).
    """
    signature = signature_of(global_graph)
    names = [n.name for n in global_graph.graph.find_nodes(op="placeholder")]
    parameters = {n for n, s in zip(names, signature.inputs, strict=True) if s.kind == "parameter"}
    seen: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for kind, node in collectives(local):
        gradient = node.meta.get("gradient")
        if gradient is not None:
            seen[f"reductions of gradient {gradient['names']}", "", ""] += 1
        source = source_of(node)
        if kind == "all_gather_into_tensor" and source.name in parameters:
            seen["gathers of", source.name, node.meta["region"]] += 1
    return [f"{' '.join(key)}: {count}" for key, count in seen.items() if count > 1]


def operator_calls(graph: fx.GraphModule) -> int:
    """Return how many operator calls a graph has."""
    return sum(isinstance(n.target, _CALLS_WITH_WORK) for n in graph.graph.nodes)


def held_bytes(captured: Captured, local: fx.GraphModule) -> tuple[int, int, int]:
    """Return (largest over ranks, total, largest parameter) bytes of parameters and state."""
    coordinates = local.meta["mesh"].coordinates()
    held, total, largest = [0] * len(coordinates), 0, 0
    layouts = local.meta["layouts"]["inputs"]
    for spec, value, layout in zip(
        captured.signature.inputs, captured.values, layouts, strict=False
    ):
        if spec.kind not in ("parameter", "state"):
            continue
        size = value.numel() * value.element_size()
        total += size
        if spec.kind == "parameter":
            largest = max(largest, size)
        for i, c in enumerate(coordinates):
            held[i] += part_of(value, layout, c).numel() * value.element_size()
    return max(held), total, largest
