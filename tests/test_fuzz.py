"""The verb `fuzz`: it finds a planted fault, writes it so that it can be seen, and says so."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import fx

from spmd import passes
from spmd.errors import CaptureError
from spmd_verify import cli
from spmd_verify.drawn import check as drawn_check
from spmd_verify.drawn import file as drawn_file
from spmd_verify.drawn import fuzz
from spmd_verify.drawn.check import Differs, Rules, Tally, check_drawn
from spmd_verify.drawn.file import checked, replay, write_failing
from spmd_verify.drawn.layers import Linear
from spmd_verify.drawn.model import DrawnModel
from spmd_verify.drawn.series import Series
from spmd_verify.drawn.style import Placing
from spmd_verify.drawn.training import Inputs, Loss, Training
from spmd_verify.record import Cell

Fault = Callable[[fx.GraphModule], fx.GraphModule]

MODEL = DrawnModel(Inputs(4), (Linear(2),), Loss("mse"), Training("adam", warm=1))


def lost_all_reduce(module: fx.GraphModule) -> fx.GraphModule:
    """Drop every all_reduce: each rank keeps its own part of the sum."""
    for node in module.graph.nodes:
        if "all_reduce" in str(node.target):
            node.replace_all_uses_with(node.args[0])
    return module


def raising(module: fx.GraphModule) -> fx.GraphModule:
    raise IndexError("a fault of the engine")


def refusing(module: fx.GraphModule) -> fx.GraphModule:
    raise CaptureError("not this one", "model.py:1")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Fault], None]:
    """Put a fault behind the passes of the data-parallel styles.

    The verb works in an empty folder, shrinks for seconds and stops at the first file.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fuzz, "SHRINKING_SECONDS", 20.0)
    monkeypatch.setattr(fuzz.Fuzz, "_is_over", lambda self, _tally: bool(self.files))
    every = passes.default_passes()

    def do(fault: Fault) -> None:
        monkeypatch.setattr("spmd.data_parallel.default_passes", lambda: (*every, fault))

    return do


