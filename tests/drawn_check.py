"""Run a drawn model under the engine's four styles in lock-step and compare with eager.

The step is captured once for all styles, and once more where its first call makes state.
After each step every rank's part of every value is compared with its part of what eager has:
result, parameters, buffers, optimizer state, gradients; the random generator's state bitwise.
What eager itself cannot determine - measured by runs with random rounding - is not judged, but
counted.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from hypothesis import strategies as st
from lockstep_check import part_of
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from spmd import lockstep
from spmd.ops import check_value
from spmd.parallel_mode import DataParallel, DTensorExpandMode
from spmd_verify.drawn import Built, DrawnModel, build, float64_default
from spmd_verify.rounding import RandomRounding

STYLES = ("replicate", "fully_shard", "default", "expand")
STEPS = 2
# Relative to the value's largest element, or to SMALLEST where that is less: sums of terms
# of size one cancel to rounding, not to zero.
TOLERANCE = 1e-10
SMALLEST = 1e-2
# Values that random rounding moves by more than this share of the tolerance are undetermined.
DETERMINED = 0.02
# A model with a larger share of them does not count: RMSProp over gradients that cancel.
MOST_UNDETERMINED = 0.1
NOISE_RUNS = 2

# In the order in which a step computes them: the first difference is the cause.
KINDS = ("generator", "result", "gradient", "buffer", "state", "parameter")

Key = tuple[str, str]
Values = dict[Key, Tensor]
Passes = Callable[[Any], Any]


class Undrawable(Exception):
    """Eager refuses the model, computes infinities, or rounding decides much of what it does."""


class Differs(AssertionError):
    """A style computes something else than eager, or fails.

    Attributes:
        style: The style.
    """

    def __init__(self, message: str, style: str) -> None:
        super().__init__(message)
        self.style = style


@dataclass(frozen=True)
class Placing:
    """Where a drawn model runs.

    Attributes:
        sizes: Ranks along each mesh axis.
        parameters: For the expand mode: dim to shard per parameter number and axis, -1 to
            replicate; taken modulo the parameter's dims.
        inputs: Likewise for the arguments, None for the mode's own choice.
        named: Whether the batch dims are given by name.
    """

    sizes: tuple[int, ...] = (2,)
    parameters: tuple[int, ...] = ()
    inputs: tuple[int, ...] | None = None
    named: bool = True


def placings() -> st.SearchStrategy[Placing]:
    """Return the strategy of meshes of one to eight ranks and of placements."""
    one = st.integers(1, 8).map(lambda n: (n,))
    two = st.sampled_from(((2, 2), (2, 3), (4, 2), (1, 3), (2, 1)))
    dims = st.lists(st.integers(-1, 2), max_size=6).map(tuple)
    return st.builds(
        Placing, st.one_of(one, one, one, two), dims, st.one_of(st.none(), dims), st.booleans()
    )


@dataclass
class Tally:
    """What a series of checks did."""

    models: int = 0
    compared: int = 0
    undetermined: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)


def check_drawn(
    drawn: DrawnModel, placing: Placing, tally: Tally | None = None,
    styles: tuple[str, ...] = STYLES, passes: Passes | None = None,
) -> None:  # fmt: skip
    """Compare a drawn model under every style with eager.

    Args:
        drawn: The model.
        placing: The mesh and the expand mode's placements.
        tally: Counts are added to it.
        styles: Styles to run.
        passes: Extra last pass of every style; how a fault is planted.

    Raises:
        Differs: With the model's source, the style, mesh and value that differs.
        Undrawable: Eager cannot run the model, or - all else agreed - determines too little.
    """
    tally = tally if tally is not None else Tally()
    with float64_default(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = build(drawn)
        try:
            expected, floors = _reference(drawn, built)
        except (RuntimeError, ValueError) as refusal:
            raise Undrawable(str(refusal).split("\n")[0][:60]) from refusal
        captures = _Once() if drawn.training.warm else lockstep.CaptureCache()
        for style in styles:
            try:
                run = _Run(
                    drawn, built, _mode(style, drawn, built, placing, passes), placing, captures
                )
                _compare(run, expected, floors, tally)
                tally.fallbacks.update(run.step.fallbacks)
            except Exception as failure:
                raise Differs(_message(drawn, placing, style, failure), style) from failure
    loud = [floor > DETERMINED * TOLERANCE for step in floors for floor in step.values()]
    if sum(loud) > MOST_UNDETERMINED * len(loud):
        raise Undrawable("rounding decides")
    tally.models += 1


def _message(drawn: DrawnModel, placing: Placing, style: str, failure: Exception) -> str:
    kind = "" if isinstance(failure, AssertionError) else f"{type(failure).__name__}: "
    return (
        f"{style} on {placing.sizes} ranks, batch {drawn.inputs.batch}: {kind}{failure}\n"
        f"{placing}\n{drawn}\n\n{drawn.to_source()}"
    )


# -- eager ---------------------------------------------------------------------------------


def _reference(drawn: DrawnModel, built: Built) -> tuple[list[Values], list[dict[Key, float]]]:
    """Return what eager has after every step, and how far rounding alone moves it."""
    expected = list(_eager(drawn, built))
    floors: list[dict[Key, float]] = [dict.fromkeys(step, 0.0) for step in expected]
    for seed in range(NOISE_RUNS):
        noisy = _eager(drawn, built, RandomRounding(seed, torch.float64))
        for plain, moved, floor in zip(expected, noisy, floors, strict=True):
            for key, value in plain.items():
                floor[key] = max(floor[key], distance(moved[key], value))
    for step in expected:
        for key, value in step.items():
            if value.is_floating_point() and not value.isfinite().all():
                raise ValueError(f"not finite: {key[0]}")
    return expected, floors


def _eager(drawn: DrawnModel, built: Built, noise: Any = None) -> Iterator[Values]:
    model = built.make_model()
    optimizer = built.make_optimizer(model)
    _warm(drawn, built, model, optimizer)
    for index in range(STEPS):
        batch = built.batch(index)
        if noise is None:
            result = built.step(model, optimizer, *batch)
        else:
            with noise:
                result = built.step(model, optimizer, *batch)
        yield _copied(model, optimizer, result)


def _warm(drawn: DrawnModel, built: Built, model: Any, optimizer: Any) -> None:
    for index in range(drawn.training.warm):
        built.step(model, optimizer, *built.batch(100 + index))
    torch.manual_seed(7)


def _copied(model: Any, optimizer: Any, result: Any) -> Values:
    values: Values = {("generator", ""): torch.get_rng_state()}
    for path, leaf in pytree.tree_leaves_with_path(result):
        values["result", pytree.keystr(path)] = torch.as_tensor(leaf).detach().clone()
    for name, parameter in model.named_parameters():
        values["parameter", name] = parameter.detach().clone()
        if parameter.grad is not None:
            values["gradient", name] = parameter.grad.clone()
        state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for entry, value in state.items():
            values["state", f"{name}.{entry}"] = torch.as_tensor(value).detach().clone()
    for name, buffer in model.named_buffers():
        values["buffer", name] = buffer.clone()
    return values


# -- one style -----------------------------------------------------------------------------


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
    """One capture for all calls: right for steps that find at each call what they leave.

    Half of the time goes into captures. A warm model has its state and gradients from the
    first call on, and drawn steps keep nothing in Python.
    """

    def __init__(self) -> None:
        super().__init__()
        self.programs = _AnyCall()


class _Run:
    """A compiled copy of a drawn model."""

    def __init__(
        self, drawn: DrawnModel, built: Built, mode: Any, placing: Placing, captures: Any
    ) -> None:
        self.drawn, self.built = drawn, built
        mesh = {f"axis{i}": n for i, n in enumerate(placing.sizes)}
        compiled = lockstep.compile(parallel_mode=mode, mesh=mesh, captures=captures)
        self.step = compiled(built.step)
        self.model = built.make_model()
        self.optimizer = built.make_optimizer(self.model)

    def __iter__(self) -> Iterator[tuple[Values, dict[Key, Any]]]:
        """Yield, after each step, what the module holds and the parts of every rank."""
        _warm(self.drawn, self.built, self.model, self.optimizer)
        for index in range(STEPS):
            result = self.step(self.model, self.optimizer, *self.built.batch(index))
            values = _copied(self.model, self.optimizer, {})
            parts = {
                ("result", pytree.keystr(path)): leaf
                for path, leaf in pytree.tree_leaves_with_path(self.step.results)
            }
            values |= {key: torch.as_tensor(0.0) for key in parts if key not in values}
            del result
            kinds = {"parameters": "parameter", "buffers": "buffer", "gradients": "gradient",
                     "optimizer_state": "state"}  # fmt: skip
            for kind, named in self.step.state().items():
                parts |= {(kinds[kind], name): placed for name, placed in named.items()}
            yield values, parts


def _mode(
    style: str, drawn: DrawnModel, built: Built, placing: Placing, passes: Passes | None
) -> Any:
    mesh = {f"axis{i}": n for i, n in enumerate(placing.sizes)}
    custom = None
    if passes is not None:
        from spmd.passes import default_passes

        custom = (*default_passes(), passes)
    if style != "expand":
        dims: Any = drawn.batch_dims() if placing.named else 0
        return DataParallel(style, input_batch_dim=dims, mesh=mesh, custom_passes=custom)
    shapes = {n: p.shape for n, p in built.make_model().named_parameters()}
    arguments = dict(zip(drawn.batch_dims(), built.batch(0), strict=True))
    inputs = None
    if placing.inputs is not None:
        sizes = {name: value.shape for name, value in arguments.items()}
        inputs = _placements(sizes, placing.inputs, len(placing.sizes))
    return DTensorExpandMode(
        custom, mesh=mesh, input_placements=inputs,
        parameter_placements=_placements(shapes, placing.parameters, len(placing.sizes)),
    )  # fmt: skip


def _placements(shapes: dict[str, Any], dims: tuple[int, ...], axes: int) -> dict[str, Any]:
    """Return placements of named tensors from a list of dims, taken round and round."""
    found: dict[str, Any] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        chosen: list[Any] = []
        for axis in range(axes):
            dim = dims[(number * axes + axis) % len(dims)] if dims else -1
            dim = dim % len(shape) if dim >= 0 and len(shape) else -1
            is_free = dim >= 0 and not any(getattr(p, "dim", None) == dim for p in chosen)
            chosen.append(Shard(dim) if is_free else Replicate())
        found[name] = chosen
    return found


# -- comparison ----------------------------------------------------------------------------


def _compare(
    run: _Run, expected: list[Values], floors: list[dict[Key, float]], tally: Tally
) -> None:
    for index, (values, parts) in enumerate(run):
        wanted = dict(sorted(expected[index].items(), key=lambda item: KINDS.index(item[0][0])))
        assert set(values) == set(wanted), (
            f"step {index}: missing {sorted(set(wanted) - set(values))}, "
            f"unexpected {sorted(set(values) - set(wanted))}"
        )
        assert torch.equal(values["generator", ""], wanted["generator", ""]), (
            f"step {index}: the random generator is left in another state"
        )
        for key, value in wanted.items():
            if floors[index][key] > DETERMINED * TOLERANCE:
                tally.undetermined += 1
                continue
            tally.compared += 1
            if key[0] not in ("result", "generator"):
                _agrees(f"step {index}: {key[0]} {key[1]}", values[key], value)
            if key in parts:
                _parts_agree(f"step {index}: {key[0]} {key[1]}", run, parts[key], value)


def _parts_agree(what: str, run: _Run, placed: Any, value: Tensor) -> None:
    coordinates = run.step.mesh.coordinates()
    for rank, coordinate in enumerate(coordinates):
        own = part_of(value, placed.layout, coordinate)
        _agrees(f"{what} of rank {rank}", torch.as_tensor(placed.local[rank]), own, value)


def _agrees(what: str, actual: Tensor, wanted: Tensor, whole: Tensor | None = None) -> None:
    found = distance(actual.detach(), wanted, whole)
    assert found <= TOLERANCE, (
        f"{what} differs by {found:.1e} of its scale\nactual   {actual.tolist()}\n"
        f"expected {wanted.tolist()}"
    )


def distance(actual: Tensor, wanted: Tensor, whole: Tensor | None = None) -> float:
    """Return the largest difference relative to the largest element of the whole value."""
    if actual.shape != wanted.shape:
        return float("inf")
    if not wanted.is_floating_point() or torch.equal(actual, wanted):
        return 0.0 if torch.equal(actual.to(wanted.dtype), wanted) else float("inf")
    scale = (wanted if whole is None else whole).abs().max().item()
    found = (actual.to(wanted.dtype) - wanted).abs().max().item()
    return found / max(scale, SMALLEST) if found == found else float("inf")
