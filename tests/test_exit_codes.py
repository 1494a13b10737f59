"""The first exit code of the table that applies."""

import pytest

from spmd_verify.exit_codes import decide
from spmd_verify.record import Cell


def _cells(*verdicts: str, counts: dict[str, int] | None = None) -> list[Cell]:
    return [
        Cell(
            case="m.py",
            style=f"style{index}",
            mesh="dp=2",
            dtype="float32",
            world_size=2,
            runner="lockstep",
            verdict=verdict,
            counts=counts or {},
        )
        for index, verdict in enumerate(verdicts)
    ]


@pytest.mark.parametrize(
    ("verdicts", "code"),
    [
        (["exact", "rounding", "undetermined"], 0),
        (["exact", "unsupported"], 0),
        (["exact", "mismatch"], 1),
        (["semantic"], 1),
        (["not_exercised"], 1),
        (["mismatch", "error", "unsupported"], 3),
        (["unsupported", "unsupported"], 5),
        ([], 5),
    ],
)
def test_the_code_follows_the_worst_cell(verdicts: list[str], code: int) -> None:
    assert decide(_cells(*verdicts)) == code


def test_exit_zero_turns_1_into_0_and_nothing_else() -> None:
    assert decide(_cells("mismatch"), exit_zero=True) == 0
    assert decide(_cells("mismatch", "error"), exit_zero=True) == 3
    assert decide(_cells("unsupported"), exit_zero=True) == 5


@pytest.mark.parametrize("word", ["undetermined", "not_exercised", "mismatch"])
def test_strict_fails_for_rows_that_did_not_fail_the_cell(word: str) -> None:
    cells = _cells("rounding", counts={word: 1})

    assert decide(cells) == 0
    assert decide(cells, strict=True) == 1
    assert decide(_cells("undetermined"), strict=True) == 1
