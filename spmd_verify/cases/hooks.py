"""What a case file says: one field per hook, found by name or written as an explicit `Case`.

Torch-free. A case file may hold `CASE = spmd_verify.Case(...)`, `CASES = [...]` or `cases()`;
whatever such a case leaves out is taken from the file's hooks of the usual names.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

Hook = Callable[..., Any]


@dataclass(frozen=True)
class UserStyle:
    """The hooks of one style that the file itself brings.

    Attributes:
        parallelize: `(model, mesh) -> model or None`: wrap, or change in place.
        setup: `(model, mesh) -> (model, optimizer)`, instead of `parallelize`.
        step: `(model, optimizer, batch, mesh) -> loss`; `batch` is this rank's part.
        input_sharding: `() -> {argument: {axis: dim or None}}`.
        layout: `() -> {parameter glob: placements}`.
        mesh: `() -> {axis: ranks}`.
        gather: `(name, local_tensors) -> global tensor`.
        evaluate: `(model, batch, mesh) -> outputs`.
    """

    parallelize: Hook | None = None
    setup: Hook | None = None
    step: Hook | None = None
    input_sharding: Hook | None = None
    layout: Hook | None = None
    mesh: Hook | None = None
    gather: Hook | None = None
    evaluate: Hook | None = None


@dataclass(frozen=True)
class Case:
    """One case as its author describes it; every field but `model` and `inputs` is optional.

    Attributes:
        model: Module class, or a function that returns a module.
        inputs: The global batch, or a function or generator function that gives it.
        name: What `model.py::NAME` selects.
        init_inputs: Constructor arguments: list, `[[args], {kwargs}]`, dict, or a function.
        targets: Like `inputs`.
        loss: `(output, targets)` or `(output)` -> scalar tensor.
        optimizer: `(params)` or `(model)` -> optimizer or list of optimizers.
        step: `(model, optimizer, batch)` -> loss: the whole training step.
        input_sharding: `() -> {argument: {axis: dim or None}}` or `{argument: dim or None}`.
        tp_plan: Passed to the built-in tensor-parallel styles.
        wrap_policy: Passed to the built-in sharding styles.
        tolerances: Not used, with a note: noise is measured.
        styles: The file's own styles by name.
        origin: Where each hook was found, for `--explain`.
    """

    model: Hook | None = None
    inputs: Any = None
    name: str = ""
    init_inputs: Any = None
    targets: Any = None
    loss: Hook | None = None
    optimizer: Hook | None = None
    step: Hook | None = None
    input_sharding: Hook | None = None
    tp_plan: Hook | None = None
    wrap_policy: Hook | None = None
    tolerances: Hook | None = None
    styles: Mapping[str, UserStyle] = field(default_factory=dict)
    origin: Mapping[str, str] = field(default_factory=dict)

    def filled_from(self, other: "Case") -> "Case":
        """Return this case with every missing hook taken from `other`."""
        names = [entry.name for entry in fields(self) if entry.name not in ("name", "origin")]
        given = [name for name in names if not _is_missing(getattr(self, name))]
        missing = {name: getattr(other, name) for name in names if name not in given}
        explicit = dict.fromkeys(given, f"field of Case {self.name!r}")
        return replace(self, **missing, origin={**other.origin, **explicit})


def _is_missing(value: Any) -> bool:
    """Say whether a field was left out: None, or the empty mapping of styles."""
    return value is None or (isinstance(value, Mapping) and not value)
