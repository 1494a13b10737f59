"""Operators that decide between values, and by how much each decision was taken.

A *selecting* operator picks some of the values of a row (topk, sort, a pooling window); an
*elementwise* one puts every value on a side of a boundary (relu, a comparison, round). What
they give jumps where two values cross, so rounding alone can change it. Operators that are
continuous and whose gradient jumps decide in their backward. Local tensors, any rank's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

# Given the rows of an operator and the sides it put them on, other rows to run it on, or None.
Choice = Callable[["Call", list[Tensor], Tensor], list[Tensor] | None]


class Decider(Protocol):
    """How one operator decides. R rows of n values; m numbers say what was decided in a row.

    Attributes:
        is_elementwise: Every value is decided alone: m is n.
        is_told_by_operands: The sides are known before the operator runs.
    """

    @property
    def is_elementwise(self) -> bool: ...  # noqa: D102 - above

    @property
    def is_told_by_operands(self) -> bool: ...  # noqa: D102 - above

    def operands(self, call: Call) -> list[tuple[str, Tensor]]:
        """Return what is compared, by argument name; all of one shape."""
        ...

    def as_rows(self, call: Call, operand: Tensor) -> Tensor:
        """Return an operand as [R, n]."""
        ...

    def from_rows(self, call: Call, rows: Tensor, shape: torch.Size) -> Tensor:
        """Return rows in the operand's shape."""
        ...

    def margins(self, call: Call, rows: Sequence[Tensor]) -> Tensor:
        """Return how far each decision was from another one: [R, n] elementwise, else [R]."""
        ...

    def sides(self, call: Call, rows: Sequence[Tensor], result: Any) -> Tensor:
        """Return what was decided, float64 [R, m]."""
        ...


@dataclass(frozen=True)
class Call:
    """One call of a deciding operator.

    Attributes:
        name: `topk.default`; in-place forms have the name of the others.
        func: The operator.
        arguments: By name, defaults included.
        decider: How it decides.
        is_in_place: Whether it overwrites its operand.
    """

    name: str
    func: Any
    arguments: Mapping[str, Any]
    decider: Decider
    is_in_place: bool = False

    def rows(self) -> list[Tensor]:
        """Return the operands as [R, n] each."""
        return [self.decider.as_rows(self, value) for _, value in self.decider.operands(self)]

    def run(self, rows: Sequence[Tensor] | None = None) -> Any:
        """Run the operator, on other rows where given."""
        arguments = dict(self.arguments)
        operands = self.decider.operands(self) if rows is not None else []
        for (name, old), new in zip(operands, rows or (), strict=True):
            value = self.decider.from_rows(self, new, old.shape).to(old.dtype)
            if self.is_in_place:
                old.copy_(value)
            else:
                arguments[name] = value
        return self.func(**arguments)

    def decide(self, choose: Choice) -> Any:
        """Run the operator, on what `choose` gives for its rows and sides where it gives any."""
        rows = self.rows()
        if self.decider.is_told_by_operands:
            return self.run(choose(self, rows, self.decider.sides(self, rows, None)))
        result = self.run()
        other = choose(self, rows, self.decider.sides(self, rows, result))
        return result if other is None else self.run(other)


@dataclass(frozen=True)
class _Elementwise:
    """Shared by operators that decide every value alone; a row is the last dim."""

    is_elementwise = True

    def as_rows(self, call: Call, operand: Tensor) -> Tensor:  # noqa: ARG002 - see `Decider`
        """Return [R, n]."""
        return operand.reshape(-1, operand.shape[-1] if operand.ndim else 1)

    def from_rows(self, call: Call, rows: Tensor, shape: torch.Size) -> Tensor:  # noqa: ARG002
        """Return rows in the operand's shape."""
        return rows.reshape(shape)


