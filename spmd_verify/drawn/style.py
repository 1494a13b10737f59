"""One drawn model compiled under one of the engine's styles, all ranks in this process.

With `styles/graph.py` the place where the checker drives the engine itself: the fuzzer's
candidate is the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from spmd import lockstep
from spmd.errors import InternalError, LayoutError, SpmdError
from spmd.ops import check_value
from spmd.parallel_mode import (
    DataParallel,
    DTensorExpandMode,
    HybridShard,
    SequenceParallel,
    TensorParallel,
)
from spmd.passes import default_passes
from spmd_verify.cases.case import LoadedCase
from spmd_verify.reference.trajectory import hyper_parameters

STYLES: Final = ("replicate", "fully_shard", "default", "dtensor_expand")
# Names of the mesh axes under each of the other modes, so that a mesh means the same on the
# command line; the last ones where a mesh has fewer.
MODES: Final = {
    "spmd_hybrid": ("replicate", "shard"),
    "spmd_tp": ("dp", "tp"),
    "spmd_sp": ("dp", "sp"),
    "spmd_dp_tp": ("dp", "tp"),
}
STEPS: Final = 2
# Likewise under `STYLES`: the batch is split over the first.
AXES: Final = ("dp", "tp")

Key = tuple[str, str]
Values = dict[Key, Tensor]
Passes = Callable[[Any], Any]

_KINDS: Final = {
    "parameters": "parameter",
    "buffers": "buffer",
    "gradients": "gradient",
    "optimizer_state": "state",
}


@dataclass(frozen=True)
class Placing:
    """Where a drawn model runs.

    Attributes:
        sizes: Ranks along each mesh axis.
        parameters: For the expand mode: dim to shard per parameter number and axis, -1 to
            replicate; taken modulo the parameter's dims.
        inputs: Likewise for the arguments; None splits the batch dims over the first axis.
        named: Whether batch dims are given by name, or left to the mode.
    """

    sizes: tuple[int, ...] = (2,)
    parameters: tuple[int, ...] = ()
    inputs: tuple[int, ...] | None = None
    named: bool = True

    def forms(self, style: str) -> bool:
        """Say whether a style has such a mesh: some need two axes, some are drawn on one."""
        needs = {"spmd_hybrid": 2, "spmd_dp_tp": 2, "spmd_tp": 1}.get(style, 0)
        return needs in (0, len(self.sizes))

    def mesh(self, style: str) -> dict[str, int]:
        """Return `{axis: ranks}` under a style."""
        names = MODES[style][-len(self.sizes) :] if style in MODES else AXES
        return dict(zip(names, self.sizes, strict=False))

    def text(self, style: str) -> str:
        """Return the mesh as `--mesh` takes it."""
        return ",".join(f"{axis}={size}" for axis, size in self.mesh(style).items())


@dataclass(frozen=True)
class Subject:
    """What is judged: a case and how its steps are run.

    Attributes:
        case: The case.
        warm: Eager steps before the first compiled one.
        is_scheduled: Whether a step leaves other numbers in Python than it found.
    """

    case: LoadedCase
    warm: int = 0
    is_scheduled: bool = False

    def captures(self) -> lockstep.CaptureCache | None:
        """Return where the styles share what is captured, None where they must not.

        Half of the time goes into captures. A warm model has its state and gradients from
        the first call on, so one capture is right for every call. A capture that is taken over
        does not run the step's Python, which a schedule needs.
        """
        if self.is_scheduled:
            return None
        return _Once() if self.warm else lockstep.CaptureCache()

    def build(self) -> tuple[nn.Module, Any]:
        """Return a fresh model after its eager steps, and its optimizer."""
        case = self.case
        model = case.build_model()
        optimizer = case.optimizer(model)
        for index in range(self.warm):
            case.seed_step(STEPS + index)
            case.step(model, optimizer, case.batch(STEPS + index))
        return model, optimizer


class _AnyCall(dict[Any, Any]):
    """Programs for every call number, but those specialised on a number of their call."""

    def __contains__(self, key: object) -> bool:
        return self.get(key) is not None

    def __getitem__(self, key: Any) -> Any:
        return self.get(key)

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, super().get(key[1:], default))

    def __setitem__(self, key: Any, program: Any) -> None:
        is_special = any(n.target is check_value for n in program.graph.graph.nodes)
        super().__setitem__(key if is_special else key[1:], program)


class _Once(lockstep.CaptureCache):
    """One capture for all calls: right for steps that find at each call what they leave."""

    def __init__(self) -> None:
        super().__init__()
        self.programs = _AnyCall()


class StyleRun:
    """A compiled copy of a drawn model.

    Attributes:
        step: The compiled step.
        mesh_shape: Ranks along each axis as the style sees them.
        coordinates: One per rank, in the order of its parts.
    """

    def __init__(
        self, subject: Subject, style: str, placing: Placing, passes: Passes | None, captures: Any
    ) -> None:
        """Compile the step; nothing is captured yet.

        Args:
            subject: What is run.
            style: One of `STYLES` or `MODES`.
            placing: The mesh and the expand mode's placements.
            passes: An extra last pass; how a fault is planted.
            captures: Shared with the other styles.
        """
        self.subject = subject
        mode = _mode(style, subject.case, placing, passes)
        compiled = lockstep.compile(parallel_mode=mode, mesh=placing.mesh(style), captures=captures)
        self.step = compiled(subject.case.step)
        self.mesh_shape = self.step.mesh.sizes
        self.coordinates = self.step.mesh.coordinates()
        self.model, self.optimizer = subject.build()

    def __iter__(self) -> Iterator[tuple[Values, dict[Key, Any]]]:
        """Yield, after each step, what the module holds and the parts of every rank."""
        case = self.subject.case
        for index in range(STEPS):
            case.seed_step(index)
            self.step(self.model, self.optimizer, case.batch(index))
            values = copied(self.model, self.optimizer, {})
            parts = {
                ("result", pytree.keystr(path)): leaf
                for path, leaf in pytree.tree_leaves_with_path(self.step.results)
            }
            values |= {key: torch.as_tensor(0.0) for key in parts if key not in values}
            for kind, named in self.step.state().items():
                parts |= {(_KINDS[kind], name): placed for name, placed in named.items()}
            yield values, parts

    def locate(self, index: int) -> tuple[str, str | None] | None:
        """Return the first operator of a fresh run's step `index` that differs, and its line."""
        case = self.subject.case
        for before in range(index):
            case.seed_step(before)
            self.step(self.model, self.optimizer, case.batch(before))
        case.seed_step(index)
        found = self.step.localize(self.model, self.optimizer, case.batch(index))
        return None if found is None else (found.operator, found.line)


