"""The world of a training step as named inputs.

`lift` lists everything the step can read: parameters, buffers, gradients, optimizer
state, hyper-parameters, plain tensor attributes of modules and the arguments.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from spmd.errors import StepArgumentsError, UsageError
from spmd.places import reachable
from spmd.program import InputSpec, Lifted
from spmd.results import path_name

_REFUSED_OPTIMIZERS = ("LBFGS", "SparseAdam")


@dataclass
class World:
    """What a step reads, by name.

    Attributes:
        model: The one module among the arguments.
        optimizer: The one optimizer, or None.
        specs: One per lifted value, in the order of the graph's placeholders.
        values: The values, in the same order: tensors, or ints and floats for the kind
            `hyper`; `tensor_of` turns those into inputs of the graph.
        flat_args: Leaves of (args, kwargs), tensors replaced by their position in `specs`.
        opaque: Leaves of the arguments that are no pytree but hold tensors in attributes.
        function: The step.
        args_spec: How to rebuild (args, kwargs).
        static: What was not lifted and is therefore guarded by equality.
        names: id of each parameter -> its name.
    """

    model: nn.Module
    optimizer: Optimizer | None
    specs: list[InputSpec] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    flat_args: list[Any] = field(default_factory=list)
    opaque: list[Any] = field(default_factory=list)
    function: Callable[..., Any] | None = None
    args_spec: Any = None
    static: tuple[Any, ...] = ()
    names: dict[int, str] = field(default_factory=dict)

    def add(self, spec: InputSpec, value: Any) -> int:
        """Append one lifted value and return its position."""
        self.specs.append(spec)
        self.values.append(value)
        return len(self.specs) - 1


def _is_leaf(value: Any) -> bool:
    return isinstance(value, nn.Module | Optimizer)


def find_model_and_optimizer(args: Any, kwargs: Any) -> tuple[nn.Module, Optimizer | None]:
    """Return the one module and the optimizer (or None) among the step's arguments."""
    leaves = pytree.tree_leaves((args, kwargs), is_leaf=_is_leaf)
    models = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    optimizers = [leaf for leaf in leaves if isinstance(leaf, Optimizer)]
    if not models:
        raise StepArgumentsError(
            "Couldn't find nn.Module instances from the arguments. Pass the model to the "
            "compiled step as an argument."
        )
    if len(models) > 1:
        raise StepArgumentsError(
            f"Only support single nn.Module for now: got {[type(m).__name__ for m in models]}. "
            "Put them in one nn.Module."
        )
    if len(optimizers) > 1:
        names = [type(o).__name__ for o in optimizers]
        raise StepArgumentsError(
            f"Only support single Optimizer for now: got {names}. Use one optimizer with "
            "several parameter groups."
        )
    for optimizer in optimizers:
        if type(optimizer).__name__ in _REFUSED_OPTIMIZERS:
            raise UsageError(
                f"Optimizer {type(optimizer).__name__} cannot be captured: it calls the closure a "
                "data-dependent number of times or needs sparse gradients. Use a first-order "
                "optimizer on dense gradients.",
                "optimizer-refused",
            )
    return models[0], optimizers[0] if optimizers else None


