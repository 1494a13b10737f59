"""The record round-trips, keeps what it does not know, and describes itself."""

import json
import math
from typing import Any

import msgspec
import pytest

from spmd_verify import record as records
from spmd_verify.errors import RecordError
from spmd_verify.plain_structs import from_plain, to_plain
from spmd_verify.record import Cause, Cell, FirstDivergence, Record, Row, WorstElement


def _record() -> Record:
    row = Row(
        name="fc.weight",
        stage="gradients",
        step=1,
        verdict="mismatch",
        error=math.nan,
        noise=0.1,
        ratio=math.inf,
        worst=WorstElement(index=[0, 2], actual=-math.inf, expected=1 / 3),
        cause=Cause(kind="factor", text="k = 2", residual=0.5, factor=2.0, axis="dp", ranks=[0, 1]),
    )
    cell = Cell(
        case="m.py",
        style="replicate",
        mesh="dp=2",
        dtype="float32",
        world_size=2,
        runner="lockstep",
        verdict="mismatch",
        first_divergence=FirstDivergence(step=1, stage="gradients", tensor="fc.weight"),
        tensors=[row],
    )
    return Record(tool="spmd-verify 0", command=["spmd-verify", "m.py"], cells=[cell])


def test_a_record_round_trips_with_non_finite_numbers() -> None:
    text = records.encode(_record())
    back = records.decode(text)

    assert records.encode(back) == text
    row = back.cells[0].tensors[0]
    assert math.isnan(row.error or 0)
    assert row.ratio == math.inf
    assert row.worst is not None
    assert (row.worst.actual, row.worst.expected) == (-math.inf, 1 / 3)
    assert json.loads(text)["cells"][0]["tensors"][0]["error"] == "nan"


def test_unknown_keys_are_kept_at_every_level() -> None:
    plain = json.loads(records.encode(_record()))
    plain["later"] = {"a": 1}
    plain["cells"][0]["later"] = [1]
    plain["cells"][0]["tensors"][0]["cause"]["later"] = "x"

    assert json.loads(records.encode(records.decode(json.dumps(plain)))) == plain


class Inner(msgspec.Struct):
    value: float
    unknown: dict[str, Any] = {}


class Outer(msgspec.Struct):
    by_name: dict[str, Inner]
    ratios: dict[str, dict[str, float]]
    values: list[float]
    maybe: list[Inner] | None = None


def test_structs_and_floats_in_any_container_come_back() -> None:
    outer = Outer(
        by_name={"a": Inner(math.inf, {"later": [1]})},
        ratios={"b": {"c": -math.inf}},
        values=[1.0, math.inf],
        maybe=[Inner(2.0)],
    )
    plain = to_plain(outer)

    assert plain == {
        "by_name": {"a": {"value": "inf", "later": [1]}},
        "ratios": {"b": {"c": "-inf"}},
        "values": [1.0, "inf"],
        "maybe": [{"value": 2.0}],
    }
    assert from_plain(Outer, plain) == outer


def test_the_fields_are_those_of_the_page() -> None:
    plain = json.loads(records.encode(_record()))
    cell = plain["cells"][0]

    assert set(plain) == {
        "schema_version",
        "tool",
        "command",
        "exit_code",
        "environment",
        "settings",
        "case",
        "discovered",
        "cells",
    }
    assert set(cell) == {
        "case",
        "style",
        "mesh",
        "dtype",
        "world_size",
        "runner",
        "verdict",
        "message",
        "cause",
        "first_divergence",
        "worst",
        "counts",
        "exercised",
        "fallbacks",
        "collectives",
        "skipped_reason",
        "undetermined_reason",
        "duration_seconds",
        "log",
        "ties",
        "gate",
        "tensors",
    }
    assert set(cell["tensors"][0]) == {
        "name",
        "aliases",
        "stage",
        "step",
        "run",
        "shape",
        "dtype",
        "layout",
        "ranks",
        "verdict",
        "error",
        "noise",
        "ratio",
        "max_ulp",
        "worst",
        "cause",
        "downstream_of",
    }
    assert set(cell["tensors"][0]["cause"]) == {
        "kind",
        "text",
        "residual",
        "axis",
        "factor",
        "ranks",
        "tensors",
        "remedy",
    }


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("{", "not-a-record"),
        ("[]", "not-a-record"),
        ("{}", "not-a-record"),
        ('{"schema_version": "x"}', "not-a-record"),
        ('{"schema_version": "1.0", "cells": 3}', "not-a-record"),
        ('{"schema_version": "1.0", "cells": [{"style": "x"}]}', "not-a-record"),
        ('{"schema_version": "1.0", "settings": []}', "not-a-record"),
        ("[" * 100_000, "not-a-record"),
        ('{"schema_version": "2.0"}', "record-too-new"),
    ],
)
def test_what_is_no_record_of_ours_is_refused(text: str, slug: str) -> None:
    with pytest.raises(RecordError, match="here.json") as caught:
        records.decode(text, "here.json")

    assert caught.value.slug == slug


def test_a_newer_minor_version_is_read() -> None:
    assert records.decode('{"schema_version": "1.9"}').schema_version == "1.9"


def test_the_schema_allows_unknown_keys_and_non_finite_numbers() -> None:
    schema = records.json_schema()
    row: dict[str, Any] = schema["$defs"]["Row"]

    assert row["additionalProperties"] is True
    assert "unknown" not in row["properties"]
    number = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
    residual = schema["$defs"]["Cause"]["properties"]["residual"]["anyOf"]
    assert residual == [number, {"type": "null"}]
    assert schema["$ref"] == "#/$defs/Record"
