"""The pytest plugin: model files as tests, and a fixture. Imports no torch, nor anything heavy.

`pytest --spmd` collects every file that holds a case, one item per style and mesh. Items of one
file share one run of the checker, which is a process of its own (`shared_runs`); the workers of
pytest-xdist share it too. docs/pytest.md.
"""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from spmd_verify.mesh_spec import MeshSpec
    from spmd_verify.options import Options
    from spmd_verify.record import Cell, Record
    from spmd_verify.shared_runs import SharedRun

_FOLDER: Final = "spmd_verify_folder"
_FOLDER_PREFIX: Final = "spmd-verify-pytest-"
_MARKER: Final = (
    "spmd(styles=None, mesh=None, **options): options of `spmd_verify` calls in this test, named "
    "like the flags of `spmd-verify run`; every item that --spmd collects has the marker"
)


class SpmdFailure(AssertionError):
    """A style does not compute what one device computes, or could not be run."""


class SpmdUndeterminedWarning(pytest.PytestWarning):
    """A cell that cannot be decided; the text says what would decide it."""


class SpmdWaiverWarning(pytest.PytestWarning):
    """A waiver that is over, or that nothing needs any more."""


# -- options ---------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the switches."""
    add = parser.getgroup("spmd", "spmd-verify: parallel training against one device").addoption
    add("--spmd", action="store_true", help="collect model files (get_inputs and a model) and "
        "judge them under parallel styles")  # fmt: skip
    add("--spmd-styles", action="append", metavar="IDS", help="as --styles of spmd-verify "
        "(default: [tool.spmd-verify], else engine and the file's own)")  # fmt: skip
    add("--spmd-mesh", action="append", metavar="MESH", help="as --mesh of spmd-verify, repeatable "
        "(default: [tool.spmd-verify], else 2 ranks)")  # fmt: skip


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", _MARKER)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where runs are shared."""
    node.workerinput[_FOLDER] = str(_shared_folder(node.config))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the folder of the session, which the process that made it owns."""
    folder = config.stash.get(_OWN_FOLDER, None)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


_OWN_FOLDER: Final = pytest.StashKey[Path]()


def _shared_folder(config: pytest.Config) -> Path:
    """Return the folder of the session: the controller's under pytest-xdist."""
    given = getattr(config, "workerinput", {}).get(_FOLDER)
    if given is not None:
        return Path(given)
    if _OWN_FOLDER not in config.stash:
        config.stash[_OWN_FOLDER] = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX))
    return config.stash[_OWN_FOLDER]


# -- files -----------------------------------------------------------------------------------


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect a file that holds a case."""
    if file_path.suffix != ".py" or not parent.config.getoption("spmd"):
        return None
    from spmd_verify.cases.reading import read

    try:
        holds_case = read(file_path) is not None
    except SyntaxError:
        holds_case = True
    return CaseFile.from_parent(parent, path=file_path) if holds_case else None


class CaseFile(pytest.File):
    """One model file."""

    chosen: tuple[tuple[str, MeshSpec | None], ...] = ()

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Give one item per style and mesh, below a collector per case where there are several.

        The file is read, not run; a child runs it where its cases have no names to be read.
        """
        from spmd_verify.cases.reading import read
        from spmd_verify.errors import SpmdVerifyError
        from spmd_verify.shared_runs import case_names
        from spmd_verify.style_ids import check_user_styles, select

        try:
            found = read(self.path)
            assert found is not None, "pytest_collect_file has read it"
            options = _options(self._words())
            check_user_styles(found.styles, self.target)
            styles = select(options.styles, found.styles)
        except SyntaxError as error:
            raise self.CollectError(f"{self.path}, line {error.lineno}: {error.msg}") from error
        except SpmdVerifyError as error:
            raise self.CollectError(str(error)) from error
        own = found.own_meshes
        self.chosen = tuple(
            (style, mesh)
            for style in styles
            for mesh in ((None,) if style in own else options.meshes)
        )
        names: Sequence[str] | str | None = found.cases
        if names is None:
            names = case_names(self.target, content=self.path.read_bytes(), **_shared(self.config))
        if isinstance(names, str):
            raise self.CollectError(names)
        if len(names) > 1:
            return [CaseCells.from_parent(self, name=name) for name in names]
        return list(_items(self, self.chosen))

    @property
    def target(self) -> str:
        """Return the path as a command line would have it."""
        folder = self.config.invocation_params.dir
        return str(self.path.relative_to(folder) if self.path.is_relative_to(folder) else self.path)

    def _words(self) -> list[str]:
        """Return the command line that judges the file as it was asked for."""
        styles, meshes = self.config.getoption("spmd_styles"), self.config.getoption("spmd_mesh")
        asked = [word for ids in styles or () for word in ("--styles", ids)]
        return [self.target, *asked, *_mesh_words(meshes or ())]

    def words(self, items: Iterable[CellItem]) -> list[str]:
        """Return the command line that judges these items of the file and no others."""
        chosen = list(items)
        targets = dict.fromkeys(item.target for item in chosen)
        styles = ",".join(dict.fromkeys(item.style for item in chosen))
        meshes = [item.mesh for item in chosen if item.mesh is not None]
        typed = dict.fromkeys(_typed(mesh) for mesh in meshes)
        return [*targets, "--styles", styles, *_mesh_words(list(typed))]

    def shared(self) -> tuple[SharedRun, list[CellItem]]:
        """Return the one run of the file, for all its items that were selected, and those."""
        items = [each for each in self.session.items if isinstance(each, CellItem)]
        own = [item for item in items if item.path == self.path]
        return _shared_run(self.config, self.words(own), self.path), own


