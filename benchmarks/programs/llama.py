"""Tokens of a llama whose linear layers are pruned and compressed, beside the same model dense, and
dense with the layers that read one input joined (``dense fused``).

A model of transformers with random weights: hidden 4096, 11008 between, 32 heads.
``decode`` is one step of one or several sequences with a static cache. ``prefill`` reads a prompt
of 512 tokens. Both are compiled with CUDA graphs. ``generate`` is transformers' own function with
``cache_implementation="static"``, in milliseconds a token. ``lora step`` trains adapters on the
pruned model, see :mod:`benchmarks.programs.adapters`. Each row is measured in a process of its own,
all its models in turn.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.common.harness import Case, Row, Session
from benchmarks.programs.problems import OURS, device_ms, in_turn, warmed
from benchmarks.service import processes

PRUNED = r"mlp|self_attn"  # not the head
JOINED = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
LENGTH, POSITION = 1024, 40  # of the cache, which each step fills by a place, and of its token
PROMPT, TOKENS = 32, 64
PREFILLED = 512  # tokens of a prompt
STEPS, ROUNDS = 20, 7
GENERATIONS = 3
TIMEOUT_S = 540


class Llama(NamedTuple):
    """A row. ``must`` is how many times ours the dense model's time has to be, ``batch`` the
    sequences of a decoding step, and ``columns`` the vectors for which matrices are compressed."""

    way: str
    layers: int
    density: float
    must: float
    batch: int = 1
    kind: str = "fp16"
    columns: int = 1

    @property
    def name(self) -> str:
        several = f" batch={self.batch}" if self.batch > 1 else ""
        size = f"llama {self.layers} layers{several}"
        return f"{self.way} {size} density={self.density} {self.kind}"


LLAMAS = (
    Llama("decode", 6, 0.5, 1.45),
    Llama("decode", 6, 0.1, 2.2),
    Llama("generate", 32, 0.5, 1.2),
    Llama("generate", 32, 0.1, 1.45),
    Llama("decode", 6, 0.5, 1.2, batch=4, columns=4),
    Llama("decode", 6, 0.1, 1.8, batch=4, columns=4),
    Llama(f"prefill {PREFILLED}", 8, 0.5, 1 / 1.35, columns=32),
    Llama(f"prefill {PREFILLED}", 8, 0.1, 1 / 1.25, columns=32),
    Llama("lora step", 8, 0.5, 0.75, kind="bf16", columns=32),
)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


# Models.


def config(layers: int, small: bool = False):
    from transformers import LlamaConfig

    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "vocab_size": 32000}
    heads = 32
    if small:
        sizes, heads = {"hidden_size": 64, "intermediate_size": 176, "vocab_size": 512}, 4
    return LlamaConfig(num_hidden_layers=layers, num_attention_heads=heads, **sizes)


def dense(
    layers: int, device: str, small: bool = False, dtype: torch.dtype = torch.float16
) -> nn.Module:
    """The same weights at each call."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if small else dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config(layers, small))
    finally:
        torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


def fused(layers: int, device: str, small: bool = False) -> nn.Module:
    """With one product for q, k and v, and one for gate and up, in each layer."""
    model = dense(layers, device, small)
    for layer in model.model.layers:
        for name, members in JOINED.items():
            setattr(layer, name, Joined(getattr(layer, name), members))
    return model


def compressed(
    layers: int,
    density: float,
    device: str,
    small: bool = False,
    dtype: torch.dtype = torch.float16,
    columns: int = 1,
) -> nn.Module:
    from kernlib.nn import sparsify

    model = dense(layers, device, small, dtype)
    options = {"density": density, "columns": columns, "fuse": True}
    for layer in sparsify(model, match=PRUNED, **options).values():
        layer.freeze()  # as of a model that is served
    return model


class Joined(nn.Module):
    """A module some of whose layers read its input. Their joined product is computed in front of
    it, and in their places stand parts of that."""

    def __init__(self, module: nn.Module, members: Sequence[str]):
        super().__init__()
        weight = torch.cat([getattr(module, name).weight for name in members])
        self.linear = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        self.linear.weight = nn.Parameter(weight, requires_grad=False)
        self.module, begin = module, 0
        for name in members:
            end = begin + getattr(module, name).weight.shape[0]
            setattr(module, name, Part(begin, end))
            begin = end

    def forward(self, hidden_states, **others):
        return self.module(self.linear(hidden_states), **others)


