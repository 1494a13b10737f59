"""Find experts that are modules of their own: equal members of a container, called side by side.

Blocks of a chain look alike too. What tells them apart is seen while one device runs the step: an
expert's input never comes from another expert of its list, and something chooses between them: a
router (an operator over as many entries as there are experts) or different tokens.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_CONTAINERS: Final = (nn.ModuleList, nn.ModuleDict)
_ROUTING: Final = frozenset(
    (
        *(torch.topk, torch.softmax, torch.sigmoid, torch.argmax, torch.sort, torch.max),
        *(F.softmax, F.sigmoid, F.gumbel_softmax, F.one_hot),
        *(Tensor.topk, Tensor.softmax, Tensor.sigmoid, Tensor.argmax, Tensor.sort, Tensor.max),
    )
)


@dataclass(frozen=True)
class ExpertList:
    """Equal members of one container.

    Attributes:
        path: Of the container.
        members: Paths of the experts, in order.
        units: Per member, the paths of the modules in it that are called from outside.
    """

    path: str
    members: tuple[str, ...]
    units: tuple[tuple[str, ...], ...]


class StepWatch(TorchFunctionMode):
    """Context of one step on one device: what routes, and what reads experts' parameters.

    Attributes:
        outside: Parameters that something differentiable reads while no module of theirs runs,
            such as a penalty in the loss: nobody but their owner could compute that.
    """

    def __init__(self, model: nn.Module, lists: ListWatch) -> None:
        """Watch a model whose containers are watched already."""
        super().__init__()
        self._choices: set[tuple[int, frozenset[str]]] = set()
        self.outside: set[str] = set()
        self._names = {id(each): name for name, each in model.named_parameters()}
        self._lists = lists
        # Forwards that run, by path: the model's, and those of modules with parameters, which
        # activation checkpointing runs again in backward.
        self._depths: Counter[str] = Counter()
        for path, module in model.named_modules():
            if not path or any(True for _ in module.parameters(recurse=False)):
                module.register_forward_pre_hook(lambda *_, path=path: self._enter(path, 1))
                module.register_forward_hook(lambda *_, path=path: self._enter(path, -1))

    def has_router(self, count: int, path: str | None = None) -> bool:
        """Say whether something chose among `count` entries.

        Args:
            count: How many experts there are.
            path: Of a container, whose own members' choices, such as attention, are none of it.
        """
        return any(size == count and path not in running for size, running in self._choices)

    def _enter(self, path: str, change: int) -> None:
        """Begin or end a forward."""
        self._depths[path] += change

    def _is_in_forward(self, parameter: str) -> bool:
        """Say whether the model or the module that has a parameter is in its forward."""
        return self._depths[""] > 0 or self._depths[parameter.rpartition(".")[0]] > 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let everything pass."""
        del types
        out = func(*args, **(kwargs or {}))
        if func in _ROUTING:
            leaves = pytree.tree_leaves((args[:1], out))
            sizes = {t.shape[-1] for t in leaves if isinstance(t, Tensor) and t.ndim}
            self._choices.update((size, self._lists.running()) for size in sizes)
        if isinstance(out, Tensor) and out.grad_fn is not None:
            for leaf in pytree.tree_leaves((args, kwargs)):
                name = self._names.get(id(leaf))
                if name and not self._lists.is_running(name, self._is_in_forward(name)):
                    self.outside.add(name)
        return out


@dataclass
class _Seen:
    """What calls of one container's members showed, within one call of the module around it."""

    made: dict[int, set[Any]] = field(default_factory=lambda: defaultdict(set))
    inputs: dict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    is_chain: bool = False
    is_sparse: bool = False
    depth: int = 0


