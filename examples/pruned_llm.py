"""A small language model pruned by magnitude, by Wanda and by SparseGPT, and compressed.

    python examples/pruned_llm.py [--device cuda] [--density 0.3] [--steps 300]

A transformer learns sentences of a grammar that is made here: each noun goes with verbs and
adjectives of its own, verbs agree with their subjects across a clause, and each verb has its own
objects. Then copies of it are pruned to the same density by `kernlib.sparse.prune`, the last two
methods by sentences to calibrate with, and compressed by `kernlib.nn.sparsify`. The table has the
perplexity of sentences that no model has seen, the bytes of the layers, and how many tokens a
second each generates, one at a time.

On a GPU, where transformers is installed, a model of llama's shape with random weights generates
too, dense and compressed.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import random
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import nn

from kernlib.nn import sparsify
from kernlib.sparse import prune

ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."
PRUNED = r"blocks\."  # not the head
BOUND = 1e-4  # relative error of the logits of compressed weights
LENGTH, BATCH, CALIBRATION, TESTED = 64, 16, 16, 32
WIDTH, HEADS, DEPTH = {"cpu": 96, "cuda": 512}, 4, 2
LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


# The text.


class Grammar:
    """Sentences such as "the A N-s that V-s the N V-s the N .", as numbers of words."""

    nouns, verbs, adjectives, choices = 24, 16, 12, 3

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        some = self.random.sample
        self.verbs_of = [some(range(self.verbs), self.choices) for _ in range(self.nouns)]
        self.adjectives_of = [some(range(self.adjectives), self.choices) for _ in range(self.nouns)]
        self.objects_of = [some(range(self.nouns), self.choices) for _ in range(self.verbs)]
        self.first_verb = 2 * self.nouns  # words have a singular and a plural
        self.first_adjective = self.first_verb + 2 * self.verbs
        first = self.first_adjective + self.adjectives
        self.the, self.that, self.end, self.words = first, first + 1, first + 2, first + 3

    def phrase(self, noun: int, plural: int) -> list[int]:
        adjective = self.first_adjective + self.random.choice(self.adjectives_of[noun])
        some = [adjective] if self.random.random() < 0.5 else []
        return [self.the, *some, 2 * noun + plural]

    def predicate(self, noun: int, plural: int) -> list[int]:
        verb = self.random.choice(self.verbs_of[noun])
        other = self.random.choice(self.objects_of[verb])
        return [self.first_verb + 2 * verb + plural, *self.phrase(other, self.random.randrange(2))]

    def sentence(self) -> list[int]:
        noun, plural = self.random.randrange(self.nouns), self.random.randrange(2)
        clause = [self.that, *self.predicate(noun, plural)] if self.random.random() < 0.5 else []
        return [*self.phrase(noun, plural), *clause, *self.predicate(noun, plural), self.end]

    def text(self, rows: int) -> torch.Tensor:
        """(rows, LENGTH + 1)"""
        words: list[int] = []
        while len(words) < rows * (LENGTH + 1):
            words += self.sentence()
        return torch.tensor(words[: rows * (LENGTH + 1)]).view(rows, LENGTH + 1)


# The model.


Cache = list[torch.Tensor]  # keys and values of a block


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
        x = x + self.out(self.attention(self.norm1(x), cache))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attention(self, x: torch.Tensor, cache: Cache | None) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                   for t in self.qkv(x).chunk(3, -1))  # fmt: skip
        if cache:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        if cache is not None:
            cache[:] = k, v
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=x.shape[1] > 1)
        return attended.transpose(1, 2).flatten(2)


class LanguageModel(nn.Module):
    def __init__(self, words: int, width: int):
        super().__init__()
        self.embedding, self.place = nn.Embedding(words, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(
        self, tokens: torch.Tensor, caches: list[Cache] | None = None, start: int = 0
    ) -> torch.Tensor:
        """(rows, length) to logits (rows, length, words)."""
        places = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.place(places)
        for i, block in enumerate(self.blocks):
            x = block(x, caches[i]) if caches is not None else block(x)
        return self.head(self.norm(x))


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def trained(grammar: Grammar, steps: int, device: str) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(grammar.words, WIDTH[device]).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in watched(range(steps), "training"):
        loss = loss_of(model, grammar.text(BATCH).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return model.eval().requires_grad_(False)


# Pruning, and what comes of it.


class Row(NamedTuple):
    name: str
    perplexity: float
    megabytes: float
    tokens_per_s: float


def methods(density: float, batches: list[torch.Tensor]) -> dict[str, Callable[[nn.Module], Any]]:
    share = {"density": density, "match": PRUNED}
    return {
        "magnitude": lambda model: prune.magnitude(model, **share),
        "Wanda": lambda model: prune.wanda(model, batches, **share),
        "SparseGPT": lambda model: prune.sparsegpt(model, batches, **share),
    }


@torch.no_grad()
def perplexity(model: nn.Module, text: torch.Tensor) -> float:
    return math.exp(float(loss_of(model, text)))


@torch.no_grad()
def tokens_per_s(model: nn.Module, device: str) -> float:
    """Of one sequence, a token at a time, the second time."""
    for _ in range(2):
        caches: list[Cache] = [[] for _ in range(DEPTH)]
        token = torch.zeros(1, 1, dtype=torch.long, device=device)
        start = now(device)
        for place in range(LENGTH):
            token = model(token, caches, place).argmax(-1)
        seconds = now(device) - start
    return LENGTH / seconds


def megabytes(model: LanguageModel) -> float:
    """Of the layers in the blocks."""
    layers = [each for each in model.blocks.modules() if hasattr(each, "in_features")]
    return sum(getattr(each, "nbytes", None) or each.weight.nbytes for each in layers) / 1e6


def compressed(name: str, model: LanguageModel, text: torch.Tensor, device: str) -> LanguageModel:
    """The model with compressed layers, whose logits are those of the pruned one."""
    with torch.no_grad():
        expected = model(text[:4, :-1])
        sparsify(model, match=PRUNED)
        logits = model(text[:4, :-1])
    error = ((logits - expected).norm() / expected.norm()).item()
    print(f"{name:10s} compressed, {logits.shape[0] * LENGTH} tokens  {device:5s} relative error "
          f"{error:.1e}")  # fmt: skip
    if not error <= BOUND:
        raise SystemExit(f"{name}: the logits of compressed layers differ by more than {BOUND:g}")
    return model


def check(rows: list[Row]) -> None:
    perplexities = {row.name: row.perplexity for row in rows}
    if not perplexities["SparseGPT"] < perplexities["magnitude"]:
        raise SystemExit("pruning by inputs is no better than by magnitude")


def print_table(rows: list[Row], density: float) -> None:
    print(f"\n{'weights':11s} {'density':>7s} {'perplexity':>10s} {'MB':>7s} {'tokens/s':>9s}")
    for row in rows:
        part = 1.0 if row.name == "dense" else density
        print(f"{row.name:11s} {part:7.2f} {row.perplexity:10.3f} {row.megabytes:7.3f} "
              f"{row.tokens_per_s:9.1f}")  # fmt: skip


# A model of transformers.


def generate_llama(device: str, density: float, tokens: int, **sizes: int) -> None:
    """Tokens a second of transformers' generate(), dense and compressed."""
    import transformers

    torch.manual_seed(0)
    dtype = torch.float16 if device == "cuda" else torch.float32
    config = transformers.LlamaConfig(**{**LLAMA, **sizes})
    with torch.device(device):
        torch.set_default_dtype(dtype)
        model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    prune.magnitude(model, density=density, match=r"layers\.")
    rates = {"dense": rate_of(model, device, tokens)}
    sparsify(model, match=r"layers\.")
    rates["compressed"] = rate_of(model, device, tokens)
    print(
        f"\n{'generate()':11s} {'tokens/s':>9s}  llama's shape, {config.num_hidden_layers} layers"
    )
    for name, rate in rates.items():
        print(f"{name:11s} {rate:9.1f}")


