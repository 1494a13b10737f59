"""The style `cp`: attention over the ranks equals torch's on one device, faults in it do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranked import Ranks
from test_run import Events
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from spmd_verify import run
from spmd_verify.mesh_spec import parse_mesh
from spmd_verify.options import Options
from spmd_verify.record import Cell
from spmd_verify.styles import ring_attention
from spmd_verify.styles.attention_calls import Call, answered
from spmd_verify.styles.attention_products import Products, SplitProducts
from spmd_verify.styles.context_attention import ring, torch_refuses_call, torchs

# Sizes of queries and keys: even, uneven, cross attention, fewer positions than ranks.
LENGTHS = ((16, 16), (13, 13), (5, 9), (2, 3))


def options(rows: int, columns: int, dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Return what attention may be asked for; the second query of the mask sees no key."""
    seen = torch.rand(2, 1, rows, columns) > 0.4
    seen[0, 0, 1] = False
    return {
        "plain": {},
        "causal": {"is_causal": True},
        "scaled": {"scale": 0.7, "is_causal": True},
        "boolean": {"attn_mask": seen},
        "added": {"attn_mask": torch.randn(4, rows, columns, dtype=dtype, requires_grad=True)},
        "by key": {"attn_mask": torch.rand(1, columns) > 0.3},
        "dropout": {"dropout_p": 0.3, "is_causal": True},
    }


def attended(dtype: torch.dtype, lengths: tuple[int, int], name: str) -> list[Tensor]:
    """Return output, gradients and the next random number of one attention, grouped queries."""
    torch.manual_seed(0)
    rows, columns = lengths
    query = torch.randn(2, 4, rows, 8, dtype=dtype, requires_grad=True)
    key, value = (
        torch.randn(2, 2, columns, size, dtype=dtype, requires_grad=True) for size in (8, 6)
    )
    given = options(rows, columns, dtype)[name]
    out = F.scaled_dot_product_attention(query, key, value, enable_gqa=True, **given)
    weights = torch.arange(out.numel(), dtype=dtype).reshape(out.shape).sin()
    masks = [each for each in given.values() if isinstance(each, Tensor) and each.requires_grad]
    wanted = [query, key, value, *masks]
    return [out, *torch.autograd.grad((out * weights).sum(), wanted), torch.rand(1)]


def largest_errors(dtype: torch.dtype) -> dict[str, float]:
    """Return the largest error of the ring by kind of call, and of torch's where it takes one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    group = mesh.get_group()
    worst: dict[str, float] = {}

    def compare(label: str, answer: Callable[[Call], Tensor]) -> None:
        with answered(answer):
            found = attended(dtype, lengths, name)
        errors = [float((a - b).abs().max()) for a, b in zip(found, whole, strict=True)]
        worst[label] = max(worst.get(label, 0.0), *errors)

    def torchs_only(call: Call) -> Tensor:
        assert torch_refuses_call(call, group.size()) is None
        return torchs(call, group, mesh)

    for lengths in LENGTHS:
        for name in options(*lengths, dtype):
            whole = attended(dtype, lengths, name)
            compare(f"ring {name}", lambda call: ring(call, group))
            if (lengths, name) == ((16, 16), "plain"):
                compare("torch", torchs_only)
    return worst


@pytest.mark.dist
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-14), (torch.float32, 5e-6)])
def test_ring_and_torchs_are_attention(on_ranks: Ranks, dtype: torch.dtype, allowed: float) -> None:
    for errors in on_ranks(largest_errors, dtype, num_ranks=4):
        assert len(errors) == 8
        assert {name: error for name, error in errors.items() if error > allowed} == {}


def with_fault(fault: str) -> float:
    """Return the largest relative error of a ring with a fault planted in it."""
    group = dist.group.WORLD
    assert group is not None
    whole = attended(torch.float64, (13, 13), "causal")
    plain_add, plain_pass = ring_attention.Merged.add, ring_attention._passed_on

    def scaled(self: Any, scores: Tensor, values: Tensor, factors: Tensor | None) -> None:
        is_second = bool(self._weight.any())
        plain_add(self, scores, values * (1.1 if is_second else 1.0), factors)

    def not_home(block: Tensor, ring: Any, hop: int) -> Tensor:
        moved = plain_pass(block, ring, hop)
        if moved.shape[-1] > 14 and hop == 0:  # backward: what the other rank has found is lost
            moved[..., 14:] = 0
        return moved

    try:
        if fault == "merge":
            ring_attention.Merged.add = scaled  # type: ignore[method-assign]
        else:
            ring_attention._passed_on = not_home
        with answered(lambda call: ring(call, group)):
            found = attended(torch.float64, (13, 13), "causal")
    finally:
        ring_attention.Merged.add = plain_add  # type: ignore[method-assign]
        ring_attention._passed_on = plain_pass
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, whole, strict=True)
    )


@pytest.mark.dist
@pytest.mark.parametrize("fault", ["merge", "key gradient"])
def test_a_fault_in_the_ring_is_seen(on_ranks: Ranks, fault: str) -> None:
    assert min(on_ranks(with_fault, fault, num_ranks=2)) > 1e-3


def divided_products() -> float:
    """Return the error of products of both kinds, and check that they are counted."""
    group = dist.group.WORLD
    assert group is not None
    torch.manual_seed(0)
    first, second = torch.randn(3, 7, 4).double(), torch.randn(3, 4, 5).double()
    products = Products(frozenset({(3, 7, 4, 5)}), frozenset({(3, 4, 7, 5)}))
    tally: Counter[tuple[str, str]] = Counter()
    whole = first @ second, first.mT @ (first @ second)
    with SplitProducts(products, group, tally):
        rows = first @ second
        found = rows, first.mT @ rows
    assert tally["products", "forward"] == 2
    return max(float((a - b).abs().max()) for a, b in zip(found, whole, strict=True))


@pytest.mark.dist
def test_products_are_divided(on_ranks: Ranks) -> None:
    assert max(on_ranks(divided_products, num_ranks=4)) < 1e-14


HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
TAIL = """
def get_inputs():
    return torch.randn(3, 16, 6)

