"""A decoder with tied embeddings, dropout, and a loss that ignores padding.

The rows hold unequal numbers of tokens, so the mean of per-rank means is not the mean: a
style has to divide by the global token count.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, NUM_TOKENS, IGNORED = 64, 12, -100


class Block(nn.Module):
    """Pre-norm causal self-attention and a feed-forward part."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, tokens, width] to the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    """Two blocks between an embedding and an output layer that share one weight."""

    def __init__(
        self, width: int = 32, heads: int = 4, layers: int = 2, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(NUM_TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.05)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids [batch, tokens] to logits [batch, tokens, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def get_inputs() -> dict[str, Tensor]:
    """Return token ids, [batch, tokens]."""
    return {"tokens": torch.randint(0, VOCABULARY, (8, NUM_TOKENS))}


def get_targets() -> Tensor:
    """Return the next tokens, [batch, tokens]; row i keeps only its first `12 - i`."""
    targets = torch.randint(0, VOCABULARY, (8, NUM_TOKENS))
    kept = NUM_TOKENS - torch.arange(8)
    return targets.masked_fill(torch.arange(NUM_TOKENS)[None, :] >= kept[:, None], IGNORED)


def loss(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss over the tokens that count."""
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def get_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with weight decay."""
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05)
