"""Where Python keeps tensors and numbers: containers reachable from a step, and their slots.

A step reads and leaves values not only in parameters and buffers but in attributes of
modules and optimizers, in dicts and lists those hold, in variables of an enclosing
function and in the globals it names. The walk lists those containers, so that fakes can
stand in for what lies there and nothing is left behind.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import UserDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_DEPTH = 8
_LARGEST = 4096
_TABLES = frozenset(("_parameters", "_buffers", "_modules"))
# Attributes every module has: hooks, entered only where there are some.
_PLAIN_ATTRIBUTES = frozenset(vars(nn.Module()))
# Classes of these packages are walked though they are torch's: they hold the user's values.
_WALKED = ("torch.optim", "torch.amp", "torch.cuda.amp")
_LIBRARIES = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "transformers", "sympy"}

_MISSING = object()


@dataclass(frozen=True, eq=False)
class Place:
    """One slot: `owner[key]`, or the contents of a closure's cell (`key` is None).

    Attributes:
        name: Dotted path from the step, for messages and for comparing two captures.
        owner: A dict, list, deque or cell.
        key: Where in it.
    """

    name: str
    owner: Any
    key: Any

    def get(self) -> Any:
        """Return what lies there now, or None."""
        if isinstance(self.owner, types.CellType):
            return _cell(self.owner)
        if isinstance(self.owner, dict):
            return self.owner.get(self.key)
        return self.owner[self.key] if self.key < len(self.owner) else None

    def set(self, value: Any) -> None:
        """Put `value` there; lists grow by one where the slot is one past the end."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = value
        elif isinstance(self.owner, dict) or self.key < len(self.owner):
            self.owner[self.key] = value
        else:
            self.owner.append(value)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a variable that is not assigned yet
        return None


@dataclass
class Container:
    """A mutable holder of values.

    Attributes:
        name: Dotted path from the step.
        owner: A dict, list, deque or cell.
        keys: The keys that count; None for all of them.
        without: Keys that do not count.
        kind: `parameter` and `buffer` for the tables of modules, else `captured`.
    """

    name: str
    owner: Any
    keys: frozenset[str] | None = None
    without: frozenset[str] = frozenset()
    kind: str = "captured"

    def slots(self) -> dict[Any, Any]:
        """Return {key: value} as of now."""
        if isinstance(self.owner, types.CellType):
            return {None: _cell(self.owner)}
        if isinstance(self.owner, dict):
            if self.keys is not None:
                return {k: self.owner[k] for k in self.keys if k in self.owner}
            return {k: v for k, v in self.owner.items() if k not in self.without}
        return dict(enumerate(self.owner))

    def place(self, key: Any) -> Place:
        """Return the slot `key`."""
        name = self.name if key is None else f"{self.name}.{key}" if self.name else str(key)
        return Place(name, self.owner, key)


