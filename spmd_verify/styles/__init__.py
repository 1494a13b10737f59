"""The styles that can be run, by name. Torch-free until one is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Final

from spmd_verify.errors import Unsupported
from spmd_verify.style_ids import ENTRY_POINTS

if TYPE_CHECKING:
    from spmd_verify.cases.case import LoadedCase
    from spmd_verify.styles.base import Style

_HOMES: Final[dict[str, str]] = {
    "replicate": "spmd_verify.styles.graph:REPLICATE",
    "fully_shard": "spmd_verify.styles.graph:FULLY_SHARD",
    "default": "spmd_verify.styles.graph:DEFAULT",
    "dtensor_expand": "spmd_verify.styles.graph:DTENSOR_EXPAND",
    "spmd_hybrid": "spmd_verify.styles.graph:HYBRID",
    "spmd_tp": "spmd_verify.styles.graph:TENSOR",
    "spmd_sp": "spmd_verify.styles.graph:SEQUENCE",
    "spmd_dp_tp": "spmd_verify.styles.graph:DATA_TENSOR",
    "ddp": "spmd_verify.styles.torch_ddp:STYLE",
    "fsdp2": "spmd_verify.styles.torch_fsdp:STYLE",
    "hsdp": "spmd_verify.styles.torch_fsdp:HYBRID",
    "pp": "spmd_verify.styles.torch_pp:STYLE",
    "zero1": "spmd_verify.styles.torch_zero:STYLE",
    "ddp+pp": "spmd_verify.styles.torch_pp:WITH_DDP",
    "cp": "spmd_verify.styles.torch_cp:STYLE",
    "ep": "spmd_verify.styles.torch_ep:STYLE",
    "tp": "spmd_verify.styles.torch_tp:STYLE",
    "sp": "spmd_verify.styles.torch_tp:SEQUENCE",
    "fsdp2+tp": "spmd_verify.styles.torch_tp:SHARDED",
    "hsdp+tp": "spmd_verify.styles.torch_tp:HYBRID",
}


# The engine uses a mesh of several axes as one under these (`spmd.DataParallel`, `HybridShard`).
_ONE_AXIS: Final = frozenset({"replicate", "fully_shard", "default", "spmd_hybrid"})


def axes_of(name: str, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the axes a style sees: `axes`, or one of the same size where it knows only one."""
    if name in _ONE_AXIS and len(axes) > 1:
        return {"_".join(axes): math.prod(axes.values())}
    return dict(axes)


def find(name: str, case: LoadedCase | None = None) -> Style:
    """Return a style: of the case file, built-in, of an entry point, or by its place
    `package.module:STYLE`.

    Raises:
        Unsupported: `unknown-style`, where there is no such style.
    """
    if case is not None and name in case.user_styles:
        from spmd_verify.styles.user import user_style

        return user_style(name, case)
    home = _HOMES.get(name)
    if home is None and ":" in name:
        home = name
    if home is None:
        found = [entry for entry in entry_points(group=ENTRY_POINTS) if entry.name == name]
        if not found:
            raise Unsupported(
                f"Unknown style: {name!r}. Expected one of {', '.join(_HOMES)}, or a name that "
                f"an installed package has in the group {ENTRY_POINTS}",
                slug="unknown-style",
            )
        home = found[0].value
    module, _, attribute = home.partition(":")
    style: Style = getattr(import_module(module), attribute)
    return style
