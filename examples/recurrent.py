"""An embedding, an LSTM and a GRU, trained by its own step with gradient clipping."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, PADDING = 50, 0


class Model(nn.Module):
    """Reads a sequence and classifies it."""

    def __init__(self, width: int = 16, hidden: int = 20, num_classes: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=PADDING)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.head = nn.Linear(hidden, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [batch, tokens] to logits [batch, classes]."""
        states, _ = self.lstm(self.embedding(tokens))
        _, last = self.gru(states)
        return self.head(last[-1])


def get_inputs(step: int = 0) -> list[Tensor]:
    """Return token ids, other ones each step; the last tokens of some rows are padding."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(1, VOCABULARY, (8, 10), generator=generator)
    lengths = 10 - torch.arange(8) // 2
    return [tokens.masked_fill(torch.arange(10)[None, :] >= lengths[:, None], PADDING)]


def get_targets(step: int = 0) -> Tensor:
    """Return classes."""
    return torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(200 + step))


def get_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam."""
    return torch.optim.Adam(params, lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> Tensor:
    """Train once, with the total gradient norm clipped."""
    tokens, targets = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens), targets)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    optimizer.step()
    return loss.detach()
