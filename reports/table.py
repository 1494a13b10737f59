"""The table of cases: examples and Hugging Face types under the engine's four styles.

Every (case, dtype) is one run of the checker on 2 and 4 ranks (examples on 3 as well, which
divides none of their batches), plus batches of 7 and of 2 over 4 ranks for Hugging Face cases,
in lock-step. Results are kept one JSON file each with the commit they come from, so that a
run that was stopped goes on where it ended; the table is rendered from what is there.

Usage: python reports/table.py [--only GLOB] [--limit-seconds N] [--part I/N] [--render]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "reports" / "table"
EXAMPLES = ("mlp", "transformer", "conv", "moe", "recurrent")
DTYPES = ("float64", "float32")
SWEEPS = {"": ("2", "4"), "?batch=7": ("4",), "?batch=2": ("4",)}
# Other modes of the engine have the styles table.
STYLES = ("replicate", "fully_shard", "default", "dtensor_expand")
EXAMPLE_MESHES = ("2", "3", "4")
# A float64 row whose noise is this far above its scale is fed by a coarser island: float64
# rounding stays a thousand times below, float32 rounding a thousand times above.
ISLAND = 1e-10
# What float64 rows and undetermined rows of a case are held to; what is above is named.
SMALL_ERROR, MOST_UNDETERMINED = 1e-12, 0.02
PASSING = ("exact", "rounding", "undetermined")


def planned() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return (address, dtype, meshes) of every run, the widest coverage first."""
    data = json.loads((ROOT / "spmd_verify" / "hf" / "shrink.json").read_text())
    types = [*data["smoke"], *(t for t in data["types"] if t not in data["smoke"])]
    runs = [(f"examples/{name}.py", dtype, EXAMPLE_MESHES) for name in EXAMPLES for dtype in DTYPES]
    for suffix, meshes in SWEEPS.items():
        for dtype in DTYPES:
            runs += [(f"hf:{name}{suffix}", dtype, meshes) for name in types]
    return runs


def file_of(address: str, dtype: str) -> Path:
    """Return where the result of a run is kept."""
    safe = address.replace("/", "_").replace(":", "_").replace("?", "_").replace("=", "")
    return FOLDER / f"{safe}-{dtype}.json"


