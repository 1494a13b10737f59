"""The main job: load cases, make their references, run and judge every cell, one record.

The controller's side: it computes no tensor and imports no torch. Everything else happens
in workers of a fork server that starts first and imports while options are checked.
"""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, Protocol

import msgspec

import spmd_verify.record as records
from spmd_verify.cases.address import expand
from spmd_verify.conditions import condition
from spmd_verify.earlier import HASHES, Earlier
from spmd_verify.errors import RankError, SpmdVerifyError
from spmd_verify.examination.examiner import Examiner
from spmd_verify.examination.teacher import Teacher
from spmd_verify.exit_codes import fails
from spmd_verify.mesh_spec import MeshSpec
from spmd_verify.options import Options, check_rank_limit
from spmd_verify.prober import Prober
from spmd_verify.record import CaseInfo, Cell, Record, Tie
from spmd_verify.resumer import Resumer
from spmd_verify.runner.failures import Failure
from spmd_verify.runner.folders import LogFolder, work_folder
from spmd_verify.runner.lockstep import LockstepRunner
from spmd_verify.runner.pool import Pool, start_fork_server
from spmd_verify.runner.processes import ProcessRunner
from spmd_verify.runner.specs import (
    JUDGE_JOB,
    LOAD_JOB,
    LOCATE_JOB,
    REFERENCE_JOB,
    CaseReport,
    CaseSpec,
    CellEvidence,
    CellSpec,
    JudgeRequest,
    LocateReport,
    LocateRequest,
    OnNote,
    ReferenceReport,
    ReferenceSpec,
    decode,
    encode,
)
from spmd_verify.stopwatch import Stopwatch
from spmd_verify.stored.cache import cache_folder
from spmd_verify.style_ids import ENGINE, select
from spmd_verify.styles import axes_of
from spmd_verify.version import __version__
from spmd_verify.whole_file import write_whole

# The reference runs the model about 20 times where a cell runs it twice.
_REFERENCE_PATIENCE: Final = 10.0
_STEP: Final = re.compile(r"step (\d+)")


class Progress(Protocol):
    """Receives the events of a run; see `progress.Progress`."""

    def note(self, text: str) -> None:
        """Say something worth a line of its own."""

    def planned(self, count: int) -> None:
        """Say how many cells there will be, besides those already planned."""

    def started(self, what: str) -> None:
        """Begin something that takes time."""

    def finished(self, cell: Cell) -> None:
        """Say how a cell ended."""

    def alive(self, style: str, step: int, rank: int) -> None:
        """Say where a running cell is."""


class Cells(Protocol):
    """What runs and judges cells, for what wants more than one per style."""

    options: Options
    progress: Progress

    def cell(self, spec: CellSpec) -> Cell:
        """Run and judge one cell; it is not put into the record."""

    def ask_solo(self, function: str, payload: bytes) -> bytes:
        """Run a job in the reference worker."""


AfterCell = Callable[[Cells, CellSpec, Cell], None]


def verify(options: Options, progress: Progress, after_cell: AfterCell | None = None) -> Record:
    """Judge every target under every selected style.

    Args:
        options: Checked options.
        progress: Told what happens.
        after_cell: Called with every judged cell before it is put into the record.

    Returns:
        The record, without its exit code. With `--report json=PATH` the cells finished so
        far are in that file at any time.

    Raises:
        UsageError: Nothing was run because options or a single case are wrong. With
            several cases, one that is wrong costs its own cells: they are `error`.
        RankError: The single-device run of the only case died.
    """
    addresses = expand(options.targets)
    needs_transformers = any(address.startswith("hf:") for address in addresses)
    start_fork_server(["transformers"] if needs_transformers else [])
    for mesh in options.meshes:
        check_rank_limit(mesh.num_ranks, options.rank_limit, options.runner)
    found = Record(
        tool=f"spmd-verify {__version__}",
        command=list(options.command),
        settings=options.settings,
    )
    with work_folder() as work_dir, LogFolder(options.log_dir) as logs:
        run = _Run(options, progress, found, work_dir, logs, after_cell)
        try:
            for address in addresses:
                if run.is_over_budget:
                    run.leave_out(address)
                    continue
                run.judge_case(address, is_only=len(addresses) == 1)
                if run.is_stopped:
                    break
        finally:
            run.stop()
    if len(options.meshes) > 1:
        found.unknown["conditions"] = _conditions(found)
    return found


