"""Sweep the engine over Hugging Face types: every mode, in lock-step, against one device.

    python reports/engine_sweep.py [--types gpt2,llama] [--plan quick|full|float32] [--out DIR]

Prints one line per type and case and writes one JSON file per type and plan. `quick` is
batch 8 on 4 ranks; `full` adds 2 ranks and the uneven batches 7 and 2 on 4 ranks, all in
float64; `float32` is batch 8 on 4 ranks in float32.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, fx
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spmd.capture import Program, capture
from spmd.layout import Layout, Shard
from spmd.lifting import lift
from spmd.lockstep import PerRank, run_lockstep
from spmd.mesh import MeshShape
from spmd.parallel_mode import DataParallel, DTensorExpandMode
from spmd.program import signature_of
from spmd_verify.case import load_case

MODES = ("replicate", "fully_shard", "default", "expand")
HOT = ("gpt2", "llama", "bert", "vit", "resnet")
PLANS = {
    "quick": [("float64", 8, (4,))],
    "full": [("float64", 8, (2, 4)), ("float64", 7, (4,)), ("float64", 2, (4,))],
    "float32": [("float32", 8, (4,))],
}
_CALLS_WITH_WORK = torch._ops.OpOverload


def types_of_table() -> list[str]:
    """Return the 43 types of the issue."""
    path = Path(__file__).resolve().parents[2] / "shared/cases/hf-shrink.json"
    if not path.exists():
        path = Path("/work/shared/cases/hf-shrink.json")
    listed: list[str] = json.loads(path.read_text())["types"]
    return listed


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
        start = time.perf_counter()
        self.program: Program = capture(step, world, lambda i: _real(world.values[i]))
        self.seconds = time.perf_counter() - start
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
            split = x.reshape(*x.shape[:d], placement.outer, sum(placement.units), *x.shape[d + 1 :])
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


def run_local(captured: Captured, local: fx.GraphModule, ranks: int) -> tuple[list[Any], float, Any]:
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

        def observe(node: fx.Node, value: Any) -> None:
            nonlocal per_rank, before
            if not isinstance(node.target, _CALLS_WITH_WORK):
                return
            total = counter.get_total_flops()
            done, before = total - before, total
            per_rank += done / ranks if isinstance(value, PerRank) else done
            if done and not isinstance(value, PerRank):
                undivided[f"{node.target} {node.meta.get('global')}"] += done

        outputs = run_lockstep(local, inputs, mesh, observe)
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
    for spec, expected, got, layout in zip(specs, captured.reference, outputs, layouts, strict=True):
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


_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")


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
        if not any(source.target is getattr(torch.ops.aten, k, None) or
                   str(source.target).startswith(f"aten.{k}.") for k in keep):
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
        n.name for n in global_graph.graph.nodes
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


def operator_calls(graph: fx.GraphModule) -> int:
    """Return how many operator calls a graph has."""
    return sum(isinstance(n.target, _CALLS_WITH_WORK) for n in graph.graph.nodes)


def held_bytes(captured: Captured, local: fx.GraphModule) -> tuple[int, int, int]:
    """Return (largest over ranks, total, largest parameter) bytes of parameters and state."""
    coordinates = local.meta["mesh"].coordinates()
    held, total, largest = [0] * len(coordinates), 0, 0
    layouts = local.meta["layouts"]["inputs"]
    for spec, value, layout in zip(captured.signature.inputs, captured.values, layouts, strict=False):
        if spec.kind not in ("parameter", "state"):
            continue
        size = value.numel() * value.element_size()
        total += size
        if spec.kind == "parameter":
            largest = max(largest, size)
        for i, c in enumerate(coordinates):
            held[i] += part_of(value, layout, c).numel() * value.element_size()
    return max(held), total, largest


def sweep_type(name: str, plan: str) -> dict[str, Any]:
    """Return everything measured for one type; prints a line per case."""
    row: dict[str, Any] = {"type": name, "cases": []}
    for dtype, batch, meshes in PLANS[plan]:
        captured = Captured(f"hf:{name}?batch={batch}", dtype)
        nodes = captured.nodes
        print(
            f"{name:20s} {dtype} batch {batch} nodes {nodes} "
            f"capture {1e3 * captured.seconds / nodes:.2f} ms/node "
            f"graph vs eager {captured.eager_error:.1e}",
            flush=True,
        )
        for ranks in meshes:
            for mode in MODES:
                case = _sweep_case(captured, mode, ranks)
                case |= {"dtype": dtype, "batch": batch, "ranks": ranks, "mode": mode}
                case |= {"nodes": nodes, "capture_s": captured.seconds}
                case["eager_error"] = captured.eager_error
                row["cases"].append(case)
    return row


def _sweep_case(captured: Captured, mode: str, ranks: int) -> dict[str, Any]:
    start = time.perf_counter()
    local = partitioned(captured, mode, ranks)
    seconds = time.perf_counter() - start
    outputs, flops, undivided = run_local(captured, local, ranks)
    error, where = worst_output(captured, local, outputs, ranks)
    counts = collections.Counter(kind for kind, _ in collectives(local))
    gathers = activation_gathers(local, captured.graph)
    held, total, largest = held_bytes(captured, local)
    ratio = flops / captured.flops if captured.flops else 0.0
    result = {
        "partition_s": seconds, "error": error, "where": where,
        "fallbacks": local.meta["fallbacks"], "calls": operator_calls(captured.graph),
        "flops_ratio": ratio, "undivided": undivided.most_common(8), "collectives": counts,
        "activation_gathers": gathers, "held": held, "total": total, "largest": largest,
        "undetermined": len(undetermined(captured)),
    }  # fmt: skip
    print(
        f"  {mode:11s} W={ranks} part {1e3 * seconds / captured.nodes:.2f} ms/node "
        f"err {error:.1e} {where if error > 1e-12 else ''} flops x{ratio * ranks:.2f} "
        f"gathers {len(gathers)} {dict(counts)} fallbacks {local.meta['fallbacks']}",
        flush=True,
    )
    if mode in ("replicate", "fully_shard"):
        for line in gathers[:4]:
            print("      gathers", line)
        for line, count in undivided.most_common(4):
            print(f"      undivided {count / captured.flops:.3f} {line}")
    return result


def main() -> None:
    """Run the sweep of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default="")
    parser.add_argument("--plan", default="quick", choices=list(PLANS))
    parser.add_argument("--out", default="/tmp/engine_sweep")
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    names = options.types.split(",") if options.types else types_of_table()
    for name in names:
        try:
            row = sweep_type(name, options.plan)
        # A sweep goes on after a type that fails; the failure is its result.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            row = {"type": name, "cases": [], "refused": f"{type(error).__name__}: {error}"[:500]}
            print(f"{name:20s} REFUSED {row['refused']}", flush=True)
        (folder / f"{options.plan}-{name.replace('/', '_')}.json").write_text(
            json.dumps(row, default=str)
        )


if __name__ == "__main__":
    main()