def refusal(error: Exception) -> str | None:
    """Return the slug of the engine's refusal that an error is; None for a fault."""
    if isinstance(error, SpmdError) and not isinstance(error, InternalError | LayoutError):
        return error.slug
    return None


def copied(model: nn.Module, optimizer: Any, result: Any) -> Values:
    """Return copies of all that a step leaves behind, in the order of no particular kind."""
    values: Values = {("generator", ""): torch.get_rng_state()}
    for path, leaf in pytree.tree_leaves_with_path(result):
        values["result", pytree.keystr(path)] = torch.as_tensor(leaf).detach().clone()
    for name, number in hyper_parameters(optimizer).items():
        values["hyper", name] = torch.tensor(number, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        values["parameter", name] = parameter.detach().clone()
        if parameter.grad is not None:
            values["gradient", name] = parameter.grad.clone()
        for entry, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                values["state", f"{name}.{entry}"] = torch.as_tensor(value).detach().clone()
    for name, buffer in model.named_buffers():
        values["buffer", name] = buffer.clone()
    return values


_MODES: Final[dict[str, Any]] = {
    "spmd_hybrid": HybridShard,
    "spmd_tp": TensorParallel,
    "spmd_sp": SequenceParallel,
    "spmd_dp_tp": TensorParallel,
}


def _mode(style: str, case: LoadedCase, placing: Placing, passes: Passes | None) -> Any:
    custom = None if passes is None else (*default_passes(), passes)
    dims = {f"batch.{i}": dim for i, dim in enumerate(case.batch_dims)}
    named: Any = dims if placing.named else 0
    common: dict[str, Any] = {"mesh": placing.mesh(style), "custom_passes": custom}
    if style in _MODES:
        return _MODES[style](input_batch_dim=named, **common)
    if style != "dtensor_expand":
        return DataParallel(style, input_batch_dim=named, **common)
    axes = len(placing.sizes)
    shapes = {name: p.shape for name, p in case.build_model().named_parameters()}
    sizes = {f"batch.{i}": leaf.shape for i, leaf in enumerate(case.batch(0))}
    inputs = None
    if placing.inputs is not None:
        inputs = _placements(sizes, placing.inputs, axes)
    elif placing.named:
        whole: list[Any] = [Replicate()] * axes
        inputs = {n: whole if d is None else [Shard(d), *whole[1:]] for n, d in dims.items()}
    return DTensorExpandMode(
        **common,
        input_placements=inputs,
        parameter_placements=_placements(shapes, placing.parameters, axes),
    )


def _placements(
    shapes: Mapping[str, Any], dims: tuple[int, ...], axes: int
) -> dict[str, list[Any]]:
    """Return placements of named tensors from a list of dims, taken round and round."""
    found: dict[str, list[Any]] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        chosen: list[Any] = []
        for axis in range(axes):
            dim = dims[(number * axes + axis) % len(dims)] if dims else -1
            dim = dim % len(shape) if dim >= 0 and len(shape) else -1
            is_free = dim >= 0 and not any(getattr(p, "dim", None) == dim for p in chosen)
            chosen.append(Shard(dim) if is_free else Replicate())
        found[name] = chosen
    return found
