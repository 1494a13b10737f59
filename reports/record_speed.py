"""Seconds to write and to read again a record of 8 styles x 1,000 tensors x 20 steps.

`make record-speed`. Wall clock and processor time, best of three; they differ where the machine
is busy with something else. Needs no torch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from spmd_verify.record import Cell, Record, Row, WorstElement, encode, read
from spmd_verify.whole_file import write_whole

STYLES, TENSORS, STEPS, TRIES = 8, 1000, 20, 3
Result = TypeVar("Result")


def large_record() -> Record:
    """Return a record as a run makes it; every eighth row has a key that is no field."""
    cells = []
    for style in range(STYLES):
        rows = [
            Row(
                name=f"blocks.{at // 10}.linear{at % 10}.weight",
                stage="gradients",
                step=step,
                verdict="rounding",
                shape=[64, 64],
                dtype="float32",
                layout="Shard(0)",
                error=1e-8 * (at + 1) / 3,
                noise=3e-8 / (step + 1),
                ratio=(at + 1) / 7,
                max_ulp=at,
                worst=WorstElement(index=[at % 64, step], actual=at / 9, expected=at / 11),
                unknown={} if at % 8 else {"row": at},
            )
            for step in range(STEPS)
            for at in range(TENSORS)
        ]
        cells.append(
            Cell(
                case="model.py",
                style=f"style{style}",
                mesh="dp=2",
                dtype="float32",
                world_size=2,
                runner="processes",
                verdict="rounding",
                tensors=rows,
            )
        )
    return Record(cells=cells)


def timed(act: Callable[[], Result]) -> tuple[Result, float, float]:
    """Return what a function returns, the wall clock and the processor time it took."""
    wall, processor = time.perf_counter(), time.process_time()
    result = act()
    return result, time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    """Print the best of each."""
    record = large_record()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "record.json")
        written, back = [], []
        for _ in range(TRIES):
            written.append(timed(lambda: write_whole(path, encode(record)))[1:])
            found, *seconds = timed(lambda: read(path))
            back.append(tuple(seconds))
            assert found == record
            del found
        size = Path(path).stat().st_size
    print(f"{STYLES} styles x {TENSORS} tensors x {STEPS} steps: {size / 1e6:.1f} MB")
    for name, figures in (("written", written), ("read", back)):
        wall, processor = min(figures)
        print(f"{name:<8} {wall:.2f} s ({processor:.2f} s of the processor)")
    total, processor = (min(written)[at] + min(back)[at] for at in (0, 1))
    print(f"{'both':<8} {total:.2f} s ({processor:.2f} s of the processor); wanted: under 2 s")


if __name__ == "__main__":
    main()