class Part(nn.Module):
    """Features ``begin`` to ``end`` of its input."""

    def __init__(self, begin: int, end: int):
        super().__init__()
        self.begin, self.end = begin, end

    def forward(self, product):
        return product[..., self.begin : self.end]


def models(row: Llama, device: str, small: bool = False) -> dict[str, nn.Module]:
    return {
        OURS: compressed(row.layers, row.density, device, small, columns=row.columns),
        "dense": dense(row.layers, device, small),
        "dense fused": fused(row.layers, device, small),
    }


# Measurements, in a process of their own.


def decode(row: Llama, device: str = "cuda") -> dict[str, float]:
    """Milliseconds of a step, and the relative error of our logits beside a float32 model of the
    same weights."""
    from transformers import StaticCache

    token = torch.zeros((row.batch, 1), dtype=torch.long, device=device)
    position = torch.full((row.batch, 1), POSITION, device=device)

    def step(model: nn.Module, cache: Any) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        options = {"past_key_values": cache, "use_cache": True, "position_ids": position}
        return model(input_ids=token, **options).logits

    calls, results = {}, {}
    for name, model in models(row, device).items():
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
        step(model, cache)  # allocates it outside of what is compiled, which CUDA graphs need
        cache.reset()
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        calls[name] = warmed(partial(step, compiled, cache))
        if name == OURS:
            results["error"] = _error(model, token, calls[name]().float())
    return results | in_turn(calls, device_ms, STEPS, ROUNDS)


def prefill(row: Llama, device: str = "cuda") -> dict[str, float]:
    """Milliseconds of a prompt, and the relative error of our logits as of :func:`decode`."""
    prompt = torch.randint(0, 512, (1, PREFILLED), device=device)

    def read(model: nn.Module) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return model(input_ids=prompt, use_cache=False).logits

    calls, results = {}, {}
    for name, model in models(row, device).items():
        compiled = torch.compile(model, mode="reduce-overhead", fullgraph=True)
        calls[name] = warmed(partial(read, compiled))
        if name == OURS:
            results["error"] = _error(model, prompt, calls[name]().float())
    return results | in_turn(calls, device_ms, STEPS, ROUNDS)


def _error(model: nn.Module, token: torch.Tensor, logits: torch.Tensor) -> float:
    """Of the logits of tokens that see nothing but themselves and zeros."""
    from kernlib.nn import SparseLinear

    exact = dense(model.config.num_hidden_layers, token.device.type).float()
    for name, layer in model.named_modules():
        if isinstance(layer, SparseLinear):
            exact.set_submodule(name, layer.to_linear().float())
    expected = exact(token, use_cache=False).logits
    return float((logits - expected).norm() / expected.norm())


def generate(row: Llama, device: str = "cuda") -> dict[str, float]:
    """Milliseconds of a token, the fastest of some calls."""
    prompt = torch.randint(0, 512, (1, PROMPT), device=device)
    options = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
    options |= {"pad_token_id": 0, "cache_implementation": "static"}
    results = {}
    for name, model in models(row, device).items():
        torch.compiler.reset()
        times = []
        for _ in range(2 + GENERATIONS):  # of which two compile
            torch.cuda.synchronize()
            start = time.perf_counter()
            model.generate(prompt, **options)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        results[name] = min(times[2:]) / TOKENS * 1e3
    return results


WAYS = {"decode": decode, "generate": generate, f"prefill {PREFILLED}": prefill}


def measure(name: str) -> None:
    """Print, as JSON, what the row of a name measures."""
    row = next(row for row in LLAMAS if row.name == name)
    if row.way not in WAYS:
        from benchmarks.programs import adapters

        print(json.dumps(adapters.measure(row)))
        return
    with torch.no_grad():
        print(json.dumps(WAYS[row.way](row)))


# Rows.


def row_of(llama: Llama, session: Session) -> Row:
    code = f"from benchmarks.programs import llama; llama.measure({llama.name!r})"
    with tempfile.TemporaryDirectory(prefix="kernlib-bench-") as empty:
        cache = os.environ.get("KERNLIB_CACHE_DIR", empty)
        values = processes.child(code, cache, TIMEOUT_S)
    row = Row(llama.name, "ms", values.pop(OURS), error=values.pop("error", None), rivals=values)
    row.must = values["dense"] / llama.must
    return row


def cases() -> list[Case]:
    return [Case(llama.name, partial(row_of, llama)) for llama in LLAMAS]
