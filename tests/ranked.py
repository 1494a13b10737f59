"""Run a function of a test on real gloo ranks, from a pool that lives as long as the session.

The function is found by name in its module, inside the workers; what it asserts there
fails the test. What it raises on purpose it must catch itself: a worker that raises dies.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from typing import Any

from spmd_verify.runner.failures import Failure
from spmd_verify.runner.pool import Pool
from spmd_verify.runner.worker import Context, job

TIMEOUT_SECONDS = 120.0


@job
def call(_context: Context, payload: bytes) -> bytes:
    """Call the named function on this rank and return its pickled result."""
    module, name, args, kwargs = pickle.loads(payload)
    function = getattr(importlib.import_module(module), name)
    return pickle.dumps(function(*args, **kwargs))


class Ranks:
    """Pools of ranks by size, started when they are first used."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._pools: dict[int, Pool] = {}

    def __call__(
        self, function: Callable[..., Any], *args: Any, num_ranks: int = 2, **kwargs: Any
    ) -> list[Any]:
        """Call `function(*args, **kwargs)` on every rank and return the results in rank order."""
        pool = self._pool(num_ranks)
        payload = pickle.dumps((function.__module__, function.__qualname__, args, kwargs))
        answer = pool.run("ranked:call", payload, timeout_seconds=TIMEOUT_SECONDS)
        if isinstance(answer, Failure):
            trace = answer.error.traceback if answer.error is not None else answer.reason
            raise AssertionError(f"{answer.message}\n{trace}")
        return [pickle.loads(result) for result in answer]

    def stop(self) -> None:
        """Stop all pools."""
        for pool in self._pools.values():
            pool.stop()

    def _pool(self, num_ranks: int) -> Pool:
        if num_ranks not in self._pools:
            self._pools[num_ranks] = Pool(
                num_ranks,
                work_dir=self._folder,
                log_dir=self._folder,
                backend="gloo",
                name=f"ranked{num_ranks}-",
            )
        return self._pools[num_ranks]


def caught(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """Return what a call raises, for comparing on the ranks; None if nothing."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test looks at whatever it is
        return error
    return None
