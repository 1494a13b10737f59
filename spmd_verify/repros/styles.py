"""The lines of a reproducing script that make a model parallel: torch's calls, written out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spmd_verify.cases.hooks import UserStyle
from spmd_verify.repros.case import CaseText, refusal
from spmd_verify.style_ids import ENGINE
from spmd_verify.styles.tp_derive import COLUMN, COLUMN_GATHERED, ROW, ROW_SCATTERED, SEQUENCE

_HEAD: Final = '''\
def parallel(case, model, mesh):
    """Return the parallel model and its optimizer."""
'''
_DDP: Final = "from torch.nn.parallel import DistributedDataParallel\n"
_FSDP: Final = "from torch.distributed.fsdp import fully_shard\n"
_TP: Final = "from torch.distributed.tensor import Replicate, parallel as tp\n"
_SP: Final = "from torch.distributed.tensor import Replicate, Shard, parallel as tp\n"
_PARALLELIZE: Final = "from torch.distributed.tensor import parallel as tp\n"
_FROM_FILE: Final = (
    "for pattern, styles in plan.items():",
    "    for path, module in model.named_modules():",
    "        for each in styles if isinstance(styles, (list, tuple)) else [styles]:",
    "            if fnmatch.fnmatchcase(path, pattern):",
    "                tp.parallelize_module(module, mesh[AXIS], each)",
)
# The order does not matter: each takes one module.
_STYLES: Final = {
    COLUMN: "tp.ColwiseParallel()",
    COLUMN_GATHERED: "tp.ColwiseParallel(output_layouts=Replicate())",
    ROW: "tp.RowwiseParallel()",
    ROW_SCATTERED: "tp.RowwiseParallel(input_layouts=Replicate())",
}
_ZERO: Final = "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
_SHARDED: Final = ("fsdp2", "hsdp")
_TENSOR: Final = ("tp", "sp", "fsdp2+tp", "hsdp+tp")
# Why no few calls of torch say a style.
_OWN_CODE: Final = {
    "cp": "Attention on parts of the sequence is computed by code of this project",
    "ep": "Experts and their tokens are sent to ranks by code of this project",
    "pp": "The model is cut and called in stages by code of this project",
}


@dataclass(frozen=True)
class StyleText:
    """What a script says of one style.

    Attributes:
        imports: Lines.
        parallel: The function `parallel(case, model, mesh)`.
        train: Lines of `train` for ranks that differ from those of one device; empty for none.
        gather: The file's hook that puts plain tensors together; empty for none.
    """

    imports: str
    parallel: str
    train: str = ""
    gather: str = ""


def user_style(name: str, hooks: UserStyle, case: CaseText) -> StyleText:
    """Return the text of a style of the case file: its own hooks are called."""
    suffix = f"_{name}"
    opener = "parallelize" if name == "user" and hooks.setup is None else f"parallelize{suffix}"
    if hooks.setup is not None:
        body = f"return case.setup{suffix}(model, mesh)"
    else:
        body = (
            f"changed = case.{opener}(model, mesh)\n"
            f"    model = model if changed is None else changed\n"
            f"    return model, {case.optimizer()}"
        )
    train = ""
    if hooks.step is not None:
        train = (
            f"if mesh is not None:\n    return case.step{suffix}(model, optimizer, batch, mesh)\n"
        )
    gather = f"gather{suffix}" if hooks.gather is not None else ""
    return StyleText("", f"{_HEAD}    {body}\n", train, gather)


def torch_style(name: str, facts: Mapping[str, Any], case: CaseText) -> StyleText:
    """Return the text of a built-in style.

    Args:
        name: Its id.
        facts: What the cell's ranks said of themselves.
        case: The case.

    Raises:
        Unsupported: `no-repro`: a style that is this project's own code.
    """
    if name in ("ddp", "zero1"):
        if any(facts.get("narrowed_optimizer", ())):
            raise refusal(
                "zero1 with an optimizer that reads attributes of its own",
                "Its class, groups and defaults do not say them",
                "Use ddp, or give its options to Optimizer.__init__ as defaults",
            )
        return _ddp(name, _fact(name, facts, "find_unused_parameters"), case)
    if name in _SHARDED:
        lines = _sharded(_fact(name, facts, "blocks"), "mesh")
        return StyleText(_FSDP, _made([*lines, f"return model, {case.optimizer()}"]))
    if name in _TENSOR:
        return _tensor(name, facts, case)
    why = "Its parts are made by this project: no few calls of torch say them"
    if name in ENGINE:
        why = "It runs a graph that spmd, the engine of this project, has made"
    for part in name.split("+"):
        why = _OWN_CODE.get(part, why)
    raise refusal(
        f"the style {name}",
        why,
        f"Show it with spmd-verify itself, --styles {name}, or give the file a style of its own "
        f"(parallelize_NAME), which a script can call",
    )


def _fact(style: str, facts: Mapping[str, Any], name: str) -> Any:
    """Return what the first rank said.

    Raises:
        Unsupported: `no-repro`: a record of a version that did not keep it.
    """
    if not facts.get(name):
        raise refusal(
            f"the style {style} of this record",
            f"The record does not say {name!r}: an older version wrote it",
            "Run the check again with --report json=PATH",
        )
    return facts[name][0]


def _made(lines: list[str]) -> str:
    """Return the function of these lines."""
    return _HEAD + "".join(f"    {line}\n" for line in lines)


def _ddp(name: str, has_unused: bool, case: CaseText) -> StyleText:
    """Return DistributedDataParallel, with a sharded optimizer for `zero1`."""
    unused = ", find_unused_parameters=True" if has_unused else ""
    lines = [f"optimizer = {case.optimizer()}"]
    if name == "zero1":
        if case.num_optimizers:
            raise refusal("zero1 with several optimizers", "The script writes one", "Use ddp")
        lines += [
            "known = inspect.signature(type(optimizer)).parameters",
            "options = {key: value for key, value in optimizer.defaults.items() if key in known}",
            'groups = [{**group, "params": list(group["params"])} '
            "for group in optimizer.param_groups]",
            "optimizer = ZeroRedundancyOptimizer(",
            "    groups, type(optimizer), mesh.get_group(0), **options)",
            "optimizer.state = optimizer.optim.state",
        ]
    group = "process_group=mesh.get_group(0)"
    lines.append(f"return DistributedDataParallel(model, {group}{unused}), optimizer")
    return StyleText(_DDP + (_ZERO if name == "zero1" else ""), _made(lines))


def _sharded(blocks: list[str], mesh: str) -> list[str]:
    """Return the calls of fully_shard, inner modules first."""
    loop = [
        f"for path in {list(reversed(blocks))!r}:",
        f"    fully_shard(model.get_submodule(path), mesh={mesh})",
    ]
    return [*(loop if blocks else []), f"fully_shard(model, mesh={mesh})"]


def _tensor(name: str, facts: Mapping[str, Any], case: CaseText) -> StyleText:
    """Return parallelize_module, with fully_shard over the data axes."""
    parameters = [value for _, value in case.built.named_parameters(remove_duplicate=False)]
    if len(parameters) > len({id(value) for value in parameters}):
        raise refusal(
            f"{name} with tied parameters",
            "Keeping them tied takes code of this project",
            "Give the file a style of its own (parallelize_NAME)",
        )
    axis = "sp" if name == "sp" else "tp"
    if case.case.hooks.tp_plan is not None:
        taken = inspect.signature(case.case.hooks.tp_plan).parameters
        given = {"model": "model=model", "mesh": f'mesh=mesh["{axis}"]'}
        words = ", ".join(text for key, text in given.items() if key in taken)
        own = [line.replace("AXIS", f'"{axis}"') for line in _FROM_FILE]
        lines, imports = [f"plan = case.tp_plan({words})", *own], _PARALLELIZE
    else:
        plan = _fact(name, facts, "plan")
        is_split = any(how == SEQUENCE for how, _, _ in plan.values())
        lines, imports = _plan(name, axis, plan), _SP if is_split else _TP
    if name not in ("tp", "sp"):
        data = 'mesh[tuple(axis for axis in AXES if axis != "tp")]'
        lines += _sharded(_fact(name, facts, "blocks"), data)
        imports += _FSDP
    lines += [
        f"optimizer = {case.optimizer()}",
        "for group in optimizer.param_groups:  # DTensors and plain tensors in one list raise",
        '    group.update({key: False for key in ("foreach", "fused") if key in group})',
        "return model, optimizer",
    ]
    if case.num_optimizers:
        raise refusal(f"{name} with several optimizers", "The script writes one", "Use one")
    return StyleText(imports, _made(lines))


def _plan(name: str, axis: str, plan: Mapping[str, tuple[str, int, bool]]) -> list[str]:
    """Return the calls of parallelize_module for a derived plan, by kind of style."""
    lines = ["plan = {"]
    for how, style in _STYLES.items():
        paths = [path for path, (kind, _, _) in plan.items() if kind == how]
        if paths:
            lines.append(f"    **{{path: [{style}] for path in {paths!r}}},")
    for part in sorted({dim for how, dim, _ in plan.values() if how == SEQUENCE}):
        paths = [path for path, (how, dim, _) in plan.items() if (how, dim) == (SEQUENCE, part)]
        lines += [
            "    **{path: [",
            f"        tp.PrepareModuleInput(input_layouts=Replicate(), "
            f"desired_input_layouts=Shard({part})),",
            f"        tp.SequenceParallel(sequence_dim={part}),",
            f"        tp.PrepareModuleOutput(output_layouts=Shard({part}), "
            f"desired_output_layouts=Replicate()),",
            f"    ] for path in {paths!r}}},",
        ]
    lines += [
        "}",
        "for path, styles in plan.items():",
        "    module = model.get_submodule(path)",
        "    for each in styles:",
        f'        tp.parallelize_module(module, mesh["{axis}"], each)',
        "    module.register_forward_hook(lambda module, args, output: output.clone())",
    ]
    transposed = [path for path, (_, _, is_transposed) in plan.items() if is_transposed]
    if transposed:
        raise refusal(
            f"{name}: {transposed[0]} computes x @ weight",
            "torch's tensor-parallel styles do not know such a layer",
            "Give the file a style of its own (parallelize_NAME)",
        )
    return lines
