"""`spmd-verify compare A B`: dumps of real ranks, of anyone's files, and records."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dump_script
import pytest
import torch
from ranked import Ranks
from safetensors.torch import save_file
from test_dump import write
from torch import Tensor

from spmd_verify import cli
from spmd_verify.dumps import dump
from spmd_verify.dumps.dump import Entry
from spmd_verify.layouts import Indexed, Partial, Replicate, Shard
from spmd_verify.record import Cell, FirstDivergence, Record, decode, encode

Compare = Callable[..., tuple[int, str, Any]]


@pytest.fixture
def compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Run the verb; return its exit code, what it printed, and the cell of its record."""

    def run(*words: object) -> tuple[int, str, Any]:
        report = tmp_path / "report.json"
        code = cli.main(["compare", *map(str, words), "--report", f"json={report}"])
        shown = capsys.readouterr()
        cells = decode(report.read_bytes()).cells if code not in (2, 4) else []
        return code, shown.out + shown.err, cells[0] if cells else None

    return run


# -- a real script ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of dumps of one device: the reference, float64 and other orders."""
    folder = tmp_path_factory.mktemp("runs")
    dump_script.main(str(folder / "one"))
    dump_script.main(str(folder / "float64"), dtype="float64")
    for order in range(1, 5):
        dump_script.main(str(folder / f"order{order}"), order=str(order))
    return folder


@pytest.fixture(scope="module")
def noise(runs: Path) -> list[str]:
    return [word for i in range(1, 5) for word in ("--noise", str(runs / f"order{i}"))]


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory, on_ranks: Ranks) -> dict[str, Path]:
    """Return dumps of the script on two ranks, with and without a planted factor."""
    folder = tmp_path_factory.mktemp("wrapped")
    found = {}
    for wrapper in ("ddp", "fsdp"):
        for factor in ("", "1.0001"):
            path = found[wrapper + factor] = folder / f"{wrapper}{factor}"
            on_ranks(dump_script.main, str(path), wrapper=wrapper, factor=factor or "1.0")
    return found


@pytest.mark.dist
def test_a_script_on_its_own_ranks_is_recorded_and_compared(
    compare: Compare, runs: Path, tmp_path: Path, root: Path
) -> None:
    words = [str(tmp_path / "two"), f"store=file://{tmp_path}/store", "wrapper=fsdp"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(root / "tests/dump_script.py"), *words],
            env={**environment, "RANK": str(rank), "WORLD_SIZE": "2"},
        )
        for rank in range(2)
    ]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    code, text, cell = compare(runs / "one", tmp_path / "two")
    assert code == 0, text
    assert not cell.counts.get("mismatch")


@pytest.mark.dist
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("with_noise", [False, True])
def test_a_clean_parallel_script_passes(
    compare: Compare,
    runs: Path,
    noise: list[str],
    wrapped: dict[str, Path],
    wrapper: str,
    with_noise: bool,
) -> None:
    more = [*noise, "--exact", runs / "float64"] if with_noise else []
    code, text, cell = compare(runs / "one", wrapped[wrapper], *more)
    assert (code, cell.world_size, cell.style) == (0, 2, "compare"), text
    assert not cell.counts.get("mismatch")
    assert cell.exercised is not None
    assert cell.exercised.n == cell.exercised.of == 14
    if with_noise:
        assert cell.verdict == "rounding"
        assert not cell.counts.get("undetermined")
    inferred = "layout R inferred from shapes" in cell.message
    assert inferred == (wrapper == "ddp")
    assert cell.mesh == ("dp=2" if wrapper == "ddp" else "fsdp=2")


@pytest.mark.dist
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("with_noise", [False, True])
def test_a_planted_factor_is_a_mismatch_with_its_cause(
    compare: Compare,
    runs: Path,
    noise: list[str],
    wrapped: dict[str, Path],
    wrapper: str,
    with_noise: bool,
) -> None:
    code, text, cell = compare(
        runs / "one", wrapped[f"{wrapper}1.0001"], *(noise if with_noise else [])
    )
    assert (code, cell.verdict) == (1, "mismatch"), text
    assert cell.first_divergence == FirstDivergence(step=0, stage="gradients", tensor="2.weight")
    assert cell.cause is not None
    assert cell.cause.kind == "factor"
    assert cell.cause.factor == pytest.approx(1.0001, abs=1e-6)
    assert "cause: factor: 2.weight is 1.0001 x the reference" in text


