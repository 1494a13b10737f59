"""The noise runs: the reorderings that parallelism may cause, random rounding, flipped signs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.training_step import forward_loss, reduced_in, update
from spmd_verify.noise.rounding import RandomRounding, without_onednn
from spmd_verify.norms import as_real
from spmd_verify.reference.observe import Observer
from spmd_verify.reference.trajectory import StepRecord, named_parameters, optimizers_of

Gradients = dict[str, Tensor]

# Fitted weights of parts are ratios of counts (tokens, samples); a larger denominator than
# this is no count of a test batch. Chosen, not measured: 2^20 tokens.
LARGEST_DENOMINATOR: Final = 1 << 20


@dataclass
class Plain:
    """Base of members: changes nothing."""

    name: str

    def batch(self, batch: Any, step: int) -> Any:  # noqa: ARG002 - for members that use it
        """Return the batch unchanged."""
        return batch

    def around(self, step: int) -> AbstractContextManager[Any]:  # noqa: ARG002 - as above
        """Run the step in no context."""
        return nullcontext()

    def step(
        self,
        case: LoadedCase,  # noqa: ARG002 - as above
        index: int,  # noqa: ARG002 - as above
    ) -> Callable[..., StepRecord] | None:
        """Use the case's step."""
        return None

    def prepare(self, optimizer: Any) -> None:
        """Leave the optimizer as it is."""

    def before(self, model: nn.Module, step: int) -> None:
        """Take no note of the model."""

    def after(self, model: nn.Module, step: int) -> None:
        """Leave the model as it is."""


@dataclass
class Permuted(Plain):
    """The batch in another order; other sums run in another order."""

    case: LoadedCase
    seed: int

    def batch(self, batch: Any, step: int) -> Any:
        """Return the batch with its samples permuted, along each leaf's own batch dim."""
        size = self.case.batch_size_of(batch)
        generator = torch.Generator().manual_seed(self.seed + step)
        order = torch.randperm(size, generator=generator)
        return map_batch(self.case, batch, lambda leaf, dim: leaf.index_select(dim, order))


