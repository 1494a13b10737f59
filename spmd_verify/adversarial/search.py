"""Find what `--adversarial` can change in a case: by trying it on one device, in float64.

A change counts where three steps run with it, loss and gradients are finite, and no parameter
loses its gradient. Nothing is known of models: labels are what a loss was seen to ignore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from spmd_verify.adversarial.changes import Changes, is_constant
from spmd_verify.cases.batches import TARGETS, cast_floating
from spmd_verify.cases.model_build import cast_module
from spmd_verify.reference.stepped import eval_outputs
from spmd_verify.seeding import RandomState
from spmd_verify.user_code import one_line

if TYPE_CHECKING:
    from spmd_verify.adversarial.case import AdversarialCase

TRIED_STEPS: Final = 3
# A smaller batch leaves a rank of four without samples.
_FEWEST_SAMPLES: Final = 5
# What cross_entropy and nll_loss ignore where they are not told: says nothing of the labels.
_DEFAULT_IGNORED: Final = -100
_NLL_LOSSES: Final = (
    torch.ops.aten.nll_loss_forward.default,
    torch.ops.aten.nll_loss2d_forward.default,
)
_SHOWN_NAMES: Final = 4


@dataclass(frozen=True)
class LossCall:
    """One nll_loss with integer targets.

    Attributes:
        ignore_index: The label it leaves out.
        ignored: Labels among them that it left out.
        values: The labels it did not leave out, each once.
    """

    ignore_index: int
    ignored: int
    values: frozenset[int]


@dataclass(frozen=True)
class Outcome:
    """What a trial came to.

    Attributes:
        why_not: Why the changes are of no use; empty where they are.
        signal: Parameters that had a gradient other than zero.
        calls: What the loss was computed from.
    """

    why_not: str
    signal: frozenset[str] = frozenset()
    calls: tuple[LossCall, ...] = ()

    @property
    def ignored(self) -> int:
        """Return how many labels were left out in all calls."""
        return sum(call.ignored for call in self.calls)


class _LossCalls(TorchDispatchMode):
    """Keeps what every cross_entropy and nll_loss was given: both end in these operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LossCall] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _NLL_LOSSES:
            target, ignore_index = args[1], int(args[4])
            kept = target[target != ignore_index]
            values = frozenset(kept.unique().tolist())
            ignored = target.numel() - kept.numel()
            self.calls.append(LossCall(ignore_index, ignored, values))
        return func(*args, **(kwargs or {}))


def found(case: AdversarialCase) -> Changes:
    """Return what can be changed in a case, with a note for each kind of change.

    The random state is left as it was. A case that does not run as it is stays as it is.
    """
    outside = RandomState.now()
    try:
        return Search(case).run()
    finally:
        outside.restore()


