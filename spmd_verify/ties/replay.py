"""What a replay with the reference's decisions says of a failing cell. Torch-free.

Normative: verdicts.md part 6: a flip inside the noise is a tie, replayed with the reference's
decision forced and judged again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from spmd_verify.record import Cell, Row, Tie
from spmd_verify.settling import counts, verdict_of
from spmd_verify.verdict import Verdict


def judged_again(cell: Cell, forced: Cell, ties: Sequence[Tie]) -> Cell:
    """Return the cell as the replay shows it.

    Rows that differ in the cell and not in its replay are `undetermined`; the others are the
    replay's, which holds nothing that a flip made of them.

    Args:
        cell: As it ran.
        forced: The same with the decisions of `ties` forced.
        ties: Near ties that were decided otherwise, by row; at least one.
    """
    ties = _by_place(ties)
    said = described(ties)
    reason = f"{said}; with the reference's decision forced it agrees"
    wrong = {_key(row): row for row in cell.tensors if row.verdict == Verdict.MISMATCH}
    rows = [
        row if row.verdict == Verdict.MISMATCH or _key(row) not in wrong
        # The value that was observed, judged by what the replay showed.
        else _undetermined(wrong[_key(row)], reason)
        for row in forced.tensors
    ]  # fmt: skip
    still = any(row.verdict == Verdict.MISMATCH for row in rows)
    is_explained = any(row.unknown.get("reason") == reason for row in rows)
    note = f"{said}; with the reference's decisions forced "
    note += "the rest still differs" if is_explained else "all still differs: no tie explains it"
    verdict, undetermined = verdict_of(
        rows,
        max((row.step for row in rows), default=0),
        is_exercised=forced.exercised is not None and forced.exercised.n > 0,
    )
    return msgspec.structs.replace(
        forced,
        verdict=str(verdict),
        message="; ".join(part for part in (forced.message, note if still else "") if part),
        counts=counts(rows),
        undetermined_reason=reason if is_explained and not still else forced.undetermined_reason,
        duration_seconds=cell.duration_seconds,
        ties=ties,
        tensors=rows,
        unknown={
            **forced.unknown,
            "seconds": cell.unknown.get("seconds", {}),
            "undetermined_elements": undetermined,
        },
    )


def _by_place(ties: Sequence[Tie]) -> list[Tie]:
    """Return one tie for the rows of a place in a step of a run."""
    places: dict[tuple[str, str, int, str], list[Tie]] = {}
    for tie in ties:
        places.setdefault((tie.operator, tie.source, tie.step, tie.run), []).append(tie)
    return [msgspec.structs.replace(found[0], rows=len(found)) for found in places.values()]


def described(ties: Sequence[Tie]) -> str:
    """Return `a tie inside the noise: topk at model.py:17, step 0, margin .., noise ..`."""
    first = ties[0]
    others = {(tie.operator, tie.source) for tie in ties} - {(first.operator, first.source)}
    more = f" (and at {len(others)} more places)" if others else ""
    return f"a tie inside the noise: {_told(first)}{more}"


def _told(tie: Tie) -> str:
    """Return one tie in words."""
    return (
        f"{tie.operator} at {tie.source}, step {tie.step}, margin {tie.margin:.3g}, noise "
        f"{tie.noise:.3g}"
    )


def _undetermined(row: Row, reason: str) -> Row:
    """Return a row that only a tie decides."""
    return msgspec.structs.replace(
        row,
        verdict=str(Verdict.UNDETERMINED),
        cause=None,
        downstream_of=None,
        unknown={**row.unknown, "reason": reason},
    )


def _key(row: Row) -> tuple[int, str, str]:
    """Return what a row is about, in either run."""
    return row.step, row.stage, row.name
