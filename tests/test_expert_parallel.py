"""The style `ep`: experts on their owners compute what one device does, and what is none stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked import Ranks
from test_run import Events
from torch import Tensor, nn
from torch.nn import functional as F

from spmd_verify import run
from spmd_verify.mesh_spec import parse_mesh
from spmd_verify.options import Options
from spmd_verify.record import Cell
from spmd_verify.styles import token_exchange
from spmd_verify.styles.expert_calls import at_owner
from spmd_verify.styles.expert_owners import Owners
from spmd_verify.styles.expert_stacks import NotDivisible, Stack
from spmd_verify.styles.token_exchange import collected, returned, route, sent, spread

OPERATORS = {
    "all experts see all tokens": lambda x, w, _: torch.einsum("td,edh->teh", x, w),
    "summed over experts": lambda x, w, _: torch.einsum("td,edh,te->th", x, w, x[:, :5]),
    "slots of each expert": lambda x, w, _: torch.bmm(x[:10].reshape(5, 2, 6), w),
    "broadcast product": lambda x, w, _: x @ w.transpose(1, 2).mT + w[:, 0][:, None],
    "one expert": lambda x, w, _: F.linear(x, w[3].T) + x @ w[1],
    "picked": lambda x, w, i: torch.bmm(x[:, None], w[i[:, 0]])[:, 0],
    "picked twice": lambda x, w, i: torch.einsum("td,tkdh->th", x, w[i]),
    "picked and broadcast": lambda x, w, i: x[:, None, None] @ w[i],
}


def operators(name: str) -> float:
    """Return the largest relative error of an operator, its gradients included."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    tokens, whole = torch.randn(13, 6).double(), torch.randn(5, 6, 4).double()
    chosen = torch.randint(0, 5, (13, 2))
    owners = Owners(5, group)
    own = slice(*owners.range())

    def results(local: Tensor, weight: Any) -> list[Tensor]:
        given = tokens.clone().requires_grad_()
        out = OPERATORS[name](given, weight, chosen)
        factors = torch.arange(out.numel()).reshape(out.shape).sin()
        return [out, *torch.autograd.grad((out * factors).sum(), [given, local])]

    leaf = whole.clone().requires_grad_()
    wanted = results(leaf, leaf)
    wanted[2] = wanted[2][own]
    part = whole[own].clone().requires_grad_()
    found = results(part, Stack("weight", part, owners))
    assert all(a.shape == b.shape for a, b in zip(found, wanted, strict=True))
    errors = [a - b for a, b in zip(found, wanted, strict=True) if a.numel()]
    return max(float(error.abs().max()) for error in errors)


@pytest.mark.dist
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_of_stacked_experts(on_ranks: Ranks, name: str) -> None:
    assert max(on_ranks(operators, name, num_ranks=4)) < 1e-13


def undivisible() -> list[str]:
    """Return what is said of operators that work across experts."""
    group = dist.group.WORLD
    assert group is not None
    weight = Stack("weight", torch.ones(2, 3, 3), Owners(4, group))
    said = []
    for wrong in (
        lambda: weight.softmax(0),
        lambda: torch.linalg.norm(weight),
        lambda: F.linear(torch.ones(2, 3), weight),
        lambda: torch.cat([weight, weight]),
        lambda: weight.transpose(0, 1),
        lambda: torch.einsum("td,deh->teh", torch.ones(2, 4), weight) + weight.sum(),
    ):
        with pytest.raises(NotDivisible) as caught:
            wrong()
        said.append(str(caught.value))
    return said


@pytest.mark.dist
def test_operators_across_experts_are_refused_by_name(on_ranks: Ranks) -> None:
    said = on_ranks(undivisible)[0]

    assert said[:3] == [
        f"weight is used by {each}" for each in ("softmax", "linalg_norm", "linear")
    ]


class Odd(nn.Module):
    """An expert that is not row-wise, draws, and returns more than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)

    def forward(self, x: Tensor, *, scale: float) -> dict[str, Any]:
        """Return an output, a scalar, an index and a word."""
        y = F.dropout(self.inner(x) - x.mean(0)[:3], 0.5) * scale
        return {"y": y, "mean": y.mean(), "best": y.argmax(0), "word": "odd", "flat": y.detach()}


def called_at_owner() -> float:
    """Return the largest error of a call at rank 1, gradients and later draws included."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    expert, tokens = Odd().double(), torch.randn(7, 6).double()

    def results(call: Any) -> list[Tensor]:
        torch.manual_seed(3)
        given = tokens.clone().requires_grad_()
        out = call(given)
        assert out["word"] == "odd"
        assert not out["flat"].requires_grad
        loss = out["y"].square().sum() + out["mean"]
        gradient = torch.autograd.grad(loss, given)[0]
        return [gradient, *(out[key] for key in ("y", "mean", "best", "flat")), torch.rand(1)]

    wanted = results(lambda x: expert(x, scale=2.0))
    found = results(lambda x: at_owner(expert, 1, group, (x,), {"scale": 2.0}))
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.dist
def test_an_expert_of_another_rank_need_not_be_row_wise(on_ranks: Ranks) -> None:
    assert max(on_ranks(called_at_owner)) < 1e-14


