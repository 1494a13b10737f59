"""From a finished run to its exit code: the gate, its waivers, and the baseline. Torch-free."""

from __future__ import annotations

from dataclasses import replace

from spmd_verify.baselines import baseline as baselines
from spmd_verify.baselines.baseline import Baseline
from spmd_verify.baselines.changes import Comparison, compare
from spmd_verify.exit_codes import FAILED, NOTHING_JUDGED, PASSED, RANK_FAILED, decide
from spmd_verify.options import Options
from spmd_verify.record import Record
from spmd_verify.visible import visible


def prepared(options: Options) -> tuple[Options, Baseline | None]:
    """Read the baseline before anything runs; its known failures are waivers of the run.

    Raises:
        RecordError: `baseline-unreadable`, `not-a-baseline`, `baseline-too-new`.
        UsageError: A known failure is written wrongly.
    """
    if not options.baseline:
        return options, None
    kept = baselines.read(options.baseline)
    known = kept.waivers(options.baseline)
    return replace(options, gate=replace(options.gate, waivers=options.gate.waivers + known)), kept


def finish(record: Record, options: Options, kept: Baseline | None) -> int:
    """Judge what a run found, put into the record what is to be said of it, return the exit code.

    Args:
        record: Of the finished run.
        options: As `prepared` gave them.
        kept: The baseline, if one is asked for.
    """
    rules = options.rules
    for cell in record.cells:
        rules.judge(cell)
    lines = _left_out(record) + rules.said(record.cells)
    code = decide(record.cells, exit_zero=options.exit_zero)
    if kept is not None:
        found = compare(kept, record, options.baseline, strict=options.strict)
        record.unknown["baseline"] = _plain(found, options.baseline)
        lines += [line for line in found.lines(options.baseline) if line not in lines]
        is_worse = found.exit_code in (FAILED, RANK_FAILED)
        if code in (PASSED, NOTHING_JUDGED) and is_worse:
            code = PASSED if options.exit_zero else FAILED
    if lines:
        record.unknown["gate"] = lines
    return code


def _plain(found: Comparison, path: str) -> dict[str, object]:
    """Return a comparison as a record keeps it."""
    changes = [
        {"kind": c.kind, "name": c.name, "text": c.text, "is_regression": c.is_regression}
        for c in found.changes
    ]
    return {"path": path, "environment": found.environment, "changes": changes}


def _left_out(record: Record) -> list[str]:
    """Say what the budget did not reach."""
    left = record.unknown.get("not_run", [])
    if not left:
        return []
    named = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
    return [visible(f"warning: --budget is over, not run: {named}; --resume RECORD goes on")]
