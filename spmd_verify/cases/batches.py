"""The global batches of a case: materialised per step, cast, named by argument path.

A batch is what the training step gets: a flat tuple `(*inputs, *targets)`, or a dict with
the targets under `targets`. All tensors here are global.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify import refusals
from spmd_verify.cases.hooks import Case
from spmd_verify.errors import CaseError, choices_text
from spmd_verify.seeding import RandomState, seed_all
from spmd_verify.style_ids import DATA_AXES
from spmd_verify.user_code import UserCode

TARGETS: Final = "targets"
_NO_TARGETS: Final = object()


@dataclass(frozen=True)
class BatchForm:
    """How a batch was put together, so that it can be taken apart again.

    Attributes:
        inputs: `sequence` (one or more positional arguments), `dict` (keywords) or `call`
            (positional arguments, then one dict of keywords).
        num_inputs: Entries of the flat tuple that are inputs; 0 for `dict`.
        targets: `none`, `one`, `sequence` (spread over the tuple) or `merged` (a dict merged
            by key into a dict of inputs).
        target_keys: Keys of merged targets.
    """

    inputs: str
    num_inputs: int
    targets: str
    target_keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: Any, targets: Any) -> "BatchForm":
        """Read the form off one step's inputs and targets."""
        kind = "dict" if isinstance(inputs, Mapping) else "call" if _is_call(inputs) else "sequence"
        if kind == "call":
            num_inputs = len(inputs[0]) + 1
        else:
            num_inputs = len(_positional(inputs)) if kind == "sequence" else 0
        if targets is _NO_TARGETS:
            return cls(kind, num_inputs, "none")
        if kind == "dict" and isinstance(targets, Mapping):
            return cls(kind, num_inputs, "merged", tuple(targets))
        spread = kind != "dict" and isinstance(targets, (tuple, list))
        return cls(kind, num_inputs, "sequence" if spread else "one")

    def join(self, inputs: Any, targets: Any) -> Any:
        """Return the batch as the training step gets it."""
        if self.inputs == "dict":
            extra = {} if self.targets == "none" else {TARGETS: targets}
            return {**inputs, **(targets if self.targets == "merged" else extra)}
        head = (*inputs[0], inputs[1]) if self.inputs == "call" else _positional(inputs)
        tail = {"none": (), "one": (targets,)}.get(self.targets)
        return (*head, *(targets if tail is None else tail))

    def split(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return `(args, kwargs, targets)` of a batch or of a rank's part of one.

        `targets` is what `get_targets` gave, a tuple where that was a list; None without.
        """
        if self.inputs == "dict":
            merged = {key: batch[key] for key in self.target_keys}
            not_inputs = set(self.target_keys) | ({TARGETS} if self.targets == "one" else set())
            kwargs = {key: value for key, value in batch.items() if key not in not_inputs}
            return (), kwargs, merged if self.targets == "merged" else batch.get(TARGETS)
        args, tail = tuple(batch[: self.num_inputs]), tuple(batch[self.num_inputs :])
        targets = {"none": None, "one": tail[0] if tail else None}.get(self.targets, tail)
        if self.inputs == "call":
            return args[:-1], dict(args[-1]), targets
        return args, {}, targets


class BatchSource:
    """The batches of one case in one dtype, made in step order and kept.

    `seed + 1` is set before the first batch; later ones continue from the random state the
    one before left, whatever happens in between. A batch handed out is a copy.
    """

    def __init__(self, hooks: Case, *, path: str, seed: int, dtype: torch.dtype) -> None:
        """Remember where batches come from; nothing is called yet."""
        self._hooks = hooks
        self._path = path
        self._seed = seed
        self._dtype = dtype
        self._made: list[tuple[Any, Any]] = []
        self._random: RandomState | None = None
        self._streams: dict[str, Iterator[Any]] = {}

    @property
    def form(self) -> BatchForm:
        """Return the form of step 0's batch, which is that of all."""
        return BatchForm.of(*self.parts(0))

    def parts(self, step: int) -> tuple[Any, Any]:
        """Return a copy of one step's inputs and targets, cast, as their hooks gave them."""
        while len(self._made) <= step:
            self._made.append(self._make(len(self._made)))
        return _copied(self._made[step])

    def batch(self, step: int) -> Any:
        """Return a copy of the batch of one step as the training step gets it."""
        inputs, targets = self.parts(step)
        form = self.form
        if BatchForm.of(inputs, targets) != form:
            raise refusals.changing_batches(self._path, step)
        return form.join(inputs, targets)

    def _make(self, step: int) -> tuple[Any, Any]:
        """Call the hooks for one step, under their own random stream."""
        outside = RandomState.now()
        if self._random is None:
            seed_all(self._seed + 1)
        else:
            self._random.restore()
        try:
            inputs = self._call("get_inputs", self._hooks.inputs, step)
            targets = self._call("get_targets", self._hooks.targets, step)
            self._random = RandomState.now()
        finally:
            outside.restore()
        return cast_floating((inputs, targets), self._dtype)

    def _call(self, name: str, hook: Any, step: int) -> Any:
        """Return what one hook gives for a step."""
        if hook is None:
            return _NO_TARGETS
        with UserCode(f"{name}()", path=self._path, slug="hook-raised"):
            if name in self._streams:
                return self._next(name)
            if not callable(hook):
                return hook
            asked = {"step": step, "seed": self._seed}
            taken = {key: value for key, value in asked.items() if key in _parameter_names(hook)}
            if step > 0 and "step" not in taken:
                return self._made[0][0 if name == "get_inputs" else 1]
            value = hook(**taken)
            if inspect.isgenerator(value):
                self._streams[name] = value
                return self._next(name)
            return value

    def _next(self, name: str) -> Any:
        """Take the next batch of a generator."""
        for value in self._streams[name]:
            return value
        raise refusals.inputs_ended(self._path, name, len(self._made))


def leaf_paths(batch: Any, form: BatchForm, forward_names: tuple[str, ...]) -> list[str]:
    """Name every leaf of a batch by its dotted argument path, in pytree order.

    Args:
        batch: As the training step gets it.
        form: How it was put together.
        forward_names: Positional parameters of the model's forward.
    """
    keyed, _ = pytree.tree_flatten_with_path(batch)
    return [_leaf_path(_plain(path), form, forward_names) for path, _ in keyed]


def _leaf_path(path: list[Any], form: BatchForm, forward_names: tuple[str, ...]) -> str:
    """Turn one pytree path into an argument path."""
    head, rest = path[0], path[1:]
    if form.inputs == "dict":
        names = [TARGETS, head] if head in form.target_keys else [head]
    elif head >= form.num_inputs:
        names = [TARGETS] if form.targets == "one" else [TARGETS, head - form.num_inputs]
    elif form.inputs == "call" and head == form.num_inputs - 1:
        names = []
    else:
        names = [forward_names[head]] if head < len(forward_names) else ["inputs", head]
    return ".".join(str(part) for part in [*names, *rest])


def declared_dims(declared: Mapping[str, Any], paths: list[str], where: str) -> dict[str, Any]:
    """Resolve what `input_sharding()` says to leaf paths.

    A name stands for every leaf below it.

    Raises:
        CaseError: `unknown-input` where a name is no argument.
    """
    resolved: dict[str, Any] = {}
    for name, value in declared.items():
        below = [path for path in paths if path == name or path.startswith(f"{name}.")]
        if not below:
            raise CaseError(
                f"input_sharding names no argument: {where}. Got {name!r}; "
                f"{choices_text(str(name), paths)}. Use the name forward gives it",
                slug="unknown-input",
            )
        resolved.update(dict.fromkeys(below, value))
    return resolved


def batch_dim(declared: Any) -> int | None:
    """Return the dim over the data axes that a declared `dim` or `{axis: dim}` means.

    A mapping that names no data axis leaves the default, dim 0.
    """
    if not isinstance(declared, Mapping):
        return declared
    named = [dim for axis, dim in declared.items() if axis in DATA_AXES]
    return named[0] if named else 0


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Cast every floating or complex tensor in a pytree; complex keeps a complex dtype."""
    return pytree.tree_map_only(Tensor, lambda tensor: cast_tensor(tensor, dtype), value)


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor in `dtype`, or its complex twin; other kinds unchanged."""
    if tensor.is_complex():
        return tensor.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _copied(value: Any) -> Any:
    """Copy every tensor of a pytree, so that a step may write into its batch."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return pytree.tree_map_only(Tensor, copy, value)


def _is_call(inputs: Any) -> bool:
    """Say whether inputs are `(args, kwargs)`: a tuple of a list or tuple and a dict."""
    return (
        type(inputs) is tuple
        and len(inputs) == 2
        and isinstance(inputs[0], (list, tuple))
        and isinstance(inputs[1], dict)
    )


def _positional(inputs: Any) -> tuple[Any, ...]:
    """Return inputs as positional arguments; a single value is one argument."""
    return tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)


def _plain(path: tuple[Any, ...]) -> list[Any]:
    """Return the keys of a pytree path."""
    return [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]


def _parameter_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameter names of a hook; empty where it has no signature."""
    try:
        return frozenset(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return frozenset()


def first_size(tensors: Mapping[str, Tensor], dims: Mapping[str, int | None]) -> int | None:
    """Return the batch size: along the first declared dim, else dim 0 of the first tensor."""
    for path, dim in dims.items():
        if dim is not None:
            return int(tensors[path].shape[dim])
    undeclared = [leaf for path, leaf in tensors.items() if leaf.ndim and path not in dims]
    inputs = [leaf for path, leaf in tensors.items() if leaf.ndim and not path.startswith(TARGETS)]
    first = (undeclared or inputs)[:1]
    return int(first[0].shape[0]) if first else None
