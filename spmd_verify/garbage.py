"""When a worker looks for unreachable cycles: not while it captures, and once for each case.

Capturing a step makes a million small objects, nearly all of which stay; looking through them
again and again took a fifth of a capture and two thirds of the first comparison after it
(measured: examples/transformer.py, 2026-11). Torch-free.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collections() -> Iterator[None]:
    """Run the body without looking for cycles: it makes many objects, and hardly any is garbage."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def collecting_later() -> Iterator[None]:
    """Run the body without collections; nothing made so far is looked at before `collect`."""
    with without_collections():
        try:
            yield
        finally:
            gc.freeze()


def collect() -> None:
    """Free every unreachable cycle; what is left is set aside as `preload` does."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
