"""Stand-ins for stacked expert parameters [experts, ...] of which a rank has its experts only.

While the model's forward runs, a stand-in takes the parameter's place. An operator that works
expert by expert is computed where the experts are: rows go to the owners by all-to-all, results
come back whole. Anything else raises `NotDivisible`, and the parameter stays whole.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.styles.expert_calls import at_owner
from spmd_verify.styles.expert_owners import Owners, arrived, gone_back
from spmd_verify.styles.token_exchange import Route, returned, route, sent

_PRODUCTS: Final = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
_SUMS: Final = (torch.add, torch.mul, Tensor.add, Tensor.mul, Tensor.__add__, Tensor.__mul__)
_EXPERT_WISE: Final = frozenset((*_PRODUCTS, *_SUMS, Tensor.__radd__, Tensor.__rmul__))


class NotDivisible(Exception):
    """An operator that does not work expert by expert; the message says which."""

    def __init__(self, name: str, operator: Any) -> None:
        """Name the parameter and the operator."""
        text = getattr(operator, "__name__", str(operator))
        super().__init__(f"{name} is used by {text}")
        self.name = name


class StandIn:
    """What the three kinds share: they are no tensors, but torch's operators ask them first."""

    name: str
    local: Tensor
    owners: Owners

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute an operator that a stand-in is among the arguments of."""
        del types
        return _computed(func, args, kwargs or {})

    def __matmul__(self, other: Any) -> Any:
        return _computed(torch.matmul, (self, other), {})

    def __add__(self, other: Any) -> Any:
        return _computed(torch.add, (self, other), {})

    def __mul__(self, other: Any) -> Any:
        return _computed(torch.mul, (self, other), {})

    __radd__, __rmul__ = __add__, __mul__

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # what Python and torch ask of any object
            raise AttributeError(attribute)
        raise NotDivisible(self.name, attribute)

    @property
    def dtype(self) -> torch.dtype:
        """Return the parameter's."""
        return self.local.dtype

    @property
    def device(self) -> torch.device:
        """Return the parameter's."""
        return self.local.device

    @property
    def ndim(self) -> int:
        """Return the number of dims."""
        return self.local.ndim

    def dim(self) -> int:
        """Return the number of dims."""
        return self.local.ndim

    def changed(self, local: Tensor) -> Any:
        """Return the same experts with another local tensor."""
        raise NotImplementedError

    def transpose(self, first: int, second: int) -> Any:
        """Exchange two dims, none of them that of the experts."""
        if 0 in (first % self.ndim, second % self.ndim):
            raise NotDivisible(self.name, "transpose")
        return self.changed(self.local.transpose(first, second))

    @property
    def mT(self) -> Any:
        """Exchange the last two dims."""
        return self.transpose(-2, -1)

    def unsqueeze(self, dim: int) -> Any:
        """Add a dim behind that of the experts."""
        if dim % (self.ndim + 1) == 0:
            raise NotDivisible(self.name, "unsqueeze")
        return self.changed(self.local.unsqueeze(dim))

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Change dtype or device."""
        return self.changed(self.local.to(*args, **kwargs))


@dataclass(frozen=True, eq=False)
class Stack(StandIn):
    """All experts, dim 0 of [experts, ...]; `local` has this rank's.

    Attributes:
        name: Of the parameter.
        local: [own experts, ...].
        owners: Who has which.
    """

    name: str
    local: Tensor
    owners: Owners

    @property
    def shape(self) -> torch.Size:
        """Return the sizes of all ranks' together."""
        return torch.Size((self.owners.count, *self.local.shape[1:]))

    def size(self, dim: int | None = None) -> Any:
        """Return `shape`, or one of it."""
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.owners.count

    def changed(self, local: Tensor) -> Stack:
        """Return the same experts with another local tensor."""
        return Stack(self.name, local, self.owners)

    def __getitem__(self, key: Any) -> Any:
        """Take one expert, each row's expert, or a view that keeps all experts."""
        if isinstance(key, Tensor) and not key.is_floating_point() and key.dtype != torch.bool:
            if key.ndim:
                return Picked(self.name, self.local, self.owners, key)
            key = int(key)
        if isinstance(key, int):
            return Single(self.name, self.local, self.owners, key % self.owners.count)
        if isinstance(key, tuple) and isinstance(key[0], slice) and key[0] == slice(None):
            return self.changed(self.local[key])
        raise NotDivisible(self.name, "__getitem__")


