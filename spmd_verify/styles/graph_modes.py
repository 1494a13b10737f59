"""Which mode of the engine, set up how, a style is: what it divides and over which axes.

Together with `graph.py`, which runs them, and the lockstep runner the place where the checker
uses `spmd`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.utils import _pytree as pytree

import spmd
from spmd_verify.cases.case import LoadedCase
from spmd_verify.errors import Unsupported
from spmd_verify.style_ids import DATA_AXES
from spmd_verify.styles.base import StyleContext

ModeFactory = Callable[[LoadedCase, StyleContext, Any], spmd.ParallelMode]


def _batch_dims(case: LoadedCase) -> dict[str, int | None]:
    """Return the batch dim of every tensor argument by the engine's name for it."""
    keyed, _ = pytree.tree_flatten_with_path(case.batch(0))
    names = [_engine_name(path) for path, leaf in keyed if isinstance(leaf, Tensor)]
    dims = [
        dim
        for (_, leaf), dim in zip(keyed, case.batch_dims, strict=True)
        if isinstance(leaf, Tensor)
    ]
    return dict(zip(names, dims, strict=True))


def _engine_name(path: tuple[Any, ...]) -> str:
    """Return the engine's name of a leaf of the argument `batch`: `batch.0`, `batch.x`."""
    parts = [getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))) for key in path]
    return ".".join(["batch", *map(str, parts)])


def data_parallel(kind: str) -> ModeFactory:
    """Return the factory of one data-parallel style."""

    def mode(case: LoadedCase, _context: StyleContext, mesh: Any) -> spmd.ParallelMode:
        return spmd.DataParallel(kind, input_batch_dim=_batch_dims(case), mesh=mesh)

    return mode


def dtensor_expand(case: LoadedCase, context: StyleContext, mesh: Any) -> spmd.ParallelMode:
    """Return the expand mode: the batch split over the data axes, parameters whole."""
    keyed, _ = pytree.tree_flatten_with_path(case.batch(0))
    axes = tuple(context.axes)
    declared = case.sharding(axes)
    placements: dict[str, Any] = {}
    for (path, leaf), argument in zip(keyed, case.leaf_paths, strict=True):
        if isinstance(leaf, Tensor):
            dims = [declared[argument][axis] for axis in axes]
            placements[_engine_name(path)] = [
                TorchReplicate() if dim is None else TorchShard(dim) for dim in dims
            ]
    return spmd.DTensorExpandMode(mesh=mesh, input_placements=placements)


def hybrid_shard(case: LoadedCase, context: StyleContext, _mesh: Any) -> spmd.ParallelMode:
    """Return parameters in parts over the second axis, the batch over both.

    Raises:
        Unsupported: `style-axes`, for a mesh of another number of axes.
    """
    if len(context.parts) != 2 or not set(context.parts) <= DATA_AXES:
        raise _misfit("spmd_hybrid", context, "two data axes", "replicate=2,shard=2")

    def joined() -> Any:
        if context.is_lockstep:
            return dict(context.parts)
        sizes, names = tuple(context.parts.values()), tuple(context.parts)
        return init_device_mesh(context.device.type, sizes, mesh_dim_names=names)

    mesh = context.kept("mesh of two axes", joined)
    return spmd.HybridShard(input_batch_dim=_batch_dims(case), mesh=mesh)


def tensor_parallel(case: LoadedCase, context: StyleContext, mesh: Any) -> spmd.ParallelMode:
    """Return weights split over `tp`, the batch over a data axis if the mesh has one."""
    _check_axes("spmd_tp", context, "tp")
    return spmd.TensorParallel(axis="tp", input_batch_dim=_batch_dims(case), mesh=mesh)


def data_and_tensor_parallel(
    case: LoadedCase, context: StyleContext, mesh: Any
) -> spmd.ParallelMode:
    """Return the batch split over a data axis, weights over `tp`."""
    _check_axes("spmd_dp_tp", context, "tp", with_data=True)
    return spmd.TensorParallel(axis="tp", input_batch_dim=_batch_dims(case), mesh=mesh)


def sequence_parallel(case: LoadedCase, context: StyleContext, mesh: Any) -> spmd.ParallelMode:
    """Return activations split over `sp` along the sequence, the batch over a data axis.

    `input_sharding` may name the dim of `sp`; else the mode finds it.
    """
    _check_axes("spmd_sp", context, "sp")
    keyed, _ = pytree.tree_flatten_with_path(case.batch(0))
    declared = case.sharding(("sp",), "spmd_sp")
    dims = {
        _engine_name(path): declared[argument]["sp"]
        for (path, leaf), argument in zip(keyed, case.leaf_paths, strict=True)
        if isinstance(leaf, Tensor)
    }
    said: Any = dims if any(dim is not None for dim in dims.values()) else None
    return spmd.SequenceParallel(said, input_batch_dim=_batch_dims(case), mesh=mesh)


def _check_axes(style: str, context: StyleContext, own: str, *, with_data: bool = False) -> None:
    """Refuse a mesh that is not the style's axis behind at most one data axis.

    Raises:
        Unsupported: `style-axes`.
    """
    data = [axis for axis in context.axes if axis in DATA_AXES]
    allowed = [[*data[:1], own]] if with_data or data else [[own]]
    if list(context.axes) in allowed and (data or not with_data):
        return
    expected = f"a data axis and {own}" if with_data else f"{own}, alone or behind a data axis"
    raise _misfit(style, context, expected, f"{'dp=2,' if with_data else ''}{own}=2")


def _misfit(style: str, context: StyleContext, expected: str, example: str) -> Unsupported:
    got = ",".join(f"{axis}={size}" for axis, size in (context.parts or context.axes).items())
    return Unsupported(
        f"The mesh does not fit {style}: got {got}, expected {expected}. A bare number of ranks "
        f"that has not enough factors forms no such mesh; give one as --mesh {example}",
        slug="style-axes",
    )


def notes_of(mode: Any) -> Iterable[str]:
    """Return what a mode derived from the step: the plan of a tensor-parallel one."""
    split = getattr(mode, "split", None)
    if not split:
        return []
    by_kind: dict[str, list[str]] = {}
    for name, kind in split.items():
        by_kind.setdefault(kind, []).append(name)
    listed = [f"{kind} {_some(names)}" for kind, names in by_kind.items()]
    return [f"plan: {'; '.join(listed)}"]


def _some(names: list[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
