"""Prove, operator by operator, that a step on one device rounds nothing in any layout.

A dispatch mode around the reference's step, outside the surrogates, so that it sees what they
are made of. Every storage has a shadow: S by element and the grid of what was added up. All
tensors are global. Normative: docs/design.md part 3.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.exact.kernels import kernel_errors
from spmd_verify.exact.places import Places
from spmd_verify.exact.rules import (
    ADDING,
    NO_GRID,
    STILL,
    Call,
    Inexact,
    Term,
    bits_of,
    seen,
)
from spmd_verify.exact.surrogates import ROUNDING_OPERATORS
from spmd_verify.user_code import one_line

aten = torch.ops.aten

# p, bits of the significand. Source: verdicts.md part 5.
PRECISION: Final[Mapping[torch.dtype, int]] = {
    torch.float64: 53,
    torch.float32: 24,
    torch.float16: 11,
    torch.bfloat16: 8,
}
_NOTHING: Final = frozenset(("detach_", "requires_grad_"))
_COMPARISONS: Final = frozenset(("gt", "lt", "ge", "le"))
_UNWRITTEN: Final = frozenset(
    ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
)


@dataclass
class Shadow:
    """What is known of one storage.

    Attributes:
        keeper: Keeps the storage alive, so that its address stays taken.
        bound: S of every element of the storage, float64 [elements]; None for dtypes that do
            not round.
        grid: See `Term`.
        doubt: Why its values may depend on the layout, None where they do not.
        error: Where the values are the direct result of one kernel that rounds, how far each
            may be off; the shape of the result.
    """

    keeper: Tensor
    bound: Tensor | None
    grid: int = NO_GRID
    doubt: str | None = None
    error: Tensor | None = None


class ExactnessProof(TorchDispatchMode):
    """Follows one step; see the module.

    Attributes:
        bits: The most that any sum needed.
        where: The operator and line that needed them.
        doubts: "operator at file:line" of every operator that raised a doubt, in order.
    """

    def __init__(self) -> None:
        """Know nothing yet: a storage that comes along first is taken as it is."""
        super().__init__()
        self.bits = 0
        self.where = ""
        self.doubts: dict[str, None] = {}
        self._shadows: dict[int, Shadow] = {}
        self._places = Places()
        self._leaked: str | None = None  # a number in doubt that Python has read

    def doubt_of(self, value: Tensor) -> str | None:
        """Return why a tensor may depend on the layout, None where it does not."""
        shadow = self._shadows.get(value.untyped_storage()._cdata)
        return self._leaked if shadow is None else shadow.doubt or self._leaked

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator and account for its results."""
        named = dict(kwargs or {})
        name = func.overloadpacket.__name__
        place = self._places.here()
        written = _written(func, args, named)
        for operand in pytree.tree_leaves((args, named)):
            if isinstance(operand, Tensor):
                self._shadow(operand)
        before = [self._twin(x) if any(x is w for w in written) else x for x in args]
        result = func(*args, **named)
        if name in _NOTHING:
            return result
        if written:
            self._account(_out_of_place(func), before, named, written, place)
            return result
        fresh = [
            x
            for x in pytree.tree_leaves(result)
            if not isinstance(x, Tensor) or x.untyped_storage()._cdata not in self._shadows
        ]
        if any(isinstance(x, Tensor) for x in fresh):
            if name in _UNWRITTEN:
                for tensor in fresh:
                    self._write(tensor, Term(torch.zeros((), dtype=torch.float64), NO_GRID))
            else:
                self._account(func, list(args), named, fresh, place)
        elif name == "_local_scalar_dense":
            self._leaked = self._leaked or self._shadow(args[0]).doubt
        return result

    # -- accounting ------------------------------------------------------------------------

    def _account(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], results: Any, place: str
    ) -> None:
        """Say what is known of the results of one operator."""
        name = func.overloadpacket.__name__.removesuffix("_")
        operands = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        doubtful = next((s for x in operands if (s := self._shadow(x)).doubt is not None), None)
        here = f"{name.strip('_')} at {place}"
        try:
            if doubtful is not None:
                self._pass_on(name, args, results, doubtful)
            elif name in ROUNDING_OPERATORS:
                self._round(name, args, results, here)
            else:
                self._keep(name, Call(func, args, kwargs, list(results), self._term), here)
        except Inexact as why:
            self.doubts.setdefault(str(why) or here)
            self._doubt(results, str(why) or here)

    def _keep(self, name: str, call: Call, here: str) -> None:
        """Apply the rule of an operator whose operands are exact.

        Raises:
            Inexact: No rule, or the dtype has too few bits.
        """
        results = call.results
        if not any(isinstance(x, Tensor) and is_inexact_dtype(x) for x in results):
            self._doubt(results, None)
            return
        rule = ADDING.get(name) or STILL.get(name)
        if rule is None or any(isinstance(x, Tensor) and x.is_complex() for x in results):
            raise Inexact
        try:
            terms = rule(call)
        except Inexact:
            raise
        except Exception as error:  # arguments that the rule's author has not met
            raise Inexact(f"{here}: its rule failed with {one_line(error)}") from error
        for value, term in zip(results, terms, strict=True):
            if term is not None and name in ADDING:
                self._check(value, term, here)
        for value, term in zip(results, terms, strict=True):
            if isinstance(value, Tensor):
                self._write(value, term)

    def _check(self, value: Tensor, term: Term, here: str) -> None:
        """Compare the bits that a sum needs with those its dtype has."""
        precision, needed = PRECISION[value.dtype], bits_of(term)
        if needed > precision:
            raise Inexact(f"{here} needs {needed} of {precision} bits")
        if bool(value.isnan().any()):
            raise Inexact(f"{here} gives NaN")
        if needed > self.bits:
            self.bits, self.where = needed, here

    def _round(self, name: str, args: Sequence[Any], results: Any, here: str) -> None:
        """Put the results of a kernel that rounds in doubt, and say how far they may be off."""
        for value, error in zip(results, kernel_errors(name, args, results), strict=True):
            self._write(value, None)
            shadow = self._shadow(value)
            shadow.doubt, shadow.error = here, error

    def _pass_on(self, name: str, args: Sequence[Any], results: Any, source: Shadow) -> None:
        """Spread a doubt, or take it away where nothing is near a boundary."""
        error = source.error if _is_direct(args, source, self._shadow) else None
        value = args[0]
        if error is not None and name in ("mul", "add") and isinstance(args[1], (int, float)):
            (result,) = results
            off = error * abs(args[1]) if name == "mul" else error
            self._doubt(results, source.doubt, off + result.abs() * torch.finfo(result.dtype).eps)
        elif error is not None and name in ("abs", "neg", "clone"):
            self._doubt(results, source.doubt, error)
        elif error is not None and name == "floor" and _is_beyond(value - value.round(), error):
            self._write(results[0], seen(results[0]))
        elif error is not None and name in _COMPARISONS and _is_beyond(value - args[1], error):
            self._doubt(results, None)
        else:
            self._doubt(results, source.doubt)

    def _doubt(self, results: Any, why: str | None, error: Tensor | None = None) -> None:
        """Put results in doubt; None for those that are exact and do not round."""
        for value in results:
            if isinstance(value, Tensor):
                before = self._shadows.get(value.untyped_storage()._cdata)
                self._write(value, None)
                shadow = self._shadow(value)
                shadow.doubt, shadow.error = why, error
                if before is not None and why is None:
                    shadow.doubt = before.doubt  # other parts of the storage

    # -- shadows ---------------------------------------------------------------------------

    def _shadow(self, value: Tensor) -> Shadow:
        """Return the shadow of a tensor's storage; one that is new is taken as it is."""
        key = value.untyped_storage()._cdata
        if key not in self._shadows:
            self._shadows[key] = Shadow(value, None)
            if _is_floating(value):
                whole = _whole(value)
                term = seen(whole)
                self._shadows[key] = Shadow(value, term.bound, term.grid)
        return self._shadows[key]

    def _term(self, value: Tensor) -> Term:
        """Return the term of a floating tensor."""
        shadow = self._shadow(value)
        if shadow.bound is None:
            raise Inexact  # another dtype's view of the storage
        place = (tuple(value.shape), value.stride(), value.storage_offset())
        return Term(shadow.bound.as_strided(*place), shadow.grid)

    def _write(self, value: Tensor, term: Term | None) -> None:
        """Set what is known of a tensor; other parts of its storage stay as they are."""
        key = value.untyped_storage()._cdata
        known = self._shadows.get(key)
        if term is None:
            self._shadows[key] = Shadow(value, None if known is None else known.bound)
            return
        count = value.untyped_storage().nbytes() // value.element_size()
        is_whole = value.numel() == count
        if known is None or known.bound is None or is_whole:
            known = Shadow(value, torch.zeros(count, dtype=torch.float64))
        assert known.bound is not None
        place = (tuple(value.shape), value.stride(), value.storage_offset())
        known.bound.as_strided(*place).copy_(term.bound)
        known.grid = max(known.grid, term.grid)
        self._shadows[key] = known

    def _twin(self, value: Tensor) -> Tensor:
        """Return a copy of a tensor about to be written, with what is known of it."""
        shadow = self._shadow(value)
        twin = value.detach().clone()
        if _is_floating(value) and shadow.bound is not None:
            self._write(twin, self._term(value))
        own = self._shadow(twin)
        own.doubt, own.error = shadow.doubt, shadow.error
        return twin