def named_unique(
    pairs: Any,
) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Return {first name: tensor} and {first name: other names} of possibly tied tensors."""
    first: dict[int, str] = {}
    unique: dict[str, Tensor] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, tensor in pairs:
        if id(tensor) in first:
            owner = first[id(tensor)]
            aliases[owner] = (*aliases[owner], name)
        else:
            first[id(tensor)] = name
            unique[name] = tensor
            aliases[name] = ()
    return unique, aliases


def parameter_names(model: nn.Module, optimizer: Optimizer | None) -> dict[int, str]:
    """Return {id(parameter): name}; parameters only the optimizer knows are `extra.<n>`."""
    unique, _ = named_unique(model.named_parameters(remove_duplicate=False))
    names = {id(tensor): name for name, tensor in unique.items()}
    if optimizer is not None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                names.setdefault(id(tensor), f"extra.{len(names)}")
    return names


def tensor_of(value: Any) -> Tensor:
    """Return a lifted value as an input of the graph: numbers become 0-dim tensors.

    Tensors are returned as they are, without autograd history.
    """
    if isinstance(value, Tensor):
        return value.detach()
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def lift(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    counters: Collection[str] = (),
) -> World:
    """List everything `function(*args, **kwargs)` can read.

    Args:
        function: The training step, for the names of its arguments.
        args: Its positional arguments; global tensors.
        kwargs: Its keyword arguments.
        counters: Names of Python numbers an earlier capture saw the step change
            (`Program.counters`); they become inputs, so that the graph can be reused.

    Returns:
        The world; tensors in it are the caller's own objects.

    Raises:
        StepArgumentsError: `step-arguments`, unless there is one module and at most one
            optimizer.
    """
    model, optimizer = find_model_and_optimizer(args, kwargs)
    world = World(model, optimizer, function=function)
    params, aliases = named_unique(model.named_parameters(remove_duplicate=False))
    for name, tensor in params.items():
        spec = InputSpec("parameter", name, aliases[name], tensor.requires_grad)
        world.add(spec, tensor)
    names = world.names = parameter_names(model, optimizer)
    if optimizer is not None:
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if names[id(tensor)] not in params:
                    params[names[id(tensor)]] = tensor
                    spec = InputSpec("parameter", names[id(tensor)], (), tensor.requires_grad)
                    world.add(spec, tensor)
    buffers, aliases = named_unique(model.named_buffers(remove_duplicate=False))
    for name, tensor in buffers.items():
        world.add(InputSpec("buffer", name, aliases[name]), tensor)
    for name, tensor in params.items():
        if tensor.grad is not None:
            if tensor.grad.is_sparse:
                raise UsageError(
                    f"Parameter {name!r} has a sparse gradient, which the engine does not shard. "
                    "Build the embedding with sparse=False.",
                    "sparse-gradient",
                )
            world.add(InputSpec("gradient", name), tensor.grad)
    static: list[Any] = []
    _lift_optimizer(world, names, static)
    for name, tensor in _attributes(model).items():
        world.add(InputSpec("captured", name), tensor)
    _lift_arguments(world, function, args, kwargs, static)
    _lift_counters(world, counters)
    static += [(name, m.training) for name, m in model.named_modules()]
    static += [(s.kind, s.name, s.aliases, s.requires_grad) for s in world.specs]
    static += [(tuple(v.shape), v.dtype, v.device) for v in world.values if isinstance(v, Tensor)]
    world.static = tuple(static)
    return world


def _lift_optimizer(world: World, names: dict[int, str], static: list[Any]) -> None:
    optimizer = world.optimizer
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            state = optimizer.state.get(tensor, {})
            leaves, _ = pytree.tree_flatten_with_path(dict(state))
            for path, leaf in leaves:
                name = f"{names[id(tensor)]}.{path_name(path)}"
                if isinstance(leaf, Tensor):
                    world.add(InputSpec("state", name), leaf)
                elif type(leaf) in (int, float):
                    world.add(InputSpec("hyper", f"state.{name}"), leaf)
                else:
                    static.append((name, repr(leaf)))
    for index, group in enumerate(optimizer.param_groups):
        for path, leaf in pytree.tree_flatten_with_path(_hypers(group))[0]:
            name = f"{index}.{path_name(path)}"
            if isinstance(leaf, Tensor):
                world.add(InputSpec("state", f"hyper.{name}"), leaf)
            elif type(leaf) is float:
                world.add(InputSpec("hyper", name), leaf)
            else:
                static.append((name, repr(leaf)))


def _hypers(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _attributes(model: nn.Module) -> dict[str, Tensor]:
    """Return the plain tensors modules hold as attributes, by dotted name."""
    found: dict[str, Tensor] = {}
    for module_name, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                found[f"{module_name}.{key}" if module_name else key] = value
    return found


def _lift_arguments(
    world: World,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    static: list[Any],
) -> None:
    leaves, world.args_spec = pytree.tree_flatten_with_path((args, kwargs), is_leaf=_is_leaf)
    names = _argument_names(function, len(args))
    for path, leaf in leaves:
        if isinstance(leaf, Tensor):
            first, rest = path[1], path[2:]
            key = names[first.idx] if path[0].idx == 0 else str(first.key)
            name = ".".join(p for p in (key, path_name(rest)) if p)
            world.flat_args.append(Lifted(world.add(InputSpec("argument", name), leaf)))
        else:
            world.flat_args.append(leaf)
            if not _is_leaf(leaf):
                static.append((path_name(path), type(leaf).__name__, _guardable(leaf)))
                if not isinstance(leaf, _PLAIN):
                    _lift_opaque(world, path_name(path[1:]), leaf, static)
    static.append(str(world.args_spec))


_PLAIN = (int, float, str, bytes, bool, type(None))


def _guardable(value: Any) -> Any:
    return value if isinstance(value, _PLAIN) else id(value)


def _lift_opaque(world: World, name: str, leaf: Any, static: list[Any]) -> None:
    """Lift the tensors in the attributes of an argument pytree does not know."""
    world.opaque.append(leaf)
    known = {id(v) for v in world.values if isinstance(v, Tensor)}
    for container in reachable({name: leaf}, {id(world.model), id(world.optimizer)}):
        for key, value in container.slots().items():
            if isinstance(value, Tensor) and id(value) not in known:
                known.add(id(value))
                world.add(InputSpec("argument", container.place(key).name), value)
            elif isinstance(value, _PLAIN):
                static.append((container.place(key).name, value))


def roots_of(world: World) -> tuple[dict[str, Any], set[int]]:
    """Return where the search for a step's containers starts, and what it leaves out.

    Optimizer state is left out: its keys are parameters, which are swapped themselves.
    """
    roots: dict[str, Any] = {"": world.model}
    skip = {id(world), id(world.specs), id(world.values)}
    if world.optimizer is not None:
        roots |= {str(i): group for i, group in enumerate(world.optimizer.param_groups)}
        roots |= {"optimizer": world.optimizer}
        skip |= {id(world.optimizer.state)}
    roots |= {"arguments": tuple(world.opaque), "step": world.function}
    return roots, skip


def _lift_counters(world: World, counters: Collection[str]) -> None:
    """Lift Python numbers that change from step to step."""
    if not counters:
        return
    lifted = {spec.name for spec in world.specs if spec.kind == "hyper"}
    for container in reachable(*roots_of(world)):
        for key, value in container.slots().items():
            name = container.place(key).name
            if name in counters and name not in lifted and type(value) in (int, float):
                lifted.add(name)
                world.add(InputSpec("hyper", name), value)


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds]
    return [names[i] if i < len(names) else str(i) for i in range(count)]


def world_parameters(world: World) -> list[tuple[int, InputSpec]]:
    """Return (position, spec) of the parameters."""
    return [(i, spec) for i, spec in enumerate(world.specs) if spec.kind == "parameter"]


def parameters_of(world: World, values: list[Any]) -> list[Any]:
    """Return those of `values` that stand at the parameters' positions."""
    return [values[i] for i, _ in world_parameters(world)]


def replace_in(table: dict[str, Any], fresh: dict[int, Any], skip: Collection[str] = ()) -> None:
    """Replace values of `table`, and those in its lists, tuples and dicts, by id.

    Args:
        table: Changed in place; lists and tuples in it are rebuilt.
        fresh: id of an old value -> the new one.
        skip: Keys left alone.
    """
    for key, value in list(table.items()):
        if key not in skip:
            changed = _replaced(value, fresh, 0)
            if changed is not value:
                table[key] = changed


def _replaced(value: Any, fresh: dict[int, Any], depth: int) -> Any:
    if isinstance(value, Tensor):
        return fresh.get(id(value), value)
    if depth < 3 and type(value) in (list, tuple):
        items = [_replaced(v, fresh, depth + 1) for v in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if depth < 3 and type(value) in (dict, defaultdict):
        by_key = {k: _replaced(v, fresh, depth + 1) for k, v in value.items()}
        return value if all(by_key[k] is value[k] for k in value) else by_key
    return value
