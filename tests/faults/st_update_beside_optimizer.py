"""Gradients right, updates not: `bad_twice` steps the optimizer once for every owner, `bad_lost`
clears its state before each step, `bad_decay` switches decay off on all ranks but the first,
`bad_mean` sums the replicas' weights after the step and divides by one rank too few. The twin
does nothing beside the step.
Class: https://github.com/NVIDIA/Megatron-LM/issues/5974 (same gradient, other step)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6)
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 5)

    def forward(self, ids):
        return self.out(self.norm(self.table(ids).mean(1)))


def get_inputs(step=0):
    return torch.randint(0, 9, (6, 4), generator=torch.Generator().manual_seed(9500 + step))


def get_targets(step=0):
    return torch.randint(0, 5, (6,), generator=torch.Generator().manual_seed(9530 + step))


def loss(output, targets):
    return F.cross_entropy(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.8, weight_decay=0.05)


def mesh_good():
    return {"dp": 3}


def parallelize_good(model, mesh):
    return model


def _step(how):
    def run(model, optimizer, batch, mesh):
        optimizer.zero_grad()
        value = loss(model(batch[0]), batch[1])
        value.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= mesh.size()
        if how == "lost":
            optimizer.state.clear()
        if how == "decay" and mesh.get_local_rank():
            optimizer.param_groups[0]["weight_decay"] = 0.0
        optimizer.step()
        if how == "twice":
            optimizer.step()
        if how == "mean":
            with torch.no_grad():
                for p in model.parameters():
                    dist.all_reduce(p)
                    p /= mesh.size() - 1
        return value.detach()

    return run


for _how in ("twice", "lost", "decay", "mean"):
    globals()[f"mesh_bad_{_how}"] = mesh_good
    globals()[f"parallelize_bad_{_how}"] = parallelize_good
    globals()[f"step_bad_{_how}"] = _step(_how)
step_good = _step("")

_FAULT = {"verdict": "mismatch", "tensors": ["table.weight", "out.weight"]}

EXPECT = {
    "bad_twice": _FAULT | {"kind": ["optimizer_state"], "mentions": ["2 times within the step"]},
    "bad_lost": {
        "verdict": "mismatch",
        "kind": ["optimizer_state"],
        "stage": "optimizer_state",
        "tensors": ["table.weight.momentum_buffer"],
        "mentions": ["momentum was lost", "step 1"],
    },
    "bad_decay": _FAULT | {"kind": ["inputs"], "mentions": ["weight_decay is 0", "rank 1, rank 2"]},
    "bad_mean": _FAULT | {"kind": ["factor"], "stage": "parameters", "mentions": ["1.5000", "3/2"]},
    "good": {"verdict": "pass"},
}
