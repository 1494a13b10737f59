"""`spmd_verify.record`: what a training script held, on one device and on real ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranked import Ranks
from torch import nn

import spmd_verify
from spmd_verify.dtensor_layouts import layout_of
from spmd_verify.dumps import dump
from spmd_verify.dumps.format import Key
from spmd_verify.errors import UsageError
from spmd_verify.layouts import describe


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, **kwargs: int) -> None:
    rank, ranks = kwargs.get("rank", 0), kwargs.get("ranks", 1)
    for step in range(steps):
        batch = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch.chunk(ranks)[rank]).square().mean().backward()
        optimizer.step()


def test_two_lines_record_a_script(tmp_path: Path) -> None:
    model, optimizer = build()
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    recorder = spmd_verify.record(model, optimizer, tmp_path, steps=2)
    train(model, optimizer, 2)
    assert recorder.is_closed
    opened = dump.read(tmp_path)
    keys = list(map(Key.of, opened.keys()))
    assert list(dict.fromkeys((key.step, key.stage) for key in keys)) == [
        (0, "initial_state"),
        *(
            (s, t)
            for s in range(2)
            for t in ("gradients", "optimizer_state", "parameters", "buffers")
        ),
    ]
    for name, value in model.named_parameters():
        assert torch.equal(opened.global_tensor(f"free|0|initial_state|{name}"), before[name])
        assert torch.equal(opened.global_tensor(f"free|1|parameters|{name}"), value)
        assert torch.equal(opened.global_tensor(f"free|1|gradients|{name}"), value.grad)
    assert opened.global_tensor("free|1|optimizer_state|0.weight.step").item() == 2
    assert opened.global_tensor("free|1|buffers|1.num_batches_tracked").item() == 2


def test_recording_changes_nothing(tmp_path: Path) -> None:
    recorded, plain = build(), build()
    spmd_verify.record(*recorded, tmp_path, steps=1)
    for each in (recorded, plain):
        train(*each, 3)
    assert all(map(torch.equal, recorded[0].state_dict().values(), plain[0].state_dict().values()))
    optimizer = recorded[1]
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not recorded[0]._forward_pre_hooks


def test_closing_early_writes_the_steps_so_far(tmp_path: Path) -> None:
    model, optimizer = build()
    with spmd_verify.record(model, optimizer, tmp_path, steps=5) as recorder:
        train(model, optimizer, 1)
        assert not recorder.is_closed
        with pytest.raises(UsageError, match="dump-missing"):
            dump.read(tmp_path)
    assert {Key.of(key).step for key in set(dump.read(tmp_path).keys())} == {0}
    recorder.close()


def test_the_end_of_the_script_closes_it(tmp_path: Path, root: Path) -> None:
    code = (
        "import sys, torch, spmd_verify; model = torch.nn.Linear(2, 1);"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1);"
        "spmd_verify.record(model, optimizer, sys.argv[1]);"
        "model(torch.ones(1, 2)).sum().backward(); optimizer.step()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, check=True, timeout=120)
    assert torch.equal(
        dump.read(tmp_path).global_tensor("free|0|gradients|weight"), torch.ones(1, 2)
    )


def test_gradients_are_those_before_clipping(tmp_path: Path) -> None:
    model, optimizer = build()
    spmd_verify.record(model, optimizer, tmp_path, steps=1)
    model(torch.ones(2, 4) * torch.tensor([[1.0], [5.0]])).sum().backward()
    before = model[2].weight.grad.clone()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    opened = dump.read(tmp_path)
    assert torch.equal(opened.global_tensor("free|0|gradients|2.weight"), before)
    assert torch.equal(opened.global_tensor("free|0|clipping|2.weight"), model[2].weight.grad)
    assert opened.global_tensor("free|0|clipping|total_norm") == norm


def test_several_optimizers_make_one_step(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in model]
    recorder = spmd_verify.record(model, optimizers, tmp_path, steps=3)
    for step in range(3):
        model(torch.ones(1, 2)).sum().backward()
        for single in optimizers[: 2 if step == 1 else 3]:  # one of them may sit a step out
            single.step()
        assert recorder.step == (step + 1 if step != 1 else 1)
    opened = dump.read(tmp_path) if recorder.is_closed else None
    assert opened is not None
    last = Key.of(opened.keys()[-1])
    assert last.step == 2
    assert torch.equal(opened.global_tensor("free|2|parameters|0.weight"), model[0].weight.detach())


@pytest.mark.parametrize(
    ("optimizer", "steps", "slug"),
    [("adam", 3, "record-optimizer"), ([], 3, "record-optimizer"), (None, 0, "record-steps")],
)
def test_what_cannot_be_recorded_is_refused(
    tmp_path: Path, optimizer: object, steps: int, slug: str
) -> None:
    model, good = build()
    with pytest.raises(UsageError, match=slug):
        spmd_verify.record(model, good if optimizer is None else optimizer, tmp_path, steps=steps)


def test_the_module_and_the_function_of_one_name_are_one_object() -> None:
    import spmd_verify.record as module

    assert spmd_verify.record is module
    assert module.Record.__name__ == "Record"


# -- real ranks ------------------------------------------------------------------------------


def _on_rank(folder: str, wrap: str) -> None:
    """Train under a wrapper and record; called on every rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer = build()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with spmd_verify.record(model, optimizer, folder, steps=1):
        train(model, optimizer, 1, rank=dist.get_rank(), ranks=dist.get_world_size())
        if wrap == "fsdp":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)


