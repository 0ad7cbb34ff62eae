"""Vision transformers of timm whose layers are chains of Kronecker-sparse factors, beside dense.

ViT-S/16 has batch 128 and ViT-B/16 batch 64, at random images. 36 of 48 linear layers are replaced
by ``VIT_S16`` and ``VIT_B16``; query, key and value stay dense. ``dense gelu`` is the dense model
with an MLP's first layer and GELU as one call of cuBLAS: its GELU is the tanh approximation, so it
is a rival in time alone. Compiled with CUDA graphs, unless the name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from benchmarks.programs.problems import Call, Calls, Program
from kernlib.nn import VIT_B16, VIT_S16, replace_linear

CLASSES = 1000


class Vit(NamedTuple):
    """A model of timm. ``smaller`` are sizes other than its own, for tests."""

    name: str
    timm: str
    batch: int
    chains: Mapping[tuple[int, int], tuple]
    smaller: tuple[tuple[str, int], ...] = ()

    @property
    def pixels(self) -> int:
        return dict(self.smaller).get("img_size", 224)


S16 = Vit("vit_s16", "vit_small_patch16_224", 128, VIT_S16)
B16 = Vit("vit_b16", "vit_base_patch16_224", 64, VIT_B16)


class Row(NamedTuple):
    """``mode`` is "eager", "compiled", or none for CUDA graphs. ``must`` is how many times ours the
    dense model's time has to be."""

    vit: Vit
    trains: bool
    mode: str
    must: float

    @property
    def name(self) -> str:
        task = "train bf16" if self.trains else "inference fp16"
        return f"{self.vit.name} {task} {self.mode}".rstrip()


ROWS = (
    Row(S16, False, "", 1.25),
    Row(S16, True, "", 1.1),
    Row(S16, True, "eager", 0.95),
    Row(S16, True, "compiled", 0.95),
    Row(B16, False, "", 1.25),
    Row(B16, True, "", 1.15),
)


class LinearGelu(nn.Module):
    """GELU(x W^T + bias) by one call of cuBLAS."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = torch.ops.aten._addmm_activation(self.bias, rows, self.weight.t(), use_gelu=True)
        return y.view(*x.shape[:-1], -1)


# Models.


def dense(vit: Vit) -> nn.Module:
    """The same weights at each call."""
    import timm

    torch.manual_seed(0)
    return timm.create_model(vit.timm, num_classes=CLASSES, **dict(vit.smaller))


def with_chains(vit: Vit) -> nn.Module:
    model = dense(vit)
    replace_linear(model, vit.chains)
    return model


def with_gelu(vit: Vit) -> nn.Module:
    model = dense(vit)
    for block in model.blocks:
        block.mlp.fc1 = LinearGelu(block.mlp.fc1)
        block.mlp.act = nn.Identity()
    return model


def _compiled(model: nn.Module, mode: str) -> Call:
    if mode == "eager":
        return model
    forward = torch.compile(model, mode="default" if mode == "compiled" else "reduce-overhead")

    def call(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return forward(x)

    return call


# Calls.


def _images(vit: Vit, device: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(vit.batch, 3, vit.pixels, vit.pixels, device=device, dtype=dtype)


def inference_calls(vit: Vit, mode: str, device: str) -> Calls:
    torch.compiler.reset()
    images = _images(vit, device, torch.float16)

    def of(model: nn.Module) -> Call:
        return partial(_compiled(model.to(device, torch.float16).eval(), mode), images)

    rivals = {"dense": lambda: of(dense(vit)), "dense gelu": lambda: of(with_gelu(vit))}
    return Calls(of(with_chains(vit)), rivals)


def train_calls(vit: Vit, mode: str, device: str) -> Calls:
    """Steps with autocast to bfloat16 and AdamW."""
    torch.compiler.reset()
    images = _images(vit, device)
    labels = torch.randint(0, CLASSES, (vit.batch,), device=device)

    def of(model: nn.Module) -> Call:
        model = model.to(device).train()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        forward = _compiled(model, mode)

        def step() -> None:
            with torch.autocast(device, torch.bfloat16):
                loss = cross_entropy(forward(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return Calls(of(with_chains(vit)), {"dense": lambda: of(dense(vit))})


def programs() -> list[Program]:
    every = []
    for row in ROWS:
        calls = train_calls if row.trains else inference_calls
        make = partial(calls, row.vit, row.mode)
        every.append(Program(row.name, make, "ms", "dense", 1 / row.must, records=row.trains))
    return every