@dataclass(frozen=True)
class Kink(_Elementwise):
    """A function with a jump, in itself or its derivative, at known places.

    Attributes:
        operand: Name of the argument.
        above: Places b where x > b decides, numbers or names of arguments; `-name` negates.
        at_least: Places where x >= b decides.
        is_open: Values exactly at a place are no decision (what relu made zero).
    """

    operand: str
    above: tuple[float | str, ...] = ()
    at_least: tuple[float | str, ...] = ()
    is_open: bool = False
    is_told_by_operands = True

    def operands(self, call: Call) -> list[tuple[str, Tensor]]:
        """Return the one operand."""
        return [(self.operand, call.arguments[self.operand])]

    def margins(self, call: Call, rows: Sequence[Tensor]) -> Tensor:
        """Return the distance to the nearest place, [R, n]."""
        places = [_place(call, place) for place in (*self.above, *self.at_least)]
        nearest = torch.stack([_distance(rows[0], rows[0].new_tensor(p)) for p in places]).amin(0)
        return torch.where(nearest == 0, math.inf, nearest) if self.is_open else nearest

    def sides(self, call: Call, rows: Sequence[Tensor], result: Any) -> Tensor:  # noqa: ARG002
        """Return how many places each value is beyond, [R, n]."""
        found = torch.zeros(rows[0].shape, dtype=torch.float64)
        for place in self.above:
            found += rows[0] > _place(call, place)
        for place in self.at_least:
            found += rows[0] >= _place(call, place)
        return found


@dataclass(frozen=True)
class Comparison(_Elementwise):
    """`gt`, `eq` and the like, of a tensor with a number or another tensor."""

    is_told_by_operands = False

    def operands(self, call: Call) -> list[tuple[str, Tensor]]:
        """Return the tensors compared, each in their common shape."""
        names = [name for name in ("self", "other") if isinstance(call.arguments[name], Tensor)]
        values = torch.broadcast_tensors(*[call.arguments[name] for name in names])
        return list(zip(names, values, strict=True))

    def margins(self, call: Call, rows: Sequence[Tensor]) -> Tensor:
        """Return the distance of what is compared, [R, n]."""
        other = rows[1] if len(rows) > 1 else rows[0].new_tensor(float(call.arguments["other"]))
        return _distance(rows[0], other)

    def sides(self, call: Call, rows: Sequence[Tensor], result: Any) -> Tensor:  # noqa: ARG002
        """Return the answers, [R, n]."""
        return self.as_rows(call, result).to(torch.float64)


@dataclass(frozen=True)
class Step(_Elementwise):
    """`round`, `floor` and the like: steps at every whole number, or half way between two."""

    offset: float = 0.0
    is_told_by_operands = False

    def operands(self, call: Call) -> list[tuple[str, Tensor]]:
        """Return the one operand."""
        return [("self", call.arguments["self"])]

    def margins(self, call: Call, rows: Sequence[Tensor]) -> Tensor:  # noqa: ARG002 - see `Decider`
        """Return the distance to the nearest step, [R, n]."""
        shifted = rows[0] + self.offset
        return (shifted - shifted.round()).abs()

    def sides(self, call: Call, rows: Sequence[Tensor], result: Any) -> Tensor:  # noqa: ARG002
        """Return the values stepped to, [R, n]."""
        return self.as_rows(call, result).to(torch.float64)


@dataclass(frozen=True)
class Selection:
    """An operator that picks values along a dim, and says which by their index.

    Attributes:
        index_at: Position of the indices in its result, None where they are all of it.
        gaps: Which gaps of the sorted row matter: `(arguments, n) -> (first, last)`, exclusive;
            gap i is between the values of rank i and i + 1.
        is_descending: Whether rank 0 is the largest, or the argument that says so.
    """

    index_at: int | None
    gaps: Callable[[Mapping[str, Any], int], tuple[int, int]]
    is_descending: bool | str = True
    is_elementwise = False
    is_told_by_operands = False

    def operands(self, call: Call) -> list[tuple[str, Tensor]]:
        """Return the one operand."""
        return [("self", call.arguments["self"])]

    def as_rows(self, call: Call, operand: Tensor) -> Tensor:
        """Return [R, n], n along the dim; all values in one row where there is no dim."""
        dim = call.arguments["dim"]
        if dim is None or not operand.ndim:
            return operand.reshape(1, -1)
        return operand.movedim(dim, -1).reshape(-1, operand.shape[dim])

    def from_rows(self, call: Call, rows: Tensor, shape: torch.Size) -> Tensor:
        """Return rows in the operand's shape."""
        dim = call.arguments["dim"]
        if dim is None or not len(shape):
            return rows.reshape(shape)
        moved = torch.empty(shape, device="meta").movedim(dim, -1).shape
        return rows.reshape(moved).movedim(-1, dim)

    def margins(self, call: Call, rows: Sequence[Tensor]) -> Tensor:
        """Return the smallest gap that matters, [R]."""
        flag = self.is_descending
        is_descending = call.arguments[flag] if isinstance(flag, str) else flag
        ordered = rows[0].sort(dim=-1, descending=bool(is_descending)).values
        first, last = self.gaps(call.arguments, ordered.shape[1])
        between = _distance(ordered[:, :-1], ordered[:, 1:])[:, max(first, 0) : last]
        return between.amin(1) if between.shape[1] else rows[0].new_full((len(ordered),), math.inf)

    def sides(self, call: Call, rows: Sequence[Tensor], result: Any) -> Tensor:
        """Return the indices, [R, m]."""
        index = result if self.index_at is None else result[self.index_at]
        dim = call.arguments["dim"]
        if dim is not None and index.ndim == call.arguments["self"].ndim and index.ndim:
            index = index.movedim(dim, -1)
        return index.reshape(len(rows[0]), -1).to(torch.float64)


