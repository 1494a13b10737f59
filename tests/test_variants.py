"""Variants: right styles stay silent under every switch, and what each can break is caught."""

from __future__ import annotations

import pytest
import torch
from test_run import Events

import spmd.lockstep
from spmd_verify import run
from spmd_verify.cases.case import load_case
from spmd_verify.cases.training_step import micro_batches
from spmd_verify.errors import CaseError, UsageError
from spmd_verify.mesh_spec import parse_mesh
from spmd_verify.options import Options
from spmd_verify.record import Cell
from spmd_verify.variants import KEYS, Variants

MODEL = """
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 9)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(9, 3)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)

def get_inputs():
    return torch.randn(8, 6)

def get_targets():
    return torch.randn(8, 3)

def loss(output, targets):
    return (output - targets).square().mean()

"""

# Every one accumulates two micro-steps and clips to 0.5 itself; what is not `ok` is wrong.
ACCUMULATED = """
def reduce(model, divide=True):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if divide:
            parameter.grad /= dist.get_world_size()

def micro_steps(model, batch, after, shares=(0.5, 0.5)):
    x, y = batch
    total = 0.0
    for i, share in enumerate(shares):
        value = loss(model(x[i::2]), y[i::2]) * share
        value.backward()
        total = total + value.detach()
        after(i)
    return total

def parallelize_ok(model, mesh): pass
def step_ok(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    total = micro_steps(model, batch, lambda i: None)
    reduce(model)
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return total

# DDP's own reduction, once per micro-step or not: with means both are right.
def parallelize_wrapped(model, mesh):
    return nn.parallel.DistributedDataParallel(model)

def parallelize_twice(model, mesh): pass
def step_twice(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    total = micro_steps(model, batch, lambda i: reduce(model, divide=i == 1))
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return total

def parallelize_unscaled(model, mesh): pass
def step_unscaled(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    total = micro_steps(model, batch, lambda i: None, shares=(0.5, 1.0))
    reduce(model)
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return total

def parallelize_last_only(model, mesh): pass
def step_last_only(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    total = micro_steps(model, batch, lambda i: i or optimizer.zero_grad())
    reduce(model)
    clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return total

def parallelize_local_clip(model, mesh): pass
def step_local_clip(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    total = micro_steps(model, batch, lambda i: None)
    clip_grad_norm_(model.parameters(), 0.5)
    reduce(model)
    optimizer.step()
    return total
"""


def judged(path: str, *, ranks: str = "2", **options: object) -> dict[str, Cell]:
    """Return the cells of one case by style."""
    settings = {"timeout_seconds": 120.0, "no_cache": True, "mesh": parse_mesh(ranks), **options}
    record = run.verify(Options((path,), **settings).checked(), Events())  # type: ignore[arg-type]
    return {cell.style: cell for cell in record.cells}


@pytest.mark.dist
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_accumulation_and_clipping(write_case, dtype: str) -> None:
    cells = judged(
        write_case(MODEL + ACCUMULATED),
        styles=("user", "ddp", "fsdp2", "fully_shard"),
        dtype=dtype,
        variants=Variants(accumulate=2, clip=0.5),
    )

    wrong = {style for style, cell in cells.items() if cell.verdict == "mismatch"}
    assert wrong == {"twice", "unscaled", "last_only", "local_clip"}
    for style in set(cells) - wrong:
        assert cells[style].verdict == "rounding", (style, cells[style].message)
        rows = {row.name: row.verdict for row in cells[style].tensors if row.stage == "clipping"}
        assert rows["total_norm"] in ("exact", "rounding")
    # The micro-batches of the ranks together are those of one device, row for row.
    outputs = [row for row in cells["ddp"].tensors if row.stage == "module_outputs"]
    assert {row.verdict for row in outputs if row.name == "out#2"} <= {"exact", "rounding"}
    assert not cells["fully_shard"].fallbacks


def test_micro_batches_take_every_nth_sample(write_case) -> None:
    case = load_case(write_case(MODEL), overrides={"accumulate": "3"})
    x, _ = case.batch(0)

    parts = micro_batches(case, case.batch(0))

    assert [part[0].tolist() for part, _ in parts] == [x[i::3].tolist() for i in range(3)]
    assert [share for _, share in parts] == [3 / 8, 3 / 8, 2 / 8]