@pytest.mark.dist
def test_a_parallel_dump_may_be_the_reference(
    compare: Compare, runs: Path, wrapped: dict[str, Path]
) -> None:
    code, text, _ = compare(wrapped["fsdp"], runs / "one")
    assert code == 0, text
    code, text, _ = compare(wrapped["ddp"], wrapped["fsdp"])
    assert code == 2
    assert "[dump-no-layout]" in text
    layout = runs / "layout.json"
    layout.write_text('{"*": ["R"]}')
    code, text, _ = compare(wrapped["ddp"], wrapped["fsdp"], "--layout", layout)
    assert code == 0, text


@pytest.mark.dist
def test_nan_in_the_candidate_is_a_mismatch_and_in_the_reference_refused(
    compare: Compare, runs: Path, tmp_path: Path, on_ranks: Ranks
) -> None:
    poisoned = tmp_path / "nan"
    on_ranks(dump_script.main, str(poisoned), wrapper="fsdp", poison="1")
    code, text, cell = compare(runs / "one", poisoned)
    assert (code, cell.verdict) == (1, "mismatch"), text
    assert cell.first_divergence is not None
    assert cell.first_divergence.tensor == "5.bias"
    code, text, _ = compare(poisoned, runs / "one")
    assert code == 2
    assert "nan at [5]" in text
    assert "[dump-not-finite]" in text


def test_a_run_of_one_device_is_exact_beside_itself(compare: Compare, runs: Path) -> None:
    code, _, cell = compare(runs / "one", runs / "one", "--strict")
    assert (code, cell.verdict, cell.mesh) == (0, "exact", "1")


def test_other_orders_of_the_batch_are_rounding(
    compare: Compare, runs: Path, noise: list[str]
) -> None:
    code, text, cell = compare(runs / "one", runs / "order4", *noise[:6])
    assert (code, cell.verdict) == (0, "rounding"), text
    assert "3 noise runs" in cell.message


@pytest.mark.parametrize(
    ("flag", "other", "why"),
    [
        ("--exact", "one", "dtype torch.float32, expected the reference in float64"),
        ("--noise", "float64", "dtype torch.float64 for torch.float32"),
    ],
)
def test_a_floor_needs_runs_of_the_reference(
    compare: Compare, runs: Path, flag: str, other: str, why: str
) -> None:
    code, text, _ = compare(runs / "one", runs / "order1", flag, runs / other)
    assert code == 2
    assert why in text
    assert "[compare-noise]" in text


# -- anyone's files --------------------------------------------------------------------------

G = "free|0|gradients|w"


def whole(folder: Path, **values: Tensor) -> Path:
    """Write a dump of one device with gradients."""
    entries = {
        f"free|0|gradients|{name}": Entry(value, value.shape, ()) for name, value in values.items()
    }
    return write(folder, {(): entries}, {})


def sharded(folder: Path, *parts: tuple[Tensor, object], shape: tuple[int, ...] = (8, 4)) -> Path:
    """Write the gradient `w` in parts over `dp`."""
    entries = {
        (rank,): {G: Entry(local, shape, None if layout is None else (layout,))}
        for rank, (local, layout) in enumerate(parts)
    }
    return write(folder, entries, {"dp": len(parts)})


@pytest.fixture
def w() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


def test_layouts_of_all_kinds_are_put_together(compare: Compare, tmp_path: Path, w: Tensor) -> None:
    a = whole(tmp_path / "a", w=w)
    even, odd = tuple(range(0, 8, 2)), tuple(range(1, 8, 2))
    candidates = {
        "shards": [(w[:4], Shard(0)), (w[4:], Shard(0))],
        "uneven": [(w[:5], Shard(0, (5, 3))), (w[5:], Shard(0, (5, 3)))],
        "indices": [(w[::2], Indexed(0, even)), (w[1::2], Indexed(0, odd))],
        "copies": [(w, Replicate()), (w, Replicate())],
        "terms": [(w, Partial()), (torch.zeros(8, 4), Partial())],
        "inferred": [(w[:, :2], None), (w[:, 2:], None)],
        "inferred uneven": [(w[:5], None), (w[5:], None)],
    }
    for name, parts in candidates.items():
        code, text, cell = compare(a, sharded(tmp_path / name, *parts))
        assert (code, cell.verdict) == (0, "exact"), f"{name}: {text}"


def test_shards_in_the_wrong_place_are_a_mismatch(
    compare: Compare, tmp_path: Path, w: Tensor
) -> None:
    swapped = sharded(tmp_path / "b", (w[4:], Shard(0)), (w[:4], Shard(0)))
    code, text, cell = compare(whole(tmp_path / "a", w=w), swapped)
    assert (code, cell.verdict) == (1, "mismatch"), text
    assert cell.tensors[0].ranks == [0, 1]


