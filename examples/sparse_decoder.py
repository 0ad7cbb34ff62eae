"""A small decoder that generates tokens with compressed weights, beside the same one kept dense,
and dense with one product for q, k and v, and one for gate and up.

    python examples/sparse_decoder.py [--device cuda] [--density 0.5] [--tokens 64]

The blocks are those of a language model: RMSNorm, attention with rotary positions and a static
cache of keys and values, SwiGLU. The weights are random and pruned by magnitude; then one copy is
compressed by ``sparsify``, with the same products joined. A token's step is a CUDA graph on a GPU,
there with the sizes of a model of 8 billion parameters, but fewer layers; on the CPU it is called
eagerly, with small sizes, and shows nothing but that the results agree, as products there lay the
weights out first.
All models read the same tokens, so that their logits can be compared.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import nn

from kernlib.nn import SparseLinear, sparsify
from kernlib.sparse import magnitude

PRUNED = r"blocks\."  # not the head: it stays dense, as the embedding does
GROUPS = [["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"]]  # that read one x
BOUND = {torch.float32: 1e-5, torch.float16: 1e-2}  # relative error of the logits
ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."
ROUNDS = {"cpu": 1, "cuda": 3}  # of which the fastest counts


class Config(NamedTuple):
    dim: int
    hidden: int
    heads: int
    kv_heads: int
    depth: int
    vocabulary: int
    dtype: torch.dtype


SMALL = Config(
    dim=64, hidden=176, heads=4, kv_heads=2, depth=2, vocabulary=256, dtype=torch.float32
)
LARGE = Config(
    dim=4096, hidden=14336, heads=32, kv_heads=8, depth=6, vocabulary=32000, dtype=torch.float16
)


class Run(NamedTuple):
    tokens: torch.Tensor  # that the model chose, (steps,)
    logits: torch.Tensor  # (steps, vocabulary)
    tokens_per_s: float


# The model: one token at a time, all state in tensors that stay where they are.


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(x) * self.weight


class Fusible(nn.Module):
    """A module whose layers ``names`` read one x."""

    names: tuple[str, ...]
    joined: nn.Linear

    def products(self, x: torch.Tensor) -> Sequence[torch.Tensor]:
        """Of each layer, by one product if they have been joined."""
        layers = [getattr(self, name) for name in self.names]
        if not hasattr(self, "joined"):
            return [layer(x) for layer in layers]
        return self.joined(x).split([layer.out_features for layer in layers], -1)

    def join(self) -> None:
        weight = torch.cat([getattr(self, name).weight for name in self.names])
        self.joined = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.joined.weight = nn.Parameter(weight, requires_grad=False)


class Attention(Fusible):
    names = "q_proj", "k_proj", "v_proj"
    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, config: Config, length: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = (
            config.heads,
            config.kv_heads,
            config.dim // config.heads,
        )
        self.q_proj = nn.Linear(config.dim, config.heads * self.size, bias=False)
        self.k_proj = nn.Linear(config.dim, config.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(config.dim, config.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(config.heads * self.size, config.dim, bias=False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(config.kv_heads, length, self.size))

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.view(-1, 1, self.size) for y in self.products(x))
        q, k = rotated(q, position), rotated(k, position)
        self.keys.index_copy_(1, position, k)
        self.values.index_copy_(1, position, v)
        seen = (torch.arange(self.keys.shape[1], device=x.device) <= position)[None]
        group = self.heads // self.kv_heads
        keys, values = (t.repeat_interleave(group, 0) for t in (self.keys, self.values))
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.o_proj(attended.reshape(1, -1))


def rotated(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """(heads, 1, size) turned by its position."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = position.float() * rates
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    low, high = x[..., :half], x[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class MLP(Fusible):
    names = "gate_proj", "up_proj"

    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.up_proj = nn.Linear(config.dim, config.hidden, bias=False)
        self.down_proj = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.products(x)
        return self.down_proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, config: Config, length: int):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(config.dim), RMSNorm(config.dim)
        self.attention, self.mlp = Attention(config, length), MLP(config)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), position)
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, config: Config, length: int):
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, length) for _ in range(config.depth))
        self.norm = RMSNorm(config.dim)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """(1,) and (1,) to logits (1, vocabulary)."""
        x = self.embedding(token)
        for block in self.blocks:
            x = block(x, position)
        return self.head(self.norm(x))


def pruned(config: Config, length: int, density: float, device: str) -> Decoder:
    """A random decoder whose blocks hold a part ``density`` of their weights."""
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(config.dtype)
        model = Decoder(config, length).eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    for layer in watched(layers, "pruning"):
        magnitude(layer.weight, density, inplace=True)
    return model


# Generation.


def watched(steps: Iterable[Any], title: str) -> Iterable[Any]:
    """The steps, with progress on stderr if that is a terminal."""
    on = Console(stderr=True)
    return track(list(steps), title, console=on, transient=True, disable=not sys.stderr.isatty())


