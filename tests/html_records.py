"""Records that the tests of the HTML report and `reports/html_speed.py` render."""

from __future__ import annotations

import random

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

LIMITS = {"float32/tensor": 4.0, "float32/row": 4.0}
HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "a\nb\r\nc",
    "x|y`z",
    "\x1b[31mred\x1b[0m",
    "'\"&amp;<b onmouseover=alert(1)>",
    "n" * 300,
    "\u5c42.\u0432\u0435\u0441.\u05de\u05e9\u05e7\u05dc",
    "\u2028line\u2029\u202etxet",
    "{{ 7 * 7 }}{% if %}",
    "javascript:alert(1)",
    "__proto__",
)


def large_record(styles: int = 8, tensors: int = 300, steps: int = 10) -> Record:
    """Return a record of `styles * tensors * steps` rows of which two styles fail."""
    draw = random.Random(0)
    cells = [_large_cell(draw, style, tensors, steps) for style in range(styles)]
    return Record(
        tool="spmd-verify 0.1.0",
        command=["spmd-verify", "model.py"],
        environment={"torch": "2.13.0"},
        settings={"limits": LIMITS},
        cells=cells,
    )


def _large_cell(draw: random.Random, style: int, tensors: int, steps: int) -> Cell:
    is_bad = style in (2, 5)
    rows = []
    for i in range(tensors):
        name, stage = _tensor(i)
        for step in range(steps):
            noise = 10 ** draw.uniform(-9, -6)
            is_wrong = is_bad and i >= tensors // 2
            ratio = 10 ** draw.uniform(2, 7) if is_wrong else draw.uniform(0.05, 1.2)
            row = Row(
                name=name,
                stage=stage,
                step=step,
                verdict="mismatch" if is_wrong else "rounding",
                run="free" if step == 0 or stage == "parameters" else "anchored",
                shape=[512, 64],
                dtype="float32",
                layout="S(0)",
                error=noise * ratio,
                noise=noise,
                ratio=ratio,
                max_ulp=draw.randrange(1, 10**6),
                worst=WorstElement(
                    index=[draw.randrange(512), draw.randrange(64)],
                    actual=draw.uniform(-1, 1),
                    expected=draw.uniform(-1, 1),
                ),
            )
            if is_wrong:
                row.ranks = [0, 1, 2, 3]
                row.cause = Cause(kind="unexplained", text="no known cause fits")
                row.downstream_of = f"step 0, {stage}, x" if i > tensors // 2 else None
            rows.append(row)
    return _cell(f"style{style}", "mismatch" if is_bad else "rounding", rows, steps)


def _tensor(i: int) -> tuple[str, str]:
    module, place = divmod(i, 3)
    block, kind = divmod(module, 3)
    part = ("attention.query", "attention.output", "feed.forward")[kind]
    stage = ("module_outputs", "gradients", "parameters")[place]
    name = f"model.layers.{block}.{part}"
    return (name if stage == "module_outputs" else f"{name}.weight"), stage


def _cell(style: str, verdict: str, rows: list[Row], steps: int) -> Cell:
    worst = max(rows, key=lambda row: row.ratio or 0.0)
    first = next((row for row in rows if row.verdict == "mismatch"), None)
    return Cell(
        case="model.py",
        style=style,
        mesh="dp=4",
        dtype="float32",
        world_size=4,
        runner="processes",
        verdict=verdict,
        cause=first.cause if first else None,
        first_divergence=FirstDivergence(step=first.step, stage=first.stage, tensor=first.name)
        if first
        else None,
        worst=WorstTensor(
            tensor=worst.name,
            stage=worst.stage,
            step=worst.step,
            error=worst.error or 0.0,
            noise=worst.noise or 0.0,
            ratio=worst.ratio or 0.0,
        ),
        counts={verdict: len(rows)},
        exercised=Exercised(n=len(rows), of=len(rows)),
        tensors=rows,
        unknown={"growth": [0.3 + 0.05 * step for step in range(steps)]},
    )


def hostile_record() -> Record:
    """Return a record in which everything that a user names is an attack."""
    rows = [
        Row(
            name=name,
            stage="gradients",
            step=0,
            verdict="mismatch",
            aliases=[name],
            shape=[2],
            dtype="float32",
            layout=name,
            error=float("inf"),
            noise=0.0,
            ratio=float("nan"),
            worst=WorstElement(index=[0], actual=float("nan"), expected=float("-inf")),
            cause=Cause(kind="unexplained", text=name, remedy=name),
        )
        for name in HOSTILE
    ]
    cells = []
    for name in HOSTILE:
        cell = _cell(name, "mismatch", rows, 1)
        cell.case = cell.message = cell.log = name
        cell.mesh = f"dp=2,{name}"
        assert cell.first_divergence is not None
        cell.first_divergence.operator = cell.first_divergence.located = name
        cells.append(cell)
    return Record(
        tool=HOSTILE[0],
        command=list(HOSTILE),
        environment=dict.fromkeys(HOSTILE, HOSTILE[0]),
        settings={"limits": LIMITS},
        discovered={name: name for name in HOSTILE},
        cells=cells,
        unknown={
            "notes": {name: [name] for name in HOSTILE},
            "conditions": {name: f"fails iff {name}" for name in HOSTILE},
        },
    )


def passing_record() -> Record:
    """Return the record of one style that passes on two steps."""
    rows = [
        Row(
            name="fc.weight",
            stage="gradients",
            step=step,
            verdict="rounding",
            dtype="float32",
            error=1e-8 * (step + 1),
            noise=2e-8,
            ratio=0.5 * (step + 1),
        )
        for step in range(2)
    ]
    return Record(settings={"limits": LIMITS}, cells=[_cell("ddp", "rounding", rows, 2)])