class CaseCells(pytest.Collector):
    """One explicit case of a file that has several."""

    def collect(self) -> Iterable[pytest.Item]:
        """Give one item per style and mesh."""
        assert isinstance(self.parent, CaseFile)
        return list(_items(self, self.parent.chosen))


def _items(
    parent: pytest.Collector, chosen: Iterable[tuple[str, MeshSpec | None]]
) -> Iterable[CellItem]:
    """Give the items of one case."""
    for style, mesh in chosen:
        name = style if mesh is None else f"{style}[{mesh.text(style)}]"
        yield CellItem.from_parent(parent, name=name, style=style, mesh=mesh)


class CellItem(pytest.Item):
    """One style on one mesh.

    Attributes:
        style: Its id.
        mesh: As asked for; None where the file's style brings its own.
    """

    def __init__(self, *, style: str, mesh: MeshSpec | None, **rest: Any) -> None:
        """Remember what is judged."""
        super().__init__(**rest)
        self.style = style
        self.mesh = mesh
        self.add_marker("spmd")

    @property
    def file(self) -> CaseFile:
        """Return the file it is of."""
        file = self.getparent(CaseFile)
        assert file is not None, "collected by one"
        return file

    @property
    def target(self) -> str:
        """Return the address of its case."""
        case = f"::{self.parent.name}" if isinstance(self.parent, CaseCells) else ""
        return f"{self.file.target}{case}"

    def runtest(self) -> None:
        """Look the cell up in the file's run."""
        from spmd_verify import pytest_messages as messages

        run, own = self.file.shared()
        cells = run.record.cells if run.record is not None else []
        mine = [cell for cell in cells if self._is_mine(cell)]
        alone = messages.command(self.file.words([self]))
        if not mine:
            raise SpmdFailure(messages.nothing_run(run.said, alone))
        assert run.record is not None, "it has cells"
        if self is own[0]:  # styles that only running the file shows have no item
            known = {style for style, _ in self.file.chosen}
            mine += [cell for cell in cells if cell.style not in known]
            for told in _warnings(run.record):
                self.warn(told)
        _judge_all(mine, run.record, alone, self.warn)

    def _is_mine(self, cell: Cell) -> bool:
        """Say whether a cell is this item's."""
        is_here = self.mesh is None or cell.mesh == self.mesh.text(self.style)
        return cell.case == self.target and cell.style == self.style and is_here

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """Show a verdict without the plugin's own traceback."""
        if isinstance(excinfo.value, SpmdFailure):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return what headings of failures say."""
        return self.path, None, f"{self.target}::{self.name}"


# -- fixture ---------------------------------------------------------------------------------


@pytest.fixture
def spmd_verify(request: pytest.FixtureRequest) -> Callable[..., Record]:
    """Judge a model file: `spmd_verify(target, **options) -> Record`.

    Options are the flags of `spmd-verify run` with underscores: `styles="ddp,mine"`,
    `mesh="dp=2"`, `steps=1`, `exact=True`. The marker `spmd` gives defaults. The test fails where
    a cell fails and is skipped where every cell is unsupported; `check=False` only returns the
    record. The same call in another test, or in another worker, is one run.
    """
    given: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("spmd"))):
        given.update(marker.kwargs)

    def judged(target: Any, *, check: bool = True, **options: Any) -> Record:
        __tracebackhide__ = True
        from spmd_verify import pytest_messages as messages

        words = [str(target), *_option_words({**given, **options})]
        file = Path(str(target).partition(":")[0])
        run = _shared_run(request.config, words, request.config.invocation_params.dir / file)
        alone = messages.command(words)
        if run.record is None or not run.record.cells:
            raise SpmdFailure(messages.nothing_run(run.said, alone))
        cells = run.record.cells
        if check and all(cell.verdict == "unsupported" for cell in cells):
            pytest.skip("; ".join(cell.skipped_reason or cell.message for cell in cells))
        if check:
            for told in _warnings(run.record):
                _warn(told)
            judged = [cell for cell in cells if cell.verdict != "unsupported"]
            _judge_all(judged, run.record, alone, _warn)
        return run.record

    return judged


def _warn(warning: Warning) -> None:
    """Warn at the line of the test that called the fixture."""
    warnings.warn(warning, stacklevel=4)


# -- both ------------------------------------------------------------------------------------


def _judge_all(
    cells: list[Cell], record: Record, alone: str, warn: Callable[[Warning], None]
) -> None:
    """Judge cells; where none fails and one is waived, the test is an expected failure."""
    __tracebackhide__ = True
    from spmd_verify import pytest_messages as messages
    from spmd_verify.reporters.paragraphs import waiver

    for cell in cells:
        _judge(cell, record, alone, warn)
    waived = [f"{messages.named(cell)}: {why}" for cell in cells if (why := waiver(cell))]
    if waived:
        pytest.xfail("; ".join(waived))


def _warnings(record: Record) -> Iterable[Warning]:
    """Give what a run says of waivers that are over or not needed any more."""
    from spmd_verify.reporters.paragraphs import warnings as told

    for line in told(record):
        yield SpmdWaiverWarning(line.removeprefix("warning: "))


def _judge(cell: Cell, record: Record, alone: str, warn: Callable[[Warning], None]) -> None:
    """Fail, skip or warn as a cell's verdict asks; return where it passes."""
    __tracebackhide__ = True
    from spmd_verify import pytest_messages as messages
    from spmd_verify.exit_codes import fails

    if cell.verdict == "unsupported":
        pytest.skip(f"{messages.named(cell)}: {cell.skipped_reason or cell.message}")
    if cell.verdict == "error" or fails(cell, strict=bool(record.settings.get("strict"))):
        raise SpmdFailure(messages.failed(cell, record, alone))
    if cell.verdict == "undetermined":
        warn(SpmdUndeterminedWarning(messages.undetermined(cell)))


