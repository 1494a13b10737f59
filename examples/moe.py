"""A small mixture of experts: top-2 routing and an auxiliary loss that couples all tokens.

Every expert sees every token, weighted by its gate, so that no Python branch depends on a
tensor and the whole step can be captured as one graph.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Experts(nn.Module):
    """Feed-forward experts behind a top-k router."""

    def __init__(self, width: int, hidden: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * hidden**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed output [tokens, width] and the load-balancing loss, a scalar."""
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(shares).scatter(-1, chosen, weights)
        hidden = F.silu(torch.einsum("tw,ewh->teh", x, self.up))
        output = torch.einsum("teh,ehw,te->tw", hidden, self.down, gates)
        load = (gates > 0).to(shares.dtype).mean(0)
        return output, shares.shape[-1] * (load * shares.mean(0)).sum()


class Model(nn.Module):
    """Two residual expert layers; returns the task loss plus the auxiliary one."""

    def __init__(self, num_features: int = 12, width: int = 16, num_classes: int = 4) -> None:
        super().__init__()
        self.inp = nn.Linear(num_features, width)
        self.layers = nn.ModuleList(Experts(width, 24, num_experts=4, top_k=2) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the loss of `x` [batch, tokens, features] against `target` [batch, tokens]."""
        hidden = self.inp(x).flatten(0, 1)
        balance = hidden.new_zeros(())
        for layer in self.layers:
            mixed, auxiliary = layer(hidden)
            hidden, balance = hidden + mixed, balance + auxiliary
        logits = self.head(self.norm(hidden))
        return F.cross_entropy(logits, target.flatten()) + 0.01 * balance


def get_inputs() -> dict[str, Tensor]:
    """Return the global batch."""
    return {"x": torch.randn(8, 6, 12), "target": torch.randint(0, 4, (8, 6))}
