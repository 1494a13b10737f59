"""Style ids, their groups, and which of them a selection names. Torch-free.

A pattern is an id, an alias, a group (`engine`, `torch`, `user`, `all`) or a glob.
"""

import fnmatch
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from spmd_verify.errors import CaseError, UsageError, choices_text


@dataclass(frozen=True)
class StyleId:
    """One line of `spmd-verify styles`.

    Attributes:
        name: What `--styles` and records call it.
        group: `engine`, `torch` or `plugin`.
        text: What it does, one line.
        axes: Mesh axes it uses, in mesh order; the first is the axis of a bare `--mesh 4`.
        needs: What of the model or the batch, besides the mesh; empty for nothing.
    """

    name: str
    group: str
    text: str
    axes: tuple[str, ...] = ("dp",)
    needs: str = ""


_EVEN: Final = "a batch that the data axes divide"
_LAYERS: Final = "Linear or Embedding layers"

STYLES: Final[tuple[StyleId, ...]] = (
    StyleId("replicate", "engine", "parameters whole on every rank, gradients all-reduced"),
    StyleId("fully_shard", "engine", "parameters and optimizer state sharded, gathered for use"),
    StyleId("default", "engine", "shards what splits evenly, replicates the rest"),
    StyleId("dtensor_expand", "engine", "placements chosen node by node from the inputs'"),
    StyleId("spmd_hybrid", "engine", "sharded inside, replicated outside", ("replicate", "shard")),
    StyleId("spmd_tp", "engine", "weights split by a tensor-parallel plan", ("tp",), _LAYERS),
    StyleId("spmd_sp", "engine", "activations split along the sequence", ("sp",), "no conv net"),
    StyleId("spmd_dp_tp", "engine", "data and tensor parallel together", ("dp", "tp"), _LAYERS),
    StyleId("ddp", "torch", "DistributedDataParallel", ("dp",), _EVEN),
    StyleId("fsdp2", "torch", "fully_shard on one axis", ("fsdp",), _EVEN),
    StyleId("hsdp", "torch", "fully_shard on two axes", ("replicate", "shard"), _EVEN),
    StyleId("tp", "torch", "parallelize_module, column and row wise", ("tp",), _LAYERS),
    StyleId(
        "sp", "torch", "tensor parallel with sequence-sharded norms", ("sp",), f"{_LAYERS}, norms"
    ),
    StyleId("cp", "torch", "attention with the sequence over the ranks", ("cp",), "attention"),
    StyleId("pp", "torch", "pipeline stages", ("pp",), "a chain of as many blocks as stages"),
    StyleId("ep", "torch", "experts over the ranks, tokens by all-to-all", ("ep",), "experts"),
    StyleId(
        "zero1", "torch", "DistributedDataParallel with ZeroRedundancyOptimizer", ("dp",), _EVEN
    ),
    StyleId(
        "fsdp2+tp",
        "torch",
        "fully_shard over what tp has split",
        ("dp", "tp"),
        f"{_LAYERS}, {_EVEN}",
    ),
    StyleId(
        "ddp+pp",
        "torch",
        "DistributedDataParallel of every stage",
        ("dp", "pp"),
        f"a chain of blocks, {_EVEN}",
    ),
    StyleId(
        "hsdp+tp",
        "torch",
        "fully_shard on two axes over what tp has split",
        ("replicate", "shard", "tp"),
        f"{_LAYERS}, {_EVEN}",
    ),
)

ALIASES: Final[dict[str, str]] = {
    "distributed_data_parallel": "ddp",
    "fully_sharded_data_parallel": "fsdp2",
    "hybrid_sharded_data_parallel": "hsdp",
    "tensor_parallel": "tp",
    "sequence_parallel": "sp",
    "context_parallel": "cp",
    "pipeline_parallel": "pp",
    "expert_parallel": "ep",
}

GROUPS: Final[tuple[str, ...]] = ("engine", "torch", "plugin", "user", "all")
ENTRY_POINTS: Final = "spmd_verify.styles"
"""Third parties add styles under this group of entry points, `name = package.module:STYLE`."""
ENGINE: Final[tuple[str, ...]] = tuple(style.name for style in STYLES if style.group == "engine")
TORCH: Final[tuple[str, ...]] = tuple(style.name for style in STYLES if style.group == "torch")
DATA_AXES: Final[frozenset[str]] = frozenset({"dp", "fsdp", "replicate", "shard"})
_AXIS_TOKENS: Final[tuple[str, ...]] = ("dp", "tp", "sp", "pp", "ep", "cp", "fsdp")
# What a token of a style's name says of it.
TRAITS: Final[dict[str, str]] = {
    "ddp": "data parallel",
    "fsdp2": "sharded data parallel",
    "hsdp": "hybrid sharded data parallel",
    "tp": "tensor parallel",
    "sp": "sequence parallel",
    "cp": "context parallel",
    "pp": "pipeline parallel",
    "ep": "expert parallel",
}
_BY_NAME: Final = {style.name: style for style in STYLES}


def bare_mesh(style: str, ranks: int) -> dict[str, int]:
    """Return the mesh that a bare number of ranks means for a style, `{axis: ranks}`.

    A style of several axes gets the most even factors of at least 2, the later axes the larger
    ones; where there are none, all ranks are on its first axis and the style says so.
    """
    names = _own_axes(style) if style in _BY_NAME else (axis_name(style),)
    sizes = _factors(ranks, len(names)) if len(names) > 1 else None
    return dict(zip(names, sizes, strict=True)) if sizes else {names[0]: ranks}


