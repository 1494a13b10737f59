"""The engine's modes on Hugging Face models, in lock-step, against one device."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("transformers")

from hf_engine import (
    HOT,
    MODES,
    Captured,
    activation_gathers,
    collective_faults,
    collectives,
    held_bytes,
    partitioned,
    run_local,
    worst_output,
)

from spmd_verify.hf.shrink import rules

RANKS = 4
# Models that compute their loss or parts of a layer in float32 whatever the case's dtype.
FLOAT32_ISLANDS = frozenset(
    ("gpt2", "llama", "mixtral", "gemma2", "deepseek_v3", "mamba", "bert", "qwen3")
)


@functools.cache
def captured(name: str) -> Captured:
    """Return the capture of a type, which all tests of it share."""
    return Captured(f"hf:{name}?batch=8", "float64")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", rules()["smoke"])
def test_modes_agree_with_one_device(name: str, mode: str) -> None:
    case = captured(name)
    local = partitioned(case, mode, RANKS)
    outputs, _, _ = run_local(case, local, RANKS)
    error, where = worst_output(case, local, outputs, RANKS)
    assert error < (1e-6 if name in FLOAT32_ISLANDS else 1e-12), where


@pytest.mark.parametrize("batch", [7, 2])
def test_uneven_and_empty_parts(batch: int) -> None:
    case = Captured(f"hf:vit?batch={batch}", "float64")
    for mode in MODES:
        local = partitioned(case, mode, RANKS)
        outputs, _, _ = run_local(case, local, RANKS)
        error, where = worst_output(case, local, outputs, RANKS)
        assert error < 1e-12, (mode, where)


@pytest.mark.parametrize("mode", ["replicate", "fully_shard"])
@pytest.mark.parametrize("name", HOT)
def test_hot_path(name: str, mode: str) -> None:
    case = captured(name)
    local = partitioned(case, mode, RANKS)
    assert local.meta["fallbacks"] == {}
    assert activation_gathers(local, case.graph) == []
    assert collective_faults(local, case.graph) == []
    _, flops, undivided = run_local(case, local, RANKS)
    assert flops <= 1.15 * case.flops / RANKS, undivided.most_common(3)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_each_gradient_is_reduced_once(name: str) -> None:
    case = captured(name)
    parameters = [s.name for _, s in case.signature.of_kind("parameter") if s.requires_grad]
    for mode, kind in (("replicate", "all_reduce"), ("fully_shard", "reduce_scatter_tensor")):
        reduced = [
            parameter
            for found, node in collectives(partitioned(case, mode, RANKS))
            if found == kind
            for parameter in node.meta.get("gradient", {"names": ()})["names"]
        ]
        assert sorted(reduced) == sorted(case.signature.gradients)
        assert set(reduced) <= set(parameters)


@pytest.mark.parametrize("name", HOT)
def test_fully_shard_holds_a_share(name: str) -> None:
    case = captured(name)
    held, total, largest = held_bytes(case, partitioned(case, "fully_shard", RANKS))
    assert held <= 1.1 * total / RANKS + largest
