"""Records for tests of what shows them; no torch."""

from spmd_verify.record import (
    Cause,
    Cell,
    Exercised,
    FirstDivergence,
    Record,
    Row,
    WorstElement,
    WorstTensor,
)


def cell(style: str = "replicate", verdict: str = "rounding", **changes: object) -> Cell:
    """Return a cell without rows."""
    fields: dict[str, object] = {
        "case": "mlp.py",
        "style": style,
        "mesh": "dp=2",
        "dtype": "float32",
        "world_size": 2,
        "runner": "processes",
        "verdict": verdict,
        "exercised": Exercised(n=42, of=44),
        "duration_seconds": 1.25,
    }
    return Cell(**(fields | changes))  # type: ignore[arg-type]


def row(name: str, stage: str = "gradients", verdict: str = "rounding", **changes: object) -> Row:
    """Return one tensor of step 0."""
    fields: dict[str, object] = {"step": 0, "error": 3e-8, "noise": 6e-8, "ratio": 0.5}
    return Row(name=name, stage=stage, verdict=verdict, **(fields | changes))  # type: ignore[arg-type]


def wrong(name: str, *, ratio: float = 5e6, **changes: object) -> Row:
    """Return a gradient that differs, with its cause."""
    fields: dict[str, object] = {
        "ratio": ratio,
        "worst": WorstElement(index=[1, 2], actual=0.5, expected=0.25),
        "cause": Cause(kind="factor", text=f"{name} is 2.000 x", remedy=f"divide {name} by dp"),
        "ranks": [0, 1],
        "max_ulp": 8388608,
    }
    return row(name, "gradients", "mismatch", **(fields | changes))


def failing(*names: str, style: str = "fully_shard", **changes: object) -> Cell:
    """Return a cell whose gradients of these names differ; the first is where it begins."""
    rows = [wrong(name) for name in names or ("blocks.0.fc.weight",)]
    first = rows[0]
    later = row(first.name, "parameters", "mismatch", downstream_of=f"gradients {first.name}")
    fields: dict[str, object] = {
        "first_divergence": FirstDivergence(step=0, stage="gradients", tensor=first.name),
        "worst": WorstTensor(
            tensor=first.name, stage="gradients", step=0, error=1.0, noise=2e-7, ratio=5e6
        ),
        "tensors": [*rows, later, row("blocks.1.fc.weight"), row("loss", "loss", "exact")],
        "counts": {"mismatch": len(rows) + 1, "rounding": 1, "exact": 1},
        "cause": first.cause,
    }
    return cell(style, "mismatch", **(fields | changes))


def every_verdict() -> Record:
    """Return a record with a cell of every verdict."""
    passing = [row("fc.weight"), row("fc.bias", verdict="exact"), row("model", "module_outputs")]
    doubtful = [
        row("fc.weight", verdict="undetermined", unknown={"reason": "no usable floor"}),
        row("fc.bias", "parameters", "not_exercised", error=None, noise=None, ratio=None),
    ]
    return Record(
        tool="spmd-verify 0.1.0",
        cells=[
            cell(tensors=passing),
            failing(),
            cell(
                "ddp",
                "semantic",
                first_divergence=FirstDivergence(step=0, stage="gradients", tensor="bn.weight"),
                tensors=[row("bn.weight", verdict="semantic")],
            ),
            cell("default", "unsupported", skipped_reason="it has a branch at m.py:3"),
            cell("fsdp2", "error", message="rank 1 died\n  File x", log="/tmp/rank1.log"),
            cell("pp", "undetermined", undetermined_reason="a tie", tensors=doubtful),
            cell("zero1", "not_exercised", message="no gradient carried a signal"),
        ],
    )