def rate_of(model: Any, device: str, tokens: int) -> float:
    prompt = torch.ones(1, 8, dtype=torch.long, device=device)
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    if device == "cuda":
        # With a cache of one size transformers compiles each step into a CUDA graph. Without it a
        # token takes as long as Python needs to launch its kernels, dense or compressed.
        options["cache_implementation"] = "static"
    torch.compiler.reset()
    for _ in range(3):  # the first two load kernels and compile
        start = now(device)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        seconds = now(device) - start
    return tokens / seconds


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def watched(steps: Iterable[Any], title: str) -> Iterable[Any]:
    """The steps, with progress on stderr if that is a terminal."""
    on = Console(stderr=True)
    return track(list(steps), title, console=on, transient=True, disable=not sys.stderr.isatty())


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--density", type=float, default=0.3, help="part of the weights that stays")
    parser.add_argument("--steps", type=int, default=300, help="of training")
    options = parser.parse_args()
    if options.steps < 10 or not 0 < options.density < 1:
        parser.error("--steps must be 10 or more, and --density between 0 and 1")
    device, grammar = options.device, Grammar(0)
    model = trained(grammar, options.steps, device)
    text = grammar.text(TESTED).to(device)
    batches = [*grammar.text(8 * CALIBRATION)[:, :-1].to(device).split(8)]
    rows = [Row("dense", perplexity(model, text), megabytes(model), tokens_per_s(model, device))]
    for name, method in methods(options.density, batches).items():
        pruned = copy.deepcopy(model)
        method(pruned)
        after = perplexity(pruned, text)
        small = compressed(name, pruned, text, device)
        rows.append(Row(name, after, megabytes(small), tokens_per_s(small, device)))
    print_table(rows, options.density)
    check(rows)
    if device == "cpu":
        print(ON_CPU)
    elif importlib.util.find_spec("transformers") is not None:
        generate_llama(device, options.density, 64)


if __name__ == "__main__":
    main()
