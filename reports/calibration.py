"""Calibrate the limits c: how far right computations are from their floors.

Candidates are what data parallelism computes - the batch in W parts, gradients weighted and
added in rank order - on one device; no code of the engine takes part. Widths differ from those of
the noise runs that make the floors. `make calibration` writes reports/calibration.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tabulate import tabulate

from spmd_verify.cases.case import load_case
from spmd_verify.noise import runs as noise
from spmd_verify.noise.members import Split
from spmd_verify.noise.runs import SplitProbe
from spmd_verify.norms import deviation, row_sums
from spmd_verify.reference.single import make_reference
from spmd_verify.verdict import limit

ROOT = Path(__file__).resolve().parent
MODELS = ("mlp", "transformer", "conv")
DTYPES = ("float32", "float64", "bfloat16")
WIDTHS = (3, 5, 8)
SEEDS = 12


def ratios(model: str, dtype: str, seed: int) -> tuple[list[float], list[float]]:
    """Return error / floor over loss and gradients, by the tensor norm and by the worst row."""
    case = load_case(str(ROOT / "calibration" / f"{model}.py"), dtype=dtype, seed=seed, steps=1)
    device, reference = make_reference(case)
    assert reference.exact is not None
    assert reference.anchored is not None
    floors = noise.measure(device, reference).floors["free"]
    whole, rows = [], []
    for width in WIDTHS:
        member = Split(f"{width} parts", width, is_reversed=False)
        probe = SplitProbe(member.name, member, reference.anchored)
        device.run(
            in_float64=True, member=probe, anchors=reference.run, with_module_outputs=False
        )  # finds the weights of the parts
        found = device.run(member=member, with_module_outputs=False).steps[0]
        for stage in ("loss", "gradients"):
            for name, value in found[stage].items():
                floor = floors[0, stage, name]
                error = deviation(value, reference.exact.steps[0][stage][name])
                squares = row_sums(error.square()) if value.ndim else error.square().reshape(1)
                if floor.noise > 0.0:
                    whole.append(float(squares.sum().sqrt()) / floor.noise)
                by_row = torch.where(squares > 0, squares.sqrt() / floor.noise_rows, 0.0)
                rows.append(float(by_row.max()))
    return whole, rows


def main() -> int:
    """Measure and write the table."""
    lines = []
    for dtype in DTYPES:
        for model in MODELS:
            pairs = [ratios(model, dtype, seed) for seed in range(SEEDS)]
            for norm, at in (("tensor", 0), ("row", 1)):
                found = torch.tensor([value for pair in pairs for value in pair[at]])
                quantiles = torch.quantile(found, torch.tensor([0.5, 0.99])).tolist()
                lines.append(
                    [dtype, model, norm, str(len(found)), *(f"{q:.2f}" for q in quantiles),
                     f"{float(found.max()):.2f}", f"{limit(dtype, norm):g}"]
                )  # fmt: skip
                print(*lines[-1], flush=True)
    header = ["dtype", "model", "norm", "comparisons", "p50", "p99", "max", "limit c"]
    table = tabulate(lines, header, tablefmt="github", disable_numparse=True)
    text = (
        "# Calibration of the limits c\n\n"
        "Written by `make calibration` (reports/calibration.py): error / floor of right "
        f"candidates, the batch in {', '.join(map(str, WIDTHS))} parts, {SEEDS} seeds, loss and "
        "all gradients of one step, single device, without the engine.\n\n"
    )
    (ROOT / "calibration.md").write_text(text + table + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
