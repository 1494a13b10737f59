"""Say why a cell fails: settle what differs first, then find the hypothesis that explains it.

Works on a dump of one more run of the cell (docs/design.md 3.7).
"""

from __future__ import annotations

from typing import Final

import torch

from spmd_verify import causes
from spmd_verify.causes import words
from spmd_verify.causes.exhibit import Exhibit
from spmd_verify.causes.forward import affected, explained
from spmd_verify.causes.words import cause
from spmd_verify.dumps.dump import read
from spmd_verify.examination.redraws import redraw
from spmd_verify.examination.relabel import relabel
from spmd_verify.layouts import take_region
from spmd_verify.record import Cause, Cell, FirstDivergence, Row
from spmd_verify.rows import worst_row
from spmd_verify.runner.jobs import loaded
from spmd_verify.runner.specs import ExamineReport, ExamineRequest, decode, encode
from spmd_verify.runner.worker import Context, job
from spmd_verify.settling import counts, mark_downstream, settle
from spmd_verify.stored.store import Store
from spmd_verify.style_ids import data_ranks
from spmd_verify.verdict import CARRIED_STAGES, STAGES, Verdict

# Experiments by name, in the order in which they are asked for; see `examiner.changes`.
EXPERIMENTS: Final = ("no_random", "float64", "divisible")


@job
def examine_cell(context: Context, payload: bytes) -> bytes:
    """Explain a failing cell: `ExamineRequest -> ExamineReport`."""
    request = decode(payload, ExamineRequest)
    cell = decode(request.judged, Cell)
    case = loaded(context, request.cell.case)
    first = _first(cell.tensors)
    assert first is not None, "only cells with a mismatch are examined"
    exhibit = Exhibit(
        case=case,
        store=Store(request.cell.store_path),
        dump=read(request.cell.dump_path),
        style=request.cell.style,
        axes=request.cell.axes,
        facts=request.facts,
        rows=cell.tensors,
        run=first.run,
        step=first.step,
        experiments=request.experiments,
    )
    return encode(Examination(exhibit, cell).report())


