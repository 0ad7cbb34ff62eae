"""Layers of two Kronecker-sparse factors in the widths of networks, captured in CUDA graphs.

``ks layer`` has a bias and takes bfloat16, beside ``nn.Linear``; ``train`` is forward and backward
with a gradient that is given. ``ks chain`` has those of ViT-S/16 in float16, bias and GELU, beside
``copy``, a kernel that reads what the layer reads of x and writes as much as it writes. ``boft`` is
an eager step, forward and backward, of one layer of 4096 features by 4096 rows with an adapter of
peft in blocks of 4, accelerated beside peft's own.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

import kernlib as kl
from benchmarks.programs.problems import Call, Calls, Program, captured, step
from kernlib.nn import VIT_S16


class Layer(NamedTuple):
    """``musts`` are how many times ours the dense layer's time has to be, forward, and forward and
    backward."""

    in_features: int
    out_features: int
    rows: int
    patterns: tuple[tuple[int, int, int, int], ...]
    musts: tuple[float, float]

    @property
    def name(self) -> str:
        return f"ks layer {self.in_features}-{self.out_features}"


LAYERS = (
    Layer(4096, 16384, 8192, ((64, 64, 64, 1), (1, 256, 64, 64)), (9, 7.5)),
    Layer(2048, 8192, 8192, ((32, 64, 64, 1), (1, 256, 64, 32)), (4.7, 3.4)),
    Layer(1024, 4096, 16384, ((16, 64, 64, 1), (1, 256, 64, 16)), (3, 2)),
    Layer(768, 3072, 25088, ((12, 64, 64, 1), (1, 1536, 384, 2)), (1.5, 1.2)),
)
BOFT_FEATURES, BOFT_BLOCK, BOFT_MUST = 4096, 4, 4
CHAIN_ROWS = 25088
CHAIN_MUSTS = {(384, 1536): 1.4, (384, 384): 1.35, (1536, 384): 1.35}  # times a copy


def _replayed(call: Call, device: str) -> Call:
    return captured(call) if device == "cuda" else call


def layer_calls(layer: Layer, trains: bool, device: str) -> Calls:
    options = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(layer.rows, layer.in_features, **options).requires_grad_(trains)
    grad = torch.randn(layer.rows, layer.out_features, **options)

    def of(module: nn.Module) -> Call:
        forward = partial(module, x)
        call = step(forward, [x, *module.parameters()], grad) if trains else forward
        return _replayed(call, device)

    def dense() -> Call:
        return of(nn.Linear(layer.in_features, layer.out_features, **options))

    return Calls(of(kl.nn.KSLinear(layer.patterns, **options)), {"dense": dense})


def chain_calls(sizes: tuple[int, int], rows: int, device: str) -> Calls:
    options = {"device": device, "dtype": torch.float16}
    layer = kl.nn.KSLinear(VIT_S16[sizes], activation="gelu", **options)
    x = torch.randn(rows, sizes[0], **options)

    def copied() -> Call:
        """Of as many bytes as are read and written by the layer, half of them read."""
        numbers = rows * sum(sizes) // 2
        source, target = torch.randn(2, numbers, **options).unbind()
        return _replayed(partial(target.copy_, source), device)

    return Calls(_replayed(partial(layer, x), device), {"copy": copied})


def boft_calls(features: int, rows: int, device: str) -> Calls:
    """Steps of one layer with the same adapter."""
    from peft import BOFTConfig, get_peft_model

    from kernlib.compat.peft import accelerate

    options = {"device": device, "dtype": torch.bfloat16}
    base = nn.Sequential(nn.Linear(features, features, **options))
    config = BOFTConfig(boft_block_size=BOFT_BLOCK, target_modules=["0"], init_weights=False)
    model = get_peft_model(base, config)
    x = torch.randn(rows, features, **options).requires_grad_()
    grad = torch.randn(rows, features, **options)

    def of(model: nn.Module) -> Call:
        trained = [p for p in model.parameters() if p.requires_grad]
        return step(partial(model, x), [x, *trained], grad)

    ours = copy.deepcopy(model)
    accelerate(ours)
    return Calls(of(ours), {"peft": lambda: of(model)})


def programs() -> list[Program]:
    make = partial(boft_calls, BOFT_FEATURES, BOFT_FEATURES)
    every = [Program(f"boft {BOFT_FEATURES} train bf16", make, "ms", "peft", 1 / BOFT_MUST)]
    for layer in LAYERS:
        for trains, must in enumerate(layer.musts):
            make = partial(layer_calls, layer, bool(trains))
            name = f"{layer.name} {'train' if trains else 'inference'} bf16"
            every.append(Program(name, make, "ms", "dense", 1 / must, records=bool(trains)))
    for sizes, must in CHAIN_MUSTS.items():
        name = f"ks chain {sizes[0]}-{sizes[1]} {CHAIN_ROWS} rows inference fp16"
        make = partial(chain_calls, sizes, CHAIN_ROWS)
        every.append(Program(name, make, "ms", "copy", must, records=False))
    return every