@dataclass
class Walk:
    """Collects containers; every object is visited once, under the first name it has.

    Attributes:
        skip: ids of objects that are not entered.
        containers: What was found, in order.
    """

    skip: set[int] = field(default_factory=set)
    containers: list[Container] = field(default_factory=list)
    _kept: list[Any] = field(default_factory=list)
    _globals: dict[int, Container] = field(default_factory=dict)

    def visit(self, name: str, value: Any, depth: int = 0) -> None:
        """Enter `value` if it can hold tensors or numbers."""
        plain = isinstance(value, Tensor | str | bytes | int | float | complex | torch.dtype)
        if plain or value is None or id(value) in self.skip or depth > _DEPTH:
            return
        enter = self._entrance(value)
        if enter is None:
            return
        self.skip.add(id(value))
        self._kept.append(value)  # an id may be reused once its object is gone
        enter(name, value, depth + 1)

    def _entrance(self, value: Any) -> Callable[[str, Any, int], None] | None:
        if isinstance(value, nn.Module):
            return self._module
        if isinstance(value, dict | list | deque) and len(value) <= _LARGEST:
            return self._items
        if isinstance(value, tuple | set | frozenset) and len(value) <= _LARGEST:
            return self._fixed
        if isinstance(value, types.FunctionType):
            return self._function
        if isinstance(value, types.MethodType):
            return lambda name, v, depth: self._fixed(name, (v.__self__, v.__func__), depth)
        if isinstance(value, functools.partial):
            return lambda name, v, depth: self._fixed(name, (v.func, v.args, v.keywords), depth)
        if isinstance(value, type | types.ModuleType):
            return None
        return self._attributes if _is_walked(value) else None

    def _module(self, name: str, module: nn.Module, depth: int) -> None:
        attributes = vars(module)
        self.containers += [
            Container(name, attributes, without=_TABLES),
            Container(name, attributes["_parameters"], kind="parameter"),
            Container(name, attributes["_buffers"], kind="buffer"),
        ]
        for key, child in attributes["_modules"].items():
            self.visit(_join(name, key), child, 0)
        for key, value in list(attributes.items()):
            if key not in _TABLES and (key not in _PLAIN_ATTRIBUTES or value):
                self.visit(_join(name, key), value, depth)

    def _items(self, name: str, holder: Any, depth: int) -> None:
        self.containers.append(Container(name, holder))
        pairs = holder.items() if isinstance(holder, dict) else enumerate(holder)
        for key, value in list(pairs):
            self.visit(_join(name, key), value, depth)

    def _fixed(self, name: str, values: Any, depth: int) -> None:
        for index, value in enumerate(values):
            self.visit(_join(name, index), value, depth)

    def _attributes(self, name: str, value: Any, depth: int) -> None:
        self._items(name, vars(value), depth)

    def _function(self, name: str, function: types.FunctionType, depth: int) -> None:
        """Enter the variables and globals a function of the user's names."""
        if not _is_users(function.__module__):
            return
        code = function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) not in self.skip:
                self.skip.add(id(cell))
                self.containers.append(Container(_join(name, variable), cell))
                self.visit(_join(name, variable), _cell(cell), depth)
        names = frozenset(_global_names(code)) & function.__globals__.keys()
        named = {n for n in names if not isinstance(function.__globals__[n], types.ModuleType)}
        self._read_globals(function.__globals__, frozenset(named))
        for key in sorted(named):
            self.visit(f"globals.{key}", function.__globals__[key], depth)
        self.visit(name, function.__defaults__, depth)
        self.visit(name, function.__kwdefaults__, depth)

    def _read_globals(self, table: dict[str, Any], named: frozenset[str]) -> None:
        """Count in the globals that one more function of a file names: one container a file."""
        known = self._globals.get(id(table))
        if known is None:
            known = self._globals[id(table)] = Container("globals", table, frozenset())
            self.containers.append(known)
        assert known.keys is not None, "made with keys"
        known.keys |= named


def _join(name: str, key: Any) -> str:
    return f"{name}.{key}" if name else str(key)


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _is_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in _LIBRARIES


def _is_walked(value: Any) -> bool:
    module = type(value).__module__
    if isinstance(value, UserDict | Optimizer) or module.startswith(_WALKED):
        return hasattr(value, "__dict__")
    return _is_users(module) and isinstance(getattr(value, "__dict__", None), dict)


def reachable(roots: dict[str, Any], skip: set[int]) -> list[Container]:
    """Return the containers reachable from named roots.

    Args:
        roots: Name -> object; the model's name is empty.
        skip: ids of objects not to enter.
    """
    walk = Walk(set(skip))
    for name, root in roots.items():
        walk.visit(name, root)
    return walk.containers


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `value`, or its tuples rebuilt, with `change` applied to each leaf."""
    if isinstance(value, tuple):
        return rebuilt(value, [mapped(v, change) for v in value])
    return change(value)


def rebuilt(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple like `value` with other items; `value` itself if they are the same."""
    if all(a is b for a, b in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def leaves(value: Any) -> Iterator[Any]:
    """Yield `value`, or the leaves of nested tuples."""
    if isinstance(value, tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value
