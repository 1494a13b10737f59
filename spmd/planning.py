"""What a mode decides before the expansion: where inputs live and where gradients go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container

from torch import fx

from spmd.errors import UsageError
from spmd.layout import Layout, replicated, shard
from spmd.mesh import MeshShape
from spmd.plan import Plan
from spmd.program import Signature, signature_of

BatchDims = int | dict[str, int | None]


def owner_of(name: str, parameters: Container[str]) -> str | None:
    """Return the parameter a state `parameter.key` belongs to."""
    head = name
    while "." in head:
        head = head.rpartition(".")[0]
        if head in parameters:
            return head
    return None


def plan_layouts(
    graph: fx.GraphModule,
    mesh: MeshShape,
    parameter_layout: Callable[[str, tuple[int, ...]], Layout],
    argument_layout: Callable[[str, tuple[int, ...]], Layout],
) -> Plan:
    """Return a plan in which everything that belongs to a parameter lies where it does.

    Args:
        graph: Global graph with its signature.
        mesh: Axis names and sizes.
        parameter_layout: (name, global shape) -> where the parameter lives.
        argument_layout: (dotted path, global shape) -> where an argument lives.

    Returns:
        A plan: gradients and state of the parameter's shape lie as the parameter does,
        buffers, hyper-parameters and all else are replicated.
    """
    signature, whole = signature_of(graph), replicated(len(mesh.sizes))
    shapes = [tuple(n.meta["val"].shape) for n in graph.graph.find_nodes(op="placeholder")]
    homes: dict[str, Layout] = {}
    sizes: dict[str, tuple[int, ...]] = {}
    for position, spec in signature.of_kind("parameter"):
        homes[spec.name] = parameter_layout(spec.name, shapes[position])
        sizes[spec.name] = shapes[position]

    def home(kind: str, name: str, shape: tuple[int, ...]) -> Layout:
        if kind in ("parameter", "gradient"):
            return homes[name]
        if kind == "state":
            owner = owner_of(name, homes)
            if owner is not None and sizes[owner] == shape:
                return homes[owner]
        if kind == "argument":
            return argument_layout(name, shape)
        return whole

    inputs = [
        home(s.kind, s.name, shape) for s, shape in zip(signature.inputs, shapes, strict=True)
    ]
    outputs: list[Layout | None] = []
    leaves = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    for spec, leaf in zip(signature.outputs, leaves, strict=True):
        value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else None
        shape = tuple(getattr(value, "shape", ()))
        outputs.append(None if spec.kind == "result" else home(spec.kind, spec.name, shape))
    gradients = {node: homes[name] for name, node in signature.gradients.items()}
    return Plan(mesh, inputs, gradients=gradients, outputs=outputs)


def batch_dims(
    signature: Signature, shapes: list[tuple[int, ...]], wanted: BatchDims
) -> dict[str, int | None]:
    """Return {argument: batch dim or None}.

    With an int, the arguments whose size on that dim is the batch size are split; the
    batch size is the one most tensor arguments have there. With a dict, arguments it does
    not name are split on dim 0 where they have the batch size of a named one. Under
    `batch="global"` results do not depend on it.

    Args:
        signature: Names of the step's inputs.
        shapes: One per input; the sizes may be any values that can be compared.
        wanted: What the user set.

    Raises:
        UsageError: `input-batch-dim`, if an argument is named that there is not, has no
            such dim, or no argument has the dim.
    """
    arguments = {s.name: shapes[i] for i, s in signature.of_kind("argument")}
    if isinstance(wanted, dict):
        return _named_batch_dims(arguments, wanted)
    with_dim = {n: s for n, s in arguments.items() if -len(s) <= wanted < len(s)}
    if arguments and not with_dim and any(arguments.values()):
        name, shape = next((n, s) for n, s in arguments.items() if s)
        raise UsageError(
            f"input_batch_dim={wanted} is not a dim of any argument: {name!r} has shape "
            f"{list(shape)}. Set input_batch_dim to the dim that counts samples, or to a dict "
            "{argument: dim or None}.",
            "input-batch-dim",
        )
    return majority(arguments, wanted)


def majority(arguments: dict[str, tuple[int, ...]], wanted: int) -> dict[str, int | None]:
    """Return the dim of the arguments that have there what most have; ties to the first.

    Args:
        arguments: Shapes by name.
        wanted: The dim; None for arguments that have it not, or have another size there.
    """
    with_dim = {n: s for n, s in arguments.items() if -len(s) <= wanted < len(s)}
    sizes = Counter(s[wanted] for s in with_dim.values())
    batch = max(sizes, key=sizes.__getitem__) if sizes else None
    return {
        name: wanted % len(shape) if name in with_dim and shape[wanted] == batch else None
        for name, shape in arguments.items()
    }


def _named_batch_dims(
    arguments: dict[str, tuple[int, ...]], wanted: dict[str, int | None]
) -> dict[str, int | None]:
    for name, dim in wanted.items():
        if name not in arguments:
            raise UsageError(
                f"input_batch_dim names the argument {name!r}, the step has {list(arguments)}. "
                "Use their dotted paths.",
                "input-batch-dim",
            )
        shape = arguments[name]
        if dim is not None and not -len(shape) <= dim < len(shape):
            raise UsageError(
                f"input_batch_dim[{name!r}] is {dim}, but the argument has shape {list(shape)}. "
                f"Give a dim below {len(shape)}, or None to replicate it.",
                "input-batch-dim",
            )
    found = {
        name: None if dim is None else dim % len(arguments[name]) for name, dim in wanted.items()
    }
    sizes = {arguments[name][dim] for name, dim in found.items() if dim is not None}
    rest = {name: shape for name, shape in arguments.items() if name not in found}
    if not sizes:
        return found | majority(rest, 0)
    return found | {n: 0 if shape and shape[0] in sizes else None for n, shape in rest.items()}


def sharded_on(axis: int, num_axes: int, dim: int, size: int, num_ranks: int) -> Layout:
    """Return the layout that splits one dim over one axis by the torch.chunk rule."""
    return replicated(num_axes).replace(axis, shard(dim, size, num_ranks))


def split_layout(dims: tuple[int | None, ...], shape: tuple[int, ...], mesh: MeshShape) -> Layout:
    """Return the layout of a tensor of which each axis splits one dim, or none."""
    layout = replicated(len(mesh.sizes))
    for axis, dim in enumerate(dims):
        if dim is not None:
            layout = layout.replace(axis, shard(dim, shape[dim], mesh.sizes[axis]))
    return layout
