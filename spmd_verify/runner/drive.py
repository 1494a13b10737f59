"""Drive one style through the runs of a cell, in one process: a rank, or all of them.

Two builds of the style, one after the other. *Free*: steps follow each other. *Anchored*:
every step n >= 1 starts from the reference's state after step n - 1, written into the live
tensors in place by the checker's own shard arithmetic. Each build calls the step once per
step; what it shows is compared at once and not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from spmd_verify.cases.case import LoadedCase
from spmd_verify.compare import compare, fitting_parts, hyper_parameter_differences
from spmd_verify.errors import SpmdVerifyError, Unsupported
from spmd_verify.exact.case import ExactCase
from spmd_verify.exact.grid import is_power
from spmd_verify.layouts import region
from spmd_verify.measure import Statistics
from spmd_verify.reference.stepped import evaluates_after
from spmd_verify.reference.trajectory import hyper_parameters, restore_hyper_parameters
from spmd_verify.runner.dumping import DumpTaker
from spmd_verify.stored.store import Store
from spmd_verify.styles.base import Observation, Observed, Style, StyleContext, StyleRun
from spmd_verify.ties.forcing import Forcing
from spmd_verify.user_code import UserCode
from spmd_verify.verdict import CARRIED_STAGES


class Drive:
    """One cell in one process.

    Attributes:
        dump: Takes copies of everything seen, if set.
        forcing: Decides near ties as the reference did, if set.
        steps: How many to run; the case's unless set lower.
        is_anchored: Whether there is an anchored run.
        statistics: What was compared so far.
        notes: What the report says besides.
    """

    def __init__(
        self,
        style: Style,
        case: LoadedCase,
        context: StyleContext,
        store: Store,
        note: Callable[[str], None],
    ) -> None:
        """Remember what to run.

        Args:
            style: What to build.
            case: The loaded case.
            context: Where this process stands on the mesh.
            store: The reference.
            note: Says what is being done.
        """
        self.style = style
        self.case = case
        self.context = context
        self.store = store
        self.note = note
        self.dump: DumpTaker | None = None
        self.forcing: Forcing | None = None
        self.steps = case.steps
        self.mesh_shape = tuple(context.axes.values())
        self.stopwatch = context.stopwatch
        self.is_anchored = True
        self.statistics: list[Statistics] = []
        self.notes: list[str] = []

    def run(self) -> dict[str, Any]:
        """Run the free and the anchored build and compare everything seen.

        Returns:
            The style's facts.

        Raises:
            Unsupported: The style does not take the case.
        """
        if isinstance(self.case, ExactCase):
            self.is_anchored = False
            return self._run_exact(self.case)
        self.is_anchored = self.steps > 1
        free = self._built("free")
        self.compare("free", 0, {"initial_state": _initial_state(self._state(free))})
        for index in range(self.steps):
            self.compare("free", index, self._step(free, index, "free"))
            self.compare("free", index, self._state(free))
            if evaluates_after(self.case, index) and index < self.steps - 1:
                self._evaluate_between(free, index, "free")
        facts = dict(free.facts())
        if self.steps > 1:
            self._run_anchored()
        if self.steps == self.case.steps:
            self._evaluate(free)
        return facts

    def _run_exact(self, case: ExactCase) -> dict[str, Any]:
        """Run and compare every step alone, from its own drawn state.

        Raises:
            Unsupported: `not-exact`, where the style may divide by a number of ranks that is
                no power of two.
        """
        _refuse_odd_axes(self.style, self.context.axes)
        facts: dict[str, Any] = {}
        for index in range(case.steps):
            self.note(f"building step {index}")
            alone = case.at(index, self.store.draw(index))
            run = self.style.build(alone, self.context)
            self.compare("free", index, {"initial_state": _initial_state(self._state(run))})
            self.compare_hyper_parameters(run, index)
            self.note(f"step {index}")
            batch = alone.batch(0)
            alone.seed_step(0)
            self.compare("free", index, run.step(0, batch))
            self.compare("free", index, self._state(run))
            facts = facts or dict(run.facts())
        return facts

    def _run_anchored(self) -> None:
        """Run the anchored build; its step 0 is the free run's and is not compared again."""
        anchored = self._built("anchored")
        self._step(anchored, 0, "anchored")
        for index in range(1, self.steps):
            self._evaluate_between(anchored, index - 1, "anchored")
            with self.stopwatch("anchor"):
                unknown = anchor(anchored, self.store, index, self.mesh_shape)
            if self.context.any_rank(bool(unknown)):
                self.is_anchored = False
                if unknown:
                    self.notes.append(
                        f"no anchored run: nobody says which part of {', '.join(unknown[:3])} a "
                        f"rank holds, so it cannot be restored; the free run decides alone"
                    )
                return
            self.compare("anchored", index, self._step(anchored, index, "anchored"))
            self.compare_carried(anchored, index)

    def compare_carried(self, run: StyleRun, index: int) -> None:
        """Compare the state after an anchored step where the free run decides nothing."""
        wanted = {
            (stage, name)
            for stage in CARRIED_STAGES
            for name in self.store.names(index, stage)
            if (entry := self.store.entry(index, stage, name)) and entry.is_anchored_too
        }
        if not wanted and self.dump is None:
            return
        state = self._state(run)
        if self.dump is not None:
            self.dump.take("anchored", index, state)
        compared = {
            stage: {n: seen for n, seen in tensors.items() if (stage, n) in wanted}
            for stage, tensors in state.items()
        }
        self._measure("anchored", index, compared)

    def _built(self, name: str) -> StyleRun:
        """Build the style once more."""
        self.note(f"building the {name} run")
        with self.stopwatch("build"):
            return self.style.build(self.case, self.context)

    def _step(self, run: StyleRun, index: int, name: str) -> Observation:
        """Run one step from its seed."""
        self.note(f"step {index} of the {name} run")
        if name == "free":
            self.compare_hyper_parameters(run, index)
        batch = self.case.batch(index)
        self.case.seed_step(index)
        with self.stopwatch("steps"), self._forced(name, index):
            return run.step(index, batch)

    def _forced(self, name: str, index: int) -> AbstractContextManager[Any]:
        """Return the context in which a step takes the reference's decisions, if it is to."""
        return nullcontext() if self.forcing is None else self.forcing.at(name, index)

    def _state(self, run: StyleRun) -> Observation:
        """Return a run's live state."""
        with self.stopwatch("compare"):
            return run.state()

    def compare(self, run: str, step: int, observation: Observation) -> None:
        """Compare what this process holds with its slice of the reference."""
        if self.dump is not None:
            self.dump.take(run, step, observation)
        self._measure(run, step, observation)

    def _measure(self, run: str, step: int, observation: Observation) -> None:
        """Add the statistics of what this process holds."""
        with self.stopwatch("compare"):
            self.statistics += compare(
                self.store, observation, run=run, step=step, mesh_shape=self.mesh_shape
            )

    def compare_hyper_parameters(self, run: StyleRun, index: int) -> None:
        """Compare learning rates and the like before a step of the free run."""
        values = hyper_parameters(run.optimizers())
        self.statistics += hyper_parameter_differences(
            self.store,
            values,
            run="free",
            step=index,
            coordinate=self.context.coordinates[0],
            groups=run.parameter_groups(),
        )

    def _evaluate(self, run: StyleRun) -> None:
        """Run the eval forward as the last act and compare it."""
        last = self.case.steps - 1
        if self.store.names(last, "eval_outputs"):
            outputs = self._eval_outputs(run, last)
            if outputs is not None:
                self.compare("free", last, {"eval_outputs": outputs})

    def _evaluate_between(self, run: StyleRun, after: int, name: str) -> None:
        """Run the eval forward between two steps; compared in the free run, where asked for."""
        is_compared = self.case.variants.train_eval_train
        if name != "free" and not is_compared:
            return
        outputs = self._eval_outputs(run, after)
        if name == "free" and is_compared and outputs is not None:
            self.compare("free", after, {"eval_outputs": outputs})

    def _eval_outputs(self, run: StyleRun, after: int) -> Mapping[str, Observed] | None:
        """Run an eval forward on step 0's inputs, after a step of the free run.

        Its failure costs the stage, not the cell.
        """
        self.note("the eval forward")
        self.case.seed_step(self.case.steps)
        try:
            with (
                self.stopwatch("evaluate"),
                self._forced("free", after),
                UserCode("The eval forward", path=self.case.path, slug="forward-raised"),
            ):
                return run.evaluate(self.case.batch(0))
        except SpmdVerifyError as error:
            self.notes.append(error.message)
            return None


