"""`spmd-verify repro`: scripts that show a mismatch where this project is not installed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from spmd_verify import cli
from spmd_verify.errors import Unsupported, UsageError
from spmd_verify.options import Options
from spmd_verify.progress import Progress
from spmd_verify.record import Record, encode
from spmd_verify.repros.repro import write_repro
from spmd_verify.repros.styles import torch_style
from spmd_verify.run import verify

NORMALISED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


def get_inputs():
    return torch.randn(8, 4)
"""


def _record(path: Path, folder: Path, styles: tuple[str, ...], steps: int = 1) -> Path:
    """Judge a file and write its record."""
    options = Options((str(path),), styles=styles, steps=steps, probe=False, no_cache=True)
    record = verify(options.checked(), Progress(quiet=True))
    written = folder / "record.json"
    written.write_bytes(encode(record))
    return written


def _run(script: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a script elsewhere, with this project not to be imported."""
    blocked = folder / "blocked"
    blocked.mkdir(exist_ok=True)
    for name in ("spmd", "spmd_verify"):
        (blocked / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')\n")
    return subprocess.run(
        [sys.executable, str(script)],
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(blocked)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def _reproduced(record: Path, cell: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Write the script of a cell and run it."""
    script = folder / f"repro_{cell}.py"
    write_repro(str(record), cell, str(script))
    assert len(script.read_text().splitlines()) < 150
    return _run(script, folder)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "bad", "good", "tensor", "shows"),
    [
        ("mp_sp_norm_weights", "bad", "", "norm.weight (gradients, step 0)", "rank 1: element"),
        ("mp_vocab_offset", "bad_padding", "good_padding", "embed.weight (gradients, step 0)", ""),
        ("mp_norm_reduced_twice", "bad", "good", "(gradients, step 0)", "all: 2 x one device"),
    ],
)
def test_faults_are_shown_and_their_twins_pass(
    root: Path, tmp_path: Path, fault: str, bad: str, good: str, tensor: str, shows: str
) -> None:
    styles = tuple(each for each in (bad, good) if each)
    record = _record(root / "tests" / "faults" / f"{fault}.py", tmp_path, styles)
    found = _reproduced(record, bad, tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    assert tensor in found.stdout
    assert "x one device" in found.stdout
    assert shows in found.stdout, found.stdout
    if good:
        passed = _reproduced(record, good, tmp_path)
        assert passed.returncode == 0, passed.stdout + passed.stderr


@pytest.mark.dist
def test_torchs_own_styles_are_written_out(
    write_case: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case = Path(write_case(NORMALISED))
    styles = ("ddp", "fsdp2", "tp", "zero1", "replicate")
    record = _record(case, tmp_path, styles)
    beside = tmp_path / "elsewhere"
    beside.mkdir()
    found = _reproduced(record, "ddp", beside)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "norm (module_outputs, step 0)" in found.stdout
    assert "rank 1: element" in found.stdout
    script = (beside / "repro_ddp.py").read_text()
    assert "Cause: batch_statistics" in script
    assert "DistributedDataParallel(model, process_group=mesh.get_group(0))" in script
    # Corrected as the remedy says, by a normalisation within the sample, the same script passes.
    copied = beside / "model.py"
    copied.write_text(copied.read_text().replace("nn.BatchNorm1d(6)", "nn.GroupNorm(2, 6)"))
    passed = _run(beside / "repro_ddp.py", beside)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    copied.unlink()
    tensor = _reproduced(record, "tp", beside)
    assert tensor.returncode == 0, tensor.stdout + tensor.stderr
    for style, call in (("fsdp2", "fully_shard(model, mesh=mesh)"), ("zero1", "ZeroRedundancy")):
        write_repro(str(record), style, str(tmp_path / f"{style}.py"))
        assert call in (tmp_path / f"{style}.py").read_text()
    assert cli.main(["repro", str(record), "replicate"]) == 5
    assert "the engine of this project" in capsys.readouterr().err
    case.write_text(case.read_text() + "\n")
    assert cli.main(["repro", str(record), "ddp"]) == 2
    assert "[case-changed]" in capsys.readouterr().err


def test_what_no_record_has_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(encode(Record()))
    with pytest.raises(UsageError, match="no cell"):
        write_repro(str(path), "ddp", None)
    assert cli.main(["repro", str(tmp_path / "none.json"), "ddp"]) == 2
    assert "[no-such-file]" in capsys.readouterr().err


def test_an_optimizer_that_zero1_narrowed_has_no_script() -> None:
    facts = {"narrowed_optimizer": [True, True], "find_unused_parameters": [False]}

    with pytest.raises(Unsupported, match="attributes of its own"):
        torch_style("zero1", facts, cast(Any, None))
