"""The smallest relative error of a gradient that the stored floors would show.

A constant factor `1 + e` moves a tensor by `e ||g||`; it differs as soon as that is more than c
times the floor, by the tensor norm or by one dim-0 row. The candidate's own rounding moves the
border by at most one floor either way: docs/design.md 3.9 says how that is checked.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spmd_verify.norms import as_real, row_sums
from spmd_verify.planting.certificate import Sensitivity
from spmd_verify.stored.store import Entry, Store
from spmd_verify.verdict import limit

# A value counts as moved where it moves this many times what is allowed: the candidate's own
# rounding then hides nothing of it.
_MOVED = 2.0


def sensitivities(store: Store) -> list[Sensitivity]:
    """Return what would be seen of every trainable parameter's gradient, in order.

    A factor that stays is seen in the step that shows it best.
    """
    found = []
    updates = changes(store, "parameters")
    for name in store.index.trainable:
        steps = [
            (seen, step)
            for step in range(store.index.steps)
            if (entry := store.entry(step, "gradients", name)) is not None
            and (seen := _smallest_seen(store, entry)) is not None
        ]
        relative, step = min(steps, default=(None, None))
        update = updates.get(name)
        found.append(Sensitivity(name, relative, step, None if update == math.inf else update))
    return found


def moved(store: Store, stage: str) -> dict[str, bool]:
    """Return the tensors that the first step writes, and whether that is more than noise.

    A bias in front of a batch normalisation has a gradient of rounding alone: whether it was
    updated at all cannot be told, by anyone.
    """
    return {name: share < 1.0 / _MOVED for name, share in changes(store, stage).items()}


def changes(store: Store, stage: str) -> dict[str, float]:
    """Return, of the tensors that the first step writes, the smallest visible share of that."""
    found = {}
    for name in store.names(0, stage):
        entry, initial = store.entry(0, stage, name), store.entry(0, "initial_state", name)
        assert entry is not None
        if initial is None or not entry.has_signal or "free" not in entry.floors:
            continue
        change = store.exact("free", 0, stage, name) - store.expected(0, "initial_state", name)
        loud = store.rows("undetermined", "free", 0, stage, name)
        squares = _squares(change)
        distance = float((squares if loud is None else squares[~loud]).sum().sqrt())
        allowed = limit(entry.dtype, "tensor") * entry.floors["free"].noise
        found[name] = allowed / distance if distance > 0.0 else math.inf
    return found


def _smallest_seen(store: Store, entry: Entry) -> float | None:
    """Return the smallest e that one step shows.

    None where the gradient has no signal, or is zero within its noise: then not even its double
    would be seen.
    """
    run = "free" if entry.step == 0 else "anchored"
    floor = entry.floors.get(run)
    if floor is None or not entry.has_signal:
        return None
    key = (run, entry.step, entry.stage, entry.name)
    exact = store.exact(*key)
    squares = _squares(exact)
    noise_rows, loud = store.rows("noise", *key), store.rows("undetermined", *key)
    decided = squares if loud is None else squares[~loud]
    norm = float(decided.sum().sqrt())
    seen = [limit(entry.dtype, "tensor") * floor.noise / norm] if norm > 0 else []
    if noise_rows is not None and len(noise_rows) == len(squares):
        rows = limit(entry.dtype, "row") * noise_rows / squares.sqrt()
        seen += [float(ratio) for ratio in rows[squares > 0]]
    smallest = min(seen, default=None)
    return None if smallest is None or smallest >= 1.0 else smallest


def _squares(value: Tensor) -> Tensor:
    """Return the sum of squares of every dim-0 row, float64 [rows]."""
    power = as_real(value).to(torch.float64).nan_to_num(posinf=0.0, neginf=0.0).square()
    return row_sums(power) if value.ndim else power.sum().reshape(1)