def exchanges() -> list[bool]:
    """Return whether each exchange is the identity on whole tensors, and its backward too."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    whole = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)
    owners = torch.tensor([1, 0, 1, 1, 0, 1, 1])
    way, ranks = route(owners, group), group.size()
    found = []
    mine = sent(whole, way)
    found.append(torch.equal(mine, whole[owners == group.rank()]))
    for back, factor in (
        (returned(mine * 2, way), 2.0),
        (collected(spread(whole, group) / ranks, group), 1.0),
    ):
        gradient = torch.autograd.grad(back.sum(), whole)[0]
        found += [torch.equal(back, whole * factor), bool((gradient == factor).all())]
    return found


@pytest.mark.dist
def test_exchanges_return_what_was_sent(on_ranks: Ranks) -> None:
    assert all(all(each) for each in on_ranks(exchanges, num_ranks=2))


def gradient_times_ranks() -> float:
    """Return the error of an expert's gradient where what arrives in backward is not divided."""
    plain = token_exchange._Returned.backward
    ranks = dist.get_world_size()
    token_exchange._Returned.backward = staticmethod(
        lambda ctx, *gradients: plain(ctx, *(each * ranks for each in gradients))
    )
    try:
        return operators("picked")
    finally:
        token_exchange._Returned.backward = plain


@pytest.mark.dist
def test_experts_gradients_times_ranks_are_seen(on_ranks: Ranks) -> None:
    assert max(on_ranks(gradient_times_ranks)) > 0.1


HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
TAIL = """
def get_inputs():
    return torch.randn(9, 6)

def loss(output):
    return output.square().mean()
"""
# Top-2 loop, experts without bias that draw, one beside that all tokens see, clipping.
LIST = """
class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.up, self.down = nn.Linear(d, h, bias=False), nn.Linear(h, d, bias=False)

    def forward(self, x):
        return self.down(F.dropout(F.gelu(self.up(x)), 0.2, self.training))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.shared = nn.Linear(6, 5), Expert(6, 4)
        self.experts = nn.ModuleList(Expert(6, 8) for _ in range(5))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = self.shared(x)
        for i, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == i)
            if token.numel():
                out = out.index_add(0, token, expert(x[token]) * weights[token, slot, None])
        return self.head(F.dropout(out, 0.1, self.training))

def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = PENALTY + loss(model(*batch))
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.02)
    optimizer.step()
    return value
"""
MODELS = {
    "list": LIST.replace("PENALTY", "0"),
    "penalty": LIST.replace("PENALTY", "sum(p.square().sum() for p in model.parameters())"),
    # Stacks with capacity: tokens beyond it are dropped.
    "capacity": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 3, bias=False)
        self.up, self.bias = nn.Parameter(torch.randn(3, 6, 8)), nn.Parameter(torch.randn(3, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 6))

    def forward(self, x):
        share, chosen = self.gate(x).softmax(-1).max(-1)
        hot = F.one_hot(chosen, 3)
        slots = F.one_hot((hot.cumsum(0) * hot).clamp(max=4), 5)[..., 1:4].to(x.dtype)
        inside = torch.relu(torch.bmm(torch.einsum("tec,td->ecd", slots, x), self.up)
                            + self.bias[:, None])
        return torch.einsum("tec,ecd,t->td", slots, inside @ self.down, share)
""",
    # One expert of a stack at a time, computed again in backward.
    "loop": """
from torch.utils.checkpoint import checkpoint

class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 8, 6))
        self.down = nn.Parameter(torch.randn(3, 6, 8))

    def forward(self, x, chosen):
        out = torch.zeros_like(x)
        for i in range(3):
            if (chosen == i).any():
                inside = torch.relu(F.linear(x[chosen == i], self.up[i]))
                out[chosen == i] = inside @ self.down[i].T
        return out

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 3), Experts()

    def forward(self, x):
        share, chosen = self.gate(x).softmax(-1).max(-1)
        return checkpoint(self.experts, x, chosen, use_reentrant=False) * share[:, None]
""",
    # Blocks of a chain, and heads side by side that attend to as many entries: no router.
    "heads": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.heads = nn.ModuleList(Head(6, 4) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return torch.cat([head(x) for head in self.heads], -1)

class Head(nn.Linear):
    def forward(self, x):
        return super().forward(x)[:, :3].softmax(-1)
""",
}


@pytest.mark.dist
def test_models_pass_and_say_what_is_spread(tmp_path: Path, root: Path) -> None:
    for name, text in MODELS.items():
        (tmp_path / f"{name}.py").write_text(HEAD + text + TAIL)
    files = [*(str(tmp_path / f"{name}.py") for name in MODELS), str(root / "examples/moe.py")]
    asked = Options(
        targets=tuple(files),
        styles=("ep",),
        mesh=parse_mesh("4"),
        dtype="float64",
        timeout_seconds=60.0,
    )
    cells: dict[str, Cell] = {
        Path(cell.case).stem: cell for cell in run.verify(asked, Events()).cells
    }

    for name, spread_out in {
        "list": "5 modules of experts",
        "capacity": "the stack up, the stack bias, the stack down",
        "loop": "the stack experts.up, the stack experts.down",
        "moe": "the stack layers.0.up",
    }.items():
        assert cells[name].verdict in ("exact", "rounding"), cells[name].message
        assert spread_out in cells[name].message
    assert {row.stage for row in cells["list"].tensors} >= {"clipping", "eval_outputs"}
    layouts = {row.name: row.layout for row in cells["capacity"].tensors}
    assert layouts["up"] == "S(0)"
    for name, reason in {
        "penalty": "outside of the experts' forward",
        "heads": "no experts",
    }.items():
        assert cells[name].verdict == "unsupported"
        assert reason in cells[name].message