def loss(output):
    return output.square().mean()
"""
MODELS = {
    # Dropout in the layer's attention; a call under an imported name, causal and not.
    "mixed": """
from torch.nn.functional import scaled_dot_product_attention as attend

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1, batch_first=True)
        self.pair = nn.Linear(6, 6)

    def forward(self, x):
        x = self.layer(x)
        q = x.unflatten(-1, (2, 3)).transpose(1, 2)
        k, v = self.pair(x).unflatten(-1, (2, 3)).transpose(1, 2).chunk(2, 1)
        return attend(q, k, v, enable_gqa=True) + attend(q, k, v, enable_gqa=True, is_causal=True)
""",
    # By hand, and nn.MultiheadAttention with weights: 13 positions.
    "by_hand": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(6, 18)
        self.bias = nn.Parameter(torch.randn(13, 13))
        self.heads = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = x[:, :13]
        q, k, v = self.mixed(x).chunk(3, -1)
        scores = (q @ k.mT + self.bias).masked_fill(torch.ones(13, 13).triu(1).bool(), -torch.inf)
        x = x + F.dropout(scores.softmax(-1), 0.1) @ v
        return self.heads(x, x, x)[0]
""",
    "gated": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.inner = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x):
        return self.gate(x).softmax(-1) @ self.inner
""",
}


@pytest.mark.dist
def test_models_pass_and_say_which_attention_ran(tmp_path: Path, root: Path) -> None:
    for name, text in MODELS.items():
        (tmp_path / f"{name}.py").write_text(HEAD + text + TAIL)
    files = [*(str(tmp_path / f"{name}.py") for name in MODELS), str(root / "examples/conv.py")]
    asked = Options(targets=tuple(files), styles=("cp",), timeout_seconds=60.0)
    cells = {Path(cell.case).stem: cell for cell in run.verify(asked, Events()).cells}

    assert cells["mixed"].verdict == "rounding", cells["mixed"].message
    for text in ("the project's ring in 3 calls (torch's: drops shares)",
                 "torch's context_parallel in 3 calls",
                 "the project's ring in 3 calls (torch's: is causal)"):  # fmt: skip
        assert text in cells["mixed"].message
    assert "beside it" not in cells["mixed"].message
    assert cells["by_hand"].verdict == "rounding", cells["by_hand"].message
    assert "products: 12 forward, 24 backward" in cells["by_hand"].message
    for name in ("gated", "conv"):  # a gate over parameters is a layer
        assert cells[name].verdict == "unsupported"
        assert "no attention" in cells[name].message


@pytest.mark.dist
def test_13_tokens_over_4_ranks(tmp_path: Path, root: Path) -> None:
    text = (root / "examples/transformer.py").read_text().replace("VOCABULARY, NUM_TOKENS, IGNORED "
        "= 64, 12", "VOCABULARY, NUM_TOKENS, IGNORED = 64, 13")  # fmt: skip
    (tmp_path / "model.py").write_text(text)
    asked = Options(
        targets=(str(tmp_path / "model.py"),),
        styles=("cp",),
        mesh=parse_mesh("4"),
        dtype="float64",
        timeout_seconds=60.0,
    )
    cell: Cell = run.verify(asked, Events()).cells[0]

    assert cell.verdict == "rounding", cell.message
    assert "ring in 6 calls" in cell.message
