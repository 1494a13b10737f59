"""A sample of the fault bench: kinds of cause and false alarms. `make faults` runs all."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.dist

# One of each family that runs in a few seconds; every file holds faults and corrected twins.
SAMPLE = (
    "clean_dp_clipped_by_hand",
    "clean_dp_owner_updates",
    "clean_mp_heads_permuted",
    "clean_st_zero_by_owner",
    "dp_label_counts_per_rank",
    "dp_output_bent_by_hook",
    "dp_penalty_on_first_rank",
    "dp_rate_set_in_step",
    "dp_schedule_steps_once_per_rank",
    "dp_tied_head_part_scaled",
    "dp_wrong_before_clipping",
    "mp_padded_width",
    "mp_sp_norm_weights",
    "mp_summands_on_two_axes",
    "mp_vocab_offset",
    "st_flat_offsets",
    "st_gathered_in_forward",
    "st_lars_local_trust",
    "st_optimizer_first",
)


@pytest.fixture
def bench(root: Path) -> ModuleType:
    """The bench's own code."""
    spec = importlib.util.spec_from_file_location("faults", root / "reports" / "faults.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SAMPLE)
def test_faults_are_caught_and_explained_and_twins_pass(
    bench: ModuleType, root: Path, name: str
) -> None:
    result = bench.run(root / "tests" / "faults" / f"{name}.py", "float32")
    assert "error" not in result, result
    for style in result["styles"]:
        assert not style["wrong"], style


def test_every_file_of_the_bench_says_what_it_expects(bench: ModuleType, root: Path) -> None:
    files = sorted((root / "tests" / "faults").glob("*.py"))
    styles = [due for path in files for due in bench.expectations(path).values()]
    faults = [due for due in styles if due["verdict"] != "pass"]
    kinds = {kind for due in faults for kind in due["kind"]}
    assert len(faults) >= 60
    assert len(styles) - len(faults) >= 60
    assert len(kinds) >= 20