@pytest.mark.parametrize("flag", [{"accumulate": "2"}, {"clip": "1.0"}])
def test_a_step_of_the_cases_own_is_not_changed(write_case, flag: dict[str, str]) -> None:
    path = write_case(f"{MODEL}\ndef step(model, optimizer, batch): pass\n")

    with pytest.raises(CaseError, match=f"--{next(iter(flag))} does not reach") as caught:
        load_case(path, overrides=flag)

    assert caught.value.slug == "step-has-own-update"


def test_variants_survive_being_overrides() -> None:
    for variants in (Variants(), Variants(2, 0.5, "bfloat16", "", "", True, "eager", True)):
        assert Variants.of(variants.overrides()) == variants
    assert set(Variants(2, 0.5).overrides()) == {"accumulate", "clip"} <= KEYS


@pytest.mark.parametrize(
    ("variants", "options", "slug"),
    [
        (Variants(accumulate=0), {}, "bad-number"),
        (Variants(clip=-1.0), {}, "bad-number"),
        (Variants(autocast="float8"), {}, "unknown-dtype"),
        (Variants(autocast="bfloat16"), {"dtype": "float64"}, "nothing-to-lower"),
        (Variants(autocast="bfloat16", param_dtype="bfloat16"), {}, "two-precisions"),
        (Variants(clip=1.0), {"exact": True}, "exact-variants"),
    ],
)
def test_what_does_not_fit_is_refused(variants: Variants, options, slug: str) -> None:
    with pytest.raises(UsageError) as caught:
        Options(("model.py",), variants=variants, **options).checked()

    assert caught.value.slug == slug


# `Gate` computes otherwise in evaluation and counts the forwards of training.
GATED = (
    MODEL.replace(
        "class Model",
        """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.count += 1
        return x * (self.count if self.training else 2.0)

class Wrapper(nn.Module):
    modes = (True, False)

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args):
        return self.module(*args)

    def train(self, mode=True):
        return super().train(mode) if mode in self.modes else self

class StaysInEval(Wrapper):
    modes = (False,)

class NeverInEval(Wrapper):
    modes = (True,)

class Model""",
        1,
    ).replace("        return self.out(x)", "        return self.gate(self.out(x))")
    + """
Plain = Model
class Model(Plain):
    def __init__(self):
        super().__init__()
        self.gate = Gate()

def reduced(kind):
    def parallelize(model, mesh):
        for parameter in model.parameters():
            def hook(parameter):
                dist.all_reduce(parameter.grad)
                parameter.grad /= mesh.size()
            parameter.register_post_accumulate_grad_hook(hook)
        return kind(model)
    return parallelize

parallelize_ok = reduced(Wrapper)
parallelize_stays = reduced(StaysInEval)
parallelize_never = reduced(NeverInEval)
"""
)


@pytest.mark.dist
def test_an_eval_forward_between_steps(write_case) -> None:
    cells = judged(
        write_case(GATED),
        styles=("user", "ddp", "fsdp2", "fully_shard"),
        steps=2,
        variants=Variants(train_eval_train=True),
    )

    wrong = {style for style, cell in cells.items() if cell.verdict == "mismatch"}
    assert wrong == {"stays", "never"}
    stays, never = cells["stays"].first_divergence, cells["never"].first_divergence
    assert stays is not None
    assert never is not None
    # What the eval forward left behind, as the next step has it.
    assert (stays.step, never.step) == (1, 1)
    for style in set(cells) - wrong:
        assert cells[style].verdict == "rounding", (style, cells[style].message)
        seen = {row.step for row in cells[style].tensors if row.stage == "eval_outputs"}
        assert seen == {0, 1}


NORMED = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)

def get_inputs():
    return [torch.randn(8, 6)]

def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)
"""


@pytest.mark.dist
def test_an_anchored_step_uses_nothing_that_an_eval_forward_gathered(write_case) -> None:
    cells = judged(
        write_case(NORMED),
        styles=("ddp", "fsdp2"),
        steps=3,
        variants=Variants(train_eval_train=True),
    )

    # fully_shard leaves the root's parameters gathered behind a forward without backward.
    assert {style: cell.verdict for style, cell in cells.items()} == {
        "ddp": "semantic",
        "fsdp2": "semantic",
    }


LOWERED = """
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

def parallelize_sharded(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)

# No master copy: parameters are rounded after every step, where an update is lost.
def parallelize_no_master(model, mesh):
    model.register_forward_pre_hook(lambda m, args: tuple(a.bfloat16() for a in args))
    return nn.parallel.DistributedDataParallel(model.bfloat16())
