"""What a rank's part of the batch makes a model do, before any wrapper: without collectives.

torch's wrappers need to know which parameters get no gradient and which modules every rank
enters in the same order; both depend on the data. Each rank trains a model of its own on its
part, and the ranks tell each other what they saw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from spmd_verify.cases.case import LoadedCase
from spmd_verify.reference.naming import Names
from spmd_verify.reference.observe import Observer
from spmd_verify.reference.trajectory import named_parameters


@dataclass(frozen=True)
class Rehearsal:
    """What all ranks did.

    Attributes:
        trainable: Parameters that require a gradient, by first name.
        gradients: Per rank and step, the parameters that got one.
        calls: Per rank, the watched modules whose forward ran, in order, of all steps.
    """

    trainable: tuple[str, ...]
    gradients: tuple[tuple[frozenset[str], ...], ...]
    calls: tuple[tuple[str, ...], ...]

    def unused(self) -> list[str]:
        """Return the trainable parameters without a gradient on some rank in some step."""
        seen = [step for rank in self.gradients for step in rank]
        return [name for name in self.trainable if not all(name in step for step in seen)]

    def uneven(self) -> tuple[str, int, list[int]] | None:
        """Return a parameter that only some ranks have a gradient of: name, step, which ranks."""
        for index, ranks in enumerate(zip(*self.gradients, strict=True)):
            for name in self.trainable:
                having = [rank for rank, step in enumerate(ranks) if name in step]
                if having and len(having) < len(ranks):
                    return name, index, having
        return None

    def common(self, watched: Sequence[str]) -> list[str]:
        """Return the watched modules that every rank enters in the same order."""
        counts = [{name: rank.count(name) for name in watched} for rank in self.calls]
        kept = [
            name
            for name in watched
            if counts[0][name] and all(each[name] == counts[0][name] for each in counts)
        ]
        orders = {tuple(name for name in rank if name in kept) for rank in self.calls}
        return kept if len(orders) == 1 else []


def rehearse(
    case: LoadedCase,
    part: Callable[[Any], Any],
    watched: Callable[[nn.Module], Iterable[str]] = lambda _: (),
) -> Rehearsal:
    """Run the case's steps on this rank's part and tell the other ranks. Collective.

    Args:
        case: The case.
        part: Gives this rank's part of a global batch.
        watched: Gives the paths of the modules whose calls count.
    """
    model = case.build_model()
    optimizer = case.optimizer(model)
    names = Names(model)
    calls: list[str] = []
    for path in watched(model):
        model.get_submodule(path).register_forward_pre_hook(
            lambda _module, _args, path=path: calls.append(path)
        )
    gradients = []
    for index in range(case.steps):
        batch = part(case.batch(index))
        case.seed_step(index)
        with Observer(model, optimizer, names=names, with_module_outputs=False) as observer:
            case.step(model, optimizer, batch)
        gradients.append(frozenset(observer.record["gradients"]))
    trainable = (name for name, value in named_parameters(model)[0].items() if value.requires_grad)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (tuple(gradients), tuple(calls)))
    return Rehearsal(
        tuple(trainable),
        tuple(found for found, _ in everyone),
        tuple(found for _, found in everyone),
    )
