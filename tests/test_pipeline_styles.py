"""pp and ddp+pp: chains pass under both schedules, what a pipeline means otherwise is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_run import Events
from test_torch_styles import HEAD
from torch import nn

from spmd_verify import run
from spmd_verify.errors import Unsupported
from spmd_verify.mesh_spec import parse_mesh
from spmd_verify.micro_batches import micro_batch_count
from spmd_verify.options import Options
from spmd_verify.record import Cell
from spmd_verify.styles.pipeline_cuts import balanced, stage_links
from spmd_verify.styles.pipeline_stages import examples, split_model
from spmd_verify.styles.torch_pp import narrow
from spmd_verify.variants import Variants

# Values that travel over several stages, inputs that late stages use, a nested module, buffers,
# parameters that are frozen or unused.
CHAIN = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3))
        self.out = nn.Linear(9, 3)
        self.spare = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x, mask, weights):
        first = x = self.inp(x)
        kept = mask > 0
        for block in self.blocks:
            x = x + block(x) * kept
        return {"logits": self.out(x + first) * self.frozen * self.scale, "weights": weights}

def get_inputs():
    return {"weights": torch.rand(8, 1), "mask": torch.rand(8, 9) - 0.2, "x": torch.randn(8, 6)}

def get_targets():
    return torch.randn(8, 3)

def loss(output, targets):
    return (output["weights"] * (output["logits"] - targets).square()).mean()
"""
SGD = """
def get_optimizer(model):
    named = list(model.named_parameters())
    return torch.optim.SGD([
        {"params": [p for n, p in named if n.endswith("bias")], "lr": 0.05},
        {"params": [p for n, p in named if not n.endswith("bias")], "weight_decay": 0.1},
    ], lr=0.1, momentum=0.9)
"""
# Gradients of a loss that is not divided by the micro-batches.
UNSCALED = (
    CHAIN.replace("def loss", "def mean_loss")
    + """
def loss(output, targets):
    value = mean_loss(output, targets)
    wrong = torch.distributed.is_initialized()
    return value + (value - value.detach()) if wrong else value
"""
)
# The second stage's gradients, doubled on the way.
DOUBLED = (
    CHAIN
    + """
def get_optimizer(params):
    if torch.distributed.is_initialized() and torch.distributed.get_rank() == 1:
        for parameter in params:
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: 2 * gradient)
    return torch.optim.SGD(params, lr=0.1)
"""
)
# A step of the file's own: other names for the inputs, clipping, a learning rate that moves.
OWN_STEP = (
    CHAIN
    + SGD
    + """
def step(model, optimizer, batch):
    output = model(batch["x"], batch["mask"] * 2, weights=batch["weights"])
    value = loss(output, batch["targets"])
    optimizer.zero_grad()
    (2 * value).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    for group in optimizer.param_groups:
        group["lr"] *= 0.9
    optimizer.step()
    assert norm > 0
    return 2 * value.detach()
"""
)
TWICE = OWN_STEP.replace(
    "(2 * value).backward()", "model(**batch_of(batch))\n    (2 * value).backward()"
)
NORMED = CHAIN.replace("nn.Linear(9, 9), nn.Tanh()", "nn.Linear(9, 9), nn.BatchNorm1d(9)")
SUMMED = CHAIN.replace(".mean()", ".sum()")
DROPPING = CHAIN.replace("nn.Tanh()", "nn.Dropout(0.2)")
TWICE += """
def batch_of(batch):
    return {name: batch[name] for name in ("x", "mask", "weights")}
"""
TIED = CHAIN.replace(
    "self.spare = nn.Linear(2, 2)", "self.blocks[2][0].weight = self.blocks[0][0].weight"
)
BRANCHING = CHAIN.replace("kept = mask > 0", "kept = mask > 0 if x.sum() > 0 else mask < 0")

SEMANTIC = {
    "normed": (NORMED, "batch_statistics", "each micro-batch"),
    "summed": (SUMMED, "factor", "the mean over 2 micro-batches that pp takes is 0.5 x"),
    "dropping": (DROPPING, "random_stream", "Dropout"),
}
REFUSED = {
    "tied": (TIED, "blocks.0.0.weight of stage 0 and blocks.2.0.weight of stage 1"),
    "twice": (TWICE, "runs forward, forward, backward, update"),
    "branching": (BRANCHING, "torch.export of the model raises"),
}
FAULTY = {"unscaled": UNSCALED + SGD, "doubled": DOUBLED}

