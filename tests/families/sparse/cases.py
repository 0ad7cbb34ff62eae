"""Matrices and descriptors that tests of products with compressed matrices share."""

from __future__ import annotations

import torch

import kernlib as kl
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.sparse import SparseMatrix, compress

FORMATS = ("bitmap", "u8", "u4", "u2", "macko", "dense")  # those that hold values as they are
QUANTISED = ("bitmap-int8", "bitmap-fp8", "bitmap-int4")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
EPILOGUES = {
    "none": (),
    "bias": (kl.Bias(),),
    "gelu": (kl.Bias(), kl.Gelu()),
    "scalars": (kl.Scale(), kl.Bias(), kl.Silu(), kl.Bias("late"), kl.Scale("gain")),
}
BIASED = SparseMatmul((kl.Bias(),))


def random(rows: int, cols: int, density=0.5, dtype=torch.float32, device="cpu") -> torch.Tensor:
    """A matrix of which about so much is not zero. None of its values is below 0.1, so that none
    becomes zero in a half type."""
    values = torch.rand(rows, cols, device=device) + 0.1
    signs = torch.randint(0, 2, (rows, cols), device=device) * 2 - 1
    kept = torch.rand(rows, cols, device=device) < density
    return torch.where(kept, values * signs, 0.0).to(dtype)


def made(rows: int, cols: int, format="bitmap", **options) -> tuple[torch.Tensor, SparseMatrix]:
    """A random matrix, dense and compressed."""
    dense = random(rows, cols, **options)
    return dense, compress(dense, format)


def values_of(descriptor: SparseMatmul, rows: int, dtype=torch.float32, device="cpu") -> dict:
    """Parameters of a descriptor."""
    return {
        name: torch.randn(rows, device=device).to(dtype) if name in descriptor.vectors else 0.75
        for name in descriptor.parameters
    }


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    kind = torch.int16 if x.element_size() == 2 else torch.int32
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(kind), y.contiguous().view(kind))
