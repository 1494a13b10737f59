"""References of earlier runs: found, proven, bounded, and never in the way."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from spmd_verify import cli, run
from spmd_verify.arguments import parse_arguments
from spmd_verify.cases.case import load_case
from spmd_verify.errors import ReferenceRunError
from spmd_verify.options import Options
from spmd_verify.runner.jobs import write_reference
from spmd_verify.runner.specs import CaseSpec, ReferenceReport, ReferenceSpec, decode, encode
from spmd_verify.stored import key as reference_key
from spmd_verify.stored.cache import MANIFEST, ReferenceCache, cache_folder

CaseWriter = Callable[..., str]
NAMES = ("index.json", "step-0000.safetensors")
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 3)

    def forward(self, x):
        return torch.tanh(self.first(x)).square().mean()

def get_inputs():
    return torch.randn(4, 4)
"""


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a folder that stands for a store."""
    folder = tmp_path / "store"
    folder.mkdir()
    for name in NAMES:
        (folder / name).write_bytes(name.encode() * 100)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> ReferenceCache:
    """Return an empty cache."""
    return ReferenceCache(tmp_path / "cache")


def names(folder: Path) -> list[str]:
    """Return what is in a folder, in order; nothing where there is none."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def spec(path: str, **changes: Any) -> CaseSpec:
    """Describe a case of one step."""
    return CaseSpec(path, "float32", 0, **{"steps": 1, "overrides": {}, **changes})


def made(case: CaseSpec, destination: Path, cache_path: Path | str) -> ReferenceReport:
    """Make a reference as the reference worker does."""
    worker = SimpleNamespace(cache={}, ahead=None, note=lambda text: None)
    request = ReferenceSpec(case, str(destination), str(cache_path))
    return decode(write_reference(worker, encode(request)), ReferenceReport)


def was_cached(report: ReferenceReport) -> bool:
    """Say whether a reference was taken from the cache."""
    return "noise" not in report.seconds


# -- entries -----------------------------------------------------------------------------------


def test_what_was_put_is_taken_with_what_it_told(
    cache: ReferenceCache, store: Path, tmp_path: Path
) -> None:
    assert cache.take("a", tmp_path / "none") is None
    cache.put("a", store, b"told")

    assert cache.take("a", tmp_path / "taken") == b"told"
    assert names(tmp_path / "taken") == [*NAMES]
    assert (tmp_path / "taken" / NAMES[1]).read_bytes() == (store / NAMES[1]).read_bytes()
    assert names(cache.folder) == ["a"]
    assert cache.remarks == []


def test_an_entry_outlives_the_folder_it_came_from_and_a_taken_one_the_entry(
    cache: ReferenceCache, store: Path, tmp_path: Path
) -> None:
    cache.put("a", store, b"")
    for name in NAMES:
        (store / name).unlink()
    cache.take("a", tmp_path / "taken")
    cache.remove("a")

    assert names(tmp_path / "taken") == [*NAMES]
    assert names(cache.folder) == []


def _truncate(path: Path) -> None:
    os.truncate(path, 10)