@pytest.mark.slow
def test_a_planted_fault_is_found_shrunk_and_shown_by_the_checker(
    plant: Callable[[Fault], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    plant(lost_all_reduce)

    assert cli.main(["fuzz", "--seed", "3", "--max-ranks", "3"]) == 1
    out = capsys.readouterr().out
    path = next(tmp_path.glob("fuzz-3-*.py"))
    assert re.search(r"^fuzz-3-\w{8}\.py: replicate on dp=[23]: step 0: ", out)
    assert "failing: 1" in out

    source = path.read_text()
    text = ast.get_docstring(ast.parse(source))
    assert text is not None
    assert len(source.splitlines()) < 80, source
    assert "styles:   replicate" in text
    assert re.search(r"\(right: dtensor_expand(, spmd_\w+)*\)", text), text
    assert "(right: dp=1)" in text
    assert "checker:  mismatch, first at step 0, " in text
    command = re.search(rf"spmd-verify run {path.name} (.*) --styles replicate --mesh (.*)", text)
    assert command is not None
    assert command[0] in out

    placing = Placing((int(command[2].partition("=")[2]),))
    wrong = checked(str(path), "replicate", placing, "float64")
    assert isinstance(wrong, Cell)
    assert wrong.verdict == "mismatch"
    monkeypatch.undo()
    right = checked(str(path), "replicate", placing, "float64")
    assert isinstance(right, Cell)
    assert right.verdict in ("exact", "rounding")
    words = command[0].replace(path.name, str(path)).split()[1:]
    assert cli.main(words) == 0


@pytest.mark.slow
def test_a_crash_of_the_engine_is_found_too(
    plant: Callable[[Fault], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    plant(raising)

    assert cli.main(["fuzz"]) == 1
    assert "IndexError: a fault of the engine" in capsys.readouterr().out
    text = next(tmp_path.glob("fuzz-0-*.py")).read_text()
    assert "checker:  IndexError: a fault of the engine" in text


def test_a_refusal_is_counted_and_no_failure(plant: Callable[[Fault], None]) -> None:
    plant(refusing)
    tally = Tally()

    check_drawn(MODEL, Placing(), tally, Rules(allows_refusals=True))

    assert (tally.models, tally.cells, tally.refused) == (1, 1, {"capture": 3})
    with pytest.raises(Differs, match="not this one"):
        check_drawn(MODEL, Placing())


def test_a_clean_run_says_what_it_did_and_exits_0(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert cli.main(["fuzz", "--seconds", "2", "--max-ranks", "2"]) == 0
    out, err = capsys.readouterr()
    assert re.search(
        r"^[1-9]\d* models, [1-9]\d* cells in \d+ s \(\d+ models a minute\); seed 0,", out
    )
    assert re.search(r"^refused: .*\nrejected: .*\nfailing: 0\n$", out, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []
    assert err == ""


def test_float32_has_a_tolerance_of_its_own() -> None:
    check_drawn(MODEL, Placing(), rules=Rules(dtype="float32"))

    with pytest.raises(Differs, match="on dp=2: step 0: "):
        check_drawn(MODEL, Placing(), rules=Rules(dtype="float32", passes=lost_all_reduce))


def test_what_the_checker_cannot_show_the_file_shows_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    placing = Placing((2,), parameters=(1,), inputs=(0, -1))
    monkeypatch.setattr(drawn_check, "take_region", lambda value, _part: value + 1)
    with pytest.raises(Differs) as caught:
        check_drawn(MODEL, placing, rules=Rules(("dtensor_expand",)))

    path, command = write_failing(str(tmp_path), 0, MODEL, caught.value.finding, Rules(), 2)

    assert command == f"python {path.name}"
    assert "checker:  exact" in path.read_text() or "checker:  rounding" in path.read_text()
    said = replay(str(path), "dtensor_expand", placing, warm=1)
    assert said is not None
    assert "of its scale" in said
    monkeypatch.undo()
    root = Path(drawn_file.__file__).parent.parent
    finished = subprocess.run(
        [sys.executable, str(path)], cwd=root, env={"PYTHONPATH": str(root)}, check=False
    )
    assert finished.returncode == 0


def test_an_interrupt_leaves_with_a_summary_and_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(_series: Series) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Series, "run", interrupted)

    assert cli.main(["fuzz", "--output", str(tmp_path)]) == 130
    assert "0 models, 0 cells" in capsys.readouterr().out


def test_a_run_that_judges_nothing_exits_5(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["fuzz", "--seconds", "1e-9"]) == 5


def test_without_hypothesis_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)

    assert cli.main(["fuzz"]) == 2
    assert "pip install 'spmd-verify[fuzz]' [hypothesis-missing]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--seconds 0", "[bad-number]"),
        ("--seconds nan", "[bad-number]"),
        ("--seconds inf", "[bad-number]"),
        ("--seed -1", "[bad-number]"),
        ("--max-ranks 0", "[bad-number]"),
        ("--dtype bfloat16", "valid: float64, float32; did you mean 'float64'? [unknown-dtype]"),
        ("--output no/such/folder", "[no-such-folder]"),
        ("--seconds soon", "invalid float value"),
        ("model.py", "unrecognized arguments"),
    ],
)
def test_a_bad_option_exits_2(flags: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fuzz", *flags.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err


def test_its_help_imports_neither_torch_nor_hypothesis(root: Path) -> None:
    code = (
        "import sys; from spmd_verify.cli import main; code = main(['fuzz', '--help']);"
        "heavy = {'torch', 'numpy', 'hypothesis', 'msgspec'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_the_checker_itself_imports_no_hypothesis(root: Path) -> None:
    code = (
        "import sys, spmd_verify.runner.jobs, spmd_verify.drawn.check, spmd_verify.drawn.fuzz;"
        "sys.exit('hypothesis' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
