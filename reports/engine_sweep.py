"""Sweep the engine over Hugging Face types: every mode, in lock-step, against one device.

    python reports/engine_sweep.py [--types gpt2,llama] [--plan quick|full|float32] [--out DIR]
    python reports/engine_sweep.py --table [--plan full] [--out DIR]

Prints one line per type and case and writes one JSON file per type and plan. `quick` is
batch 8 on 4 ranks; `full` adds 2 ranks and the uneven batches 7 and 2 on 4 ranks, all in
float64; `float32` is batch 8 on 4 ranks in float32. `--table` prints what the files of a
plan say, one row per type.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from hf_engine import (  # noqa: E402
    MODES,
    Captured,
    activation_gathers,
    collective_faults,
    collectives,
    held_bytes,
    operator_calls,
    partitioned,
    run_local,
    undetermined,
    worst_output,
)

from spmd_verify.hf.shrink import rules  # noqa: E402

PLANS = {
    "quick": [("float64", 8, (4,))],
    "full": [("float64", 8, (2, 4)), ("float64", 7, (4,)), ("float64", 2, (4,))],
    "float32": [("float32", 8, (4,))],
}


def sweep_type(name: str, plan: str) -> dict[str, Any]:
    """Return everything measured for one type; prints a line per case."""
    row: dict[str, Any] = {"type": name, "cases": []}
    for dtype, batch, meshes in PLANS[plan]:
        captured = Captured(f"hf:{name}?batch={batch}", dtype)
        nodes = captured.nodes
        print(
            f"{name:20s} {dtype} batch {batch} nodes {nodes} "
            f"capture {1e3 * captured.seconds / nodes:.2f} ms/node "
            f"graph vs eager {captured.eager_error:.1e}",
            flush=True,
        )
        for ranks in meshes:
            for mode in MODES:
                case = _sweep_case(captured, mode, ranks)
                case |= {"dtype": dtype, "batch": batch, "ranks": ranks, "mode": mode}
                case |= {"nodes": nodes, "capture_s": captured.seconds}
                case["eager_error"] = captured.eager_error
                row["cases"].append(case)
    return row


def _sweep_case(captured: Captured, mode: str, ranks: int) -> dict[str, Any]:
    start = time.process_time()
    local = partitioned(captured, mode, ranks)
    seconds = time.process_time() - start
    outputs, flops, undivided = run_local(captured, local, ranks)
    error, where = worst_output(captured, local, outputs, ranks)
    counts = collections.Counter(kind for kind, _ in collectives(local))
    gathers = activation_gathers(local, captured.graph)
    held, total, largest = held_bytes(captured, local)
    ratio = flops / captured.flops if captured.flops else 0.0
    result = {
        "partition_s": seconds, "error": error, "where": where,
        "fallbacks": local.meta["fallbacks"], "calls": operator_calls(captured.graph),
        "flops_ratio": ratio, "undivided": undivided.most_common(8), "collectives": counts,
        "faults": collective_faults(local, captured.graph),
        "activation_gathers": gathers, "held": held, "total": total, "largest": largest,
        "undetermined": len(undetermined(captured)),
    }  # fmt: skip
    print(
        f"  {mode:11s} W={ranks} part {1e3 * seconds / captured.nodes:.2f} ms/node "
        f"err {error:.1e} {where if error > 1e-12 else ''} flops x{ratio * ranks:.2f} "
        f"gathers {len(gathers)} {dict(counts)} fallbacks {local.meta['fallbacks']}",
        flush=True,
    )
    if mode in ("replicate", "fully_shard"):
        for line in result["faults"][:4]:
            print("      fault", line)
        for line in gathers[:4]:
            print("      gathers", line)
        for line, count in undivided.most_common(4):
            print(f"      undivided {count / captured.flops:.3f} {line}")
    return result


def table(folder: Path, plan: str) -> str:
    """Return a Markdown table of a plan's files: one row per type, the worst over its cases."""
    lines = [
        "| type | nodes | ms/node | worst error | where | fallbacks | FLOPs x 4 | undetermined |",
        "|---|---|---|---|---|---|---|---|",
    ]
    calls, fallen, refused, halves = 0, 0, 0, 0
    for name in rules()["types"]:
        path = folder / f"{plan}-{name}.json"
        row = json.loads(path.read_text()) if path.exists() else {"refused": "not run"}
        if row.get("refused"):
            refused += 1
            lines.append(f"| {name} | refused: {row['refused'][:60]} | | | | | | |")
            continue
        cases = row["cases"]
        worst = max(cases, key=lambda case: case["error"])
        fell = max(cases, key=lambda case: sum(case["fallbacks"].values()))
        ratio = max(c["flops_ratio"] for c in cases if c["ranks"] == 4 and c["batch"] == 8)
        calls += fell["calls"]
        fallen += sum(fell["fallbacks"].values())
        halves += ratio <= 0.5
        speed = min(c["capture_s"] + c["partition_s"] for c in cases) / cases[0]["nodes"]
        where = (
            f"{worst['where']} ({worst['mode']}, batch {worst['batch']}, {worst['ranks']} ranks)"
        )
        lines.append(
            f"| {name} | {cases[0]['nodes']} | {1e3 * speed:.2f} | "
            f"{worst['error']:.1e} | {where} | "
            f"{fell['fallbacks'] or 'none'} | {4 * ratio:.2f} | {worst['undetermined']} |"
        )
    lines.append("")
    lines.append(
        f"Refused {refused}; fallbacks {fallen} of {calls} operator calls; at most half of the "
        f"global FLOPs per rank at 4 ranks: {halves} types."
    )
    return "\n".join(lines)


def main() -> None:
    """Run the sweep of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default="")
    parser.add_argument("--plan", default="quick", choices=list(PLANS))
    parser.add_argument("--out", default="/tmp/engine_sweep")
    parser.add_argument("--table", action="store_true", help="print what the files say")
    options = parser.parse_args()
    if options.table:
        print(table(Path(options.out), options.plan))
        return
    torch.set_num_threads(1)
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    names = options.types.split(",") if options.types else rules()["types"]
    for name in names:
        try:
            row = sweep_type(name, options.plan)
        # A sweep goes on after a type that fails; the failure is its result.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            row = {"type": name, "cases": [], "refused": f"{type(error).__name__}: {error}"[:500]}
            print(f"{name:20s} REFUSED {row['refused']}", flush=True)
        (folder / f"{options.plan}-{name.replace('/', '_')}.json").write_text(
            json.dumps(row, default=str)
        )


if __name__ == "__main__":
    main()