class Search:
    """Adds one change after the other to those that are known to work."""

    def __init__(self, case: AdversarialCase) -> None:
        """Search for a case whose own changes are still none."""
        self.case = case
        self.changes = Changes()
        self.dtype = torch.float64
        self.known = Outcome("")
        self.notes: list[str] = []

    def run(self) -> Changes:
        """Return the changes that work together."""
        case = self.case
        self.known = self.tried(self.changes)
        if self.known.why_not and case.dtype != self.dtype:
            self.dtype = case.dtype  # a model that does not run in double precision
            self.known = self.tried(self.changes)
        if self.known.why_not:
            return Changes(notes=(f"nothing changed: as it is, {self.known.why_not}",))
        if case.steps > case.settings.steps:
            self.notes.append(f"steps: {case.steps} instead of {case.settings.steps}")
        self._samples()
        self._labels()
        self._parameters()
        why = self.take(can_evaluate=True)
        self._say("evaluation: an eval forward between steps", why)
        return replace(self.changes, notes=tuple(f"adversarial: {note}" for note in self.notes))

    def tried(self, changes: Changes) -> Outcome:
        """Run the case's first steps under changes; nothing raised here leaves it."""
        twin = self.case.under(changes)
        signal: set[str] = set()
        watch = _LossCalls()
        try:
            model = twin.build_model()
            cast_module(model, self.dtype)
            twin.dtype = self.dtype
            optimizer = twin.optimizer(model)
            gradients = _watched_gradients(model)
            for step in range(TRIED_STEPS):
                batch = cast_floating(twin.batch(step), self.dtype)
                twin.seed_step(step)
                gradients.clear()
                with watch:
                    loss = twin.step(model, optimizer, batch)
                wrong = _wrong(loss, gradients)
                if wrong:
                    return Outcome(f"{wrong} in step {step}")
                signal |= {name for name, largest in gradients.items() if largest > 0}
                if changes.can_evaluate:
                    eval_outputs(twin, model)
        except Exception as error:  # noqa: BLE001 - user code on what nobody tried
            return Outcome(one_line(error))
        lost = self.known.signal - signal
        why = f"{_listed(sorted(lost))} would get no gradient" if lost else ""
        return Outcome(why, frozenset(signal), tuple(watch.calls))

    def take(self, **fields: Any) -> str:
        """Take changes over if they work with what there is; return why not, else nothing."""
        changes = replace(self.changes, **fields)
        outcome = self.tried(changes)
        if not outcome.why_not:
            self.changes, self.known = changes, outcome
        return outcome.why_not

    # -- samples -----------------------------------------------------------------------------

    def _samples(self) -> None:
        """Make samples differ by rank and step where they do not."""
        batches = [self.case.batch(step) for step in range(self.case.steps)]
        inputs = self._leaves(batches[0], is_input=True)
        sizes = {len(value) for _, value in self._leaves(batches[0])}
        size = self.case.batch_size
        if sizes != {size} or size < 2:
            self.notes.append("samples: left alone, the batch has no samples to tell apart")
            return
        is_static = all(_equal(batch, batches[0]) for batch in batches[1:])
        is_repeated = bool(inputs) and _num_different(inputs, size) * 2 <= size
        if not (is_static or is_repeated):
            self.notes.append("samples: left alone, they differ by rank and step as they are")
            return
        if is_static:
            why = self.take(is_permuted=True)
            self._say("samples: in another order in every step after the first", why)
        self.changes = replace(self.changes, is_repeated=is_repeated)
        where = "in every step" if is_repeated else "in every step after the first"
        floating = [path for path, value in inputs if _can_scale(value)]
        self._settle("scaled", floating, f"scaled per sample by 1/2 to 1 {where}")
        if is_repeated:
            rolled = [path for path, value in inputs if not value.is_floating_point()]
            self._settle("rolled", rolled, "values moved on within each sample, by its number")
            if not (self.changes.scaled or self.changes.rolled):
                self.notes.append("samples: equal to each other, and nothing in them can vary")

    def _leaves(self, batch: Any, *, is_input: bool = False) -> list[tuple[str, Tensor]]:
        """Return path and value, batch dim first, of every leaf that has one."""
        named = zip(self.case.leaf_paths, pytree.tree_leaves(batch), strict=True)
        dims = self.case.input_batch_dims
        return [
            (path, leaf.movedim(dim, 0))
            for path, leaf in named
            if isinstance(leaf, Tensor) and (dim := dims.get(path)) is not None
            if not (is_input and path.partition(".")[0] == TARGETS)
        ]

    # -- labels ------------------------------------------------------------------------------

    def _labels(self) -> None:
        """Let losses ignore unequally many labels of the ranks."""
        if not self.known.calls:
            self.notes.append("labels: left alone, no loss with an ignore_index takes integers")
            return
        reasons: list[str] = []
        for path, leaf in self._leaves(self.case.batch(0)):
            if leaf.is_floating_point() or leaf.dtype in (torch.bool, torch.uint8):
                continue
            values = frozenset(leaf.unique().tolist())
            fitting = [call for call in self.known.calls if call.values <= values]
            if not fitting:
                continue
            why = self._ignored(path, fitting[0], has_one_each=leaf.numel() == len(leaf))
            reasons += [f"{path}: {why}"] if why else []
        if not self.changes.labels:
            why = reasons[-1] if reasons else "no integer input is among what the loss takes"
            self.notes.append(f"labels: left alone, {why}")

    def _ignored(self, path: str, call: LossCall, *, has_one_each: bool) -> str:
        """Ignore labels of one leaf unequally; return why not."""
        if call.ignore_index == _DEFAULT_IGNORED and has_one_each and not call.ignored:
            return "one label per sample, and cross_entropy's default ignore_index"
        labels = (*self.changes.labels, (path, call.ignore_index))
        for has_empty_part in (True, False):
            changes = replace(self.changes, labels=labels, has_empty_part=has_empty_part)
            outcome = self.tried(changes)
            if not outcome.why_not and outcome.ignored <= self.known.ignored:
                outcome = Outcome("what is written there does not reach the loss as a label")
            if not outcome.why_not:
                break
        if outcome.why_not:
            return outcome.why_not
        self.changes, self.known = changes, outcome
        empty = ", and all of the second half of the batch in step 1" if has_empty_part else ""
        self.notes.append(
            f"labels: {path} is {call.ignore_index}, which the loss ignores, in 1/4 of the first "
            f"sample's labels to 3/4 of the last one's{empty}"
        )
        return ""

    # -- parameters --------------------------------------------------------------------------

    def _parameters(self) -> None:
        """Move parameters that start at a constant."""
        named = self.case.build_model().named_parameters()
        constant = [name for name, parameter in named if is_constant(parameter)]
        if not constant:
            self.notes.append("parameters: left alone, none starts at a constant")
        self._settle("parameters", constant, "moved from a constant by up to 1/16")

    # -- notes -------------------------------------------------------------------------------

    def _settle(self, field: str, names: list[str], done: str) -> None:
        """Take over as many names of one kind of change as work, and say which do not."""
        refused: dict[str, str] = {}
        pending = [names] if names else []
        while pending:
            group = pending.pop()
            why = self.take(**{field: (*getattr(self.changes, field), *group)})
            if why and len(group) > 1:
                half = len(group) // 2
                pending += [group[half:], group[:half]]
            elif why:
                refused[group[0]] = why
        kind = "parameters" if field == "parameters" else "samples"
        taken = getattr(self.changes, field)
        if taken:
            self.notes.append(f"{kind}: {_listed(list(taken))} {done}")
        for name, why in refused.items():
            self.notes.append(f"{kind}: {name} left alone, {why}")

    def _say(self, done: str, why_not: str) -> None:
        """Note what was done, or why it was not."""
        self.notes.append(f"{done}: not possible, {why_not}" if why_not else done)


