"""Trajectories, names and state: what a run leaves behind, and how a run is put back.

A trajectory is a list of steps; a step is `{stage: {name: tensor}}`, stages in the order of
`verdict.STAGES`, names in the order in which things happened. Tensors of single-device runs
are global.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

StepRecord = dict[str, dict[str, Tensor]]


@dataclass
class Observed:
    """One tensor of a parallel run, as far as this process holds it.

    Attributes:
        local: The local tensors held here, one per coordinate.
        layout: One placement per mesh axis (see `layouts`), or None where none is declared.
        coordinates: The position on the mesh of the rank that each local tensor belongs to.
        write: Where `local` is not the live tensor: writes a global value into the live one,
            False where it cannot.
    """

    local: list[Tensor]
    layout: Any
    coordinates: list[tuple[int, ...]]
    write: Callable[[Tensor], bool] | None = None


Observation = Mapping[str, Mapping[str, Observed]]

# Prefixes that wrappers put into names. Source: torch 2.13 wrappers.
WRAPPER_PREFIXES: Final = (
    "module.",
    "_fsdp_wrapped_module.",
    "_orig_mod.",
    "_checkpoint_wrapped_module.",
)


@dataclass
class Trajectory:
    """One run of a case, step by step.

    Attributes:
        steps: One record per step; step 0 also has `initial_state`, the last one
            `eval_outputs`.
        aliases: First name of a tied parameter -> its other names.
        hyper_parameters: Per step, the values before it, by name.
        groups: Per parameter group, the names of its parameters.
        random_states: Per step, torch's generator state after it (uint8).
        notes: What a reader should know, such as "eval forward raised ...".
    """

    steps: list[StepRecord] = field(default_factory=list)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    hyper_parameters: list[dict[str, float]] = field(default_factory=list)
    groups: list[list[str]] = field(default_factory=list)
    random_states: list[Tensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@lru_cache(maxsize=1 << 14)
def normalised(name: str) -> str:
    """Return a module or parameter name without the parts that wrappers add.

    `module.` is stripped only where it is a whole path component at the front, the others
    anywhere in the path.
    """
    while name.startswith(WRAPPER_PREFIXES):
        name = name.split(".", 1)[1]
    for prefix in WRAPPER_PREFIXES[1:]:
        name = name.replace("." + prefix, ".")
    last = name.rsplit(".", 1)[-1] + "."
    if last in WRAPPER_PREFIXES[1:]:
        return name[: -len(last)]
    return "" if name + "." == WRAPPER_PREFIXES[0] else name


def named_parameters(
    model: nn.Module,
) -> tuple[dict[str, nn.Parameter], dict[str, tuple[str, ...]]]:
    """Return parameters by first name, and the other names of tied ones."""
    return _first_names(model.named_parameters(remove_duplicate=False))


def named_buffers(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Return buffers by first name, and the other names of shared ones."""
    return _first_names(model.named_buffers(remove_duplicate=False))


def optimizers_of(optimizer: Optimizer | Iterable[Optimizer]) -> list[Optimizer]:
    """Return a case's optimizers as a list; most cases have one."""
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def named_state(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]
) -> Iterator[tuple[str, Any, Any]]:
    """Give `(parameter.key, container, key)` of every tensor or number of optimizer state.

    Lists and tuples inside the state are named `parameter.key[i]`. State of tensors that are
    no parameters of the model is named `group[i].parameter[j].key`.
    """
    names = {id(parameter): name for name, parameter in named_parameters(model)[0].items()}
    for single in optimizers_of(optimizer):
        for i, group in enumerate(single.param_groups):
            for j, parameter in enumerate(group["params"]):
                owner = names.get(id(parameter), f"group[{i}].parameter[{j}]")
                state = single.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
                        yield f"{owner}.{key}", state, key
                    elif isinstance(value, list):
                        for at, entry in enumerate(value):
                            if isinstance(entry, Tensor):
                                yield f"{owner}.{key}[{at}]", value, at


def hyper_parameters(optimizer: Optimizer | Iterable[Optimizer]) -> dict[str, float]:
    """Return the numbers of the parameter groups, by name.

    Names are `lr`, `betas[0]`; with several groups or optimizers `param_groups[1].lr`.
    Booleans, None and strings are choices of an algorithm, not numbers, and are left out.
    """
    groups = [group for single in optimizers_of(optimizer) for group in single.param_groups]
    found: dict[str, float] = {}
    for i, group in enumerate(groups):
        prefix = f"param_groups[{i}]." if len(groups) > 1 else ""
        for key, value in group.items():
            entries = {prefix + key: value}
            if isinstance(value, (tuple, list)) and key != "params":
                entries = {f"{prefix}{key}[{at}]": entry for at, entry in enumerate(value)}
            for name, entry in entries.items():
                if (isinstance(entry, Tensor) and entry.numel() == 1) or (
                    isinstance(entry, (int, float)) and not isinstance(entry, bool)
                ):
                    found[name] = float(entry)
    return found


