"""Exact mode: no bit differs under a correct style, one flipped bit is seen, doubt is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from judging import InMode, PermutedContraction, SplitContraction, WiderAccumulation
from torch import Tensor, nn

from spmd_verify import run
from spmd_verify.cases.case import load_case
from spmd_verify.exact.case import ExactCase
from spmd_verify.exact.draws import has_few_bits
from spmd_verify.exact.proof import ExactnessProof
from spmd_verify.exact.reference import make_exact_reference
from spmd_verify.mesh_spec import MeshSpec
from spmd_verify.noise.members import Permuted, Plain
from spmd_verify.options import Options
from spmd_verify.record import Cell, Record
from spmd_verify.reference.trajectory import same_bits
from spmd_verify.reporters import paragraphs, terminal
from spmd_verify.styles.base import StyleContext

CaseWriter = Callable[..., str]
ENGINE = ("replicate", "fully_shard", "default", "dtensor_expand")

MLP = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 16)
        self.third = nn.Linear(16, 3)

    def forward(self, x):
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))

def get_inputs():
    return torch.randn(8, 6)

def get_targets():
    return torch.randn(8, 3)

def loss(output, targets):
    return nn.functional.mse_loss(output, targets)
"""
EMBEDDING = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))

def get_inputs():
    return torch.randint(20, (8, 5))

def loss(output):
    return output.square().mean()
"""
CONVOLUTION = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 4, 3, stride=2, padding=1)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = nn.functional.max_pool2d(torch.relu(self.first(x)), 2)
        x = nn.functional.avg_pool2d(torch.relu(self.second(x)), 2)
        return self.head(x.flatten(1))

def get_inputs():
    return torch.randn(8, 3, 16, 16)

def loss(output):
    return output.square().mean()
"""
ATTENTION = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(ATTEND.transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(x))

def get_inputs():
    return torch.randint(20, (8, 6))

def get_targets():
    return torch.randint(20, (8, 6))

def loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
"""
FUSED = "nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
WRITTEN = "(torch.softmax(q @ k.transpose(-2, -1) / 8**0.5, -1) @ v)"
BATCH_NORM = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.first(x))).mean((2, 3)))

def get_inputs():
    return torch.randn(8, 3, 6, 6)

def loss(output):
    return output.square().mean()
"""
MODELS = {
    "mlp": MLP,
    "embedding": EMBEDDING,
    "convolution": CONVOLUTION,
    "fused attention": ATTENTION.replace("ATTEND", FUSED),
    "written attention": ATTENTION.replace("ATTEND", WRITTEN),
    "batch norm": BATCH_NORM,
}
TABLE = [
    *((name, "float32") for name in MODELS),
    ("mlp", "float64"),
    ("fused attention", "float64"),
]
NOT_EXACT = MLP.replace("torch.relu(self.first(x))", "torch.lgamma(1 + self.first(x) ** 2)")


class Silent:
    """Keeps nothing."""

    def note(self, text: str) -> None:
        pass

    def planned(self, count: int) -> None:
        pass

    def started(self, what: str) -> None:
        pass

    def finished(self, cell: Cell) -> None:
        pass

    def alive(self, style: str, step: int, rank: int) -> None:
        pass


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Record]:
    """Return a function that judges a case in exact mode, styles named by their place."""

    def judged(target: str, *names: str, ranks: tuple[int, ...] = (2,), **options: Any) -> Record:
        if names:
            monkeypatch.setattr(run, "select", lambda *_: names)
        settings = {"steps": 2, "runner": "lockstep", "timeout_seconds": 120.0, **options}
        sweep = tuple(MeshSpec(((None, size),)) for size in ranks)
        asked = Options(targets=(target,), exact=True, mesh_sweep=sweep, **settings)
        return run.verify(asked, Silent())

    return judged


def loaded(path: str, **options: Any) -> ExactCase:
    """Load a case in exact mode."""
    case = load_case(path, overrides={"exact": "yes"}, **options)
    assert isinstance(case, ExactCase)
    return case


def info_of(record: Record) -> Any:
    """Return what was proved of the only case."""
    (info,) = record.unknown["exact"].values()
    return info


# -- the whole way -------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize(("name", "dtype"), TABLE)
def test_no_bit_differs_under_any_engine_style(
    write_case: CaseWriter, judge: Callable[..., Record], name: str, dtype: str
) -> None:
    record = judge(write_case(MODELS[name]), *ENGINE, ranks=(2, 3, 4), dtype=dtype)

    assert info_of(record).doubts == []
    assert [cell.verdict for cell in record.cells] == ["exact"] * 12
    for cell in record.cells:
        assert {row.verdict for row in cell.tensors} <= {"exact", "not_exercised"}
        assert {row.max_ulp for row in cell.tensors} == {0}
        assert cell.exercised is not None
        assert cell.exercised.n == cell.exercised.of


