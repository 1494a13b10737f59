"""Tensor and sequence parallel modes: right whatever the plan, and what they communicate."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from lockstep_check import check
from torch import Tensor, fx, nn
from torch.distributed.tensor import Replicate, Shard

import spmd
import spmd.lockstep
from spmd.errors import UsageError
from spmd_verify.planting.faults import Fault
from spmd_verify.planting.graph import GraphPlanting

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """Attention and a two-layer network, with norms and residuals."""

    def __init__(self, width: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, sequence, width] for the same."""
        h = self.norms[0](x)
        q, k, v = (
            layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class Language(nn.Module):
    """Token embedding tied to the head, and blocks."""

    def __init__(self, blocks: int = 1, width: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, width, padding_idx=3)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, index: Tensor) -> Tensor:
        """Return logits [batch, sequence, 11]."""
        x = self.tokens(index)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def language_step(model: nn.Module, optimizer: Any, index: Tensor, target: Tensor) -> Tensor:
    """Train one step on tokens."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(index).flatten(0, 1), target.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss.detach()


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    """Train one step on numbers."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def tokens(batch: int = 3, length: int = 5) -> tuple[Tensor, Tensor]:
    """Return tokens and targets; 3 among them is the padding."""
    generator = torch.Generator().manual_seed(3)
    index = torch.randint(0, 11, (batch, length), generator=generator)
    index[0, 1] = 3
    return index, torch.randint(0, 11, (batch, length), generator=generator)


def modes(plan: Any = None) -> list[tuple[str, Any]]:
    """Return every mode on the meshes of 2, 3 and 4 ranks it can form."""
    made: list[tuple[str, Any]] = [
        (f"tp{size}", spmd.TensorParallel(plan, mesh={"tp": size})) for size in (2, 3, 4)
    ]
    made += [(f"sp{size}", spmd.SequenceParallel(mesh={"sp": size})) for size in (2, 4)]
    made.append(("dp_tp", spmd.TensorParallel(plan, mesh={"dp": 2, "tp": 2})))
    made.append(("dp_sp", spmd.SequenceParallel(mesh={"dp": 2, "sp": 2})))
    return made


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def double(make: Any) -> Any:
    """Return what makes a model in float64."""
    return lambda: make().double()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Muon])
def test_a_transformer_computes_what_one_device_computes(optimizer: Any) -> None:
    model = double(Language)
    if optimizer is torch.optim.Muon:  # takes matrices only
        matrices = double(lambda: nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))))
        outcomes = check(matrices, optimizer, step, [torch.randn(4, 5, 6).double()], modes=modes())
    else:
        outcomes = check(model, optimizer, language_step, tokens(), modes=modes())
    assert not any(outcome.fallbacks for outcome in outcomes)


def forward_and_backward(graph: fx.GraphModule) -> dict[str, Counter[str]]:
    """Count collectives by region, coalesced ones by what they join."""
    found: dict[str, Counter[str]] = {"forward": Counter(), "backward": Counter()}
    for node in graph.graph.nodes:
        if getattr(node.target, "namespace", "") == "_c10d_functional":
            name = node.target._schema.name.rpartition("::")[2]
            if name != "wait_tensor":
                found[node.meta["region"]][name] += 1
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_block_all_reduces_twice_in_forward_and_twice_in_backward(ranks: int) -> None:
    """The counts of Megatron-LM (Shoeybi et al. 2019, figure 4); weights never move."""
    mode = spmd.TensorParallel(mesh={"tp": ranks})
    blocks = double(lambda: nn.Sequential(nn.Linear(8, 8), Block(), Block()))
    batch = [torch.randn(3, 5, 8).double()]
    (outcome,) = check(blocks, sgd, step, batch, modes=[("tp", mode)])
    found = forward_and_backward(outcome.graph)

    assert found["backward"] == {"all_reduce": 4}
    # What the first layer leaves in columns is gathered for the first norm.
    assert found["forward"] == {"all_reduce": 4, "all_gather_into_tensor": 1}
    kinds = Counter(mode.split.values())
    assert kinds == {"column": 2 + 2 * 8, "row": 4}


def test_weights_and_their_state_live_in_parts_and_products_are_divided() -> None:
    mode = spmd.TensorParallel(mesh={"tp": 4})
    compiled = spmd.lockstep.compile(parallel_mode=mode, mesh={"tp": 4})(language_step)
    torch.manual_seed(0)
    model = Language().double()
    optimizer = torch.optim.AdamW(model.parameters())
    compiled(model, optimizer, *tokens())
    state = compiled.state()

    shapes = {n: [tuple(t.shape) for t in p.local] for n, p in state["parameters"].items()}
    assert shapes["blocks.0.up.weight"] == [(8, 8)] * 4
    assert shapes["blocks.0.down.weight"] == [(8, 8)] * 4
    assert shapes["blocks.0.up.bias"] == [(8,)] * 4
    assert shapes["tokens.weight"] == [(3, 8), (3, 8), (3, 8), (2, 8)]
    moments = state["optimizer_state"]["blocks.0.down.weight.exp_avg"]
    assert [tuple(t.shape) for t in moments.local] == [(8, 8)] * 4


