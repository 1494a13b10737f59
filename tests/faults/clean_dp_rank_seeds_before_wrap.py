"""False-alarm trap: every rank but the first draws its own weights, by seed plus rank; DDP's
constructor sends rank 0's, or the style does it by hand.
Compare https://github.com/facebookresearch/detr/issues/544
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 2)
        self.norm.eval()

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, bag):
        return self.out(torch.tanh(self.norm(self.embed(bag))))


def get_inputs(step=0):
    return torch.randint(0, 7, (9, 3), generator=torch.Generator().manual_seed(15600 + step))


def get_targets(step=0):
    return torch.randn(9, 2, generator=torch.Generator().manual_seed(15700 + step))


def loss(output, targets):
    return F.mse_loss(output, targets)


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def mesh_wrapped():
    return {"dp": 3}


mesh_sent = mesh_wrapped


def _draw_own(model, rank):
    torch.manual_seed(1234 + rank)
    if rank > 0:
        for p in model.parameters():
            nn.init.normal_(p)
        model.norm.running_mean.fill_(float(rank))


def parallelize_wrapped(model, mesh):
    _draw_own(model, mesh.get_local_rank("dp"))
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


def parallelize_sent(model, mesh):
    _draw_own(model, mesh.get_local_rank("dp"))
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, group_src=0, group=mesh.get_group("dp"))
    return model


def step_sent(model, optimizer, batch, mesh):
    optimizer.zero_grad()
    value = loss(model(batch[0]), batch[1])
    value.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh.get_group("dp"))
        p.grad /= mesh.size()
    optimizer.step()
    return value.detach()


EXPECT = {"wrapped": {"verdict": "pass"}, "sent": {"verdict": "pass"}}
