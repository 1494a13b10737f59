"""`spmd-verify repro`: one cell of a record as a script of plain torch and gloo.

The script loads the case file, which is copied beside it with the modules it imports from its
own folder; nothing of this project is needed to run it. docs/repro.md.
"""

from __future__ import annotations

import ast
import math
import re
import shutil
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spmd_verify.cases.address import Address, parse
from spmd_verify.cases.case import LoadedCase, load_case
from spmd_verify.cases.modules import import_case_module
from spmd_verify.errors import SpmdVerifyError, UsageError, choices_text
from spmd_verify.prober import PROBE_RUN
from spmd_verify.record import Cell, Record, Row, decode
from spmd_verify.repros.case import PROJECTED, CaseText, refusal
from spmd_verify.repros.copies import copies_of
from spmd_verify.repros.hf_case import write_case
from spmd_verify.repros.script import again, judge, script
from spmd_verify.repros.styles import StyleText, torch_style, user_style
from spmd_verify.verdict import LIMITS, Verdict, real_name
from spmd_verify.whole_file import write_whole

# What is looked for where nothing differs, in this order.
_WATCHED: Final = ("gradients", "parameters", "loss")
_STATE: Final = ("initial_state", "parameters", "buffers")
_GATHERED: Final = frozenset({"gradients", "clipping", "parameters", "buffers", "optimizer_state"})
_SPLIT: Final = re.compile(r"S\((\d+)\)")
_WRITTEN_OUT: Final = ("accumulate", "clip")
_MOST_LINES: Final = 150  # a longer script gives up the second blank line between functions
_LONGEST_CAUSE: Final = 280  # characters: three lines
_CALL: Final = re.compile(r"#(\d+)$")


def write_repro(record_path: str, cell_id: str, output: str | None) -> str:
    """Write the script of one cell.

    Args:
        record_path: What `--report json=PATH` wrote.
        cell_id: `STYLE`, `CASE/STYLE`, with `@MESH` behind it where a style has several.
        output: Path of the script; None for `repro_CASE_STYLE.py` in the current folder.

    Returns:
        What was written and how to run it.

    Raises:
        UsageError: `no-such-cell`, `case-changed`, `not-a-record`, `no-such-file`.
        Unsupported: `no-repro`: what plain torch alone does not say.
    """
    found = decode(_bytes(record_path), record_path)
    cell = _cell(found, cell_id)
    address = parse(cell.case)
    _refuse(found, cell)
    row = _row(cell)
    name = address.source if address.kind == "hf" else Path(address.source).stem
    stem = re.sub(r"\W+", "_", f"{name}_{cell.style}").strip("_")
    target = Path(output or f"repro_{stem}.py")
    made: list[Path] = []
    try:
        if address.kind == "hf":
            made = write_case(_loaded(found, cell, cell.case), target)
            address = parse(str(made[0]))
        text = _script(found, cell, row, address)
    except SpmdVerifyError:
        for each in made:
            each.unlink()
        raise
    copies = list(copies_of(address, target)) if address.kind == "file" else []
    write_whole(str(target), text.encode())
    for source in copies:
        shutil.copyfile(source, target.parent / source.name)
    names = [each.name for each in [*copies, *made]]
    beside = f", and beside it {', '.join(names)}" if names else ""
    return f"{target}{beside}: {row.name} ({row.stage}, step {row.step})\nrun: python {target}"


