"""Products with compressed matrices in PyTorch: one product with the matrix laid out."""

from __future__ import annotations

import torch

from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.runtime import expressions
from kernlib.runtime.dtypes import accumulator


def sparse_matmul(
    descriptor: SparseMatmul, dense: torch.Tensor, x: torch.Tensor, parameters: dict | None = None
) -> torch.Tensor:
    """The product that ``descriptor`` describes, of ``dense`` (R, C), or a matrix in torch's layout
    COO, and ``x`` (..., C): (..., R) in the dtype of ``x``. float16 and bfloat16 are computed in
    float32. ``parameters`` of the epilogue are numbers and tensors, vectors of shape (R,).

    As in every dense product, an infinite or NaN value of x is multiplied by the zeros too, which
    gives NaN. Kernels that skip entries that are not stored do not do so.
    """
    wide = accumulator(x.dtype)
    y = multiply(dense.to(wide), x.to(wide))
    y = finish(descriptor.epilogue, y, parameters or {})
    return y.to(x.dtype).contiguous()


def multiply(dense: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``y[..., r] = sum_c dense[r, c] * x[..., c]``."""
    if dense.layout != torch.strided:
        y = torch.sparse.mm(dense, x.reshape(-1, x.shape[-1]).t()).t()
        return y.reshape(*x.shape[:-1], dense.shape[0])
    return torch.nn.functional.linear(x, dense)


def finish(epilogue: tuple, y: torch.Tensor, parameters: dict) -> torch.Tensor:
    """The epilogues applied to a product, in its dtype."""
    return expressions.apply(epilogue, y, parameters) if epilogue else y
