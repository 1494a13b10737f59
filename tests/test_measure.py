"""Measured together, parts give the very numbers that each gives alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from spmd_verify.layouts import Region
from spmd_verify.measure import Task, measure
from spmd_verify.norms import LARGEST_STACKED
from spmd_verify.stored.mapped import MappedTensors
from spmd_verify.stored.store import Entry

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def task(local: Tensor, expected: Tensor, exact: Tensor) -> Task:
    """Return the task of measuring a whole tensor."""
    shape = list(expected.shape)
    value = float(expected) if expected.numel() == 1 and not expected.is_complex() else None
    entry = Entry(step=1, stage="gradients", name="w", shape=shape, dtype="", value=value)
    part = Region(tuple(((0, size),) for size in shape))
    return Task(local, expected, exact, entry, "free", part)


def drawn(
    shape: tuple[int, ...], dtype: torch.dtype, kind: str, generator: torch.Generator
) -> Task:
    """Return a task whose candidate differs from the reference as `kind` says."""
    wide = torch.randn(shape, generator=generator, dtype=torch.float64)
    exact = wide * torch.exp(3 * torch.randn(shape, generator=generator, dtype=torch.float64))
    expected = exact.to(dtype)
    local = expected.clone()
    if kind == "near" and dtype.is_floating_point:
        local = (exact * (1 + 1e-3 * torch.randn(shape, generator=generator))).to(dtype)
    elif kind == "zero":
        local.zero_()
    elif kind in ("nan", "inf") and dtype.is_floating_point and local.numel():
        local.view(-1)[local.numel() // 2] = float(kind)
    elif kind == "both" and dtype.is_floating_point and local.numel():
        for value in (local, expected, exact):
            value.view(-1)[0] = float("nan")
    elif kind == "huge" and dtype == torch.float64:
        local.fill_(1e300)
    elif kind == "strided" and len(shape) > 1:
        local = local.transpose(0, 1).contiguous().transpose(0, 1)
    return task(local, expected, exact if dtype.is_floating_point else expected)


@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17, 64]), max_size=3).map(tuple),
            st.sampled_from(DTYPES),
            st.sampled_from(["same", "near", "zero", "nan", "inf", "both", "huge", "strided"]),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 1000),
)
@settings(deadline=None, max_examples=150)
def test_together_and_alone_give_the_same(
    wanted: list[tuple[tuple[int, ...], torch.dtype, str]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Each of them twice or more: the second and third share its shape.
    tasks = [
        drawn(shape, dtype, how, generator)
        for shape, dtype, kind in wanted
        for how in (kind, "near", kind)
    ]
    measure(tasks)

    for each in tasks:
        assert repr(each.found) == repr(each.alone())


def test_a_part_too_large_to_be_stacked_is_measured_all_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (LARGEST_STACKED // 8, 9)
    tasks = [drawn(shape, torch.float32, "near", generator) for _ in range(3)]
    measure(tasks)

    for each in tasks:
        assert repr(each.found) == repr(each.alone())


def test_complex_parts_are_measured() -> None:
    exact = torch.randn(4, 3, dtype=torch.complex128)
    each = task((exact * 1.001).to(torch.complex64), exact.to(torch.complex64), exact)
    measure([each])

    assert repr(each.found) == repr(each.alone())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.uint8, torch.int32])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_mapped_tensors_are_what_was_saved(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = (torch.randn(shape) * 10).to(dtype)
    save_file({"a": torch.ones(3, dtype=torch.uint8), "b": value}, tmp_path / "file")
    file = MappedTensors(tmp_path / "file")

    assert "b" in file
    assert "c" not in file
    read = file.tensor("b")
    assert (read.dtype, read.shape) == (dtype, value.shape)
    assert torch.equal(read, value)
