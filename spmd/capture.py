"""Capture a training step - forward, backward, optimizer - as one functional graph.

Stage one traces the eager step with real autograd inside; stage two traces that graph
again through functionalization. One stage cannot do it: functorch refuses `backward()`.
The step's Python runs exactly once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from spmd import ops
from spmd.errors import CaptureError
from spmd.functional import functional_graph
from spmd.guards import Shadow, ValuedShapeEnv, evaluate, guard_expression
from spmd.intercept import fused_optimizer, sized_call
from spmd.lifting import Lifted, World, swapped, world_parameters
from spmd.program import OutputSpec, Signature

aten = torch.ops.aten


@dataclass
class Program:
    """A captured step.

    Attributes:
        graph: Functional global graph; `graph.meta["signature"]` names inputs and outputs.
        world: What was lifted, with the values that were the example inputs.
        captured: Tensors the step reached that are not part of its arguments; they are
            the last inputs, in this order.
        result_spec: How to rebuild the step's result from the `result` outputs.
        result_constants: Leaves of the result; `Lifted(i)` stands for result output i.
        new_state: Parameter name -> state dict whose tensor leaves are `Lifted` outputs.
        cleared_gradients: Parameters whose `.grad` was a tensor and is now None.
    """

    graph: fx.GraphModule
    world: World
    captured: list[Tensor]
    result_spec: Any
    result_constants: list[Any]
    new_state: dict[str, Any]
    cleared_gradients: list[str] = field(default_factory=list)


@dataclass
class Region:
    """Where the step is while it is traced: `forward`, `backward` or `optimizer`."""

    in_optimizer: bool = False

    def name(self) -> str:
        """Return the region's name."""
        if self.in_optimizer:
            return "optimizer"
        return "backward" if torch._C._current_graph_task_id() != -1 else "forward"


def capture(
    function: Callable[..., Any],
    world: World,
    fetch: Callable[[int], Any],
    shapes: Callable[[int], tuple[int, ...]] | None = None,
) -> Program:
    """Trace `function` on the world's values.

    Args:
        function: The training step.
        world: From `lift`.
        fetch: Position of a lifted value -> a private real copy of its global value.
            Called only when the step needs a number out of a tensor.
        shapes: Position -> global shape, where the value in the world is a local part.

    Returns:
        The program; nothing in the model, the optimizer or the random generators changed,
        except Python values the step itself changed.

    Raises:
        CaptureError: The step's Python control flow depends on tensor values, or an
            operator cannot be traced; names the user's line.
    """
    fake_mode = FakeTensorMode(
        allow_non_fake_inputs=True, shape_env=ValuedShapeEnv(), static_shapes=True
    )
    fakes = [_fake(fake_mode, v, shapes(i) if shapes else None) for i, v in enumerate(world.values)]
    recorder = _Recorder(fake_mode, world, fetch)
    with ExitStack() as stack:
        stack.enter_context(_without_mkldnn())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        generator = torch.get_rng_state()
        traced = make_fx(
            lambda *inputs: recorder.run(function, list(inputs)),
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*fakes)
        torch.set_rng_state(generator)
    return recorder.finish(traced, fake_mode, fakes)


@contextmanager
def _without_mkldnn() -> Iterator[None]:
    """Keep oneDNN's fused recurrent layers out of the graph; they have no parts to shard.

    `torch.backends.mkldnn.flags` warns about Intel GPUs, hence the private setter.
    """
    enabled = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(enabled)


def _fake(mode: FakeTensorMode, value: Any, shape: tuple[int, ...] | None) -> Tensor:
    """Return a leaf fake tensor for a lifted value; floats become 0-dim float64."""
    if not isinstance(value, Tensor):
        value = torch.tensor(value, dtype=torch.float64)
    plain = value.detach()
    if shape is not None:
        with mode:
            fake = torch.empty(shape, dtype=plain.dtype, device=plain.device)
    else:
        fake = mode.from_tensor(plain, static_shapes=True)
    if isinstance(value, nn.Parameter) or value.requires_grad:
        return nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake


