"""`--adversarial`: what it changes, what it leaves alone, and faults that only it shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from spmd_verify import run
from spmd_verify.adversarial.case import AdversarialCase
from spmd_verify.adversarial.changes import Changes, decided, ignored_labels, order
from spmd_verify.adversarial.search import with_even_size, with_uneven_size
from spmd_verify.arguments import parse_arguments
from spmd_verify.cases.case import load_case
from spmd_verify.cases.model_build import evaluating
from spmd_verify.cli import options_from
from spmd_verify.errors import UsageError
from spmd_verify.mesh_spec import MeshSpec
from spmd_verify.options import Options
from spmd_verify.progress import Progress
from spmd_verify.record import Cell

CaseWriter = Callable[..., str]

LINEAR = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(x)
"""
RANDOM = "def get_inputs():\n    return torch.randn(8, 5, 6)\n"
EQUAL = "def get_inputs():\n    return torch.ones(8, 5, 6)\n"
TOKEN_LABELS = """
def get_targets():
    return torch.randint(0, 4, (8, 5))

def loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())
"""


def adversarial(path: str, **options: Any) -> AdversarialCase:
    """Load a case under the override, as every process does."""
    case = load_case(path, overrides={"inputs": "adversarial"}, **options)
    assert isinstance(case, AdversarialCase)
    return case


def notes(case: AdversarialCase) -> str:
    return "\n".join(case.changes.notes)


# -- what is changed ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8,), (8, 5), (7, 3, 2), (9,), (5, 16)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_have_unequal_labels_and_the_last_one_none_in_one_step(
    shape: tuple[int, ...], ranks: int
) -> None:
    for step in range(3):
        mask = ignored_labels(shape, step, has_empty_part=True)
        counts = [int((~part).sum()) for part in mask.chunk(ranks)]
        assert len(set(counts)) > 1
        assert counts[0] > 0
        assert step != 1 or counts[-1] == 0


def test_a_quarter_to_three_quarters_of_a_samples_labels_are_ignored() -> None:
    mask = ignored_labels((9, 64), 0, has_empty_part=False)

    assert mask.sum(1).tolist() == [16, 20, 24, 28, 32, 36, 40, 44, 48]


def test_a_single_sample_keeps_its_labels() -> None:
    assert not ignored_labels((1, 4), 1, has_empty_part=True).any()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_later_steps_have_another_order(size: int) -> None:
    for step in range(1, 6):
        found = order(size, step).tolist()
        assert sorted(found) == list(range(size)) != found


def test_a_batch_that_stays_the_same_is_permuted_and_scaled(write_case: CaseWriter) -> None:
    path = write_case(LINEAR + RANDOM)
    case, plain = adversarial(path), load_case(path)
    first, second = case.batch(0)[0], case.batch(1)[0]

    assert torch.equal(first, plain.batch(0)[0])
    ratios = second / first[order(8, 1)]
    torch.testing.assert_close(ratios, ratios[:, :1, :1].expand_as(ratios))
    assert len(ratios[:, 0, 0].unique()) == 8
    assert not torch.equal(second, case.batch(2)[0])


def test_integers_keep_their_values(write_case: CaseWriter) -> None:
    text = LINEAR.replace("nn.Linear(6, 4)", "nn.Embedding(9, 4)")
    case = adversarial(
        write_case(text + "def get_inputs():\n    return torch.randint(0, 9, (8, 5))\n")
    )

    first, second = case.batch(0)[0], case.batch(1)[0]
    assert torch.equal(second, first[order(8, 1)])


def test_equal_samples_become_different_in_every_step(write_case: CaseWriter) -> None:
    ids = "def get_inputs():\n    return torch.ones(6, 3), torch.arange(5).repeat(6, 1)\n"
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.table = nn.Linear(3, 4), nn.Embedding(5, 4)

    def forward(self, x, ids):
        return self.fc(x) + (self.table(ids) * torch.arange(1.0, 6)[:, None]).sum(1)
