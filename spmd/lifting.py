"""The world of a training step as named inputs, and fakes in its place while it is traced.

`lift` lists everything the step can read: parameters, buffers, gradients, optimizer
state, hyper-parameters, plain tensor attributes of modules and the arguments. `swapped`
puts other tensors in their place, lets the step run, and collects what the step left
behind.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.optim import Optimizer

from spmd.errors import StepArgumentsError, UsageError
from spmd.program import InputSpec

_REFUSED_OPTIMIZERS = ("LBFGS", "SparseAdam")


@dataclass
class World:
    """What a step reads, by name.

    Attributes:
        model: The one module among the arguments.
        optimizer: The one optimizer, or None.
        specs: One per lifted value, in the order of the graph's placeholders.
        values: The values, in the same order: tensors, or floats for hyper-parameters.
        flat_args: Leaves of (args, kwargs), tensors replaced by their position in `specs`.
        args_spec: How to rebuild (args, kwargs).
        static: What was not lifted and is therefore guarded by equality.
        names: id of each parameter -> its name.
    """

    model: nn.Module
    optimizer: Optimizer | None
    specs: list[InputSpec] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    flat_args: list[Any] = field(default_factory=list)
    args_spec: Any = None
    static: tuple[Any, ...] = ()
    names: dict[int, str] = field(default_factory=dict)

    def add(self, spec: InputSpec, value: Any) -> int:
        """Append one lifted value and return its position."""
        self.specs.append(spec)
        self.values.append(value)
        return len(self.specs) - 1


@dataclass(frozen=True)
class Lifted:
    """Stands in `World.flat_args` for the lifted tensor at `position`."""

    position: int


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


def path_name(path: tuple[Any, ...]) -> str:
    """Return a pytree key path as `a.b.0`."""
    return ".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path)


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


def lift(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> World:
    """List everything `function(*args, **kwargs)` can read.

    Args:
        function: The training step, for the names of its arguments.
        args: Its positional arguments; global tensors.
        kwargs: Its keyword arguments.

    Returns:
        The world; tensors in it are the caller's own objects.

    Raises:
        StepArgumentsError: `step-arguments`, unless there is one module and at most one
            optimizer.
    """
    model, optimizer = find_model_and_optimizer(args, kwargs)
    world = World(model, optimizer)
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
                elif not isinstance(leaf, int | float):
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
    static.append(str(world.args_spec))


def _guardable(value: Any) -> Any:
    return value if isinstance(value, int | float | str | bytes | bool | None) else id(value)


def _argument_names(function: Callable[..., Any], count: int) -> list[str]:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds]
    return [names[i] if i < len(names) else str(i) for i in range(count)]


@dataclass
class Aftermath:
    """What the step left behind, in terms of the tensors it was given.

    Attributes:
        buffers: Buffer name -> tensor now registered (only where it was reassigned).
        captured: Attribute name -> tensor now held (only where it was reassigned).
        gradients: Parameter name -> `.grad`, or None.
        state: (parameter name, path) -> tensor or Python value; `hyper.` names for groups.
        hypers: Hyper-parameter name -> value now in the group, where it changed.
        state_trees: Parameter name -> the state dict with leaves as left by the step.
    """

    buffers: dict[str, Any] = field(default_factory=dict)
    captured: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    hypers: dict[str, Any] = field(default_factory=dict)
    state_trees: dict[str, Any] = field(default_factory=dict)


@contextmanager
def swapped(world: World, stand_ins: list[Any]) -> Iterator[Aftermath]:
    """Run the body with `stand_ins` in the place of the world's values.

    Args:
        world: From `lift`.
        stand_ins: One per lifted value; SymFloats or floats for hyper-parameters.

    Yields:
        Filled when the body ends; everything is back in place after it, except Python
        values the step changed (hyper-parameters, numbers in the state, attributes).
    """
    after = Aftermath()
    undo: list[Callable[[], None]] = []
    by_id = {id(v): s for v, s in zip(world.values, stand_ins, strict=True) if isinstance(v, Tensor)}
    try:
        _swap_modules(world, by_id, undo)
        _swap_gradients(world, stand_ins, undo)
        _swap_optimizer(world, stand_ins, by_id, undo, after)
        yield after
        _collect_modules(world, stand_ins, after)
        for (_, spec), stand_in in zip(world_parameters(world), parameters_of(world, stand_ins), strict=True):
            after.gradients[spec.name] = stand_in.grad
    finally:
        for action in reversed(undo):
            action()


def world_parameters(world: World) -> list[tuple[int, InputSpec]]:
    """Return (position, spec) of the parameters."""
    return [(i, spec) for i, spec in enumerate(world.specs) if spec.kind == "parameter"]


def parameters_of(world: World, values: list[Any]) -> list[Any]:
    """Return those of `values` that stand at the parameters' positions."""
    return [values[i] for i, _ in world_parameters(world)]


def _swap_modules(world: World, by_id: dict[int, Any], undo: list[Callable[[], None]]) -> None:
    for module in world.model.modules():
        for table in (module._parameters, module._buffers):
            _swap_dict(table, by_id, undo)
        _swap_dict(vars(module), by_id, undo, skip=("_parameters", "_buffers", "_modules"))