def test_copies_that_differ_are_a_mismatch_however_little(
    compare: Compare, tmp_path: Path, w: Tensor
) -> None:
    copy = w.clone()
    copy[0, 0] = copy[0, 0] * (1 + 4e-6)
    b = sharded(tmp_path / "b", (w, Replicate()), (copy, Replicate()))
    code, text, cell = compare(whole(tmp_path / "a", w=w), b)
    assert (code, cell.verdict) == (1, "mismatch"), text
    assert cell.tensors[0].unknown["copies_differ"] is True


def test_without_noise_what_nothing_explains_is_undetermined(
    compare: Compare, tmp_path: Path, w: Tensor
) -> None:
    a = whole(tmp_path / "a", w=w)
    spread = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    code, text, cell = compare(a, whole(tmp_path / "b", w=w + 1e-5 * spread))
    assert (code, cell.verdict) == (0, "undetermined"), text
    assert "give --exact or --noise" in text
    assert compare(a, tmp_path / "b", "--strict")[0] == 1
    code, text, cell = compare(a, whole(tmp_path / "c", w=w + 1e-2 * spread))
    assert (code, cell.verdict) == (1, "mismatch"), text
    code, text, cell = compare(a, whole(tmp_path / "d", w=2 * w))
    assert cell.cause is not None
    assert cell.cause.factor == pytest.approx(2.0)


def test_a_gradient_that_is_zero_beside_the_others_decides_nothing(
    compare: Compare, tmp_path: Path, w: Tensor
) -> None:
    tiny = torch.tensor([3e-9, -1e-9, 2e-9, 5e-9])
    a = whole(tmp_path / "a", w=w, b=tiny)
    code, text, cell = compare(a, whole(tmp_path / "b", w=w, b=tiny.flip(0)))
    assert code == 0, text
    assert {row.name: row.verdict for row in cell.tensors} == {"w": "exact", "b": "undetermined"}


@pytest.mark.parametrize("runs", [1, 4])
def test_few_noise_runs_leave_gradients_that_cancel_undecided(
    compare: Compare, tmp_path: Path, w: Tensor, runs: int
) -> None:
    # An attention's key bias: rounding decides all of it, and a run of it may be exactly 0.
    a = whole(tmp_path / "a", w=w, b=torch.zeros(3))
    b = whole(tmp_path / "b", w=w, b=torch.tensor([0.0, 4e-9, -2e-9]))
    draws = [torch.zeros(3), *(torch.full((3,), (-1) ** i * 3e-9) for i in range(3))]
    noise = [whole(tmp_path / f"n{i}", w=w * (1 + 1e-7), b=draws[i]) for i in range(runs)]
    code, text, cell = compare(a, b, *(word for path in noise for word in ("--noise", path)))
    assert code == 0, text
    verdicts = {row.name: row.verdict for row in cell.tensors}
    assert verdicts["b"] == ("undetermined" if runs == 1 else "not_exercised")
    code, text, _ = compare(a, whole(tmp_path / "c", w=1.0001 * w, b=torch.zeros(3)))
    assert code == 1, text


def test_names_shapes_and_dtypes_that_differ_are_rows(
    compare: Compare, tmp_path: Path, w: Tensor
) -> None:
    a = whole(tmp_path / "a", w=w, v=w, u=w, t=w)
    b = whole(tmp_path / "b", v=w[:7], u=w.double(), t=w, s=w)
    code, text, cell = compare(a, b)
    assert code == 1, text
    causes = {row.name: row.cause.text for row in cell.tensors if row.cause is not None}
    assert causes == {
        "w": "absent on every rank",
        "v": "global shape [7, 4], expected [8, 4]",
        "u": "dtype float64, expected float32",
        "s": "the reference has no such tensor",
    }


def test_holes_are_rows_of_the_candidate_and_refused_in_the_reference(
    compare: Compare, tmp_path: Path, w: Tensor
) -> None:
    parts = [
        (w[[0, 1, 2, 3]], Indexed(0, (0, 1, 2, 3))),
        (w[[3, 5, 6, 7]], Indexed(0, (3, 5, 6, 7))),
    ]
    holes = sharded(tmp_path / "b", *parts)
    a = whole(tmp_path / "a", w=w)
    code, text, cell = compare(a, holes)
    assert code == 1, text
    assert cell.cause is not None
    assert cell.cause.text == "4 elements are on no rank"
    code, text, _ = compare(holes, a)
    assert code == 2
    assert "[dump-hole]" in text


