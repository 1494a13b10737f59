"""A reference applier: runs a step through its captured graph on one device.

It does what `Program` documents and nothing else, so a test that compares it with eager
shows that the capture told everything.
"""

import copy

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from spmd.capture import capture
from spmd.errors import SizeChanged
from spmd.lifting import lift, path_name, tensor_of
from spmd.program import Kept, Lifted
from spmd.results import unpacked
from spmd.structure import fingerprint
from spmd.writeback import set_state


class Replay:
    """A step that runs its graph.

    Args:
        function: The training step.
        reuse: Capture until two fingerprints in a row agree, then keep the graph. False:
            capture in every call.
    """

    def __init__(self, function, reuse=False):
        self.function, self.reuse = function, reuse
        self.entries = {}
        self.counters = frozenset()
        self.captures = 0
        self.program = None

    def __call__(self, *args, **kwargs):
        world = lift(self.function, args, kwargs, self.counters)
        entry = self.entries.setdefault(
            world.static, {"mark": None, "program": None, "stable": False}
        )
        if entry["stable"] and self.reuse:
            try:
                return self._run(entry["program"], world)
            except SizeChanged:
                entry["stable"] = False
        program = capture(self.function, world, lambda i: tensor_of(world.values[i]).clone())
        self.captures += 1
        self.counters |= program.counters
        mark = fingerprint(program)
        entry.update(stable=mark == entry["mark"], mark=mark, program=program)
        return self._run(program, world)

    def _run(self, program, world):
        self.program = program
        inputs = [tensor_of(v) for v in world.values] + [c.detach() for c in program.captured_now()]
        with torch.no_grad():
            generator = torch.get_rng_state()
            try:
                outputs = program.graph(*[x.clone() for x in inputs])
            except SizeChanged:
                torch.set_rng_state(generator)
                raise
            outputs = [v.clone() if isinstance(v, Tensor) else v for v in outputs]
            apply(program, world, outputs)
        return unpacked(program.result_spec, program.result_constants, outputs)


def apply(program, world, outputs):
    """Write what the graph computed into the model, the optimizer and everywhere else."""
    values = {(s.kind, s.name): v for s, v in zip(world.specs, world.values, strict=True)}
    captured = program.captured_now()
    placed = program.placed_elsewhere()
    for index, spec in enumerate(program.graph.meta["signature"].outputs):
        held = values.get((spec.kind, spec.name))
        if spec.kind == "result" or index in placed:
            continue
        if spec.kind == "captured" and spec.name.startswith("constant."):
            held = captured[int(spec.name.split(".")[1])]
        if held is None:
            assert spec.kind == "gradient", spec
            values["parameter", spec.name].grad = outputs[index]
        else:
            held.detach().copy_(outputs[index])
    for name, entry in program.new_state.items():
        for path, leaf in pytree.tree_flatten_with_path(entry)[0]:
            if not isinstance(leaf, Kept):
                value = outputs[leaf.position] if isinstance(leaf, Lifted) else leaf
                parameter = values["parameter", name]
                set_state(world.optimizer.state[parameter], path_name(path), value)
    for write in program.writes:
        write.apply(outputs)
    for place, value in program.python.values():
        place.set(value)
    for name in program.cleared_gradients:
        values["parameter", name].grad = None
    for name, flag in program.requires_grad.items():
        values["parameter", name].requires_grad_(flag)


def snapshot(model, optimizer):
    """Return everything a step may change, as {name: value}."""
    found = {f"parameter {n}": p.detach().clone() for n, p in model.named_parameters()}
    found |= {f"trained {n}": p.requires_grad for n, p in model.named_parameters()}
    found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    for name, p in model.named_parameters():
        found[f"gradient {name}"] = None if p.grad is None else p.grad.clone()
    if optimizer is not None:
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                for path, leaf in pytree.tree_flatten_with_path(dict(optimizer.state.get(p, {})))[
                    0
                ]:
                    found[f"state {i}.{j}.{path_name(path)}"] = copy.deepcopy(leaf)
            for key, value in group.items():
                if key != "params":
                    found[f"group {i}.{key}"] = copy.deepcopy(value)
    found["generator"] = torch.get_rng_state()
    return found


def ulps(actual, expected):
    """Return the largest distance in representable values between two float tensors."""
    kind = {torch.float32: torch.int32, torch.float64: torch.int64}[actual.dtype]

    def order(x):
        bits = x.contiguous().view(kind).to(torch.int64)
        smallest = torch.iinfo(kind).min
        return torch.where(bits < 0, smallest - bits, bits)

    if not actual.numel():
        return 0
    return (order(actual) - order(expected)).abs().max().item()


def differences(actual, expected):
    """Return {name: ulps or text} for everything that is not bitwise equal."""
    found = {}
    for name in actual.keys() | expected.keys():
        a, b = actual.get(name), expected.get(name)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or a.dtype != b.dtype:
                found[name] = f"{a.shape} {a.dtype} / {b.shape} {b.dtype}"
            elif not torch.equal(a, b) and not (a.isnan() & b.isnan() | (a == b)).all():
                found[name] = ulps(a, b) if a.is_floating_point() else f"{a} / {b}"
        elif type(a) is not type(b) or a != b:
            found[name] = f"{a!r} / {b!r}"
    return found


def compare(build, step, batches, reuse=False, wrap=lambda x: x):
    """Run a step eagerly and through its graph; return (differences by step, replay).

    Args:
        build: () -> (model, optimizer) or (model, optimizer, anything the step closes over).
        step: The training step, or a function of what `build` returned that makes it.
        batches: One tuple of arguments per step.
        reuse: See `Replay`.
        wrap: Applied to results before they are compared.
    """
    torch.manual_seed(0)
    ours, theirs = build(), None
    torch.manual_seed(0)
    theirs = build()
    eager = step(*theirs) if getattr(step, "makes_step", False) else step
    replay = Replay(step(*ours) if getattr(step, "makes_step", False) else step, reuse)
    found = {}
    for number, batch in enumerate(batches):
        generator = torch.get_rng_state()
        expected = eager(theirs[0], theirs[1], *batch)
        after = snapshot(theirs[0], theirs[1])
        torch.set_rng_state(generator)
        actual = replay(ours[0], ours[1], *batch)
        different = differences(snapshot(ours[0], ours[1]), after)
        leaves = [pytree.tree_leaves(wrap(r)) for r in (actual, expected)]
        numbered = [{f"result {i}": v for i, v in enumerate(leaf)} for leaf in leaves]
        different |= differences(*numbered)
        if different:
            found[number] = different
    return found, replay


def maker(function):
    """Mark a function that makes the step from what `build` returned."""
    function.makes_step = True
    return function