"""


@pytest.mark.dist
@pytest.mark.parametrize("reduced", ["float32", "bfloat16"])
def test_mixed_precision_of_fully_shard(write_case, reduced: str) -> None:
    has_own = reduced == "float32"
    cells = judged(
        write_case(MODEL + LOWERED),
        styles=("fsdp2", "ddp", "replicate", *(("user",) if has_own else ())),
        variants=Variants(param_dtype="bfloat16", reduce_dtype=reduced),
    )

    assert cells["fsdp2"].verdict == "rounding", cells["fsdp2"].message
    dtypes = {row.dtype for row in cells["fsdp2"].tensors if row.stage == "module_outputs"}
    assert dtypes == {"bfloat16"}
    for style in ("ddp", "replicate"):
        assert cells[style].verdict == "unsupported"
        assert "has no mixed-precision policy" in cells[style].message
    if has_own:
        assert cells["sharded"].verdict == "rounding", cells["sharded"].message
        assert cells["no_master"].verdict == "mismatch"


AUTOCAST = """
def parallelize_ok(model, mesh):
    return nn.parallel.DistributedDataParallel(model)

# The last block's gradients stay each rank's own.
def parallelize_partly(model, mesh):
    kept = [f"blocks.1.0.{name}" for name in ("weight", "bias")]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, kept)
    return nn.parallel.DistributedDataParallel(model)
"""


@pytest.mark.dist
def test_autocast(write_case) -> None:
    cells = judged(
        write_case(MODEL + AUTOCAST),
        styles=("user", "fsdp2", "fully_shard"),
        variants=Variants(autocast="bfloat16", accumulate=2),
    )

    assert cells.pop("partly").verdict == "mismatch"
    for style, cell in cells.items():
        assert cell.verdict == "rounding", (style, cell.message)
        rows = {row.name: row.dtype for row in cell.tensors if row.stage == "module_outputs"}
        assert rows["blocks.0.0"] == "bfloat16"


# A block that counts its forwards counts the recomputed ones too.
COUNTING = MODEL.replace(
    "class Model",
    """
class Counting(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count += 1
        return super().forward(x)

class Model""",
).replace("nn.Sequential(nn.Linear(9, 9)", "nn.Sequential(Counting(9, 9)")


@pytest.mark.dist
def test_recomputed_activations(write_case) -> None:
    styles, on = ("ddp", "fsdp2", "fully_shard"), Variants(checkpoint_activations=True)
    right = judged(write_case(MODEL), styles=styles, variants=on)
    wrong = judged(write_case(COUNTING, name="counting.py"), styles=("ddp",), variants=on)

    for style, cell in right.items():
        assert cell.verdict == "rounding", (style, cell.message)
        assert "activations recomputed in backward: blocks.0, blocks.1" in cell.message
    first = wrong["ddp"].first_divergence
    assert first is not None
    assert (wrong["ddp"].verdict, first.stage) == ("mismatch", "buffers")


@pytest.mark.dist
def test_compiled_models(write_case) -> None:
    cells = judged(
        write_case(MODEL + AUTOCAST),
        styles=("ddp", "fsdp2", "partly", "fully_shard"),
        variants=Variants(torch_compile="aot_eager"),
    )

    for style in ("ddp", "fsdp2"):
        assert cells[style].verdict == "rounding", cells[style].message
        assert "compiled by aot_eager" in cells[style].message
    assert cells["partly"].verdict == "mismatch"
    assert "captures the whole step" in cells["fully_shard"].message


def test_batch_norm_under_autocast_keeps_its_parameters_dtype(write_case) -> None:
    path = write_case(
        "def get_model():\n"
        "    return nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4))\n"
        "def get_inputs():\n    return torch.randn(4, 3, 5, 5)\n"
    )
    case = load_case(path, overrides={"autocast": "bfloat16"})
    trained = []
    for wrap in (False, True):
        model = case.build_model()
        mode = spmd.DataParallel("replicate", input_batch_dim={"batch.0": 0})
        step = spmd.lockstep.compile(parallel_mode=mode, mesh={"dp": 2})(case.step)
        (step if wrap else case.step)(model, case.optimizer(model), case.batch(0))
        trained.append([parameter.grad for parameter in model.parameters()])

    for expected, found in zip(*trained, strict=True):
        assert found.dtype == torch.float32
        assert float((found - expected).norm()) <= 0.05 * float(expected.norm())
