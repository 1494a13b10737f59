"""The HTML report in a real browser, opened from disk: clicks, keys, links, no request."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from html_records import HOSTILE, hostile_record, large_record, passing_record

from spmd_verify.record import Record
from spmd_verify.reporters import html
from spmd_verify.reporters.html_text import number

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on the path"),
]

_SHOWN = "document.querySelector('section.cell.chosen').id"
_TENSOR = "document.querySelector('#tensor h4 code').textContent"
_STATUS = "document.querySelector('.pager [role=status]').textContent"
_DRAWN = """(() => {
  const chart = document.querySelector("#tensor svg.chart");
  const ys = (path) => path.getAttribute("d").match(/[ML][^ML]+/g).map((at) => +at.split(" ")[1]);
  return {
    ticks: [...chart.querySelectorAll("text[text-anchor=end]")].slice(0, -1)
      .map((text) => [text.textContent, text.getAttribute("y") - 4]),
    error: [...chart.querySelectorAll(".dot")].map((dot) => +dot.getAttribute("cy")),
    limit: ys(chart.querySelector(".limit")),
    noise: ys(chart.querySelector(".noise")),
  };
})()"""
_FIRST_LINE = "[...document.querySelector('.rows tbody tr').cells].map(e => e.textContent)"


@pytest.fixture(scope="module")
def raw_browser() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(raw_browser: Browser) -> Iterator[Browser]:
    """Return a browser; no page may have asked for anything or complained."""
    raw_browser.look()
    raw_browser.requests.clear()
    raw_browser.complaints.clear()
    yield raw_browser
    assert raw_browser.complaints == []
    assert {each.partition(":")[0] for each in raw_browser.requests} <= {"file", "data"}
    assert {Path(each).name for each in raw_browser.requests if each[0] == "f"} <= {"report.html"}


@pytest.fixture
def large() -> Record:
    return large_record(4, 90, 4)


def _write(folder: Path, record: Record) -> Path:
    path = folder / "report.html"
    path.write_bytes(html.render(record))
    return path


def test_a_request_and_a_complaint_would_be_seen(raw_browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text("<img src='http://127.0.0.1:9/x.png'><script>console.error('no')</script>")
    raw_browser.open(path)

    assert "http://127.0.0.1:9/x.png" in raw_browser.requests
    assert any("'no'" in each for each in raw_browser.complaints)


def test_a_click_leads_to_a_cell_and_a_tensor_and_the_link_leads_back(
    browser: Browser, tmp_path: Path, large: Record
) -> None:
    path = _write(tmp_path, large)
    browser.open(path)
    assert browser.run(_SHOWN) == "cell=model.py/style2/dp=4/float32"  # the one that fails

    browser.click('a.chip[title^="model.py/style1,"]')
    assert browser.run(_SHOWN) == "cell=model.py/style1/dp=4/float32"
    browser.click(".rows tbody tr:nth-child(3) button.tensor")
    name = browser.run(_TENSOR)
    fragment = browser.run("location.hash")
    assert name == browser.run("document.querySelector('tr.chosen .tensor').textContent")

    browser.open(path, fragment)
    assert browser.run(_SHOWN) == "cell=model.py/style1/dp=4/float32"
    assert browser.run(_TENSOR) == name
    assert [each for each in browser.requests if each != "data:,"] == 2 * [browser.requests[0]]


def test_the_table_shows_the_records_numbers_sorted_and_filtered(
    browser: Browser, tmp_path: Path, large: Record
) -> None:
    browser.open(_write(tmp_path, large))
    cell = large.cells[2]
    worst = max(cell.tensors, key=lambda row: row.ratio or 0.0)
    line = browser.run(_FIRST_LINE)
    assert line[:4] == [worst.name, worst.stage, str(worst.step), worst.verdict]
    assert line[4:7] == [number(value) for value in (worst.error, worst.noise, worst.ratio)]
    assert browser.run(_STATUS).startswith("1-50 of 90 tensors")

    browser.click("[data-column=noise]")
    browser.click("[data-column=noise]")
    browser.click(".check input")
    least = min(cell.tensors, key=lambda row: row.noise or 0.0)
    assert browser.run(_FIRST_LINE)[5] == number(least.noise)
    assert browser.run("document.querySelector('th[aria-sort]').ariaSort") == "ascending"
    assert browser.run(_STATUS) == f"1-50 of {len(cell.tensors)} rows"

    browser.click("input[type=search]")
    browser.type("layers.3.FEED")
    wanted = [row for row in cell.tensors if "layers.3.feed" in row.name]
    assert browser.run(_STATUS) == f"1-{len(wanted)} of {len(wanted)} rows"


def test_every_thing_can_be_reached_by_keys(
    browser: Browser, tmp_path: Path, large: Record
) -> None:
    browser.open(_write(tmp_path, large))
    browser.run("document.querySelector('.heat button[tabindex=\"0\"]').focus()")
    assert ", first divergence" in browser.run("document.activeElement.ariaLabel")
    browser.press("ArrowRight")
    label = browser.run("document.activeElement.ariaLabel")
    browser.press("Enter")
    module, stage = label.split(":")[0].split(", ")
    assert browser.run(_FIRST_LINE)[:2] == [f"{module}.weight", stage]
    assert browser.run(_TENSOR) == f"{module}.weight"
    assert browser.run("document.activeElement.ariaLabel") == label

    browser.run("document.querySelector('#tensor .dot').focus()")
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('.tip').textContent").startswith("step 1: mismatch")
    browser.press("Escape")
    assert browser.run("document.querySelector('.tip')") is None

    browser.open(tmp_path / "report.html")
    reached = set()
    for _ in range(60):
        browser.press("Tab")
        reached.add(browser.run("document.activeElement.id || document.activeElement.classList[0]"))
        outline = browser.run("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or browser.run("document.activeElement.tagName") == "circle"
    assert {"skip", "theme", "chip", "cell-picker", "dot", "tensor"} <= reached


def test_a_chart_shows_the_records_numbers_above_its_noise_floor(
    browser: Browser, tmp_path: Path, large: Record
) -> None:
    browser.open(_write(tmp_path, large))
    name = browser.run(_TENSOR)
    rows = [row for row in large.cells[2].tensors if row.name == name]
    found = browser.run(_DRAWN)
    ticks = {float(text): y for text, y in found["ticks"]}
    (low, bottom), (high, top) = min(ticks.items()), max(ticks.items())
    assert all(re.fullmatch(r"1e-?\d+|10+|0\.0*1|1", text) for text, _ in found["ticks"])

    def value(y: float) -> float:
        share = (bottom - y) / (bottom - top)
        return 10 ** (math.log10(low) + share * (math.log10(high) - math.log10(low)))

    for row, error, limit in zip(rows, found["error"], found["limit"], strict=True):
        assert row.noise is not None
        assert value(error) == pytest.approx(row.error, rel=0.05)
        assert value(limit) == pytest.approx(4 * row.noise, rel=0.05)
    # The band's edge goes on to both sides of the first and last step.
    for row, noise in zip(rows, found["noise"][1:-1], strict=True):
        assert value(noise) == pytest.approx(row.noise, rel=0.05)


def test_the_heat_map_shows_the_worst_row_of_a_module_at_a_stage(
    browser: Browser, tmp_path: Path, large: Record
) -> None:
    browser.open(_write(tmp_path, large))
    place = browser.run("document.querySelector('.heat button.first').ariaLabel")
    module, stage = place.split(":")[0].split(", ")

    rows = [row for row in large.cells[2].tensors if (row.name, row.stage) == (module, stage)]
    worst = max(row.ratio or 0.0 for row in rows)
    assert browser.run("document.querySelector('.heat button.first').textContent") == number(worst)
    assert browser.run("document.querySelectorAll('.heat tbody td button').length") == 90


@pytest.mark.parametrize("make", [large_record, hostile_record, passing_record])
def test_every_control_has_a_name_and_headings_skip_no_level(
    browser: Browser, tmp_path: Path, make: Callable[[], Record]
) -> None:
    browser.open(_write(tmp_path, make()))

    assert browser.unnamed() == []
    levels = browser.run("[...document.querySelectorAll('h1,h2,h3,h4')].map((e) => +e.tagName[1])")
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))


def test_hostile_names_can_be_clicked_and_linked(browser: Browser, tmp_path: Path) -> None:
    record = hostile_record()
    path = _write(tmp_path, record)
    browser.open(path)
    for i in range(len(HOSTILE)):
        browser.run(f"document.querySelectorAll('a.chip')[{i}].click()")
        browser.settle()
        browser.run(f"document.querySelectorAll('button.tensor')[{i}].click()")
        browser.settle()
        seen = browser.run(f"[location.hash, {_SHOWN}, {_TENSOR}]")
        browser.open(path, seen[0])
        assert browser.run(f"[location.hash, {_SHOWN}, {_TENSOR}]") == seen
        for width in (1280, 390):
            browser.look(width=width)
            assert browser.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(
    "fragment", ["#", "#cell=none", "#cell=%E0%A4%A", "#tensor=x&cell", "#matrix"]
)
def test_an_address_that_names_nothing_shows_the_start(
    browser: Browser, tmp_path: Path, fragment: str
) -> None:
    browser.open(_write(tmp_path, passing_record()), fragment)

    assert browser.run(_SHOWN) == "cell=model.py/ddp/dp=4/float32"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_follows_the_system_until_it_is_switched(
    browser: Browser, tmp_path: Path, scheme: str
) -> None:
    def is_dark() -> bool:
        colour = browser.run("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(",")) < 300

    browser.look(scheme=scheme)
    browser.open(_write(tmp_path, passing_record()))
    assert is_dark() == (scheme == "dark")
    browser.click("#theme")
    assert is_dark() == (scheme == "light")


def test_an_empty_record_is_a_page(browser: Browser, tmp_path: Path) -> None:
    browser.open(_write(tmp_path, Record()))

    assert browser.run("document.documentElement.dataset.ready") is not None


def test_without_scripts_every_cell_and_its_worst_tensors_are_there(
    tmp_path: Path, large: Record
) -> None:
    path = _write(tmp_path, large)
    with Browser(has_scripts=False) as browser:
        browser.open(path)
        assert browser.run("document.documentElement.className") == ""
        text = browser.run("document.body.innerText")
        assert "1 of 4 cells fails" in text
        hidden = "[...document.querySelectorAll('.js-only')].map((e) => e.offsetHeight)"
        assert set(browser.run(hidden)) == {0}
        browser.click('a.chip[title^="model.py/style1,"]')
        assert (
            browser.run("document.querySelector(':target').id")
            == "cell=model.py/style1/dp=4/float32"
        )
        assert large.cells[1].worst is not None
        assert number(large.cells[1].worst.ratio) in text