def _swap_dict(
    table: dict[str, Any], by_id: dict[int, Any], undo: list[Callable[[], None]], skip: Any = ()
) -> None:
    before = dict(table)
    changed = {k: _replaced(v, by_id, 0) for k, v in before.items() if k not in skip}
    touched = [k for k, v in changed.items() if v is not before[k]]
    table.update({k: changed[k] for k in touched})

    def restore() -> None:
        table.update({k: before[k] for k in touched})

    if touched:
        undo.append(restore)


def _replaced(value: Any, by_id: dict[int, Any], depth: int) -> Any:
    """Return `value` with known tensors replaced, also inside lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return by_id.get(id(value), value)
    if depth < 3 and type(value) in (list, tuple):
        items = [_replaced(v, by_id, depth + 1) for v in value]
        same = all(a is b for a, b in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if depth < 3 and type(value) in (dict, defaultdict):
        items_by_key = {k: _replaced(v, by_id, depth + 1) for k, v in value.items()}
        same = all(items_by_key[k] is value[k] for k in value)
        return value if same else items_by_key
    return value


def _swap_gradients(world: World, stand_ins: list[Any], undo: list[Callable[[], None]]) -> None:
    position = {s.name: i for i, s in enumerate(world.specs) if s.kind == "parameter"}
    for spec, stand_in in zip(world.specs, stand_ins, strict=True):
        if spec.kind == "gradient":
            stand_ins[position[spec.name]].grad = stand_in


def _swap_optimizer(
    world: World,
    stand_ins: list[Any],
    by_id: dict[int, Any],
    undo: list[Callable[[], None]],
    after: Aftermath,
) -> None:
    optimizer = world.optimizer
    if optimizer is None:
        return
    state, names = optimizer.state, world.names
    groups = [dict(group) for group in optimizer.param_groups]
    hypers = {
        spec.name: value
        for spec, value in zip(world.specs, stand_ins, strict=True)
        if spec.kind == "hyper"
    }
    originals = {spec.name: v for spec, v in zip(world.specs, world.values, strict=True)}
    optimizer.state = defaultdict(dict)
    for parameter, entry in state.items():
        if id(parameter) in names and id(parameter) in by_id:
            optimizer.state[by_id[id(parameter)]] = pytree.tree_map(
                lambda leaf: by_id.get(id(leaf), leaf), dict(entry)
            )
        else:
            optimizer.state[parameter] = entry
    for index, group in enumerate(optimizer.param_groups):
        flat, spec = pytree.tree_flatten_with_path(_hypers(group))
        leaves = [
            hypers.get(f"{index}.{path_name(path)}", by_id.get(id(leaf), leaf)) for path, leaf in flat
        ]
        group.update(pytree.tree_unflatten(leaves, spec))
        group["params"] = [by_id[id(p)] for p in group["params"]]

    def restore() -> None:
        stand_in_names = {id(by_id[i]): name for i, name in names.items() if i in by_id}
        real = {id(by_id[id(p)]): p for g in groups for p in g["params"]}
        left = optimizer.state
        optimizer.state = state
        for parameter, entry in left.items():
            if id(parameter) in stand_in_names:
                _collect_state(stand_in_names[id(parameter)], entry, after)
                _keep_numbers(state, real.get(id(parameter)), entry)
        for index, (group, before) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            _restore_group(index, group, before, hypers, originals, after)

    undo.append(restore)


def _collect_state(name: str, entry: dict[str, Any], after: Aftermath) -> None:
    after.state_trees[name] = entry
    for path, leaf in pytree.tree_flatten_with_path(dict(entry))[0]:
        after.state[f"{name}.{path_name(path)}"] = leaf


def _keep_numbers(state: Any, parameter: Any, entry: dict[str, Any]) -> None:
    """Write Python numbers the step left in the state back into the real state."""
    if parameter is None:
        return
    for key, value in entry.items():
        if isinstance(value, int | float | str | None) and not isinstance(value, torch.SymFloat):
            state[parameter][key] = value


def _restore_group(
    index: int,
    group: dict[str, Any],
    before: dict[str, Any],
    hypers: dict[str, Any],
    originals: dict[str, Any],
    after: Aftermath,
) -> None:
    flat, spec = pytree.tree_flatten_with_path(_hypers(group))
    old = {path_name(path): leaf for path, leaf in pytree.tree_flatten_with_path(_hypers(before))[0]}
    leaves = []
    for path, leaf in flat:
        key = path_name(path)
        name = f"{index}.{key}"
        if isinstance(leaf, torch.SymFloat) or isinstance(leaf, Tensor):
            if name in hypers and leaf is not hypers[name]:
                after.hypers[name] = leaf
            if isinstance(leaf, Tensor):
                after.state[f"hyper.{name}"] = leaf
            leaves.append(old.get(key, originals.get(name)))
        else:
            leaves.append(leaf)
    group.update(pytree.tree_unflatten(leaves, spec))
    group["params"] = before["params"]


def _collect_modules(world: World, stand_ins: list[Any], after: Aftermath) -> None:
    known = {
        (s.kind, s.name): v for s, v in zip(world.specs, stand_ins, strict=True) if s.kind != "hyper"
    }
    buffers, _ = named_unique(world.model.named_buffers(remove_duplicate=False))
    for name, tensor in buffers.items():
        if tensor is not known.get(("buffer", name)):
            after.buffers[name] = tensor
    for name, tensor in _attributes(world.model).items():
        if tensor is not known.get(("captured", name)):
            after.captured[name] = tensor
