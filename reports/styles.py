"""Every built-in style on ten models at 2 and 4 ranks, as one table.

`make styles-table` runs each (model, mesh) as one command line would, `--styles all`, in real
processes, and writes one JSON per run to reports/styles/ with its commit; a run that was stopped
goes on where it ended. A cell that is neither passing nor one that a reader expects is listed.

Usage: python reports/styles.py [--only GLOB] [--limit-seconds N] [--render]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "reports" / "styles"
MODELS = {
    "MLP": "examples/mlp.py",
    "tied transformer": "examples/transformer.py",
    "conv, GroupNorm": "examples/conv_groupnorm.py",
    "conv, BatchNorm": "examples/conv.py",
    "experts": "examples/moe.py",
    "gpt2": "hf:gpt2?padding=0",
    "llama": "hf:llama?padding=0",
    "llama, padded": "hf:llama",
    "mixtral": "hf:mixtral?padding=0",
    "bert": "hf:bert?padding=0",
    "vit": "hf:vit",
}
MESHES = ("2", "4")
# Three axes of two need eight ranks.
EXTRA = (("tied transformer", "8", ("hsdp+tp",)), ("llama", "8", ("hsdp+tp",)))
PASSING = ("exact", "rounding", "undetermined")
SHORT = {"exact": "pass", "rounding": "pass", "undetermined": "pass?", "unsupported": "-"}


def planned() -> list[tuple[str, str, tuple[str, ...]]]:
    """Return `(model, mesh, styles)` of every run."""
    return [*((model, mesh, ("all",)) for model in MODELS for mesh in MESHES), *EXTRA]


def file_of(model: str, mesh: str, styles: tuple[str, ...]) -> Path:
    """Return where the result of a run is kept."""
    name = model.replace(", ", "_").replace(" ", "_")
    return FOLDER / f"{name}-{mesh}{'' if styles == ('all',) else '-' + styles[0]}.json"


def judge(model: str, mesh: str, styles: tuple[str, ...]) -> dict[str, Any]:
    """Run the checker on one model and return what the table needs of its record."""
    from spmd_verify.mesh_spec import parse_mesh
    from spmd_verify.options import Options
    from spmd_verify.progress import Progress
    from spmd_verify.run import verify

    address = MODELS[model]
    options = Options(
        targets=(str(ROOT / address) if address.startswith("examples") else address,),
        styles=styles,
        mesh=parse_mesh(mesh),
        timeout_seconds=600.0,
        verbosity=-1,
        no_cache=True,
    ).checked()
    progress, start = Progress(quiet=True), time.monotonic()
    try:
        record = verify(options, progress)
    finally:
        progress.close()
    return {
        "model": model,
        "mesh": mesh,
        "commit": commit(),
        "seconds": round(time.monotonic() - start, 1),
        "cells": [_cell(cell) for cell in record.cells],
    }


def commit() -> str:
    """Return the commit of the checker, with a mark where sources are changed."""
    run = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=7", "--dirty=+"]
    return subprocess.run(run, capture_output=True, text=True, check=False).stdout.strip()


def _cell(cell: Any) -> dict[str, Any]:
    """Return what the table needs of a cell."""
    cause = cell.cause
    return {
        "style": cell.style,
        "mesh": cell.mesh,
        "verdict": cell.verdict,
        "probe": str(cell.unknown.get("probe", {}).get("verdict", "")),
        "counts": dict(cell.counts),
        "ratio": None if cell.worst is None else cell.worst.ratio,
        "reason": cell.reason,
        "cause": "" if cause is None else f"{cause.kind}: {cause.text}",
        "message": cell.message,
        "seconds": round(cell.duration_seconds, 1),
    }


def render() -> str:
    """Return the table of every result that is there, as Markdown."""
    results = [
        json.loads(path.read_text()) for run in planned() if (path := file_of(*run)).exists()
    ]
    cells = [(result, cell) for result in results for cell in result["cells"]]
    verdicts = Counter(cell["verdict"] for _, cell in cells)
    judged = [cell for _, cell in cells if cell["verdict"] != "unsupported"]
    right = sum(cell["verdict"] in PASSING for cell in judged)
    plain = [
        cell
        for result, cell in cells
        if "padded" not in result["model"] and cell["verdict"] != "unsupported"
    ]
    lines = [
        "# Every style on ten models",
        "",
        "Written by `make styles-table` (reports/styles.py): real processes, float32, 3 steps, "
        "the case's own optimizer or AdamW. `pass?`: passes with more undetermined than judged "
        "rows; `-`: unsupported, with the reason below. `padded`: ranks count unequal "
        "numbers of tokens.",
        "",
        f"- {len(results)} of {len(planned())} runs done; "
        + ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()),
        f"- of {len(judged)} cells judged {right} pass ({right / max(len(judged), 1):.1%}), "
        f"{_share(plain)} where ranks count equally many tokens",
        "",
    ]
    for mesh in ("2", "4", "8"):
        lines += _grid([result for result in results if result["mesh"] == mesh], mesh)
    lines += ["## Why not", ""]
    for (style, verdict, text), models in _reasons(cells).items():
        lines.append(f"- **{style}**, {verdict} ({', '.join(models)}): {text}")
    return "\n".join([*lines, ""])


def _share(cells: list[dict[str, Any]]) -> str:
    """Return how many of some cells pass."""
    right = sum(cell["verdict"] in PASSING for cell in cells)
    return f"{right} of {len(cells)} ({right / max(len(cells), 1):.1%})"


def _grid(results: list[dict[str, Any]], mesh: str) -> list[str]:
    """Return the table of one number of ranks."""
    if not results:
        return []
    styles = list(dict.fromkeys(cell["style"] for result in results for cell in result["cells"]))
    by_model = {result["model"]: result for result in results}
    rows = []
    for style in styles:
        row = [style]
        for result in by_model.values():
            found = [cell for cell in result["cells"] if cell["style"] == style]
            row.append(SHORT.get(found[0]["verdict"], found[0]["verdict"]) if found else "")
        rows.append(row)
    rows.append(["seconds", *(f"{result['seconds']:.0f}" for result in by_model.values())])
    rows.append(["commit", *(result["commit"] for result in by_model.values())])
    table = tabulate(rows, ["style", *by_model], tablefmt="github", disable_numparse=True)
    return [f"## {mesh} ranks", "", table, ""]


def _reasons(
    cells: list[tuple[dict[str, Any], dict[str, Any]]],
) -> dict[tuple[str, ...], list[str]]:
    """Return the models of every reason why a cell does not pass, by style and text."""
    found: dict[tuple[str, ...], list[str]] = {}
    for result, cell in cells:
        if cell["verdict"] not in PASSING:
            is_absent = cell["verdict"] == "unsupported"
            text = cell["reason"] if is_absent else cell["cause"] or cell["message"]
            key = (cell["style"], cell["verdict"], text)
            found.setdefault(key, []).append(f"{result['model']} {result['mesh']}")
    return found


def main() -> int:
    """Run what is missing, then render."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="glob over models")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"))
    parser.add_argument("--render", action="store_true", help="only render")
    options = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.limit_seconds
    for run in [] if options.render else planned():
        path = file_of(*run)
        if not fnmatchcase(run[0], options.only) or path.exists() or time.monotonic() > end:
            continue
        result = judge(*run)
        path.write_text(json.dumps(result, indent=1) + "\n")
        told = Counter(cell["verdict"] for cell in result["cells"])
        sys.stderr.write(f"{run[0]} {run[1]}: {dict(told)} {result['seconds']} s\n")
    (ROOT / "reports" / "styles.md").write_text(render())
    return 0


if __name__ == "__main__":
    sys.exit(main())