def judge(address: str, dtype: str, meshes: tuple[str, ...]) -> dict[str, Any]:
    """Run the checker on one case and return what the table needs of its record."""
    from spmd_verify.errors import SpmdVerifyError
    from spmd_verify.mesh_spec import parse_mesh
    from spmd_verify.options import Options
    from spmd_verify.progress import Progress
    from spmd_verify.run import verify

    options = Options(
        no_cache=True,
        targets=(address,),
        styles=STYLES,
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
        return {"case": address, "dtype": dtype, "commit": commit(), "refused": str(error),
                "cells": []}  # fmt: skip
    finally:
        progress.close()
    notes = record.unknown.get("notes", {}).get(address, [])
    return {
        "case": address,
        "dtype": dtype,
        "commit": commit(),
        "seconds": round(time.monotonic() - start, 1),
        "islands": [note for note in notes if "coarser dtype" in note],
        "cells": [_cell(cell) for cell in record.cells],
    }


def commit() -> str:
    """Return the commit of the checker, with a mark where sources are changed."""
    run = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--dirty=+"]
    return subprocess.run(run, capture_output=True, text=True, check=False).stdout.strip()


def _cell(cell: Any) -> dict[str, Any]:
    worst = cell.worst
    passing = [row for row in cell.tensors if row.verdict == "rounding" and row.noise is not None]
    fine = [row for row in passing if row.noise <= ISLAND * _scale(row)]
    undetermined = [row for row in cell.tensors if row.verdict == "undetermined"]
    loudest = max(fine, key=lambda row: row.error / _scale(row), default=None)
    return {
        "style": cell.style,
        "error_by_scale": 0.0 if loudest is None else loudest.error / _scale(loudest),
        # What one device's own noise runs differ by in that very tensor.
        "noise_by_scale": 0.0 if loudest is None else loudest.noise / _scale(loudest),
        "coarse_rows": len(passing) - len(fine),
        "reasons": dict(Counter(_kind(row.unknown.get("reason")) for row in undetermined)),
        "mesh": cell.mesh,
        "verdict": cell.verdict,
        "message": cell.message,
        "counts": dict(cell.counts or {}),
        "fallbacks": dict(cell.fallbacks or {}),
        "worst": None if worst is None else [worst.tensor, worst.stage, worst.step, worst.ratio],
    }


def _kind(reason: Any) -> str:
    """Return a reason without its numbers and the place after its colon."""
    return re.sub(r"\d[\d.e+-]*", "N", str(reason).partition(": ")[0])


def _scale(row: Any) -> float:
    """Return ||S|| of a row: `verdicts.md` has it that errors in float64 are relative to it."""
    return float(row.unknown["scale"]) or 1.0


def render() -> str:
    """Return the table of every result that is there, as Markdown."""
    results = [
        json.loads(path.read_text())
        for address, dtype, _ in planned()
        if (path := file_of(address, dtype)).exists()
    ]
    cells = [(result, cell) for result in results for cell in result["cells"]]
    passing = [cell for _, cell in cells if cell["verdict"] in PASSING]
    in_float64 = [cell for result, cell in cells if result["dtype"] == "float64"]
    errors = [cell["error_by_scale"] for cell in in_float64 if cell["verdict"] in PASSING]
    above = [
        f"{result['case']} ({result['dtype']}, {share:.1%})"
        for result in results
        if (share := _undetermined(result)) > MOST_UNDETERMINED
    ]
    loud = {
        f"{result['case']} ({cell['style']}: one device's own noise in that tensor is "
        f"{cell['noise_by_scale']:.1e})"
        for result, cell in cells
        if result["dtype"] == "float64" and cell["error_by_scale"] > SMALL_ERROR
    }
    loudest = ", ".join(sorted(loud)) or "none"
    reasons = sum((Counter(cell["reasons"]) for _, cell in cells), Counter())
    head = [
        "Written by `make table` (reports/table.py): lock-step runner, 3 steps, the case's own "
        "optimizer or AdamW, seed 0. The last column is the commit that computed a row.",
        "",
        f"- {len(results)} of {len(planned())} runs done, {len(passing)} of {len(cells)} cells "
        f"pass, {sum('refused' in result for result in results)} cases refused",
        f"- worst error / ||S|| in float64, rows fed by a float32 island apart: "
        f"{max(errors, default=0.0):.1e}; above {SMALL_ERROR:.0e}: {loudest}",
        f"- more than {MOST_UNDETERMINED:.0%} undetermined rows: {', '.join(above) or 'none'}",
        *(f"- undetermined, {number} rows: {reason}" for reason, number in reasons.most_common()),
    ]
    columns = ["case", "dtype", "cells", "verdicts", "worst error / noise", "worst error / S",
               "undetermined", "float32 island", "fallbacks", "s", "commit"]  # fmt: skip
    table = tabulate(map(_row, results), columns, tablefmt="github", disable_numparse=True)
    return "\n".join(("# Cases under the engine's four styles", "", *head, "", table, ""))


def _undetermined(result: dict[str, Any]) -> float:
    """Return the largest share of undetermined rows over the cells of a run."""
    counts = [cell["counts"] for cell in result["cells"]]
    return max((c.get("undetermined", 0) / max(sum(c.values()), 1) for c in counts), default=0.0)


def _row(result: dict[str, Any]) -> list[str]:
    if "refused" in result:
        reason = f"refused: {result['refused'][:80]}"
        return [result["case"], result["dtype"], "0", reason, *[""] * 6, result["commit"]]
    cells = result["cells"]
    verdicts = Counter(cell["verdict"] for cell in cells)
    ratios = [cell["worst"][3] for cell in cells if cell["worst"] and cell["worst"][3] is not None]
    error = max((cell["error_by_scale"] for cell in cells), default=0.0)
    coarse = max((cell["coarse_rows"] for cell in cells), default=0)
    island = f"{coarse} rows: {', '.join(result['islands'])}" if result["islands"] else "none"
    fallbacks = sorted({name for cell in cells for name in cell["fallbacks"]})
    return [
        result["case"], result["dtype"], str(len(cells)),
        ", ".join(f"{number} {verdict}" for verdict, number in sorted(verdicts.items())),
        f"{max(map(float, ratios), default=0.0):.2f}", f"{error:.1e}",
        f"{_undetermined(result):.1%}", island, ", ".join(fallbacks) or "none",
        f"{result['seconds']:.0f}", result["commit"],
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
