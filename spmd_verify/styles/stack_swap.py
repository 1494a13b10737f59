"""Cut stacked expert parameters to this rank's experts, and show forward stand-ins for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from spmd_verify.styles.expert_owners import Owners
from spmd_verify.styles.expert_stacks import Stack

_FEWEST_DIMS: Final = 3  # [experts, in, out]; biases [experts, out] beside such a stack


def candidates(model: nn.Module) -> list[str]:
    """Return the names of parameters that may be stacks: of modules that torch does not ship.

    A parameter that several modules share is none.
    """
    found: dict[str, nn.Parameter] = {}
    shared: set[int] = set()
    for path, module in model.named_modules():
        own = [(name, each) for name, each in module._parameters.items() if each is not None]
        if type(module).__module__.startswith("torch.nn."):
            shared.update(id(each) for _, each in own)
            continue
        counts = {each.shape[0] for _, each in own if each.ndim >= _FEWEST_DIMS}
        for name, each in own:
            if each.ndim > 1 and each.shape[0] in counts and each.shape[0] > 1:
                found[f"{path}.{name}" if path else name] = each
    ids = [id(each) for each in found.values()]
    return [
        name for name, each in found.items() if id(each) not in shared and ids.count(id(each)) == 1
    ]


class StackSwap:
    """Stacks of one model on one rank.

    Attributes:
        names: Of the parameters.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], group: dist.ProcessGroup) -> None:
        """Remember where the parameters are; nothing is changed before `cut`."""
        self._model = model
        self._group = group
        self.names = tuple(names)
        self._places = [(name, *_place(model, name)) for name in names]
        self._owners: dict[str, Owners] = {}

    def cut(self) -> None:
        """Cut the parameters in place and wrap forward of the model and of their modules."""
        for name, module, key in self._places:
            whole = module._parameters[key]
            assert whole is not None, "a name of this model"
            owners = Owners(len(whole), self._group)
            self._owners[name] = owners
            own = whole.detach()[slice(*owners.range())].clone()
            module._parameters[key] = nn.Parameter(own, requires_grad=whole.requires_grad)
        for module in {self._model, *(module for _, module, _ in self._places)}:
            module.forward = partial(self._forward, module.forward)

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run forward with stand-ins in the parameters' places."""
        with self._stand_ins():
            return forward(*args, **kwargs)

    @contextmanager
    def _stand_ins(self) -> Iterator[None]:
        """Put stand-ins in, and the parameters back; inside another one nothing changes."""
        before = [(module, key, module._parameters[key]) for _, module, key in self._places]
        for name, module, key in self._places:
            value: Any = module._parameters[key]
            if isinstance(value, torch.Tensor):
                stand_in: Any = Stack(name, value, self._owners[name])
                module._parameters[key] = stand_in
        try:
            yield
        finally:
            for module, key, value in before:
                module._parameters[key] = value


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module of a parameter and its name there."""
    path, _, key = name.rpartition(".")
    return model.get_submodule(path), key