def test_undeclared_parts_that_no_layout_gives_are_rows(
    compare: Compare, tmp_path: Path, w: Tensor
) -> None:
    b = sharded(tmp_path / "b", (w[:3], None), (w[:3], None))
    code, text, cell = compare(whole(tmp_path / "a", w=w), b)
    assert code == 1, text
    assert cell.cause is not None
    assert cell.cause.text == "parts of [3, 4]: no layout makes them of [8, 4]"


def test_several_layouts_that_fit_are_named(compare: Compare, tmp_path: Path, w: Tensor) -> None:
    a = whole(tmp_path / "a", w=w)
    parts = {(i, j): {G: Entry(w[4 * i : 4 * i + 4])} for i in range(2) for j in range(2)}
    b = write(tmp_path / "b", parts, {"dp": 2, "tp": 2})
    code, text, _ = compare(a, b)
    assert code == 2
    assert "R,S(0) or S(0),R" in text
    assert "[layout-ambiguous]" in text
    layout = tmp_path / "layout.json"
    layout.write_text('{"w*": [{"shard": 0}, "R"]}')
    assert compare(a, b, "--layout", layout)[2].verdict == "exact"
    layout.write_text('{"w*": [{"shard": 0}]}')
    code, text, _ = compare(a, b, "--layout", layout)
    assert code == 2
    assert "[dump-layout]" in text
    layout.write_text('{"w*": ')
    assert "[layout-file]" in compare(a, b, "--layout", layout)[1]


def test_plain_files_of_ranks_need_a_mesh(compare: Compare, tmp_path: Path, w: Tensor) -> None:
    save_file({"fc.weight": w}, str(tmp_path / "a.safetensors"))
    a, b = tmp_path / "a.safetensors", tmp_path / "b"
    b.mkdir()
    for rank in range(2):
        save_file({"fc.weight": w.chunk(2)[rank].clone()}, str(b / f"rank{rank}.safetensors"))
    code, text, _ = compare(a, b)
    assert code == 2
    assert "--axes dp=2" in text
    assert "[dump-axes]" in text
    code, text, cell = compare(a, b, "--axes", "dp=2")
    assert (code, cell.verdict) == (0, "exact"), text
    assert cell.tensors[0].stage == "parameters"
    assert cell.tensors[0].layout == "S(0)"
    assert "[dump-axes]" in compare(a, b, "--axes", "dp=3")[1]
    (b / "rank1.safetensors").rename(b / "rank2.safetensors")
    assert "[dump-axes]" in compare(a, b, "--axes", "dp=2")[1]


def test_losses_of_ranks_may_be_right_in_the_mean(compare: Compare, tmp_path: Path) -> None:
    key = "free|0|loss|loss"
    a = write(tmp_path / "a", {(): {key: Entry(torch.tensor(2.0), (), ())}}, {})
    parts = {(i,): {key: Entry(torch.tensor(1.0 + 2 * i))} for i in range(2)}
    _, text, cell = compare(a, write(tmp_path / "b", parts, {"dp": 2}))
    assert "the loss is right as the mean over ranks" in cell.message, text


