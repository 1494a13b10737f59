"""Token loss under DDP: each rank divides by its own number of labels, then gradients are averaged,
so rows with one label weigh as much as rows with five. The twin divides the summed loss by the
count over all ranks.
Class: https://github.com/huggingface/transformers/issues/34242
"""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

VOCAB, LENGTH, WIDTH = 13, 6, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(0.3 * torch.randn(LENGTH, WIDTH))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)
        for p in self.block.parameters():
            if p.dim() == 1:
                nn.init.uniform_(p, 0.2, 0.7)

    def forward(self, ids):
        return self.head(self.block(self.tokens(ids) + self.places))


def get_inputs(step=0):
    g = torch.Generator().manual_seed(4100 + step)
    return torch.randint(0, VOCAB, (8, LENGTH), generator=g)


def get_targets(step=0):
    g = torch.Generator().manual_seed(4200 + step)
    labels = torch.randint(0, VOCAB, (8, LENGTH), generator=g)
    kept = torch.tensor([1, 1, 1, 1, 5, 5, 5, 5])
    return labels.masked_fill(torch.arange(LENGTH) >= kept[:, None], -100)


def loss(output, targets):
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def get_optimizer(params):
    return torch.optim.SGD(params, lr=0.3)


def parallelize_bad(model, mesh):
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"))


parallelize_good = parallelize_bad


def step_good(model, optimizer, batch, mesh):
    ids, labels = batch
    optimizer.zero_grad()
    count = (labels != -100).sum()
    dist.all_reduce(count, group=mesh.get_group("dp"))
    total = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    (total * mesh.size() / count).backward()
    optimizer.step()
    return total.detach() / count  # the ranks' parts add up to the global mean


EXPECT = {
    "bad": {
        "verdict": "mismatch",
        "kind": ["mean_of_means"],
        "stage": "loss",
        "tensors": ["tokens.weight", "head.weight", "block.linear1.weight"],
        "mentions": ["4", "20"],
    },
    "good": {"verdict": "pass"},
}
