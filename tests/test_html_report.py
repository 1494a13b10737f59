"""The HTML report without a browser: complete, self-contained, and deaf to what names say."""

from __future__ import annotations

import fnmatch
import json
import math
import re
import tomllib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from html_records import HOSTILE, hostile_record, large_record, passing_record
from hypothesis import given
from hypothesis import strategies as st

from spmd_verify.planting.certificate import Certificate, Outcome, Sensitivity, put
from spmd_verify.record import Cell, Record, Row
from spmd_verify.reporters import html, html_cell, write_report
from spmd_verify.reporters.escaping import visible
from spmd_verify.reporters.html_data import module_names, pack
from spmd_verify.reporters.html_text import number

_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
_VOID = {"meta", "link", "br", "input"}
_ADDRESSES = ("href", "src", "action", "data", "poster", "srcset", "formaction")


class Page(HTMLParser):
    """What a page holds: its text outside scripts and styles, its tags, ids and addresses."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.text, self.scripts, self.styles = "", [], []
        self.tags: Counter[str] = Counter()
        self.attributes: Counter[str] = Counter()
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(content.decode())
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            self.attributes[name] += 1
            if name == "id":
                self.ids.append(value or "")
            if name in _ADDRESSES:
                self.addresses.append(value or "")
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] == "style":
            self.styles.append(data)
        else:
            self.text += data


def _page(record: Record) -> Page:
    return Page(html.render(record))


def _cell(verdict: str, style: str = "ddp", **more: object) -> Cell:
    return Cell(
        case="model.py",
        style=style,
        mesh="dp=2",
        dtype="float32",
        world_size=2,
        runner="processes",
        verdict=verdict,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("make", [large_record, hostile_record, passing_record, Record])
def test_a_page_asks_for_nothing_and_its_links_lead_somewhere(make: type) -> None:
    page = _page(make())

    assert all(each.startswith("#") or each == "data:," for each in page.addresses)
    assert "url(" not in "".join(page.styles)
    assert "@import" not in "".join(page.styles)
    script = page.scripts[1]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|import\(|EventSource", script)
    assert len(page.ids) == len(set(page.ids))
    assert all(not any(char.isspace() for char in each) for each in page.ids)


def test_every_link_inside_a_page_has_its_target() -> None:
    from urllib.parse import unquote

    for record in (large_record(3, 9, 2), hostile_record()):
        page = _page(record)
        inside = {unquote(each[1:]) for each in page.addresses if each.startswith("#")}
        assert inside <= set(page.ids)
        assert sum(each.startswith("cell=") for each in inside) == len(record.cells)


def test_what_fails_where_and_why_is_there_without_scripts() -> None:
    record = large_record(4, 30, 3)
    bad = record.cells[2]
    assert bad.cause is not None
    assert bad.first_divergence is not None
    bad.cause.text, bad.cause.remedy = "the mean is taken twice", "divide once"
    record.cells.append(_cell("unsupported", "tp", skipped_reason="no plan"))
    record.cells.append(_cell("error", "pp", message="rank 1 died", log="/tmp/rank1.log"))

    text = " ".join(_page(record).text.split())

    assert "1 of 4 cells fails" in text
    assert f"step 0, {bad.first_divergence.stage}, {bad.first_divergence.tensor}" in text
    for said in ("the mean is taken twice", "divide once", "no plan", "rank 1 died", "rank1.log"):
        assert said in text
    for cell in record.cells:
        assert f"{cell.style} on {cell.mesh}" in text
    worst = max(
        (row for row in bad.tensors if not row.downstream_of), key=lambda row: row.ratio or 0
    )
    assert number(worst.error) in text


@pytest.mark.parametrize(
    ("cells", "headline"),
    [
        ([], "The record holds no cells"),
        ([_cell("exact")], "The one cell passes"),
        ([_cell("exact"), _cell("rounding", "tp")], "All 2 cells pass"),
        ([_cell("exact"), _cell("error", "tp")], "No verdict for 1 cell"),
        ([_cell("unsupported")], "Nothing was judged"),
        ([_cell("exact"), _cell("not_exercised", "tp")], "1 of 2 cells fails"),
    ],
)
def test_the_headline_says_what_the_run_found(cells: list[Cell], headline: str) -> None:
    assert headline in _page(Record(cells=cells)).text


def test_strict_is_the_records_own() -> None:
    cells = [_cell("undetermined", undetermined_reason="a tie")]

    assert "The one cell passes" in _page(Record(cells=cells)).text
    assert "1 of 1 cells fails" in _page(Record(cells=cells, settings={"strict": True})).text


def test_hostile_names_are_text() -> None:
    content = html.render(hostile_record())
    page = Page(content)
    usual = _page(large_record(3, 9, 2))

    assert page.tags["script"] == 2
    assert set(page.tags) <= set(usual.tags) | {"br", "details", "summary", "ul", "li"}
    assert not [name for name in page.attributes if name.startswith("on")]
    data = json.loads(page.scripts[0])
    assert {visible(name) for name in HOSTILE} <= set(data["strings"])
    for name in HOSTILE:
        assert visible(name) in page.text
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", content.decode())


def test_a_large_record_stays_below_a_megabyte_and_says_what_it_leaves_out() -> None:
    record = large_record(8, 300, 10)
    content = html.render(record)
    data = json.loads(Page(content).scripts[0])

    assert sum(len(cell.tensors) for cell in record.cells) == 24_000
    assert len(content) < 1_000_000
    differing = sum(row.verdict == "mismatch" for cell in record.cells for row in cell.tensors)
    assert sum(len(cell["details"]) for cell in data["cells"]) + data["left_out"] == differing


def _unpack(packed: str) -> float | None:
    code = 0
    for char in packed:
        code = code * 64 + _DIGITS.index(char)
    if code < 4:
        return (0.0, None, math.inf, math.nan)[code]
    exponent, mantissa = divmod(code - 4, 9000)
    return float(f"{mantissa + 1000}e{exponent - 327}")


@given(st.floats(min_value=0.0) | st.just(math.nan))
def test_a_packed_number_keeps_four_digits(value: float) -> None:
    found = _unpack(pack(value))

    assert len(pack(value)) == 4
    assert found is not None
    if math.isnan(value):
        assert math.isnan(found)
    else:
        assert found == float(f"{value:.3e}")


def test_no_number_is_packed_as_none() -> None:
    assert _unpack(pack(None)) is None


def test_a_word_of_a_newer_version_is_shown_as_it_is() -> None:
    cell = _cell("rounding", counts={"dubious": 1})
    cell.tensors = [Row(name="w", stage="afterwards", step=70_000, verdict="dubious", ratio=2.0)]

    page = _page(Record(cells=[cell, _cell("splendid", "tp")]))

    assert "splendid" in page.text
    assert "dubious" in page.text
    assert json.loads(page.scripts[0])["stages"] == ["afterwards"]


def test_what_is_waived_is_no_pass_and_what_the_gate_says_is_at_the_top(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cells = [_cell("mismatch"), _cell("rounding", "tp")]
    record = Record(cells=cells, exit_code=1, unknown={"gate": ["waived: model.py/ddp: issue 7"]})
    # Whatever lets a cell pass: the page asks the rule that decides the exit code.
    monkeypatch.setattr(html_cell, "fails", lambda cell, strict: False)

    text = " ".join(_page(record).text.split())

    assert "Nothing fails; 1 of 2 cells differs and is waived" in text
    assert "waived: model.py/ddp: issue 7" in text
    assert "mismatch, waived" in text
    assert "The run exits with 1 all the same" in text


def test_a_fault_that_survived_is_said_at_the_top_and_by_name() -> None:
    outcomes = [
        Outcome("drop", "all_reduce 0", "caught", "mismatch", "no_sync", ["no_sync"]),
        Outcome("stale", "all_gather 7", "survived", "rounding"),
    ]
    seen = [Sensitivity("fc.weight", 2e-6, 0, 1e-5), Sensitivity("fc.bias", None)]
    record = passing_record()
    put(record.cells[0], Certificate(outcomes, seen))
    record.cells.append(_cell("rounding", "tp"))

    text = " ".join(_page(record).text.split())

    assert "1 of 2 planted faults caught, 1 survived; 1 of 2 cells have none" in text
    assert "survived: stale: all_gather 7" in text
    assert "an error of 2e-6 (fc.weight)" in text


def test_it_is_one_of_the_formats(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(passing_record(), "html", str(path))

    assert path.read_bytes() == html.render(passing_record())


def test_a_tensor_belongs_to_its_module() -> None:
    pairs = {
        ("module_outputs", "net.0[1]"): "net.0",
        ("gradients", "net.0.bias"): "net.0",
        ("optimizer_state", "net.0.bias.exp_avg"): "net.0",
        ("optimizer_state", "net.0.bias.state.step"): "net.0",
        ("buffers", "net.1.running_mean"): "net.1",
        ("gradients", "scale"): "model",
        ("gradients", "net.2.weight@1"): "net.2",
        ("module_outputs", "net.2#3"): "net.2",
        ("loss", "loss"): "(whole step)",
    }
    rows = [Row(name=name, stage=stage, step=0, verdict="exact") for stage, name in pairs]

    assert module_names(rows) == pairs


def test_numbers_are_short() -> None:
    told = [number(value) for value in (None, 0.0, 16575163.9, 0.9055, 1.08e-8, math.inf, math.nan)]

    assert told == ["-", "0", "1.66e7", "0.905", "1.08e-8", "inf", "nan"]


def test_colours_have_contrast_in_light_and_dark() -> None:
    style = _page(Record()).styles[0]
    colours = {
        name: pair
        for name, *pair in re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", style)
    }
    pairs = [(fore, back) for fore in ("text", "muted", "link") for back in ("bg", "panel")]
    words = ["ok", "bad", "odd", "open", "none", *(f"heat{i}" for i in range(5))]
    pairs += [(f"{word}-fg", f"{word}-bg") for word in words]
    # Lines and the focus are no text: WCAG 2.2 wants 3 of them (1.4.11), 4.5 of text (1.4.3).
    lines = [("error-line", "panel"), ("noise-line", "panel"), ("other-line", "panel")]
    lines += [("focus", "panel"), ("focus", "bg"), ("error-line", "noise-band")]
    for least, each in ((4.5, pairs), (3.0, lines)):
        for fore, back in each:
            for theme in (0, 1):
                found = _contrast(colours[fore][theme], colours[back][theme])
                assert found >= least, (fore, back, theme, found)


def _contrast(one: str, other: str) -> float:
    lights = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (lights[0] + 0.05) / (lights[1] + 0.05)


def _luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_files_of_the_page_are_shipped(root: Path) -> None:
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["spmd_verify"]

    for path in (root / "spmd_verify/reporters/page").iterdir():
        inside = str(path.relative_to(root / "spmd_verify"))
        assert any(fnmatch.fnmatch(inside, pattern) for pattern in patterns), inside