def with_uneven_size(case: AdversarialCase) -> Changes:
    """Return a case's changes with a batch that no axis of 2 to 4 ranks divides, if it works.

    Only for styles that weigh samples, not ranks: the engine's.
    """
    search, size = Search(case), case.batch_size
    kept = next((n for n in range(size, _FEWEST_SAMPLES - 1, -1) if n % 2 and n % 3), 0)
    if kept == size:
        return case.changes
    outside = RandomState.now()
    try:
        search.changes = case.changes
        search.known = search.tried(case.changes)
        why = search.take(size=kept) if kept else "smaller ones leave a rank of 4 without samples"
    finally:
        outside.restore()
    said = f"{size} samples kept, {why}" if why else f"{kept} samples instead of {size}"
    return replace(search.changes, notes=(*case.changes.notes, f"adversarial: size: {said}"))


def with_even_size(case: AdversarialCase) -> Changes:
    """Return a case's changes with a note that the size of the batch is what it was."""
    note = (
        f"adversarial: size: {case.batch_size} samples kept, styles that are not the engine's may "
        f"weigh every rank alike"
    )
    return replace(case.changes, notes=(*case.changes.notes, note))


def _watched_gradients(model: nn.Module) -> dict[str, float]:
    """Return where the largest element of every finished gradient is written, by parameter."""
    found: dict[str, float] = {}

    def watch(name: str, parameter: Tensor) -> None:
        def finished(ready: Tensor) -> None:
            if ready.grad is not None:
                found[name] = float(ready.grad.detach().abs().amax()) if ready.numel() else 0.0

        if parameter.requires_grad and parameter.is_leaf:
            parameter.register_post_accumulate_grad_hook(finished)

    for name, parameter in model.named_parameters():
        watch(name, parameter)
    return found


def _wrong(loss: Any, gradients: Mapping[str, float]) -> str:
    """Say why a step's loss or gradients are of no use; nothing where they are."""
    if isinstance(loss, Tensor) and not bool(loss.isfinite().all()):
        return "the loss is not finite"
    strange = [name for name, largest in gradients.items() if not math.isfinite(largest)]
    if strange:
        return f"the gradient of {strange[0]} is not finite"
    return "" if any(gradients.values()) else "every gradient is zero"


def _equal(left: Any, right: Any) -> bool:
    """Say whether two batches have equal leaves."""
    pairs = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=True)
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in pairs)


def _num_different(inputs: Sequence[tuple[str, Tensor]], size: int) -> int:
    """Return how many samples are different from each other, [size, ...] each."""
    flat = [
        (torch.view_as_real(v) if v.is_complex() else v).reshape(size, -1).to(torch.float64)
        for _, v in inputs
    ]
    return len(torch.cat(flat, dim=1).unique(dim=0))


def _can_scale(value: Tensor) -> bool:
    """Say whether scaling changes a floating input, and leaves masks what they are."""
    if not value.is_floating_point() or not bool(value.any()):
        return False
    is_finite = bool((value.abs() < torch.finfo(value.dtype).max).all())
    is_mask = bool(((value == 0) | (value == 1)).all()) and bool((value == 0).any())
    return is_finite and not is_mask


def _listed(names: Sequence[str]) -> str:
    """Return the first few of some names and how many more there are."""
    shown = ", ".join(names[:_SHOWN_NAMES])
    more = len(names) - _SHOWN_NAMES
    return f"{shown} and {more} more" if more > 0 else shown
