"""False alarms: right styles on many models, meshes, dtypes and seeds, as one table.

`make clean-matrix` runs the examples under the engine's styles in lock-step and torch's styles on
ranks, in float32, float64 and bfloat16, with several seeds. A cell that is not right by
definition (`semantic`, `unsupported`) is counted apart. Writes reports/clean_matrix.md and one
JSON per run in reports/clean_matrix/.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "reports" / "clean_matrix"
EXAMPLES = ("mlp", "transformer", "conv", "moe", "recurrent")
DTYPES = ("float32", "float64", "bfloat16")
SEEDS = (1, 2, 3)
# Style group, runner, meshes: 3 ranks leave uneven parts of every batch and parameter.
GROUPS = (("engine", "lockstep", ("2", "3", "4")), ("torch", "processes", ("2", "4")))
RIGHT = ("exact", "rounding", "undetermined")
APART = ("semantic", "unsupported")


def planned() -> list[tuple[str, str, int, str, str, tuple[str, ...]]]:
    """Return `(example, dtype, seed, group, runner, meshes)` of every run."""
    return [
        (name, dtype, seed, *group)
        for group in GROUPS
        for seed in SEEDS
        for dtype in DTYPES
        for name in EXAMPLES
    ]


def run(name: str, dtype: str, seed: int, group: str, runner: str, meshes: tuple[str, ...]) -> Any:
    """Run the checker and return what the table needs."""
    from spmd_verify.mesh_spec import parse_mesh
    from spmd_verify.options import Options
    from spmd_verify.progress import Progress
    from spmd_verify.run import verify

    options = Options(
        targets=(str(ROOT / "examples" / f"{name}.py"),),
        styles=(group,),
        dtype=dtype,
        seed=seed,
        runner=runner,
        mesh_sweep=tuple(parse_mesh(mesh) for mesh in meshes),
        timeout_seconds=600.0,
        verbosity=-1,
    ).checked()
    progress, start = Progress(quiet=True), time.monotonic()
    record = verify(options, progress)
    progress.close()
    cells = [
        {
            "style": cell.style,
            "mesh": cell.mesh,
            "verdict": cell.verdict,
            "ratio": cell.worst.ratio if cell.worst else None,
            "cause": cell.cause.text if cell.cause else "",
            "message": cell.message,
            "counts": dict(cell.counts),
        }
        for cell in record.cells
    ]
    seconds = round(time.monotonic() - start, 1)
    return {"case": name, "dtype": dtype, "seed": seed, "group": group, "seconds": seconds,
            "cells": cells}  # fmt: skip


def render(results: list[dict[str, Any]]) -> str:
    """Return the table as Markdown."""
    cells = [cell for result in results for cell in result["cells"]]
    judged = [cell for cell in cells if cell["verdict"] not in APART]
    alarms = [cell for cell in judged if cell["verdict"] not in RIGHT]
    lines = [
        "# Clean matrix",
        "",
        "Written by `make clean-matrix` (reports/clean_matrix.py): examples x styles x meshes x "
        "dtypes x seeds, 3 steps.",
        "",
        f"- {len(judged)} cells judged, {len(alarms)} false alarms",
        f"- apart: {dict(Counter(cell['verdict'] for cell in cells if cell['verdict'] in APART))}",
    ]
    for dtype in DTYPES:
        ratios = [
            cell["ratio"]
            for result in results
            if result["dtype"] == dtype
            for cell in result["cells"]
            if cell["verdict"] in RIGHT and cell["ratio"] is not None
        ]
        lines.append(
            f"- {dtype}: {len(ratios)} cells, worst error / noise {max(ratios, default=0):.2f}"
        )
    lines.append(
        "- bfloat16's floor is wider: the noise runs round every sum to 8 bits, as ranks that add "
        "in bfloat16 do; the limit c is 6 instead of 4 (verdict.LIMITS)"
    )
    rows = [_row(result) for result in results]
    header = ["case", "dtype", "seed", "styles", "cells", "verdicts", "worst error / noise", "s"]
    table = tabulate(rows, header, tablefmt="github", disable_numparse=True)
    return "\n".join([*lines, "", table, ""])


def _row(result: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    cells = result["cells"]
    verdicts = sorted(Counter(cell["verdict"] for cell in cells).items())
    ratios = [cell["ratio"] or 0.0 for cell in cells if cell["verdict"] in RIGHT]
    return [
        result["case"], result["dtype"], str(result["seed"]), result["group"], str(len(cells)),
        ", ".join(f"{number} {verdict}" for verdict, number in verdicts),
        f"{max(ratios, default=0.0):.2f}", f"{result['seconds']:.0f}",
    ]  # fmt: skip


def main() -> int:
    """Run what is missing, then render."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--render", action="store_true", help="only render")
    parser.add_argument("--again", action="store_true", help="run everything again")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    results = []
    for plan in planned():
        name, dtype, seed, group = plan[:4]
        path = FOLDER / f"{name}-{dtype}-{seed}-{group}.json"
        if not options.render and (options.again or not path.exists()):
            result = run(*plan)
            path.write_text(json.dumps(result, indent=1))
            words = dict(Counter(cell["verdict"] for cell in result["cells"]))
            print(f"{path.stem}: {words} {result['seconds']} s", flush=True)
        if path.exists():
            results.append(json.loads(path.read_text()))
    (ROOT / "reports" / "clean_matrix.md").write_text(render(results))
    wrong = [c for r in results for c in r["cells"] if c["verdict"] not in (*RIGHT, *APART)]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