Cells = dict[tuple[str, str], Cell]


def _cells(folder: Path, files: dict[str, str], options: Options) -> Cells:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(HEAD + text)
    targets = tuple(str(folder / f"{name}.py") for name in files)
    record = run.verify(Options(**{**vars(options), "targets": targets}), Events())
    return {(Path(cell.case).stem, cell.style): cell for cell in record.cells}


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Cells:
    """Return the cells of every file under pp with two stages, GPipe."""
    files = {"clean": CHAIN + SGD, "own_step": OWN_STEP, **FAULTY}
    files |= {name: text + SGD for name, (text, *_) in {**SEMANTIC, **REFUSED}.items()}
    options = Options((), ("pp",), parse_mesh("2"), steps=2)
    return _cells(tmp_path_factory.mktemp("pp"), files, options)


@pytest.mark.dist
def test_a_chain_passes(cells: Cells) -> None:
    cell = cells["clean", "pp"]

    assert cell.verdict == "rounding", cell.message
    assert {row.run for row in cell.tensors} == {"free", "anchored"}
    seen = {row.stage for row in cell.tensors if row.verdict in ("exact", "rounding")}
    assert seen >= {"loss", "gradients", "parameters", "optimizer_state"}
    assert "gpipe over 2 micro-batches of 4; stages 0: inp to blocks.0" in cell.message
    assert "no stage uses spare.weight, spare.bias: stage 0 keeps it" in cell.message


@pytest.mark.dist
def test_a_step_of_the_files_own_is_played_around_the_schedule(cells: Cells) -> None:
    cell = cells["own_step", "pp"]
    clipping = {row.name: row.verdict for row in cell.tensors if row.stage == "clipping"}

    assert cell.verdict == "rounding", cell.message
    assert set(clipping) >= {"total_norm", "clip_factor", "inp.weight", "out.weight"}
    assert set(clipping.values()) <= {"exact", "rounding"}


@pytest.mark.dist
@pytest.mark.parametrize("name", SEMANTIC)
def test_what_micro_batches_mean_otherwise_is_semantic(cells: Cells, name: str) -> None:
    cell, (_, kind, text) = cells[name, "pp"], SEMANTIC[name]

    assert cell.verdict == "semantic", cell.message
    assert cell.cause is not None
    assert cell.cause.kind == kind
    assert text in cell.cause.text
    assert "mismatch" not in cell.counts


@pytest.mark.dist
@pytest.mark.parametrize("name", FAULTY)
def test_a_fault_of_a_stage_is_a_mismatch(cells: Cells, name: str) -> None:
    cell = cells[name, "pp"]
    rows = [row for row in cell.tensors if row.stage == "gradients" and row.step == 0]
    wrong = {row.name for row in rows if row.verdict == "mismatch"}

    assert cell.verdict == "mismatch", cell.message
    assert "out.weight" in wrong
    assert ("inp.weight" in wrong) == (name == "unscaled")
    assert cell.cause is not None
    assert (cell.cause.kind, cell.cause.factor) == ("factor", pytest.approx(2.0, rel=1e-3))


@pytest.mark.dist
@pytest.mark.parametrize("name", REFUSED)
def test_what_no_pipeline_takes_is_unsupported(cells: Cells, name: str) -> None:
    cell = cells[name, "pp"]

    assert cell.verdict == "unsupported"
    assert REFUSED[name][1] in cell.message
    assert "\n" not in cell.message


@pytest.mark.dist
def test_clipping_takes_the_norm_of_all_stages(tmp_path: Path) -> None:
    options = Options((), ("pp",), parse_mesh("2"), steps=1, variants=Variants(clip=0.01))
    cell = _cells(tmp_path, {"chain": CHAIN}, options)["chain", "pp"]

    assert cell.verdict == "rounding", cell.message
    low = replace(options, variants=Variants(autocast="bfloat16"))
    refused = _cells(tmp_path, {"chain": CHAIN}, low)["chain", "pp"]
    assert (refused.verdict, "without autocast" in refused.message) == ("unsupported", True)


