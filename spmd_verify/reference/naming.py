"""What the tensors of a parallel model are called in the single-device model.

A style may wrap a model, put it into another, cut it into stages or replace its parameters.
Modules are known by identity where they survive that, by their normalised path where not; a
parameter is called by its module and its own last name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from spmd_verify.reference.trajectory import (
    named_buffers,
    named_parameters,
    normalised,
    optimizers_of,
)


class Names:
    """Names of one model, taken before a style changes it.

    Attributes:
        parameter_names: First names, in the model's order.
        buffer_names: Likewise.
    """

    def __init__(self, model: nn.Module) -> None:
        """Remember every module and what its tensors are called."""
        # The modules are kept so that no id is used twice.
        self._modules = {id(module): (name, module) for name, module in model.named_modules()}
        parameters, tied = named_parameters(model)
        buffers, shared = named_buffers(model)
        self.parameter_names = tuple(parameters)
        self.buffer_names = tuple(buffers)
        self._first = {
            alias: name
            for aliases in (tied, shared)
            for name, others in aliases.items()
            for alias in others
        }

    def modules(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Return `(name, module)` of every module, once; "" for what the root was.

        A wrapper has the name of what it wraps; of the two the wrapped one stays, because its
        forward runs also where a step calls around the wrapper.
        """
        found: dict[str, nn.Module] = {}
        for raw, module in model.named_modules():
            name = self._module_name(raw, module)
            if name not in found or id(module) in self._modules:
                found[name] = module
        return list(found.items())

    def parameters(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """Return parameters by first name; several where a tie is broken on this rank."""
        return self._tensors(model, "_parameters")

    def buffers(self, model: nn.Module) -> dict[str, list[Tensor]]:
        """Return buffers by first name."""
        return self._tensors(model, "_buffers")

    def state(self, model: nn.Module, optimizer: Any) -> Iterator[tuple[str, str, Any, Any]]:
        """Give `(parameter, key, container, container key)` of optimizer state with a name.

        State of tensors that are no parameters of the model is left out.
        """
        owners = {
            id(tensor): name
            for name, tensors in self.parameters(model).items()
            for tensor in tensors
        }
        for single in optimizers_of(optimizer):
            for tensor, state in single.state.items():
                owner = owners.get(id(tensor))
                if owner is None or not isinstance(state, Mapping):
                    continue
                for key, value in state.items():
                    if isinstance(value, (Tensor, int, float)) and not isinstance(value, bool):
                        yield owner, str(key), state, key
                    elif isinstance(value, list):
                        for at, entry in enumerate(value):
                            if isinstance(entry, Tensor):
                                yield owner, f"{key}[{at}]", value, at

    def foreign(self, model: nn.Module, optimizer: Any) -> int:
        """Count the tensors the optimizer steps that are no parameters of the model."""
        members = {id(tensor) for tensor in model.parameters()}
        return sum(
            id(tensor) not in members
            for single in optimizers_of(optimizer)
            for group in single.param_groups
            for tensor in group["params"]
        )

    def held(self, model: nn.Module, optimizer: Any) -> int:
        """Count the parameters of the model that the optimizer steps."""
        members = {id(tensor) for tensor in model.parameters()}
        stepped = {
            id(tensor)
            for single in optimizers_of(optimizer)
            for group in single.param_groups
            for tensor in group["params"]
        }
        return len(members & stepped)

    def _module_name(self, raw: str, module: nn.Module) -> str:
        """Return what a module was called, or its path where it is new."""
        known = self._modules.get(id(module))
        return known[0] if known is not None else normalised(raw)

    def _tensors(self, model: nn.Module, kind: str) -> dict[str, list[Any]]:
        """Return the tensors of one kind by first name, each object once."""
        found: dict[str, list[Any]] = {}
        seen: set[int] = set()
        for raw, module in model.named_modules(remove_duplicate=False):
            path = self._module_name(raw, module)
            for key, tensor in getattr(module, kind).items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                name = f"{path}.{key}" if path else key
                found.setdefault(self._first.get(name, name), []).append(tensor)
        order = {name: i for i, name in enumerate((*self.parameter_names, *self.buffer_names))}
        return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))