def _is_beyond(gap: Tensor, error: Tensor) -> bool:
    """Say whether every value is farther from its boundary than it may be off."""
    off = error.to(torch.float64)
    same = gap.shape == off.shape
    return bool((gap.abs() > (off if same or not off.numel() else off.max())).all())


def _is_direct(args: Sequence[Any], source: Shadow, shadow: Any) -> bool:
    """Say whether the first operand is the only one in doubt."""
    first, *rest = args
    return (
        isinstance(first, Tensor)
        and shadow(first) is source
        and all(shadow(x).doubt is None for x in pytree.tree_leaves(rest) if isinstance(x, Tensor))
    )


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            found += [x for x in pytree.tree_leaves(given) if isinstance(x, Tensor)]
    return found


def _out_of_place(func: Any) -> Any:
    """Return the operator that computes what an in-place one writes; itself where none is."""
    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"), None)
    return getattr(packet, func._overloadname, func)


def _whole(value: Tensor) -> Tensor:
    """Return everything in a tensor's storage, [elements]."""
    storage = value.untyped_storage()
    count = storage.nbytes() // value.element_size()
    whole = torch.empty(0, dtype=value.dtype, device=value.device)
    return whole.set_(storage, 0, (count,), (1,))


def is_inexact_dtype(value: Tensor) -> bool:
    """Say whether a tensor's dtype rounds."""
    return value.is_floating_point() or value.is_complex()


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
