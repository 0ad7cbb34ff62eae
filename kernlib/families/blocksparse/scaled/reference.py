"""Scaled block-sparse products in PyTorch, in float32, differentiable by the scales."""

from __future__ import annotations

import torch

from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.reference import multiply
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.runtime.precision import float32_precision


def scaled_matmul(
    descriptor: BlockSparseScaledMatmul,
    layout: Layout,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
) -> torch.Tensor:
    """What ``descriptor`` describes."""
    # Where torch may round float32 to TF32, which products of float8 and scales are not.
    strict = a.device.type == "cuda" and float32_precision() != "fp32"
    wide = torch.float64 if strict else torch.float32
    if descriptor.mode == "dsd":
        values, slots, dense, columns = a, scale_a, b, scale_b
        turned, is_across = descriptor.transpose_a, descriptor.transpose_b
    else:
        values, slots, dense, columns = b, scale_b, a, scale_a
        turned, is_across = not descriptor.transpose_b, not descriptor.transpose_a
    values = values.to(wide) * slots[..., None, None].to(wide)
    dense = dense.to(wide)
    y = multiply(layout, values, dense.mT if is_across else dense, turned)
    y = y * columns.to(wide).unsqueeze(-2 if columns.dim() else 0)
    y = y if descriptor.mode == "dsd" else y.mT
    return y.to(getattr(torch, descriptor.out_dtype)).contiguous()
