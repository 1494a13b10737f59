"""What the checker costs beside what it checks: three ratios, with the seconds behind them.

(a) comparing, restoring, judging and recording, beside the candidates' own steps; capture apart.
(b) the reference with its float64 and noise runs, in steps of one device, for each step.
(c) the second run of the same command beside the first, with the reference cached.

In (b) *bare* is what the steps that docs/design.md 3.4 asks for would cost alone: the steps of
all runs, by the dtype they ran in, times a step of that dtype with nothing watched or perturbed,
for each step of the case. The rest is the checker's: observing, perturbing, comparing, floors.

`make bench-checker` prints the tables and writes reports/checker_costs.md. Wall time is what a
user waits; processor time does not grow where others use the machine, so on a busy one only
that says something. Every figure is the median of several runs of one command in one process:
the fork server is warm, the ranks and their captures are new in every run. Of the ranks of a
cell the slower one counts. *capture s* is partitioning on the ranks; in (c) waiting for what was
captured before they were forked is in it too.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from tabulate import tabulate  # noqa: E402

from spmd_verify import record as records  # noqa: E402
from spmd_verify import run  # noqa: E402
from spmd_verify.mesh_spec import MeshSpec  # noqa: E402
from spmd_verify.options import Options  # noqa: E402
from spmd_verify.progress import Progress  # noqa: E402
from spmd_verify.record import Record  # noqa: E402

EXAMPLES = ("mlp", "transformer")
STYLES = ("replicate", "fully_shard", "default", "dtensor_expand")
STEPS, RANKS, RUNS = 3, 2, 3
TARGETS = {"a": 0.6, "b": 20.0, "c": 0.6}
# What a cell spends on checking; `examine` is there for failing cells only.
CHECKING = ("compare", "anchor", "judge", "examine")
# For (b): larger and smaller steps of the same model, where calls no longer dominate.
WIDER = {"width": 256, "layers": 4}
TIMED_STEPS = 30
CLOCKS = {"wall": "seconds", "processor": "cpu_seconds"}


def judged(example: str) -> tuple[Record, float, dict[str, float]]:
    """Run one command; return its record, its wall time and what recording took."""
    options = Options(
        targets=(str(ROOT / "examples" / f"{example}.py"),),
        styles=STYLES,
        steps=STEPS,
        mesh=MeshSpec(((None, RANKS),)),
    )
    started = time.monotonic()
    record = run.verify(options, Progress(quiet=True))
    seconds = time.monotonic() - started
    before = time.monotonic(), time.process_time()
    cells = record.cells
    for count in range(len(cells)):  # the record is written anew after every cell
        record.cells = cells[: count + 1]
        records.encode(record)
    after = time.monotonic(), time.process_time()
    recording = dict(zip(CLOCKS, (late - early for late, early in zip(after, before, strict=True)),
                         strict=True))  # fmt: skip
    return record, seconds, recording


def spent(record: Record, clock: str, *parts: str) -> float:
    """Return what all cells together spent on some parts."""
    tables = [cell.unknown[CLOCKS[clock]] for cell in record.cells]
    return sum(table.get(part, 0.0) for table in tables for part in parts)


def made(record: Record, clock: str) -> float:
    """Return what the reference of the only case took."""
    (times,) = record.unknown["references"].values()
    return float(sum(times[CLOCKS[clock]].values()))


def commands(example: str) -> list[dict[str, Any]]:
    """Run a command RUNS times twice, each time with an empty cache at first."""
    found = []
    for number in range(RUNS):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            pair = [judged(example), judged(example)]
        found.append({"first": pair[0], "second": pair[1]})
        sys.stderr.write(f"{example}: {number + 1} of {RUNS}\n")
    return found


def ratio_a(example: str, found: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of (a): by clock, checking, steps, their ratio, and capture."""
    rows = []
    for clock in CLOCKS:
        runs = [each[name] for each in found for name in ("first", "second")]
        parts = {
            part: statistics.median(spent(record, clock, part) for record, _, _ in runs)
            for part in (*CHECKING, "steps", "build", "capture", "evaluate")
        }
        recording = statistics.median(taken[clock] for _, _, taken in runs)
        checking = sum(parts[part] for part in CHECKING) + recording
        rows.append([
            example, clock, *(f"{parts[part]:.3f}" for part in CHECKING[:3]), f"{recording:.3f}",
            f"{checking:.3f}", f"{parts['steps']:.3f}", f"{checking / parts['steps']:.2f}",
            f"{parts['capture']:.2f}",
        ])  # fmt: skip
    return rows


