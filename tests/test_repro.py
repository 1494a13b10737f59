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
from spmd_verify.variants import Variants

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


SEQUENCE = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(self.embed(x)))))


def get_inputs():
    return torch.randn(8, 4, 8)
"""


@pytest.mark.dist
@pytest.mark.parametrize(("style", "says"), [("sp", "SequenceParallel"), ("ddp", "no_sync")])
def test_micro_steps_and_clipping_are_written_out(
    write_case: Callable[..., str], tmp_path: Path, style: str, says: str
) -> None:
    options = Options((write_case(SEQUENCE),), styles=(style,), steps=1, probe=False, no_cache=True,
                      variants=Variants(accumulate=2, clip=0.01))  # fmt: skip
    record = tmp_path / "record.json"
    record.write_bytes(encode(verify(options.checked(), Progress(quiet=True))))
    found = _reproduced(record, style, tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr

    script = tmp_path / f"repro_{style}.py"
    text = script.read_text()
    assert says in text
    # Ranks that clip at another norm than one device; seen by what is below clipping.
    right = "clip_grad_norm_(model.parameters(), 0.01)"
    assert right in text
    wrong = right.replace("0.01", "0.01 if mesh is None else 0.02")
    script.write_text(text.replace(right, wrong))
    planted = _run(script, tmp_path)
    assert planted.returncode == 1, planted.stdout + planted.stderr


@pytest.mark.dist
def test_an_architecture_is_written_out_as_plain_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checker's finding - unequally many tokens - is there without the checker."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    options = Options(("hf:gpt2?n_layer=1",), styles=("ddp",), steps=1, probe=False, no_cache=True)
    record = tmp_path / "record.json"
    record.write_bytes(encode(verify(options.checked(), Progress(quiet=True))))
    assert cli.main(["repro", str(record), "ddp"]) == 0
    (script,) = tmp_path.glob("repro_*_ddp.py")
    found = _run(script, tmp_path)

    assert found.returncode == 1, found.stdout + found.stderr
    case = tmp_path / f"{script.stem}_case.py"
    assert "'n_layer': 1" in case.read_text()
    # The same configuration and tokens on one rank's terms: with nothing padded it passes.
    case.write_text(case.read_text() + _UNPADDED)
    passed = _run(script, tmp_path)
    assert passed.returncode == 0, passed.stdout + passed.stderr


_UNPADDED = """

padded = get_inputs


def get_inputs():
    batch = padded()
    labels = batch["input_ids"].clone()
    return {**batch, "attention_mask": torch.ones_like(labels), "labels": labels}
"""


@pytest.mark.parametrize(
    ("style", "why"),
    [("ep", "Experts"), ("cp", "Attention"), ("ddp+pp", "stages"), ("spmd_tp", "the engine")],
)
def test_a_refusal_says_why_and_what_to_do(style: str, why: str) -> None:
    with pytest.raises(Unsupported, match=f"{why}.*Show it with spmd-verify itself") as found:
        torch_style(style, {}, None)  # type: ignore[arg-type]
    assert "parallelize_NAME" in str(found.value)


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
