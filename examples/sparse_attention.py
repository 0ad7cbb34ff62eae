"""A small language model whose attention sees some blocks of its text, beside one that sees all.

    python examples/sparse_attention.py [--device cuda] [--length 16384] [--plot layouts.png]

The text is made here, and has a memory of three ranges. People are introduced, each with a letter
that is drawn anew in each text: those of the document at its beginning, those of a chapter and of
a scene where that begins. Wherever a name stands later, the letter is next. Between them are
letters that depend on the one before. So what a layout does not show, a model cannot know:

- ``window``: the last blocks, in which the scene begins, by ``sliding_window``;
- ``window + global``: and the first block, where the document's people are introduced;
- ``learned``: as many blocks in each row, other ones in each head and layer. A copy of the dense
  model, a third of the steps old, keeps those that its queries look at most; ``Layout.update_``
  drops the others, and training goes on;
- ``dense``: all blocks, by torch's scaled_dot_product_attention.

The table has the loss on other texts in nats, all of it and at the letters that follow a name, and
milliseconds of a training step and of one layer's attention with its gradient. On a GPU
FlexAttention is timed with the same blocks. There it is bfloat16 with blocks of 128; on the CPU
float32, small, and no place to look at times.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from kernlib import blocksparse
from kernlib.blocksparse import Layout
from kernlib.nn import block_sparse_attention

CHANCES = (0.7, 0.1, 0.1, 0.1)  # of the successors of a letter
MENTIONS = 0.25  # part of the places where a name may stand that have one
RANGES = ("scene", "chapter", "document")
DENSE, WINDOW, GLOBAL, LEARNED = "dense", "window", "window + global", "learned"
ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."
BOUND = {"cpu": 1e-5, "cuda": 1e-2}  # relative error of attention, for float32 and bfloat16
ROWS = 64  # of which that is taken
FLEX_STEPS = 12  # of which the median is taken
CALLS = {"cpu": 2, "cuda": 20}  # of attention, of which the mean is taken

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v, (batch, heads, length, size)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Layout], torch.Tensor]


class Config(NamedTuple):
    letters: int
    length: int  # of a text
    block: int
    chapter: int  # blocks
    batch: int
    dim: int
    heads: int
    depth: int
    steps: int
    rate: float
    tests: int  # texts that nobody trains on

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens in each of the ranges."""
        return 2 * self.block, self.chapter * self.block, self.length

    @property
    def people(self) -> tuple[int, ...]:
        """How many are introduced at the beginning of each."""
        return self.block // 8, self.block // 4, self.block // 2


SMALL = Config(16, 128, 16, 4, 6, 64, 4, 2, 75, 5e-3, 32)
LARGE = Config(64, 8192, 128, 8, 4, 512, 8, 4, 400, 6e-4, 16)


# The text.


class Text(NamedTuple):
    tokens: torch.Tensor  # (texts, length + 1), letters and then names
    ranges: torch.Tensor  # 1, 2 or 3 at a letter that is known from a scene, chapter or document
    nats: torch.Tensor  # of each token, for who knows all that was before

    def to(self, device: str) -> Text:
        return Text(*(t.to(device) for t in self))

    def entropy(self) -> float:
        """Nats a token that no model can do without."""
        return self.nats[:, 1:].mean().item()

    def unigram(self) -> float:
        """The same of a model that knows frequencies alone."""
        counts = torch.bincount(self.tokens[:, 1:].flatten())
        parts = counts[counts > 0] / counts.sum()
        return -(parts * parts.log()).sum().item()