@dataclass(frozen=True, eq=False)
class Single(StandIn):
    """One expert's part, which its owner has; `view` is what was done to it since."""

    name: str
    local: Tensor
    owners: Owners
    expert: int
    view: Callable[[Tensor], Tensor] = lambda tensor: tensor

    @property
    def owner(self) -> int:
        """Return the rank that has it."""
        return self.expert // self.owners.per_rank

    def value(self) -> Tensor:
        """Return it; on its owner."""
        return self.view(self.local[self.expert - self.owners.range()[0]])

    def transpose(self, first: int, second: int) -> Single:
        """Exchange two dims."""
        inner = self.view
        return Single(self.name, self.local, self.owners, self.expert,
                      lambda tensor: inner(tensor).transpose(first, second))  # fmt: skip

    def t(self) -> Single:
        """Exchange its two dims."""
        return self.transpose(0, 1)

    @property
    def T(self) -> Single:
        """Exchange its two dims."""
        return self.transpose(0, 1)

    mT = T

    def unsqueeze(self, dim: int) -> Single:
        """Add a dim."""
        inner = self.view
        return Single(self.name, self.local, self.owners, self.expert,
                      lambda tensor: inner(tensor).unsqueeze(dim))  # fmt: skip


@dataclass(frozen=True, eq=False)
class Picked(StandIn):
    """Each entry's expert, [*entries, ...]; the owners have them, `local` is all of this rank's.

    Attributes:
        experts: Of every entry; one dim or more, such as [tokens, choices].
    """

    name: str
    local: Tensor
    owners: Owners
    experts: Tensor

    @property
    def ndim(self) -> int:
        """Return the number of dims, of the entries and of an expert."""
        return self.experts.ndim + self.local.ndim - 1

    def changed(self, local: Tensor) -> Picked:
        """Return the same entries with another local tensor."""
        return Picked(self.name, local, self.owners, self.experts)

    def transpose(self, first: int, second: int) -> Picked:
        """Exchange two dims, none of them of the entries."""
        return self.changed(self.local.transpose(self._inner(first), self._inner(second)))

    def unsqueeze(self, dim: int) -> Picked:
        """Add a dim behind those of the entries."""
        return self.changed(self.local.unsqueeze(self._inner(dim, self.ndim + 1)))

    def _inner(self, dim: int, ndim: int | None = None) -> int:
        """Return a dim of an expert as one of `local`."""
        inner = dim % (ndim or self.ndim) - self.experts.ndim
        if inner < 0:
            raise NotDivisible(self.name, "a view across its entries")
        return inner + 1

    def way(self) -> Route:
        """Return how the entries, as rows, travel to their experts."""
        return route(self.experts.reshape(-1) // self.owners.per_rank, self.owners.group)

    def values(self, way: Route) -> Tensor:
        """Return the experts of the rows this rank works on."""
        return self.local[self.experts.reshape(-1)[way.owned()] - self.owners.range()[0]]


def _computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute an operator of stand-ins and tensors; the result is whole on every rank."""
    if func is torch.einsum:
        equation, *operands = args
        operands = list(operands[0]) if isinstance(operands[0], (list, tuple)) else operands
    else:
        equation, operands = None, list(args)
    stands = [each for each in (*operands, *kwargs.values()) if isinstance(each, StandIn)]
    nested = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, StandIn)]
    first = nested[0]
    has_tokens = any(isinstance(each, Tensor) for each in (*operands, *kwargs.values()))
    is_one_kind = all(type(each) is type(first) for each in stands)
    if not has_tokens or not is_one_kind or len(nested) > len(stands):
        raise NotDivisible(first.name, func)
    if isinstance(first, Single):
        return _on_one(func, args, kwargs, first, stands)
    if isinstance(first, Picked):
        return _by_row(func, equation, operands, kwargs, first)
    assert isinstance(first, Stack), "the third kind"
    if equation is not None and not kwargs:
        return _einsum(equation, operands, first)
    if func not in _EXPERT_WISE or kwargs or len(operands) != 2:
        raise NotDivisible(first.name, func)
    return _broadcast(func, operands, first)


def _on_one(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], first: Single, stands: Sequence[Any]
) -> Any:
    """Compute any operator where its one expert is."""
    if any(each.expert != first.expert for each in stands):
        raise NotDivisible(first.name, func)

    def function(*own: Any, **named: Any) -> Any:
        values = [each.value() if isinstance(each, Single) else each for each in own]
        options = {k: v.value() if isinstance(v, Single) else v for k, v in named.items()}
        return func(*values, **options)

    used = [each.local for each in stands]  # one device has a gradient of the whole stack
    return at_owner(function, first.owner, first.owners.group, args, kwargs, used=used)


def _by_row(
    func: Any, equation: Any, operands: list[Any], kwargs: dict[str, Any], first: Picked
) -> Tensor:
    """Compute what works on each entry and its expert alone."""
    if func is Tensor.add_ and len(operands) == 2 and isinstance(operands[0], Tensor):
        target: Tensor = operands[0]
        return target.add_(_by_row(torch.add, None, [torch.zeros_like(target), first], {}, first))
    is_same = all(each.experts is first.experts for each in operands if isinstance(each, Picked))
    if kwargs or not is_same:
        raise NotDivisible(first.name, func)
    if equation is not None:
        return _einsum_by_row(equation, operands, first)
    lead = first.experts.shape
    inner = first.ndim - len(lead)
    fits = all(each.ndim == first.ndim for each in operands if isinstance(each, StandIn | Tensor))
    if func not in _EXPERT_WISE or not fits or (func in _PRODUCTS and inner < 2):
        raise NotDivisible(first.name, func)
    way = first.way()
    rows = [
        sent(each.expand(*lead, *each.shape[len(lead) :]).flatten(0, len(lead) - 1), way)
        if isinstance(each, Tensor)
        else each.values(way)
        if isinstance(each, Picked)
        else each
        for each in operands
    ]
    return returned(func(*rows), way).unflatten(0, lead)


def _einsum_by_row(equation: str, operands: list[Any], first: Picked) -> Tensor:
    """Compute an einsum whose first letters count entries; the result may sum over them."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    count = first.experts.ndim
    leads = {
        term[:count] for term, each in zip(terms, operands, strict=True) if isinstance(each, Picked)
    }
    lead = leads.pop()
    row = next(letter for letter in string.ascii_letters if letter not in equation)
    if leads or not arrow or "." in equation or len(set(lead)) < count:
        raise NotDivisible(first.name, torch.einsum)
    sizes = dict(zip(lead, first.experts.shape, strict=True))
    way = first.way()
    rows = []
    for term, each in zip(terms, operands, strict=True):
        rest = [letter for letter in term if letter not in lead]
        if isinstance(each, Picked):
            rows.append(each.values(way))
            continue
        whole = each.permute([term.index(letter) for letter in (*lead, *rest) if letter in term])
        for dim, letter in enumerate(lead):
            if letter not in term:
                whole = whole.unsqueeze(dim)
        whole = whole.expand(*sizes.values(), *whole.shape[count:])
        rows.append(sent(whole.flatten(0, count - 1), way))
    inner = ["".join(letter for letter in term if letter not in lead) for term in (*terms, right)]
    text = f"{','.join(row + each for each in inner[:-1])}->{row}{inner[-1]}"
    out = returned(torch.einsum(text, *rows), way).unflatten(0, first.experts.shape)
    return torch.einsum(f"{lead}{inner[-1]}->{right}", out)


def _einsum(equation: str, operands: list[Any], first: Stack) -> Tensor:
    """Compute an einsum whose one letter counts experts."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    letters = {
        term[0] for term, each in zip(terms, operands, strict=True) if isinstance(each, Stack)
    }
    letter = letters.pop()
    is_plain = arrow and not letters and letter.isalpha()
    if not is_plain or any(term.count(letter) > 1 for term in (*terms, right)):
        raise NotDivisible(first.name, torch.einsum)
    local = [
        each.local
        if isinstance(each, Stack)
        else arrived(each, _from_end(term, letter), first.owners)
        for term, each in zip(terms, operands, strict=True)
    ]
    return gone_back(torch.einsum(equation, *local), _from_end(right, letter), first.owners)


def _from_end(term: str, letter: str) -> int | None:
    """Return the negative dim of a letter; what stands before an ellipsis counts from the front."""
    if letter not in term:
        return None
    before, dots, _ = term.partition("...")
    if dots and letter in before:
        return before.index(letter)
    return term.index(letter) - len(term)


def _broadcast(func: Any, operands: list[Any], first: Stack) -> Tensor:
    """Compute a product or an elementwise operator that broadcasts over the experts' dim."""
    stacks = [each for each in operands if isinstance(each, Stack)]
    dims = {-each.ndim for each in stacks}
    dim = dims.pop()
    is_product = func in _PRODUCTS
    if dims or (is_product and dim > -3):
        raise NotDivisible(first.name, func)
    local = []
    for each in operands:
        if isinstance(each, Stack):
            local.append(each.local)
            continue
        if not isinstance(each, Tensor):
            local.append(each)
            continue
        if is_product and each.ndim < 2:
            raise NotDivisible(first.name, func)
        has_experts = each.ndim >= -dim and each.shape[dim] == first.owners.count
        local.append(arrived(each, dim if has_experts else None, first.owners))
    return gone_back(func(*local), dim, first.owners)
