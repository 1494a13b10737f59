"""Watches a step while it is traced: lines, regions, gradients, numbers, and what it leaves."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from spmd.conversions import Formatted
from spmd.errors import CaptureError
from spmd.guards import Guards, Shadow
from spmd.intercept import fused_optimizer, sized_call
from spmd.lifting import World, world_parameters
from spmd.nested import nested_refused
from spmd.program import Lifted, OutputSpec, Write
from spmd.questions import Questions, printable_numbers, untraceable
from spmd.random_state import generator_in_graph
from spmd.results import packed, path_name
from spmd.source_lines import refusals_kept, user_line
from spmd.substitutes import Substitutes, substitute
from spmd.swapping import Aftermath, is_fake, swapped, with_outputs

aten = torch.ops.aten


@dataclass
class Region:
    """Where the step is while it is traced: `forward`, `backward` or `optimizer`."""

    in_optimizer: bool = False

    def name(self) -> str:
        """Return the region's name."""
        if self.in_optimizer:
            return "optimizer"
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"


class Recorder(TorchDispatchMode):
    """Sits above the tracer: notes lines and regions, answers data-dependent questions."""

    def __init__(
        self, fake_mode: FakeTensorMode, world: World, fetch: Callable[[int], Any]
    ) -> None:
        super().__init__()
        self.fake_mode, self.world, self.fetch = fake_mode, world, fetch
        self.region = Region()
        self.lines: dict[str, str] = {}
        self._line_of_sequence: dict[int, str] = {}
        self._shadow: Shadow | None = None
        self._last: fx.Node | None = None
        self._numbers_read = False
        self.outputs: list[OutputSpec] = []
        self.known: dict[int, Tensor] = {}
        self._captured: list[Tensor] = []
        self.after = Aftermath()
        self.result_spec: Any = None
        self.result_constants: list[Any] = []
        self.cleared_gradients: list[str] = []

    # -- tracing -------------------------------------------------------------------

    def run(self, function: Callable[..., Any], inputs: list[Tensor]) -> list[Any]:
        """Run the step on fakes; called once, by the tracer."""
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self.tracer = proxy_mode.tracer
        self._shadow = Shadow(self.tracer.graph, self.tracer.root, self.fetch)
        self.guards = Guards(
            self.tracer.graph,
            self._shadow.value,
            lambda: {"region": self.region.name(), "line": user_line()},
        )
        self.fake_mode.shape_env.on_guard = self.guards.answer
        self.known = {
            id(value): stand_in
            for value, stand_in in zip(self.world.values, inputs, strict=True)
            if isinstance(value, Tensor)
        }
        with (
            self, Substitutes(), nested_refused(), Formatted(), Questions(), printable_numbers(),
            generator_in_graph(),
        ):  # fmt: skip
            stand_ins: list[Any] = list(inputs)
            for position, spec in enumerate(self.world.specs):
                if spec.kind == "hyper":
                    stand_ins[position] = aten._local_scalar_dense.default(inputs[position])
            self._numbers_read = True
            flat = [
                stand_ins[leaf.position] if isinstance(leaf, Lifted) else leaf
                for leaf in self.world.flat_args
            ]
            args, kwargs = pytree.tree_unflatten(flat, self.world.args_spec)
            with (
                swapped(self.world, stand_ins) as self.after,
                self._watched(stand_ins),
                refusals_kept(),
            ):
                result = function(*args, **kwargs)
            return self._collect(result, stand_ins)

    @contextmanager
    def _watched(self, stand_ins: list[Any]) -> Iterator[None]:
        """Mark finished gradients and the optimizer's region while the step runs."""
        handles = []
        for position, spec in world_parameters(self.world):
            if stand_ins[position].requires_grad:
                handles.append(
                    stand_ins[position].register_post_accumulate_grad_hook(self._marker(spec.name))
                )
        try:
            with self._optimizer_region():
                yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _optimizer_region(self) -> Iterator[None]:
        """Know when `optimizer.step` runs.

        A learning-rate scheduler may have wrapped it already, and looks for its wrapper.
        """
        optimizer = self.world.optimizer
        if optimizer is None:
            yield
            return
        before = optimizer.__dict__.get("step")
        original = optimizer.step

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> Any:
            self.region.in_optimizer = True
            try:
                return original(*args, **kwargs)
            finally:
                self.region.in_optimizer = False

        optimizer.__dict__["step"] = step
        try:
            yield
        finally:
            del optimizer.__dict__["step"]
            if before is not None:
                optimizer.__dict__["step"] = before

    def _marker(self, name: str) -> Callable[[Tensor], None]:
        def mark(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            if parameter.grad.is_sparse:
                raise CaptureError(
                    f"parameter {name!r} gets a sparse gradient, which the engine does not shard. "
                    "Build the embedding with sparse=False.",
                    user_line(),
                    "sparse-gradient",
                )
            with torch.no_grad():
                parameter.grad = torch.ops.spmd.mark_gradient(parameter.grad, name)

        return mark

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.lift_fresh.default:
            return func(*args, **kwargs or {})  # of a number of Python's: the tracer bakes it
        args, kwargs = pytree.tree_map_only(Tensor, self._known, (args, kwargs or {}))
        if func is aten._local_scalar_dense.default:
            return self._item(args[0], from_tensor=self._numbers_read)
        if func is aten.equal.default:
            return self._equal(*args)
        if func is aten.allclose.default:
            return bool(self._item(aten.isclose.default(*args, **kwargs).all(), from_tensor=True))
        out = substitute(func, args, kwargs)
        if out is NotImplemented:
            out = sized_call(func, args, kwargs, self._real)
        if out is NotImplemented:
            out = fused_optimizer(func, args, kwargs)
        if out is NotImplemented:
            args, kwargs = self._sizes_known(func, args, kwargs)
            self._forget_constants(func, args, kwargs)
            try:
                out = func(*args, **kwargs)
            except _UNTRACEABLE as error:
                raise untraceable(func, error) from error
        self._annotate()
        return out

    def _sizes_known(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Replace symbols that are sizes or positions by their values, which are guarded."""
        kinds = _size_arguments(func)
        args = tuple(_plain_sizes(a) if i in kinds else a for i, a in enumerate(args))
        return args, {k: _plain_sizes(v) if k in kinds else v for k, v in kwargs.items()}

    def _forget_constants(self, func: Any, args: Any, kwargs: Any) -> None:
        """Take their constant value from tensors that meet a symbolic number or a list.

        `FakeTensorMode` computes on constants with the symbol and gets NaN; the tracer
        misses what operators without outputs (`_foreach_mul_`) write (torch 2.13).
        """
        flat = pytree.arg_tree_leaves(*args, **kwargs)
        unseen = func._schema.is_mutable and not func._schema.returns
        if not unseen and not any(isinstance(x, torch.SymFloat | torch.SymBool) for x in flat):
            return
        for x in flat:
            if isinstance(x, FakeTensor):
                slot = get_proxy_slot(x, self.tracer, None)
                if slot is not None:
                    slot.constant = None
                if x.constant is not None:
                    self.fake_mode.fake_tensor_converter.invalidate_constant_aliases(x.constant)

    def _known(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self.known:
            self._capture(tensor)
        return self.known[id(tensor)]

    def _capture(self, tensor: Tensor) -> None:
        """Let a fake stand for a real tensor the step came upon, read by a `get_attr` node.

        Left to itself, the tracer would run operators whose inputs are all real, in-place
        ones too.
        """
        with _disable_current_modes():
            fake = self.fake_mode.from_tensor(tensor.detach(), static_shapes=True)
        name = f"captured_{len(self._captured)}"
        setattr(self.tracer.root, name, tensor)
        proxy = self.tracer.create_proxy("get_attr", name, (), {})
        track_tensor(fake, proxy, constant=None, tracer=self.tracer)
        self._captured.append(tensor)  # its id stays taken
        self.known[id(tensor)] = fake

    def _annotate(self) -> None:
        """Give the nodes added since the last call their region and source line."""
        region = self.region.name()
        line = user_line()
        if region == "backward":
            node = torch._C._current_autograd_node()
            if node is not None:
                line = self._line_of_sequence.get(node._sequence_nr(), line)
        elif torch.is_grad_enabled() and line is not None:
            self._line_of_sequence[torch._C._autograd._get_sequence_nr() - 1] = line
        last = next(iter(reversed(self.tracer.graph.nodes)), None)
        node = last
        while node is not None and node is not self._last and node.op != "root":
            node.meta.setdefault("custom", {"region": region, "line": line})
            node = node.prev
        self._last = last

    # -- numbers out of tensors ------------------------------------------------------

    def _proxy(self, tensor: Tensor) -> fx.Proxy:
        return get_proxy_slot(tensor, self.tracer).proxy

    def _real(self, tensor: Tensor) -> Tensor:
        """Return the real value of a traced tensor."""
        assert self._shadow is not None
        if not isinstance(tensor, FakeTensor):
            return tensor
        return self._shadow.value(self._proxy(tensor).node)

    def _item(self, tensor: Tensor, from_tensor: bool) -> Any:
        number = aten._local_scalar_dense.default(tensor)
        self._annotate()
        if isinstance(number, torch.SymFloat | torch.SymInt | torch.SymBool):
            node = next(
                n
                for n in reversed(self.tracer.graph.nodes)
                if n.target is aten._local_scalar_dense.default
            )
            self.guards.add(number, node, from_tensor)
        return number

    def _equal(self, x: Tensor, y: Tensor) -> bool:
        """Answer torch's own question and guard the answer."""
        return x.shape == y.shape and bool(self._item((x == y).all(), from_tensor=True))

    # -- outputs -----------------------------------------------------------------------

    def _collect(self, result: Any, stand_ins: list[Any]) -> list[Any]:
        """List what the step returns and leaves behind, with one OutputSpec each."""
        outputs, after = _Outputs(self.outputs), self.after
        self.result_spec, self.result_constants = packed(
            result, is_fake, lambda name, leaf: outputs.add("result", name, leaf)
        )
        given = {(s.kind, s.name): v for s, v in zip(self.world.specs, stand_ins, strict=True)}
        for name, tensor in after.gradients.items():
            before = given.get(("gradient", name))
            if tensor is None and before is not None:
                self.cleared_gradients.append(name)
            elif tensor is not None and tensor is not before:
                outputs.add("gradient", name, tensor)
        after.written[:] = [
            Write(w.kind, w.place, with_outputs(w.value, outputs.adder(w.kind, w.place.name)))
            for w in after.written
        ]
        for name, entry in after.state.items():
            after.state[name] = pytree.tree_map_with_path(
                lambda path, leaf, name=name: outputs.state(f"{name}.{path_name(path)}", leaf),
                entry,
            )
        return outputs.values


_UNTRACEABLE = (DataDependentOutputException, DynamicOutputShapeException)


@functools.lru_cache(maxsize=4096)
def _size_arguments(func: Any) -> frozenset[int | str]:
    """Return positions and names of the arguments that are sizes or positions.

    The ends of `arange` and `linspace` are numbers that decide a size.
    """
    ranges = func.overloadpacket in (aten.arange, aten.linspace, aten.logspace, aten.range)
    found: set[int | str] = set()
    for position, argument in enumerate(func._schema.arguments):
        kind = str(argument.real_type)
        if kind in ("int", "Optional[int]", "List[int]") or (ranges and kind == "number"):
            found |= {position, argument.name}
    return frozenset(found)


def _plain_sizes(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return int(value)
    if isinstance(value, torch.SymFloat):
        return float(value)
    return [_plain_sizes(v) for v in value] if isinstance(value, (list, tuple)) else value


class _Outputs:
    """The graph's outputs as they are found."""

    def __init__(self, specs: list[OutputSpec]) -> None:
        self.specs = specs
        self.values: list[Any] = []

    def add(self, kind: Any, name: str, value: Any) -> Lifted:
        self.specs.append(OutputSpec(kind, name))
        self.values.append(value.detach() if isinstance(value, Tensor) else value)
        return Lifted(len(self.values) - 1)

    def adder(self, kind: str, name: str) -> Callable[[Any], Lifted]:
        return lambda value: self.add(kind, name, value)

    def state(self, name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and is_fake(leaf):
            return self.add("state", name, leaf)
        return self.add("hyper", f"state.{name}", leaf) if is_fake(leaf) else leaf