class _Recorder(TorchDispatchMode):
    """Sits above the tracer: notes lines and regions, answers data-dependent questions."""

    def __init__(self, fake_mode: FakeTensorMode, world: World, fetch: Callable[[int], Any]) -> None:
        super().__init__()
        self.fake_mode, self.world, self.fetch = fake_mode, world, fetch
        self.region = Region()
        self.lines: dict[str, str] = {}
        self._line_of_sequence: dict[int, str] = {}
        self._symbol_nodes: dict[sympy.Symbol, tuple[fx.Proxy, bool]] = {}
        self._guards: dict[str, Any] = {}
        self._shadow: Shadow | None = None
        self._last: fx.Node | None = None
        self.outputs: list[OutputSpec] = []
        self.known: dict[int, Tensor] = {}
        self.result_spec: Any = None
        self.result_constants: list[Any] = []
        self.new_state: dict[str, Any] = {}

    # -- tracing -------------------------------------------------------------------

    def run(self, function: Callable[..., Any], inputs: list[Tensor]) -> list[Any]:
        """Run the step on fakes; called once, by the tracer."""
        proxy_mode = get_proxy_mode()
        assert proxy_mode is not None
        self.tracer = proxy_mode.tracer
        self._shadow = Shadow(self.tracer.graph, self.tracer.root, self.fetch)
        self.fake_mode.shape_env.on_guard = self._on_guard
        self.known = {
            id(value): stand_in
            for value, stand_in in zip(self.world.values, inputs, strict=True)
            if isinstance(value, Tensor)
        }
        with self:
            stand_ins: list[Any] = list(inputs)
            for position, spec in enumerate(self.world.specs):
                if spec.kind == "hyper":
                    stand_ins[position] = self._item(inputs[position], from_tensor=False)
            flat = [
                stand_ins[leaf.position] if isinstance(leaf, Lifted) else leaf
                for leaf in self.world.flat_args
            ]
            args, kwargs = pytree.tree_unflatten(flat, self.world.args_spec)
            with swapped(self.world, stand_ins) as after, self._watched(stand_ins):
                result = function(*args, **kwargs)
            values = self._collect(result, after, stand_ins)
        self.fake_mode.shape_env.on_guard = None
        return values

    @contextmanager
    def _watched(self, stand_ins: list[Any]) -> Iterator[None]:
        """Mark finished gradients and the optimizer's region while the step runs."""
        handles = []
        for position, spec in world_parameters(self.world):
            if stand_ins[position].requires_grad:
                handles.append(
                    stand_ins[position].register_post_accumulate_grad_hook(self._marker(spec.name))
                )
        optimizer = self.world.optimizer
        original = optimizer.step if optimizer is not None else None

        def step(*args: Any, **kwargs: Any) -> Any:
            self.region.in_optimizer = True
            try:
                return original(*args, **kwargs)
            finally:
                self.region.in_optimizer = False

        if optimizer is not None:
            optimizer.__dict__["step"] = step
        try:
            yield
        finally:
            if optimizer is not None:
                del optimizer.__dict__["step"]
            for handle in handles:
                handle.remove()

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
        args, kwargs = pytree.tree_map_only(Tensor, self._known, (args, kwargs or {}))
        if func is aten._local_scalar_dense.default:
            return self._item(args[0], from_tensor=True)
        out = sized_call(func, args, kwargs, self._real)
        if out is NotImplemented:
            out = fused_optimizer(func, args, kwargs)
        if out is NotImplemented:
            out = func(*args, **kwargs)
        self._annotate()
        return out

    def _known(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.known.get(id(tensor), tensor)

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
        from torch.fx.experimental.proxy_tensor import get_proxy_slot

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
            symbol = number.node.expr
            if symbol not in self._symbol_nodes:
                node = next(
                    n for n in reversed(self.tracer.graph.nodes)
                    if n.target is aten._local_scalar_dense.default
                )
                self._symbol_nodes[symbol] = (node, from_tensor)
        return number

    def _on_guard(self, expr: sympy.Basic) -> Any:
        text, symbols = guard_expression(expr)
        nodes = [self._node_of(s) for s in symbols]
        key = f"{text} {[n for n, _ in nodes]}"
        if key not in self._guards:
            assert self._shadow is not None
            if any(from_tensor for _, from_tensor in nodes):
                _refuse_user_control_flow()
            value = evaluate(text, [self._shadow.value(n) for n, _ in nodes])
            self._guards[key] = value
            node = self.tracer.graph.create_node(
                "call_function", ops.check_value, (text, value, *(n for n, _ in nodes))
            )
            node.meta["custom"] = {"region": self.region.name(), "line": user_line()}
        return sympy.sympify(self._guards[key])

    def _node_of(self, symbol: sympy.Symbol) -> tuple[Any, bool]:
        for known, entry in self._symbol_nodes.items():
            if symbol in known.free_symbols:
                return entry
        raise CaptureError(f"a number of unknown origin ({symbol}) decides a branch", user_line())

    # -- outputs -----------------------------------------------------------------------

    def _collect(self, result: Any, after: Any, stand_ins: list[Any]) -> list[Any]:
        """List what the step returns and leaves behind, with one OutputSpec each."""
        values: list[Any] = []

        def out(kind: Any, name: str, value: Any) -> Lifted:
            self.outputs.append(OutputSpec(kind, name))
            values.append(value.detach() if isinstance(value, Tensor) else value)
            return Lifted(len(values) - 1)

        flat, self.result_spec = pytree.tree_flatten_with_path(result)
        symbolic = (Tensor, torch.SymFloat, torch.SymInt, torch.SymBool)
        from spmd.lifting import path_name

        for path, leaf in flat:
            is_value = isinstance(leaf, symbolic)
            self.result_constants.append(out("result", path_name(path), leaf) if is_value else leaf)
        for name, tensor in after.buffers.items():
            if tensor is not None:
                out("buffer", name, tensor)
        for name, tensor in after.captured.items():
            out("captured", name, tensor)
        given = {(s.kind, s.name): v for s, v in zip(self.world.specs, stand_ins, strict=True)}
        for name, tensor in after.gradients.items():
            if tensor is not None and tensor is not given.get(("gradient", name)):
                out("gradient", name, tensor)
        cleared = [n for (k, n) in given if k == "gradient" and after.gradients.get(n) is None]
        self.cleared_gradients = cleared
        for name, leaf in after.state.items():
            if isinstance(leaf, symbolic) and leaf is not given.get(("state", name)):
                after.state[name] = out("state", name, leaf)
        self.new_state = after.state_trees
        self._new_state_leaves = after.state
        for name, number in after.hypers.items():
            out("hyper", name, number)
        return values

    def finish(self, traced: fx.GraphModule, fake_mode: FakeTensorMode, fakes: list[Tensor]) -> Program:
        """Functionalize the traced graph and name what it writes."""
        signature = Signature(list(self.world.specs), list(self.outputs))
        graph, captured = functional_graph(traced, fakes, signature, self.world)
        graph.meta["signature"] = signature
        return Program(
            graph, self.world, captured, self.result_spec, self.result_constants,
            self._new_state_leaves, self.cleared_gradients,
        )


_SKIPPED_FOLDERS = (
    torch.__path__[0],
    __file__.rsplit("/", 1)[0],
    "<",
    "importlib",
)


def user_line() -> str | None:
    """Return "file:line" of the innermost frame outside torch and this package."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_SKIPPED_FOLDERS) and "contextlib.py" not in filename:
            return f"{filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _refuse_user_control_flow() -> None:
    """Raise if the guard under evaluation was asked for by user code, not by torch."""
    frame = sys._getframe(1)
    conversions = ("__bool__", "__int__", "__float__", "__index__")
    asked = None
    while frame is not None:
        name = frame.f_code.co_name
        if name in conversions and frame.f_code.co_filename.startswith(torch.__path__[0]):
            asked = frame.f_back
            break
        frame = frame.f_back  # type: ignore[assignment]
    if asked is not None and not asked.f_code.co_filename.startswith(_SKIPPED_FOLDERS):
        line = f"{asked.f_code.co_filename}:{asked.f_lineno}"
        raise CaptureError(
            "Python control flow depends on the value of a tensor, so one graph cannot stand "
            "for the step. Express the choice with tensor operators (torch.where, masks) or take "
            "the number from outside the step.",
            line,
            "control-flow-on-tensor",
        )