def axis_names(style: str, count: int) -> tuple[str, ...]:
    """Return the axes that a mesh of `count` sizes without names has under a style.

    A built-in style has its own list, a user style those its name has; where they are another
    number, the usual ones.
    """
    own = _own_axes(style)
    if len(own) == count:
        return own
    usual = {1: (axis_name(style),), 2: ("dp", "tp"), 3: ("replicate", "shard", "tp")}
    return usual.get(count, tuple(f"axis{i}" for i in range(count)))


def _own_axes(style: str) -> tuple[str, ...]:
    """Return the axes in a style's list, or those in its name as whole tokens."""
    return _BY_NAME[style].axes if style in _BY_NAME else _named_axes(style)


def _named_axes(style: str) -> tuple[str, ...]:
    """Return the axes that stand in a name as whole tokens, in order."""
    return tuple(dict.fromkeys(token for token in _tokens(style) if token in _AXIS_TOKENS))


def traits(style: str) -> tuple[str, ...]:
    """Return what the whole tokens of a style's name say of it."""
    return tuple(TRAITS[token] for token in _tokens(style) if token in TRAITS)


def _tokens(style: str) -> list[str]:
    """Return the parts of a style's name between `_`, `+` and `-`."""
    return style.replace("+", "_").replace("-", "_").split("_")


def _factors(number: int, count: int, least: int = 2) -> tuple[int, ...] | None:
    """Return the rising factors >= `least` of a number whose largest is smallest, if any."""
    if count == 1:
        return (number,) if number >= least else None
    found = [
        (factor, *rest)
        for factor in range(least, math.isqrt(number) + 1)
        if number % factor == 0 and (rest := _factors(number // factor, count - 1, factor))
    ]
    return min(found, key=max, default=None)


def axis_name(style: str) -> str:
    """Return the axis that a one-axis mesh has under a style.

    A built-in style has its own list. For a user style the axis is a whole token of its
    name between `_`, `+` or `-`; `dp` where no token is an axis.
    """
    return next(iter(_own_axes(style)), "dp")


def check_user_styles(names: Sequence[str], where: str) -> None:
    """Refuse a user style that is called like a built-in one.

    Raises:
        CaseError: `style-name-taken`, naming both.
    """
    for name in names:
        is_group = name in GROUPS and name != "user"
        taken = name if name in _BY_NAME or is_group else ALIASES.get(name)
        if taken is not None:
            raise CaseError(
                f"Two styles have one name: {where}. The file's hook for {name!r} and the "
                f"built-in {taken!r} cannot be told apart. Rename the hook, for example to "
                f"parallelize_my_{name}",
                slug="style-name-taken",
            )


def select(patterns: Sequence[str], user_styles: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the ids that the patterns name, in the table's order, each once.

    Args:
        patterns: What `--styles` was given; empty means `engine` and every user style.
        user_styles: Names that the case file brings.

    Raises:
        UsageError: `unknown-style` where a pattern names nothing; `style-name-taken` where a
            third party's style is called like another.
    """
    wanted = list(patterns) or ["engine", *(["user"] if user_styles else [])]
    chosen: set[str] = set()
    for pattern in wanted:
        chosen.update(_matches(_canonical(pattern), user_styles))
    order = [style.name for style in (*STYLES, *plugins())] + list(user_styles)
    return tuple(name for name in order if name in chosen)


def _matches(pattern: str, user_styles: Sequence[str]) -> list[str]:
    """Return the runnable ids that one pattern names."""
    if pattern == "user":
        return list(user_styles)
    known = (*STYLES, *plugins())
    found = [style.name for style in known if _names(pattern, style)]
    if pattern == "all":
        return found + list(user_styles)
    found += [name for name in user_styles if fnmatch.fnmatchcase(name, pattern)]
    if found or pattern in GROUPS:
        return found
    names = [*(style.name for style in known), *user_styles, *GROUPS]
    raise UsageError(
        f"Unknown style: --styles {pattern!r}; {choices_text(pattern, names)}. "
        f"`spmd-verify styles` lists all of them",
        slug="unknown-style",
    )


@functools.cache
def plugins() -> tuple[StyleId, ...]:
    """Return the styles that installed packages bring; nothing of theirs is imported.

    Raises:
        UsageError: `style-name-taken`.
    """
    found: dict[str, StyleId] = {}
    for entry in entry_points(group=ENTRY_POINTS):
        package = entry.dist.name if entry.dist is not None else entry.value
        if entry.name in _BY_NAME or entry.name in found:
            raise UsageError(
                f"Two styles have one name: {entry.name!r} of the package {package} is called "
                f"like another. Expected a name of its own. Uninstall {package} or ask for another "
                f"name of its entry point in the group {ENTRY_POINTS}",
                slug="style-name-taken",
            )
        axes = _named_axes(entry.name) or ("dp",)
        found[entry.name] = StyleId(entry.name, "plugin", f"of the package {package}", axes)
    return tuple(found.values())


def _canonical(pattern: str) -> str:
    """Return a pattern with aliases replaced, joined ones too."""
    return "+".join(ALIASES.get(part, part) for part in pattern.split("+"))


def _names(pattern: str, style: StyleId) -> bool:
    """Say whether a pattern means this built-in style."""
    return pattern in ("all", style.group) or fnmatch.fnmatchcase(style.name, pattern)


def data_ranks(axes: Mapping[str, int]) -> int:
    """Return over how many ranks a mesh divides the batch; `replicate_shard` joins two axes."""
    return math.prod(size for axis, size in axes.items() if set(axis.split("_")) <= DATA_AXES)
