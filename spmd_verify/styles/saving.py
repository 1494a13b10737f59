"""Save a run's training state and load it into a fresh build, as torch's users do.

Three ways: `state_dict` of the wrapped model and its optimizers, in memory; `checkpoint`, a
distributed checkpoint on disk, which may be loaded on another number of ranks; and `live`, for
styles that have neither, whose tensors are copied one by one.

A distributed checkpoint has pickled metadata. The one read here was written a moment before, by
the same user, into the run's own work folder.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.optim import ZeroRedundancyOptimizer

from spmd_verify.errors import Unsupported
from spmd_verify.layouts import describe
from spmd_verify.reference.trajectory import hyper_parameters, restore_hyper_parameters
from spmd_verify.styles.base import StyleRun
from spmd_verify.styles.eager import EagerRun

STATE_DICT: Final = "state_dict"
CHECKPOINT: Final = "checkpoint"
LIVE: Final = "live"


def ways(run: StyleRun) -> list[str]:
    """Return the ways in which a run can be saved, the first one in memory.

    A checkpoint takes a plain tensor for whole on every rank and keeps one rank's: where one is
    a part, only state dicts are left. It does not gather what an optimizer shards by itself.
    """
    if not isinstance(run, EagerRun):
        return [LIVE]
    is_owned = any(isinstance(each, ZeroRedundancyOptimizer) for each in run.optimizers())
    return [STATE_DICT] if is_owned or _plain_parts(run) else [STATE_DICT, CHECKPOINT]


def _plain_parts(run: EagerRun) -> bool:
    """Say whether this rank holds a part of a parameter or buffer in a plain tensor."""
    for stage in ("parameters", "buffers"):
        for name, seen in run.state()[stage].items():
            is_plain = name in run.layouts or seen.write is not None or seen.layout is None
            if is_plain and describe(seen.layout).strip("R,"):
                return True
    return False


def save(run: StyleRun) -> Any:
    """Return copies of a run's state in memory: state dicts, or its live tensors."""
    if isinstance(run, EagerRun):
        with _refusals(STATE_DICT, "saving"):
            model = run.model.state_dict()
            optimizers = [_state_dict(single) for single in run.optimizers()]
            return copy.deepcopy((model, optimizers))
    tensors = {
        (stage, name): [local.detach().clone() for local in seen.local]
        for stage, found in run.state().items()
        for name, seen in found.items()
    }
    return tensors, hyper_parameters(run.optimizers())


def _state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state dict of an optimizer, whole on every rank.

    One that shards by owner gives it to a single rank, the one it was consolidated on last.
    """
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return optimizer.state_dict()
    found: dict[str, Any] = {}
    for rank in range(dist.get_world_size(optimizer.process_group)):
        optimizer.consolidate_state_dict(to=rank)
        if rank == optimizer.rank:
            found = copy.deepcopy(optimizer.state_dict())
    return found


def load(run: StyleRun, saved: Any) -> None:
    """Put what `save` returned into a fresh run, in place.

    Live tensors are there after a step only: the caller has run one.
    """
    if isinstance(run, EagerRun):
        model, optimizers = saved
        with _refusals(STATE_DICT, "loading"):
            run.model.load_state_dict(model)
            for single, state in zip(run.optimizers(), optimizers, strict=True):
                single.load_state_dict(copy.deepcopy(state))
        return
    tensors, values = saved
    with torch.no_grad():
        for stage, found in run.state().items():
            for name, seen in found.items():
                for local, old in zip(seen.local, tensors[stage, name], strict=True):
                    local.copy_(old)
    restore_hyper_parameters(run.optimizers(), values)


def save_checkpoint(run: EagerRun, folder: str) -> None:
    """Write a distributed checkpoint. Collective.

    Raises:
        Unsupported: `cannot-save`.
    """
    with _refusals(CHECKPOINT, "saving"):
        state_dict_saver.save(_distributed(run), checkpoint_id=folder)


def load_checkpoint(run: EagerRun, folder: str) -> None:
    """Read a distributed checkpoint, written on as many ranks or on others. Collective.

    Raises:
        Unsupported: `cannot-save`.
    """
    with _refusals(CHECKPOINT, "loading"):
        state = _distributed(run)
        state_dict_loader.load(state, checkpoint_id=folder)
        set_state_dict(
            run.model,
            run.optimizers(),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def _distributed(run: EagerRun) -> dict[str, Any]:
    """Return model and optimizer state by the names that no wrapper changes."""
    model, optimizer = get_state_dict(run.model, run.optimizers())
    return {"model": model, "optimizer": optimizer}


@contextmanager
def _refusals(way: str, doing: str) -> Iterator[None]:
    """Turn what torch raises about a state it cannot take into a refusal.

    No number is at stake: where it does not raise, what was loaded is compared.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        said = " ".join(str(error).split())
        raise Unsupported(
            f"Cannot resume by {way}: torch raised {type(error).__name__} while {doing}: {said}. "
            f"Correct the state_dict hooks it names, or leave out --resume-check",
            slug="cannot-save",
        ) from error
