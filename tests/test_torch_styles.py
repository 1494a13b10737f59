"""torch's own styles: clean models pass, and what torch refuses is a refusal, never a crash."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_run import Events
from torch import nn

from spmd_verify import run
from spmd_verify.blocks import blocks_of, repeated
from spmd_verify.cases.case import load_case
from spmd_verify.errors import CaseError
from spmd_verify.mesh_spec import parse_mesh
from spmd_verify.options import Options
from spmd_verify.record import Cell
from spmd_verify.styles.rehearsal import Rehearsal

HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n\n"

# What every case shares where it does not say otherwise.
TAIL = """
def get_inputs():
    return torch.randn(8, 6)

def loss(output):
    return output.square().mean()
"""

BLOCKS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(9, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x) * self.frozen
"""

CLEAN = {
    # Sizes that no number of ranks divides, frozen and clipped parameters.
    "clipped": f"""{BLOCKS}{TAIL}
def step(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(*batch))
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return value
""",
    "tied": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 10, bias=False))
        self.layers[2].weight = self.embed.weight

    def forward(self, tokens):
        return self.layers(self.embed(tokens))

def get_inputs():
    return torch.randint(0, 10, (8, 5))

def get_targets():
    return torch.randint(0, 10, (8, 5))

def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())
""",
    # Nothing ever uses `spare`; `bonus` depends on the step and on nothing else.
    "unused": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(6, 3)
        self.first = nn.Linear(6, 3)

    def forward(self, x):
        return self.first(x)
"""
    + TAIL,
    # Optimizer groups chosen by the names that the model itself has.
    "named_groups": f"""{BLOCKS}{TAIL}
def get_optimizer(model):
    named = list(model.named_parameters())
    return torch.optim.AdamW([
        {{"params": [p for n, p in named if n.startswith("blocks.")], "weight_decay": 0.1}},
        {{"params": [p for n, p in named if not n.startswith("blocks.")], "lr": 1e-2}},
    ])
""",
    "returns_its_loss": BLOCKS.replace("* self.frozen", "* self.frozen).square().mean()").replace(
        "return self.out", "return (self.out"
    )
    + "\ndef get_inputs():\n    return torch.randn(8, 6)\n",
}

# What ranks mean otherwise than one device: kind and what its text names.
SEMANTIC = {
    "norm": (
        BLOCKS.replace(
            "self.out = nn.Linear(9, 3)",
            "self.out = nn.Sequential(nn.BatchNorm1d(9), nn.Linear(9, 3))",
        )
        + TAIL,
        "batch_statistics",
        "BatchNorm1d",
    ),
    "summed": (BLOCKS + TAIL.replace(".mean()", ".sum()"), "factor", "0.5"),
}

# Every rank routes its own samples: an expert is entered on some ranks only.
ROUTED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x):
        out = x.new_zeros(len(x), 3)
        for i, expert in enumerate(self.experts):
            rows = (x[:, 0] > 0) == bool(i)
            if rows.any():
                out[rows] = expert(x[rows])
        return out

def get_inputs():
    x = torch.randn(8, 6)
    x[:, 0] = torch.tensor([-1.0] * 4 + [1.0] * 4)
    return x

def loss(output):
    return output.square().mean()
"""

REFUSED = {
    "other_method": BLOCKS
    + TAIL
    + """
def step(model, optimizer, batch):
    optimizer.zero_grad()
    hidden = model.encode(*batch)
    value = hidden.square().mean()
    value.backward()
    optimizer.step()
    return value

Model.encode = lambda self, x: self.out(self.inp(x))
""",
    "uneven": BLOCKS + TAIL.replace("(8, 6)", "(7, 6)"),
    "scalar": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * self.first(x)
"""
    + TAIL,
    "complex": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x):
        return (self.first(x) * self.phase).abs()