@dataclass(frozen=True)
class Pooling:
    """Largest values of windows; a row is one plane of one sample.

    Attributes:
        num_dims: Dims that windows extend over.
    """

    num_dims: int
    is_elementwise = False
    is_told_by_operands = False

    def operands(self, call: Call) -> list[tuple[str, Tensor]]:
        """Return the one operand."""
        return [("self", call.arguments["self"])]

    def as_rows(self, call: Call, operand: Tensor) -> Tensor:  # noqa: ARG002 - see `Decider`
        """Return [planes, values of a plane]."""
        return operand.reshape(-1, math.prod(operand.shape[-self.num_dims :]))

    def from_rows(self, call: Call, rows: Tensor, shape: torch.Size) -> Tensor:  # noqa: ARG002
        """Return rows in the operand's shape."""
        return rows.reshape(shape)

    def margins(self, call: Call, rows: Sequence[Tensor]) -> Tensor:
        """Return the smallest gap between the two largest values of a window, [planes]."""
        sizes = call.arguments["self"].shape[-self.num_dims :]
        windows = rows[0].reshape(-1, *sizes)
        kernel = self._pair(call.arguments["kernel_size"])
        strides = self._pair(call.arguments["stride"]) or kernel
        dilations = self._pair(call.arguments["dilation"])
        padding = self._pair(call.arguments["padding"])
        extents = [(size - 1) * d + 1 for size, d in zip(kernel, dilations, strict=True)]
        # With ceil_mode windows may reach beyond the padding: at most a stride.
        beyond = [stride - 1 if call.arguments["ceil_mode"] else 0 for stride in strides]
        sides = [(p, p + more) for p, more in zip(padding, beyond, strict=True)]
        edges = [side for pair in reversed(sides) for side in pair]
        windows = F.pad(windows, edges, value=-math.inf)
        for dim, (extent, stride, d) in enumerate(zip(extents, strides, dilations, strict=True)):
            windows = windows.unfold(1 + dim, extent, stride)[..., ::d]
        windows = windows.reshape(len(windows), -1, math.prod(kernel))
        if windows.shape[2] < 2:
            return rows[0].new_full((len(windows),), math.inf)
        two = windows.topk(2, dim=-1).values
        gaps = torch.where(two[..., 1] == -math.inf, math.inf, _distance(two[..., 0], two[..., 1]))
        return gaps.amin(1)

    def sides(self, call: Call, rows: Sequence[Tensor], result: Any) -> Tensor:  # noqa: ARG002
        """Return the indices, [planes, windows]."""
        return result[1].reshape(len(rows[0]), -1).to(torch.float64)

    def _pair(self, value: Sequence[int]) -> list[int]:
        """Return one number per dim; empty for none."""
        given = list(value)
        return given * self.num_dims if len(given) == 1 else given


def _place(call: Call, place: float | str) -> float:
    """Return a place of a kink: itself, or the argument it names."""
    if not isinstance(place, str):
        return place
    sign = -1.0 if place.startswith("-") else 1.0
    return sign * float(call.arguments[place.removeprefix("-")])


def _distance(left: Tensor, right: Tensor) -> Tensor:
    """Return |left - right|; 0 for equal infinities."""
    return torch.where(left == right, 0.0, (left - right).abs())


def _first_gap(_arguments: Mapping[str, Any], _n: int) -> tuple[int, int]:
    return 0, 1


def _all_gaps(_arguments: Mapping[str, Any], n: int) -> tuple[int, int]:
    return 0, n - 1


