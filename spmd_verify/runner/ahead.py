"""Capture a case's first steps once for all ranks, before they are forked: see `family`.

The captures are those of an engine style in lock-step on one rank: what is captured is the
step of one device, whatever style partitions it later. Not for accelerators, which no fork
may follow, nor for exact mode, where no two steps have the same state; nor for a case that asks
whether it runs on ranks: only there it gets the answer that counts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from spmd_verify.cases.case import load_case
from spmd_verify.errors import Unsupported
from spmd_verify.exact.case import ExactCase
from spmd_verify.runner.specs import CaseSpec, decode
from spmd_verify.styles import graph
from spmd_verify.styles.base import StyleContext

# The step that makes the optimizer's state, the next one, and the one that agrees with it.
_STEPS = 3
# Packages that ask whether there is a process group for reasons of their own.
_INTERNAL = ("torch.distributed.", "torch._", "spmd.", "spmd_verify.")


class Ahead:
    """What was captured, and for which case.

    Attributes:
        spec: The case.
        shared: As `StyleContext.shared`.
    """

    def __init__(self, spec: CaseSpec, shared: dict[str, Any]) -> None:
        """Remember both."""
        self.spec = spec
        self.shared = shared


def capture(payload: bytes) -> Ahead | None:
    """Return what the styles of a case can share; None where ranks have to capture themselves.

    Args:
        payload: A `CaseSpec`.
    """
    spec = decode(payload, CaseSpec)
    with _asking() as questions:
        try:
            shared = _captured(spec)
        except Unsupported as refusal:
            print(f"nothing is captured ahead: {refusal.message}", file=sys.stderr)  # noqa: T201
            return None
    return None if shared is None or questions else Ahead(spec, shared)


def _captured(spec: CaseSpec) -> dict[str, Any] | None:
    """Run a case's first steps under the engine; return what was captured in them.

    Raises:
        Unsupported: The engine refuses the case.
    """
    case = load_case(
        spec.address, dtype=spec.dtype, seed=spec.seed, steps=spec.steps, overrides=spec.overrides
    )
    if isinstance(case, ExactCase):
        return None
    context = StyleContext(
        axes={"dp": 1}, coordinates=((0,),), device=torch.device("cpu"), is_lockstep=True
    )
    run = graph.REPLICATE.build(case, context)
    for index in range(min(case.steps, _STEPS)):
        case.seed_step(index)
        run.step(index, case.batch(index))
    case.seed_step(case.steps)
    run.evaluate(case.batch(0))
    return graph.of_any_build(context.shared)


@contextmanager
def _asking() -> Iterator[list[str]]:
    """Collect the modules that ask whether there is a process group; files loaded inside too."""
    asked: list[str] = []
    original = dist.is_initialized

    def is_initialized() -> bool:
        name = str(sys._getframe(1).f_globals.get("__name__", ""))
        if not f"{name}.".startswith(_INTERNAL):
            asked.append(name)
        return original()

    modules: tuple[Any, ...] = (dist, distributed_c10d)
    for module in modules:
        module.is_initialized = is_initialized
    try:
        yield asked
    finally:
        for module in modules:
            module.is_initialized = original
