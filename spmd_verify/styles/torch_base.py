"""What torch's own data-parallel styles share: their axes, their step, the batch they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from spmd_verify.cases.case import LoadedCase
from spmd_verify.cases.training_step import Handling
from spmd_verify.errors import Unsupported
from spmd_verify.style_ids import DATA_AXES
from spmd_verify.styles.rank_batches import refuse_uneven
from spmd_verify.styles.torch_refusals import torch_refuses

# Data axes of the meshes that messages show, by how many there are.
_EXAMPLES: Final[tuple[tuple[str, ...], ...]] = ((), ("dp",), ("replicate", "shard"))


@dataclass(frozen=True)
class TorchRecipe:
    """Base of recipes that wrap a model and leave the case's step as it is.

    Attributes:
        name: Its id.
        is_per_rank: Every rank's loss and statistics are of its own part, and gradients are
            the mean over ranks.
    """

    name: str
    is_per_rank: bool = True

    def wrap(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Return the wrapped model and its optimizer; what raises here is a refusal."""
        raise NotImplementedError

    def apply(self, case: LoadedCase, model: nn.Module, mesh: Any) -> tuple[nn.Module, Any]:
        """Wrap the model.

        Raises:
            Unsupported: `torch-refuses`.
        """
        with torch_refuses(self.name, "wrapping the model"):
            return self.wrap(case, model, mesh)

    def step(
        self, case: LoadedCase, model: nn.Module, optimizer: Any, batch: Any, mesh: Any
    ) -> Any:
        """Run the case's step on this rank's part.

        Raises:
            Unsupported: `torch-refuses`: the rehearsal has run the same step without a wrapper.
        """
        del mesh
        with torch_refuses(self.name, "the wrapped step"):
            return case.step(model, optimizer, batch, self.handling(model))

    def handling(self, model: nn.Module) -> Handling:
        """Return what the style does itself of a variant."""
        return Handling(partial(unsynchronised, model))

    def evaluate(self, case: LoadedCase, model: nn.Module, batch: Any, mesh: Any) -> Any:
        """Run forward."""
        del mesh
        args, kwargs, _ = case.split(batch)
        return model(*args, **kwargs)

    def layout(self, case: LoadedCase, name: str, axes: Mapping[str, int]) -> Any:  # noqa: ARG002
        """Return None: torch's DTensors say themselves, plain tensors are whole."""
        return None

    @property
    def has_gather(self) -> bool:
        """Say no: DTensors carry placements."""
        return False

    @property
    def has_policy(self) -> bool:
        """Say no: only fully_shard casts."""
        return False

    def gather(
        self,
        case: LoadedCase,  # noqa: ARG002 - for styles that use it
        name: str,  # noqa: ARG002 - as above
        parts: list[Tensor],  # noqa: ARG002 - as above
    ) -> Tensor | None:
        """Return None."""
        return None

    def checked_part(self, path: str, size: int, axis: str, ranks: int) -> None:
        """Refuse a batch that does not split evenly."""
        refuse_uneven(self.name, path, size, axis, ranks)


@contextmanager
def unsynchronised(model: nn.Module) -> Iterator[None]:
    """Run a micro-step after which torch's own wrappers exchange no gradients.

    A model without one of them is left alone: it exchanges them as often as it wants.
    """
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def check_axes(style: str, axes: Mapping[str, int], count: int, own: tuple[str, ...] = ()) -> None:
    """Refuse a mesh that is not made of `count` data axes and then the axes `own`.

    Raises:
        Unsupported: `style-axes`.
    """
    names = list(axes)
    has_data = len(names) == count + len(own) and set(names[:count]) <= DATA_AXES
    if has_data and tuple(names[count:]) == own:
        return
    shown = ",".join(f"{name}={size}" for name, size in axes.items())
    data = {0: [], 1: ["one data axis"]}.get(count, [f"{count} data axes"])
    wanted = " and then ".join([*data, *(f"the axis {name}" for name in own)])
    which = f" ({', '.join(sorted(DATA_AXES))})" if count else ""
    example = ",".join(f"{name}=2" for name in (*_EXAMPLES[count], *own))
    raise Unsupported(
        f"The mesh does not fit the style: {style} runs on {wanted}{which}, the mesh is {shown}. "
        f"Use for example --mesh {example}",
        slug="style-axes",
    )