def _bytes(path: str) -> bytes:
    """Read a record's file.

    Raises:
        UsageError: `no-such-file`.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise UsageError(
            f"Cannot read the record: {path!r}. Got {error.strerror}. Pass the file that --report "
            f"json=PATH wrote",
            slug="no-such-file",
        ) from error


def _cell(record: Record, asked: str) -> Cell:
    """Return the cell that was asked for.

    Raises:
        UsageError: `no-such-cell`.
    """
    name, _, mesh = asked.partition("@")
    found = [cell for cell in record.cells if name in (cell.style, cell.id)]
    found = [cell for cell in found if mesh in ("", cell.mesh)]
    if len(found) == 1:
        return found[0]
    names = [f"{cell.id}@{cell.mesh}" for cell in found or record.cells]
    got = "several cells" if found else "no cell"
    raise UsageError(
        f"The record has {got} of this name: {asked!r}; {choices_text(asked, names)}",
        slug="no-such-cell",
    )


def _refuse(record: Record, cell: Cell) -> None:
    """Refuse what a script cannot say.

    Raises:
        Unsupported: `no-repro`.
    """
    if cell.verdict in (Verdict.ERROR, Verdict.UNSUPPORTED):
        raise refusal(
            f"{cell.id} is {cell.verdict}", "No tensor was compared", "Run the check with -v"
        )
    given = _overrides(record)
    changed = {key: value for key, value in given.items() if key not in _WRITTEN_OUT}
    if changed:
        shown = ", ".join(f"{key}={value}" for key, value in changed.items())
        raise refusal(
            f"a run with {shown}",
            "Modes and variants but --accumulate and --clip are code of this project",
            "Run the check without them, or write them into the file's step()",
        )


def _is_watched(row: Row) -> bool:
    """Say whether a script looks at such a tensor."""
    is_step = row.stage not in ("inputs", "eval_outputs") and row.run != "resumed"
    return is_step and "@" not in row.name


def _overrides(record: Record) -> dict[str, str]:
    """Return what the run changed about its cases."""
    found = record.settings.get("overrides")
    given = found if isinstance(found, Mapping) else {}
    return {str(key): str(value) for key, value in given.items()}


def _row(cell: Cell) -> Row:
    """Return the row of the first divergence; where nothing differs, the one nearest to it.

    Raises:
        Unsupported: `no-repro`: there is none that a script can look at.
    """
    first = cell.first_divergence
    if first is not None:
        place = (first.step, first.stage, first.tensor)
    elif near := [row for row in cell.tensors if row.ratio is not None and _is_watched(row)]:
        worst = max(near, key=lambda row: row.ratio or 0.0)
        place = (worst.step, worst.stage, worst.name)
    else:
        watched = [(row.step, row.stage, row.name) for row in cell.tensors if row.stage in _WATCHED]
        place = min(watched, key=lambda each: _WATCHED.index(each[1]), default=(0, "", ""))
    rows = [row for row in cell.tensors if (row.step, row.stage, row.name) == place]
    rows.sort(key=lambda row: row.cause is None)
    if not rows:
        raise refusal(f"{cell.id}", "No tensor was compared", "Run the check with -v")
    row = rows[0]
    if not _is_watched(row):
        raise refusal(
            f"{row.name} ({row.stage}, run {row.run})",
            "Scripts look at module outputs, loss, gradients, optimizer state, parameters and "
            "buffers of training steps",
            "Look at it with spmd-verify -v",
        )
    return row


def _loaded(record: Record, cell: Cell, address: str) -> LoadedCase:
    """Load the case as the run did.

    Args:
        record: Of the run.
        cell: Of the record.
        address: The cell's, or the file in which it is written out.

    Raises:
        UsageError: `case-changed`.
    """
    settings = record.settings
    case = load_case(
        address,
        dtype=cell.dtype,
        seed=int(settings.get("seed", 0)),
        steps=int(settings.get("steps", 3)),
        overrides=_overrides(record),
    )
    is_same = record.case is None or record.case.source_hash == case.source_hash
    if address == cell.case and not is_same:
        raise UsageError(
            f"The case has changed since the record was written: {cell.case}. The script would "
            f"reproduce something else. Run the check again with --report json=PATH",
            slug="case-changed",
        )
    return case


def _script(record: Record, cell: Cell, row: Row, address: Address) -> str:
    """Return the text of the script."""
    case = _loaded(record, cell, address.text)
    module = import_case_module(address)
    is_probe = row.run == PROBE_RUN
    known = CaseText(case, module, address, row.step + 1, is_probe)
    axes = {name: int(size) for name, _, size in (e.partition("=") for e in cell.mesh.split(","))}
    if cell.style in case.user_styles:
        style = user_style(cell.style, case.hooks.styles[cell.style], known)
    else:
        style = torch_style(cell.style, cell.unknown.get("facts", {}), known)
    source = Path(module.__file__ or "").read_text()
    if re.search(r"^\s*(import|from) spmd_verify\b", source, re.MULTILINE):
        raise refusal(
            f"{address.source} imports spmd_verify", "The script must not", "Use hooks by name"
        )
    return _assembled(_Parts(cell, row, known, style, axes, address, source))


@dataclass(frozen=True)
class _Parts:
    """What a script is made of."""

    cell: Cell
    row: Row
    case: CaseText
    style: StyleText
    axes: dict[str, int]
    address: Address
    source: str

    @property
    def is_user_style(self) -> bool:
        """Say whether the file brings the style, which may replace modules."""
        return self.cell.style in self.case.case.user_styles

    def watch(self) -> tuple[str, str, str]:
        """Return the module watched, the lines that watch it, and the tensor's expression."""
        stage, name = self.row.stage, self.row.name
        if stage == "loss":
            return "", "", "loss"
        if stage == "module_outputs":
            call = _CALL.search(name)
            path, inside = self.case.module_path(_CALL.sub("", name))
            lines = (
                f"owner.register_forward_hook(lambda module, args, output: "
                f"seen.append(plain(output{inside})))\n"
            )
            return path, lines, f"seen[{int(call[1]) - 1 if call else 0}]"
        if stage == "optimizer_state":
            return self._state()
        path, last = self.case.owner(name)
        value = f"getattr(owner, {last!r})"
        if stage in _STATE:
            return path, "", value
        if name in ("total_norm", "clip_factor"):
            raise refusal(f"the {name} of clipping", "It is seen inside torch", "Use -v")
        is_clipped = any(row.stage == "clipping" for row in self.cell.tensors)
        if is_clipped and stage == "gradients":
            return path, _BEFORE_CLIPPING.format(value=value), f"(seen or [{value}.grad])[0]"
        hook = f"register_step_pre_hook(lambda *_: seen.append(plain({value}.grad)))\n"
        is_list = self.case.num_optimizers > 0
        lines = f"for each in optimizer:\n    each.{hook}" if is_list else f"optimizer.{hook}"
        return path, lines, f"(seen or [{value}.grad])[0]"

    def _state(self) -> tuple[str, str, str]:
        """Return the same for one tensor of optimizer state."""
        names = [name for name, _ in self.case.built.named_parameters()]
        fitting = [name for name in names if self.row.name.startswith(f"{name}.")]
        if not fitting or "[" in self.row.name:
            raise refusal(self.row.name, "It belongs to no parameter of the model", "Use -v")
        parameter = max(fitting, key=len)
        path, last = self.case.owner(parameter)
        key = self.row.name[len(parameter) + 1 :]
        state = f"optimizer.state[getattr(owner, {last!r})].get({key!r})"
        if self.case.num_optimizers:
            raise refusal(self.row.name, "The case has several optimizers", "Use -v")
        return path, "", state

    def layout(self) -> tuple[int | None, ...]:
        """Return the dim of the tensor that each axis divides, where a rank has a part of it.

        Outputs of modules have no layout in the record: those of parts of the batch are parts.

        Raises:
            Unsupported: `no-repro`: parts that are no slices.
        """
        text = self.row.layout
        if text == "?" or "ranks" in text:
            splits = [dims for dims in self.case.split(tuple(self.axes), self.cell.style) if dims]
            divided = (dims for dims in splits if any(dim is not None for dim in dims))
            return next(divided, (None,) * len(self.axes))
        dims: list[int | None] = []
        for each in text.split(","):
            split = _SPLIT.fullmatch(each)
            if split is None and each != "R":
                raise refusal(
                    f"{self.row.name} in the layout {text}",
                    "Ranks have parts of it that are no slices of equal size",
                    "Use -v",
                )
            dims.append(int(split[1]) if split else None)
        return tuple(dims)


