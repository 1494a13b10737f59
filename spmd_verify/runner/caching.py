"""The reference job's way through the cache: found and proven, or made and kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from spmd_verify.cases.case import LoadedCase
from spmd_verify.exact.case import ExactCase
from spmd_verify.runner.specs import ReferenceReport, ReferenceSpec, decode, encode
from spmd_verify.stopwatch import Stopwatch
from spmd_verify.stored.cache import ReferenceCache
from spmd_verify.stored.key import reference_key, still_holds

Make = Callable[[Stopwatch], ReferenceReport]

USED = "reference of an earlier run, proven by one run on one device"
STALE = (
    "the cached reference is not what one device computes now, though nothing that was compared "
    "has changed; it is made anew"
)


def through_cache(case: LoadedCase, spec: ReferenceSpec, make: Make) -> ReferenceReport:
    """Return what making a reference told, now or in an earlier run; its store is written.

    Args:
        case: The loaded case.
        spec: Where the store is written to, and where the cache is.
        make: Makes the reference and writes its store.

    Raises:
        ReferenceRunError: The single-device run cannot be used.
    """
    stopwatch = Stopwatch()
    # Exact mode draws its states until one is exact: there is no one run that proves them.
    if not spec.cache_path or isinstance(case, ExactCase):
        return _timed(make(stopwatch), stopwatch, [])
    cache, path = ReferenceCache(spec.cache_path), Path(spec.store_path)
    with stopwatch("cache"), case.on_one_device():
        key = reference_key(case)
        kept = cache.take(key, path)
        if kept is not None and still_holds(case, path):
            return _timed(decode(kept, ReferenceReport), stopwatch, [USED])
    if kept is not None:
        cache.remove(key)
        shutil.rmtree(path)
        cache.remarks.append(STALE)
    report = make(stopwatch)
    with stopwatch("cache"):
        cache.put(key, path, encode(report))
    return _timed(report, stopwatch, cache.remarks)


def _timed(report: ReferenceReport, stopwatch: Stopwatch, remarks: list[str]) -> ReferenceReport:
    """Return a report with what is said of this run only."""
    return msgspec.structs.replace(
        report,
        remarks=remarks,
        seconds=stopwatch.seconds,
        cpu_seconds=stopwatch.cpu_seconds,
    )
