"""The file of a drawn model that a style computes wrongly: a case file that says what it shows.

The checker itself judges it here, in this process; where its verdict does not show the
difference - placements that no style has, eager steps before the first - the file brings the
comparison of the fuzzer along as its main program.
"""

from __future__ import annotations

import linecache
import tempfile
import textwrap
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from spmd_verify.cases.case import load_case
from spmd_verify.drawn.check import Differs, Finding, Rules, Tally, Undrawable, check
from spmd_verify.drawn.model import DrawnModel, digest, loaded
from spmd_verify.drawn.style import MODES, STEPS, STYLES, Placing, StyleRun, Subject
from spmd_verify.record import Cell
from spmd_verify.runner.jobs import judge_cell, run_cell, write_reference
from spmd_verify.runner.specs import CaseSpec, CellSpec, JudgeRequest, ReferenceSpec, decode, encode
from spmd_verify.runner.worker import Context, WorkerSettings
from spmd_verify.styles import axes_of
from spmd_verify.user_code import one_line
from spmd_verify.version import __version__
from spmd_verify.whole_file import write_whole

# Meshes of one axis on which a failing model is judged again.
SURVEYED_RANKS: Final = (1, 2, 3, 4, 8)
# Characters of a value that are printed.
_WIDTH: Final = 200
# Lines of a traceback that are printed.
_FRAMES: Final = 8


@dataclass(frozen=True)
class Survey:
    """Where else a failing model fails.

    Attributes:
        failing_styles: On the mesh it was found on.
        right_styles: Likewise.
        failing_meshes: Under the style it was found under.
        right_meshes: Likewise.
        operator: The first operator that differs, with its source line; None if not found.
    """

    failing_styles: tuple[str, ...]
    right_styles: tuple[str, ...]
    failing_meshes: tuple[str, ...]
    right_meshes: tuple[str, ...]
    operator: str | None


def write_failing(
    folder: str, seed: int, drawn: DrawnModel, finding: Finding, rules: Rules, max_ranks: int = 8
) -> tuple[Path, str]:
    """Write the file of a failing model.

    Args:
        folder: Where to.
        seed: Of the fuzzer, for the name.
        drawn: The shrunk model.
        finding: What was found.
        rules: How it was judged.
        max_ranks: The largest mesh to judge it on again.

    Returns:
        The file, and the command that shows the difference.
    """
    source = drawn.to_source()
    name = f"fuzz-{seed}-{digest(source + finding.style + repr(finding.placing))}.py"
    survey = surveyed(drawn, finding, rules, max_ranks)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / name
        path.write_text(source)
        cell = checked(str(path), finding.style, finding.placing, rules.dtype)
    found = Path(folder) / name
    is_shown = isinstance(cell, str) if finding.kind == "crash" else _is_mismatch(cell)
    main = "" if is_shown else _main(drawn, finding, rules)
    command = f"python {name}" if main else _command(name, finding, rules)
    text = _docstring(seed, finding, survey, cell, command) + "\n" + source + main
    write_whole(str(found), text.encode("ascii", "backslashreplace"))
    return found, command


def _is_mismatch(cell: Cell | str) -> bool:
    return isinstance(cell, Cell) and cell.verdict == "mismatch"


def _command(name: str, finding: Finding, rules: Rules) -> str:
    return (
        f"spmd-verify run {name} --runner lockstep --dtype {rules.dtype} "
        f"--styles {finding.style} --mesh {finding.placing.text(finding.style)}"
    )


def _docstring(seed: int, finding: Finding, survey: Survey, cell: Cell | str, command: str) -> str:
    """Return the docstring of the file: what differs, where, and how to see it."""
    import torch

    is_crash = finding.kind == "crash"
    values = [line[:_WIDTH] for line in finding.detail.splitlines() if line.strip(" ^~")]
    shown = values[-_FRAMES - 1 : -1] if is_crash else values
    fault = "raises an exception" if is_crash else "differs from one device"
    lines = [
        f"{finding.style} on {finding.placing.text(finding.style)} {fault}.",
        "",
        f"Drawn by spmd-verify {__version__} fuzz --seed {seed} on torch {torch.__version__}, "
        "and shrunk.",
        "",
        f"styles:   {_listed(survey.failing_styles, survey.right_styles)}",
        f"meshes:   {_listed(survey.failing_meshes, survey.right_meshes)}",
        f"first:    {finding.what[:_WIDTH]}",
        *(f"          {line}" for line in shown),
        f"operator: {survey.operator or 'none differs by itself'}",
        f"checker:  {_verdict(cell)}",
        "",
        f"    {command}",
        "",
    ]
    text = "\n".join(line.rstrip() for line in lines)
    return '"""' + text.replace("\\", "\\\\").replace('"""', "'''") + '"""\n'


def _listed(failing: Iterable[str], right: Iterable[str]) -> str:
    agreeing = ", ".join(right)
    return (", ".join(failing) or "none again") + (f" (right: {agreeing})" if agreeing else "")


