"""What the HTML report of a large record costs: bytes, seconds to render, milliseconds to use.

`make html-speed`, or `python reports/html_speed.py RECORD.json` for a record of yours. The browser
part needs a Chromium on the path and is left out without one.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from browser import CHROMIUM, Browser  # noqa: E402
from html_records import large_record  # noqa: E402

from spmd_verify.record import Record, decode  # noqa: E402
from spmd_verify.reporters import html  # noqa: E402

# Filters to "every step of all cells", sorts twice, and waits for a frame to be drawn.
_SORT = """
(async () => {
  const pickers = [...document.querySelectorAll("#explorer select")];
  const scope = pickers.find((each) => each.value === "this cell");
  scope.value = "all cells";
  document.querySelector("#explorer input[type=checkbox]").checked = true;
  const start = performance.now();
  scope.dispatchEvent(new Event("change"));
  document.querySelector("[data-column=error]").click();
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return performance.now() - start;
})()
"""


def _render(record: Record) -> bytes:
    """Print size and time of a page, the median of three."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        page = html.render(record)
        seconds.append(time.perf_counter() - start)
    rows = sum(len(cell.tensors) for cell in record.cells)
    size, spent = len(page) / 1e6, sorted(seconds)[1]
    print(f"{len(record.cells)} cells, {rows} rows: {size:.3f} MB in {spent:.2f} s")
    return page


def _browse(page: bytes) -> None:
    """Print when the page can be used, and how long it takes to filter and sort every row."""
    if CHROMIUM is None:
        print("no chromium on the path: nothing measured in a browser")
        return
    with tempfile.TemporaryDirectory() as folder, Browser() as browser:
        path = Path(folder) / "report.html"
        path.write_bytes(page)
        browser.open(path)
        ready = browser.run("Number(document.documentElement.dataset.ready)")
        print(f"interactive after {ready:.0f} ms")
        print(f"all rows of all cells filtered and sorted in {browser.run(_SORT):.0f} ms")
        print(f"requests besides the page: {browser.requests[1:] or 'none'}")
        print(f"console: {browser.complaints or 'silent'}")


def main() -> None:
    """Measure a record, or the synthetic one of the acceptance: 8 x 300 x 10."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", nargs="?", help="JSON record; a synthetic one when left out")
    path = parser.parse_args().record
    record = decode(Path(path).read_bytes(), path) if path else large_record()
    print(f"Python {platform.python_version()}, {platform.machine()}")
    _browse(_render(record))


if __name__ == "__main__":
    main()