"""
    + TAIL,
}

BROKEN = (
    BLOCKS.replace(
        "x = self.inp(x)",
        'if torch.distributed.is_initialized():\n            raise ValueError("planted")\n'
        "        x = self.inp(x)",
    )
    + TAIL
)

Cells = dict[tuple[str, str], Cell]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """Return every cell of the files above under ddp and fsdp2 on two ranks."""
    folder = tmp_path_factory.mktemp("torch")
    files = {**CLEAN, **REFUSED, "routed": ROUTED, "broken": BROKEN}
    files |= {name: text for name, (text, _, _) in SEMANTIC.items()}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    targets = tuple(str(folder / f"{name}.py") for name in files)
    options = Options(targets=targets, styles=("ddp", "fsdp2"), timeout_seconds=60.0)
    record = run.verify(options, Events())
    return {(Path(cell.case).stem, cell.style): cell for cell in record.cells}


@pytest.mark.dist
@pytest.mark.parametrize("style", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", CLEAN)
def test_clean_models_pass(cells: Cells, name: str, style: str) -> None:
    cell = cells[name, style]

    assert cell.verdict == "rounding", cell.message
    assert {row.run for row in cell.tensors} == {"free", "anchored"}
    seen = {row.stage for row in cell.tensors if row.verdict in ("exact", "rounding")}
    assert seen >= {"inputs", "loss", "gradients", "parameters", "optimizer_state", "eval_outputs"}


@pytest.mark.dist
def test_clipping_is_seen_under_both(cells: Cells) -> None:
    for style in ("ddp", "fsdp2"):
        rows = [row for row in cells["clipped", style].tensors if row.stage == "clipping"]
        assert {row.verdict for row in rows} <= {"exact", "rounding"}
        assert "total_norm" in {row.name for row in rows}


@pytest.mark.dist
def test_fsdp2_shards(cells: Cells) -> None:
    layouts = {row.layout for row in cells["clipped", "fsdp2"].tensors if row.stage == "parameters"}

    assert layouts == {"S(0)"}


@pytest.mark.dist
def test_ddp_is_told_of_unused_parameters(cells: Cells) -> None:
    assert "no gradient on some rank for spare.weight, spare.bias" in cells["unused", "ddp"].message
    assert "find_unused" not in cells["clipped", "ddp"].message


@pytest.mark.dist
@pytest.mark.parametrize("style", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", SEMANTIC)
def test_a_difference_in_meaning_is_semantic(cells: Cells, name: str, style: str) -> None:
    cell, (_, kind, text) = cells[name, style], SEMANTIC[name]

    assert cell.verdict == "semantic"
    assert cell.cause is not None
    assert cell.cause.kind == kind
    assert text in cell.cause.text
    assert cell.cause.remedy
    assert cell.counts["semantic"] > 0
    assert "mismatch" not in cell.counts
    rows = [row for row in cell.tensors if row.verdict == "semantic"]
    assert sum(row.downstream_of is None for row in rows) == 1


@pytest.mark.dist
def test_experts_that_only_some_ranks_enter(cells: Cells) -> None:
    assert cells["routed", "ddp"].verdict == "rounding", cells["routed", "ddp"].message
    refused = cells["routed", "fsdp2"]
    assert refused.verdict == "unsupported"
    assert "in step 0 experts.0.weight has one on ranks 0 only" in refused.message


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "style", "text"),
    [
        ("other_method", "ddp", "'DistributedDataParallel' object has no attribute 'encode'"),
        ("other_method", "fsdp2", "mixed torch.Tensor and DTensor"),
        ("uneven", "ddp", "x has 7 samples, dp has 2 ranks, and ddp weighs every rank alike"),
        ("uneven", "fsdp2", "Sizes that work: 6 or 8"),
        ("scalar", "fsdp2", "scalar"),
    ],
)
def test_what_torch_refuses_is_unsupported(cells: Cells, name: str, style: str, text: str) -> None:
    cell = cells[name, style]

    assert cell.verdict == "unsupported"
    assert text in cell.message
    assert "\n" not in cell.message


@pytest.mark.dist
@pytest.mark.parametrize("style", ["ddp", "fsdp2"])
def test_complex_parameters_are_no_crash(cells: Cells, style: str) -> None:
    assert cells["complex", style].verdict in ("rounding", "unsupported")


@pytest.mark.dist
@pytest.mark.parametrize("style", ["ddp", "fsdp2"])
def test_an_exception_of_the_users_forward_stays_an_error(cells: Cells, style: str) -> None:
    cell = cells["broken", style]

    assert cell.verdict == "error"
    assert "ValueError" in cell.message
    assert "planted" in cell.message


@pytest.mark.dist
def test_hsdp_replicates_and_shards(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(HEAD + CLEAN["clipped"])
    mesh = parse_mesh("replicate=2,shard=2")
    record = run.verify(Options((str(path),), ("hsdp", "ddp"), mesh), Events())

    hybrid, ddp = record.cells[::-1]
    assert hybrid.verdict == "rounding"
    assert {row.layout for row in hybrid.tensors if row.stage == "parameters"} == {"R,S(0)"}
    assert ddp.verdict == "unsupported"
    assert "ddp runs on one data axis" in ddp.message


def test_blocks_are_the_repeated_members_of_containers() -> None:
    model = nn.Module()
    model.stem = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))
    model.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    model.grid = nn.ModuleList(nn.ModuleList([nn.Linear(2, 2)] * 1) for _ in range(2))
    model.heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 2)})

    found = [path for path, _ in repeated(model)]

    assert found == ["layers.0", "layers.1", "heads.a", "heads.b"]


POLICY = f"{HEAD}{BLOCKS}{TAIL}\ndef wrap_policy(model):\n    return "


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("[model.out, model.inp]", ["inp", "out"]),
        ("{nn.Sequential}", ["blocks.0", "blocks.1"]),
        ("['blocks.*.0']", ["blocks.0.0", "blocks.1.0"]),
        ("[]", []),
    ],
)
def test_wrap_policy_names_modules_classes_or_paths(
    tmp_path: Path, policy: str, expected: list[str]
) -> None:
    path = tmp_path / "model.py"
    path.write_text(POLICY + policy + "\n")
    case = load_case(str(path))

    assert blocks_of(case, case.build_model()) == expected


def test_a_policy_that_names_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(POLICY + "[3]\n")
    case = load_case(str(path))

    with pytest.raises(CaseError) as caught:
        blocks_of(case, case.build_model())

    assert caught.value.slug == "wrap-policy"


def test_a_tied_block_stays_with_the_root(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(HEAD + CLEAN["tied"])
    case = load_case(str(path))

    assert blocks_of(case, case.build_model()) == ["layers.0", "layers.1"]


def _rehearsal(*calls: str, gradients: tuple[str, ...] = ("ab", "ab")) -> Rehearsal:
    return Rehearsal(
        ("a", "b"),
        tuple((frozenset(names),) for names in gradients),
        tuple(tuple(names) for names in calls),
    )


def test_a_rehearsal_keeps_the_modules_that_all_ranks_enter_alike() -> None:
    assert _rehearsal("xyz", "xyz").common("xyz") == ["x", "y", "z"]
    assert _rehearsal("xyz", "xy").common("xyz") == ["x", "y"]
    assert _rehearsal("xzy", "yzx").common("xyz") == []
    assert _rehearsal("", "").common("x") == []


def test_a_rehearsal_finds_gradients_that_are_missing() -> None:
    assert _rehearsal("", "").unused() == []
    assert _rehearsal("", "").uneven() is None
    uneven = _rehearsal("", "", gradients=("a", "ab"))
    assert (uneven.unused(), uneven.uneven()) == (["b"], ("b", 0, [1]))
    nowhere = _rehearsal("", "", gradients=("a", "a"))
    assert (nowhere.unused(), nowhere.uneven()) == (["b"], None)