@pytest.mark.dist
@pytest.mark.parametrize(("name", "dtype"), TABLE)
def test_one_flipped_low_bit_in_one_gradient_is_seen(
    write_case: CaseWriter, judge: Callable[..., Record], name: str, dtype: str
) -> None:
    styles = ("planted:FLIPPED", "planted:FLIPPED_SHARD")
    record = judge(write_case(MODELS[name]), *styles, dtype=dtype, steps=1)

    # Every rank flips one: of the whole gradient, or of its shard.
    for cell, most in zip(record.cells, (1, 2), strict=True):
        assert cell.verdict == "mismatch"
        assert cell.first_divergence is not None
        assert cell.first_divergence.stage == "gradients"
        row = paragraphs.first_row(cell)
        assert row is not None
        assert row.max_ulp == 1
        assert 1 <= row.unknown["differing"] <= most


@pytest.mark.dist
def test_real_ranks_give_the_same_bits(
    write_case: CaseWriter, judge: Callable[..., Record]
) -> None:
    model = write_case(MODELS["fused attention"])
    record = judge(model, "replicate", "fully_shard", runner="processes", ranks=(3,))

    assert [cell.verdict for cell in record.cells] == ["exact", "exact"]


@pytest.mark.dist
def test_a_mismatch_and_the_bits_used_are_told(
    write_case: CaseWriter, judge: Callable[..., Record]
) -> None:
    record = judge(write_case(MLP), "planted:FLIPPED", "replicate", steps=1)
    text = terminal.render(record)

    assert re.search(r"\b1 of \d+ elements differ where no bit may, ranks 0-1", text)
    assert ", 1 ulp" in text
    info = info_of(record)
    assert 0 < info.bits <= info.precision == 24
    assert f"{info.bits} of 24 bits used ({info.where})" in text
    assert "surrogates for: mse_loss (model.py:" in text


@pytest.mark.dist
def test_an_operator_that_rounds_makes_the_case_not_exact(
    write_case: CaseWriter, judge: Callable[..., Record]
) -> None:
    path = write_case(NOT_EXACT)
    lines = Path(path).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "lgamma" in text)
    record = judge(path, *ENGINE, "planted:SCALED")
    text = terminal.render(record)

    *clean, scaled = record.cells
    assert [cell.verdict for cell in clean] == ["undetermined"] * 4
    assert scaled.verdict == "mismatch"
    assert info_of(record).doubts[0] == f"lgamma at model.py:{line}"
    assert text.count(f"not exact: lgamma at model.py:{line}") >= 4
    rows = {(row.stage, row.name): row for row in clean[0].tensors if row.step == 0}
    assert rows["gradients", "first.weight"].noise > 0.0
    assert rows["module_outputs", "first"].verdict == "exact"
    assert rows["module_outputs", "first"].noise == 0.0


@dataclass(frozen=True)
class Dividing:
    """A style of which nobody knows whether it divides by the ranks."""

    name: str = "dividing"
    runners: frozenset[str] = frozenset({"lockstep"})

    def build(self, case: Any, context: StyleContext) -> Any:
        raise AssertionError("never reached")


DIVIDING = Dividing()


@pytest.mark.dist
def test_a_style_that_may_divide_is_refused_on_three_ranks(
    write_case: CaseWriter, judge: Callable[..., Record]
) -> None:
    cell = judge(write_case(MLP), "test_exact:DIVIDING", ranks=(3,), steps=1).cells[0]

    assert cell.verdict == "unsupported"
    assert "may divide by the 3 ranks" in str(cell.skipped_reason)


# -- what is drawn -------------------------------------------------------------------------------


def test_every_step_has_its_own_dyadic_state(write_case: CaseWriter) -> None:
    case = loaded(write_case(MLP))
    models = [case.at(step).build_model() for step in (0, 1, 0)]
    weights = [model.second.weight for model in models]
    batches = [case.at(step).batch(0) for step in (0, 1, 0)]

    assert torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[1])
    assert torch.equal(batches[0][0], batches[2][0])
    assert not torch.equal(batches[0][0], batches[1][0])
    assert torch.equal(case.batch(1)[0], batches[1][0])
    assert all(has_few_bits(p) for model in models for p in model.parameters())
    assert all(has_few_bits(leaf) for batch in batches for leaf in batch)


