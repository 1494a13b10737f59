"""Tensor-parallel plans: the file's `tp_plan()` or the derived one, applied and in words."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle

from spmd_verify.cases.case import LoadedCase
from spmd_verify.dtensor_layouts import local_of
from spmd_verify.errors import CaseError
from spmd_verify.styles.tp_derive import (
    COLUMN,
    COLUMN_GATHERED,
    ROW,
    SEQUENCE,
    Entry,
)
from spmd_verify.user_code import UserCode

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")
_SHOWN: Final = 12  # entries of a plan in a note


class TransposedLinear(ParallelStyle):
    """Split a layer that computes `x @ weight + bias`, which torch's own styles refuse.

    `_apply` is what every style of torch 2.13 is made of (`ParallelStyle` names no other hook).
    """

    def __init__(self, is_column: bool, is_local: bool) -> None:
        """Say how.

        Args:
            is_column: Along the output; else along the input, and outputs are summed.
            is_local: The output of columns, or the input of rows, is this rank's part.
        """
        super().__init__()
        self.is_column, self.is_local = is_column, is_local

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        """Split in place."""
        return distribute_module(
            module, device_mesh, self._split, self._prepare_input, self._prepare_output
        )

    def _split(self, _name: str, module: nn.Module, mesh: Any) -> None:
        """Replace the parameters of a module."""
        for name, value in list(module.named_parameters(recurse=False)):
            if self.is_column:
                placement: Any = Shard(value.ndim - 1)
            else:
                placement = Shard(0) if value.ndim > 1 else Replicate()
            module.register_parameter(name, distributed(value, mesh, placement))

    def _prepare_input(self, _module: nn.Module, inputs: tuple[Any, ...], mesh: Any) -> Any:
        """Return the input as a DTensor."""
        is_part = self.is_local and not self.is_column
        placement: Any = Shard(inputs[0].ndim - 1) if is_part else Replicate()
        x = DTensor.from_local(inputs[0], mesh, [placement], run_check=False)
        return x if self.is_column else x.redistribute(placements=[Shard(inputs[0].ndim - 1)])

    def _prepare_output(self, _module: nn.Module, output: Any, _mesh: Any) -> Any:
        """Return this rank's part of the output, or all of it."""
        if not (self.is_column and self.is_local):
            output = output.redistribute(placements=[Replicate()])
        return local_of(output)


class FreshOutput(ParallelStyle):
    """Copy what a module returns: autograd refuses in-place operators on `to_local`'s results."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        """Add the copy."""
        del device_mesh
        module.register_forward_hook(lambda _module, _args, output: output.clone())
        return module


@dataclass(frozen=True)
class Plan:
    """Styles by module path; built anew for every model, because torch's styles keep state.

    Attributes:
        styles: Gives `[(path, style), ...]` in the order of application.
        text: In words, for the report.
    """

    styles: Callable[[nn.Module, Any], list[tuple[str, ParallelStyle]]]
    text: str

    def apply(self, model: nn.Module, mesh: Any) -> None:
        """Split a model in place; what was tied stays so where both get the same placements."""
        tied: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for name, value in module.named_parameters(recurse=False):
                tied.setdefault(id(value), []).append((module, name))
        for path, style in self.styles(model, mesh):
            parallelize_module(model.get_submodule(path), mesh, style)
        for places in tied.values():
            values = [module.get_parameter(name) for module, name in places]
            layouts = {getattr(value, "placements", None) for value in values}
            if len(layouts) == 1:
                for module, name in places[1:]:
                    module.register_parameter(name, values[0])


def distributed(value: Tensor, mesh: Any, placement: Any) -> nn.Parameter:
    """Return a parameter split or copied over a mesh of one axis."""
    made = distribute_tensor(value.detach(), mesh, [placement])
    return nn.Parameter(made, requires_grad=value.requires_grad)


def derived_plan(entries: Mapping[str, Entry]) -> Plan:
    """Return the plan of derived entries."""

    def styles(_model: nn.Module, _mesh: Any) -> list[tuple[str, ParallelStyle]]:
        return [
            (path, style)
            for path, entry in entries.items()
            for style in (*_styles(entry), FreshOutput())
        ]

    return Plan(styles, described({path: entry.how for path, entry in entries.items()}))


def _styles(entry: Entry) -> list[ParallelStyle]:
    """Return torch's styles for an entry, in the order in which they are applied."""
    whole = Replicate()
    if entry.how == SEQUENCE:
        part = Shard(entry.dim)
        return [
            PrepareModuleInput(input_layouts=whole, desired_input_layouts=part),
            SequenceParallel(sequence_dim=entry.dim),
            PrepareModuleOutput(output_layouts=part, desired_output_layouts=whole),
        ]
    if entry.is_transposed:
        is_local = entry.how in (COLUMN, ROW)
        return [TransposedLinear(entry.how in (COLUMN, COLUMN_GATHERED), is_local)]
    if entry.how in (COLUMN, COLUMN_GATHERED):
        return [ColwiseParallel(output_layouts=None if entry.how == COLUMN else whole)]
    return [RowwiseParallel(input_layouts=None if entry.how == ROW else whole)]