def ratio_b(name: str, text: str) -> list[str]:
    """Return the row of (b) of one case file, in processor time, alone in a process."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(text)
        file.flush()
        words = [sys.executable, __file__, "--reference", file.name]
        done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    step, step64, reference, noise, write, steps, steps64 = map(float, done.stdout.split())
    total = reference + noise + write
    bare = (steps * step + steps64 * step64) / STEPS / step
    return [
        name, f"{1e3 * step:.2f}", f"{1e3 * step64:.2f}", f"{steps:.0f}", f"{steps64:.0f}",
        f"{reference:.3f}", f"{noise:.3f}", f"{write:.3f}", f"{total / STEPS / step:.0f}",
        f"{bare:.1f}", f"{total / STEPS / step / bare:.1f}",
    ]  # fmt: skip


def time_reference(path: str) -> None:
    """Print seconds of a bare step in two dtypes, of the parts of a reference, and its steps."""
    import torch

    from spmd_verify.cases.case import load_case
    from spmd_verify.noise import runs as noise
    from spmd_verify.reference.single import make_reference
    from spmd_verify.reference.stepped import SteppedModel
    from spmd_verify.stored.store import write_store

    torch.set_num_threads(1)
    case = load_case(path, steps=STEPS)
    device, reference = make_reference(case)
    noise.measure(device, reference)  # imports what is needed
    bare = [bare_step(device, in_float64=flag) for flag in (False, True)]
    counts = {torch.float32: 0, torch.float64: 0}
    original = SteppedModel.step

    def counted(stepped: SteppedModel, index: int) -> Any:
        counts[stepped.case.dtype] += 1
        return original(stepped, index)

    SteppedModel.step = counted  # type: ignore[method-assign]
    found = []
    for _ in range(RUNS):
        counts.update(dict.fromkeys(counts, 0))
        times = [time.process_time()]
        device, reference = make_reference(case)
        times.append(time.process_time())
        measured = noise.measure(device, reference)
        times.append(time.process_time())
        with tempfile.TemporaryDirectory() as folder:
            write_store(Path(folder), reference, measured, dtype="float32", trainable=[])
            times.append(time.process_time())
        found.append([late - early for early, late in itertools.pairwise(times)])
    parts = [statistics.median(column) for column in zip(*found, strict=True)]
    print(*bare, *parts, *counts.values())


def bare_step(device: Any, *, in_float64: bool) -> float:
    """Return seconds of processor time of one step of one device, without any observation."""
    from spmd_verify.cases.batches import cast_floating

    case = device.twin if in_float64 else device.case
    model, optimizer = device.build(in_float64=in_float64)
    plain = []
    for index in range(TIMED_STEPS):
        batch = cast_floating(case.batch(index % STEPS), case.dtype)
        case.seed_step(index % STEPS)
        started = time.process_time()
        case.step(model, optimizer, batch)
        plain.append(time.process_time() - started)
    return statistics.median(plain)


def ratio_c(example: str, found: list[dict[str, Any]]) -> list[list[str]]:
    """Return the rows of (c): both runs, and where the time of each goes."""
    rows = []
    for name in ("first", "second"):
        runs = [each[name] for each in found]
        whole = statistics.median(seconds for _, seconds, _ in runs)
        parts = [
            statistics.median(spent(record, "wall", *names) for record, _, _ in runs)
            for names in (("capture", "start"), ("build", "steps", "evaluate"), CHECKING)
        ]
        reference = statistics.median(made(record, "wall") for record, _, _ in runs)
        rest = whole - reference - sum(parts)
        rows.append([example, name, *(f"{x:.2f}" for x in (whole, reference, *parts, rest))])
    whole = [each["second"][1] / each["first"][1] for each in found]
    rest = [_uncaptured(each["second"]) / _uncaptured(each["first"]) for each in found]
    rows[0] += ["", ""]
    rows[1] += [f"{statistics.median(ratios):.2f}" for ratios in (whole, rest)]
    return rows


def _uncaptured(judged_once: tuple[Record, float, dict[str, float]]) -> float:
    """Return the wall time of a command without its captures."""
    record, seconds, _ = judged_once
    return seconds - spent(record, "wall", "capture", "start")


def wider(text: str) -> str:
    """Return the transformer example with other default sizes."""
    for name, value in WIDER.items():
        before, _, after = text.partition(f"{name}: int = ")
        text = f"{before}{name}: int = {value}{after[after.index(',') :]}"
    return text


def machine() -> str:
    """Return what was measured on, and how busy it was."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT,
        check=False,
    ).stdout.strip()  # fmt: skip
    from importlib.metadata import version

    return (
        f"{model or platform.machine()}, {os.cpu_count()} cores, load average "
        f"{os.getloadavg()[0]:.1f}; torch {version('torch')}, Python {platform.python_version()}; "
        f"commit {commit}."
    )


def table(title: str, columns: tuple[str, ...], rows: list[list[str]]) -> str:
    """Return one table below its title."""
    body = tabulate(rows, columns, tablefmt="github", disable_numparse=True)
    return f"## {title}\n\n{body}"


def main() -> int:
    """Measure everything and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--reference", help="time the reference of one case file")
    arguments = parser.parse_args()
    if arguments.reference:
        time_reference(arguments.reference)
        return 0
    text = (ROOT / "examples" / "transformer.py").read_text()
    sizes = [(name, (ROOT / "examples" / f"{name}.py").read_text()) for name in EXAMPLES]
    wide = f"transformer, {WIDER['layers']} layers of {WIDER['width']}"
    b = [ratio_b(name, source) for name, source in [*sizes, (wide, wider(text))]]
    found = {name: commands(name) for name in EXAMPLES}
    parts = [
        "# What the checker costs",
        (__doc__ or "").partition("\n\n")[2].strip(),
        f"{STEPS} steps, {RANKS} ranks, the four styles of the engine, {RUNS} times. {machine()}",
        table(
            f"(a) checking / steps, at most {TARGETS['a']}",
            ("case", "clock", "compare s", "anchor s", "judge s", "record s", "checking s",
             "steps s", "ratio", "capture s"),
            [row for name in EXAMPLES for row in ratio_a(name, found[name])],
        ),
        table(
            f"(b) reference in steps of one device, at most {TARGETS['b']:.0f}; processor time",
            ("case", "step ms", "float64 step ms", "steps", "float64 steps", "reference s",
             "noise s", "write s", "per step", "bare", "per step / bare"),
            b,
        ),
        table(
            f"(c) second run / first, at most {TARGETS['c']}; wall time",
            ("case", "run", "all s", "reference s", "capture s", "steps s", "checking s", "rest s",
             "ratio", "without capture"),
            [row for name in EXAMPLES for row in ratio_c(name, found[name])],
        ),
    ]  # fmt: skip
    report = "\n\n".join(parts) + "\n"
    (ROOT / "reports" / "checker_costs.md").write_text(report)
    sys.stdout.write(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
