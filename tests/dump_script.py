"""A training script as anyone writes one, recorded in two lines; run by test_compare_verb.py.

python dump_script.py FOLDER [wrapper=ddp] [factor=1.0001] [order=3] [dtype=float64] ...
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import spmd_verify

STEPS, BATCH = 2, 8


def build(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(20, 16),
        nn.Flatten(0, 1),
        nn.Linear(16, 32),
        nn.GELU(),
        nn.LayerNorm(32),
        nn.Linear(32, 10),
    ).to(dtype)


def batch(step: int, order: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randint(0, 20, (BATCH, 4), generator=generator)
    targets = torch.randint(0, 10, (BATCH, 4), generator=generator)
    permuted = torch.randperm(BATCH, generator=generator.manual_seed(100 * order + step))
    return (inputs[permuted], targets[permuted]) if order else (inputs, targets)


def wrap(model: nn.Module, wrapper: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if wrapper == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    return fully_shard(model, mesh=mesh)


def main(folder: str, **options: str) -> None:
    """Train; with `wrapper` on the ranks of the group, `store` begins one."""
    is_own = "store" in options
    if is_own:
        dist.init_process_group(
            "gloo",
            init_method=options["store"],
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if "wrapper" in options else (0, 1)
    model = build(getattr(torch, options.get("dtype", "float32")))
    if "wrapper" in options:
        model = wrap(model, options["wrapper"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    recorder = spmd_verify.record(model, optimizer, folder, steps=STEPS)
    for step in range(STEPS):
        inputs, targets = (t.chunk(ranks)[rank] for t in batch(step, int(options.get("order", 0))))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets.flatten()).backward()
        for name, parameter in model.named_parameters():
            if name.endswith("2.weight") and parameter.grad is not None:
                parameter.grad.mul_(float(options.get("factor", 1.0)))
            if name.endswith("5.bias") and rank == 1 and "poison" in options:
                parameter.grad.fill_(float("nan"))
        optimizer.step()
    recorder.close()
    if is_own:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], **dict(word.split("=", 1) for word in sys.argv[2:]))