def parameter_groups(names: Mapping[int, str], optimizer: Any) -> list[list[str]]:
    """Return, per parameter group, the names of its parameters.

    Args:
        names: By `id` of the tensor; tensors without a name are left out.
        optimizer: One optimizer or several.
    """
    return [
        [names[id(tensor)] for tensor in group["params"] if id(tensor) in names]
        for single in optimizers_of(optimizer)
        for group in single.param_groups
    ]


def by_parameter(
    values: Mapping[str, float], groups: Sequence[Sequence[str]]
) -> dict[tuple[str, str], float]:
    """Return the numbers of parameter groups as `{(key, parameter): value}`.

    Args:
        values: What `hyper_parameters` gave.
        groups: Names per group, in the same order.
    """
    found = {}
    for i, names in enumerate(groups):
        prefix = f"param_groups[{i}]." if len(groups) > 1 else ""
        for key, value in values.items():
            if key.startswith(prefix):
                found.update({(key.removeprefix(prefix), name): value for name in names})
    return found


def restore_hyper_parameters(
    optimizer: Optimizer | Iterable[Optimizer], values: Mapping[str, float]
) -> None:
    """Write numbers that `hyper_parameters` read back into the groups, in place."""
    groups = [group for single in optimizers_of(optimizer) for group in single.param_groups]
    for i, group in enumerate(groups):
        prefix = f"param_groups[{i}]." if len(groups) > 1 else ""
        for key, value in list(group.items()):
            if isinstance(value, (tuple, list)) and key != "params":
                group[key] = type(value)(
                    _as_given(entry, values.get(f"{prefix}{key}[{at}]"))
                    for at, entry in enumerate(value)
                )
            else:
                group[key] = _as_given(value, values.get(prefix + key))


def snapshot(model: nn.Module, optimizer: Optimizer | Iterable[Optimizer]) -> StepRecord:
    """Return copies of optimizer state, parameters and buffers as they are now."""
    state = {name: _copy_of(mapping[key]) for name, mapping, key in named_state(model, optimizer)}
    return {"optimizer_state": state, **model_snapshot(model)}


def model_snapshot(model: nn.Module) -> StepRecord:
    """Return copies of parameters and buffers as they are now."""
    return {
        "parameters": {name: _copy_of(value) for name, value in named_parameters(model)[0].items()},
        "buffers": {name: _copy_of(value) for name, value in named_buffers(model)[0].items()},
    }


def restore(
    model: nn.Module,
    optimizer: Optimizer | Iterable[Optimizer],
    record: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Put a run back to a recorded state, in place: parameters, buffers, optimizer state.

    Values are cast to the dtype that the live tensor has. Optimizer state that the optimizer
    does not have yet is not made; call a step first.
    """
    live = {**named_parameters(model)[0], **named_buffers(model)[0]}
    saved = {**record.get("parameters", {}), **record.get("buffers", {})}
    with torch.no_grad():
        for name, tensor in live.items():
            if name in saved:
                tensor.copy_(saved[name])
        for name, mapping, key in named_state(model, optimizer):
            if name not in record.get("optimizer_state", {}):
                continue
            value = record["optimizer_state"][name]
            if isinstance(mapping[key], Tensor):
                mapping[key].copy_(value)
            else:
                mapping[key] = type(mapping[key])(value.item())


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Give the tensors inside containers with their paths: `[i]` in sequences, `.key` in
    mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from flatten(entry, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for i, entry in enumerate(value):
            yield from flatten(entry, f"{path}[{i}]")
    elif hasattr(value, "__dataclass_fields__") and not isinstance(value, type):
        for key in value.__dataclass_fields__:
            yield from flatten(getattr(value, key), f"{path}.{key}" if path else key)


def first_difference(
    left: Sequence[StepRecord], right: Sequence[StepRecord]
) -> tuple[int, str, str] | None:
    """Return `(step, stage, name)` of the first tensor that is not equal bit for bit.

    NaN equals NaN here: two runs that fail alike are alike.
    """
    for step, (one, other) in enumerate(zip(left, right, strict=True)):
        for stage, tensors in one.items():
            for name, value in tensors.items():
                twin = other.get(stage, {}).get(name)
                if twin is None or not same_bits(value, twin):
                    return step, stage, name
    return None


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Say whether two tensors have equal shape, dtype and values, NaN equal to NaN."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    if not (left.is_floating_point() or left.is_complex()):
        return False
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def _first_names(
    named: Iterable[tuple[str, Any]],
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """Split `(name, tensor)` pairs into first names and aliases, by identity."""
    first: dict[int, str] = {}
    found: dict[str, Any] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for raw, tensor in named:
        name = normalised(raw)
        if id(tensor) not in first:
            first[id(tensor)] = name
            found[name] = tensor
        elif first[id(tensor)] != name:
            owner = first[id(tensor)]
            aliases[owner] = (*aliases.get(owner, ()), name)
    return found, aliases


def _copy_of(value: Any) -> Tensor:
    """Return a tensor of its own that holds `value`; numbers become 0-dim float64."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return torch.tensor(float(value), dtype=torch.float64)


def _as_given(old: Any, value: float | None) -> Any:
    """Return `value` in the kind that `old` has; `old` itself where there is no value."""
    if value is None:
        return old
    if isinstance(old, Tensor):
        with torch.no_grad():
            return old.fill_(value)
    return type(old)(value)
