"""Variants that styles have and one device has not: recomputed activations, torch.compile."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from spmd_verify.blocks import blocks_of
from spmd_verify.cases.case import LoadedCase
from spmd_verify.errors import Unsupported


def recompute_blocks(style: str, case: LoadedCase, model: nn.Module) -> list[str]:
    """Let the blocks of a model recompute their activations in backward, in place.

    Names stay: what is replaced is each block's forward, below its hooks, so that a wrapper
    put around the block later, such as fully_shard, is not entered a second time.

    Returns:
        What the notes say: the blocks; nothing without the variant.

    Raises:
        Unsupported: `nothing-to-checkpoint`.
    """
    if not case.variants.checkpoint_activations:
        return []
    blocks = blocks_of(case, model)
    if not blocks:
        raise Unsupported(
            f"Nothing to checkpoint under {style}: {case.address} has no repeated blocks. Name "
            f"modules in wrap_policy(model)",
            slug="nothing-to-checkpoint",
        )
    for path in blocks:
        block = model.get_submodule(path)
        block.forward = _recomputed(block.forward)
    return [f"activations recomputed in backward: {', '.join(blocks[:3])}"
            f"{', ...' if len(blocks) > 3 else ''}"]  # fmt: skip


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that keeps its inputs only and runs again in backward."""

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


def compile_model(style: str, case: LoadedCase, model: nn.Module) -> list[str]:
    """Compile a wrapped model in place, as `model.compile()` does.

    Returns:
        What the notes say; nothing without the variant.

    Raises:
        Unsupported: `no-compiler`.
    """
    backend = case.variants.torch_compile
    if not backend:
        return []
    compiler = os.environ.get("CXX", "g++")
    on_cpu = next(model.parameters()).device.type == "cpu"
    if backend == "inductor" and on_cpu and not (shutil.which(compiler) or shutil.which("clang++")):
        raise Unsupported(
            f"No C++ compiler for {style}: torch.compile's inductor needs one on CPU, and "
            f"{compiler!r} is not on the path. Install one, or use --torch-compile aot_eager",
            slug="no-compiler",
        )
    # Each rank compiles for itself; workers of its own would outlive the rank's jobs.
    torch._inductor.config.compile_threads = 1
    torch._dynamo.reset()
    model.compile(backend=backend)
    return [f"compiled by {backend}; module outputs are not watched, which would break its graphs"]


def refuse_policy(style: str, case: LoadedCase) -> None:
    """Refuse FSDP2's mixed precision under a style that has none.

    Raises:
        Unsupported: `no-mixed-precision`.
    """
    if case.variants.param_dtype or case.variants.reduce_dtype:
        raise Unsupported(
            f"{style} has no mixed-precision policy: --param-dtype and --reduce-dtype are "
            f"fully_shard's. Use fsdp2 or hsdp, a style of your own, or --autocast",
            slug="no-mixed-precision",
        )


def refuse_compile(style: str, case: LoadedCase) -> None:
    """Refuse torch.compile inside a step that the engine captures itself.

    Raises:
        Unsupported: `captured-step`.
    """
    if case.variants.torch_compile:
        raise Unsupported(
            f"{style} captures the whole step as one graph, in which a compiled module is its "
            f"operators again. Use --torch-compile with an eager style such as ddp",
            slug="captured-step",
        )
