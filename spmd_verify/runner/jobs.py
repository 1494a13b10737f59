"""The jobs that workers run: load a case, make its reference, run a cell, judge a cell.

Imported by the fork server, so what is imported here is warm in every worker. A worker keeps
the last case it loaded, and what styles share between the cells of that case.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from spmd_verify import garbage, styles
from spmd_verify.adversarial.case import AdversarialCase
from spmd_verify.adversarial.search import with_even_size, with_uneven_size
from spmd_verify.cases.case import LoadedCase, load_case
from spmd_verify.exact.case import ExactCase
from spmd_verify.exact.reference import make_exact_reference
from spmd_verify.judge import Judgement, judge
from spmd_verify.measure import Statistics
from spmd_verify.noise import runs as noise
from spmd_verify.planting.planted import PlantedStyle
from spmd_verify.record import Cell
from spmd_verify.reference.single import make_reference
from spmd_verify.reference.trajectory import named_parameters, optimizers_of
from spmd_verify.runner.ahead import Ahead
from spmd_verify.runner.caching import through_cache
from spmd_verify.runner.drive import Drive
from spmd_verify.runner.dumping import DumpTaker
from spmd_verify.runner.fed import fed_step
from spmd_verify.runner.resumed import resumed, strict_state
from spmd_verify.runner.specs import (
    CaseReport,
    CaseSpec,
    CellReport,
    CellSpec,
    JudgeRequest,
    LocateReport,
    LocateRequest,
    ReferenceReport,
    ReferenceSpec,
    decode,
    encode,
)
from spmd_verify.runner.worker import Context, job
from spmd_verify.stopwatch import Stopwatch
from spmd_verify.stored.store import Store, write_store
from spmd_verify.styles.base import Style, StyleContext, mesh_coordinates
from spmd_verify.styles.user import mesh_of
from spmd_verify.ties.forcing import Forcing, read_ties
from spmd_verify.user_code import is_user_file


@job
def describe_case(context: Context, payload: bytes) -> bytes:
    """Load a case and say what was found: `CaseSpec -> CaseReport`.

    Raises:
        CaseError: The case cannot be loaded.
    """
    case = loaded(context, decode(payload, CaseSpec))
    case.batch(0)
    even, uneven = _decided(case)
    environment = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "backend": "gloo",
    }
    return encode(
        CaseReport(
            path=case.path,
            source_hash=case.source_hash,
            user_styles=list(case.user_styles),
            discovered=case.discovered,
            environment=environment,
            meshes={
                name: mesh for name in case.user_styles if (mesh := mesh_of(case, name)) is not None
            },
            overrides=even,
            engine_overrides=uneven,
            setups=[name for name, hooks in case.hooks.styles.items() if hooks.setup is not None],
        )
    )


def _decided(case: LoadedCase) -> tuple[dict[str, str], dict[str, str]]:
    """Return the overrides that spare other processes the search for adversarial changes."""
    if not isinstance(case, AdversarialCase):
        return {}, {}
    even, uneven = with_even_size(case), with_uneven_size(case)
    return even.overrides(), uneven.overrides()


@job
def write_reference(context: Context, payload: bytes) -> bytes:
    """Run a case on one device and store it: `ReferenceSpec -> ReferenceReport`.

    Raises:
        ReferenceRunError: The single-device run cannot be used.
    """
    spec = decode(payload, ReferenceSpec)
    case = loaded(context, spec.case)

    def make(stopwatch: Stopwatch) -> ReferenceReport:
        return _make_reference(context, case, Path(spec.store_path), stopwatch)

    return encode(through_cache(case, spec, make))


def _make_reference(
    context: Context, case: LoadedCase, path: Path, stopwatch: Stopwatch
) -> ReferenceReport:
    """Run a case on one device and write its store."""
    context.note("reference runs on one device")
    info = None
    with stopwatch("reference"), case.on_one_device():
        if isinstance(case, ExactCase):
            found = make_exact_reference(case)
            device, reference, measured, info = found.parts
        else:
            device, reference = make_reference(case)
    if info is None:
        context.note("noise runs")
        with stopwatch("noise"):
            measured = noise.measure(device, reference)
    context.note("writing the reference")
    model, optimizer = device.build()
    parameters = named_parameters(model)[0]
    with stopwatch("write"):
        write_store(
            path,
            reference,
            measured,
            dtype=str(case.dtype).removeprefix("torch."),
            trainable=[name for name, tensor in parameters.items() if tensor.requires_grad],
            exact=info,
        )
    changed = case.changes.notes if isinstance(case, AdversarialCase) else ()
    return ReferenceReport(
        notes=[*changed, *_reference_notes(reference, measured)],
        is_sgd=all(type(each) is torch.optim.SGD for each in optimizers_of(optimizer)),
        is_stepped=info is not None or _is_stepped(case, model, optimizer),
        exact=info,
    )


def _is_stepped(case: LoadedCase, model: nn.Module, optimizer: Any) -> bool:
    """Say whether a step steps the optimizer it is given; only asked where SGD stands in."""
    if case.overrides.get("optimizer") != "sgd":
        return True
    calls: list[object] = []
    for single in optimizers_of(optimizer):
        single.register_step_post_hook(lambda *_: calls.append(None))
    case.seed_step(0)
    case.step(model, optimizer, case.batch(0))
    return bool(calls)


def _reference_notes(reference: Any, measured: noise.Noise) -> list[str]:
    """Say what a reader should know about a reference."""
    notes = list(reference.run.notes)
    if reference.absent is not None:
        notes.append(f"no float64 reference: {reference.absent}")
    notes.extend(f"noise run not counted: {dropped}" for dropped in measured.dropped)
    notes.extend(f"computed in a coarser dtype: {island}" for island in measured.islands)
    return notes


@job
def run_cell(context: Context, payload: bytes) -> bytes:
    """Run a style on this rank, or on all in lockstep: `CellSpec -> CellReport`.

    Raises:
        Unsupported: The style does not take the case.
    """
    spec = decode(payload, CellSpec)
    case = loaded(context, spec.case)
    mesh = _style_context(context, spec)
    store = Store(spec.store_path)
    style = styles.find(spec.style, case)
    forcing = Forcing(read_ties(spec.ties_path)) if spec.ties_path else None
    if forcing is not None:
        style = forcing.applied(style)
    planted = None if spec.fault is None else PlantedStyle(style, spec.fault, store)
    if spec.feeding is not None:
        return encode(fed_step(Drive(style, case, mesh, store, context.note), spec.feeding))
    if spec.resume is not None:
        return encode(resumed(Drive(style, case, mesh, store, context.note), spec.resume))
    run = Drive(planted or style, case, mesh, store, context.note)
    run.forcing = forcing
    if spec.last_step >= 0:
        run.steps = spec.last_step + 1
    if spec.dump_path:
        run.dump = DumpTaker(store, tuple(spec.axes.values()))
    facts = run.run()
    if run.dump is not None:
        run.dump.write(spec.dump_path, mesh)
    return encode(
        CellReport(
            statistics=encode(run.statistics),
            fallbacks=dict(facts.get("fallbacks", {})),
            collectives=dict(facts.get("collectives", {})),
            captures=int(facts.get("captures", 0)),
            notes=[*run.notes, *facts.get("notes", ())],
            watched=None if planted is None else planted.watched(run.statistics),
            facts={**facts.get("facts", {}), "is_anchored": run.is_anchored},
            seconds=run.stopwatch.seconds,
            cpu_seconds=run.stopwatch.cpu_seconds,
            flipped=[] if forcing is None else sorted(forcing.flipped),
        )
    )


def _style_context(context: Context, spec: CellSpec) -> StyleContext:
    """Return where this process stands on the cell's mesh."""
    every = mesh_coordinates(spec.axes)
    return StyleContext(
        axes=spec.axes,
        coordinates=tuple(every) if spec.is_lockstep else (every[context.rank],),
        device=torch.device(context.device_type),
        is_lockstep=spec.is_lockstep,
        shared=context.cache.setdefault("shared", {}),
        parts=spec.parts,
    )


