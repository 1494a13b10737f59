"""Stage two of the capture: a traced graph without mutations, with constants as inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx

from spmd import ops
from spmd.decompositions import TABLE
from spmd.dense_views import reshape_views
from spmd.guards import Guards, Shadow
from spmd.normalization import native_batch_norm
from spmd.program import InputSpec, OutputSpec, Signature

aten = torch.ops.aten


def functional_graph(
    traced: fx.GraphModule,
    fakes: list[Tensor],
    signature: Signature,
    fetch: Callable[[int], Tensor],
) -> tuple[fx.GraphModule, list[Tensor]]:
    """Return the functional form of a traced step.

    Args:
        traced: Stage one's graph; placeholders as in `signature`.
        fakes: Its example inputs.
        signature: Extended in place: captured constants as inputs, written inputs as outputs.
        fetch: Position of a placeholder -> a private real copy of its value, for
            questions that are only asked here (the CPU's `addmm` asks if beta is 0).

    Returns:
        The graph, and the real tensors behind the captured inputs, in order.
    """
    _strip_profiler(traced)
    constants = _lift_constants(traced, signature)
    mode = next(t.fake_mode for t in fakes if isinstance(t, FakeTensor))
    inputs = [t.detach() for t in fakes]
    inputs += [mode.from_tensor(c, static_shapes=True) for c in constants]
    interpreter = _MetaInterpreter(
        traced, mode, lambda i: fetch(i) if i < len(fakes) else constants[i - len(fakes)].clone()
    )

    def run(*args: Any) -> Any:
        return interpreter.run(*args)

    with fx_traceback.preserve_node_meta(), torch.no_grad():
        graph = make_fx(
            torch.func.functionalize(run, remove="mutations"),
            decomposition_table=TABLE,
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(*inputs)
    _collect_writes(graph, signature)
    _remove_aliases(graph)
    _remove_markers(graph, signature)
    reshape_views(graph)
    graph.graph.eliminate_dead_code(is_impure_node=is_impure)
    graph.graph.lint()
    graph.recompile()
    for node in graph.graph.nodes:
        line = node.meta.get("custom", {}).get("line")
        if line:
            signature.source_lines[node.name] = line
    return graph, constants


class _MetaInterpreter(fx.Interpreter):
    """Replays stage one; hands each node's region and line to the nodes it becomes.

    Decompositions may ask for the value of a number here that nobody asked for in stage
    one; it comes from running stage one's graph on real values.
    """

    def __init__(
        self, traced: fx.GraphModule, mode: FakeTensorMode, fetch: Callable[[int], Tensor]
    ) -> None:
        super().__init__(traced)
        self._mode = mode
        self._shadow = Shadow(traced.graph, traced, fetch)
        self._origin: dict[fx.Node, fx.Node] = {}
        self._guards: Guards | None = None

    def run_node(self, n: fx.Node) -> Any:
        with fx_traceback.set_current_meta(n):
            result = super().run_node(n)
        if n.target is aten._local_scalar_dense.default and is_symbolic(result):
            guards, proxy = self._questions(), _proxy_of(result, self._tracer())
            self._origin[proxy.node] = n
            guards.add(result, proxy.node, from_tensor=False)
        return result

    def _questions(self) -> Guards:
        if self._guards is None:
            self._guards = Guards(
                self._tracer().graph,
                lambda node: self._shadow.value(self._origin[node]),
                lambda: dict(fx_traceback.get_current_meta().get("custom", {})),
            )
            self._mode.shape_env.on_guard = self._guards.answer
        return self._guards

    @staticmethod
    def _tracer() -> Any:
        mode = get_proxy_mode()
        assert mode is not None
        return mode.tracer

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ops.check_value:
            tracer = self._tracer()
            proxies = pytree.tree_map(lambda a: _proxy_of(a, tracer), args)
            tracer.create_proxy("call_function", ops.check_value, proxies, {})
            return None
        if target is aten.native_batch_norm.default:
            # Writes its running statistics, but its schema does not say so: decomposed above
            # functionalization, a second call in the step reads what the first wrote.
            return native_batch_norm(*args, **kwargs)
        return super().call_function(target, _beside_complex(target, args), kwargs)


def _beside_complex(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with symbolic numbers beside a complex tensor made tensors.

    torch converts such a number to `complex` in Python, which asks for its value: the step
    would be specialised on a learning rate.
    """
    first = next((a for a in args if isinstance(a, Tensor) and a.is_complex()), None)
    if first is None or not isinstance(target, torch._ops.OpOverload):
        return args
    takes = [isinstance(each.type, torch.TensorType) for each in target._schema.arguments]
    real = first.dtype.to_real()
    return tuple(
        aten.scalar_tensor.default(value, dtype=real) if tensor and is_symbolic(value) else value
        for value, tensor in zip(args, takes, strict=False)
    )


def _proxy_of(value: Any, tracer: Any) -> Any:
    if is_symbolic(value):
        return get_proxy_slot(value, tracer, default=value, transform=lambda p: p.force())
    return value


def is_symbolic(value: Any) -> bool:
    """Whether a value is a number the trace does not know."""
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)


