"""A byte-level GPT, so small that a step takes about a tenth of a second on two cores."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Pre-norm attention and feed-forward. Shapes: (batch, time, width) in and out."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.before_feed_forward = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended = self.project(attended.transpose(1, 2).reshape(batch, time, width))
        x = x + functional.dropout(attended, self.dropout, self.training)
        return x + self.feed_forward(self.before_feed_forward(x))


class GPT(nn.Module):
    """Predicts the next byte. The output layer shares its weight with the embedding (a tied weight)."""

    def __init__(
        self, *, width: int = 160, depth: int = 4, heads: int = 5, context: int = 128, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.last_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.apply(_small_weights)
        self.head.weight = self.bytes.weight

    def forward(self, text: Tensor) -> Tensor:
        """Map bytes of shape (batch, time) to logits of shape (batch, time, 256)."""
        x = self.dropout(self.bytes(text) + self.places.weight[: text.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.last_norm(x))
        return logits


def _small_weights(module: nn.Module) -> None:
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        torch.nn.init.zeros_(module.bias)