def test_masks_and_integers_are_kept(write_case: CaseWriter) -> None:
    text = MLP.replace("return torch.randn(8, 6)", "return torch.eye(8, 6) * -torch.inf")
    case = loaded(write_case(text.replace("-torch.inf", "0.5")))
    tokens = loaded(write_case(EMBEDDING, name="tokens.py"))
    plain = load_case(tokens.path)

    assert torch.equal(case.batch(0)[0], torch.eye(8, 6) * 0.5)
    assert torch.equal(tokens.batch(0)[0], plain.batch(0)[0])


def test_both_dtypes_begin_with_the_same_values(write_case: CaseWriter) -> None:
    path = write_case(MLP)
    single, double = (loaded(path, dtype=dtype).at(1) for dtype in ("float32", "float64"))
    pairs = [
        *zip(single.build_model().parameters(), double.build_model().parameters(), strict=True),
        *zip(single.batch(0), double.batch(0), strict=True),
    ]

    assert all(torch.equal(left.double(), right) for left, right in pairs)


# -- what is proved ------------------------------------------------------------------------------

ORDERS: dict[str, Callable[[ExactCase], Plain]] = {
    "contraction in 2": lambda _: InMode("c2", lambda: SplitContraction(2)),
    "contraction in 4": lambda _: InMode("c4", lambda: SplitContraction(4, is_reversed=True)),
    "contraction permuted": lambda _: InMode("cp", PermutedContraction),
    "wider accumulation": lambda _: InMode("wide", WiderAccumulation),
    "batch permuted": lambda case: Permuted("permuted", case, 5),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MODELS)
def test_any_order_of_summation_gives_the_same_bits(
    write_case: CaseWriter, name: str, order: str
) -> None:
    case = loaded(write_case(MODELS[name]), steps=1)
    found = make_exact_reference(case)
    assert found.info.doubts == []
    view = case.at(0, found.info.draws[0])
    other = found.device.run(member=ORDERS[order](view)).steps[0]

    for stage in ("loss", "gradients", "parameters", "buffers"):
        for key, value in found.reference.run.steps[0][stage].items():
            assert same_bits(value, other[stage][key]), (stage, key)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [(torch.float64, 53), (torch.float32, 24), (torch.float16, 11), (torch.bfloat16, 8)],
)
def test_a_sum_beyond_the_bits_of_its_dtype_is_refused(dtype: torch.dtype, precision: int) -> None:
    proof = ExactnessProof()
    half = 2.0 ** (precision - 1)
    values = torch.tensor([half, half / 2 + 1], dtype=dtype)
    with proof:
        fits = values.sum()
        refused = torch.cat([values, values]).sum()
        fewer = torch.cat([values, values]).mul(0.5).mul(2.0)

    assert proof.doubt_of(fits) is None
    assert proof.bits == precision
    assert f"needs {precision + 1} of {precision} bits" in str(proof.doubt_of(refused))
    assert proof.doubt_of(fewer) is None


def test_cancelling_sums_are_counted_by_their_terms() -> None:
    """The sum is small and exact here; half of it on another rank would not be."""
    proof = ExactnessProof()
    terms = torch.tensor([2.0**24, 1.0, -(2.0**24)])
    with proof:
        total = terms.sum()

    assert "needs 26 of 24 bits" in str(proof.doubt_of(total))


def test_doubt_spreads_to_everything_computed_from_it() -> None:
    proof = ExactnessProof()
    value = torch.tensor([1.0, 2.0])
    with proof:
        doubtful = torch.lgamma(value)
        flat = doubtful.reshape(1, 2)
        written = torch.zeros(2)
        written[0] = doubtful[1]
        chosen = doubtful.argmax()
        clean = value * 2

    assert all(proof.doubt_of(x) for x in (doubtful, flat, written, chosen))
    assert proof.doubt_of(clean) is None


def test_a_grid_takes_doubt_away_only_off_its_edges() -> None:
    proof = ExactnessProof()

    def gridded(value: Tensor) -> Tensor:
        return torch.floor(torch.tanh(value) * 4 + 0.41421356)

    with proof:
        far = gridded(torch.tensor([0.5, 1.0]))
        near = gridded(torch.atanh(torch.tensor([0.14644661, 0.5])).detach())

    assert proof.doubt_of(far) is None
    assert proof.doubt_of(near) is not None


def test_only_a_forward_and_backward_without_doubt_is_exact(write_case: CaseWriter) -> None:
    """`doubts` lists what reaches a row, by its own line; nothing else."""
    found = make_exact_reference(loaded(write_case(NOT_EXACT), steps=1))

    assert found.info.doubts[0].startswith("lgamma at model.py:")
    floors = {(stage, name) for _, stage, name in found.noise.floors["free"]}
    assert ("gradients", "first.weight") in floors
    assert ("module_outputs", "first") not in floors
    assert isinstance(found.device.case.build_model(), nn.Module)
