"""False-alarm trap: one training, four ways to pack gradients - DDP with tiny buckets, DDP with
views, one flat buffer, one reduction per parameter in forward order. Only the order of sums
differs.
Compare https://github.com/horovod/horovod/issues/1548
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 9)
        for p in self.block.parameters():
            if p.dim() == 1:
                nn.init.uniform_(p, 0.1, 0.8)

    def forward(self, ids):
        return self.head(self.block(self.words(ids)))


def get_inputs(step=0):
    return torch.randint(0, 9, (9, 4), generator=torch.Generator().manual_seed(15000 + step))


def get_targets(step=0):
    return torch.randint(0, 9, (9, 4), generator=torch.Generator().manual_seed(15100 + step))


def loss(output, targets):
    return F.cross_entropy(output.mT, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.2, momentum=0.9, weight_decay=0.01)


def mesh_tiny():
    return {"dp": 3}


mesh_views = mesh_flat = mesh_single = mesh_tiny


def parallelize_tiny(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"), bucket_cap_mb=0.0002)


def parallelize_views(model, mesh):
    return DistributedDataParallel(
        model,
        process_group=mesh.get_group("dp"),
        bucket_cap_mb=0.0008,
        gradient_as_bucket_view=True,
        static_graph=True,
    )


def parallelize_flat(model, mesh):
    return model


parallelize_single = parallelize_flat


def _backward(model, optimizer, batch):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    return value.detach()


def step_flat(model, optimizer, batch, mesh):
    value = _backward(model, optimizer, batch)
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.flatten() for g in grads]) / mesh.size()
    dist.all_reduce(flat, group=mesh.get_group("dp"))
    for grad, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
        grad.copy_(part.view_as(grad))
    optimizer.step()
    return value


def step_single(model, optimizer, batch, mesh):
    value = _backward(model, optimizer, batch)
    for p in model.parameters():
        parts = [torch.empty_like(p) for _ in range(mesh.size())]
        dist.all_gather(parts, p.grad, group=mesh.get_group("dp"))
        p.grad = torch.stack(parts[::-1]).mean(0)
    optimizer.step()
    return value


EXPECT = {name: {"verdict": "pass"} for name in ("tiny", "views", "flat", "single")}
