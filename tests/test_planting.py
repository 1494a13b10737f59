"""Planting: what a plan draws, and what each fault does to each collective on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from ranked import Ranks
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

from spmd_verify.planting.faults import (
    DRY_RUN,
    EXPECTED_CAUSES,
    HALF,
    KINDS,
    PAYLOAD_KINDS,
    Collective,
    Fault,
)
from spmd_verify.planting.plan import Ground, draw
from spmd_verify.planting.watch import Watch

TWO = {"dp": 2}


def ground(*collectives: Collective, **settings: Any) -> Ground:
    """Return ground of one axis with a parameter and a buffer."""
    defaults: dict[str, Any] = {
        "collectives": collectives,
        "parameters": ["w"],
        "buffers": ["b"],
        "axes": TWO,
        "dtype": "float32",
    }
    return Ground(**{**defaults, **settings})


REDUCED = Collective("all_reduce", "dp", 0, 2, reduction="sum", payload_bytes=16, rows=4)


def test_a_plan_takes_every_kind_in_turn_and_is_the_same_for_a_seed() -> None:
    many = [msgspec.structs.replace(REDUCED, nth=n) for n in range(5)]
    plan = draw(ground(*many), 12, seed=3)

    assert len(plan) == 12
    assert {fault.kind for fault in plan} == set(KINDS) - {"wrong_group"}
    assert plan == draw(ground(*many), 12, seed=3)
    assert plan != draw(ground(*many), 12, seed=4)
    assert len(set(map(repr, plan))) == len(plan)


def test_a_plan_has_each_fault_once_and_no_more() -> None:
    plan = draw(ground(REDUCED), 1000, seed=0)

    expected = [*(set(KINDS) - {"wrong_group"}), "reseed"]  # rank 0's, and another's
    assert sorted(fault.kind for fault in plan) == sorted(expected)


def test_every_kind_has_its_causes() -> None:
    assert {kind.split()[0] for kind in EXPECTED_CAUSES} == set(KINDS)


@pytest.mark.parametrize(
    ("collective", "kinds"),
    [
        (Collective("all_gather", "dp", 0, 2), {"drop", "rescale", "shift", "zero_rank"}),
        (Collective("broadcast", "dp", 0, 2, rows=1), {"drop", "rescale", "zero_rank"}),
        (Collective("send", "dp", 0, 2), {"rescale", "shift", "zero_rank"}),
        (Collective("all_gather", "dp", 0, 2, is_floating=False), set()),
        (
            Collective("all_reduce", "dp", 0, 2, reduction="sum", is_floating=False),
            {"drop", "double", "zero_rank"},
        ),
        (Collective("all_reduce", "dp", 0, 2, reduction="max", rows=1),
         {"drop", "rescale", "zero_rank"}),
        (Collective("all_reduce", "dp", 0, 1, reduction="sum"), set()),
    ],
)  # fmt: skip
def test_a_kind_is_planted_only_where_it_means_something(
    collective: Collective, kinds: set[str]
) -> None:
    plan = draw(ground(collective), 1000, seed=0)

    assert {fault.kind for fault in plan} & set(PAYLOAD_KINDS) == kinds


def test_a_wrong_group_is_another_axis_or_half_of_the_ranks() -> None:
    def groups(axes: dict[str, int], **changes: Any) -> set[str]:
        size = axes.get(changes.get("axis", "dp"), 8)
        collective = msgspec.structs.replace(REDUCED, size=size, **changes)
        plan = draw(ground(collective, axes=axes), 100, seed=0)
        return {fault.group for fault in plan if fault.kind == "wrong_group"}

    assert groups({"dp": 2}) == set()
    assert groups({"dp": 4}) == {HALF}
    assert groups({"dp": 2, "tp": 2}) == {"tp"}
    assert groups({"dp": 2, "tp": 2}, operator="reduce_scatter") == {"tp"}
    assert groups({"dp": 2, "tp": 4}, operator="reduce_scatter") == set()


# -- real ranks --------------------------------------------------------------------------------


def mine() -> Tensor:
    """Return this rank's payload: 10 x rank + [1, 2, 3, 4]."""
    return 10.0 * dist.get_rank() + torch.arange(1.0, 5.0)


def all_reduce() -> Tensor:
    x = mine()
    dist.all_reduce(x)
    return x


def all_reduce_later() -> Tensor:
    x = mine()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x


def all_reduce_functional() -> Tensor:
    return functional.all_reduce(mine(), "sum", dist.group.WORLD)


def all_gather() -> Tensor:
    parts = [torch.zeros(4) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine())
    return torch.cat(parts)


def all_gather_into() -> Tensor:
    out = torch.zeros(4 * dist.get_world_size())
    dist.all_gather_into_tensor(out, mine())
    return out


def all_gather_functional() -> Tensor:
    return functional.all_gather_tensor(mine(), 0, dist.group.WORLD)


def reduce_scatter() -> Tensor:
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, mine())
    return out


def reduce_scatter_functional() -> Tensor:
    return functional.reduce_scatter_tensor(mine(), "sum", 0, dist.group.WORLD)


def broadcast() -> Tensor:
    x = mine()
    dist.broadcast(x, 1)
    return x


def all_to_all() -> Tensor:
    out = torch.zeros(4)
    dist.all_to_all_single(out, mine())
    return out


def sent() -> Tensor:
    out = mine()
    if dist.get_rank() == 0:
        dist.send(mine(), 1)
    else:
        dist.recv(out, 0)
    return out


