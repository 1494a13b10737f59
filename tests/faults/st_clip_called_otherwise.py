"""Four ways to clip otherwise than one device does, by torch's own function: after the update,
tensor by tensor, with half the limit, not at all. The twin clips once, before the update.
Class: https://github.com/allenai/OLMo/pull/601 (clipping of its own)
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(5, 7, batch_first=True)
        self.out = nn.Linear(7, 3)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def get_inputs(step=0):
    return torch.randn(6, 4, 5, generator=torch.Generator().manual_seed(9100 + step))


def get_targets(step=0):
    return torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(9130 + step))


def get_optimizer(params):
    return torch.optim.AdamW(params, lr=0.02)


def step(model, optimizer, batch):
    return _train(model, optimizer, batch, lambda: None, "before")


def _train(model, optimizer, batch, reduce, how):
    optimizer.zero_grad()
    value = F.mse_loss(model(batch[0]), batch[1])
    value.backward()
    reduce()
    params, limit = list(model.parameters()), 0.2
    if how == "each":
        for p in params:
            clip_grad_norm_(p, limit)
    elif how in ("before", "half"):
        clip_grad_norm_(params, limit if how == "before" else limit / 2)
    optimizer.step()
    if how == "after":
        clip_grad_norm_(params, limit)
    return value.detach()


def parallelize_good(model, mesh):
    return model


def _step(how):
    def run(model, optimizer, batch, mesh):
        def reduce():
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= mesh.size()

        return _train(model, optimizer, batch, reduce, how)

    return run


parallelize_bad_after = parallelize_bad_each = parallelize_good
parallelize_bad_half = parallelize_bad_never = parallelize_good
step_good = _step("before")
step_bad_after, step_bad_each = _step("after"), _step("each")
step_bad_half, step_bad_never = _step("half"), _step("never")

_FAULT = {"verdict": "mismatch", "kind": ["norm_clip"], "tensors": ["out.weight", "rnn.bias_ih_l0"]}

EXPECT = {
    "bad_after": _FAULT | {"stage": "gradients", "mentions": ["has stepped already"]},
    "bad_each": _FAULT | {"stage": "clipping", "mentions": ["6 calls"]},
    "bad_half": _FAULT | {"stage": "clipping", "mentions": ["the limit", "0.5000"]},
    "bad_never": _FAULT | {"stage": "optimizer_state", "mentions": ["unclipped"]},
    "good": {"verdict": "pass"},
}
