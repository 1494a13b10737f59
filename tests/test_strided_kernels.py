"""Kernels of torch that misread operands with gaps are all known to the emitter.

A rank's operand may be a slice where one device has the whole value. Every operator that the
constructs call is therefore asked again with each operand as a slice of a larger tensor whose
rest is NaN: another result, or an error, means that the kernel reads memory and not strides.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from constructs import Construct
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from spmd.emit import READ_IN_ORDER

aten = torch.ops.aten
# Draws, of which no two are alike, and a factorisation whose stored form follows the strides:
# its readers are given what it stored. Views of a rank are emitted as reshapes.
NOT_COMPARED = {
    aten.bernoulli.default, aten.bernoulli.p, aten.multinomial.default, aten.normal.float_Tensor,
    aten.normal.Tensor_float, aten.normal.Tensor_Tensor, aten.poisson.default,
    aten._unsafe_view.default, aten._linalg_slogdet.default,
}  # fmt: skip
# Ask for memory, not for values.
FACTORIES = ("empty", "rand", "as_strided")


class GapProbe(TorchDispatchMode):
    """Repeats operators with gaps in one operand at a time.

    Attributes:
        asked: (operator, position, dims, dim with gaps) that were tried.
        misread: (operator, position) whose kernel gave another result or an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[tuple[Any, int, int, int]] = set()
        self.misread: set[tuple[Any, int]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [a.detach() if isinstance(a, Tensor) else a for a in args]
        result = func(*args, **kwargs)
        if _is_compared(func):
            for position, operand in enumerate(operands):
                if isinstance(operand, Tensor) and operand.numel():
                    for dim in range(operand.dim()):
                        self._ask(func, operands, kwargs, position, dim, result)
        return result

    def _ask(
        self, func: Any, operands: list[Any], kwargs: Any, position: int, dim: int, expected: Any
    ) -> None:
        key = (func, position, operands[position].dim(), dim)
        if key in self.asked:
            return
        self.asked.add(key)
        changed = list(operands)
        changed[position] = with_gaps(operands[position], dim)
        try:
            is_same = _same(func(*changed, **kwargs), expected)
        except (RuntimeError, IndexError):
            is_same = False
        if not is_same:
            self.misread.add((func, position))


def with_gaps(value: Tensor, dim: int) -> Tensor:
    """Return the same value as a slice of a tensor that is NaN (or zero) elsewhere."""
    size = value.shape[dim]
    shape = [*value.shape[:dim], 2 * size + 1, *value.shape[dim + 1 :]]
    fill = float("nan") if value.is_floating_point() or value.is_complex() else 0
    part = torch.full(shape, fill, dtype=value.dtype).narrow(dim, 1, size)
    return part.copy_(value)


def _is_compared(func: Any) -> bool:
    returned_views = any(r.alias_info for r in func._schema.returns)
    return (
        func.namespace == "aten"
        and not func._schema.is_mutable
        and not returned_views
        and func not in NOT_COMPARED
        and not any(word in func.__name__ for word in FACTORIES)
    )


def _same(actual: Any, expected: Any) -> bool:
    pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
        for a, b in pairs
        if isinstance(a, Tensor)
    )


def _constructs() -> Iterator[Construct]:
    for path in sorted(Path(__file__).parent.glob("test_constructs_*.py")):
        for table in list(vars(importlib.import_module(path.stem)).values()):
            if isinstance(table, list | tuple):
                yield from (row for row in table if isinstance(row, Construct))


@contextmanager
def float64_default() -> Iterator[None]:
    """Make float64 the default dtype inside the block: factory calls follow the parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore")
def test_every_kernel_that_misreads_gaps_is_given_none() -> None:
    probe = GapProbe()

    with float64_default():
        for construct in _constructs():
            torch.manual_seed(0)
            model = construct.model()
            optimizer = construct.optimizer(model.parameters())
            batch = construct.batch(construct.sizes[0] if construct.sizes else 5)
            with probe:
                construct.step(model, optimizer, *batch)

    known = {(func, place) for func, places in READ_IN_ORDER.items() for place in places}
    assert probe.misread <= known, probe.misread - known
    assert len(probe.asked) > 1500
    # The probe can fail, and no operator is listed without need. Positions may be: whether gaps
    # in statistics show depends on the batch size.
    assert {func for func, _ in probe.misread} == set(READ_IN_ORDER)