def _strip_profiler(graph: fx.GraphModule) -> None:
    """Remove profiler ranges, which no dead-code pass removes."""
    for node in reversed(graph.graph.nodes):
        if "profiler" in str(node.target) and not node.users:
            graph.graph.erase_node(node)


def _lift_constants(graph: fx.GraphModule, signature: Signature) -> list[Tensor]:
    """Turn `get_attr` tensors into placeholders; functionalization cannot write to them.

    Tensors made inside the step (`torch.tensor(3)`) are lifted too; they are read only.
    """
    constants: list[Tensor] = []
    placed: dict[int, fx.Node] = {}
    anchor = [n for n in graph.graph.nodes if n.op == "placeholder"][-1]
    for node in list(graph.graph.nodes):
        if node.op != "get_attr":
            continue
        value = _attribute(graph, str(node.target))
        if not isinstance(value, Tensor):
            continue
        if id(value) not in placed:
            with graph.graph.inserting_after(anchor):
                anchor = graph.graph.placeholder(f"captured_{len(constants)}")
            placed[id(value)] = anchor
            anchor.meta["val"] = value
            constants.append(value)
            signature.inputs.append(InputSpec("captured", f"constant.{len(constants) - 1}"))
        node.replace_all_uses_with(placed[id(value)])
        graph.graph.erase_node(node)
    return constants


def _attribute(root: Any, target: str) -> Any:
    for part in target.split("."):
        root = getattr(root, part)
    return root


def _collect_writes(graph: fx.GraphModule, signature: Signature) -> None:
    """Replace the trailing `copy_` on placeholders by outputs that name what they write."""
    output = next(n for n in graph.graph.nodes if n.op == "output")
    position = {n: i for i, n in enumerate(graph.graph.find_nodes(op="placeholder"))}
    values = list(output.args[0])
    written: dict[tuple[str, str], fx.Node] = {}
    replaced = {(s.kind, s.name) for s in signature.outputs}
    for node in list(graph.graph.nodes):
        if node.target is aten.copy_.default and node.args[0] in position:
            spec = signature.inputs[position[node.args[0]]]
            key = (spec.kind, spec.name)
            if key in written:
                values[_output_index(signature, key)] = node.args[1]
            elif (spec.kind, spec.name) in replaced:
                pass  # nothing reads the old tensor any more: another one took its place
            else:
                signature.outputs.append(OutputSpec(spec.kind, spec.name))  # type: ignore[arg-type]
                values.append(node.args[1])
            written[key] = node.args[1]
            source = node.args[1]
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
        elif node.target is aten.copy_.default and isinstance(node.args[0], fx.Node):
            _forget(graph.graph, node)
    output.args = (values,)


def _forget(graph: fx.Graph, copy: fx.Node) -> None:
    """Replace a `copy_` a decomposition made on a value of its own by what it copies."""
    target, source = copy.args[0], copy.args[1]
    old, new = target.meta["val"], source.meta["val"]  # type: ignore[union-attr]
    if old.shape != new.shape or old.dtype != new.dtype:
        return
    later = {user for user in target.users if copy < user}  # type: ignore[union-attr]
    copy.replace_all_uses_with(source)  # type: ignore[arg-type]
    target.replace_all_uses_with(source, delete_user_cb=later.__contains__)  # type: ignore
    graph.erase_node(copy)


def _output_index(signature: Signature, key: tuple[str, str]) -> int:
    return next(
        i
        for i in range(len(signature.outputs) - 1, -1, -1)
        if (signature.outputs[i].kind, signature.outputs[i].name) == key
    )


def _remove_markers(graph: fx.GraphModule, signature: Signature) -> None:
    """Note where each parameter's finished gradient stands; the last marker wins."""
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.spmd.mark_gradient.default:
            source, name = node.args
            signature.gradients[name] = source.name
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)


def _remove_aliases(graph: fx.GraphModule) -> None:
    for node in list(graph.graph.nodes):
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)


def is_impure(node: fx.Node) -> bool:
    """Whether a node must stay though nobody uses its result."""
    if node.op in ("placeholder", "output"):
        return True
    if node.target is ops.check_value:
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        # A random draw moves the generator even if nobody reads it.
        return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable
    return False