@dataclass
class Rounded(Plain):
    """Random rounding at operator outputs."""

    seed: int
    dtype: torch.dtype
    islands: dict[str, None] = field(default_factory=dict)

    def prepare(self, optimizer: Any) -> None:
        """Let torch's optimizers work on lists where they may choose: same sums, fewer calls."""
        for single in optimizers_of(optimizer):
            for group in single.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Run the step under its own random rounding.

        oneDNN is off: its recurrent layers are single operators, whose inner sums could not
        be perturbed, and its other kernels order sums differently.
        """
        mode = RandomRounding(self.seed * 1009 + step, self.dtype)
        mode.islands = self.islands
        with without_onednn(), mode:
            yield


@dataclass
class Flipped(Plain):
    """Elements whose update only rounding decides take the opposite update.

    Shows how far such elements can move everything downstream of them.

    Attributes:
        masks: Such elements per step, by parameter.
        share: 0: all of them are mirrored. 1 and -1: a random half of them, and the other.
    """

    masks: Sequence[Mapping[str, Tensor]]
    share: int = 0
    _before: dict[str, Tensor] = field(default_factory=dict)

    def before(self, model: nn.Module, step: int) -> None:
        """Keep the parameters with such elements as they are before a step."""
        live = named_parameters(model)[0]
        self._before = {name: live[name].detach().clone() for name in self.masks[step]}

    def after(self, model: nn.Module, step: int) -> None:
        """Mirror the update of the masked elements, in place."""
        live = named_parameters(model)[0]
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for name, mask in self.masks[step].items():
                value = live[name]
                if self.share:
                    draws = torch.rand(mask.shape, generator=generator) < 0.5
                    mask = mask & (draws if self.share > 0 else ~draws)
                value.copy_(torch.where(mask, 2 * self._before[name] - value, value))


@dataclass
class Split(Plain):
    """The batch in parts whose gradients are weighted and summed in a given order.

    Attributes:
        parts: How many parts.
        is_reversed: Whether the last part is summed first.
        weights: Per step, the weight of each part; found by `fit`.
    """

    parts: int
    is_reversed: bool
    weights: dict[int, list[float]] = field(default_factory=dict)

    def step(self, case: LoadedCase, index: int) -> Callable[..., StepRecord]:
        """Return a step that sums weighted parts; `fit` must have found the weights."""

        def step(model: nn.Module, optimizer: Any, batch: Any) -> StepRecord:
            losses, gradients = self.run_parts(case, model, optimizer, batch)
            weights = self.weights[index]
            order = list(range(len(losses)))[:: -1 if self.is_reversed else 1]
            combined: Gradients = {}
            for name in _names(gradients):
                having = [i for i in order if name in gradients[i]]
                parts = [gradients[i][name] for i in having]
                dtype = parts[0].dtype
                low = reduced_in(case) or dtype
                shares = [(p * weights[i]).to(low) for i, p in zip(having, parts, strict=True)]
                combined[name] = weighted_sum(shares, [1.0] * len(shares)).to(dtype)
            live = named_parameters(model)[0]
            with Observer(model, optimizer, with_module_outputs=False) as observer:
                for name, parameter in live.items():
                    parameter.grad = combined[name].clone() if name in combined else None
                update(case, model, optimizer)
            loss = weighted_sum([losses[i] for i in order], [weights[i] for i in order])
            clipping = observer.record["clipping"]
            return {"loss": {"loss": loss}, "gradients": combined, "clipping": clipping}

        return step

    def run_parts(
        self, case: LoadedCase, model: nn.Module, optimizer: Any, batch: Any
    ) -> tuple[list[Tensor], list[Gradients]]:
        """Run forward and backward of every part; return losses and gradients, unweighted.

        A part that has nothing to take a mean of, such as no label, contributes nothing.
        """
        losses, gradients = [], []
        live = named_parameters(model)[0]
        with case.factory_mode():
            for part in split_batch(case, batch, self.parts):
                for single in optimizers_of(optimizer):
                    single.zero_grad(set_to_none=True)
                loss = forward_loss(case, model, part)
                loss.backward()
                is_empty = bool(loss.isnan().any())
                keep = torch.zeros_like if is_empty else torch.clone
                losses.append(keep(loss.detach()))
                gradients.append(
                    {name: keep(p.grad.detach()) for name, p in live.items() if p.grad is not None}
                )
        return losses, gradients

    def fit(
        self,
        sizes: Sequence[int],
        gradients: Sequence[Gradients],
        expected: StepRecord,
    ) -> list[float] | None:
        """Return the weights with which parts give the whole, or None where none do.

        Tried in order: shares of the batch, one each, and what least squares over all
        gradients gives, as ratios of whole numbers.

        Args:
            sizes: Samples of each part.
            gradients: float64, one mapping per part.
            expected: The float64 reference of this step.
        """
        total = sum(sizes)
        whole = _flat(expected["gradients"], expected["gradients"])
        columns = [_flat(part, expected["gradients"]) for part in gradients]
        matrix = torch.stack(columns, dim=1)
        for weights in ([size / total for size in sizes], [1.0] * len(sizes)):
            if _residual(matrix, whole, weights) < 1e-6:
                return weights
        solved = torch.linalg.lstsq(matrix, whole[:, None]).solution[:, 0].tolist()
        if _residual(matrix, whole, solved) > 1e-6:
            return None
        return [float(Fraction(w).limit_denominator(LARGEST_DENOMINATOR)) for w in solved]


def map_batch(case: LoadedCase, batch: Any, change: Callable[[Tensor, int], Tensor]) -> Any:
    """Apply `change(leaf, batch dim)` to every leaf that has a batch dim."""
    leaves, spec = pytree.tree_flatten(batch)
    changed = [
        leaf if dim is None else change(leaf, dim)
        for leaf, dim in zip(leaves, case.batch_dims, strict=True)
    ]
    return pytree.tree_unflatten(changed, spec)


def split_batch(case: LoadedCase, batch: Any, parts: int) -> list[Any]:
    """Return the parts of a batch by the rule of torch.chunk; fewer where it is small."""
    size = case.batch_size_of(batch)
    step = -(-size // parts)

    def part(start: int) -> Any:
        length = min(step, size - start)
        return map_batch(case, batch, lambda leaf, dim: leaf.narrow(dim, start, length))

    return [part(start) for start in range(0, size, step)]


def part_sizes(size: int, parts: int) -> list[int]:
    """Return the samples of each part that `split_batch` makes."""
    step = -(-size // parts)
    return [min(step, size - start) for start in range(0, size, step)]


def contribution(weights: Sequence[float], values: Sequence[Tensor]) -> Tensor:
    """Return S: the elementwise sum of |weight * part|, any shape."""
    return weighted_sum([value.abs() for value in values], [abs(w) for w in weights])


def weighted_sum(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted sum, added up in the order given, in the values' own dtype."""
    total = values[0] * weights[0]
    for value, weight in zip(values[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


def _names(gradients: Sequence[Gradients]) -> list[str]:
    """Return the names that any part has, in order."""
    return list(dict.fromkeys(name for part in gradients for name in part))


def _flat(gradients: Gradients, like: Gradients) -> Tensor:
    """Return all gradients as one float64 vector, zeros where a name is missing."""
    pieces = [as_real(gradients.get(name, torch.zeros_like(value))) for name, value in like.items()]
    return torch.cat([piece.reshape(-1) for piece in pieces])


def _residual(matrix: Tensor, whole: Tensor, weights: Sequence[float]) -> float:
    """Return what a combination of columns leaves of `whole`, relative to it."""
    combined = matrix @ torch.tensor(weights, dtype=torch.float64)
    return float((combined - whole).norm() / whole.norm().clamp(min=1e-300))
