"""What an operator's rule says: which placements of its inputs give which of its outputs.

A rule speaks of one mesh axis at a time. Most are *dim rules*: they label the dims of the
operands and of the outputs; a label may be sharded in all of them at once, and an output
without the label is then the reduction over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from spmd.layout import REPLICATE, Layout, Partial, Placement, ReduceOp, Shard

Label = Any
Labels = Sequence[Label | None]


@dataclass(frozen=True)
class Candidate:
    """One way to run an operator on one mesh axis.

    Attributes:
        inputs: Placement each tensor operand must have, in operand order.
        outputs: Placement each tensor output then has.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]


@dataclass(frozen=True)
class Call:
    """One operator call of the global graph.

    Attributes:
        node: The global node.
        operands: Its tensor inputs (fake, global shapes), in the order they appear in the
            flattened arguments; None entries of lists are skipped.
        outputs: Its tensor outputs (fake, global shapes), None where a mask left one out.
        local_draws: Whether ranks may draw their own random numbers (`rng="local"`).
        gradient: Where the result is to lie if it is a finished gradient.
    """

    node: fx.Node
    operands: tuple[Tensor, ...]
    outputs: tuple[Tensor | None, ...]
    local_draws: bool = False
    gradient: Layout | None = None

    @property
    def target(self) -> Any:
        """The operator overload."""
        return self.node.target

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its schema name; nodes are returned as nodes."""
        for position, schema in enumerate(self.target._schema.arguments):
            if schema.name == name:
                if position < len(self.node.args):
                    return self.node.args[position]
                if name in self.node.kwargs:
                    return self.node.kwargs[name]
                return schema.default_value if schema.has_default_value() else default
        return default


class Rule:
    """Base of all rules."""

    def candidates(
        self, call: Call, placements: Sequence[Sequence[Placement]], num_ranks: int
    ) -> Iterable[Candidate]:
        """Yield ways to run `call` on an axis of `num_ranks`.

        Args:
            call: The operator call.
            placements: For each operand, the placements it already has on the axis (one
                per form in which it exists).
            num_ranks: Ranks on the axis.

        "All replicated" need not be yielded; it is always possible.
        """
        raise NotImplementedError

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Put the local operator into the graph; return its node.

        Args:
            emitter: Has `call`, `operator` (skips the kernel where a rank's part is empty),
                `sizes(shape, layout)`, `pick(axis, values)` and `inputs` (operand layouts).
            call: The global call.
            args: Positional arguments with local nodes in the place of global ones.
            kwargs: The same for keyword arguments.
            layouts: Layouts of the outputs.
        """
        return emitter.operator(call.target, args, kwargs)


LocalArgs = Callable[[Any, Call, list[Any], dict[str, Any], Any], None]


@dataclass
class DimRule(Rule):
    """A rule stated by labelled dims.

    Attributes:
        inputs: For each operand, a label per dim; None is a dim that must be whole.
        outputs: The same for each output.
        reduce: Labels over which outputs without them are reduced, and by what.
        linear: Sets of operands that may be partial sums together; every output then is.
        local_args: Rewrites arguments that state sizes, in place.
    """

    inputs: Sequence[Labels]
    outputs: Sequence[Labels]
    reduce: dict[Label, ReduceOp] = field(default_factory=dict)
    linear: Sequence[frozenset[int]] = ()
    local_args: LocalArgs | None = None
    # Class attribute: whether a rank with an empty operand has nothing to compute.
    skips_empty: ClassVar[bool] = True

    def candidates(
        self, call: Call, placements: Sequence[Sequence[Placement]], num_ranks: int
    ) -> Iterable[Candidate]:
        """Yield one candidate per label some operand is sharded on, and the linear ones."""
        seen: set[Any] = set()
        for operand, forms in enumerate(placements):
            for placement in forms:
                if isinstance(placement, Shard):
                    label = self.inputs[operand][placement.dim]
                    if label is None or (label, placement.moved(0)) in seen:
                        continue
                    seen.add((label, placement.moved(0)))
                    candidate = self._sharded(label, placement)
                    if candidate is not None:
                        yield candidate
        yield from self._linear_candidates(placements)

    def _sharded(self, label: Label, placement: Shard) -> Candidate | None:
        inputs = tuple(_place(labels, label, placement) for labels in self.inputs)
        outputs: list[Placement] = []
        for labels in self.outputs:
            placed = _place(labels, label, placement)
            if isinstance(placed, Shard):
                outputs.append(placed)
            elif label in self.reduce:
                outputs.append(Partial(self.reduce[label]))
            else:
                return None
        return Candidate(inputs, tuple(outputs))

    def _linear_candidates(self, placements: Sequence[Sequence[Placement]]) -> Iterable[Candidate]:
        partial = Partial("sum")
        for together in self.linear:
            if any(partial in placements[i] for i in together):
                inputs = tuple(
                    partial if i in together else REPLICATE for i in range(len(placements))
                )
                yield Candidate(inputs, (partial,) * len(self.outputs))

    def emit(self, emitter: Any, call: Call, args: Any, kwargs: Any, layouts: Any) -> Any:
        """Put the local operator into the graph, its size arguments made local."""
        if self.local_args is not None:
            args, kwargs = list(args), dict(kwargs)
            self.local_args(emitter, call, args, kwargs, layouts)
        put = emitter.operator if self.skips_empty else emitter.call
        return put(call.target, tuple(args), kwargs)


def _place(labels: Labels, label: Label, placement: Shard) -> Placement:
    for dim, own in enumerate(labels):
        if own is not None and own == label:
            return placement.moved(dim)
    return REPLICATE


class Whole(Rule):
    """Runs on replicated operands only, by the operator's nature: a rule, not a fallback."""

    def candidates(self, call: Call, placements: Any, num_ranks: int) -> Iterable[Candidate]:
        """Yield nothing; "all replicated" is always possible."""
        return ()


RuleMaker = Callable[[Call], Rule | None]
_makers: dict[Any, RuleMaker] = {}


def rule(*targets: Any) -> Callable[[RuleMaker], RuleMaker]:
    """Register a function that makes the rule of a call, for operators or whole packets."""

    def register(maker: RuleMaker) -> RuleMaker:
        for target in targets:
            if isinstance(target, torch._ops.OpOverloadPacket):
                for overload in target.overloads():
                    _makers[getattr(target, overload)] = maker
            else:
                _makers[target] = maker
        return maker

    return register


def find_rule(call: Call) -> Rule | None:
    """Return the rule of a call, or None if the operator has none."""
    maker = _makers.get(call.target)
    if maker is not None:
        return maker(call)
    if isinstance(call.target, torch._ops.OpOverload):
        for condition, fallback in _general:
            if condition(call.target):
                return fallback(call)
    return None


_general: list[tuple[Callable[[Any], bool], RuleMaker]] = []


def general_rule(condition: Callable[[Any], bool]) -> Callable[[RuleMaker], RuleMaker]:
    """Register a rule for every operator that satisfies a condition and has no own rule."""

    def register(maker: RuleMaker) -> RuleMaker:
        _general.append((condition, maker))
        return maker

    return register


def aligned(shape: Sequence[int], ndim: int, out_shape: Sequence[int]) -> list[Label | None]:
    """Label the dims of a broadcast operand: label i is output dim i; size-1 dims have none."""
    shift = ndim - len(shape)
    return [(i + shift) if size == out_shape[i + shift] else None for i, size in enumerate(shape)]