class Examination:
    """One cell while it is examined."""

    def __init__(self, exhibit: Exhibit, cell: Cell) -> None:
        """Take what is known."""
        self.exhibit = exhibit
        self.cell = cell

    def report(self) -> ExamineReport:
        """Return the cell with its cause, and which experiment would tell more."""
        first = self.settled()
        if first is None:
            self.cell.first_divergence = self.cell.cause = None
            self.cell.verdict = str(Verdict.ROUNDING)
            return ExamineReport(self.encoded())
        if first.step > self.exhibit.step:
            # The dump ends before it: the controller asks again, with a longer one.
            self.cell.cause = first.cause
            self.cell.first_divergence = FirstDivergence(
                step=first.step, stage=first.stage, tensor=first.name
            )
            mark_downstream(self.cell.tensors, first)
            return ExamineReport(self.encoded())
        found = self.gone(first) or self.reported_value(first) or causes.find(self.exhibit, first)
        first, found = relabel(self.exhibit, self.cell, first, found)
        wanted = ""
        if found is None:
            wanted = self.wanted(first)
            alike = words.names_of(self.exhibit.mismatches(first.stage))
            names = list(dict.fromkeys([first.name, *alike, *affected(self.exhibit)]))
            found = self.last_resort(first) or cause(
                "unexplained",
                f"no known cause fits {words.listed(names)} on {self.mesh_text()}"
                f"{self.where(first)}",
                residual=first.ratio,
                ranks=first.ranks,
                tensors=names,
            )
        first.cause = self.cell.cause = found
        self.cell.first_divergence = FirstDivergence(
            step=first.step, stage=first.stage, tensor=first.name
        )
        mark_downstream(self.cell.tensors, first)
        if found.kind == "reported_value":
            # A reporting fault is no training fault: the row fails, the cell does not.
            self.cell.verdict = str(Verdict.ROUNDING)
        return ExamineReport(self.encoded(), wanted)

    def gone(self, first: Row) -> Cause | None:
        """`unexplained`: the run that was to show the tensor has it right."""
        exhibit = self.exhibit
        if first.stage not in ("gradients", *CARRIED_STAGES) or not exhibit.is_known(first):
            return None
        held, parts = exhibit.locals(first), exhibit.regions(first)
        is_shown = held and sum(map(len, parts.values())) == len(held)
        if not is_shown or not first.error or first.error <= exhibit.tolerance(first):
            return None
        whole = exhibit.reference(first)
        error = max(
            float((held[at] - take_region(whole, part)).norm())
            for part, coordinates in parts.items()
            for at in coordinates
        )
        if not error <= min(exhibit.tolerance(first), 1e-3 * first.error):
            return None
        text = (
            f"{first.name} was wrong, and is right in the run that repeats the step: it depends on "
            f"something outside model and optimizer (the time, a variable of the file, a race)"
        )
        names = list(dict.fromkeys([first.name, *words.names_of(exhibit.mismatches(first.stage))]))
        return cause("unexplained", text, residual=first.ratio, tensors=names, ranks=first.ranks)

    def where(self, first: Row) -> str:
        """Return the ranks that differ, where they are not all."""
        is_everywhere = len(set(first.ranks)) in (0, len(self.exhibit.dump.ranks))
        return "" if is_everywhere else f", {words.ranks_text(first.ranks)}"

    def encoded(self) -> bytes:
        """Return the cell with its rows counted again, and what could not be run for it."""
        if self.exhibit.runs.failures:
            self.cell.unknown["not_run"] = self.exhibit.runs.failures
        self.cell.counts = counts(self.cell.tensors)
        self.cell.worst = worst_row(self.cell.tensors)
        return encode(self.cell)

    def settled(self) -> Row | None:
        """Explain module outputs and inputs, and return what differs first then."""
        step = self.exhibit.step
        redraw(self.exhibit, self.cell.tensors)
        for row in self.cell.tensors:
            if row.step != step or row.verdict != Verdict.MISMATCH:
                continue
            if row.stage == "module_outputs":
                is_number = not row.shape
                why = "a number: the loss decides" if is_number else explained(self.exhibit, row)
                if why is not None:
                    row.verdict, row.cause = str(Verdict.ROUNDING), None
                    row.unknown["explained"] = why
            elif row.stage == "gradients" and self.is_clipped_by_hand(row):
                row.verdict, row.cause = str(Verdict.ROUNDING), None
                row.unknown["explained"] = "it is the clipped gradient"
            elif row.stage == "inputs" and not self.is_wrong_input(row):
                row.verdict, row.cause = str(Verdict.ROUNDING), None
                row.unknown["explained"] = "ranks see the slices of the global input, each alike"
        for row in self.cell.tensors:
            undecided = row.stage == "inputs" and row.step == step
            if undecided and row.verdict == Verdict.UNDETERMINED and self.is_wrong_input(row):
                row.verdict = str(Verdict.MISMATCH)
        self.find_missing_gradients()
        settle(self.cell.tensors)
        return _first(self.cell.tensors)

    def is_clipped_by_hand(self, row: Row) -> bool:
        """Say whether a gradient is torch's clipped one, read after the style's own clipping."""
        exhibit = self.exhibit
        if exhibit.store.entry(row.step, "clipping", row.name) is None or not exhibit.is_known(row):
            return False
        found = exhibit.assembled(row)
        after = exhibit.store.exact(row.run, row.step, "clipping", row.name).to(torch.float64)
        return found is not None and float((found - after).norm()) <= exhibit.tolerance(row)

    def find_missing_gradients(self) -> None:
        """Count a gradient that is None where its parameter moves wrongly as a mismatch."""
        wrong = {row.name for row in self.exhibit.mismatches("parameters")}
        for row in self.exhibit.stage_rows("gradients"):
            held = self.exhibit.locals(row) if row.name in wrong else {}
            parameter = self.exhibit.by_key.get(("free", row.step, "parameters", row.name))
            if not held or parameter is None or row.verdict == Verdict.MISMATCH:
                continue
            owners = self.exhibit.locals(parameter)
            if set(owners) - set(held) and len(self.exhibit.regions(row)) == 1:
                row.verdict = str(Verdict.MISMATCH)

    def is_wrong_input(self, row: Row) -> bool:
        """Say whether slices of an input are missing, doubled or altered over the ranks."""
        is_wrong = self.exhibit.seen.is_wrong(row.name)
        return not row.shape and row.verdict == Verdict.MISMATCH if is_wrong is None else is_wrong

    def reported_value(self, first: Row) -> Cause | None:
        """`reported_value`: only a loss or a norm differs; training is right."""
        is_value = first.stage == "loss" or (
            first.stage == "clipping" and first.name in ("total_norm", "clip_factor")
        )
        others = [
            row
            for row in self.cell.tensors
            if row.verdict == Verdict.MISMATCH
            and row.stage not in ("loss", "module_outputs")
            and row.name not in ("total_norm", "clip_factor")
        ]
        if not is_value or others:
            return None
        worst = first.worst
        shown = "" if worst is None else f": {worst.actual:.9g}, should be {worst.expected:.9g}"
        whose = self.whose_value(first)
        text = (
            f"{first.name} as reported differs{shown}{whose}, while every gradient and parameter "
            f"agrees: a reporting fault, not a training fault"
        )
        return cause("reported_value", text, tensors=[first.name], ranks=first.ranks)

    def whose_value(self, first: Row) -> str:
        """Say that a reported number is one rank's own."""
        if first.stage != "loss":
            return ""
        tolerance = 4.0 * self.exhibit.tolerance(first)
        held = [float(v.reshape(-1)[0]) for v in self.exhibit.locals(first).values()]
        for at, record in self.exhibit.part_records.items():
            own = next(iter(record.get("loss", {}).values()), None)
            if own is not None and all(abs(v - float(own)) <= tolerance for v in held):
                return f" (it is what the part of rank {self.exhibit.rank_of(at)} alone gives)"
        return ""

    def wanted(self, first: Row) -> str:
        """Return the next experiment that could tell the cause."""
        for name in EXPERIMENTS:
            if name in self.exhibit.experiments:
                continue
            if name == "float64" and self.exhibit.case.settings.dtype.itemsize >= 8:
                continue
            if name == "divisible" and not self.is_uneven():
                continue
            if first.stage == "initial_state":
                continue
            return name
        return ""

    def is_uneven(self) -> bool:
        """Say whether the batch does not divide over the data axes."""
        return self.exhibit.case.batch_size % data_ranks(self.exhibit.axes) != 0

    def mesh_text(self) -> str:
        """Return the mesh, `dp=2,tp=2`."""
        return ",".join(f"{axis}={size}" for axis, size in self.exhibit.axes.items())

    def part_sizes(self) -> list[str]:
        """Return how many samples each rank has."""
        case = self.exhibit.case
        return [str(case.batch_size_of(part)) for part in self.exhibit.part_batches.values()]

    def padded(self, first: Row) -> Cause | None:
        """`uneven`: the ranks hold more of a dim together than there is: padding takes part."""
        found: list[str] = []
        said = ""
        for row in self.exhibit.stage_rows("module_outputs"):
            if row.name == first.name:
                break
            surplus = self.surplus(row)
            if surplus is not None:
                found.append(row.name)
                said = said or (
                    f"{row.name}: the ranks of {self.mesh_text()} have {surplus[1]} slices of dim "
                    f"{surplus[0]}, one device has {row.shape[surplus[0]]}: padding takes "
                    f"part in what is computed from it"
                )
        if not found:
            return None
        names = list(dict.fromkeys([*found, first.name, *affected(self.exhibit)]))
        text = f"{said} (also {words.listed(names[1:])})"
        return cause("uneven", text, tensors=names, ranks=first.ranks)

    def surplus(self, row: Row) -> tuple[int, int] | None:
        """Return the dim of which a rank, or all together, have too many slices; how many."""
        held = list(self.exhibit.locals(row).values())
        if not held or any(local.ndim != len(row.shape) for local in held):
            return None
        for dim, size in enumerate(row.shape):
            total = sum(local.shape[dim] for local in held)
            others = {(*local.shape[:dim], *local.shape[dim + 1 :]) for local in held}
            largest = max(local.shape[dim] for local in held)
            if largest > size and others == {(*row.shape[:dim], *row.shape[dim + 1 :])}:
                return dim, largest
            # Ranks that each have them all hold copies.
            is_padded = largest < size < total < size + len(held)
            if is_padded and others == {(*row.shape[:dim], *row.shape[dim + 1 :])}:
                return dim, total
        return None

    def last_resort(self, first: Row) -> Cause | None:
        """`uneven`: right where the batch divides, or padding that takes part."""
        found = self.padded(first)
        if found is not None:
            return found
        if self.exhibit.experiments.get("divisible"):
            size = self.exhibit.case.batch_size
            sizes = ", ".join(f"{a}={n}" for a, n in self.exhibit.axes.items())
            parts = ", ".join(self.part_sizes())
            names = list(dict.fromkeys([first.name, *affected(self.exhibit)]))
            text = (
                f"{words.listed(names)}: right when the batch divides by the ranks, wrong with "
                f"{size} samples over {sizes} (parts of {parts})"
            )
            return cause("uneven", text, tensors=names, ranks=first.ranks)
        return None


def _first(rows: list[Row]) -> Row | None:
    """Return the first mismatch in the order of (step, stage, position)."""
    order = {stage: i for i, stage in enumerate(STAGES)}
    wrong = [row for row in rows if row.verdict == Verdict.MISMATCH]
    return min(wrong, key=lambda row: (row.step, order[row.stage]), default=None)
