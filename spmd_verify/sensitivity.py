"""The smallest relative error of a gradient that the stored floors would show.

A constant factor `1 + e` moves a tensor by `e ||g||`; it is a mismatch as soon as that is more
than c times the floor, by the tensor norm or by one dim-0 row. The candidate's own rounding
moves the border by at most one floor either way: docs/design.md 3.9 says how that is checked.
"""

from __future__ import annotations

import torch

from spmd_verify.certificate import Sensitivity
from spmd_verify.norms import as_real, row_sums
from spmd_verify.store import Entry, Store
from spmd_verify.verdict import limit


def sensitivities(store: Store) -> list[Sensitivity]:
    """Return what would be seen of every trainable parameter's gradient, in order.

    A factor that stays is seen in the step that shows it best.
    """
    found = []
    for name in store.index.trainable:
        steps = [
            (seen, step)
            for step in range(store.index.steps)
            if (entry := store.entry(step, "gradients", name)) is not None
            and (seen := _smallest_seen(store, entry)) is not None
        ]
        relative, step = min(steps, default=(None, None))
        found.append(Sensitivity(tensor=name, relative=relative, step=step))
    return found


def _smallest_seen(store: Store, entry: Entry) -> float | None:
    """Return the smallest e that one step shows; None where the gradient has no signal."""
    run = "free" if entry.step == 0 else "anchored"
    floor = entry.floors.get(run)
    if floor is None or not entry.has_signal:
        return None
    key = (run, entry.step, entry.stage, entry.name)
    exact = store.exact(*key)
    power = as_real(exact).to(torch.float64).nan_to_num(posinf=0.0, neginf=0.0).square()
    squares = row_sums(power) if exact.ndim else power.sum().reshape(1)
    noise_rows, loud = store.rows("noise", *key), store.rows("undetermined", *key)
    decided = squares if loud is None else squares[~loud]
    norm = float(decided.sum().sqrt())
    seen = [limit(entry.dtype, "tensor") * floor.noise / norm] if norm > 0 else []
    if noise_rows is not None and len(noise_rows) == len(squares):
        rows = limit(entry.dtype, "row") * noise_rows / squares.sqrt()
        seen += [float(ratio) for ratio in rows[squares > 0]]
    return min(seen, default=None)
