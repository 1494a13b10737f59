"""Hybrid sharding: parts over the inner axis, copies over the outer one, the batch over both."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from lockstep_check import check
from torch import Tensor, nn

import spmd
import spmd.lockstep
from spmd.errors import UsageError
from spmd.layout import Layout, Shard
from spmd.mesh import JoinedMesh, mesh_shape
from spmd_verify.layouts import replicas
from spmd_verify.planting.faults import Fault
from spmd_verify.planting.graph import GraphPlanting

pytestmark = pytest.mark.filterwarnings("ignore")

MESHES = [{"replicate": 2, "shard": 2}, {"replicate": 2, "shard": 3}, {"copies": 3, "parts": 2}]


class Model(nn.Module):
    """Norms over the batch, dropout, and rows that divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 7), nn.Linear(7, 5)
        self.norm, self.drop = nn.BatchNorm1d(7), nn.Dropout(0.2)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, 5]."""
        return self.second(self.drop(torch.tanh(self.norm(self.first(x))))) * self.scale


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """Train one step with a clipped norm, which every part adds to once."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def modes(**options: Any) -> list[tuple[str, Any]]:
    """Return the mode on every mesh."""
    return [(str(mesh), spmd.HybridShard(mesh=mesh, **options)) for mesh in MESHES]


@pytest.mark.parametrize("batch", [7, 3])
def test_any_batch_and_any_rows_give_what_one_device_computes(batch: int) -> None:
    outcomes = check(
        lambda: Model().double(), torch.optim.AdamW, step, [torch.randn(batch, 6).double()],
        modes=modes(),
    )  # fmt: skip
    assert not any(outcome.fallbacks for outcome in outcomes)


def test_an_optimizer_that_needs_whole_matrices_gets_them() -> None:
    layers = lambda: nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(2))).double()  # noqa: E731
    check(layers, torch.optim.Muon, _plain, [torch.randn(7, 6).double()], modes=modes())


def test_every_gradient_is_reduced_inside_and_then_outside_once() -> None:
    mode = spmd.HybridShard(mesh={"replicate": 2, "shard": 4}, custom_passes=())
    make = lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).double()  # noqa: E731
    (outcome,) = check(
        make, torch.optim.AdamW, _plain, [torch.randn(8, 6).double()],
        modes=[("hybrid", mode)],
    )  # fmt: skip
    backward: Counter[tuple[str, str]] = Counter()
    names: list[str] = []
    for node in outcome.graph.graph.nodes:
        if getattr(node.target, "namespace", "") != "_c10d_functional":
            continue
        name = node.target._schema.name.rpartition("::")[2]
        if name != "wait_tensor" and node.meta["region"] == "backward":
            backward[name, node.args[-1]] += 1
            names += node.meta.get("gradient", {}).get("names", ())

    # Four parameters; the second weight is gathered again.
    assert backward == {
        ("reduce_scatter_tensor", "shard"): 4,
        ("all_reduce", "replicate"): 4,
        ("all_gather_into_tensor", "shard"): 1,
    }
    assert sorted(names) == ["0.bias", "0.weight", "2.bias", "2.weight"]


def _plain(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_parts_repeat_along_the_outer_axis() -> None:
    mode = spmd.HybridShard()
    compiled = spmd.lockstep.compile(parallel_mode=mode, mesh=MESHES[0])(step)
    model = Model()
    compiled(model, torch.optim.AdamW(model.parameters()), torch.randn(7, 6))
    placed = compiled.state()["parameters"]["first.weight"]

    assert placed.layout == Layout((Shard(0, (4, 3)),))
    assert [tuple(part.shape) for part in placed.local] == [(4, 6), (3, 6), (4, 6), (3, 6)]
    assert torch.equal(placed.local[0], placed.local[2])
    assert torch.equal(torch.cat(placed.local[:2]), model.first.weight)
    groups = replicas((7, 6), placed.layout, (4,))
    assert list(groups.values()) == [[(0,), (2,)], [(1,), (3,)]]


def test_the_axes_of_a_joined_mesh_keep_their_groups() -> None:
    mesh = mesh_shape(JoinedMesh(MESHES[1]))

    assert mesh.groups_of("replicate_shard") == [[0, 1, 2, 3, 4, 5]]
    assert mesh.groups_of("shard") == [[0, 1, 2], [3, 4, 5]]
    assert mesh.groups_of("replicate") == [[0, 3], [1, 4], [2, 5]]


def test_a_mesh_of_one_axis_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        spmd.HybridShard(mesh={"shard": 4})
    assert caught.value.slug == "hybrid-axes"


@pytest.mark.parametrize(
    ("operator", "axis"), [("reduce_scatter", "shard"), ("all_reduce", "replicate")]
)
def test_a_reduction_left_out_on_either_axis_is_seen(operator: str, axis: str) -> None:
    fault = Fault(kind="drop", operator=operator, axis=axis, nth=1)
    planted = GraphPlanting(fault, {"replicate_shard": 4}, MESHES[0])
    mode = spmd.HybridShard(mesh=MESHES[0], custom_passes=planted)
    layer = lambda: nn.Linear(6, 4).double()  # noqa: E731

    with pytest.raises(AssertionError, match="gradient|parameter"):
        check(layer, torch.optim.AdamW, _plain, [torch.randn(8, 6).double()], modes=[("h", mode)])
