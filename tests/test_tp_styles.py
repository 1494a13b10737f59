"""Tensor and sequence parallelism: derived plans and the file's, right ones and broken ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_run import Events
from torch import Tensor, nn

from spmd_verify import run
from spmd_verify.cases.case import load_case
from spmd_verify.errors import CaseError
from spmd_verify.mesh_spec import parse_mesh
from spmd_verify.options import Options
from spmd_verify.record import Cell
from spmd_verify.styles.tp_derive import Entry, agreed
from spmd_verify.styles.tp_plans import described, user_plan
from spmd_verify.styles.tp_trial import can_stay_split, is_tokenwise, linear_of
from spmd_verify.styles.tp_watch import Call, watching

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n"

# Three heads of width 2 on 2 or 4 ranks: nothing divides evenly. The clipping and the penalty
# read parameters outside any module; `scale` and the second use of `gate` do in the wrong one.
ODD = """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x):
        q, k, v = (f(x).view(*x.shape[:-1], 3, 2).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=0)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(2))
        self.attention = Attention()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.attention(self.norms[0](x)) * self.scale
        y = self.norms[1](x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y)) + F.linear(x, self.frozen.weight)
        return self.head(x)

def get_inputs():
    return torch.randint(0, 11, (8, 5))

def get_targets():
    return torch.randint(0, 11, (8, 5))

def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())
    value = value + 0.01 * sum(p.square().sum() for p in model.parameters())
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return value
"""

# A plan of the file's own, as Megatron has it, and what may be wrong with it.
PLANNED = """
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import *

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 4
        self.norm = nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        qkv = self.qkv(self.norm(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in qkv)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.block = nn.Linear(6, 8), Block()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.down(F.relu(self.up(self.norm(self.block(self.inp(x))))))

def get_inputs():
    return torch.randn(8, 6, 6)

def loss(output):
    return output.square().mean()

def tp_plan():
    return {
        "inp": ColwiseParallel(output_layouts=Replicate()),
        "block.qkv": ColwiseParallel(output_layouts=Replicate()),
        "block.out": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
"""
BROKEN = {
    "unreduced": ('"down": RowwiseParallel()', '"down": RowwiseParallel(output_layouts=Partial())'),
    "fused": (
        '"block.qkv": ColwiseParallel(output_layouts=Replicate()),\n'
        '        "block.out": RowwiseParallel(input_layouts=Replicate(), ',
        '"block.qkv": ColwiseParallel(),\n        "block.out": RowwiseParallel(',
    ),
    "partial_norm": (
        '"norm": SequenceParallel(),',
        '"norm": PrepareModuleOutput(output_layouts=Shard(1), desired_output_layouts=Shard(1)),',
    ),
}

CONVOLUTION = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))

    def forward(self, x):
        return self.net(x).mean((2, 3))

def get_inputs():
    return torch.randn(8, 3, 6, 6)

def loss(output):
    return output.square().mean()
"""

Cells = dict[tuple[str, str], Cell]


def _verified(folder: Path, files: dict[str, str], styles: tuple[str, ...], mesh: str) -> Cells:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    targets = tuple(str(folder / f"{name}.py") for name in files)
    options = Options(targets, styles, parse_mesh(mesh), steps=2, timeout_seconds=120.0)
    record = run.verify(options, Events())
    return {(Path(cell.case).stem, cell.style): cell for cell in record.cells}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """Return every cell of the files above under tp and sp on two ranks."""
    folder = tmp_path_factory.mktemp("tp")
    broken = {"convolution": CONVOLUTION}
    for name, (right, wrong) in BROKEN.items():
        assert right in PLANNED
        broken[name] = PLANNED.replace(right, wrong)
    found = _verified(folder, {"odd": ODD, "planned": PLANNED}, ("tp", "sp"), "2")
    return found | _verified(folder, broken, ("tp",), "2")


@pytest.mark.dist
@pytest.mark.parametrize("style", ["tp", "sp"])
@pytest.mark.parametrize("name", ["odd", "planned"])
def test_right_plans_pass(cells: Cells, name: str, style: str) -> None:
    cell = cells[name, style]

    assert cell.verdict == "rounding", cell.message
    seen = {row.stage for row in cell.tensors if row.verdict in ("exact", "rounding")}
    assert seen >= {"inputs", "loss", "gradients", "parameters", "optimizer_state", "eval_outputs"}
    if name == "odd":
        assert {"total_norm", "clip_factor"} <= {row.name for row in cell.tensors}


@pytest.mark.dist
def test_the_derived_plan_is_printed(cells: Cells) -> None:
    text = cells["odd", "sp"].message

    assert "gate column, up column, down row" in text
    assert "attention.q column gathered" in text
    assert "norms.* sequence" in text
    assert "norms" not in cells["odd", "tp"].message


@pytest.mark.dist
def test_parameters_are_split_and_tied_ones_once(cells: Cells) -> None:
    rows = [row for row in cells["odd", "tp"].tensors if row.stage == "parameters"]
    layouts = {row.name: row.layout for row in rows}

    assert layouts["gate.weight"] == "S(0)"
    assert layouts["down.weight"] == layouts["embed.weight"] == "S(1)"
    assert layouts["scale"] == layouts["frozen.weight"] == "R"
    assert "head.weight" not in layouts


@pytest.mark.dist
@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_are_mismatches(cells: Cells, name: str) -> None:
    assert cells[name, "tp"].verdict == "mismatch", cells[name, "tp"].message


@pytest.mark.dist
def test_a_conv_net_has_nothing_to_split(cells: Cells) -> None:
    cell = cells["convolution", "tp"]

    assert cell.verdict == "unsupported"
    assert "has no linear layer and no embedding" in cell.message


@pytest.mark.dist
def test_four_ranks(tmp_path: Path) -> None:
    found = _verified(tmp_path, {"odd": ODD}, ("sp",), "4")
    # fully_shard leaves the root's parameters gathered after forward and the penalty meets both.
    (penalty,) = (line for line in ODD.splitlines() if "0.01" in line)
    files = {"clipped": ODD.replace(penalty, ""), "planned": PLANNED}
    found |= _verified(tmp_path, files, ("fsdp2+tp",), "4")

    for (name, style), cell in found.items():
        assert cell.verdict == "rounding", (name, style, cell.message)
    rows = [row for row in found["clipped", "fsdp2+tp"].tensors if row.stage == "parameters"]
    assert {row.layout for row in rows} == {"S(0),R", "S(0),S(0)", "S(0),S(1)"}


@pytest.mark.dist
def test_exact_mode_leaves_no_bit(tmp_path: Path) -> None:
    path = tmp_path / "planned.py"
    path.write_text(HEAD + PLANNED)
    overrides = {"exact": "yes"}
    options = Options((str(path),), ("tp", "ddp"), parse_mesh("2"), overrides=overrides)
    ddp, tp = run.verify(options, Events()).cells

    assert (ddp.verdict, tp.verdict) == ("exact", "exact")


class Pair(nn.Module):
    """Two linear layers with something between them."""

    def __init__(self, between: str = "none") -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(4, 8), nn.Linear(8, 4), between
        self.scale = nn.Parameter(torch.ones(()))
        self.norm, self.dropout = nn.LayerNorm(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        hidden = torch.relu(self.up(x))
        if self.between == "scaled":
            hidden = hidden * self.scale
        if self.between == "mixed":
            hidden = hidden.flip(-1)
        if self.between in ("norm", "dropout"):
            hidden = getattr(self, self.between)(hidden)
        if self.between == "residual":
            hidden = hidden + torch.cat([x, x], -1)
        return (self.down(hidden), hidden) if self.between == "shown" else self.down(hidden)


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("none", True),
        ("mixed", False),  # rows meet other columns
        ("scaled", False),  # its gradient would be a part on every rank
        ("norm", False),
        ("dropout", False),  # every rank would draw a mask of its own
        ("residual", False),
        ("shown", False),  # the caller would get a part
    ],
)
def test_a_pair_stays_split_only_where_that_is_right(between: str, expected: bool) -> None:
    torch.manual_seed(0)
    model = Pair(between)
    nn.init.zeros_(model.down.weight)  # would hide everything
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with watching(model) as seen:
        model(torch.randn(3, 4))
    up, down = (linear_of(p, model.get_submodule(p), seen.calls[p]) for p in ("up", "down"))
    assert up is not None
    assert down is not None

    assert can_stay_split(model, model, seen.calls[""][0], [up], down, 2) is expected
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_parameters_read_elsewhere_are_told() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) @ self.inner.weight.to(self.inner.weight.dtype)

    model = Outer()
    with watching(model) as seen:
        model(torch.randn(3, 4))

    assert seen.uses == {"inner.weight": {"inner", ""}, "inner.bias": {"inner"}}