"""
    case = adversarial(write_case(text + ids))

    for step in range(3):
        x, rolled = case.batch(step)
        assert len(x.unique(dim=0)) == 6
        assert len(rolled.unique(dim=0)) == 5
        assert torch.equal(rolled.sort(1).values, torch.arange(5).repeat(6, 1))


def test_batches_that_differ_are_left_alone(write_case: CaseWriter) -> None:
    text = "def get_inputs(step=0):\n    return torch.randn(8, 5, 6) + step\n"
    path = write_case(LINEAR + text)
    case, plain = adversarial(path), load_case(path)

    assert "differ by rank and step as they are" in notes(case)
    assert all(torch.equal(case.batch(s)[0], plain.batch(s)[0]) for s in range(3))


def test_masks_are_not_scaled_and_gradients_of_inputs_stay_asked_for(
    write_case: CaseWriter,
) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x, mask):
        assert x.is_leaf and x.requires_grad
        return self.fc(x) * mask

def get_inputs():
    return torch.randn(8, 6, requires_grad=True), (torch.arange(8) % 3 > 0).float()[:, None]
"""
    case = adversarial(write_case(text))

    assert case.changes.scaled == ("x",)
    assert set(case.batch(1)[1].unique().tolist()) == {0.0, 1.0}


def test_labels_of_tokens_are_ignored_unequally(write_case: CaseWriter) -> None:
    case = adversarial(write_case(LINEAR + RANDOM + TOKEN_LABELS))

    assert case.changes.labels == (("targets", -100),)
    for step in range(3):
        expected = ignored_labels((8, 5), step, has_empty_part=True)
        assert torch.equal(case.targets(step) == -100, expected)


def test_labels_inside_inputs_are_found_through_what_the_loss_was_given(
    write_case: CaseWriter,
) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 6), nn.Linear(6, 9)

    def forward(self, ids, labels):
        logits = self.head(self.table(ids))[:, :-1].transpose(1, 2)
        return nn.NLLLoss(ignore_index=-7)(logits.log_softmax(1), labels[:, 1:].contiguous())

def get_inputs():
    ids = torch.randint(0, 9, (8, 5))
    return {"ids": ids, "labels": ids}
"""
    case = adversarial(write_case(text))

    assert case.changes.labels == (("labels", -7),)
    assert not (case.batch(1)["ids"] == -7).any()


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        ("cross_entropy(output.mean(1), targets)", "one label per sample"),
        ("mse_loss(output.mean((1, 2)), targets.float())", "no loss with an ignore_index"),
    ],
)
def test_labels_that_nobody_ignores_are_left_alone(
    write_case: CaseWriter, loss: str, says: str
) -> None:
    text = f"""
def get_targets():
    return torch.randint(0, 4, (8,))

def loss(output, targets):
    return nn.functional.{loss}
"""
    case = adversarial(write_case(LINEAR + RANDOM + text))

    assert says in notes(case)
    assert case.changes.labels == ()


def test_no_part_is_left_without_labels_where_the_loss_could_not_bear_it(
    write_case: CaseWriter,
) -> None:
    text = """
def get_targets():
    return torch.randint(0, 4, (8, 5))

def loss(output, targets):
    means = [nn.functional.cross_entropy(o, t) for o, t in zip(output, targets)]
    return torch.stack(means).mean()
