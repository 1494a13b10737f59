"""The terminal report: one table, then what a failing cell needs said."""

import pytest

from spmd_verify.record import (
    Cause,
    Cell,
    Exercised,
    FirstDivergence,
    Record,
    Row,
    WorstElement,
    WorstTensor,
)
from spmd_verify.reporters.terminal import render


def _cell(style: str = "replicate", verdict: str = "rounding", **changes: object) -> Cell:
    fields: dict[str, object] = {
        "case": "mlp.py",
        "style": style,
        "mesh": "dp=2",
        "dtype": "float32",
        "world_size": 2,
        "runner": "processes",
        "verdict": verdict,
        "worst": WorstTensor(
            tensor="fc.weight", stage="gradients", step=1, error=3e-8, noise=6e-8, ratio=0.5
        ),
        "exercised": Exercised(n=42, of=44),
        "counts": {"rounding": 3, "exact": 41},
    }
    return Cell(**(fields | changes))  # type: ignore[arg-type]


def _failing() -> Cell:
    row = Row(
        name="fc.weight",
        stage="gradients",
        step=1,
        verdict="mismatch",
        ranks=[0, 1, 3],
        error=0.5,
        noise=1e-7,
        ratio=5e6,
        max_ulp=8388608,
        worst=WorstElement(index=[11, 1], actual=0.0625, expected=0.03125),
        cause=Cause(
            kind="factor", text="gradients are 2.000 x", residual=0.8, remedy="divide by dp"
        ),
    )
    later = Row(
        name="fc.weight",
        stage="parameters",
        step=1,
        verdict="mismatch",
        downstream_of="gradients fc.weight",
    )
    return _cell(
        "fully_shard",
        "mismatch",
        first_divergence=FirstDivergence(
            step=1,
            stage="gradients",
            tensor="fc.weight",
            operator="aten.mm",
            source="mlp.py:22",
        ),
        tensors=[row, later],
        fallbacks={"aten.topk": 2, "aten.sort": 5},
    )


def test_a_passing_run_says_how_much_room_is_left() -> None:
    text = render(Record(cells=[_cell(), _cell("default", "exact", worst=None)]))

    assert text.splitlines()[0].split("  ")[0] == "style"
    assert text.splitlines()[0].split()[-3:] == ["exercised", "fallbacks", "seconds"]
    assert "fc.weight (gradients, step 1)" in text
    assert "3e-08 / 6e-08 = 0.5" in text
    assert "42 of 44" in text
    assert text.splitlines()[-1] == (
        "0 of 2 cells fail; worst 0.12 of the allowed error (replicate, gradients fc.weight)"
    )


def test_a_failing_cell_gets_its_first_divergence() -> None:
    text = render(Record(cells=[_cell(), _failing()]))

    assert (
        """
mlp.py/fully_shard, mesh dp=2, float32: mismatch
  first divergence: step 1, gradients, fc.weight
  worst element [11, 1]: actual 0.0625, expected 0.03125, 8388608 ulp
  5e+06 x the noise, ranks 0-1, 3
  first differing operator: aten.mm at mlp.py:22
  1 later tensor is only downstream of it
  cause: factor: gradients are 2.000 x (residual 0.8 x noise)
  remedy: divide by dp
"""
        in text
    )
    assert "aten.sort x 5, aten.topk x 2" in text
    assert text.splitlines()[-1] == "1 of 2 cells fail"


def test_a_module_found_by_teacher_forcing_has_a_line() -> None:
    cell = _failing()
    assert cell.first_divergence is not None
    cell.first_divergence.located = "blocks.1: with the reference fed in all is right (3 runs)"

    text = render(Record(cells=[cell]))

    assert "\n  located by teacher forcing: blocks.1: with the reference fed in all is" in text


def test_a_cause_that_is_no_fit_has_no_residual_and_says_what_could_not_be_run() -> None:
    cell = _failing()
    cell.cause = Cause(kind="unexplained", text="no known cause fits fc.weight")
    for row in cell.tensors:
        row.cause = None
    cell.unknown["not_run"] = ["a part of the batch: ValueError: 3 rows are too few"]

    text = render(Record(cells=[cell]))

    assert "cause: unexplained: no known cause fits fc.weight\n" in text
    assert "could not be run: a part of the batch: ValueError: 3 rows are too few" in text


def test_an_error_names_its_log_and_an_unsupported_cell_its_reason() -> None:
    cells = [
        _cell("replicate", "error", worst=None, message="rank 1 died", log="/tmp/rank1.log"),
        _cell("default", "unsupported", worst=None, skipped_reason="it has a branch at m.py:3"),
        _cell("fully_shard", "undetermined", undetermined_reason="no usable floor"),
    ]
    text = render(Record(cells=cells))

    assert "  rank 1 died\n  log: /tmp/rank1.log" in text
    assert "  it has a branch at m.py:3" in text
    assert "  no usable floor" in text
    assert "0 of 1 cells fail (1 error, 1 unsupported)" in text


def test_names_that_look_like_numbers_stay_as_they_are() -> None:
    text = render(Record(cells=[_cell(worst=None, style="0012")]))

    assert "0012 " in text


@pytest.mark.parametrize(("verbosity", "shown"), [(0, set()), (1, {"a"}), (2, {"a", "b"})])
def test_verbosity_lists_tensors(verbosity: int, shown: set[str]) -> None:
    rows = [
        Row(name="tensor_a", stage="loss", step=0, verdict="rounding"),
        Row(name="tensor_b", stage="loss", step=0, verdict="exact"),
    ]
    text = render(Record(cells=[_cell(tensors=rows)]), verbosity=verbosity)

    assert {name for name in "ab" if f"tensor_{name}" in text} == shown


def test_several_cases_and_dtypes_get_columns() -> None:
    cells = [_cell(), _cell(case="conv.py", dtype="float64")]

    assert render(Record(cells=cells)).split()[:3] == ["case", "dtype", "style"]


def test_explain_comes_first() -> None:
    record = Record(cells=[_cell()], discovered={"model": "class Model, line 3", "loss": "default"})

    assert render(record, explain=True).splitlines()[:2] == [
        "model  class Model, line 3",
        "loss   default",
    ]


def test_a_wrong_report_of_a_right_training_is_a_warning() -> None:
    text = render(Record(cells=[_cell(counts={"mismatch": 1, "undetermined": 2})]))

    assert "warning: mlp.py/replicate reports another value than it trains with" in text
    assert "2 rows undetermined, 0 not exercised" in text
    assert "of the allowed error" not in text


def test_under_strict_such_a_cell_gets_its_paragraph() -> None:
    record = Record(cells=[_cell(counts={"undetermined": 2})], settings={"strict": True})

    assert "1 of 1 cells fail" in render(record)


def test_notes_of_the_case_are_printed_last() -> None:
    record = Record(cells=[_cell()], unknown={"notes": {"mlp.py": ["a projection is used"]}})

    assert render(record).splitlines()[-1] == "note: mlp.py: a projection is used"


def test_what_a_passing_cell_has_to_say_is_a_note() -> None:
    text = render(Record(cells=[_cell(message="the eval forward failed"), _failing()]))

    assert text.endswith("note: mlp.py/replicate: the eval forward failed")
