"""A transformer whose MLPs keep a quarter of their blocks, trained on beside the dense one.

    python examples/block_sparse_mlp.py [--device cuda] [--steps 900] [--amp bf16] [--plot x.png]

The text is made here: the next letter depends on the last two, by a table that is drawn once, and
is the likeliest of four successors seven times in ten. No model can fall below the entropy of that,
0.940 nats a letter. There are three steps:

- the dense transformer is trained for a third of the steps;
- ``block_sparsify`` keeps the blocks of largest norm of a copy's MLPs;
- both are trained on, with the same text. The copy drops its smallest blocks now and then, fewer
  each time, and regrows as many where the gradient is largest (RigL: Evci et al. 2020); the
  optimizer's moments move along.

Runs on the first CUDA GPU with MLPs of 1,024 to 4,096 features in blocks of 64, three minutes on an
H100, or on the CPU when there is none, with small ones in blocks of 16. Texts there are so short
that their second letter, which nothing tells, adds 0.085 nats to the entropy.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import nn

from kernlib.nn import BlockSparseLinear, block_sparsify

AMP = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CHANCES = (0.7, 0.1, 0.1, 0.1)  # of the successors of two letters
ENTROPY = -sum(p * math.log(p) for p in CHANCES)
ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."
BOUND = 1e-5  # relative error of a layer, for float32
BEHIND = 0.25  # nats that the block-sparse model may lose to the dense one, by default steps
DROPPED = 0.3  # of the stored blocks, at first


class Config(NamedTuple):
    letters: int
    length: int  # of a text
    batch: int
    dim: int
    hidden: int
    heads: int
    depth: int
    block: int
    density: float
    steps: int
    every: int  # steps between two changes of the blocks
    rate: float


SMALL = Config(10, 16, 24, 64, 256, 4, 2, 16, 0.25, 240, 15, 8e-3)
LARGE = Config(64, 256, 64, 1024, 4096, 16, 4, 64, 0.25, 900, 50, 3e-4)


class Result(NamedTuple):
    losses: list[float]
    weights: int  # of the MLPs
    step_ms: float
    peak_mb: float


# The data.


class Text:
    """Letters of a chain that looks two back; a batch for each seed."""

    def __init__(self, config: Config, device: str):
        random = torch.Generator().manual_seed(0)
        drawn = torch.rand(config.letters**2, config.letters, generator=random)
        self.successors = drawn.argsort(-1)[:, : len(CHANCES)].to(device)
        self.config, self.device = config, device

    def batch(self, seed: int) -> torch.Tensor:
        """(batch, length + 1)"""
        config, random = self.config, torch.Generator().manual_seed(seed)
        shape = config.batch, config.length + 1
        chances = torch.tensor(CHANCES).expand(config.batch, -1)
        which = torch.multinomial(chances, shape[1], True, generator=random).to(self.device)
        first = torch.randint(config.letters, (2, config.batch), generator=random)
        found = [*first.to(self.device)]
        for step in range(2, shape[1]):
            chosen = self.successors[found[-2] * config.letters + found[-1]]
            found.append(chosen.gather(1, which[:, step : step + 1]).squeeze(1))
        return torch.stack(found, 1)


# The model.


class Block(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        dim = config.dim
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.heads = config.heads
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, config.hidden), nn.GELU(), nn.Linear(config.hidden, dim)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = self.to_qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = apart.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.to_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.embed = nn.Embedding(config.letters, config.dim)
        self.place = nn.Parameter(0.02 * torch.randn(config.length, config.dim))
        self.blocks = nn.Sequential(*(Block(config) for _ in range(config.depth)))
        self.norm, self.head = nn.LayerNorm(config.dim), nn.Linear(config.dim, config.letters)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(text) + self.place)))


# Training.


def watched(steps: Iterable[Any], title: str) -> Iterable[Any]:
    """The steps, with progress on stderr if that is a terminal."""
    on = Console(stderr=True)
    return track(list(steps), title, console=on, transient=True, disable=not sys.stderr.isatty())


def sparse_layers(model: nn.Module) -> list[BlockSparseLinear]:
    return [layer for layer in model.modules() if isinstance(layer, BlockSparseLinear)]


def train(model: nn.Module, text: Text, steps: range, options: argparse.Namespace) -> Result:
    """Steps of so many numbers, whose batches these are."""
    device, amp, config = options.device, AMP[options.amp], text.config
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    scaler = torch.amp.GradScaler(device, enabled=amp is torch.float16)
    layers = sparse_layers(model)
    reset_peak(device)
    losses, times = [], []
    for number, step in enumerate(watched(steps, "training")):
        batch = text.batch(step)
        changes = is_change(number, len(steps), config.every)
        start = now(device)
        for layer in layers:
            layer.watch_growth(changes)
        with torch.autocast(device, amp, enabled=amp is not None):
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if changes:
            change(layers, optimizer, DROPPED * (1 - number / len(steps)))
        times.append(now(device) - start)
        warm_up.step()
        losses.append(loss.item())
    return Result(losses, weights(model), 1e3 * median(times), peak_mb(device))


def is_change(number: int, steps: int, every: int) -> bool:
    """Whether blocks are dropped and regrown behind a step: in the first three quarters."""
    return (number + 1) % every == 0 and number < 3 * steps // 4


def change(layers: list[BlockSparseLinear], optimizer: torch.optim.Optimizer, part: float) -> None:
    for layer in layers:
        count = round(part * layer.layout.capacity)
        layer.drop_(count, optimizer=optimizer).regrow_(count, optimizer=optimizer)


def weights(model: nn.Module) -> int:
    """Parameters of the MLPs."""
    return sum(p.numel() for name, p in model.named_parameters() if ".mlp." in name)


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# Peak memory: of torch's tensors on a GPU, of the process on the CPU, where Linux can begin anew.


def reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):  # then it is the peak since the process began
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 1e6
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return math.nan
    return next(float(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM"))


# What comes out.


def check(name: str, layer: BlockSparseLinear, device: str) -> None:
    """A trained layer beside its dense matrix in float64."""
    x = torch.randn(100, layer.in_features, device=device)
    with torch.no_grad():
        wanted = layer.to_linear().double()(x.double())
        error = ((layer(x).double() - wanted).norm() / wanted.norm()).item()
    shape = f"{layer.in_features} to {layer.out_features}"
    print(f"{name:16s} {shape:14s} {device:5s} relative error {error:.1e}")
    if not error <= BOUND:
        raise SystemExit(f"{name}: the error is above {BOUND:g}")


def last(losses: list[float]) -> float:
    return mean(losses[-10:])


def table(results: dict[str, Result]) -> None:
    print(f"\n{'MLPs':14s} {'loss':>8s} {'weights':>12s} {'ms/step':>8s} {'peak MB':>8s}")
    for name, result in results.items():
        print(f"{name:14s} {last(result.losses):8.3f} {result.weights:12,d} "
              f"{result.step_ms:8.1f} {result.peak_mb:8.0f}")  # fmt: skip
    print(f"{'entropy':14s} {ENTROPY:8.3f}")


def plot(results: dict[str, Result], begun: int, masks: list[torch.Tensor], path: Path) -> None:
    """Losses, and the blocks of the first layer before and after they moved."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.6), layout="constrained")
    curves, before, after = figure.subplots(1, 3, width_ratios=(2, 1, 1))
    for name, result in results.items():
        first = begun if name == "block-sparse" else 0
        curves.plot(range(first, first + len(result.losses)), result.losses, label=name, lw=1)
    curves.axhline(ENTROPY, color="gray", lw=0.8, ls="--", label="entropy")
    curves.set(xlabel="step", ylabel="loss in nats")
    curves.legend()
    for axis, mask, title in ((before, masks[0], "from dense"), (after, masks[1], "trained")):
        axis.imshow(mask.cpu(), cmap="Greys", interpolation="nearest", aspect="auto")
        axis.set_title(f"blocks, {title}")
    figure.savefig(path)
    print(f"wrote {path}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--steps", type=int, help="training steps in all: 240, on a GPU 900")
    parser.add_argument("--amp", choices=AMP, default="none", help="dtype of autocast")
    parser.add_argument("--plot", type=Path, help="write losses and layouts here")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 3:
        parser.error(f"--steps must be 3 or more, got {options.steps}")
    if options.plot and not options.plot.resolve().parent.is_dir():
        parser.error(f"--plot: there is no folder {options.plot.resolve().parent}")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return options


def main() -> None:
    options = parse()
    device = options.device
    config = LARGE if device == "cuda" else SMALL
    steps = config.steps if options.steps is None else options.steps
    begun, text = steps // 3, Text(config, device)
    torch.manual_seed(0)
    dense = Transformer(config).to(device)
    together = train(dense, text, range(begun), options)

    sparse = copy.deepcopy(dense)
    swapped = block_sparsify(sparse, config.block, density=config.density, match="mlp")
    first = next(iter(swapped.values()))
    masks = [first.layout.mask()]
    results = {
        "dense": train(dense, text, range(begun, steps), options),
        "block-sparse": train(sparse, text, range(begun, steps), options),
    }
    masks.append(first.layout.mask())
    for name, layer in swapped.items():
        check(name, layer, device)
    table(results)
    if device == "cpu":
        print(ON_CPU)
    whole = results["dense"]._replace(losses=together.losses + results["dense"].losses)
    if options.plot:
        plot({**results, "dense": whole}, begun, masks, options.plot)
    behind = last(results["block-sparse"].losses) - last(results["dense"].losses)
    if options.steps is None and not behind <= BEHIND:
        raise SystemExit(f"the block-sparse model is {behind:.2f} nats behind the dense one")


if __name__ == "__main__":
    main()
