"""Small models to prune, and batches for them."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, WORDS = 16, 11


class Block(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.drop, self.down = nn.Dropout(0.5), nn.Linear(2 * width, width)

    def forward(self, x, scale=None, **_):
        y = self.down(torch.relu(self.up(self.norm(x))))
        return (x + self.drop(y) * (1 if scale is None else scale), None)


class Decoder(nn.Module):
    """Blocks that return a tuple and are called with one more tensor each."""

    def __init__(self, depth: int = 3):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WORDS)
        self.runs = 0  # of the head

    def forward(self, tokens, gain=1.0):
        x = self.embedding(tokens)
        for place, block in enumerate(self.blocks):
            x = block(x, scale=torch.full((), gain + place, dtype=x.dtype))[0]
        self.runs += 1
        return self.head(x)


class Skips(Decoder):
    """Its blocks are no chain."""

    def forward(self, tokens):
        x = first = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)[0] + first
        return self.head(x)


class Writing(Block):
    """Writes what it is called with."""

    def forward(self, x, scale=None, **_):
        x += super().forward(x.clone(), scale)[0]
        return (x, None)


class Writes(Decoder):
    def __init__(self, depth: int = 3):
        super().__init__(depth)
        self.blocks = nn.ModuleList(Writing() for _ in range(depth))


class Twice(Decoder):
    """Goes through its blocks twice."""

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in (*self.blocks, *self.blocks):
            x = block(x)[0]
        return self.head(x)


def decoder(kind=Decoder, dtype=torch.float64, **options) -> Decoder:
    torch.manual_seed(0)
    return kind(**options).to(dtype)


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(WORDS, (2, 7 + i), generator=generator) for i in range(count)]


def inputs_of(model: nn.Module, name: str, samples) -> torch.Tensor:
    """What a layer is called with, over all samples, as rows."""
    rows: list[torch.Tensor] = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_pre_hook(
        lambda _, args: rows.append(args[0].reshape(-1, args[0].shape[-1]))
    )
    was_training = model.training
    with torch.no_grad():
        for sample in samples:
            model.eval()(sample)
    model.train(was_training)
    handle.remove()
    return torch.cat(rows)
