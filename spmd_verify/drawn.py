"""Drawn models: random small training programs that print as PyTorch and shrink.

A `DrawnModel` is a tree of plain dataclasses; `to_source` prints it, `build` runs what was
printed. `drawn_models` is the hypothesis strategy. Needs torch and hypothesis, no process group
and no engine.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from hypothesis import strategies as st

from spmd_verify.drawn_layers import (
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
from spmd_verify.drawn_parts import (
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
from spmd_verify.drawn_training import HAND, LOSSES, OPTIMIZERS, Inputs, Loss, Training
from spmd_verify.drawn_writer import Layer, Writer, indented

_HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
"""


@dataclass(frozen=True)
class DrawnModel:
    """One random training program."""

    inputs: Inputs
    layers: tuple[Layer, ...]
    loss: Loss
    training: Training

    def batch_dims(self) -> dict[str, int | None]:
        """Return {argument: dim that counts samples, or None}."""
        dims = self.inputs.batch_dims()
        return dims | ({"target": 0} if self.loss.arguments(self._written()) else {})

    def _written(self) -> Writer:
        writer = Writer(self.inputs.batch, self.inputs.tokens, self.inputs.width)
        self.inputs.start(writer)
        for layer in self.layers:
            layer.write(writer)
        if self.inputs.extra:
            writer.lines("x = x + extra.mean()")
        if not any("Parameter" in m or "nn." in m for m in writer.members):
            Scale().write(writer)
        self.loss.finish(writer)
        return writer

    def to_source(self) -> str:
        """Return a runnable module: `Model`, `make_optimizer`, `step` and `batch(index)`."""
        w = self._written()
        inputs = self.inputs.arguments()
        arguments = inputs | self.loss.arguments(w)
        names, given = ", ".join(arguments), ", ".join(inputs)
        call = [f"out = model({given})", *self.loss.lines(w)]
        result = "{'loss': loss, 'out': out}" if self.loss.returned else "{'loss': loss}"
        step = self.training.step_lines(call, result)
        values = [f"{name} = {text}" for name, text in arguments.items()]
        members = ["super().__init__()", *w.members]
        optimizer = self.training.optimizer_lines()
        draw = ["g = torch.Generator().manual_seed(index)", *values, f"return {names},"]
        parts = [
            f"class Model(nn.Module):\n    def __init__(self):\n{_block(members, 8)}",
            f"    def forward(self, {given}):\n{_block(w.body, 8)}",
            f"def make_optimizer(model):\n{_block(optimizer, 4)}",
            f"def step(model, optimizer, {names}):\n{_block(step, 4)}",
            f"def batch(index):\n{_block(draw, 4)}",
        ]
        if self.training.optimizer == "hand":
            parts.insert(2, HAND.strip())
        return _HEAD + "\n" + "\n\n".join(parts) + "\n"


def _block(lines: list[str], by: int) -> str:
    return indented([line for text in lines for line in text.split("\n")], by)


@dataclass(frozen=True)
class Built:
    """What the source of a drawn model defines.

    Attributes:
        make_model: Makes the model; alike at every call.
        make_optimizer: Model -> optimizer or None.
        step: `step(model, optimizer, *batch)`.
        batch: Index -> the global arguments.
    """

    make_model: Callable[[], torch.nn.Module]
    make_optimizer: Callable[[torch.nn.Module], Any]
    step: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]


def build(drawn: DrawnModel) -> Built:
    """Run the source of a drawn model; call and use the result inside `float64_default`."""
    source = drawn.to_source()
    name = f"drawn_model_{abs(hash(drawn))}.py"
    # Registered, so that tracebacks and source lines show the drawn program.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    module: dict[str, Any] = {"__name__": "drawn_model"}
    exec(compile(source, name, "exec"), module)

    def make_model() -> torch.nn.Module:
        torch.manual_seed(0)
        return module["Model"]()

    return Built(make_model, module["make_optimizer"], module["step"], module["batch"])


@contextmanager
def float64_default() -> Iterator[None]:
    """Make float64 the default dtype inside the block: factory calls follow the parameters."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# -- strategies ----------------------------------------------------------------------------


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
        st.builds(
            Training,
            st.sampled_from(list(OPTIMIZERS)),
            st.sampled_from(("none", "norm", "value")),
            st.sampled_from((1, 1, 1, 2)),
            st.sampled_from(("before", "before", "after", "zeros", "never")),
            st.booleans(),
            st.sampled_from((1, 1, 0)),
        ),
    )  # fmt: skip