"""
    case = adversarial(write_case(LINEAR + RANDOM + text))

    assert case.changes.labels == (("targets", -100),)
    assert not case.changes.has_empty_part


def test_constants_move_and_nothing_else_does(write_case: CaseWriter) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(6, 40), nn.LayerNorm(40)
        self.out = nn.Linear(40, 40, bias=False)
        self.twin = nn.Linear(40, 40, bias=False)
        nn.init.zeros_(self.out.weight)
        self.twin.weight = self.out.weight
        self.frozen = nn.Parameter(torch.zeros(40), requires_grad=False)

    def forward(self, x):
        h = self.norm(self.fc(x))
        return h + self.out(h) + self.twin(h) + self.frozen
"""
    path = write_case(text + RANDOM)
    case: Any = adversarial(path)
    model, plain = case.build_model(), load_case(path).build_model()

    assert case.changes.parameters == ("norm.weight", "norm.bias", "out.weight")
    assert model.twin.weight is model.out.weight
    assert torch.equal(model.fc.weight, plain.fc.weight)
    assert not model.frozen.any()
    for moved, constant in ((model.norm.weight, 1.0), (model.norm.bias, 0.0)):
        away = (moved - constant).abs()
        assert away.min() > 0
        assert away.max() < 1 / 16
        assert len(moved.unique()) > 20
    assert len(model.out.weight.unique(dim=0)) == 40
    other = adversarial(path, dtype="float64").build_model()
    assert torch.equal(other.norm.weight, model.norm.weight.double())


def test_what_the_model_cannot_bear_is_left_alone_with_the_reason(write_case: CaseWriter) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(4)) for _ in range(3))

    def forward(self, x):
        assert x.max() > 0.9, "too small"
        return (self.fc(x) + self.a) * torch.sqrt(1e-4 + self.b) + self.c

def get_inputs():
    return torch.ones(8, 6)

def get_optimizer(params):
    return torch.optim.SGD(params, lr=1e-9)
"""
    case = adversarial(write_case(text))

    assert case.changes.parameters == ("a", "c")
    assert "parameters: b left alone, the loss is not finite in step 0" in notes(case)


def test_a_case_that_does_not_run_stays_as_it_is(write_case: CaseWriter) -> None:
    case = adversarial(write_case(LINEAR.replace("self.fc(x)", "self.fc(x.T)") + RANDOM))

    assert case.changes == Changes(notes=case.changes.notes)
    assert "nothing changed: as it is, RuntimeError" in notes(case)


def test_at_least_three_steps_are_run(write_case: CaseWriter) -> None:
    path = write_case(LINEAR + RANDOM)

    assert [adversarial(path, steps=n).steps for n in (1, 3, 5)] == [3, 3, 5]
    assert "steps: 3 instead of 1" in notes(adversarial(path, steps=1))


@pytest.mark.parametrize(
    ("size", "kept", "says"),
    [
        (8, 7, "7 samples instead of 8"),
        (6, 5, "5 samples instead of 6"),
        (7, 7, ""),
        (4, 4, "4 samples kept, smaller ones leave a rank of 4 without samples"),
    ],
)
def test_a_size_that_no_axis_of_2_to_4_divides(
    write_case: CaseWriter, size: int, kept: int, says: str
) -> None:
    path = write_case(LINEAR + RANDOM.replace("8, 5", f"{size}, 5"))
    changes = with_uneven_size(adversarial(path))
    case = load_case(path, overrides=changes.overrides())

    assert case.batch_size == kept
    assert says in changes.notes[-1]


def test_a_model_with_a_fixed_size_keeps_it(write_case: CaseWriter) -> None:
    text = LINEAR.replace("self.fc(x)", "self.fc(x.view(8, 30)[:, :6])")
    case = adversarial(write_case(text + RANDOM))

    assert "8 samples kept, RuntimeError" in with_uneven_size(case).notes[-1]
    assert with_uneven_size(case).size == 0


# -- how it gets everywhere --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_processes_get_the_decisions_and_make_the_same_case(
    write_case: CaseWriter, dtype: str
) -> None:
    path = write_case(LINEAR + EQUAL + TOKEN_LABELS)
    case = adversarial(path, dtype=dtype)
    overrides = with_even_size(case).overrides()
    other: Any = load_case(path, dtype=dtype, overrides=overrides)

    assert decided(overrides["inputs"]) == with_even_size(case) == other.changes
    assert overrides["between"] == "eval"
    for step in range(3):
        pairs = zip(*map(pytree.tree_leaves, (case.batch(step), other.batch(step))), strict=True)
        assert all(torch.equal(left, right) for left, right in pairs)


def test_the_search_leaves_the_random_state_alone(write_case: CaseWriter) -> None:
    case = adversarial(write_case(LINEAR + RANDOM + TOKEN_LABELS))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert case.changes.labels

    assert torch.equal(torch.get_rng_state(), before)


def test_an_experiment_keeps_its_own_size(write_case: CaseWriter) -> None:
    path = write_case(LINEAR + RANDOM)
    overrides = with_uneven_size(adversarial(path)).overrides()

    assert load_case(path, overrides={**overrides, "rows": "divisible:4"}).batch_size == 8


def test_the_flag_sets_the_override() -> None:
    for flags, expected in (([], {}), (["--adversarial"], {"inputs": "adversarial"})):
        words = ["model.py", *flags]
        assert options_from(parse_arguments(words), words).overrides == expected


def test_exact_mode_has_inputs_of_its_own() -> None:
    words = ["model.py", "--adversarial", "--exact"]
    with pytest.raises(UsageError, match="one after the other"):
        options_from(parse_arguments(words), words)


def test_an_eval_forward_leaves_every_module_in_its_mode() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)).train()
    model[1].eval()
    with evaluating(model):
        assert not any(module.training for module in model.modules())

    assert [module.training for module in model.modules()] == [True, True, False]


# -- what it shows -----------------------------------------------------------------------------

EQUAL_TOKENS = """
import torch.distributed as dist
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)
        nn.init.zeros_(self.second.bias)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