PLANS: list[dict[str, Any]] = [
    {"*": "column"},
    {"*": "row"},
    {"*.up": Shard(0), "*.down.*": "column", "tokens.weight": Shard(1)},
    {"*.norms.*": Shard(0), "*.weight": Replicate(), "tokens.weight": "vocabulary"},
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_any_plan_is_right(plan: dict[str, Any]) -> None:
    named = [pair for pair in modes(plan) if pair[0] in ("tp3", "dp_tp")]
    check(double(Language), sgd, language_step, tokens(), modes=named)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"*.upp": "column"}, "names no parameter with '\\*.upp'"),
        ({"*": "columns"}, "one of column"),
    ],
)
def test_a_plan_that_says_nothing_is_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        check(double(Language), sgd, language_step, tokens(), modes=modes(plan)[:1])
    assert caught.value.slug == "tensor-plan"


def test_what_has_nothing_to_split_is_refused() -> None:
    conv = double(lambda: nn.Conv2d(3, 4, 3))
    images = [torch.randn(4, 3, 6, 6).double()]
    for mode, slug in ((modes()[0], "tensor-plan"), (modes()[3], "sequence-dim")):
        with pytest.raises(UsageError) as caught:
            check(conv, sgd, step, images, modes=[mode])
        assert caught.value.slug == slug


def test_a_refusal_says_what_forward_does_with_the_parameters() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.idle = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    narrow = double(lambda: nn.Linear(6, 1))
    for model, text in (
        (
            double(Scaled),
            r"has a parameter .*: scale \[6\] read by mul.Tensor, idle \[2\] not read",
        ),
        (narrow, r"one row or column to give. Got weight \[1, 6\] 1 along its dim"),
    ):
        with pytest.raises(UsageError, match=text.replace(".*:", r".*Got")) as caught:
            check(model, sgd, step, [torch.randn(4, 6).double()], modes=modes()[:1])
        assert caught.value.slug == "tensor-plan"
    three = spmd.TensorParallel(mesh={"a": 2, "b": 2, "tp": 2})
    with pytest.raises(UsageError) as caught:
        check(double(Language), sgd, language_step, tokens(), modes=[("three", three)])
    assert caught.value.slug == "tensor-axes"


def test_a_rank_without_a_part_of_the_sum_still_counts_its_bias() -> None:
    """Three features over four ranks, where the first rank is the one that counts the bias."""
    split = {"weight": spmd.Shard(1, (0, 2, 1, 0))}
    whole = {"*": Replicate()}
    mode = spmd.DTensorExpandMode(
        mesh={"tp": 4}, parameter_placements=split, input_placements=whole
    )
    x = [torch.randn(2, 3).double()]
    check(lambda: nn.Linear(3, 2).double(), sgd, step, x, modes=[("tp", mode)])


class Patches(nn.Module):
    """Cuts images into patches, and mixes them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 8, 2, stride=2)
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, patches, 8]."""
        return self.block(self.embed(x).flatten(2).transpose(1, 2))


@pytest.mark.parametrize(
    ("make", "x", "split"),
    [
        (lambda: Block(), torch.randn(3, 5, 8), "sequence"),
        (lambda: nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), torch.randn(7, 8), "rows"),
        (Patches, torch.randn(3, 3, 6, 4), "patches"),
    ],
    ids=["sequence", "rows", "patches"],
)
def test_activations_are_split_along_what_counts_positions(
    make: Any, x: Tensor, split: str
) -> None:
    named = [pair for pair in modes() if "sp" in pair[0]]
    outcomes = check(double(make), sgd, step, [x.double()], modes=named)

    products = torch.ops.aten.addmm.default
    for outcome in outcomes[:2]:
        layouts = [
            node.meta["layout"].placements[-1]
            for node in outcome.graph.graph.nodes
            if node.target is products or products in node.args  # ranks without rows skip it
        ]
        assert layouts
        assert all(isinstance(placement, spmd.Shard) for placement in layouts), split


def test_a_causal_mask_counts_from_the_first_query_of_all() -> None:
    class Causal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.mix(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    check(double(Causal), sgd, step, [torch.randn(2, 6, 8).double()], modes=modes())


@pytest.mark.parametrize("index", [-1, 11])
def test_an_index_outside_a_split_vocabulary_is_refused(index: int) -> None:
    from spmd.runtime import own_rows

    with pytest.raises(RuntimeError, match="out of range"):
        own_rows(torch.randn(3, 2), torch.tensor([index]), 3, 11)


@pytest.mark.parametrize("kind", ["tp", "sp"])
def test_a_reduction_left_out_is_seen(kind: str) -> None:
    planted = GraphPlanting(Fault(kind="drop", operator="all_reduce", axis=kind), {kind: 2})
    make = {"tp": spmd.TensorParallel, "sp": spmd.SequenceParallel}[kind]
    mode = make(mesh={kind: 2}, custom_passes=planted)
    network = double(lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))

    with pytest.raises(AssertionError, match="differs from the single-device graph"):
        check(network, sgd, step, [torch.randn(3, 4, 8).double()], modes=[(kind, mode)])
