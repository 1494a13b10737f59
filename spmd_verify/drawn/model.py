"""Drawn models: random small training programs that print as case files and shrink.

A `DrawnModel` is a tree of plain dataclasses; `to_source` prints it as a case file, `load` makes
the checker's case of what was printed. Needs torch; no process group, no engine, no hypothesis.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from spmd_verify.cases.address import Address
from spmd_verify.cases.case import DTYPES, CaseSettings, LoadedCase
from spmd_verify.cases.discovery import discover
from spmd_verify.drawn.parts import Scale
from spmd_verify.drawn.training import HAND, Inputs, Loss, Training
from spmd_verify.drawn.writer import Layer, Writer, indented

_HEAD = """\
import torch
from torch import nn
from torch.nn import functional as F
"""


@dataclass(frozen=True)
class DrawnModel:
    """One random training program."""

    inputs: Inputs
    layers: tuple[Layer, ...]
    loss: Loss
    training: Training

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
        self.training.finish(writer)
        return writer

    def to_source(self) -> str:
        """Return the program as a case file, without a docstring."""
        w, parts = self._written(), self.training.parts
        inputs, target = self.inputs.arguments(parts), self.loss.target(w, parts)
        dims = self.inputs.batch_dims() | ({"target": 0} if target else {})
        forward = f"model({', '.join(inputs)})"
        result = ["loss", "out"] if self.loss.returned else ["loss"]
        step = self.training.step_lines(forward, self.loss.lines(w), result, dims)
        sharding = {name.replace("target", "targets"): dim for name, dim in dims.items()}
        unpacked = f"{', '.join(dims)}{',' if len(dims) == 1 else ''} = batch"
        draw = "g = torch.Generator().manual_seed({})"
        drawn = [draw.format("step"), *(f"{name} = {text}" for name, text in inputs.items())]
        functions = [
            ("get_inputs(step)", [*drawn, f"return [{', '.join(inputs)}]"]),
            ("get_targets(step)", [draw.format("1000 + step"), f"return {target}"]),
            ("input_sharding()", [f"return {sharding!r}"]),
            ("get_optimizer(model)", self.training.optimizer_lines()),
            ("step(model, optimizer, batch)", [unpacked, *step]),
        ]
        kept = [entry for entry in functions if (target or "targets" not in entry[0]) and entry[1]]
        members = ["super().__init__()", *w.members]
        written = [
            f"class Model(nn.Module):\n    def __init__(self):\n{_block(members, 8)}\n\n"
            f"    def forward(self, {', '.join(inputs)}):\n{_block(w.body, 8)}",
            *([HAND.strip()] if self.training.optimizer == "hand" else []),
            *(f"def {name}:\n{_block(lines, 4)}" for name, lines in kept),
        ]
        return "\n\n\n".join([_HEAD.strip(), *written]) + "\n"


def _block(lines: list[str], by: int) -> str:
    return indented([line for text in lines for line in text.split("\n")], by)


def digest(source: str) -> str:
    """Return eight characters that name a source."""
    return hashlib.sha256(source.encode()).hexdigest()[:8]


@contextmanager
def loaded(drawn: DrawnModel, dtype: str = "float64", steps: int = 2) -> Iterator[LoadedCase]:
    """Give the case that the source of a drawn model is; it is what `load_case` would load.

    Args:
        drawn: The model.
        dtype: A key of `DTYPES`.
        steps: Training steps.
    """
    source = drawn.to_source()
    name = f"drawn_{digest(source)}.py"
    # Registered, so that tracebacks and source lines show the drawn program.
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        module = ModuleType("drawn_model")
        exec(compile(source, name, "exec"), vars(module))
        address = Address(name, "file", name)
        settings = CaseSettings(DTYPES[dtype], 0, steps, {})
        yield LoadedCase(address, discover(module, address), settings, digest(source))
    finally:
        linecache.cache.pop(name, None)