class ListWatch:
    """Watches the members of every container of equal modules while one device runs the step."""

    def __init__(self, model: nn.Module) -> None:
        """Hook the members and what is in them, and the modules around the containers."""
        self._lists = list(equal_members(model))
        self._seen = {path: _Seen() for path, _ in self._lists}
        self._called: set[str] = set()
        for path, members in self._lists:
            around = model.get_submodule(path.rpartition(".")[0])
            around.register_forward_pre_hook(lambda *_, path=path: self._restart(path))
            for at, member in enumerate(members):
                for inner, module in model.get_submodule(member).named_modules(prefix=member):
                    module.register_forward_pre_hook(
                        lambda _module, args, kwargs, path=path, at=at, inner=inner: self._before(
                            path, at, inner, (args, kwargs)
                        ),
                        with_kwargs=True,
                    )
                    module.register_forward_hook(
                        lambda _module, _args, out, path=path, at=at: self._after(path, at, out)
                    )

    def is_running(self, parameter: str, is_otherwise: bool) -> bool:
        """Say whether a member with this parameter is in its forward; what else is not a member's.

        Args:
            parameter: Its name.
            is_otherwise: The answer where no watched member has it.
        """
        for path, members in self._lists:
            if any(parameter.startswith(f"{member}.") for member in members):
                return self._seen[path].depth > 0
        return is_otherwise

    def running(self) -> frozenset[str]:
        """Return the containers of which a member is in its forward."""
        return frozenset(path for path, seen in self._seen.items() if seen.depth > 0)

    def found(self, step: StepWatch) -> tuple[list[ExpertList], list[str]]:
        """Return the containers whose members are experts, outer ones first; and why others not.

        Args:
            step: What the same step showed.
        """
        refused: list[str] = []
        lists: list[ExpertList] = []
        for path, members in self._lists:
            seen = self._seen[path]
            units = tuple(tuple(self._outermost(member)) for member in members)
            is_chosen = seen.is_sparse or step.has_router(len(members), path)
            is_inside = any(path.startswith(f"{each}.") for lst in lists for each in lst.members)
            if not any(units) or not is_chosen or seen.is_chain or is_inside:
                continue
            inside = tuple(f"{member}." for member in members)
            read = next((name for name in sorted(step.outside) if name.startswith(inside)), None)
            if read is not None:
                refused.append(f"{read} is read outside of the experts' forward")
                continue
            filled = tuple(unit or (member,) for unit, member in zip(units, members, strict=True))
            lists.append(ExpertList(path, members, filled))
        return lists, refused

    def _outermost(self, member: str) -> Iterator[str]:
        """Give the called modules of a member that are in no other called one."""
        called = sorted(each for each in self._called if f"{each}.".startswith(f"{member}."))
        for each in called:
            if not any(each.startswith(f"{other}.") for other in called):
                yield each

    def _restart(self, path: str) -> None:
        """Begin a call of the module around a container."""
        seen = self._seen[path]
        seen.is_sparse |= self._differs(seen)
        seen.made.clear()
        seen.inputs.clear()

    def _differs(self, seen: _Seen) -> bool:
        """Say whether members were given different numbers of tokens."""
        first = [tensors[0] for tensors in seen.inputs.values() if tensors]
        return len({tuple(each.shape[:1]) for each in first}) > 1

    def _before(self, path: str, at: int, inner: str, inputs: Any) -> None:
        """See what a member is given."""
        seen = self._seen[path]
        tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._called.add(inner)
        seen.depth += 1
        others = set().union(*(made for other, made in seen.made.items() if other != at), set())
        seen.is_chain |= _comes_from(tensors, others)
        seen.inputs[at].extend(tensors)
        seen.is_sparse |= self._differs(seen)

    def _after(self, path: str, at: int, out: Any) -> None:
        """Remember what a member has made."""
        self._seen[path].depth -= 1
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                self._seen[path].made[at].add(leaf.grad_fn)


def equal_members(model: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Give the containers with at least two equal members, and those members' paths.

    Equal are modules of one class with parameters of the same names and shapes, none of which is
    used outside its member.
    """
    uses: dict[int, int] = defaultdict(int)
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] += 1
    for path, container in model.named_modules():
        if not isinstance(container, _CONTAINERS):
            continue
        kinds: dict[Any, list[str]] = defaultdict(list)
        for name, child in container.named_children():
            shapes = tuple((key, tuple(p.shape)) for key, p in child.named_parameters())
            if shapes and all(uses[id(p)] == 1 for p in child.parameters()):
                kinds[type(child), shapes].append(f"{path}.{name}" if path else name)
        members: Sequence[str] = max(kinds.values(), key=len, default=())
        if len(members) > 1:
            yield path, tuple(members)


def _comes_from(tensors: Sequence[Tensor], made: set[Any]) -> bool:
    """Say whether a tensor was computed from what one of these nodes of autograd has made."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    visited = set(waiting)
    while waiting and made:
        node = waiting.pop()
        if node in made:
            return True
        for inner, _ in node.next_functions:
            if inner is not None and inner not in visited:
                visited.add(inner)
                waiting.append(inner)
    return False