def test_norms_are_tokenwise_and_sums_over_tokens_are_not() -> None:
    call = Call((torch.randn(2, 5, 4),), {}, ())

    class Centred(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(1, keepdim=True))

    assert is_tokenwise(nn.LayerNorm(4), call, 1)
    assert not is_tokenwise(Centred(4), call, 1)


def test_groups_that_not_all_ranks_have_fall_apart() -> None:
    pair = {"up": Entry("column", "down"), "down": Entry("row", "down")}
    tied = {"embed": Entry("row scattered", "embed"), "head": Entry("column gathered", "embed")}

    assert agreed([pair | tied, pair | tied]) == pair | tied
    assert agreed([pair | tied, {"down": Entry("row scattered")} | tied]) == tied
    assert agreed([pair, pair | tied, {**pair, "other": Entry("row", "other")}]) == pair
    half = {"up": pair["up"], "head": tied["head"]}
    assert agreed([pair | tied, half]) == {"up": Entry("column gathered")}


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("[1]", "Got list"),
        ("{'up': 3}", "Got 3 for 'up'"),
        ("{'blocks.*': ColwiseParallel()}", "'blocks.*' names no module; there are inp"),
    ],
)
def test_a_plan_that_is_none_is_refused(tmp_path: Path, returned: str, text: str) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        HEAD + PLANNED.partition("def tp_plan")[0] + f"def tp_plan(): return {returned}"
    )
    case = load_case(str(path))

    with pytest.raises(CaseError, match="tp_plan") as caught:
        user_plan(case).styles(case.build_model(), None)

    assert text in str(caught.value)


def test_a_plan_is_said_by_blocks_only_where_they_are_split_alike() -> None:
    blocks = {"blocks.0.up": "column", "blocks.1.up": "column", "head": "row"}
    chain = {"net.0": "column", "net.2": "row"}

    assert described(blocks) == "blocks.*.up column, head row"
    assert described(chain) == "net.0 column, net.2 row"
