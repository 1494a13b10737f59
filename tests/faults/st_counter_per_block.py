"""Adam on owned row blocks: the loop over all ranks' blocks advances the bias-correction counter
in every turn, owner or not, so it runs W times too fast. The twin counts once a step.
Class: https://github.com/deepspeedai/DeepSpeed/pull/6550 (a step counter of sharded state)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def _normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, 8)
        self.gate = nn.Linear(5, 8)
        self.read = nn.Linear(8, 2)

    def forward(self, x, y):
        return F.mse_loss(self.read(self.embed(x) * torch.sigmoid(self.gate(x))), y)


def get_inputs(step=0):
    return {"x": _normal(720 + step, 8, 5), "y": _normal(770 + step, 8, 2)}


class BlockAdam(torch.optim.Optimizer):
    """Updates `blocks` row blocks a parameter, those of rank `mine` only, then shares them."""

    def __init__(self, params, mesh=None, count_each_block=False):
        super().__init__(params, {"lr": 0.03, "betas": (0.8, 0.9)})
        self.blocks = 1 if mesh is None else mesh.size()
        self.mine = 0 if mesh is None else mesh.get_local_rank()
        self.group = None if mesh is None else mesh.get_group()
        self.count_each_block = count_each_block

    @torch.no_grad()
    def step(self, closure=None):
        for settings in self.param_groups:
            b1, b2 = settings["betas"]
            for p in settings["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                if not self.count_each_block:
                    state["step"] += 1
                tensors = (p, p.grad, state["exp_avg"], state["exp_avg_sq"])
                for owner, rows in enumerate(
                    zip(*(t.chunk(self.blocks) for t in tensors), strict=True)
                ):
                    if self.count_each_block:
                        state["step"] += 1
                    if owner == self.mine:
                        self._update(rows, settings["lr"], (b1, b2), state["step"].item())
                    for block in (rows[0], rows[2], rows[3]) if self.group else ():
                        dist.broadcast(block, group=self.group, group_src=owner)

    def _update(self, rows, lr, betas, count):
        w, g, m, v = rows
        m.lerp_(g, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(g, g, value=1 - betas[1])
        m_hat, v_hat = m / (1 - betas[0] ** count), v / (1 - betas[1] ** count)
        w.sub_(lr * m_hat / (v_hat.sqrt() + 1e-4))


def get_optimizer(params):
    return BlockAdam(params)


def _setup(model, mesh, count_each_block):
    optimizer = BlockAdam(model.parameters(), mesh, count_each_block)
    return DistributedDataParallel(model, process_group=mesh.get_group("dp")), optimizer


def setup_bad(model, mesh):
    return _setup(model, mesh, True)


def setup_good(model, mesh):
    return _setup(model, mesh, False)


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["optimizer_state"],
        "stage": "optimizer_state",
        "tensors": ["embed.weight", "read.bias"],
        "mentions": ["step"],
    },
    "good": {"verdict": "pass"},
}
