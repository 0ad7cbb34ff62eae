"""A vision transformer with Kronecker-sparse layers, trained beside the same one with nn.Linear.

    python examples/kronecker_vit.py [--device cuda] [--steps 500] [--amp bf16]

Query, key, value and both layers of each MLP become products of two Kronecker-sparse factors by
``replace_linear``. The images are gratings, whose class is their direction, with random frequency,
phase and contrast under noise; nothing is downloaded.
Runs on the first CUDA GPU, there with the sizes and chains of ViT-S/16, or on the CPU when there is
none, with a small model.
"""

from __future__ import annotations

import argparse
import copy
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

from kernlib.nn import VIT_S16, KSLinear, replace_linear

CLASSES = 8
REPLACED = r"to_[qkv]$|mlp\."
AMP = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."
BOUND = 1e-5  # relative error of a layer, for float32
ACCURACY = 0.6  # that both models reach with the default number of steps; chance is 0.125


class Config(NamedTuple):
    size: int  # of an image, in pixels
    patch: int
    dim: int
    depth: int
    heads: int
    batch: int
    steps: int
    rate: float
    chains: dict


SMALL = Config(
    size=32, patch=8, dim=128, depth=2, heads=4, batch=64, steps=100, rate=2e-3,
    chains={
        (128, 128): ((2, 16, 64, 1), (1, 64, 16, 2)),
        (128, 512): ((4, 32, 32, 1), (1, 256, 64, 2)),
        (512, 128): ((4, 32, 128, 1), (1, 64, 64, 2)),
    },
)  # fmt: skip
LARGE = Config(
    size=224, patch=16, dim=384, depth=6, heads=6, batch=128, steps=200, rate=5e-4, chains=VIT_S16
)


class Result(NamedTuple):
    loss: float
    accuracy: float
    parameters: int
    step_ms: float
    peak_mb: float


# The data.


def images(config: Config, count: int, seed: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gratings (count, 1, size, size) and their classes."""
    random: dict[str, Any] = {
        "generator": torch.Generator(device).manual_seed(seed),
        "device": device,
    }

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, 1, 1, **random)

    labels = torch.randint(CLASSES, (count,), **random)
    angle = (math.pi / CLASSES) * labels[:, None, None]
    y, x = torch.meshgrid(*2 * [torch.linspace(0, 1, config.size, device=device)], indexing="ij")
    frequency = config.size / config.patch * uniform(0.75, 1.25)  # 0.75 to 1.25 waves a patch
    waves = frequency * (x * angle.cos() + y * angle.sin()) + uniform(0, 1)
    noise = 1.5 * torch.randn(count, config.size, config.size, **random)
    return (uniform(0.7, 1.3) * (2 * math.pi * waves).sin() + noise)[:, None], labels


# The model.


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.to_q, self.to_k, self.to_v)
        )
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.to_out(attended.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        tokens = (config.size // config.patch) ** 2
        self.embed = nn.Conv2d(1, config.dim, config.patch, stride=config.patch)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, config.dim))
        self.blocks = nn.Sequential(*(Block(config.dim, config.heads) for _ in range(config.depth)))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).flatten(2).mT + self.position
        return self.head(self.norm(self.blocks(x)).mean(1))


# Training.


def watched(steps: Iterable[Any], title: str) -> Iterable[Any]:
    """The steps, with progress on stderr if that is a terminal."""
    on = Console(stderr=True)
    return track(list(steps), title, console=on, transient=True, disable=not sys.stderr.isatty())


def train(model: nn.Module, config: Config, device: str, amp: torch.dtype | None) -> Result:
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    scaler = torch.amp.GradScaler(device, enabled=amp is torch.float16)
    reset_peak(device)
    losses, times = [], []
    for step in watched(range(config.steps), "training"):
        x, labels = images(config, config.batch, step, device)
        start = now(device)
        with torch.autocast(device, amp, enabled=amp is not None):
            loss = F.cross_entropy(model(x), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        times.append(now(device) - start)
        warm_up.step()
        losses.append(loss.item())
    peak, parameters = peak_mb(device), sum(p.numel() for p in model.parameters())
    x, labels = images(config, 512, 10**6, device)
    with torch.no_grad(), torch.autocast(device, amp, enabled=amp is not None):
        found = torch.cat([model(part) for part in x.split(config.batch)]).argmax(-1)
    accuracy = (found == labels).float().mean().item()
    return Result(mean(losses[-10:]), accuracy, parameters, 1e3 * median(times), peak)


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


def check(name: str, layer: KSLinear, device: str) -> None:
    """A trained layer beside its dense matrix in float64."""
    exact = copy.deepcopy(layer).double()
    x = torch.randn(100, layer.in_features, device=device)
    with torch.no_grad():
        wanted = F.linear(x.double(), exact.to_dense(), exact.bias)
        error = ((layer(x).double() - wanted).norm() / wanted.norm()).item()
    shape = f"{layer.in_features} to {layer.out_features}"
    print(f"{name:24s} {shape:12s} {device:5s} relative error {error:.1e}")
    if not error <= BOUND:
        raise SystemExit(f"{name}: the error is above {BOUND:g}")


def table(results: dict[str, Result]) -> None:
    print(f"\n{'layers':10s} {'loss':>8s} {'accuracy':>8s} {'parameters':>12s} "
          f"{'ms/step':>8s} {'peak MB':>8s}")  # fmt: skip
    for name, result in results.items():
        print(f"{name:10s} {result.loss:8.3f} {result.accuracy:8.3f} {result.parameters:12,d} "
              f"{result.step_ms:8.1f} {result.peak_mb:8.0f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--steps", type=int, help="training steps of each model")
    parser.add_argument("--amp", choices=AMP, default="none", help="dtype of autocast")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        parser.error(f"--steps must be 1 or more, got {options.steps}")
    device = options.device
    config = LARGE if device == "cuda" else SMALL
    steps = config.steps if options.steps is None else options.steps
    results = {}
    for kind in ("KSLinear", "nn.Linear"):
        torch.manual_seed(0)
        model = ViT(config).to(device)
        swapped: dict[str, KSLinear] = {}
        if kind == "KSLinear":
            swapped = replace_linear(model, config.chains, match=REPLACED)
        results[kind] = train(model, config._replace(steps=steps), device, AMP[options.amp])
        for name, layer in list(swapped.items())[:5]:  # those of the first block
            check(name, layer, device)
        del model
    table(results)
    if device == "cpu":
        print(ON_CPU)
    for kind, result in results.items():
        if options.steps is None and not result.accuracy >= ACCURACY:
            raise SystemExit(f"{kind}: the accuracy is below {ACCURACY}")


if __name__ == "__main__":
    main()