def _cut(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


BAD = {
    "nothing": (lambda at: [each.unlink() for each in at.iterdir()], "dump-missing"),
    "a rank missing": (lambda at: (at / "rank-00001.json").unlink(), "dump-missing-rank"),
    "truncated": (_cut, "dump-unreadable"),
    "no json": (lambda at: (at / "rank-00000.json").write_text("{"), "dump-unreadable"),
    "newer": (lambda at: (at / "rank-00000.json").write_text('{"schema": 9}'), "dump-too-new"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("side", ["reference", "candidate"])
def test_bad_dumps_exit_2_without_a_traceback(
    compare: Compare, tmp_path: Path, w: Tensor, what: str, side: str
) -> None:
    damage, slug = BAD[what]
    good = whole(tmp_path / "a", w=w)
    bad = sharded(tmp_path / "b", (w[:4], Shard(0)), (w[4:], Shard(0)))
    damage(bad)
    code, text, _ = compare(*((bad, good) if side == "reference" else (good, bad)))
    assert code == 2
    assert f"[{slug}]" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("keys", "slug"),
    [(["anchored|0|gradients|w"], "dump-no-tensors"), (["free|1|gradients|w"], "dump-steps")],
)
def test_a_reference_has_the_free_run_from_step_0(
    compare: Compare, tmp_path: Path, w: Tensor, keys: list[str], slug: str
) -> None:
    a = write(tmp_path / "a", {(): {key: Entry(w, w.shape, ()) for key in keys}}, {})
    code, text, _ = compare(a, whole(tmp_path / "b", w=w))
    assert code == 2
    assert f"[{slug}]" in text


def test_a_reference_whose_copies_differ_is_refused(
    compare: Compare, tmp_path: Path, w: Tensor
) -> None:
    a = sharded(tmp_path / "a", (w, Replicate()), (2 * w, Replicate()))
    code, text, _ = compare(a, whole(tmp_path / "b", w=w))
    assert code == 2
    assert "[dump-overlap]" in text


def test_nothing_but_zeros_is_not_exercised(compare: Compare, tmp_path: Path) -> None:
    a, b = (whole(tmp_path / name, w=torch.zeros(4)) for name in "ab")
    code, text, cell = compare(a, b)
    assert (code, cell.verdict) == (1, "not_exercised"), text


# -- records ---------------------------------------------------------------------------------


def _record(path: Path, **verdicts: str) -> Path:
    cells = [
        Cell(
            case="m.py",
            style=style,
            mesh="dp=2",
            dtype="float32",
            world_size=2,
            runner="processes",
            verdict=verdict,
        )
        for style, verdict in verdicts.items()
    ]
    path.write_bytes(encode(Record(cells=cells)))
    return path


@pytest.mark.parametrize(
    ("before", "after", "code", "line"),
    [
        ({"a": "exact"}, {"a": "exact"}, 0, "0 new, 0 gone, 0 changed; 0 regressions"),
        ({"a": "exact"}, {"a": "rounding"}, 0, "changed  m.py/a dp=2 float32: exact -> rounding"),
        ({"a": "exact"}, {"a": "mismatch"}, 1, "exact -> mismatch  REGRESSION"),
        ({"a": "exact"}, {"a": "error"}, 3, "exact -> error  REGRESSION"),
        ({"a": "mismatch"}, {"a": "mismatch"}, 0, "0 changed"),
        ({"a": "mismatch"}, {"a": "exact"}, 0, "mismatch -> exact"),
        ({"a": "exact"}, {"a": "exact", "b": "exact"}, 0, "new      m.py/b"),
        ({"a": "exact"}, {"a": "exact", "b": "mismatch"}, 1, "- -> mismatch  REGRESSION"),
        ({"a": "exact", "b": "exact"}, {"a": "exact"}, 0, "gone     m.py/b"),
    ],
)
def test_two_records_are_compared_cell_by_cell(
    compare: Compare, tmp_path: Path, before: dict, after: dict, code: int, line: str
) -> None:
    a, b = _record(tmp_path / "a.json", **before), _record(tmp_path / "b.json", **after)
    got, text, _ = compare(a, b)
    assert got == code
    assert line in text


def test_a_cell_that_is_gone_fails_under_strict(compare: Compare, tmp_path: Path) -> None:
    a, b = _record(tmp_path / "a.json", a="exact"), _record(tmp_path / "b.json")
    assert compare(a, b)[0] == 0
    assert compare(a, b, "--strict")[0] == 1
    assert compare(a, b, "--strict", "--exit-zero")[0] == 0


def test_a_record_and_a_dump_are_not_compared(compare: Compare, tmp_path: Path, w: Tensor) -> None:
    a = _record(tmp_path / "a.json", a="exact")
    code, text, _ = compare(a, whole(tmp_path / "b", w=w))
    assert code == 2
    assert "[compare-kinds]" in text
    code, text, _ = compare(a, tmp_path / "none.json")
    assert code == 2
    assert "[record-unreadable]" in text
    (tmp_path / "c.json").write_text("[]")
    assert "[not-a-record]" in compare(a, tmp_path / "c.json")[1]


def test_comparing_records_imports_no_torch(tmp_path: Path, root: Path) -> None:
    a = _record(tmp_path / "a.json", a="exact")
    code = (
        "import sys; from spmd_verify.cli import main; main(['compare', *sys.argv[1:]]);"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, a, a], cwd=root, check=True, timeout=60)


def test_the_report_is_a_record_of_one_cell(compare: Compare, tmp_path: Path, w: Tensor) -> None:
    a = whole(tmp_path / "a", w=w)
    compare(a, whole(tmp_path / "b", w=w), "-q")
    plain = json.loads((tmp_path / "report.json").read_text())
    assert plain["settings"]["reference"] == str(a)
    assert [cell["style"] for cell in plain["cells"]] == ["compare"]
    assert dump.read(a).keys() == [G]