@job
def locate_operator(context: Context, payload: bytes) -> bytes:
    """Name the first operator a style computes differently: `LocateRequest -> LocateReport`.

    Runs all ranks in lockstep, whatever runner the cell had: the graphs are the same. First
    in float64, where an operator's rounding hides nothing, then in the case's dtype.
    """
    request = decode(payload, LocateRequest)
    style = styles.find(request.cell.style, loaded(context, request.cell.case))
    if "lockstep" not in style.runners:
        return encode(LocateReport())
    for dtype in dict.fromkeys(("float64", request.cell.case.dtype)):
        case = msgspec.structs.replace(request.cell.case, dtype=dtype)
        cell = msgspec.structs.replace(request.cell, case=case, is_lockstep=True)
        found = _located(context, style, cell, request.step)
        if found is not None:
            operator, source = found
            is_users = source is not None and is_user_file(source.rpartition(":")[0])
            return encode(LocateReport(operator, source if is_users else None))
    return encode(LocateReport())


def _located(
    context: Context, style: Style, spec: CellSpec, step: int
) -> tuple[str, str | None] | None:
    """Run the free build up to a step and ask what that step would compute differently."""
    case = loaded(context, spec.case)
    if isinstance(case, ExactCase):
        case, step = case.at(step, Store(spec.store_path).draw(step)), 0
    run = style.build(case, _style_context(context, spec))
    for index in range(step):
        case.seed_step(index)
        run.step(index, case.batch(index))
    case.seed_step(step)
    return run.locate(case.batch(step))


