"""The table of cases: examples and Hugging Face types under the engine's four styles.

Every (case, dtype) is one run of the checker on 2 and 4 ranks, plus uneven batches of 7
and 2 over 4 ranks for Hugging Face cases, in lock-step. Results are kept one JSON file
each, so that a run that was stopped goes on where it ended; the table is rendered from
what is there.

Usage: python reports/table.py [--only GLOB] [--limit-seconds N] [--render]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "reports" / "table"
EXAMPLES = ("mlp", "transformer", "conv", "moe", "recurrent")
DTYPES = ("float64", "float32")
SWEEPS = {"": ("2", "4"), "?batch=7": ("4",), "?batch=2": ("4",)}


def planned() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return (address, dtype, meshes) of every run, the widest coverage first."""
    data = json.loads((ROOT / "spmd_verify" / "hf_shrink.json").read_text())
    types = [*data["smoke"], *(t for t in data["types"] if t not in data["smoke"])]
    runs = [(f"examples/{name}.py", dtype, SWEEPS[""]) for name in EXAMPLES for dtype in DTYPES]
    for suffix, meshes in SWEEPS.items():
        for name in types:
            dtypes = DTYPES[:1] if suffix else DTYPES
            runs += [(f"hf:{name}{suffix}", dtype, meshes) for dtype in dtypes]
    return runs


def file_of(address: str, dtype: str) -> Path:
    """Return where the result of a run is kept."""
    safe = address.replace("/", "_").replace(":", "_").replace("?", "_").replace("=", "")
    return FOLDER / f"{safe}-{dtype}.json"


def judge(address: str, dtype: str, meshes: tuple[str, ...]) -> dict[str, Any]:
    """Run the checker on one case and return what the table needs of its record."""
    from spmd_verify.errors import SpmdVerifyError
    from spmd_verify.options import Options, parse_mesh
    from spmd_verify.progress import Progress
    from spmd_verify.run import verify

    options = Options(
        targets=(address,),
        styles=("engine",),
        dtype=dtype,
        runner="lockstep",
        mesh_sweep=tuple(parse_mesh(mesh) for mesh in meshes),
        timeout_seconds=600.0,
        verbosity=-1,
    ).checked()
    progress, start = Progress(quiet=True), time.monotonic()
    try:
        record = verify(options, progress)
    except SpmdVerifyError as error:
        return {"case": address, "dtype": dtype, "refused": str(error), "cells": []}
    finally:
        progress.close()
    notes = record.unknown.get("notes", {}).get(address, [])
    return {
        "case": address,
        "dtype": dtype,
        "seconds": round(time.monotonic() - start, 1),
        "islands": [note for note in notes if "coarser dtype" in note],
        "cells": [_cell(cell) for cell in record.cells],
    }


def _cell(cell: Any) -> dict[str, Any]:
    worst = cell.worst
    return {
        "style": cell.style,
        "mesh": cell.mesh,
        "verdict": cell.verdict,
        "message": cell.message,
        "counts": dict(cell.counts or {}),
        "fallbacks": dict(cell.fallbacks or {}),
        "worst": None if worst is None else [worst.tensor, worst.stage, worst.step, worst.ratio],
    }


def render() -> str:
    """Return the table of every result that is there, as Markdown."""
    rows, cells, passing = [], 0, 0
    for address, dtype, _ in planned():
        path = file_of(address, dtype)
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        for cell in result["cells"]:
            cells += 1
            passing += cell["verdict"] in ("exact", "rounding", "undetermined")
        rows.append(_row(result))
    done, total = len(rows), len(planned())
    head = (
        f"{done} of {total} runs done, {passing} of {cells} cells pass. Written by "
        "`make table` (reports/table.py); lock-step runner, 3 steps, AdamW, seed 0.\n\n"
    )
    columns = ["case", "dtype", "cells", "verdicts", "worst ratio", "undetermined rows",
               "float32 islands", "fallbacks"]  # fmt: skip
    return (
        "# Cases under the engine's four styles\n\n"
        + head
        + tabulate(rows, columns, tablefmt="github", disable_numparse=True)
        + "\n"
    )


def _row(result: dict[str, Any]) -> list[str]:
    if "refused" in result:
        reason = f"refused: {result['refused'][:80]}"
        return [result["case"], result["dtype"], "0", reason, *[""] * 4]
    cells = result["cells"]
    verdicts = sorted({cell["verdict"] for cell in cells})
    ratios = [cell["worst"][3] for cell in cells if cell["worst"] and cell["worst"][3] is not None]
    worst = max((float(r) for r in ratios), default=0.0)
    counts = [cell["counts"] for cell in cells]
    share = max((c.get("undetermined", 0) / max(sum(c.values()), 1) for c in counts), default=0.0)
    fallbacks = sorted({name for cell in cells for name in cell["fallbacks"]})
    return [
        result["case"], result["dtype"], str(len(cells)), ", ".join(verdicts), f"{worst:.2f}",
        f"{share:.1%}", str(len(result["islands"])), ", ".join(fallbacks) or "none",
    ]  # fmt: skip


def main() -> int:
    """Run what is missing, then render."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="glob over addresses")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--render", action="store_true", help="only render")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th run, from i")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    index, count = map(int, options.part.split("/"))
    end = time.monotonic() + options.limit_seconds
    wanted = [run for run in planned() if fnmatchcase(run[0], options.only)][index::count]
    for address, dtype, meshes in [] if options.render else wanted:
        path = file_of(address, dtype)
        if path.exists() or time.monotonic() > end:
            continue
        result = judge(address, dtype, meshes)
        path.write_text(json.dumps(result, indent=1) + "\n")
        sys.stderr.write(" ".join(_row(result)) + "\n")
    (ROOT / "reports" / "table.md").write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
