"""The job that says what a reference has to plant faults in, and what its floors would show."""

from __future__ import annotations

from spmd_verify.runner.specs import Survey, decode, encode
from spmd_verify.runner.worker import Context, job
from spmd_verify.sensitivity import moved, sensitivities
from spmd_verify.stored.store import Store


@job
def survey(_context: Context, payload: bytes) -> bytes:
    """Read a store: its path as msgpack `str -> Survey`."""
    store = Store(decode(payload, str))
    trainable = set(store.index.trainable)
    parameters = {n: told for n, told in moved(store, "parameters").items() if n in trainable}
    buffers = moved(store, "buffers")
    return encode(
        Survey(
            parameters=[name for name, is_told in parameters.items() if is_told],
            buffers=[name for name, is_told in buffers.items() if is_told],
            unmoved=[n for n, is_told in {**parameters, **buffers}.items() if not is_told],
            sensitivities=sensitivities(store),
        )
    )