def anchor(run: StyleRun, store: Store, index: int, mesh_shape: tuple[int, ...]) -> list[str]:
    """Write the reference's state before step `index` into a run, in place.

    Tensors the reference does not know are left alone; so is state the style has not made.

    Args:
        run: Stepped at least once.
        store: The reference.
        index: >= 1.
        mesh_shape: Ranks along each axis.

    Returns:
        What could not be restored, because its layout is unknown.
    """
    unknown = []
    run.release()
    for stage, tensors in run.state().items():
        for name, seen in tensors.items():
            if store.entry(index - 1, stage, name) is None:
                continue
            key = (index - 1, stage, name)
            if seen.write is not None:
                is_written = seen.write(store.expected(*key))
            else:
                is_written = _write(seen, store, key, mesh_shape)
            if not is_written:
                unknown.append(name)
    optimizers = run.optimizers()
    if optimizers:
        restore_hyper_parameters(optimizers, store.index.hyper_parameters[index])
    return unknown


def _write(
    seen: Observed, store: Store, key: tuple[int, str, str], mesh_shape: tuple[int, ...]
) -> bool:
    """Copy each coordinate's part of a stored tensor into the live local one.

    A tensor that several ranks share in lockstep is written once. False where the part is
    not known.
    """
    entry = store.entry(*key)
    assert entry is not None, "the caller has asked for it"
    written: set[int] = set()
    with torch.no_grad():
        for local, coordinate in zip(seen.local, seen.coordinates, strict=True):
            if id(local) in written:
                continue
            written.add(id(local))
            fitting = (
                fitting_parts(entry.shape, mesh_shape, coordinate, local)
                if seen.layout is None
                else [region(entry.shape, seen.layout, mesh_shape, coordinate)]
            )
            if len(fitting) != 1 or fitting[0].shape != tuple(local.shape):
                return False
            local.copy_(store.expected(*key, fitting[0]))
    return True


def _refuse_odd_axes(style: Style, axes: Mapping[str, int]) -> None:
    """Refuse exact mode where a mean over ranks would round.

    Raises:
        Unsupported: `not-exact`.
    """
    odd = {name: size for name, size in axes.items() if not is_power(size)}
    if odd and getattr(style, "may_divide", True):
        name, size = next(iter(odd.items()))
        raise Unsupported(
            f"Not exact: {style.name} may divide by the {size} ranks of {name}, which is no power "
            f"of two. Use 2 or 4 ranks, or run without --exact",
            slug="not-exact",
        )


def _initial_state(state: Observation) -> dict[str, Observed]:
    """Return parameters and buffers of a state before step 0."""
    return {**state.get("parameters", {}), **state.get("buffers", {})}