def _gaps_to_k(arguments: Mapping[str, Any], _n: int) -> tuple[int, int]:
    return 0, int(arguments["k"])


def _gaps_at_k(arguments: Mapping[str, Any], _n: int) -> tuple[int, int]:
    return int(arguments["k"]) - 2, int(arguments["k"])


def _gaps_at_middle(_arguments: Mapping[str, Any], n: int) -> tuple[int, int]:
    return (n - 1) // 2 - 1, (n - 1) // 2 + 1


# By operator and overload of `torch.ops.aten` (torch 2.13). Operators that are continuous are
# absent and their backward is there; a maximum over a dim without indices compares in backward.
DECIDERS: Final[Mapping[str, Decider]] = {
    "topk.default": Selection(1, _gaps_to_k, "largest"),
    "sort.default": Selection(1, _all_gaps),
    "sort.stable": Selection(1, _all_gaps),
    "argmax.default": Selection(None, _first_gap),
    "argmin.default": Selection(None, _first_gap, is_descending=False),
    "max.dim": Selection(1, _first_gap),
    "min.dim": Selection(1, _first_gap, is_descending=False),
    "kthvalue.default": Selection(1, _gaps_at_k, is_descending=False),
    "median.dim": Selection(1, _gaps_at_middle, is_descending=False),
    "nanmedian.dim": Selection(1, _gaps_at_middle, is_descending=False),
    "max_pool2d_with_indices.default": Pooling(2),
    "max_pool3d_with_indices.default": Pooling(3),
    "relu.default": Kink("self", above=(0.0,)),
    "threshold.default": Kink("self", above=("threshold",)),
    "threshold_backward.default": Kink("self", above=("threshold",), is_open=True),
    "leaky_relu_backward.default": Kink("self", above=(0.0,)),
    "_prelu_kernel_backward.default": Kink("self", above=(0.0,)),
    "hardtanh_backward.default": Kink("self", above=("min_val",), at_least=("max_val",)),
    "hardsigmoid_backward.default": Kink("self", above=(-3.0,), at_least=(3.0,)),
    "hardswish_backward.default": Kink("self", above=(-3.0,), at_least=(3.0,)),
    "hardshrink.default": Kink("self", above=("lambd",), at_least=("-lambd",)),
    "hardshrink_backward.default": Kink("self", above=("lambd",), at_least=("-lambd",)),
    "softshrink_backward.default": Kink("self", above=("lambd",), at_least=("-lambd",)),
    "sign.default": Kink("self", above=(0.0,), at_least=(0.0,)),
    "sgn.default": Kink("self", above=(0.0,), at_least=(0.0,)),
    "floor.default": Step(),
    "ceil.default": Step(),
    "trunc.default": Step(),
    "round.default": Step(0.5),
    **{
        f"{name}.{overload}": Comparison()
        for name in ("gt", "ge", "lt", "le", "eq", "ne")
        for overload in ("Scalar", "Tensor")
    },
}

# Dtypes whose noise is known: those of `verdict.UNIT_ROUNDOFF`.
_ROUNDED: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def is_deciding(func: Any) -> bool:
    """Say whether an operator is one of the table's, whatever it is called with."""
    return _found(func) is not None


def _found(func: Any) -> tuple[str, Decider, bool] | None:
    """Return an operator's name in the table, how it decides and whether it works in place."""
    if getattr(func, "namespace", "") != "aten":
        return None
    packet, _, overload = str(func).removeprefix("aten.").partition(".")
    decider = DECIDERS.get(f"{packet}.{overload}")
    if decider is not None:
        return f"{packet}.{overload}", decider, False
    name = f"{packet.removesuffix('_')}.{overload}"
    decider = DECIDERS.get(name)
    if decider is None or not packet.endswith("_") or not decider.is_told_by_operands:
        return None
    return name, decider, True


def call_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call | None:
    """Return a call as a decision; None where the operator decides nothing by rounded values."""
    found = _found(func)
    if found is None:
        return None
    name, decider, is_in_place = found
    arguments = {
        argument.name: argument.default_value
        for argument in func._schema.arguments
        if argument.has_default_value()
    }
    names = [argument.name for argument in func._schema.arguments]
    arguments |= {**dict(zip(names, args, strict=False)), **kwargs}
    call = Call(name, func, arguments, decider, is_in_place)
    operands = decider.operands(call)
    if any(value.dtype not in _ROUNDED or not value.numel() for _, value in operands):
        return None
    return call
