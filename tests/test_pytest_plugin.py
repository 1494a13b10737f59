"""The pytest plugin as a new user meets it: a repository with a model file and `pytest --spmd`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spmd_verify import pytest_messages, pytest_plugin
from spmd_verify.cases.reading import read
from spmd_verify.record import Cause, Cell, FirstDivergence, Gate, Record, Row, WorstElement

MODEL = """
import torch
import torch.distributed as dist


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.head(x).square().mean()


def get_inputs():
    return [torch.randn(4, 3)]


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)


def parallelize_mine(model, mesh):
    return model


def step_mine(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= DIVISOR
    optimizer.step()
    return loss.detach()
"""
SETTINGS = """
[tool.spmd-verify]
styles = ["mine"]
steps = 1
no-cache = true
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A new user's folder; DIVISOR is still to be written into model.py."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(SETTINGS)
    return folder


@pytest.fixture
def environment(root: Path, tmp_path: Path) -> dict[str, str]:
    """The environment in which the package is installed, its entry point included."""
    installed = tmp_path / "installed" / "spmd_verify-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: spmd-verify\nVersion: 0\n")
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["pytest11"].items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    paths = os.pathsep.join([str(root), str(installed.parent)])
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    return kept | {"PYTHONPATH": paths, "SPMD_TEST_TOKEN": tmp_path.name, "COLUMNS": "200"}


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_pytest(repository: Path, environment: dict[str, str]) -> Run:
    """Run `pytest WORDS` in the repository."""

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words],
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    return run


def _write(repository: Path, divisor: str) -> None:
    (repository / "model.py").write_text(MODEL.replace("DIVISOR", divisor))


@pytest.mark.dist
@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_a_planted_fault_fails_with_its_name_and_passes_when_removed(
    repository: Path, run_pytest: Run, workers: tuple[str, ...]
) -> None:
    _write(repository, "1")
    failed = run_pytest("--spmd", *workers)
    shown = failed.stdout
    assert failed.returncode == 1, shown + failed.stderr
    assert re.search(r"first tensor that differs: head\.\w+ \(gradients, step 0\)", shown), shown
    assert re.search(r"cause: factor: .*head\.weight", shown), shown
    assert "factor: 2, axis: dp" in shown, shown
    assert "run it alone: spmd-verify model.py --styles mine" in shown
    assert "pytest_plugin.py" not in shown
    assert "Traceback" not in shown

    _write(repository, "mesh.size()")
    passed = run_pytest("--spmd", "--spmd-styles", "mine,hsdp", "-rs", *workers)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "1 passed, 1 skipped" in passed.stdout, passed.stdout
    assert "hsdp on replicate=2" in passed.stdout, passed.stdout


@pytest.mark.dist
def test_the_fixture_fails_returns_and_takes_defaults_from_the_marker(
    repository: Path, run_pytest: Run
) -> None:
    _write(repository, "1")
    (repository / "test_model.py").write_text(
        """
import pytest

@pytest.mark.spmd(styles="mine", mesh="dp=2")
def test_fails(spmd_verify):
    spmd_verify("model.py")

@pytest.mark.spmd(styles="mine", mesh="dp=2")
def test_returns(spmd_verify):
    record = spmd_verify("model.py", check=False)
    assert [(cell.verdict, cell.mesh) for cell in record.cells] == [("mismatch", "dp=2")]

def test_wrong_option(spmd_verify):
    spmd_verify("model.py", styles="mone")
"""
    )
    shown = run_pytest("-p", "xdist", "--strict-markers").stdout
    assert "2 failed, 1 passed" in shown, shown
    assert '>       spmd_verify("model.py")' in re.sub(r"^ *(?=>)", "", shown, flags=re.M), shown
    assert "did you mean 'mine'?" in shown
    assert "pytest_plugin.py" not in shown


def test_nothing_of_it_is_there_without_the_switch_or_the_plugin(
    repository: Path, run_pytest: Run
) -> None:
    _write(repository, "1")
    (repository / "test_own.py").write_text("def test_own():\n    pass\n")
    (repository / "conftest.py").write_text(
        "import sys\n\ndef pytest_unconfigure(config):\n"
        "    print('heavy', [each for each in ('torch', 'numpy') if each in sys.modules])\n"
    )
    ordinary = run_pytest("--strict-markers", "-s")
    assert ordinary.returncode == 0, ordinary.stdout + ordinary.stderr
    assert "1 passed" in ordinary.stdout
    assert "heavy []" in ordinary.stdout
    without = run_pytest("-p", "no:spmd_verify")
    assert (without.returncode, "1 passed" in without.stdout) == (0, True), without.stdout
    assert run_pytest("-p", "no:spmd_verify", "--spmd").returncode == 4  # no such option
    listed = run_pytest("--spmd", "--collect-only", "-q", "--spmd-mesh", "dp=2",
                        "--spmd-mesh", "2x1", "--spmd-styles", "mine,ddp")  # fmt: skip
    names = [line for line in listed.stdout.splitlines() if line.startswith("model.py::")]
    assert names == [
        "model.py::ddp[dp=2]",
        "model.py::ddp[dp=2,tp=1]",
        "model.py::mine[dp=2]",
        "model.py::mine[dp=2,tp=1]",
    ]
    wrong = run_pytest("--spmd", "--spmd-styles", "mone")
    assert wrong.returncode != 0
    assert "did you mean 'mine'?" in wrong.stdout


