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
    """The result of ``descriptor``."""
    # Where torch may round float32 to TF32, which products of float8 and scales are not.
    strict = a.device.type == "cuda" and float32_precision() != "fp32"
    wide = torch.float64 if strict else torch.float32
    is_dsd = descriptor.mode == "dsd"
    values, slots, dense, columns = (a, scale_a, b, scale_b) if is_dsd else (b, scale_b, a, scale_a)
    turned = descriptor.transpose_b if is_dsd else descriptor.transpose_a
    values, dense = values.to(wide) * slots[..., None, None].to(wide), dense.to(wide)
    dense = dense.mT if turned else dense
    y = multiply(layout, values, dense, descriptor.transposed, not is_dsd)
    if columns.dim():
        columns = columns.unsqueeze(-2 if is_dsd else -1)
    return (y * columns.to(wide)).to(getattr(torch, descriptor.out_dtype)).contiguous()
