"""A small transformer that predicts the next character, and its text, such as Shakespeare."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VALIDATION_SHARE = 0.1


class Block(nn.Module):
    """Causal attention, then two dense layers, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.gather = nn.Linear(width, width)
        self.before_dense = nn.LayerNorm(width)
        self.dense = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map shape (n, t, width) to the same."""
        n, t, width = x.shape
        three = self.queries_keys_values(self.before_attention(x))
        q, k, v = three.view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.gather(seen.transpose(1, 2).reshape(n, t, width))
        out: Tensor = x + self.dense(self.before_dense(x))
        return out


class Transformer(nn.Module):
    """A decoder with learnt positions.

    Args:
        characters: number of different characters.
        context: number of previous characters that a prediction uses.
    """

    def __init__(self, characters: int, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.before_head = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Map characters, shape (n, t), to scores of the next, shape (n * t, characters)."""
        x = self.embedding(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.head(self.before_head(x)).flatten(0, 1)
        return scores


@dataclass(frozen=True)
class Text:
    """Characters as numbers; the last tenth is for validation."""

    training: Tensor
    validation: Tensor
    characters: int
    title: str

    @classmethod
    def read(cls, file: Path | None) -> Text:
        """Read a text, or make a random one without a file."""
        if file is None:
            numbers = torch.randint(0, 65, (200_000,), generator=torch.Generator().manual_seed(1))
            count, title = 65, "random characters"
        else:
            text = file.read_text()
            known = {c: i for i, c in enumerate(sorted(set(text)))}
            numbers = torch.tensor([known[c] for c in text])
            count, title = len(known), file.parent.name
        split = int(len(numbers) * (1 - VALIDATION_SHARE))
        return cls(numbers[:split], numbers[split:], count, title)

    def batch(self, count: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return characters at random places, shape (count, context), and those that follow."""
        generator = torch.Generator().manual_seed(seed)
        at = torch.randint(0, len(self.training) - context - 1, (count,), generator=generator)
        rows = self.training[at[:, None] + torch.arange(context + 1)]
        return rows[:, :-1], rows[:, 1:].flatten()

    def examination(self, count: int, context: int) -> tuple[Tensor, Tensor]:
        """Return ``count`` pieces of the validation text, evenly spaced, and what follows."""
        at = torch.linspace(0, len(self.validation) - context - 1, count).long()
        rows = self.validation[at[:, None] + torch.arange(context + 1)]
        return rows[:, :-1], rows[:, 1:].flatten()
