"""What capture and partition cost per graph node, and how that grows with depth.

Run on a quiet machine: `make costs` prints the table and writes reports/costs.md. Times are
process times of one thread, of one run; an earlier one has imported what is needed. The
partition is the slowest of the four modes.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import torch  # noqa: E402
from hf_engine import MODES, Captured, partitioned  # noqa: E402
from tabulate import tabulate  # noqa: E402

from spmd_verify.hf.shrink import rules  # noqa: E402

EXAMPLES = ("mlp", "transformer", "conv", "moe", "recurrent")
DEPTHS = (2, 4, 8, 16)
RANKS = 4
COLUMNS = ("case", "nodes", "capture s", "partition s", "ms / node")


def cost(name: str, address: str) -> list[str]:
    """Return one row of the table."""
    gc.collect()  # what earlier cases left is not this one's cost
    captured = Captured(address, "float32")
    slowest = 0.0
    for mode in MODES:
        start = time.process_time()
        partitioned(captured, mode, RANKS)
        slowest = max(slowest, time.process_time() - start)
    total, nodes = captured.seconds + slowest, captured.nodes
    times = (captured.seconds, slowest, 1e3 * total / nodes)
    row = [name, str(nodes), *(f"{value:.2f}" for value in times)]
    sys.stderr.write("  ".join(row) + "\n")
    return row


def main() -> int:
    """Measure everything and write the report."""
    torch.set_num_threads(1)
    cost("warm-up", str(ROOT / "examples" / "mlp.py"))
    examples = [cost(name, str(ROOT / "examples" / f"{name}.py")) for name in EXAMPLES]
    depths = [cost(f"llama, {n} layers", f"hf:llama?num_hidden_layers={n}") for n in DEPTHS]
    types = [cost(name, f"hf:{name}") for name in rules()["types"]]
    worst = max(float(row[-1]) for row in [*examples, *depths, *types])
    parts = ["# Capture and partition", "", (__doc__ or "").partition("\n\n")[2].strip(), ""]
    parts.append(f"Worst: {worst:.2f} ms per node.")
    for title, rows in (("Depth", depths), ("Examples", examples), ("Hugging Face types", types)):
        table = tabulate(rows, COLUMNS, tablefmt="github", disable_numparse=True)
        parts += ["", f"## {title}", "", table]
    text = "\n".join(parts) + "\n"
    (ROOT / "reports" / "costs.md").write_text(text)
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
