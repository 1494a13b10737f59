"""The command line: what is printed where, and the exit code."""

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from spmd_verify import cli
from spmd_verify.errors import CaseError
from spmd_verify.options import Options
from spmd_verify.progress import Progress
from spmd_verify.record import Cell, Record

CaseWriter = Callable[..., str]
Verify = Callable[[Options, Progress], Record]


def _cell(verdict: str) -> Cell:
    return Cell(
        case="m.py",
        style="replicate",
        mesh="dp=2",
        dtype="float32",
        world_size=2,
        runner="lockstep",
        verdict=verdict,
    )


@pytest.fixture(autouse=True)
def _no_settings_of_this_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run in an empty folder, so that no pyproject.toml of ours is read."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def case_file(write_case: CaseWriter) -> str:
    """Return the path of an empty case file: nothing here executes it."""
    return write_case("")


@pytest.fixture
def use_verify(monkeypatch: pytest.MonkeyPatch) -> Callable[[Verify], None]:
    """Put a stand-in where the command line imports the real run from."""

    def use(verify: Verify) -> None:
        module = types.ModuleType("spmd_verify.run")
        module.verify = verify  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "spmd_verify.run", module)

    return use


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["styles"], ["schema"], []])
def test_these_never_import_torch(words: list[str], root: Path) -> None:
    code = (
        "import sys; from spmd_verify.cli import main; code = main(sys.argv[1:]);"
        "heavy = {'torch', 'numpy', 'rich', 'tabulate'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert finished.stderr == ""
    assert finished.returncode == 0


def test_importing_the_package_imports_no_torch(root: Path) -> None:
    code = "import sys, spmd_verify; spmd_verify.Case; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_help_does_not_load_the_record(root: Path) -> None:
    """`--help` has 0.15 s: neither msgspec nor anything larger is loaded for it."""
    code = (
        "import sys; from spmd_verify.cli import main; main(['--help']);"
        "sys.exit(any(name in sys.modules for name in ('msgspec', 'tomllib', 'asyncio')))"
    )

    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_no_arguments_print_the_help_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "usage: spmd-verify" in capsys.readouterr().out


def test_styles_lists_every_id_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["styles"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "replicate,shard,tp" in lines["hsdp+tp"]
    assert lines["ep"].endswith("needs experts")
    assert "needs" not in lines["replicate"]


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "spmd-verify record"


def test_a_file_alone_is_run_with_the_defaults(
    case_file: str, use_verify: Callable[[Verify], None], capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Options] = []

    def verify(options: Options, progress: Progress) -> Record:
        seen.append(options)
        progress.started("something")
        return Record(cells=[_cell("exact")])

    use_verify(verify)

    assert cli.main([case_file]) == 0
    out, err = capsys.readouterr()
    assert seen == [Options((case_file,), command=("spmd-verify", case_file))]
    assert out.startswith("style")
    assert err == "something ...\n"


def test_every_flag_reaches_the_options(
    case_file: str, use_verify: Callable[[Verify], None]
) -> None:
    seen: list[Options] = []

    def verify(options: Options, progress: Progress) -> Record:
        del progress
        seen.append(options)
        return Record(cells=[_cell("mismatch")])

    use_verify(verify)
    words = (
        f"run {case_file} --styles replicate,default --styles f* --mesh dp=2,tp=2 --dtype float64 "
        "--steps 2 --seed 7 --timeout 9.5 --runner lockstep --max-ranks 8 --explain -q "
        "--log-dir logs --exit-zero --strict -x -k *def* --report json=-"
    )

    assert cli.main(words.split()) == 0
    options = seen[0]
    assert options.styles == ("replicate", "default", "f*")
    assert options.mesh.text("x") == "dp=2,tp=2"
    assert (options.dtype, options.steps, options.seed) == ("float64", 2, 7)
    assert (options.timeout_seconds, options.runner, options.max_ranks) == (9.5, "lockstep", 8)
    assert (options.explain, options.verbosity, options.log_dir) == (True, -1, "logs")
    assert (options.exit_zero, options.strict, options.stop_at_first) == (True, True, True)
    assert (options.match, options.reports) == ("*def*", (("json", "-"),))


@pytest.mark.parametrize(
    ("verdict", "code"),
    [("exact", 0), ("mismatch", 1), ("error", 3), ("unsupported", 5), ("not_exercised", 1)],
)
def test_the_exit_code_stands_in_the_record_too(
    case_file: str, use_verify: Callable[[Verify], None], verdict: str, code: int
) -> None:
    use_verify(lambda options, progress: Record(cells=[_cell(verdict)]))

    assert cli.main([case_file, "--report", "json=out.json", "-q"]) == code
    assert json.loads(Path("out.json").read_text())["exit_code"] == code


def test_flags_go_over_the_environment_over_the_file(
    case_file: str, use_verify: Callable[[Verify], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Options] = []
    use_verify(lambda options, progress: seen.append(options) or Record(cells=[_cell("exact")]))
    Path("pyproject.toml").write_text(
        "[tool.spmd-verify]\nsteps = 5\nseed = 5\ndtype = 'float64'\n"
    )
    monkeypatch.setenv("SPMD_VERIFY_SEED", "6")
    monkeypatch.setenv("SPMD_VERIFY_STEPS", "6")

    assert cli.main([case_file, "--steps", "7"]) == 0
    assert (seen[0].steps, seen[0].seed, seen[0].dtype) == (7, 6, "float64")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--mesh", "dp"], "[malformed-mesh]"),
        (["--mesh", "64"], "[mesh-too-large]"),
        (["--dtype", "flot32"], "did you mean 'float32'? [unknown-dtype]"),
        (["--steps", "0"], "[bad-number]"),
        (["--report", "out.json"], "[bad-report]"),
        (["--report", "junt=x"], "[unknown-report-format]"),
        (["--runner", "threads"], "[unknown-runner]"),
        (["--no-such-flag"], "unrecognized arguments"),
        (["--steps", "x"], "invalid int value"),
    ],
)
def test_a_wrong_flag_exits_2_without_a_traceback(
    case_file: str, flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([case_file, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err


def test_a_missing_file_and_an_incomplete_verb_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["missing.py"]) == 2
    assert "[no-such-file]" in capsys.readouterr().err
    assert cli.main(["init"]) == 2
    assert "github" in capsys.readouterr().err


def test_an_error_shows_its_detail_and_under_v_its_traceback(
    case_file: str, use_verify: Callable[[Verify], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def verify(options: Options, progress: Progress) -> Record:
        raise CaseError("forward failed", slug="forward-raised", detail='  File "m.py", line 3')

    use_verify(verify)

    assert cli.main([case_file, "--exit-zero"]) == 2
    err = capsys.readouterr().err
    assert err == 'error: forward failed [forward-raised]\n  File "m.py", line 3\n'
    assert cli.main([case_file, "-v"]) == 2
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_an_exception_of_ours_exits_4_and_asks_for_a_report(
    case_file: str, use_verify: Callable[[Verify], None], capsys: pytest.CaptureFixture[str]
) -> None:
    use_verify(lambda options, progress: Record(cells=[1 / 0]))  # type: ignore[list-item]

    assert cli.main([case_file]) == 4
    err = capsys.readouterr().err
    assert f"spmd-verify {case_file} [internal-error]" in err
    assert "ZeroDivisionError" in err


def test_an_interrupt_exits_130(case_file: str, use_verify: Callable[[Verify], None]) -> None:
    def verify(options: Options, progress: Progress) -> Record:
        raise KeyboardInterrupt

    use_verify(verify)

    assert cli.main([case_file]) == 130


@pytest.mark.parametrize("output_format", ["text", "json", "github"])
def test_the_format_decides_what_stands_on_stdout(
    output_format: str,
    case_file: str,
    use_verify: Callable[[Verify], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    use_verify(lambda options, progress: Record(cells=[_cell("mismatch")]))

    assert cli.main([case_file, "--format", output_format]) == 1
    out = capsys.readouterr().out
    if output_format == "json":
        assert json.loads(out)["cells"][0]["verdict"] == "mismatch"
    else:
        assert ("\n::error file=m.py,line=1," in out) == (output_format == "github")
        assert "1 of 1 cells fail" in out


def test_list_prints_the_cells_and_runs_nothing(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(root / "examples/mlp.py")

    assert cli.main([path, "--list", "--explain", "--mesh", "4", "-k", "*/fully*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        f"{path}/fully_shard dp=4 float32"
    ]
    assert any(line.startswith(f"# {path}: model: class Model, line ") for line in lines)


def test_list_of_an_unknown_style_exits_2(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(root / "examples/mlp.py"), "--list", "--styles", "replicat"]) == 2
    assert "did you mean 'replicate'?" in capsys.readouterr().err
