"""The words of a verdict and the rules from numbers to words."""

import math

import pytest

from spmd_verify.verdict import (
    LIMITS,
    STAGES,
    Verdict,
    cell_verdict,
    limit,
    noise_floor,
    row_verdict,
    unit_roundoff,
    usable_floor,
)


def test_the_eight_words_are_spelled_as_in_every_record() -> None:
    words = "exact rounding undetermined mismatch semantic not_exercised unsupported error"
    assert [str(v) for v in Verdict] == words.split()


def test_stages_are_in_order_of_evidence() -> None:
    assert STAGES[0] == "inputs"
    assert STAGES.index("loss") < STAGES.index("gradients") < STAGES.index("parameters")


def test_float32_limits_are_at_most_four() -> None:
    assert all(c <= 4 for (dtype, _), c in LIMITS.items() if dtype == "float32")


def test_complex_dtypes_have_the_limits_of_their_real_part() -> None:
    assert limit("complex64", "row") == limit("float32", "row")
    assert unit_roundoff("complex128") == 2.0**-53
    assert unit_roundoff("int64") == 0.0


def test_the_floor_is_the_largest_error_or_two_u_times_scale() -> None:
    assert noise_floor([1e-9, 3e-9], 2.0**-24, 0.0) == 3e-9
    assert noise_floor([0.0], 2.0**-24, 10.0) == 20.0 * 2.0**-24


def _row(error: float, row_ratio: float = 0.0, *, equal: bool = False, reason: str = "") -> str:
    return row_verdict(
        is_equal=equal,
        error=error,
        noise=1.0,
        row_ratio=row_ratio,
        limits=(4.0, 4.0),
        reason=reason or None,
    )


def test_equal_bits_are_exact_whatever_the_floor() -> None:
    assert _row(9.0, equal=True, reason="x") == "exact"


@pytest.mark.parametrize(
    ("error", "row_ratio", "expected"),
    [
        (3.9, 1.0, "rounding"),
        (4.1, 1.0, "mismatch"),
        (1.0, 4.1, "mismatch"),
        (math.nan, 0.0, "mismatch"),
    ],
)
def test_both_norms_must_be_within_their_limit(
    error: float, row_ratio: float, expected: str
) -> None:
    assert _row(error, row_ratio) == expected


def test_an_unusable_floor_decides_nothing_but_does_not_hide_a_large_error() -> None:
    assert _row(1.0, reason="x") == "undetermined"
    assert _row(9.0, reason="x") == "mismatch"


def _cell(*rows: str, exercised: bool = True, undetermined: int = 0) -> str:
    return cell_verdict(
        rows, is_exercised=exercised, undetermined_elements=undetermined, signal_elements=10
    )


def test_a_cell_takes_the_first_verdict_that_applies() -> None:
    assert _cell("exact", "error", "mismatch") == "error"
    assert _cell("exact", "semantic", "mismatch") == "mismatch"
    assert _cell("exact", "semantic") == "semantic"
    assert _cell("exact", "rounding", exercised=False) == "not_exercised"
    assert _cell("exact", undetermined=6) == "undetermined"
    assert _cell("exact", "rounding", undetermined=5) == "rounding"
    assert _cell("exact", "not_exercised") == "exact"


def test_bfloat16_floors_may_be_coarser_but_never_half_the_value() -> None:
    assert usable_floor("float32") == 1e-3
    assert usable_floor("bfloat16") == 0.5