def _flip(path: Path) -> None:
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("name", [*NAMES, MANIFEST])
@pytest.mark.parametrize("damage", [_truncate, _flip, Path.unlink])
def test_a_damaged_entry_is_dropped_and_said(
    cache: ReferenceCache, store: Path, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    cache.put("a", store, b"")
    damage(cache.folder / "a" / name)

    assert cache.take("a", tmp_path / "taken") is None
    assert names(tmp_path / "taken") == []
    assert names(cache.folder) == []
    assert "was damaged" in cache.remarks[0]


def test_the_least_recently_used_entries_go_first(
    cache: ReferenceCache, store: Path, tmp_path: Path
) -> None:
    cache.put("a", store, b"")
    size = sum(path.stat().st_size for path in (cache.folder / "a").iterdir())
    cache.limit_bytes = 2 * size + 10
    cache.put("b", store, b"")
    for age, key in enumerate("ba"):
        os.utime(cache.folder / key / MANIFEST, (1000.0 + age, 1000.0 + age))
    cache.take("b", tmp_path / "taken")
    cache.put("c", store, b"")

    assert names(cache.folder) == ["b", "c"]


def test_a_reference_larger_than_the_cache_is_not_kept(cache: ReferenceCache, store: Path) -> None:
    cache.limit_bytes = 10
    cache.put("a", store, b"")

    assert names(cache.folder) == []
    assert "exceed" in cache.remarks[0]


def test_left_overs_of_killed_writers_are_removed(cache: ReferenceCache, store: Path) -> None:
    for name, age in ((".tmp-old", 9e9), (".tmp-new", 0.0)):
        (cache.folder / name).mkdir(parents=True)
        if age:
            os.utime(cache.folder / name, (1000.0, 1000.0))
    cache.put("a", store, b"")

    assert names(cache.folder) == [".tmp-new", "a"]


def _write_often(folder: Path, store: Path) -> None:
    for number in range(20):
        writer = ReferenceCache(folder)
        writer.put(f"key-{number % 3}", store, b"")
        taken = folder.parent / f"taken-{os.getpid()}-{number}"
        assert writer.take(f"key-{number % 3}", taken) == b""
        assert names(taken) == [*NAMES]
        assert writer.remarks == []


def test_writers_at_once_do_not_mix(store: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_write_often, args=(tmp_path / "cache", store)) for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)

    assert [writer.exitcode for writer in writers] == [0] * 4
    assert names(tmp_path / "cache") == ["key-0", "key-1", "key-2"]


def test_a_cache_that_cannot_be_used_is_a_remark(store: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    broken = ReferenceCache(tmp_path / "file" / "below")
    broken.put("a", store, b"")

    assert broken.take("a", tmp_path / "taken") is None
    assert "was not kept" in broken.remarks[0]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c"}, "/c/spmd-verify"),
        ({"XDG_CACHE_HOME": "relative"}, os.path.expanduser("~/.cache/spmd-verify")),
        ({}, os.path.expanduser("~/.cache/spmd-verify")),
    ],
)
def test_the_folder_is_the_users_cache(environment: dict[str, str], expected: str) -> None:
    assert cache_folder(environment) == expected


# -- names of entries --------------------------------------------------------------------------


def key_of(path: str, **settings: Any) -> str:
    """Return the key of a case."""
    return reference_key.reference_key(load_case(path, **{"steps": 1, **settings}))


def test_the_key_is_the_same_for_the_same_case(write_case: CaseWriter) -> None:
    path = write_case(MODEL)

    assert key_of(path) == key_of(path) == key_of(os.path.relpath(path))


def test_the_key_tells_settings_and_file_apart(write_case: CaseWriter) -> None:
    path = write_case(MODEL)
    keys = {
        key_of(path),
        key_of(path, seed=1),
        key_of(path, steps=2),
        key_of(path, dtype="float64"),
        key_of(path, overrides={"optimizer": "sgd"}),
        key_of(write_case(MODEL + "\n# other\n")),
    }

    assert len(keys) == 6


def test_the_key_covers_modules_beside_the_case(
    write_case: CaseWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "besides").mkdir()
    (tmp_path / "besides" / "__init__.py").write_text("from .inner import WIDTH\n")
    inner = tmp_path / "besides" / "inner.py"
    inner.write_text("WIDTH = 3\n")
    path = write_case("from besides import WIDTH\n" + MODEL.replace("4, 3", "4, WIDTH"))
    before = key_of(path)
    inner.write_text("WIDTH = 3  # the same number\n")

    assert key_of(path) != before


