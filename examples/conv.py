"""A residual conv net with BatchNorm: its statistics have to be those of the global batch."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out_channels)
        self.shortcut = nn.Conv2d(channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, channels, height, width] to fewer pixels and more channels."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x))


class Model(nn.Module):
    """Stem, two blocks, pooling, a linear head."""

    def __init__(self, num_classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        """Map [batch, 3, height, width] to logits [batch, classes]."""
        return self.head(self.blocks(self.stem(image)).mean((2, 3)))


def get_inputs() -> list[Tensor]:
    """Return images."""
    return [torch.randn(8, 3, 12, 12)]


def get_targets() -> Tensor:
    """Return classes."""
    return torch.randint(0, 5, (8,))


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss with label smoothing."""
    return F.cross_entropy(output, targets, label_smoothing=0.1)


def get_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with Nesterov momentum."""
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
