"""What one rehearsed step shows of a model's modules: their calls, and who uses a parameter.

A plan for tensor parallelism is derived from this and not from names: which modules ran, on
what, and which parameters are read outside the module that has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from spmd_verify.reference.observe import is_in_backward


@dataclass(frozen=True)
class Call:
    """One forward of one module.

    Attributes:
        args: Positional arguments, as they were handed over.
        kwargs: Keyword arguments.
        inside: Paths of the modules whose forward ran around it, outermost first.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inside: tuple[str, ...]


@dataclass
class Watched:
    """What was seen.

    Attributes:
        calls: By module path, in the order of first calls; "" is the root.
        uses: By parameter name (each of several), the modules in whose forward it was read.
    """

    calls: dict[str, list[Call]] = field(default_factory=dict)
    uses: dict[str, set[str]] = field(default_factory=dict)


@contextmanager
def watching(model: nn.Module) -> Iterator[Watched]:
    """Watch all forwards of a model; what backward recomputes is left out."""
    found = Watched()
    stack: list[str] = []
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    with ExitStack() as undo:
        for path, module in model.named_modules():
            before, after = _hooks(path, found, stack)
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            undo.callback(handle.remove)
            undo.callback(module.register_forward_hook(after, always_call=True).remove)
        undo.enter_context(_Uses(names, found, stack))
        yield found


def _hooks(path: str, found: Watched, stack: list[str]) -> tuple[Any, Any]:
    """Return the hooks that enter and leave one module."""

    def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_in_backward():
            found.calls.setdefault(path, []).append(Call(args, kwargs, tuple(stack)))
        stack.append(path)

    def after(*_: Any) -> None:
        stack.pop()

    return before, after


class _Uses(TorchFunctionMode):
    """Notes in which module's forward every parameter becomes an operand."""

    def __init__(self, names: dict[int, list[str]], found: Watched, stack: list[str]) -> None:
        super().__init__()
        self.names, self.found, self.stack = names, found, stack

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        # Reading a dtype or a shape is no use: only what gives tensors is.
        if self.stack and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(result)):
            for leaf in pytree.tree_leaves((args, kwargs or {})):
                for name in self.names.get(id(leaf), ()) if isinstance(leaf, Tensor) else ():
                    self.found.uses.setdefault(name, set()).add(self.stack[-1])
        return result