def get_inputs():
    return torch.randn(8, 5, 6)

def get_targets():
    return torch.randint(0, 4, (8, 5))

def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=-1)

def get_optimizer(params):
    groups = [[p for p in params if p.ndim > 1], [p for p in params if p.ndim == 1]]
    return torch.optim.SGD([{"params": p, "lr": lr} for p, lr in zip(groups, (0.1, 0.0))])

def parallelize_means(model, mesh):
    pass

parallelize_counted = parallelize_means

def reduced(model, mesh, factor):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad *= factor

def step_means(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    reduced(model, mesh, 1 / mesh.size())
    optimizer.step()
    return value.detach()

def step_counted(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    count = (batch[1] != -1).sum()
    dist.all_reduce(count, group=mesh.get_group("dp"))
    logits, targets = model(batch[0]).flatten(0, 1), batch[1].flatten()
    value = F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum") / count
    value.backward()
    reduced(model, mesh, 1.0)
    optimizer.step()
    return value.detach()

class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, group):
        value = value.clone()
        dist.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None

class RowParallel(nn.Module):
    def __init__(self, layer, mesh, is_wrong):
        super().__init__()
        self.group, self.is_wrong = mesh.get_group("tp"), is_wrong
        part = layer.weight.chunk(mesh.size(), 1)[mesh.get_local_rank("tp")]
        self.weight, self.bias = nn.Parameter(part.detach().clone()), layer.bias

    def forward(self, x):
        if self.is_wrong:
            return Summed.apply(F.linear(x, self.weight, self.bias), self.group)
        return Summed.apply(F.linear(x, self.weight), self.group) + self.bias

def tensor_parallel(model, mesh, is_wrong):
    for name in ("weight", "bias"):
        part = getattr(model.first, name).chunk(mesh.size())[mesh.get_local_rank("tp")]
        setattr(model.first, name, nn.Parameter(part.detach().clone()))
    model.second = RowParallel(model.second, mesh, is_wrong)

def parallelize_tp_biases(model, mesh):
    tensor_parallel(model, mesh, True)

def parallelize_tp_once(model, mesh):
    tensor_parallel(model, mesh, False)
"""

EQUAL_SAMPLES = """
import torch.distributed as dist

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x):
        return self.net(x)

def get_inputs():
    return torch.randn(1, 6).repeat(8, 1)