def _verdict(cell: Cell | str) -> str:
    if isinstance(cell, str):
        return cell[:_WIDTH]
    first = cell.first_divergence
    at = f", first at step {first.step}, {first.stage} {first.tensor}" if first else ""
    return f"{cell.verdict}{at}"


def _main(drawn: DrawnModel, finding: Finding, rules: Rules) -> str:
    """Return the main program that repeats the fuzzer's own comparison."""
    training = drawn.training
    options = f"warm={training.warm}, is_scheduled={training.is_scheduled}, dtype={rules.dtype!r}"
    return textwrap.dedent(f"""

        if __name__ == "__main__":
            from spmd_verify.drawn.file import replay
            from spmd_verify.drawn.style import Placing

            placing = {finding.placing!r}
            raise SystemExit(replay(__file__, {finding.style!r}, placing, {options}))
        """)


def replay(
    path: str,
    style: str,
    placing: Placing,
    *,
    warm: int = 0,
    is_scheduled: bool = False,
    dtype: str = "float64",
) -> str | None:
    """Compare a written model under one style with one device, as the fuzzer does.

    Args:
        path: The file.
        style: One of `STYLES` or `MODES`.
        placing: The mesh and the expand mode's placements.
        warm: Eager steps before the first compiled one.
        is_scheduled: Whether a step leaves other numbers in Python than it found.
        dtype: The dtype it is judged in.

    Returns:
        What differs; None where nothing does.
    """
    case = load_case(path, dtype=dtype, steps=STEPS + warm)
    try:
        check(Subject(case, warm, is_scheduled), placing, Tally(), Rules((style,), dtype))
    except Differs as difference:
        return str(difference)
    return None


def surveyed(drawn: DrawnModel, finding: Finding, rules: Rules, max_ranks: int = 8) -> Survey:
    """Judge a failing model under every style and on other meshes, and find the operator."""
    training, placing = drawn.training, finding.placing
    meshes = [replace(placing, sizes=(n,)) for n in SURVEYED_RANKS if n <= max_ranks]
    meshes = [*(m for m in meshes if m.sizes != placing.sizes), placing]
    with loaded(drawn, rules.dtype, STEPS + training.warm) as case:
        subject = Subject(case, training.warm, training.is_scheduled)
        every = filter(placing.forms, (*STYLES, *MODES))
        styles = {style: _fails(subject, placing, style, rules) for style in every}
        meshes = [mesh for mesh in meshes if mesh.forms(finding.style)]
        tried = {
            mesh.text(finding.style): _fails(subject, mesh, finding.style, rules) for mesh in meshes
        }
        operator = _operator(subject, finding, rules)
    return Survey(
        tuple(style for style, fails in styles.items() if fails),
        tuple(style for style, fails in styles.items() if not fails),
        tuple(mesh for mesh, fails in tried.items() if fails),
        tuple(mesh for mesh, fails in tried.items() if not fails),
        operator,
    )


def _fails(subject: Subject, placing: Placing, style: str, rules: Rules) -> bool:
    one = Rules((style,), rules.dtype, rules.passes, allows_refusals=True)
    try:
        check(subject, placing, Tally(), one)
    except Differs:
        return True
    except Undrawable:
        return False
    return False


def _operator(subject: Subject, finding: Finding, rules: Rules) -> str | None:
    """Return the first operator that differs with the source line it came from."""
    if finding.kind == "crash":
        return f"raised in spmd/{finding.place}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run = StyleRun(subject, finding.style, finding.placing, rules.passes, None)
            found = run.locate(finding.step)
    except Exception as error:  # noqa: BLE001 - a fault of the engine may break this too
        return f"not found: {one_line(error)}"
    if found is None:
        return None
    operator, line = found
    path, _, number = (line or "").rpartition(":")
    text = linecache.getline(path, int(number)).strip() if number.isdecimal() else ""
    return f"{operator}, from: {text}" if text else operator


def checked(path: str, style: str, placing: Placing, dtype: str) -> Cell | str:
    """Judge a written model by the checker in this process, all ranks in lock-step.

    Returns:
        The cell, or in one line why there is none.
    """
    case = CaseSpec(path, dtype, 0, 3, {})
    context = Context(WorkerSettings(0, 1, None, "cpu", "", "", "", 0.0), lambda _event: None)
    try:
        with tempfile.TemporaryDirectory() as work, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            store = str(Path(work) / "store")
            asked = placing.mesh(style)
            seen = axes_of(style, asked)
            text, parts = placing.text(style), {} if seen == asked else asked
            spec = CellSpec(case, style, text, seen, store, True, 0.0, parts=parts)
            write_reference(context, encode(ReferenceSpec(case, store)))
            part = run_cell(context, encode(spec))
            return decode(judge_cell(context, encode(JudgeRequest(spec, [part], 0.0))), Cell)
    except Exception as error:  # noqa: BLE001 - a fault of the engine, or a refusal of the checker
        return one_line(error)
