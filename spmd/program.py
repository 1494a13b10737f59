"""The captured step: a functional graph and the signature that names its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

InputKind = Literal[
    "parameter", "buffer", "gradient", "state", "hyper", "captured", "argument"
]
OutputKind = Literal["result", "parameter", "buffer", "gradient", "state", "hyper", "captured"]


@dataclass(frozen=True)
class InputSpec:
    """What one placeholder of the graph stands for.

    Attributes:
        kind: Which part of the step's world it is.
        name: Parameter or buffer name (tied ones: the first), `parameter.key` for state,
            `group.key` for hyper-parameters, the dotted path for arguments.
        aliases: Other names of the same tensor.
        requires_grad: Whether the parameter is trained.
    """

    kind: InputKind
    name: str
    aliases: tuple[str, ...] = ()
    requires_grad: bool = False


@dataclass(frozen=True)
class OutputSpec:
    """What one output of the graph is; `name` as in `InputSpec`, or the path in the result."""

    kind: OutputKind
    name: str


@dataclass
class Signature:
    """Names of a graph's placeholders and outputs, in graph order.

    Attributes:
        inputs: One per placeholder: parameters, buffers, gradients, state,
            hyper-parameters, captured tensors, arguments.
        outputs: One per graph output.
        gradients: Parameter name -> name of the node that holds its finished gradient,
            before any clipping.
        source_lines: Node name -> "file:line" of the user's code it came from.
    """

    inputs: list[InputSpec] = field(default_factory=list)
    outputs: list[OutputSpec] = field(default_factory=list)
    gradients: dict[str, str] = field(default_factory=dict)
    source_lines: dict[str, str] = field(default_factory=dict)

    def index(self, kind: str, name: str) -> int:
        """Return the position of an input; raises KeyError if there is none."""
        for position, spec in enumerate(self.inputs):
            if spec.kind == kind and spec.name == name:
                return position
        raise KeyError((kind, name))

    def of_kind(self, kind: str) -> Iterator[tuple[int, InputSpec]]:
        """Yield (position, spec) of the inputs of one kind."""
        return ((i, spec) for i, spec in enumerate(self.inputs) if spec.kind == kind)


def signature_of(graph: fx.GraphModule) -> Signature:
    """Return `graph.meta["signature"]`."""
    signature: Any = graph.meta["signature"]
    return signature