def loss(output):
    return output.square().mean()

def parallelize_silent(model, mesh):
    pass

parallelize_averaged = parallelize_silent

def step_silent(model, optimizer, batch, mesh, average=False):
    optimizer.zero_grad()
    value = loss(model(batch[0]))
    value.backward()
    for parameter in model.parameters() if average else ():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    return value.detach()

def step_averaged(model, optimizer, batch, mesh):
    return step_silent(model, optimizer, batch, mesh, average=True)
"""


def cells(path: str, styles: str, **options: Any) -> dict[str, Cell]:
    """Judge a file without and with the flag; return cells by `style` and `style!`."""
    found = {}
    for mark, overrides in (("", {}), ("!", {"inputs": "adversarial"})):
        settings = {"styles": tuple(styles.split()), "overrides": overrides, **options}
        record = run.verify(Options(targets=(path,), **settings), Progress(quiet=True))
        assert bool(mark) == ("adversarial: " in str(record.unknown["notes"]))
        found.update({cell.style + mark: cell for cell in record.cells})
    return found


def verdicts(found: dict[str, Cell]) -> dict[str, str]:
    return {name: cell.verdict for name, cell in found.items()}


@pytest.mark.dist
def test_equal_token_counts_and_zero_biases_hide_faults(write_case: CaseWriter) -> None:
    found = cells(write_case(EQUAL_TOKENS), "user")

    assert verdicts(found) == {
        **dict.fromkeys(("means", "counted", "tp_biases", "tp_once"), "rounding"),
        **dict.fromkeys(("means!", "tp_biases!"), "mismatch"),
        **dict.fromkeys(("counted!", "tp_once!"), "rounding"),
    }
    causes = [found[name].cause for name in ("means!", "tp_biases!")]
    assert [cause.kind for cause in causes if cause] == ["mean_of_means", "additive"]


@pytest.mark.dist
def test_equal_samples_hide_a_missing_reduction(write_case: CaseWriter) -> None:
    found = cells(write_case(EQUAL_SAMPLES), "user")

    assert verdicts(found) == {
        **dict.fromkeys(("silent", "averaged", "averaged!"), "rounding"),
        "silent!": "mismatch",
    }
    assert found["silent!"].cause is not None
    assert found["silent!"].cause.kind in ("no_sync", "missing_reduction")


ENGINE = "replicate fully_shard default dtensor_expand"


@pytest.mark.dist
def test_the_engine_is_right_under_all_changes(write_case: CaseWriter) -> None:
    text = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(5), nn.Dropout(0.2)
        self.out = nn.Linear(8, 4)
        nn.init.zeros_(self.out.bias)

    def forward(self, x):
        return self.out(self.drop(torch.tanh(self.norm(self.fc(x)))))
"""
    path = write_case(text + EQUAL + TOKEN_LABELS)
    meshes = tuple(MeshSpec(((None, n),)) for n in (2, 3))
    found = cells(path, ENGINE, mesh_sweep=meshes, runner="lockstep", dtype="float64")

    assert set(verdicts(found).values()) <= {"exact", "rounding"}


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mlp", "float32"),
        ("transformer", "float64"),
        ("conv", "float32"),
        ("moe", "float64"),
        ("recurrent", "float32"),
        ("gpt2", "float64"),
        ("bert", "float32"),
    ],
)
def test_no_right_style_fails(name: str, dtype: str, root: Any) -> None:
    file = root / "examples" / f"{name}.py"
    target = str(file) if file.exists() else f"hf:{name}"
    record = run.verify(
        Options(
            targets=(target,),
            styles=tuple(ENGINE.split()),
            mesh=MeshSpec(((None, 3),)),
            dtype=dtype,
            runner="lockstep",
            timeout_seconds=900.0,
            overrides={"inputs": "adversarial"},
        ),
        Progress(quiet=True),
    )

    assert [cell.verdict for cell in record.cells] == ["rounding"] * 4
