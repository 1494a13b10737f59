"""Hypothesis strategies of drawn models and of where they run; imports hypothesis."""

from __future__ import annotations

from typing import Final

from hypothesis import strategies as st

from spmd_verify.drawn.layers import (
    RESHAPED,
    SAME_SHAPE,
    Attention,
    Conv,
    Linear,
    Norm,
    Pointwise,
    Recurrent,
    Reshape,
)  # fmt: skip
from spmd_verify.drawn.model import DrawnModel
from spmd_verify.drawn.parts import (
    Checkpointed,
    Dropout,
    Experts,
    InPlace,
    Memory,
    Positions,
    Residual,
    Scale,
    Twice,
    Unused,
)  # fmt: skip
from spmd_verify.drawn.style import Placing
from spmd_verify.drawn.training import (
    CLIPS,
    LOSSES,
    OPTIMIZERS,
    SCHEDULES,
    SECOND_LOSSES,
    Inputs,
    Loss,
    Training,
)  # fmt: skip
from spmd_verify.drawn.writer import Layer

# Meshes of two axes, smallest first; the last ones have an axis of one rank.
TWO_AXES: Final = ((2, 2), (2, 3), (4, 2), (1, 3), (2, 1))

# Steps without a schedule for each kind of schedule drawn: the styles cannot share the captures
# of a scheduled step (drawn_style.Subject.captures), which makes it four times as long.
UNSCHEDULED: Final = 20


def plain_layers() -> st.SearchStrategy[Layer]:
    """Return the strategy of layers without layers inside; the simplest come first."""
    sizes = st.integers(1, 6)
    return st.one_of(
        st.builds(Pointwise, st.sampled_from(SAME_SHAPE)),
        st.builds(Linear, sizes, st.sampled_from(Linear.SPELLINGS)),
        st.builds(Scale, st.sampled_from(Scale.SHAPES), st.booleans()),
        st.builds(Norm, st.sampled_from(Norm.KINDS)),
        st.builds(Reshape, st.sampled_from(list(RESHAPED))),
        st.builds(Dropout, st.sampled_from(Dropout.KINDS)),
        st.builds(Conv, sizes, st.integers(1, 3), st.integers(1, 2), st.integers(1, 3),
                  st.integers(0, 2)),
        st.builds(Attention, st.integers(1, 3), st.sampled_from(Attention.KINDS),
                  st.integers(1, 3)),
        st.builds(InPlace, st.sampled_from(InPlace.KINDS)),
        st.builds(Memory, st.sampled_from(Memory.KINDS)),
        st.builds(Unused, st.integers(1, 3)),
        st.builds(Positions, st.integers(0, 2)),
        st.builds(Experts, st.integers(1, 4), st.integers(1, 2),
                  st.sampled_from(Experts.COMBINES)),
        st.builds(Recurrent, st.integers(1, 3), st.sampled_from(("GRU", "LSTM", "RNN")),
                  st.booleans(), st.booleans()),
    )  # fmt: skip


def nested_layers() -> st.SearchStrategy[Layer]:
    """Return the strategy of layers around one to three plain ones."""
    inner = st.lists(plain_layers(), min_size=1, max_size=3).map(tuple)
    return st.one_of(
        st.builds(Residual, inner, st.sampled_from(Residual.JOINS)),
        st.builds(Twice, inner),
        st.builds(Checkpointed, inner),
    )


def drawn_models() -> st.SearchStrategy[DrawnModel]:
    """Return the strategy of drawn models: one to five layers, odd sizes, any optimizer."""
    layer = st.one_of(plain_layers(), plain_layers(), nested_layers())
    return st.builds(
        DrawnModel,
        st.builds(
            Inputs, st.integers(1, 9), st.integers(1, 5), st.integers(1, 5),
            st.sampled_from(("features", "ids")), st.booleans(), st.booleans(),
        ),
        st.lists(layer, min_size=1, max_size=5).map(tuple),
        st.builds(Loss, st.sampled_from(list(LOSSES)), st.booleans(), st.booleans()),
        trainings(),
    )  # fmt: skip


def trainings() -> st.SearchStrategy[Training]:
    """Return the strategy of training steps; the plain ones come first."""
    return st.builds(
        Training,
        st.sampled_from(list(OPTIMIZERS)),
        st.sampled_from(("none", "none", *CLIPS)),
        st.sampled_from((1, 1, 1, 2)),
        st.sampled_from(("before", "before", "after", "zeros", "never")),
        st.booleans(),
        st.sampled_from((1, 1, 0)),
        st.booleans(),
        st.sampled_from(("none", "none", "none", *SECOND_LOSSES)),
        st.sampled_from((*("none",) * UNSCHEDULED, *SCHEDULES)),
    )


def placings(max_ranks: int = 8) -> st.SearchStrategy[Placing]:
    """Return the strategy of meshes of one to `max_ranks` ranks and of placements."""
    one = st.integers(1, max_ranks).map(lambda n: (n,))
    pairs = [pair for pair in TWO_AXES if pair[0] * pair[1] <= max_ranks]
    dims = st.lists(st.integers(-1, 2), max_size=6).map(tuple)
    sizes = st.one_of(one, one, one, st.sampled_from(pairs)) if pairs else one
    return st.builds(Placing, sizes, dims, st.one_of(st.none(), dims), st.booleans())