_BEFORE_CLIPPING: Final = """\
clip = torch.nn.utils.clip_grad._clip_grads_with_norm_
def clip_seen(*args, **kwargs):
    seen.append(plain({value}.grad))
    return clip(*args, **kwargs)
torch.nn.utils.clip_grad._clip_grads_with_norm_ = clip_seen
"""


def _assembled(parts: _Parts) -> str:
    """Return the script of its parts.

    Raises:
        Unsupported: `no-repro`: it would not be short.
    """
    cell, row, case = parts.cell, parts.row, parts.case
    owner, watch, value = parts.watch()
    layout = parts.layout()
    train = parts.style.train + case.step()
    is_numpy = "numpy" in parts.source
    shape = "does not have" if cell.verdict in (Verdict.MISMATCH, Verdict.SEMANTIC) else "has"
    noise = row.noise if row.noise is not None and math.isfinite(row.noise) else 0.0
    if row.stage == "initial_state":
        before_steps = f"return plain({value})\n"
        watch += before_steps
    text = script(
        {
            "title": f"{cell.style} on {cell.mesh} {shape} what one device has: {row.name} "
            f"({row.stage}, step {row.step}).",
            "story": _story(parts),
            "needs": _needs(parts.address),
            "imports": _imports(parts),
            "numpy_seed": "    numpy.random.seed(number % 2**32)\n" if is_numpy else "",
            "axes": repr(parts.axes),
            "seed": str(case.case.seed),
            "step": str(row.step),
            "stage": repr(row.stage),
            "name": repr(row.name),
            "noise": repr(noise),
            "limit": repr(LIMITS.get((real_name(row.dtype), "tensor"), 0.0)),
            "split": repr(case.split(tuple(parts.axes), cell.style)),
            "layout": repr(layout),
            "module": repr(_module(parts.address)),
            "batches": case.batches(),
            "copied": case.copied(),
            "style": (PROJECTED if case.is_projected else "") + parts.style.parallel,
            "train": _in_dtype(train, case),
            "model": case.model(),
            "owner": repr(owner),
            "optimizer": case.optimizer(),
            "again": again(owner) if parts.is_user_style else "",
            "watch": watch,
            "value": value,
            "ranks": str(math.prod(parts.axes.values())),
            "judge": judge(
                row.stage,
                parts.style.gather if row.stage in _GATHERED else "",
                _module(parts.address),
            ),
        }
    )
    ast.parse(text)
    return text if text.count("\n") < _MOST_LINES else text.replace("\n\n\n", "\n\n")