def _owned(token: str) -> Iterator[int]:
    """Give the processes that a test's pytest has started, by their environment."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"SPMD_TEST_TOKEN={token}".encode() in (folder / "environ").read_bytes():
                yield int(folder.name)
        except OSError:
            continue


@pytest.mark.dist
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL], ids=["interrupt", "kill"])
def test_an_ended_pytest_leaves_no_process_and_no_folder(
    repository: Path, environment: dict[str, str], tmp_path: Path, sent: signal.Signals
) -> None:
    _write(repository, "(__import__('time').sleep(600), 1)[1]")
    temporary = tmp_path / "t"
    temporary.mkdir()
    child = subprocess.Popen(
        [sys.executable, "-m", "pytest", "--spmd", "-p", "no:cacheprovider"],
        cwd=repository,
        env=environment | {"TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell's background job ignores SIGINT and hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def wait_for(reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 100
        while not reached():
            assert time.monotonic() < deadline
            time.sleep(0.2)

    # pytest, the checker, its fork server, the reference worker and two ranks.
    wait_for(lambda: len(list(_owned(tmp_path.name))) >= 6)
    child.send_signal(sent)
    wait_for(lambda: not list(_owned(tmp_path.name)))
    assert child.wait(10) == (2 if sent == signal.SIGINT else -signal.SIGKILL)
    if sent == signal.SIGINT:
        left = [path.name for path in temporary.iterdir() if path.name.startswith("spmd-verify")]
        assert left == []


def test_reading_finds_cases_and_styles_without_running(tmp_path: Path) -> None:
    def reading(text: str, name: str = "model.py") -> object:
        path = tmp_path / name
        path.write_text(text)
        return read(path)

    case = "raise SystemExit\nclass Net(Base): pass\ndef get_inputs(): pass\n"
    found = read(Path(__file__))
    assert found is None  # its name
    assert reading("x = 1") is None
    assert reading("def get_inputs(): pass\n") is None  # no model
    assert reading(case, "_model.py") is None
    styles = (
        "def parallelize(model, mesh): pass\n"
        "def parallelize_all(models): pass\n"
        "from torch.distributed.tensor.parallel import parallelize_module\n"
        "from mine import parallelize_far\n"
        "def setup_b(model, mesh, extra=1): pass\n"
        "mesh_c, parallelize_c = mesh_b, parallelize\n"
    )
    found = reading(case + styles)
    assert found is not None
    assert found.styles == ("user", "far", "b", "c")  # type: ignore[attr-defined]
    assert found.own_meshes == {"c"}  # type: ignore[attr-defined]


SEVERAL = """
import torch
import torch.distributed as dist
from spmd_verify import Case


def net(width):
    return lambda: torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 1))


def inputs():
    return [torch.randn(4, 3)]


def loss(output):
    return output.square().mean()


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1)


def parallelize_mine(model, mesh):
    return model