class Stepper:
    """A token's step, which reads and writes tensors that stay where they are: on a GPU a graph."""

    def __init__(self, model: Decoder, device: str):
        self.token = torch.zeros(1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.model = model
        self.graph: torch.cuda.CUDAGraph | None = None
        self.step()  # loads kernels, which a capture cannot
        if device == "cuda":
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.step()

    def step(self) -> None:
        self.logits = self.model(self.token, self.position)
        self.chosen = self.logits.argmax(-1)
        self.token.copy_(self.chosen)
        self.position.add_(1)

    def __call__(self) -> None:
        if self.graph is None:
            self.step()
        else:
            self.graph.replay()

    def restart(self) -> None:
        self.token.zero_()
        self.position.zero_()


@torch.no_grad()
def generate(model: Decoder, steps: int, device: str, given: torch.Tensor | None = None) -> Run:
    """Tokens one by one, and, in one more round, the logits; there the model reads the tokens
    ``given``, if there are some, in place of those that it chose."""
    stepper = Stepper(model, device)
    seconds = min(timed(stepper, steps, device) for _ in range(ROUNDS[device]))
    stepper.restart()
    tokens, logits = [], []
    for step in watched(range(steps), "generating"):
        stepper()
        tokens.append(stepper.chosen.clone())
        logits.append(stepper.logits.clone())
        if given is not None:
            stepper.token.copy_(given[step : step + 1])
    return Run(torch.cat(tokens), torch.cat(logits), steps / seconds)


def timed(step: Stepper, steps: int, device: str) -> float:
    step.restart()
    start = now(device)
    for _ in range(steps):
        step()
    return now(device) - start


def now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


# What comes out.


def weight_mb(model: nn.Module, layers: dict[str, SparseLinear]) -> float:
    """Megabytes of all parameters and buffers, and of the weights of compressed layers."""
    tensors = (*model.parameters(), *model.buffers())
    compressed = sum(layer.nbytes for layer in layers.values())
    return (compressed + sum(t.numel() * t.element_size() for t in tensors)) / 1e6


def table(runs: dict[str, tuple[Run, float]]) -> None:
    print(f"\n{'weights':11s} {'tokens/s':>9s} {'MB':>8s}")
    for name, (run, megabytes) in runs.items():
        print(f"{name:11s} {run.tokens_per_s:9.1f} {megabytes:8.1f}")


def compare(dense: Run, sparse: Run, dtype: torch.dtype, device: str) -> None:
    """The logits of both, of the same tokens and the same pruned weights."""
    wanted = dense.logits.double()
    difference = sparse.logits.double() - wanted
    error = (difference.norm() / wanted.norm()).item()
    name, count = "logits", len(wanted)
    print(f"{name:24s} {f'{count} tokens':12s} {device:5s} relative error {error:.1e}")
    same = (dense.tokens == sparse.tokens).sum().item()
    largest, scale = difference.abs().max().item(), wanted.abs().max().item()
    print(f"largest difference {largest:.1e} of logits up to {scale:.1f}")
    print(f"{same} of {count} tokens are the same")
    if not error <= BOUND[dtype]:
        raise SystemExit(f"the logits differ: the error is above {BOUND[dtype]:g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--density", type=float, default=0.5, help="part of the weights that stays")
    parser.add_argument("--tokens", type=int, help="how many to generate")
    options = parser.parse_args()
    device, config = options.device, LARGE if options.device == "cuda" else SMALL
    steps = options.tokens
    if steps is None:
        steps = 64 if device == "cuda" else 8
    if steps < 1 or not 0 < options.density <= 1:
        parser.error("--tokens must be 1 or more, and --density above 0 and at most 1")
    model = pruned(config, steps + 1, options.density, device)
    dense = generate(model, steps, device)
    megabytes = weight_mb(model, {})
    compressed = copy.deepcopy(model)
    layers = sparsify(compressed, match=PRUNED, fuse=GROUPS)
    for layer in layers.values():
        layer.freeze()  # nobody writes the weights from here on: products begin earlier
    for name, layer in list(layers.items())[:7]:  # those of the first block
        print(f"{name:32s} {describe(layer)}")
    sparse = generate(compressed, steps, device, given=dense.tokens)
    compare(dense, sparse, config.dtype, device)
    for module in model.modules():
        if isinstance(module, Fusible):
            module.join()
    fused = generate(model, steps, device, given=dense.tokens)
    sparse_mb = weight_mb(compressed, layers)
    rows = {"dense": (dense, megabytes), "dense fused": (fused, megabytes)}
    table({**rows, "compressed": (sparse, sparse_mb)})
    if device == "cpu":
        print(ON_CPU)


def describe(layer: SparseLinear) -> str:
    share = layer.nbytes / (layer.in_features * layer.out_features * layer.matrix.dtype.itemsize)
    held = layer.matrix
    return (f"{layer.in_features:6d} to {layer.out_features:5d}  {held.format:7s} "
            f"density {held.density:.2f}, {share:.2f} of the dense bytes")  # fmt: skip


if __name__ == "__main__":
    main()