def _in_dtype(train: str, case: CaseText) -> str:
    """Return the lines of a step in the case's dtype, which factories in the model follow."""
    return f"torch.set_default_dtype({case.dtype})\n{train}" if case.dtype else train


def _story(parts: _Parts) -> str:
    """Return what the record says of why, and what the script leaves out."""
    cause = parts.row.cause or parts.cell.cause
    lines = []
    if cause is not None:
        lines.append(f"Cause: {cause.kind}: {textwrap.shorten(cause.text, _LONGEST_CAUSE)}")
    if cause is not None and cause.remedy:
        lines.append(f"Remedy: {cause.remedy}")
    if parts.row.run == "anchored":
        lines.append(
            "The checker began this step from the state of one device; here rounding of earlier "
            "steps is in it too."
        )
    told = [wrapped for line in lines for wrapped in textwrap.wrap(line, 98)]
    safe = "\n".join(told).encode("ascii", "replace").decode()
    return safe.replace("\\", "/").replace('"', "'") or "The record has no cause: the cell passes."


def _needs(address: Address) -> str:
    """Return what the script loads."""
    return f"{Path(address.source).name} beside it" if address.kind == "file" else address.source


def _module(address: Address) -> str:
    """Return the name that the script imports: of a file beside it, its stem."""
    return address.source if address.kind == "module" else Path(address.source).stem


def _imports(parts: _Parts) -> str:
    """Return the import lines, sorted, only those that are needed."""
    plain = ["importlib", "os", "random", "sys", "tempfile"]
    told = parts.style.parallel + parts.case.step()
    plain += [each for each in ("contextlib", "fnmatch", "inspect") if f"{each}." in told]
    own = ["import torch", "import torch.distributed as dist", "import torch.multiprocessing as mp"]
    if "numpy" in parts.source:
        own.insert(0, "import numpy")
    taken = [
        "from torch.distributed.device_mesh import init_device_mesh",
        "from torch.utils import _pytree as pytree",
        *parts.style.imports.splitlines(),
    ]
    return "\n".join([f"import {', '.join(sorted(plain))}", "", *own, *sorted(taken)])
