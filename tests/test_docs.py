"""The programs in docs/modes.md run, and do what the page says; other pages name everything."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from ranked import Ranks
from training import (
    FEW_STEPS,
    adam,
    assert_same,
    batches,
    built,
    mean_loss,
    mlp,
    part,
    single,
    state_of,
    train_step,
)

import spmd.lockstep
from spmd_verify.cases.hooks import UserStyle
from spmd_verify.planting.faults import EXPECTED_CAUSES

ROOT = Path(__file__).resolve().parent.parent


def modes() -> dict[str, Any]:
    """Run the page's programs and return what they define."""
    text = (ROOT / "docs/modes.md").read_text()
    found: dict[str, Any] = {}
    for program in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        assert len(program.strip().splitlines()) <= 36
        exec(compile(program, "docs/modes.md", "exec"), found)
    return found


@pytest.mark.parametrize("name", ["EverythingEverywhere", "ShardLarge"])
def test_the_modes_of_the_page_train_as_one_device(name: str) -> None:
    mode = modes()[name](*([10] if name == "ShardLarge" else []))
    model, optimizer = built(mlp, adam, warm=False)
    step = spmd.lockstep.compile(parallel_mode=mode, mesh={"dp": 4})(train_step(mean_loss))
    data = batches(4)
    for x in data:
        step(model, optimizer, x)
    assert_same(state_of(model, optimizer), single(mlp, adam, mean_loss, data), **FEW_STEPS)
    lies = {n: p.layout.is_replicated for n, p in step.state()["parameters"].items()}
    large = name == "ShardLarge"
    assert lies == {"0.weight": not large, "0.bias": not large, "2.weight": True, "2.bias": True}


def on_real_ranks(name: str) -> dict[str, int]:
    mode = modes()[name](*([10] if name == "ShardLarge" else []))
    model, optimizer = built(mlp, adam, warm=False)
    local = name == "ShardLarge"
    step = spmd.compile(parallel_mode=mode, batch="local" if local else "global")(
        train_step(mean_loss)
    )
    data = batches(4)
    for x in data:
        step(model, optimizer, part(x) if local else x)
    assert_same(state_of(model, optimizer), single(mlp, adam, mean_loss, data), **FEW_STEPS)
    assert isinstance(model[0].weight, torch.distributed.tensor.DTensor)
    return step.collectives


@pytest.mark.dist
@pytest.mark.parametrize("name", ["EverythingEverywhere", "ShardLarge"])
def test_they_run_on_real_ranks(on_ranks: Ranks, name: str) -> None:
    for collectives in on_ranks(on_real_ranks, name):
        assert bool(collectives) == (name == "ShardLarge")


def test_the_engine_page_names_every_option() -> None:
    import inspect

    text = (ROOT / "docs/engine.md").read_text()
    for target in (spmd.compile, spmd.DataParallel.__init__, spmd.DTensorExpandMode.__init__):
        for name in inspect.signature(target).parameters:
            if name not in ("self", "parallel_style"):
                assert name in text, name


def test_the_page_of_own_styles_names_every_hook() -> None:
    text = (ROOT / "docs/user-styles.md").read_text()
    for entry in dataclasses.fields(UserStyle):
        assert f"`{entry.name}_NAME(" in text, entry.name


def test_the_page_of_causes_has_every_kind() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/causes.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    expected = {kind for kinds in EXPECTED_CAUSES.values() for kind in kinds}
    for path in (ROOT / "spmd_verify/causes").glob("*.py"):
        expected.update(re.findall(r'\bcause\(\s*"(\w+)"', path.read_text()))
        expected.update(re.findall(r'\bkind = "(\w+)"', path.read_text()))
    assert len(expected) >= 20
    assert expected <= set(rows)