class Author:
    """Writes texts. Who is introduced where, and which letters follow each other, is the same in
    all of them; the letters of people are not."""

    def __init__(self, config: Config):
        self.config, names, length = config, config.letters, config.length
        drawn = torch.rand(names, names, generator=torch.Generator().manual_seed(0))
        self.successors = drawn.argsort(-1)[:, : len(CHANCES)]
        self.present = torch.zeros(length + 1, len(RANGES), dtype=torch.long)  # the first names
        self.introduced = torch.full((length + 2,), -1)  # the name that must stand at a place
        places = torch.arange(length + 1).clamp(max=length - 1)
        for index, (size, people) in enumerate(zip(config.lengths, config.people, strict=True)):
            self.present[:, index] = names + places // size * people
            names += -(-length // size) * people
        self.vocabulary = names
        for start in range(0, length, config.lengths[0]):
            begun = [index for index, size in enumerate(config.lengths) if start % size == 0]
            firsts = [(int(self.present[start, i]), config.people[i]) for i in reversed(begun)]
            due = torch.cat([torch.arange(first, first + count) for first, count in firsts])
            self.introduced[start : start + 2 * len(due) : 2] = due

    def write(self, count: int, seed: int) -> Text:
        random, letters = torch.Generator().manual_seed(seed), self.config.letters
        length, people = self.config.length + 1, torch.tensor(self.config.people)
        facts = torch.randint(letters, (count, self.vocabulary), generator=random)
        ranges = torch.randint(len(RANGES), (count, length), generator=random)
        names = self.present.expand(count, -1, -1).gather(2, ranges[..., None])[..., 0]
        names += (torch.rand(count, length, generator=random) * people[ranges]).long()
        free = (self.introduced[:-1] < 0) & (self.introduced[1:] < 0)
        mentions = free & (torch.rand(count, length, generator=random) < MENTIONS)
        chances = torch.tensor(CHANCES)
        chosen = torch.multinomial(chances.expand(count, -1), length, True, generator=random)

        last, pending = torch.zeros(2, count, dtype=torch.long)
        tokens, known = torch.zeros(2, count, length, dtype=torch.long)
        for place, name in enumerate(self.introduced[:-1].tolist()):
            is_value = last >= letters
            letter = self.successors[last % letters, chosen[:, place]]
            other = torch.where(mentions[:, place], names[:, place], letter)
            value = facts.gather(1, last[:, None])[:, 0]
            known[:, place] = pending
            last = torch.where(is_value, value, other) if name < 0 else torch.full_like(last, name)
            pending = torch.where(last >= letters, ranges[:, place] + 1, 0) * (name < 0)
            tokens[:, place] = last

        is_name = tokens >= letters
        is_value = F.pad(is_name[:, :-1], (1, 0))
        nats = -((1 - MENTIONS * free) * chances[chosen]).log()
        nats = torch.where(is_value, math.log(letters) * (known == 0), nats)
        nats = torch.where(is_name, -(MENTIONS / len(RANGES) / people[ranges]).log(), nats)
        return Text(tokens, known, nats.where(self.introduced[:-1] < 0, 0.0))


# The model.


class Block(nn.Module):
    """Attention over the blocks of a layout, and an MLP. A key is the query of the token before it,
    so that a name finds the letters behind its like."""

    def __init__(self, config: Config, layout: Layout, by: Attend):
        super().__init__()
        dim, self.heads, self.layout, self.by = config.dim, config.heads, layout, by
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qv, self.to_out = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def split(self, x: torch.Tensor) -> Heads:
        apart = self.to_qv(self.norm1(x)).unflatten(-1, (2, self.heads, -1))
        q, v = apart.permute(2, 0, 3, 1, 4)
        return q, F.pad(q[:, :, :-1], (0, 0, 1, 0)), v

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return self.by(q, k, v, self.layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.to_out(self.attend(*self.split(x)).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, config: Config, vocabulary: int, layout: Layout, by: Attend):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, config.dim)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.place = nn.Parameter(torch.zeros(config.length, config.dim))
        self.blocks = nn.Sequential(*(Block(config, layout, by) for _ in range(config.depth)))
        self.norm, self.head = nn.LayerNorm(config.dim), nn.Linear(config.dim, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place)))

    def layers(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    @torch.no_grad()
    def inside(self, tokens: torch.Tensor) -> list[tuple[Block, Heads]]:
        """Each layer, and what its attention is given."""
        with cast(tokens.device.type):
            x, found = self.embed(tokens) + self.place, []
            for block in self.layers():
                found.append((block, block.split(x)))
                x = block(x)
        return found


# Attention, and its layouts.


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_kernlib(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
    """blocksparse.attention of half types, and of float32 on the CPU what is faster."""
    return block_sparse_attention(q, k, v, layout, causal=True)


def by_flex(layout: Layout) -> Attend:
    """FlexAttention over the same blocks: whole ones, and those along the diagonal by a mask."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    stored = layout.mask().reshape(1, -1, *layout.grid)
    edge = torch.eye(layout.grid[0], dtype=torch.bool, device=layout.device)
    (few, which), (count, order) = (listed(stored & part) for part in (edge, ~edge))
    size = layout.block
    mask = BlockMask.from_kv_blocks(few, which, count, order, size, mask_mod=is_seen)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v, layout: compiled(q, k, v, block_mask=mask)


def is_seen(batch: Any, head: Any, row: Any, col: Any) -> Any:
    return col <= row


def listed(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many blocks each row has, and which, those first."""
    order = mask.int().argsort(dim=-1, descending=True, stable=True)
    return mask.sum(-1, dtype=torch.int32), order.int()


def layout_of(name: str, config: Config, device: str) -> Layout:
    """Those by rule."""
    length, block = config.length, config.block
    if name == DENSE:
        return blocksparse.causal(length, block, device=device)
    window = config.lengths[0] - block  # to the beginning of the scene, as blocks are whole
    layout = blocksparse.sliding_window(length, block, (window, 0), device=device)
    if name == WINDOW:
        return layout
    mask = layout.mask()
    mask[:, 0] = True
    return Layout(mask, block)


def learn_(model: Transformer, tokens: torch.Tensor, kept: int) -> None:
    """Give each layer of a dense model the ``kept`` best blocks in each row of each head."""
    for block, heads in model.inside(tokens):
        dense = block.layout
        scores = looked_at(*heads, dense)
        scores.diagonal(dim1=1, dim2=2).fill_(math.inf)  # so that no query is left without a key
        layout = blocksparse.top_k(scores, dense.block, kept)
        layout.update_(layout.mask() & dense.mask())  # the first rows have fewer
        block.layout, block.by = layout, by_kernlib


@torch.no_grad()
def looked_at(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
    """(heads, rows, columns of blocks): the largest part of its attention that a query of the row
    has for the column, in the mean of the texts. A row of blocks at a time is in memory."""
    block, scale = layout.block[0], q.shape[-1] ** -0.5
    _, lse = blocksparse.attention(q, k, v, layout, causal=True, return_lse=True)
    place, found = torch.arange(q.shape[2], device=q.device), []
    for first in range(0, q.shape[2], block):
        rows = slice(first, first + block)
        logits = scale * (q[:, :, rows] @ k.mT).float() - lse[:, :, rows, None]
        weights = torch.where(place <= place[rows, None], logits.exp(), 0.0)
        found.append(weights.unflatten(-1, (-1, block)).sum(-1).amax(2).mean(0))
    return torch.stack(found, 1)


# Training.


class Trained(NamedTuple):
    model: Transformer
    losses: list[float]
    step_ms: float


def cast(device: str) -> torch.autocast:
    return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def watched(steps: Iterable[Any], title: str) -> Iterable[Any]:
    """The steps, with progress on stderr if that is a terminal."""
    on = Console(stderr=True)
    return track(list(steps), title, console=on, transient=True, disable=not sys.stderr.isatty())


def losses_of(model: Transformer, tokens: torch.Tensor) -> torch.Tensor:
    """(texts, length)"""
    with cast(tokens.device.type):
        logits = model(tokens[:, :-1]).float()
    wanted = tokens[:, 1:]
    losses = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return losses.view_as(wanted)


def train(model: Transformer, text: Text, steps: range, config: Config, title: str) -> Trained:
    """Steps of so many numbers, with a batch of the text for each."""
    device = text.tokens.device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    losses, times = [], []
    for step in watched(steps, f"training, {title}"):
        start = now(device)
        loss = losses_of(model, text.tokens[step * config.batch :][: config.batch]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(now(device) - start)
        warm_up.step()
        losses.append(loss.item())
    return Trained(model, losses, 1e3 * median(times))


def train_all(text: Text, vocabulary: int, config: Config) -> dict[str, Trained]:
    """A model of each name; the learned one is the dense one's until its blocks are chosen."""
    device, begun, models = text.tokens.device.type, config.steps // 3, {}
    for name in (WINDOW, GLOBAL, DENSE):
        torch.manual_seed(0)
        by, layout = by_torch if name == DENSE else by_kernlib, layout_of(name, config, device)
        models[name] = Transformer(config, vocabulary, layout, by).to(device)
    together = train(models[DENSE], text, range(begun), config, DENSE)
    models[LEARNED] = copy.deepcopy(models[DENSE])
    kept = models[GLOBAL].layers()[0].layout.mask().sum(1).max().item()
    learn_(models[LEARNED], text.tokens[: config.batch, :-1], int(kept))
    found = {}
    for name in (WINDOW, GLOBAL, LEARNED, DENSE):
        past = together.losses if name in (LEARNED, DENSE) else []
        result = train(models[name], text, range(len(past), config.steps), config, name)
        found[name] = result._replace(losses=past + result.losses)
    return found


# What comes out.


@torch.no_grad()
def tested(model: Transformer, text: Text, config: Config) -> list[float]:
    """The density, the loss, and the loss at letters that are known from each range."""
    parts = [losses_of(model, tokens) for tokens in text.tokens.split(config.batch)]
    losses, ranges = torch.cat(parts), text.ranges[:, 1:]
    known = [losses[ranges == index + 1].mean().item() for index in range(len(RANGES))]
    return [model.layers()[0].layout.density, losses.mean().item(), *known]


def check(name: str, model: Transformer, tokens: torch.Tensor) -> None:
    """Some rows of the attention of each layer, beside float64."""
    device, errors = tokens.device.type, []
    cols = torch.arange(tokens.shape[1], device=device)
    rows = torch.linspace(0, len(cols) - 1, ROWS, device=device).long()
    for layer, (q, k, v) in model.inside(tokens):
        block = layer.layout.block[0]
        seen = layer.layout.mask()[..., rows[:, None] // block, cols // block]
        logits = q[:, :, rows].double() @ k.double().mT * q.shape[-1] ** -0.5
        logits = logits.masked_fill(~seen | (cols > rows[:, None]), -math.inf)
        wanted = logits.softmax(-1) @ v.double()
        found = layer.attend(q, k, v)[:, :, rows].double()
        errors.append(((found - wanted).norm() / wanted.norm()).item())
    error, count = max(errors), f"{len(errors)} layers"
    print(f"{name:16s} {count:9s} {device:5s} relative error {error:.1e}")
    if not error <= BOUND[device]:
        raise SystemExit(f"{name}: the error is above {BOUND[device]:g}")


def alone_ms(model: Transformer, tokens: torch.Tensor) -> float:
    """The first layer's attention, with its gradient."""
    device, (layer, heads) = tokens.device.type, model.inside(tokens)[0]
    q, k, v = (t.detach().requires_grad_() for t in heads)
    grad, start = torch.randn_like(v), 0.0
    for call in range(2 * CALLS[device]):
        if call == CALLS[device]:  # those before load kernels
            start = now(device)
        torch.autograd.grad(layer.attend(q, k, v), (q, k, v), grad)
    return 1e3 * (now(device) - start) / CALLS[device]


def flex_ms(model: Transformer, text: Text, config: Config) -> tuple[float, float] | None:
    """Of a step and of attention, None where torch cannot compile it."""
    model, steps = copy.deepcopy(model), range(min(FLEX_STEPS, config.steps))
    try:
        for layer in model.layers():
            layer.by = by_flex(layer.layout)
        found = train(model, text, steps, config, "FlexAttention")
        return found.step_ms, alone_ms(model, text.tokens[: config.batch, :-1])
    except Exception as error:  # of a compiler, which may be missing
        print(f"FlexAttention is left out: {type(error).__name__}: {str(error)[:160]}")
        return None


def print_table(title: str, words: tuple[str, ...], numbers: tuple[str, ...], rows: list) -> None:
    """Columns of words, and of numbers with three places."""
    table = Table(title=title, title_justify="left")
    for column in words:
        table.add_column(column)
    for column in numbers:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*(value if isinstance(value, str) else f"{value:.3f}" for value in row))
    Console().print(table)


def plot(trained: dict[str, Trained], entropy: float, path: Path) -> None:
    """Losses, and the blocks of the layouts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 3.6), layout="constrained")
    curves, *images = figure.subplots(1, 5, width_ratios=(1.6, 1, 1, 1, 1))
    for name, result in trained.items():
        curves.plot(result.losses, label=name, lw=1)
    curves.axhline(entropy, color="gray", lw=0.8, ls="--", label="entropy")
    curves.set(xlabel="step", ylabel="loss in nats")
    curves.legend()
    drawn = {name: trained[name].model.layers()[0].layout.mask() for name in (WINDOW, GLOBAL)}
    learned = torch.stack([layer.layout.mask() for layer in trained[LEARNED].model.layers()])
    drawn |= {"learned, a head": learned[0, 0], "learned, all": learned.float().mean((0, 1))}
    for axis, (title, mask) in zip(images, drawn.items(), strict=True):
        axis.imshow(mask.cpu(), cmap="Greys", interpolation="nearest")
        axis.set(title=title, xticks=[], yticks=[])
    figure.savefig(path)
    print(f"wrote {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--steps", type=int, help="of training: 75, on a GPU 400")
    parser.add_argument("--length", type=int, help="of a text: 128, on a GPU 8192")
    parser.add_argument("--plot", type=Path, help="write losses and layouts here")
    options = parser.parse_args()
    config = LARGE if options.device == "cuda" else SMALL
    options.steps = config.steps if options.steps is None else options.steps
    options.length = config.length if options.length is None else options.length
    chapter = config.lengths[1]
    if options.steps < 3:
        parser.error(f"--steps must be 3 or more, got {options.steps}")
    if options.length < chapter or options.length % chapter:
        parser.error(f"--length must be a multiple of {chapter}, a chapter's, got {options.length}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def judge(results: dict[str, list[float]], unigram: float) -> None:
    """What must have been learnt by the default number of steps."""
    for name, (_, loss, *_) in results.items():
        if not loss <= unigram - 1:
            raise SystemExit(f"{name}: nothing is learnt with a loss of {loss:.3f}")
    learned, other = (results[name][-2] for name in (LEARNED, GLOBAL))
    if not learned <= 0.75 * other:  # 0.08 to 0.36 of it, by seed
        raise SystemExit(f"learned: chapters are not found, {learned:.3f} beside {other:.3f}")


def main() -> None:
    options = parse()
    device, usual = options.device, LARGE if options.device == "cuda" else SMALL
    config = usual._replace(steps=options.steps, length=options.length)
    author = Author(config)
    text = author.write(config.steps * config.batch, 1).to(device)
    other = author.write(config.tests, 2).to(device)
    trained = train_all(text, author.vocabulary, config)
    results, times, tokens = {}, [], text.tokens[: config.batch, :-1]
    for name, (model, _, step_ms) in trained.items():
        check(name, model, other.tokens[:1, :-1])
        results[name] = tested(model, other, config)
        way = "torch" if name == DENSE else "kernlib"
        times.append((name, way, step_ms, alone_ms(model, tokens)))
        beside = flex_ms(model, text, config) if device == "cuda" and name != DENSE else None
        if beside is not None:
            times.append((name, "FlexAttention", *beside))
    unigram, entropy = text.unigram(), other.entropy()
    losses = [(name, *values) for name, values in results.items()]
    losses += [("least possible", "", entropy), ("by frequencies", "", unigram)]
    title = f"loss in nats, of other texts of {config.length} tokens"
    print_table(title, ("attention",), ("density", "all", *RANGES), losses)
    columns = ("attention", "by"), ("training step", "attention alone")
    print_table("milliseconds", *columns, times)
    if device == "cpu":
        print(ON_CPU)
    if options.plot:
        plot(trained, entropy, options.plot)
    if config == usual:
        judge(results, unigram)


if __name__ == "__main__":
    main()