def _shared_run(config: pytest.Config, words: list[str], path: Path) -> SharedRun:
    """Run the checker where pytest was started, or read what another test's run left."""
    __tracebackhide__ = True
    from spmd_verify.shared_runs import shared_run

    content = path.read_bytes() if path.is_file() else b""
    return shared_run(words, content=content, **_shared(config))


def _shared(config: pytest.Config) -> dict[str, Path]:
    """Return where processes share and where they run."""
    return {"folder": _shared_folder(config), "cwd": config.invocation_params.dir}


def _options(words: list[str]) -> Options:
    """Resolve a command line of `run` with configuration and environment."""
    from spmd_verify.arguments import parse_arguments
    from spmd_verify.cli import options_from

    return options_from(parse_arguments(["run", *words]), words)


def _mesh_words(meshes: Iterable[str]) -> list[str]:
    """Return the flags of one mesh or of several."""
    given = list(meshes)
    if len(given) == 1:
        return ["--mesh", given[0]]
    return [word for mesh in given for word in ("--mesh-sweep", mesh)]


def _typed(mesh: MeshSpec) -> str:
    """Return a mesh as it may be typed: `2x2`, `dp=2,tp=2`."""
    if any(name is None for name, _ in mesh.axes):
        return "x".join(str(size) for _, size in mesh.axes)
    return ",".join(f"{name}={size}" for name, size in mesh.axes)


def _option_words(options: dict[str, Any]) -> list[str]:
    """Return keyword options as flags: `max_ranks=4` is `--max-ranks 4`."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, (list, tuple)):
            value = ",".join(map(str, value))
        if value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words
