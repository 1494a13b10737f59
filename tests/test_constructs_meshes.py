"""DTensorExpandMode on meshes of two axes, with inputs and weights split in several ways."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from constructs import Body, Construct, parameter, run, sgd, tensor, train
from lockstep_check import check
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

from spmd.mesh import MeshShape
from spmd.parallel_mode import DTensorExpandMode

FLAT = (Shard(0), Replicate())
MESHES = {"2x2": MeshShape(("dp", "tp"), (2, 2)), "3x2": MeshShape(("dp", "tp"), (3, 2))}


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (w.unflatten(-1, (4, 2)).transpose(1, 2) for w in m.qkv(x).chunk(3, -1))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return m.norm(x + m.out(y))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Dropout(0.2), nn.Linear(6, 3))


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (mlp, tensor(4)),
    "attention": (
        lambda: Body(attention, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8), norm=nn.LayerNorm(8)),
        tensor(3, 8),
    ),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
                              nn.MaxPool2d(2), nn.Conv2d(4, 6, 2, bias=False), nn.GroupNorm(2, 6)),
        tensor(2, 4, 4),
    ),
    "embedding": (
        lambda: Body(lambda m, i: m.e(i).sin() @ m.e.weight.t() + m.b, e=nn.Embedding(10, 4),
                     b=parameter(10)),
        lambda n: (torch.randint(0, 10, (n, 3)),),
    ),
    "lstm": (lambda: nn.LSTM(3, 4, batch_first=True), tensor(2, 3)),
    "experts": (
        lambda: Body(lambda m, x: torch.einsum(
            "be,beo->bo", m.g(x).softmax(-1), torch.einsum("bi,eio->beo", x, m.w).relu()),
            g=nn.Linear(4, 4), w=parameter(4, 4, 3)),
        tensor(4),
    ),
    "contrastive": (
        lambda: Body(lambda m, x: F.cross_entropy(m.a(x) @ m.a(x.sin()).t(), torch.arange(x.shape[0])),
                     a=nn.Linear(4, 6)),
        tensor(4),
    ),
}  # fmt: skip

# Inputs by glob, parameters by glob: one placement per axis.
PLACEMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "batch-first-axis": ({"*": FLAT}, {}),
    "batch-second-axis": ({"*": (Replicate(), Shard(0))}, {}),
    "columns": ({"*": FLAT}, {"*weight": (Replicate(), Shard(0)), "*bias": (Replicate(), Shard(0))}),
    "rows": ({"*": FLAT}, {"*weight": (Replicate(), Shard(-1))}),
    "both-axes": ({"*": FLAT}, {"*weight": (Shard(0), Shard(1))}),
    "weights-like-batch": ({"*": FLAT}, {"*": (Shard(0), Replicate())}),
    "features": ({"*": (Shard(0), Shard(-1))}, {}),
}  # fmt: skip


def _weights_fit(model: str, placements: str) -> bool:
    """Whether every parameter the globs name has the dims its placements split."""
    one_dim_weights = model in ("attention", "conv")
    return not (placements == "both-axes" and (one_dim_weights or model == "lstm"))


@pytest.mark.parametrize(
    ("model", "placements", "size"),
    [
        # Alternating sizes halve the time; every model and every placement sees both.
        (m, p, (7, 2)[(i + j) % 2])
        for i, m in enumerate(MODELS)
        for j, p in enumerate(PLACEMENTS)
        if _weights_fit(m, p)
    ],
)
def test_expansion_on_two_axes_equals_one_device(model: str, placements: str, size: int) -> None:
    make, batch = MODELS[model]
    inputs, parameters = PLACEMENTS[placements]
    modes = [
        (
            name,
            DTensorExpandMode(mesh=mesh, input_placements=inputs, parameter_placements=parameters),
        )
        for name, mesh in MESHES.items()
    ]
    torch.manual_seed(size)
    check(make, sgd, train, batch(size), modes=modes)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [8, 7, 2])
def test_expansion_with_sharded_weights_on_one_axis(size: int, dim: int) -> None:
    mode = DTensorExpandMode(
        mesh=MeshShape(("dp",), (4,)), parameter_placements={"*.weight": Shard(dim)}
    )
    check(mlp, sgd, train, (torch.randn(size, 4),), modes=[("expand", mode)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_any_number_of_ranks(ranks: int) -> None:
    make = lambda: nn.Sequential(  # noqa: E731
        nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4), nn.Flatten(), nn.Dropout(0.3), nn.Linear(12, 5)
    )
    check(make, sgd, train, (torch.randn(7, 2, 4),), ranks=(ranks,))


def test_no_activation_is_gathered_where_the_batch_is_split() -> None:
    table = [Construct(name, make, batch) for name, (make, batch) in MODELS.items()]
    for construct in table:
        if construct.name != "contrastive":
            run(construct, 8, modes=("replicate",))