def described(entries: Mapping[str, str]) -> str:
    """Return entries in words, those of repeated blocks once: `blocks.*.up column, head row`.

    Modules that differ by a number and are not split alike keep their own paths.
    """
    globs = {path: _NUMBER.sub("*", path, count=1) for path in entries}
    said: dict[str, set[str]] = {}
    for path, text in entries.items():
        said.setdefault(globs[path], set()).add(text)
    words = dict.fromkeys(
        f"{globs[path] if len(said[globs[path]]) == 1 else path} {text}"
        for path, text in entries.items()
    )
    return ", ".join(list(words)[:_SHOWN]) + (", ..." if len(words) > _SHOWN else "")


def user_plan(case: LoadedCase) -> Plan:
    """Return the plan of the file's `tp_plan`, which may take `model` and `mesh`."""

    def styles(model: nn.Module, mesh: Any) -> list[tuple[str, ParallelStyle]]:
        hook = case.hooks.tp_plan
        assert hook is not None, "the caller asks for it"
        with UserCode("tp_plan()", path=case.path, slug="hook-raised"):
            offered = {"model": model, "mesh": mesh}
            known = [name for name in inspect.signature(hook).parameters if name in offered]
            made = hook(**{name: offered[name] for name in known})
        return _checked(case, model, made)

    return Plan(styles, "as tp_plan() says")


def _checked(case: LoadedCase, model: nn.Module, made: Any) -> list[tuple[str, ParallelStyle]]:
    """Return what a hook gave, by path.

    Raises:
        CaseError: `tp-plan`: no mapping, no style, a glob that names no module.
    """
    if not isinstance(made, Mapping):
        raise _misfit(case, f"Got {type(made).__name__}")
    paths = [path for path, _ in model.named_modules()]
    found: list[tuple[str, ParallelStyle]] = []
    for pattern, value in made.items():
        several = list(value) if isinstance(value, Sequence) else [value]
        if not all(isinstance(style, ParallelStyle) for style in several):
            raise _misfit(case, f"Got {value!r} for {pattern!r}")
        named = [path for path in paths if fnmatchcase(path, pattern)]
        if not named:
            raise _misfit(case, f"{pattern!r} names no module; there are {', '.join(paths[1:9])}")
        found += [(path, style) for path in named for style in several]
    return found


def _misfit(case: LoadedCase, got: str) -> CaseError:
    """Return the error of a plan that is none."""
    return CaseError(
        f"tp_plan() gives no plan: {case.path}. {got}. Return {{path glob: ParallelStyle}}, for "
        f"example {{'blocks.*.up': ColwiseParallel(), 'blocks.*.down': RowwiseParallel()}}; a "
        f"module may have a list of styles",
        slug="tp-plan",
    )
