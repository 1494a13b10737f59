"""Fakes in the place of a step's real values while it runs, and what it left there.

Every container the step can reach is looked at before and after. Tensors of the world are
replaced before; what the step put there - fake tensors, symbolic numbers - is taken out
after and listed, so that it can be written once its real value is known. Python values
the step changed stay changed: the step's Python ran, and it runs once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from spmd.errors import CaptureError
from spmd.lifting import World, path_name, roots_of, world_parameters
from spmd.places import Container, Place, leaves, mapped, reachable, rebuilt
from spmd.program import Kept, Lifted, Write

_SYMBOLIC = (torch.SymFloat, torch.SymInt, torch.SymBool)
_GUARDABLE = (int, float, bool, str, torch.dtype)
_ABSENT = object()


@dataclass
class Aftermath:
    """What the step left behind, in terms of the values it was given.

    Attributes:
        gradients: Parameter name -> `.grad` or None.
        requires_grad: Parameter name -> whether it is trained, where the step changed it.
        state: Parameter name -> its state; leaves are values, or `Kept`.
        written: Slots that hold new fakes or symbols.
        places: id of a real tensor outside the world -> the slot it lies in.
        python: Slot name -> (place, value): plain Python values that changed.
    """

    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    written: list[Write] = field(default_factory=list)
    python: dict[str, tuple[Place, Any]] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)


@contextmanager
def swapped(world: World, stand_ins: list[Any]) -> Iterator[Aftermath]:
    """Run the body with `stand_ins` in the place of the world's values.

    Args:
        world: From `lift`.
        stand_ins: One per lifted value; symbols for numbers.

    Yields:
        Filled when the body ends. After it no fake is left anywhere, also when it raised.

    Raises:
        CaptureError: The step replaced a parameter or left a gradient on a tensor that is
            not part of the model.
    """
    swap = _Swap(world, stand_ins)
    after = Aftermath(places=swap.places)
    try:
        swap.enter()
        yield after
        swap.collect(after)
    finally:
        swap.leave(after)
    for write in after.written:
        if write.kind == "parameter":
            raise CaptureError(
                f"the step registers or replaces the parameter {write.place.name!r}. Create it "
                "before the step, or change it in place.",
                None,
                "parameter-replaced",
            )


class _Swap:
    def __init__(self, world: World, stand_ins: list[Any]) -> None:
        self.world, self.stand_ins = world, stand_ins
        pairs = list(zip(world.specs, world.values, stand_ins, strict=True))
        tensors = [(v, s) for _, v, s in pairs if isinstance(v, Tensor)]
        self.by_id = {id(v): s for v, s in tensors}
        self.back = {id(s): v for v, s in tensors}
        self.numbers = {spec.name: s for spec, v, s in pairs if not isinstance(v, Tensor)}
        self.before: dict[tuple[int, str], tuple[dict[Any, Any], dict[Any, Any]]] = {}
        self.containers: list[Container] = []
        self.strangers: list[tuple[Tensor, Any]] = []
        self.state: Any = None
        self.own_attributes: frozenset[str] = frozenset()
        self.places: dict[int, Place] = {}

    def enter(self) -> None:
        """Put the stand-ins in place."""
        self._swap_parameters()
        self._swap_state()
        self.containers = self._reachable()
        for container in self.containers:
            real = container.slots()
            fake = {k: self._stand_in(container.place(k).name, v) for k, v in real.items()}
            self.before[_key(container)] = real, fake
            for key, value in fake.items():
                if value is not real[key]:
                    container.place(key).set(value)
                elif isinstance(value, Tensor):
                    self.places.setdefault(id(value), container.place(key))

    def _reachable(self) -> list[Container]:
        roots, skip = roots_of(self.world)
        return reachable(roots, skip | {id(self.state)})

    def _stand_in(self, name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return rebuilt(value, [self._stand_in(f"{name}.{i}", v) for i, v in enumerate(value)])
        if isinstance(value, Tensor):
            if id(value) not in self.by_id and value.is_leaf and value.requires_grad:
                self.strangers.append((value, value.grad))
            return self.by_id.get(id(value), value)
        if type(value) in (int, float):
            return self.numbers.get(name, value)
        return value

    def _swap_parameters(self) -> None:
        """Give stand-ins the gradients, hooks and Python attributes of the real parameters."""
        position = {spec.name: i for i, spec in world_parameters(self.world)}
        for spec, stand_in in zip(self.world.specs, self.stand_ins, strict=True):
            if spec.kind == "gradient":
                self.stand_ins[position[spec.name]].grad = stand_in
        for index in position.values():
            real, stand_in = self.world.values[index], self.stand_ins[index]
            self.own_attributes = frozenset(vars(stand_in))
            for key, value in vars(real).items():
                vars(stand_in).setdefault(key, self.by_id.get(id(value), value))
            for hook in (real._backward_hooks or {}).values():
                stand_in.register_hook(hook)
            if real.requires_grad:
                for hook in (real._post_accumulate_grad_hooks or {}).values():
                    stand_in.register_post_accumulate_grad_hook(hook)

    def _swap_state(self) -> None:
        optimizer, names = self.world.optimizer, self.world.names
        if optimizer is None:
            return
        self.state, optimizer.state = optimizer.state, defaultdict(dict)
        for parameter, entry in self.state.items():
            known = id(parameter) in names and id(parameter) in self.by_id
            prefix = f"state.{names[id(parameter)]}" if known else "state"
            key = self.by_id[id(parameter)] if known else parameter
            optimizer.state[key] = (
                pytree.tree_map_with_path(
                    lambda path, leaf, prefix=prefix: self._stand_in(
                        f"{prefix}.{path_name(path)}", leaf
                    ),
                    dict(entry),
                )
                if isinstance(entry, dict)
                else entry
            )

    # -- afterwards ------------------------------------------------------------------

    def collect(self, after: Aftermath) -> None:
        """List what the step left; called where it did not raise."""
        for index, spec in world_parameters(self.world):
            stand_in = self.stand_ins[index]
            after.gradients[spec.name] = stand_in.grad
            if stand_in.requires_grad != spec.requires_grad:
                after.requires_grad[spec.name] = stand_in.requires_grad
                self.world.values[index].requires_grad_(stand_in.requires_grad)
        for tensor, gradient in self.strangers:
            if tensor.grad is not gradient:
                tensor.grad = gradient
                raise CaptureError(
                    f"the step leaves a gradient on a tensor of shape {list(tensor.shape)} that is "
                    "neither in the model nor in the optimizer. Make it a parameter of the model.",
                    None,
                    "captured-gradient",
                )
        if self.world.optimizer is not None:
            self._collect_state(after)

    def _collect_state(self, after: Aftermath) -> None:
        names = {id(self.by_id[i]): n for i, n in self.world.names.items() if i in self.by_id}
        real = {id(self.by_id[id(p)]): p for p in self.state if id(p) in self.by_id}
        for parameter, entry in self.world.optimizer.state.items():
            name = names.get(id(parameter))
            if name is None or not isinstance(entry, dict):
                if any(is_fake(leaf) for leaf in pytree.tree_leaves(entry)):
                    raise CaptureError(
                        f"the optimizer keeps state under {type(parameter).__name__} instead of a "
                        "parameter. Keep it under a parameter or in an attribute.",
                        None,
                        "state-without-parameter",
                    )
                continue
            old = dict(self.state[real[id(parameter)]]) if id(parameter) in real else {}
            kept = {
                id(self._stand_in(f"state.{name}.{path_name(path)}", leaf))
                for path, leaf in pytree.tree_flatten_with_path(old)[0]
            }
            after.state[name] = pytree.tree_map(
                lambda leaf, kept=kept: Kept() if is_fake(leaf) and id(leaf) in kept else leaf,
                dict(entry),
            )

    def leave(self, after: Aftermath) -> None:
        """Take every fake out again; new ones are listed in `after`."""
        if self.world.optimizer is not None and self.state is not None:
            self.world.optimizer.state = self.state
        for tensor, gradient in self.strangers:
            tensor.grad = gradient
        known = {_key(c) for c in self.containers}
        found = self.containers + [c for c in self._reachable() if _key(c) not in known]
        for container in found:
            real, fake = self.before.get(_key(container), ({}, {}))
            for key, value in container.slots().items():
                self._restore(container, key, value, real.get(key, _ABSENT), fake, after)
        for index, _ in world_parameters(self.world):
            self._restore_attributes(index)

    def _restore(
        self, container: Container, key: Any, value: Any, real: Any, fake: dict[Any, Any],
        after: Aftermath,
    ) -> None:  # fmt: skip
        place = container.place(key)
        if real is not _ABSENT and value is fake[key]:
            if value is not real:
                place.set(real)
            return
        plain = mapped(value, lambda leaf: self.back.get(id(leaf), leaf))
        if any(is_fake(leaf) for leaf in leaves(plain)):
            kind = container.kind
            if kind == "captured" and isinstance(plain, _SYMBOLIC):
                kind = "hyper"
            after.written.append(Write(kind, place, plain))
            if real is _ABSENT and isinstance(container.owner, dict):
                del container.owner[key]
            else:
                place.set(None if real is _ABSENT else real)
            return
        if plain is not value:
            place.set(plain)
        guarded = plain is None or isinstance(plain, _GUARDABLE)
        if guarded and (real is _ABSENT or not _same(plain, real)):
            after.python[place.name] = (place, plain)

    def _restore_attributes(self, index: int) -> None:
        """Hand Python attributes the step set on a parameter to the real one."""
        real, stand_in = self.world.values[index], self.stand_ins[index]
        for key, value in vars(stand_in).items():
            if key not in self.own_attributes and not is_fake(value):
                vars(real)[key] = value


def _key(container: Container) -> tuple[int, str]:
    return id(container.owner), container.name if container.keys is not None else ""


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _GUARDABLE) and a == b)


def is_fake(value: Any) -> bool:
    """Whether a value exists only while a step is traced."""
    return isinstance(value, (FakeTensor, *_SYMBOLIC))


def with_outputs(value: Any, output: Callable[[Any], Lifted]) -> Any:
    """Return `value` with its fakes and symbols replaced by what `output` makes of them."""
    return mapped(value, lambda leaf: output(leaf) if is_fake(leaf) else leaf)