def step_mine(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    loss(model(*batch)).backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= 1 if model[0].out_features == 5 else mesh.size()
    optimizer.step()


def cases():
    print("cases() may print")
    return [Case(net(width), inputs, name=f"wide{width}") for width in (4, 5)]
"""


@pytest.mark.dist
def test_a_file_of_several_cases_has_items_for_each(repository: Path, run_pytest: Run) -> None:
    """Their names are only known to the file; the fault is in one of them."""
    (repository / "model.py").write_text(SEVERAL)
    names = ["model.py::wide4::mine[dp=2]", "model.py::wide5::mine[dp=2]"]
    listed = run_pytest("--spmd", "--collect-only", "-q", "-n", "0")
    assert [line for line in listed.stdout.splitlines() if "::" in line] == names, listed.stdout

    shown = run_pytest("--spmd", "-n", "2", "-rA").stdout
    assert f"PASSED {names[0]}" in shown, shown
    assert f"FAILED {names[1]}" in shown, shown
    assert "1 failed, 1 passed" in shown, shown
    assert "run it alone: spmd-verify model.py::wide5 --styles mine" in shown
    assert run_pytest("--spmd", names[0]).returncode == 0

    (repository / "model.py").write_text(f"{SEVERAL}\n\nraise ValueError('no cases today')\n")
    broken = run_pytest("--spmd")
    assert broken.returncode != 0
    assert "no cases today" in broken.stdout, broken.stdout


@pytest.mark.parametrize(
    ("text", "cases"),
    [
        ("CASE = Case(M, x)", ()),
        ("CASES = [Case(M, x, name='a'), spmd_verify.Case(M, x)]", ("a", "case1")),
        ("CASES = {'a': Case(M, x), 'b': Case(M, x, name='c')}", ("a", "c")),
        ("CASES = [Case(M, x)]", ()),
        ("CASES = [Case(M, x, 'a'), Case(M, x)]", None),
        ("CASES = [Case(M, x, name='a'), Case(M, x, name='a')]", None),
        ("CASES = [Case(M, x, **more), Case(M, x)]", None),
        ("CASES = [*others, Case(M, x)]", None),
        ("CASES = [a, b]", None),
        ("CASES = [make(1), make(2)]", None),
        ("CASES = {**others}", None),
        ("CASES = [Case(M, x) for M in models]", None),
        ("from others import CASES", None),
        ("CASES = [Case(M, x), Case(M, x)]\nCASE = Case(M, x)", None),
        ("CASES = [Case(M, x), Case(M, x)]\nCASES.append(Case(M, x))", None),
        ("CASES = [Case(M, x), Case(M, x)]\nfor M in N: CASES += [Case(M, x)]", None),
        ("def cases(): pass", None),
    ],
)
def test_reading_finds_the_names_of_cases_or_says_that_it_cannot(
    tmp_path: Path, text: str, cases: tuple[str, ...] | None
) -> None:
    path = tmp_path / "model.py"
    path.write_text(text)
    found = read(path)

    assert found is not None
    assert found.cases == cases


def test_a_waived_cell_is_an_expected_failure_with_its_reason() -> None:
    cell = Cell(case="m.py", style="s", mesh="dp=2", dtype="float32", world_size=2,
                runner="processes", verdict="mismatch",
                gate=Gate(fails=False, waived="issue 12", until="2027-01-31"))  # fmt: skip
    told = ["warning: over since 2026-11-30: waiver of */x: old", "waived: m.py/s"]
    record = Record(cells=[cell], unknown={"gate": told})

    with pytest.raises(pytest.xfail.Exception, match="waived until 2027-01-31: issue 12"):
        pytest_plugin._judge_all([cell], record, "spmd-verify m.py", lambda warning: None)
    (warning,) = pytest_plugin._warnings(record)
    assert str(warning) == "over since 2026-11-30: waiver of */x: old"


def test_a_failure_reads_like_an_assertion() -> None:
    cause = Cause(kind="factor", text="w: 2 x", axis="dp", factor=2.0, remedy="divide once")
    row = Row(name="w", stage="gradients", step=0, verdict="mismatch", dtype="float32",
              ranks=[0, 1], ratio=1e6, cause=cause,
              worst=WorstElement(index=[1, 0], actual=2.0, expected=1.0))  # fmt: skip
    cell = Cell(case="model.py", style="mine", mesh="dp=2", dtype="float32", world_size=2,
                runner="processes", verdict="mismatch", tensors=[row],
                first_divergence=FirstDivergence(step=0, stage="gradients",
                                                 tensor="w"))  # fmt: skip
    record = Record(cells=[cell], settings={"limits": {"float32/tensor": 4.0}})
    assert pytest_messages.failed(cell, record, "spmd-verify model.py").splitlines() == [
        "model.py: mine on dp=2, float32: mismatch: does not compute what one device computes",
        "  first tensor that differs: w (gradients, step 0)",
        "  worst element [1, 0]: 2.0 under the style, 1.0 on one device",
        "  error: 1e+06 x the noise of this tensor (4 x is allowed), ranks 0, 1",
        "  cause: factor: w: 2 x",
        "  factor: 2, axis: dp",
        "  remedy: divide once",
        "  run it alone: spmd-verify model.py",
    ]


def test_verdicts_pass_warn_skip_or_fail() -> None:
    def judged(verdict: str, *, strict: bool = False) -> list[Warning]:
        cell = Cell(case="m.py", style="s", mesh="dp=2", dtype="float32", world_size=2,
                    runner="processes", verdict=verdict, skipped_reason="no axis",
                    undetermined_reason="too much noise")  # fmt: skip
        heard: list[Warning] = []
        record = Record(cells=[cell], settings={"strict": strict})
        pytest_plugin._judge(cell, record, "spmd-verify m.py", heard.append)
        return heard

    assert [judged(verdict) for verdict in ("exact", "rounding")] == [[], []]
    warning = judged("undetermined")[0]
    assert str(warning) == "s on dp=2, float32 is undetermined: too much noise"
    with pytest.raises(pytest.skip.Exception, match="no axis"):
        judged("unsupported")
    for verdict in ("mismatch", "semantic", "not_exercised", "error"):
        with pytest.raises(pytest_plugin.SpmdFailure, match="run it alone: spmd-verify m.py"):
            judged(verdict)
    with pytest.raises(pytest_plugin.SpmdFailure, match="too much noise"):
        judged("undetermined", strict=True)