@pytest.mark.dist
def test_ddp_records_plain_tensors_without_layout(tmp_path: Path, on_ranks: Ranks) -> None:
    on_ranks(_on_rank, str(tmp_path), "ddp")
    opened = dump.read(tmp_path)
    key = "free|0|gradients|0.weight"
    assert opened.axes == {"dp": 2}
    assert opened.layout(key, (0,)) is None
    assert opened.shape(key) is None
    first, second = opened.locals(key).values()
    assert torch.equal(first, second)


@pytest.mark.dist
def test_fully_shard_records_shards_of_the_global_tensors(tmp_path: Path, on_ranks: Ranks) -> None:
    on_ranks(_on_rank, str(tmp_path), "fsdp")
    opened = dump.read(tmp_path)
    assert opened.axes == {"fsdp": 2}
    for stage, ending in (("gradients", ""), ("optimizer_state", ".exp_avg"), ("parameters", "")):
        key = f"free|0|{stage}|0.weight{ending}"
        assert describe(opened.layout(key, (1,))) == "S(0)"
        assert opened.global_tensor(key).shape == (8, 4)
    assert torch.equal(
        opened.global_tensor("free|0|initial_state|0.weight"), build()[0][0].weight.detach()
    )


def _two_axes(folder: str) -> list[tuple[tuple, tuple, tuple]]:
    """Return what this rank holds of tensors split over a 2 x 2 mesh in several ways."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    optimizer = None
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = spmd_verify.record(model, optimizer, folder, steps=1)
    recorder.close()
    only_tp = distribute_tensor(torch.arange(6.0), mesh["tp"])
    return [describe(layout_of(only_tp, (6,), {"dp": 2, "tp": 2}, mesh))]


@pytest.mark.dist
def test_strided_shards_of_two_axes_are_recorded_by_index(tmp_path: Path, on_ranks: Ranks) -> None:
    assert on_ranks(_two_axes, str(tmp_path), num_ranks=4) == [["R,R"]] * 4
    opened = dump.read(tmp_path)
    assert opened.axes == {"dp": 2, "tp": 2}
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 5))
    for name, value in model.named_parameters():
        assert torch.equal(opened.global_tensor(f"free|0|initial_state|{name}"), value.detach())
    layouts = {
        describe(opened.layout(f"free|0|initial_state|{i}.weight", (0, 0))) for i in range(2)
    }
    assert layouts == {"I(0),R", "S(0),S(1)"}