def test_the_key_covers_the_checker_and_the_machine(
    write_case: CaseWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_case(MODEL)
    keys = {key_of(path)}
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    keys.add(key_of(path))
    monkeypatch.setattr(reference_key, "own_sources", lambda: "other")
    keys.add(key_of(path))

    assert len(keys) == 3


# -- the reference job -------------------------------------------------------------------------


def test_a_second_run_takes_the_reference_of_the_first(
    write_case: CaseWriter, tmp_path: Path
) -> None:
    case = spec(write_case(MODEL), steps=2)
    first = made(case, tmp_path / "first", tmp_path / "cache")
    again = made(case, tmp_path / "again", tmp_path / "cache")

    assert (was_cached(first), was_cached(again)) == (False, True)
    assert first.notes == again.notes
    assert names(tmp_path / "first") == names(tmp_path / "again")
    for name in names(tmp_path / "first"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert names(tmp_path) == ["again", "cache", "first", "model.py"]


def test_what_the_key_cannot_see_is_seen_by_one_run(write_case: CaseWriter, tmp_path: Path) -> None:
    factor = tmp_path / "factor.txt"
    factor.write_text("1.5")
    reading = f"float(pathlib.Path({str(factor)!r}).read_text())"
    text = "import pathlib\n" + MODEL.replace("self.first(x)", f"self.first(x) * {reading}")
    case = spec(write_case(text))
    made(case, tmp_path / "first", tmp_path / "cache")
    assert was_cached(made(case, tmp_path / "same", tmp_path / "cache"))
    factor.write_text("1.25")
    changed = made(case, tmp_path / "changed", tmp_path / "cache")

    assert not was_cached(changed)
    assert "not what one device computes now" in changed.remarks[0]
    assert was_cached(made(case, tmp_path / "again", tmp_path / "cache"))


def test_a_damaged_reference_is_made_anew(write_case: CaseWriter, tmp_path: Path) -> None:
    case = spec(write_case(MODEL))
    made(case, tmp_path / "first", tmp_path / "cache")
    (entry,) = (tmp_path / "cache").iterdir()
    _flip(entry / NAMES[1])
    repaired = made(case, tmp_path / "repaired", tmp_path / "cache")

    assert not was_cached(repaired)
    assert "step-0000.safetensors" in repaired.remarks[0]
    expected = (tmp_path / "first" / NAMES[1]).read_bytes()
    assert (tmp_path / "repaired" / NAMES[1]).read_bytes() == expected
    assert was_cached(made(case, tmp_path / "again", tmp_path / "cache"))


def test_a_cache_nobody_can_write_costs_nothing_else(
    write_case: CaseWriter, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    case = spec(write_case(MODEL))
    report = made(case, tmp_path / "first", tmp_path / "file" / "below")

    assert names(tmp_path / "first") == [*NAMES]
    assert any("was not kept" in remark for remark in report.remarks)


def test_without_a_cache_nothing_is_kept(write_case: CaseWriter, tmp_path: Path) -> None:
    report = made(spec(write_case(MODEL)), tmp_path / "first", "")

    assert not was_cached(report)
    assert report.remarks == []
    assert names(tmp_path) == ["first", "model.py"]


def test_a_model_that_raises_is_told_as_without_a_cache(
    write_case: CaseWriter, tmp_path: Path
) -> None:
    case = spec(write_case(MODEL.replace("self.first(x)", "self.second(x)")))
    with pytest.raises(ReferenceRunError, match="second"):
        made(case, tmp_path / "first", tmp_path / "cache")


# -- the command -------------------------------------------------------------------------------


def test_the_flag_and_the_variable_turn_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_off(*words: str) -> bool:
        return cli.options_from(parse_arguments(["run", "hf:gpt2", *words]), words).no_cache

    assert (is_off(), is_off("--no-cache")) == (False, True)
    monkeypatch.setenv("SPMD_VERIFY_NO_CACHE", "1")
    assert is_off()


def told(record: Any) -> bytes:
    """Return a record without its times."""
    content = msgspec.json.decode(run.records.encode(record))
    content.pop("references")
    for cell in content["cells"]:
        for name in ("duration_seconds", "seconds", "cpu_seconds"):
            cell.pop(name)
    return msgspec.json.encode(content)


class Silent:
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def planned(self, count: int) -> None:
        pass

    def started(self, what: str) -> None:
        pass

    def finished(self, cell: Any) -> None:
        pass

    def alive(self, style: str, step: int, rank: int) -> None:
        pass


@pytest.mark.dist
def test_a_cached_reference_gives_the_same_record(
    write_case: CaseWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    path = write_case(MODEL)
    runs = []
    for no_cache in (True, False, False):
        events = Silent()
        options = Options(
            targets=(path,), styles=("fully_shard",), runner="lockstep", no_cache=no_cache
        )
        runs.append((told(run.verify(options, events)), events.notes))
        assert (tmp_path / "home").exists() != no_cache or len(runs) > 1

    assert runs[0][0] == runs[1][0] == runs[2][0]
    assert [any("earlier run" in note for note in notes) for _, notes in runs] == [
        False,
        False,
        True,
    ]
    assert names(tmp_path) == ["home", "model.py"]
