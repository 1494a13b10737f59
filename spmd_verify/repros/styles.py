"""The lines of a reproducing script that make a model parallel: torch's calls, written out."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from spmd_verify.cases.hooks import UserStyle
from spmd_verify.repros.case import CaseText, refusal
from spmd_verify.style_ids import ENGINE
from spmd_verify.styles.tp_derive import COLUMN, COLUMN_GATHERED, ROW, ROW_SCATTERED

_HEAD: Final = '''\
def parallel(case, model, mesh):
    """Return the parallel model and its optimizer."""
'''
_DDP: Final = "from torch.nn.parallel import DistributedDataParallel\n"
_FSDP: Final = "from torch.distributed.fsdp import fully_shard\n"
_TP: Final = (
    "from torch.distributed.tensor import Replicate\n"
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel\n"
    "from torch.distributed.tensor.parallel import parallelize_module\n"
)
_PARALLELIZE: Final = "from torch.distributed.tensor.parallel import parallelize_module\n"
_FROM_FILE: Final = (
    "for pattern, styles in plan.items():",
    "    for path, module in model.named_modules():",
    "        for each in styles if isinstance(styles, (list, tuple)) else [styles]:",
    "            if fnmatch.fnmatchcase(path, pattern):",
    '                parallelize_module(module, mesh["tp"], each)',
)
# The order does not matter: each takes one module.
_STYLES: Final = {
    COLUMN: "ColwiseParallel()",
    COLUMN_GATHERED: "ColwiseParallel(output_layouts=Replicate())",
    ROW: "RowwiseParallel()",
    ROW_SCATTERED: "RowwiseParallel(input_layouts=Replicate())",
}
_ZERO: Final = "from torch.distributed.optim import ZeroRedundancyOptimizer\n"
_SHARDED: Final = ("fsdp2", "hsdp")
_TENSOR: Final = ("tp", "fsdp2+tp", "hsdp+tp")


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
    is_engine = name in ENGINE
    raise refusal(
        f"the style {name}",
        "It runs a graph that spmd, the engine of this project, has made"
        if is_engine
        else "Its parts are made by this project: no few calls of torch say them",
        "Run spmd-verify itself, or give the file a style of its own (parallelize_NAME)",
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
    if case.case.hooks.tp_plan is not None:
        taken = inspect.signature(case.case.hooks.tp_plan).parameters
        given = {"model": "model=model", "mesh": 'mesh=mesh["tp"]'}
        words = ", ".join(text for key, text in given.items() if key in taken)
        lines, imports = [f"plan = case.tp_plan({words})", *_FROM_FILE], _PARALLELIZE
    else:
        lines, imports = _plan(name, _fact(name, facts, "plan")), _TP
    if name != "tp":
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


def _plan(name: str, plan: Mapping[str, tuple[str, int, bool]]) -> list[str]:
    """Return the calls of parallelize_module for a derived plan, by kind of style."""
    lines = ["plan = {"]
    for how, style in _STYLES.items():
        paths = [path for path, (kind, _, _) in plan.items() if kind == how]
        if paths:
            lines.append(f"    **{{path: {style} for path in {paths!r}}},")
    lines += [
        "}",
        "for path, style in plan.items():",
        '    module = parallelize_module(model.get_submodule(path), mesh["tp"], style)',
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