@job
def judge_cell(_context: Context, payload: bytes) -> bytes:
    """Judge a cell by what its processes found: `JudgeRequest -> record.Cell`."""
    stopwatch = Stopwatch()
    with stopwatch("judge"):
        request = decode(payload, JudgeRequest)
        reports = [decode(part, CellReport) for part in request.parts]
        statistics = [
            entry
            for report in reports
            for entry in msgspec.msgpack.decode(report.statistics, type=list[Statistics])
        ]
        judgement = judge(
            Store(request.cell.store_path),
            statistics,
            axes=request.cell.axes,
            is_anchored=all(report.facts.get("is_anchored") for report in reports),
            may_keep_state=request.cell.resume is None,
            adjust=None if request.cell.resume is None else strict_state,
        )
        cell = _cell(request, reports, judgement)
    cell.unknown["seconds"] = _longest([r.seconds for r in reports]) | stopwatch.seconds
    cell.unknown["cpu_seconds"] = _longest([r.cpu_seconds for r in reports]) | stopwatch.cpu_seconds
    return encode(cell)


def _longest(tables: list[dict[str, float]]) -> dict[str, float]:
    """Return the longest time of every part over the processes of a cell."""
    parts = dict.fromkeys(part for table in tables for part in table)
    return {part: max(table.get(part, 0.0) for table in tables) for part in parts}


def _cell(request: JudgeRequest, reports: list[CellReport], judgement: Judgement) -> Cell:
    """Put a judgement into the record's form."""
    spec = request.cell
    notes = list(dict.fromkeys([*judgement.notes, *(n for r in reports for n in r.notes)]))
    return Cell(
        case=spec.case.address,
        style=spec.style,
        mesh=spec.mesh,
        dtype=spec.case.dtype,
        world_size=spec.num_ranks,
        runner="lockstep" if spec.is_lockstep else "processes",
        verdict=str(judgement.verdict),
        message="; ".join(notes),
        cause=judgement.cause,
        first_divergence=judgement.first_divergence,
        worst=judgement.worst,
        counts={str(verdict): count for verdict, count in judgement.counts.items()},
        exercised=judgement.exercised,
        fallbacks=reports[0].fallbacks,
        collectives=reports[0].collectives,
        undetermined_reason=judgement.undetermined_reason,
        duration_seconds=request.seconds,
        tensors=judgement.rows,
        unknown={
            "captures": reports[0].captures,
            "growth": judgement.growth,
            "undetermined_elements": judgement.undetermined_elements,
            **_watched(reports),
            **_flipped(reports),
            "facts": _merged_facts(reports),
        },
    )


def _watched(reports: list[CellReport]) -> dict[str, Any]:
    """Return what planting a fault saw, by process; nothing for a cell without one."""
    seen = [report.watched for report in reports if report.watched is not None]
    return {"watched": msgspec.to_builtins(seen)} if seen else {}


def _flipped(reports: list[CellReport]) -> dict[str, Any]:
    """Return the near ties that any process had decided otherwise; nothing for none."""
    seen = sorted({tie for report in reports for tie in report.flipped})
    return {"flipped": seen} if seen else {}


def _merged_facts(reports: list[CellReport]) -> dict[str, Any]:
    """Return the facts of all processes by name, one value per process."""
    names = dict.fromkeys(name for report in reports for name in report.facts)
    return {name: [report.facts.get(name) for report in reports] for name in names}


def loaded(context: Context, spec: CaseSpec) -> LoadedCase:
    """Return the case of a spec; the last one is kept, with what styles share for it."""
    known = context.cache.get("case")
    if known is not None and known[0] == spec:
        case: LoadedCase = known[1]
        return case
    has_captures = bool(context.cache.get("shared"))
    context.cache.clear()
    if has_captures:
        garbage.collect()
    case = load_case(
        spec.address,
        dtype=spec.dtype,
        seed=spec.seed,
        steps=spec.steps,
        overrides=spec.overrides,
    )
    context.cache["case"] = (spec, case)
    if isinstance(context.ahead, Ahead) and context.ahead.spec == spec:
        context.cache["shared"] = dict(context.ahead.shared)
    return case
