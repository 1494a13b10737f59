"""From a case to a store: the one call that comes before any rank starts."""

from __future__ import annotations

from pathlib import Path

from spmd_verify.case import LoadedCase
from spmd_verify.noise import measure
from spmd_verify.single import make_reference
from spmd_verify.store import Store, write_store
from spmd_verify.trajectory import named_parameters


def prepare(case: LoadedCase, directory: Path) -> Store:
    """Run a case on one device, measure its noise, and store both.

    Args:
        case: Any loaded case.
        directory: Where the store is written; made if it does not exist.

    Returns:
        A reader of what was written.

    Raises:
        ReferenceRunError: `not-deterministic`, `reference-not-finite`, and what the case's own
            step raises.
    """
    device, reference = make_reference(case)
    noise = measure(device, reference)
    model, _ = device.build()
    write_store(
        directory,
        reference,
        noise,
        dtype=str(case.dtype).removeprefix("torch."),
        trainable=[
            name
            for name, parameter in named_parameters(model)[0].items()
            if parameter.requires_grad
        ],
    )
    return Store(directory)
