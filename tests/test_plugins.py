"""Styles that an installed package brings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = '''
from dataclasses import dataclass

import torch

from spmd_verify.styles.eager import EagerStyle
from spmd_verify.styles.torch_base import TorchRecipe


@dataclass(frozen=True)
class Summed(TorchRecipe):
    """Averages gradients by hooks, or forgets to divide."""

    divides: bool = True

    def wrap(self, case, model, mesh):
        def reduce(parameter):
            torch.distributed.all_reduce(parameter.grad, group=mesh.get_group())
            if self.divides:
                parameter.grad /= mesh.size()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)
        return model, case.optimizer(model)


GOOD = EagerStyle(Summed("hooked"))
BAD = EagerStyle(Summed("hooked_badly", divides=False))
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that looks like an installed package with two styles."""
    (tmp_path / "hooked_styles.py").write_text(PACKAGE)
    info = tmp_path / "hooked_styles-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hooked-styles\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[spmd_verify.styles]\nhooked = hooked_styles:GOOD\nhooked_badly = hooked_styles:BAD\n"
    )
    return tmp_path


def _run(site: Path, root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), str(root)])
    return subprocess.run(
        [sys.executable, "-m", "spmd_verify", *words],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_a_packages_styles_are_listed_and_their_names_have_to_be_new(
    site: Path, root: Path
) -> None:
    listed = _run(site, root, "styles")
    lines = [" ".join(line.split()) for line in listed.stdout.splitlines()]
    assert "hooked plugin dp of the package hooked-styles" in lines

    (site / "hooked_styles-1.0.dist-info" / "entry_points.txt").write_text(
        "[spmd_verify.styles]\nddp = hooked_styles:GOOD\n"
    )
    refused = _run(site, root, "styles")
    assert refused.returncode == 2
    assert "'ddp' of the package hooked-styles is called like another" in refused.stderr


@pytest.mark.dist
def test_a_packages_styles_are_judged_like_any(site: Path, root: Path) -> None:
    found = _run(site, root, str(root / "examples/mlp.py"), "--styles", "plugin", "--no-cache")

    assert found.returncode == 1
    lines = {line.split()[0]: line for line in found.stdout.splitlines() if line.strip()}
    assert "rounding" in lines["hooked"]
    assert "mismatch" in lines["hooked_badly"]
    assert "2.0000 x the reference: the 2 ranks of dp" in found.stdout