Call = Callable[[], Tensor]
TOGETHER = [12, 14, 16, 18]
APART = [[1, 2, 3, 4], [11, 12, 13, 14]]
ONE = APART[0] + APART[1]
TWICE = [APART[0] * 2, APART[1] * 2]
CALLS: dict[Call, tuple[str, Any, dict[str, Any]]] = {
    all_reduce: ("all_reduce", [TOGETHER] * 2, {"drop": APART, "rescale": [[24, 28, 32, 36]] * 2,
        "shift": [[18, 12, 14, 16]] * 2, "zero_rank": [APART[0]] * 2}),
    all_reduce_later: ("all_reduce", [TOGETHER] * 2, {"drop": APART,
        "rescale": [[24, 28, 32, 36]] * 2, "zero_rank": [APART[0]] * 2}),
    all_reduce_functional: ("all_reduce", [TOGETHER] * 2, {"drop": APART,
        "rescale": [[24, 28, 32, 36]] * 2, "zero_rank": [APART[0]] * 2}),
    all_gather: ("all_gather", [ONE] * 2, {"drop": TWICE,
        "zero_rank": [[*APART[0], 0, 0, 0, 0]] * 2}),
    all_gather_into: ("all_gather", [ONE] * 2, {"drop": TWICE,
        "shift": [[4, 1, 2, 3, 14, 11, 12, 13]] * 2}),
    all_gather_functional: ("all_gather", [ONE] * 2, {"drop": TWICE,
        "zero_rank": [[*APART[0], 0, 0, 0, 0]] * 2}),
    reduce_scatter: ("reduce_scatter", [[12, 14], [16, 18]], {"drop": [[1, 2], [13, 14]],
        "rescale": [[24, 28], [32, 36]], "zero_rank": [[1, 2], [3, 4]]}),
    reduce_scatter_functional: ("reduce_scatter", [[12, 14], [16, 18]],
        {"drop": [[1, 2], [13, 14]], "rescale": [[24, 28], [32, 36]]}),
    broadcast: ("broadcast", [APART[1]] * 2, {"drop": APART, "zero_rank": [[0] * 4] * 2}),
    all_to_all: ("all_to_all", [[1, 2, 11, 12], [3, 4, 13, 14]], {"drop": APART,
        "zero_rank": [[1, 2, 0, 0], [3, 4, 0, 0]]}),
    sent: ("send", [APART[0], APART[0]], {"rescale": [APART[0], [2, 4, 6, 8]]}),
}  # fmt: skip


def watched(call: Call, fault: Fault) -> tuple[list[float], list[Collective], bool]:
    """Call a collective under a watch: what it gave, what was seen, whether it was changed."""
    watch = Watch(fault, TWO)
    with watch:
        found = call()
    return (found + 0).tolist(), watch.collectives, watch.has_changed


@pytest.mark.dist
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_watch_sees_a_collective_and_leaves_it_alone(on_ranks: Ranks, call: Call) -> None:
    operator, expected, _ = CALLS[call]
    found = on_ranks(watched, call, Fault(DRY_RUN))

    assert [values for values, _, _ in found] == expected
    assert not any(has_changed for _, _, has_changed in found)
    shown = [(c.operator, c.axis, c.nth, c.size) for c in found[0][1]]
    assert shown == [(operator, "dp", 0, 2)]
    assert len(found[1][1]) == (call is not sent)  # who only receives sends nothing


FAULTS = [(call, kind) for call, (_, _, by_kind) in CALLS.items() for kind in by_kind]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("call", "kind"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_does_to_a_collective_what_it_says(on_ranks: Ranks, call: Call, kind: str) -> None:
    operator, _, by_kind = CALLS[call]
    fault = Fault(kind, operator=operator, axis="dp", factor=2.0, rank=1)
    found = on_ranks(watched, call, fault)

    assert [values for values, _, _ in found] == by_kind[kind]
    assert any(has_changed for _, _, has_changed in found)


def second_of_three() -> list[list[float]]:
    """Reduce three times in each of two steps; the fault is in the second reduction."""
    watch = Watch(Fault("drop", operator="all_reduce", axis="dp", nth=1), TWO)
    found = []
    for _ in range(2):
        with watch:
            found.append([float(all_reduce()[0]) for _ in range(3)])
        watch.end_step()
    assert len(watch.collectives) == 3
    return found


@pytest.mark.dist
def test_the_same_collective_is_changed_in_every_step(on_ranks: Ranks) -> None:
    assert on_ranks(second_of_three) == [[[12, 1, 12]] * 2, [[12, 11, 12]] * 2]


def over_axes(group: str) -> tuple[list[str], list[float]]:
    """Reduce over each axis of a 2 x 2 mesh and over all ranks, `dp` in another group."""
    axes = {"dp": 2, "tp": 2}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    watch = Watch(Fault("wrong_group", operator="all_reduce", axis="dp", group=group), axes)
    found = []
    with watch:
        for process_group in (mesh.get_group("dp"), mesh.get_group("tp"), dist.group.WORLD):
            x = torch.tensor(float(1 << dist.get_rank()))
            dist.all_reduce(x, group=process_group)
            found.append(float(x))
    return [c.axis for c in watch.collectives], found


@pytest.mark.dist
def test_groups_are_named_by_axis_and_can_be_exchanged(on_ranks: Ranks) -> None:
    right = [[5, 3, 15], [10, 3, 15], [5, 12, 15], [10, 12, 15]]
    for group, dp in (("tp", [3, 3, 12, 12]), (HALF, [3, 3, 12, 12])):
        found = on_ranks(over_axes, group, num_ranks=4)

        assert [axes for axes, _ in found] == [["dp", "tp", "dp,tp"]] * 4
        assert [values for _, values in found] == [
            [first, *rest] for first, (_, *rest) in zip(dp, right, strict=True)
        ]
