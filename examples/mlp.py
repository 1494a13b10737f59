"""The smallest case: a model class and get_inputs(); everything else has a default."""

import torch
from torch import Tensor, nn


class Model(nn.Module):
    """Two hidden layers; returns its loss."""

    def __init__(self, num_features: int = 16, hidden: int = 32, num_classes: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(num_features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of `x` [batch, features] against `target` [batch]."""
        return nn.functional.cross_entropy(self.net(x), target)


def get_inputs() -> list[Tensor]:
    """Return the global batch."""
    return [torch.randn(8, 16), torch.randint(0, 4, (8,))]