@pytest.mark.dist
def test_1f1b_on_four_ranks_in_float64(tmp_path: Path) -> None:
    mesh = parse_mesh("4")
    options = Options((), ("pp", "ddp+pp"), mesh, dtype="float64", steps=2, pp_schedule="1f1b")
    found = _cells(tmp_path, {"clean": OWN_STEP, "doubled": DOUBLED}, options)

    for style, stages in (("pp", 4), ("ddp+pp", 2)):
        cell = found["clean", style]
        assert cell.verdict == "rounding", cell.message
        assert f"1f1b over {stages} micro-batches of" in cell.message
        assert found["doubled", style].verdict == "mismatch"


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([1, 1, 1, 1], 2, [(0, 2), (2, 4)]),
        ([9, 1, 1, 1], 3, [(0, 1), (1, 2), (2, 4)]),
        ([0, 5, 5], 2, [(0, 2), (2, 3)]),
        ([5, 0], 2, None),
        ([5], 2, None),
    ],
)
def test_parts_are_balanced_and_none_is_empty(
    sizes: list[int], parts: int, expected: list[tuple[int, int]] | None
) -> None:
    assert balanced(sizes, parts) == expected


@pytest.mark.parametrize(
    ("size", "stages", "expected"), [(8, 2, 2), (8, 3, 4), (7, 2, 7), (2, 4, 2), (6, 4, 6)]
)
def test_micro_batches_are_equal_and_keep_stages_busy(
    size: int, stages: int, expected: int
) -> None:
    assert micro_batch_count(size, stages) == expected


class Nested(nn.Module):
    """Two blocks of two layers each; the second reads what the first was given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers[1](self.layers[0](x)) + x)


def _run(model: nn.Module) -> None:
    model(torch.ones(3, 4))


def test_the_largest_block_is_opened_where_blocks_are_too_few() -> None:
    blocks = ["layers.0", "layers.1"]

    assert stage_links("pp", Nested(), blocks, _run, 2) == [["layers.0"], ["layers.1", "norm"]]
    assert stage_links("pp", Nested(), blocks, _run, 4) == [
        ["layers.0.0"],
        ["layers.0.2"],
        ["layers.1"],
        ["norm"],
    ]
    with pytest.raises(Unsupported, match="no chain of 6 parts.*: 5 "):
        stage_links("pp", Nested(), blocks, _run, 6)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch copies a tree spec of its own
def test_stages_in_a_row_are_the_model() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    expected = Nested()
    model = Nested()
    model.load_state_dict(expected.state_dict())
    split = split_model("pp", model, [["layers.0"], ["layers.1"], ["norm"]], (x,), {})

    for stage in split.stages:
        stage.inputs = [split.leaves((x,), {})]
    sent = examples(split)
    values: tuple[torch.Tensor, ...] = ()
    for stage in split.stages:
        values = stage(*values, micro_batch=torch.tensor([0]))

    torch.testing.assert_close(values[0], expected(x))
    assert [len(each) for each in sent] == [1, 1, 1]
    assert sent[0][0].requires_grad
    buffers = {name: value for stage in split.stages for name, value in stage.named_buffers()}
    assert int(buffers["module.norm.num_batches_tracked"]) == 1  # the examples left no trace
    owned = [{name for name, _ in stage.named_parameters()} for stage in split.stages]
    assert sum(map(len, owned)) == len(list(model.parameters()))


class Towers(nn.Module):
    """Layers that need nothing of each other; torch puts the second stage first."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.tables = nn.ModuleList(nn.Embedding(8, 4) for _ in range(2))
        self.top = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        x, first, second = self.dense(x), self.tables[0](rows), self.tables[1](rows + 1)
        return self.top(x * first * second)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # as above
def test_stages_that_need_nothing_of_each_other_keep_their_order() -> None:
    torch.manual_seed(0)
    model = Towers()
    batch = (torch.randn(3, 4), torch.tensor([1, 0, 5]))
    expected = model(*batch)
    split = split_model("pp", model, [["dense"], ["tables.0"], ["tables.1", "top"]], batch, {})

    values: tuple[torch.Tensor, ...] = ()
    for stage in split.stages:
        stage.inputs = [split.leaves(batch, {})]
        values = stage(*values, micro_batch=torch.tensor([0]))

    torch.testing.assert_close(values[0], expected)


def test_an_optimizer_is_narrowed_to_a_stage() -> None:
    model = Nested()
    first = model.layers[0]
    optimizer = torch.optim.Adagrad(
        [{"params": list(model.layers.parameters())}, {"params": list(model.norm.parameters())}]
    )
    narrow(optimizer, first)

    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 0]
    assert {id(p) for p in optimizer.state} == {id(p) for p in first.parameters()}