def _conditions(record: Record) -> dict[str, str]:
    """Return when the cells of a sweep fail, by case."""
    strict = bool(record.settings["strict"])
    by_case: dict[str, list[Cell]] = {}
    for cell in record.cells:
        by_case.setdefault(cell.case, []).append(cell)
    said = {case: condition(cells, strict=strict) for case, cells in by_case.items()}
    return {case: text for case, text in said.items() if text is not None}


@dataclass
class _Run:
    """One run while it goes on."""

    options: Options
    progress: Progress
    record: Record
    work_dir: str
    logs: LogFolder
    after_cell: AfterCell | None = None
    is_stopped: bool = False
    ties: dict[str, list[Tie]] = field(default_factory=dict)  # near ties, by store
    earlier: Earlier = field(init=False)
    started: float = field(default_factory=time.monotonic)
    solo: Pool = field(init=False)
    runner: ProcessRunner | LockstepRunner = field(init=False)

    def __post_init__(self) -> None:
        """Describe the workers; they start when they are first needed."""
        folders = {"work_dir": self.work_dir, "log_dir": self.logs.path}
        self.solo = Pool(1, name="reference", **folders)
        is_lockstep = self.options.runner == "lockstep"
        self.runner = LockstepRunner(**folders) if is_lockstep else ProcessRunner(**folders)
        self.earlier = Earlier(self.options.resume, self.record)
        if self.earlier.why_not:
            self.progress.note(f"--resume: {self.earlier.why_not}")

    @property
    def is_over_budget(self) -> bool:
        """Say whether no further cell may begin."""
        budget = self.options.budget
        return budget is not None and time.monotonic() - self.started >= budget

    def leave_out(self, what: str) -> None:
        """Say in the record what the budget did not reach."""
        self.record.unknown.setdefault("not_run", []).append(what)

    @property
    def cache_path(self) -> str:
        """Folder of the references of earlier runs; empty for none."""
        return "" if self.options.no_cache else cache_folder()

    def stop(self) -> None:
        """End every process."""
        self.runner.stop()
        self.solo.stop()

    def judge_case(self, address: str, *, is_only: bool) -> None:
        """Judge one case under every selected style."""
        options = self.options
        case = CaseSpec(address, options.dtype, options.seed, options.steps, options.case_overrides)
        styles: list[str] = []
        try:
            self.progress.started(f"{address}: reference on one device")
            report = decode(self.ask_solo(LOAD_JOB, encode(case)), CaseReport)
            self._describe(address, report, is_only=is_only)
            styles = list(self._selected(address, report))
            cells = self._unless_known(address, self._cells(styles, report), report)
            if not cells:
                return
            is_engine = set(styles) <= set(ENGINE)
            decided = report.engine_overrides if is_engine else report.overrides
            case = msgspec.structs.replace(case, overrides={**case.overrides, **decided})
            store_path = os.path.join(self.work_dir, f"store-{len(self.record.cells)}")
            self.runner.prepare(self._spec(case, cells[0][1], cells[0][0], store_path))
            reference = self._make_reference(case, store_path)
        except SpmdVerifyError as error:
            if is_only:
                raise
            self._add_wrong_case(address, styles, error)
            return
        prober, resumer = Prober(self, case, report, reference), Resumer(self, report)
        cells = list(self._cells(styles, report))
        self.progress.planned(len(cells))
        try:
            for mesh, style in cells:
                if self.is_over_budget:
                    self.leave_out(f"{address}/{style} {mesh.text(style)}")
                    continue
                self._judge_style(self._spec(case, style, mesh, store_path), prober, resumer)
                if self.is_stopped:
                    return
        finally:
            resumer.stop()

    def _cells(self, styles: list[str], report: CaseReport) -> Iterator[tuple[MeshSpec, str]]:
        """Give mesh and style of every cell; a style with a mesh of its own has one cell."""
        for mesh in self.options.meshes:
            yield from ((mesh, style) for style in styles if style not in report.meshes)
        for style in styles:
            if style in report.meshes:
                yield MeshSpec(tuple(report.meshes[style].items())), style

    def _unless_known(
        self, address: str, cells: Iterator[tuple[MeshSpec, str]], report: CaseReport
    ) -> list[tuple[MeshSpec, str]]:
        """Take the cells that an earlier record has, and return the others."""
        self.record.unknown.setdefault(HASHES, {})[address] = report.source_hash
        others = []
        for mesh, style in cells:
            key = (address, style, mesh.text(style), self.options.dtype)
            found = self.earlier.cell(key, report.source_hash, report.environment)
            if found is None:
                others.append((mesh, style))
            else:
                self._add(found)
        return others

    def _describe(self, address: str, report: CaseReport, *, is_only: bool) -> None:
        """Put what loading a case told into the record; of several, hooks by their address."""
        self.record.environment = dict(report.environment)
        if is_only:
            self.record.case = CaseInfo(
                path=report.path, source_hash=report.source_hash, seed=self.options.seed
            )
            self.record.discovered = report.discovered
        else:
            found = report.discovered.items()
            self.record.discovered |= {f"{address}: {hook}": value for hook, value in found}

    def _selected(self, address: str, report: CaseReport) -> Iterator[str]:
        """Give the styles to run on a case."""
        for style in select(self.options.styles, report.user_styles):
            match = self.options.match
            if match is None or fnmatchcase(f"{address}/{style}", match):
                yield style

    def _make_reference(self, case: CaseSpec, store_path: str) -> ReferenceReport:
        """Run the case on one device and store what it computes."""
        spec = ReferenceSpec(case, store_path, self.cache_path)
        report = decode(self.ask_solo(REFERENCE_JOB, encode(spec)), ReferenceReport)
        for note in [*report.remarks, *report.notes]:
            self.progress.note(f"{case.address}: {note}")
        notes = self.record.unknown.setdefault("notes", {})
        notes[case.address] = report.notes
        times = {"seconds": report.seconds, "cpu_seconds": report.cpu_seconds}
        self.record.unknown.setdefault("references", {})[case.address] = times
        if report.exact is not None:
            self.record.unknown.setdefault("exact", {})[case.address] = report.exact
        return report

    def ask_solo(self, function: str, payload: bytes) -> bytes:
        """Run a job in the reference worker.

        Raises:
            SpmdVerifyError: What the job raised, or `RankError` where the worker died.
        """
        answer = self.solo.run(
            function,
            payload,
            timeout_seconds=self.options.timeout_seconds * _REFERENCE_PATIENCE,
        )
        if isinstance(answer, Failure):
            if answer.error is None or answer.error.slug is None:
                self.logs.is_kept = True
            answer.reraise()
        return answer[0]

    def _judge_style(self, spec: CellSpec, prober: Prober, resumer: Resumer) -> None:
        """Run, judge, probe and resume one cell and put it into the record."""
        self.progress.started(f"{spec.case.address}/{spec.style} on {spec.mesh}")
        cell = self.cell(spec)
        if cell.tensors:
            prober.probe(spec, cell)
            resumer.check(spec, cell)
        if self.after_cell is not None:
            self.after_cell(self, spec, cell)
        self._add(cell)

    def cell(self, spec: CellSpec) -> Cell:
        """Run and judge one cell."""
        answer = self.runner.run_cell(spec, self._heartbeat(spec.style))
        if isinstance(answer, CellEvidence):
            return self.judged(spec, answer)
        return self._failed(spec, answer)

    def _spec(self, case: CaseSpec, style: str, mesh: MeshSpec, store_path: str) -> CellSpec:
        """Describe one cell."""
        asked = mesh.resolve(style)
        seen = axes_of(style, asked)
        return CellSpec(
            case=case,
            style=style,
            mesh=mesh.text(style),
            axes=seen,
            parts={} if seen == asked else asked,
            store_path=store_path,
            is_lockstep=self.options.runner == "lockstep",
            timeout_seconds=self.options.timeout_seconds,
        )

    def judged(self, spec: CellSpec, evidence: CellEvidence) -> Cell:
        """Let the reference worker judge what the ranks found."""
        request = JudgeRequest(spec, evidence.parts, evidence.seconds)
        try:
            cell = decode(self.ask_solo(JUDGE_JOB, encode(request)), Cell)
            cell.unknown["seconds"]["start"] = evidence.start_seconds
            has_question = spec.fault is None or spec.fault.has_cause
            if cell.first_divergence is not None and has_question:
                stopwatch = Stopwatch()
                with stopwatch("examine"):
                    cell = Examiner(self).examined(spec, cell)
                    self._locate(spec, cell)
                    Teacher(self).locate(spec, cell)
                cell.unknown["seconds"] |= stopwatch.seconds
            return cell
        except RankError as error:
            self.logs.is_kept = True
            message = f"The judge failed: {error}"
            return _empty_cell(spec, verdict="error", message=message, log=self.logs.path)

    def _locate(self, spec: CellSpec, cell: Cell) -> None:
        """Name the first differing operator of an engine style in the cell, in place."""
        first = cell.first_divergence
        if first is None or first.stage in ("inputs", "initial_state") or spec.fault is not None:
            return
        request = LocateRequest(spec, first.step)
        answer = self.solo.run(
            LOCATE_JOB, encode(request), timeout_seconds=self.options.timeout_seconds
        )
        if isinstance(answer, Failure):
            self.progress.note(f"{cell.id}: no operator was named: {answer.reason}")
            return
        found = decode(answer[0], LocateReport)
        first.operator, first.source = found.operator, found.source

    def _failed(self, spec: CellSpec, failure: Failure) -> Cell:
        """Return the cell of a style that refused, or of ranks that failed."""
        if failure.kind == "refused":
            reason = " ".join(failure.reason.split())
            return _empty_cell(spec, verdict="unsupported", message=reason, skipped_reason=reason)
        self.logs.is_kept = True
        rank = failure.ranks[0] if failure.ranks else 0
        log = os.path.join(self.logs.path, f"{self.runner.name}{rank}.log")
        message = f"{failure.message} [{failure.slug}]"
        return _empty_cell(spec, verdict="error", message=message, log=log)

    def _heartbeat(self, style: str) -> OnNote:
        """Return what tells the progress where the ranks of a cell are."""

        def on_note(rank: int, text: str) -> None:
            step = _STEP.search(text)
            self.progress.alive(style, int(step[1]) if step else 0, rank)

        return on_note

    def _add_wrong_case(self, address: str, styles: list[str], error: SpmdVerifyError) -> None:
        """Give every cell of a case that cannot be judged the verdict `error`."""
        case = CaseSpec(address, self.options.dtype, self.options.seed, self.options.steps, {})
        chosen = styles or list(select(self.options.styles))
        for mesh, style in itertools.product(self.options.meshes, chosen):
            spec = self._spec(case, style, mesh, "")
            self._add(_empty_cell(spec, verdict="error", message=str(error)))

    def _add(self, cell: Cell) -> None:
        """Put a finished cell into the record, and the record on disk where one is asked for."""
        self.options.rules.judge(cell)
        self.record.cells.append(cell)
        self.progress.finished(cell)
        for report_format, path in self.options.reports:
            if report_format == "json" and path != "-":
                write_whole(path, records.encode(self.record))
        is_failing = cell.verdict == "error" or fails(cell)
        self.is_stopped = self.options.stop_at_first and is_failing


def _empty_cell(
    spec: CellSpec,
    *,
    verdict: str,
    message: str,
    log: str | None = None,
    skipped_reason: str | None = None,
) -> Cell:
    """Return a cell without rows."""
    return Cell(
        case=spec.case.address,
        style=spec.style,
        mesh=spec.mesh,
        dtype=spec.case.dtype,
        world_size=spec.num_ranks,
        runner="lockstep" if spec.is_lockstep else "processes",
        verdict=verdict,
        message=message,
        log=log,
        skipped_reason=skipped_reason,
    )
