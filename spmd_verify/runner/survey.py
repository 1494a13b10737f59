"""The job that says what a reference has to plant faults in, and what its floors would show."""

from __future__ import annotations

from spmd_verify.runner.specs import Survey, decode, encode
from spmd_verify.runner.worker import Context, job
from spmd_verify.sensitivity import sensitivities
from spmd_verify.store import Store


@job
def survey(_context: Context, payload: bytes) -> bytes:
    """Read a store: its path as msgpack `str -> Survey`."""
    store = Store(decode(payload, str))
    first = [entry for entry in store.index.entries if entry.step == 0]
    return encode(
        Survey(
            parameters=[
                entry.name
                for entry in first
                if entry.stage == "parameters"
                and entry.has_signal
                and entry.name in store.index.trainable
            ],
            buffers=[
                entry.name
                for entry in first
                if entry.stage == "buffers" and entry.has_signal and "float" in entry.dtype
            ],
            sensitivities=sensitivities(store),
        )
    )
