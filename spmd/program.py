"""The captured step: a functional graph and the signature that names its inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch.utils._pytree as pytree
from torch import Tensor, fx

from spmd.places import Place, mapped

if TYPE_CHECKING:
    from spmd.lifting import World

InputKind = Literal["parameter", "buffer", "gradient", "state", "hyper", "captured", "argument"]
OutputKind = Literal[
    "result", "parameter", "buffer", "gradient", "state", "hyper", "captured", "argument"
]


@dataclass(frozen=True)
class InputSpec:
    """What one placeholder of the graph stands for.

    Attributes:
        kind: Which part of the step's world it is.
        name: Parameter or buffer name (tied ones: the first), `parameter.key` for state,
            `group.key` for hyper-parameters, `state.parameter.key` for numbers in the
            state, the dotted path for arguments and other numbers.
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


@dataclass(frozen=True)
class Lifted:
    """Stands in `World.flat_args` for the input, in results for the output at `position`."""

    position: int


@dataclass(frozen=True)
class Kept:
    """In `Program.new_state`: the value that was there stays (a tensor is written in place)."""


@dataclass(frozen=True)
class Write:
    """A value the step put into a slot.

    Attributes:
        kind: Kind of the outputs it is made of: `buffer`, `captured` or `hyper`.
        place: The slot.
        value: A leaf or nested tuples; `Lifted(i)` stands for output i of the graph.
    """

    kind: str
    place: Place
    value: Any

    def outputs(self) -> set[int]:
        """Return the indices of the outputs in the value."""
        found: set[int] = set()
        mapped(self.value, lambda v: found.add(v.position) if isinstance(v, Lifted) else None)
        return found

    def apply(self, outputs: list[Any]) -> None:
        """Put the value there, made of the graph's outputs."""
        self.place.set(
            mapped(self.value, lambda v: outputs[v.position] if isinstance(v, Lifted) else v)
        )


@dataclass
class Program:
    """A captured step: all that is needed to do what the step did, without its Python.

    After a run with outputs `out`, in this order:

    - outputs in `writes` and in `new_state` go where those say; every other output except
      results is written in place into the value its spec names (`captured` ones named
      `constant.<i>` into `captured[i]`), gradients are assigned where there was none;
    - `.grad` of `cleared_gradients` becomes None;
    - `python` and `requires_grad` are set (they are already, in the call that captured);
    - the result is `result_constants` with `Lifted(i)` replaced by `out[i]`, unflattened.

    Attributes:
        graph: Functional global graph; `graph.meta["signature"]` names inputs and outputs.
        world: What was lifted, with the values that were the example inputs.
        captured: Tensors the step reached that are not part of its arguments; they are
            the last inputs, in this order. `captured_now()` gives those of a later call.
        captured_places: The slot each lies in, None where it lies in none that was found.
        result_spec: How to rebuild the step's result.
        result_constants: Leaves of the result; `Lifted(i)` stands for output i.
        new_state: Parameter name -> its optimizer state after the step. Leaves are
            `Kept()`, `Lifted(i)` for a new tensor or number, or a Python value.
        cleared_gradients: Parameters whose `.grad` was a tensor and is now None.
        writes: New values of slots: reassigned and new buffers, attributes, entries of
            dicts and lists, numbers in parameter groups.
        python: Slot name -> (slot, value): Python values the step changed.
        requires_grad: Parameter name -> whether it is trained, where the step changed it.
    """

    graph: fx.GraphModule
    world: World
    captured: list[Tensor]
    result_spec: Any
    result_constants: list[Any]
    new_state: dict[str, Any]
    cleared_gradients: list[str] = field(default_factory=list)
    captured_places: list[Place | None] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    python: dict[str, tuple[Place, Any]] = field(default_factory=dict)
    requires_grad: dict[str, bool] = field(default_factory=dict)

    def captured_now(self) -> list[Tensor]:
        """Return the captured tensors as they lie in their slots now."""
        found = []
        for tensor, place in zip(self.captured, self.captured_places, strict=True):
            now = place.get() if place is not None else None
            found.append(now if isinstance(now, Tensor) else tensor)
        return found

    @property
    def counters(self) -> frozenset[str]:
        """Names of Python numbers the step changed; `lift` makes inputs of them."""
        numbers = {n for n, (_, value) in self.python.items() if type(value) in (int, float)}
        outputs = self.graph.meta["signature"].outputs
        return frozenset(numbers | {s.name for s in outputs if s.kind == "hyper"})

    @property
    def is_portable(self) -> bool:
        """Whether another model built alike may run it: it uses no slot of the model by place.

        Places are slots of the very objects the capture saw. Globals of the file and what the
        step function itself holds are the same for every build.
        """
        places = [p for p in self.captured_places if p]
        places += [place for place, _ in self.python.values()]
        is_common = all(p.name.startswith(("globals.", "step.")) for p in places)
        return is_common and not self.writes

    def placed_elsewhere(self) -> set[int]:
        """Return the indices of outputs that `writes` and `new_state` place."""
        found = {i for write in self.writes for i in write.outputs()}
        for entry in self.new_state.values():
            found |= {v.position for v in pytree.tree_leaves(entry) if isinstance(v, Lifted)}
        return found
