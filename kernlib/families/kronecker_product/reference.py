"""Products with Kronecker products in PyTorch: one batched product of matrices for each factor, on
reshaped views, differentiable to any order."""

from __future__ import annotations

import math

import torch

from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.runtime import expressions
from kernlib.runtime.dtypes import accumulator
from kernlib.runtime.precision import float32_precision
from kernlib.runtime.tensors import broadcast_shapes

# Rows and columns up to which neighbours are multiplied into one factor. With this limit 1000 rows
# and six factors (4, 4) in float32 take 4.7 ms on two cores, one by one 19, and with a limit of 64
# 8.6.
MERGED = 16


def kronecker_product(
    descriptor: KroneckerProduct,
    x: torch.Tensor,
    factors: tuple[torch.Tensor, ...],
    parameters: dict | None = None,
) -> torch.Tensor:
    """The result of ``descriptor`` for ``x`` (..., M, in) or (..., in, M) and its factors, in their
    dtype; float16 and bfloat16 are computed in float32. ``parameters`` of the epilogue are numbers
    and tensors, vectors of shape (out,)."""
    wide = _arithmetic(descriptor, x)
    pairs = zip(factors, descriptor.transposed, strict=True)
    matrices = [(f.mT if turned else f).to(wide) for f, turned in pairs]
    if descriptor.side == "left":
        matrices = [f.mT for f in matrices]
    symbols = has_symbols(matrices)
    matrices = matrices if symbols else merged(matrices)
    y = multiply(x.to(wide), matrices, descriptor.axis, symbols)
    y = expressions.apply(descriptor.epilogue, y, parameters or {}, axis=descriptor.axis)
    return y.to(x.dtype).contiguous()


def multiply(
    x: torch.Tensor, factors: list[torch.Tensor], axis: int, symbols: bool = False
) -> torch.Tensor:
    """``x (F1 ⊗ ... ⊗ FN)`` along the dimension ``axis`` of x, -1 or -2. The factor that shortens
    rows most, or lengthens them least, is applied first, unless sizes are ``symbols``."""
    batch = broadcast_shapes(x.shape[:-2], *(f.shape[:-2] for f in factors))
    rows, after = x.shape[-3 - axis], 1 if axis == -1 else x.shape[-1]
    before, lead = (rows if axis == -1 else 1), batch
    if all(f.dim() == 2 for f in factors):  # a batch of x alone joins the dimension before
        before, lead = before * math.prod(batch), ()
    elif x.shape[:-2] != batch:
        x = x.expand(*batch, *x.shape[-2:])
    sizes = [f.shape[-2] for f in factors]
    order = range(len(factors))
    if not symbols:
        order = sorted(order, key=lambda i: _growth(factors[i]))
    for index in order:
        left = before * math.prod(sizes[:index])
        right = math.prod(sizes[index + 1 :]) * after
        x = _along(x.reshape(*lead, left, sizes[index], right), factors[index], symbols)
        sizes[index] = factors[index].shape[-1]
    features = math.prod(sizes)
    return x.reshape(*batch, *((rows, features) if axis == -1 else (features, rows)))


def merged(factors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Fewer factors with the same product: small neighbours are multiplied into one."""
    matrices = [factors[0]]
    for factor in factors[1:]:
        sizes = [p * q for p, q in zip(matrices[-1].shape[-2:], factor.shape[-2:], strict=True)]
        if max(sizes) <= MERGED:
            matrices[-1] = kron(matrices[-1], factor)
        else:
            matrices.append(factor)
    return matrices


def kron(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The Kronecker product of two matrices, or of the pairs of two batches, which broadcast."""
    entries = a[..., :, None, :, None] * b[..., None, :, None, :]
    rows, columns = a.shape[-2] * b.shape[-2], a.shape[-1] * b.shape[-1]
    return entries.reshape(*entries.shape[:-4], rows, columns)


def _along(x: torch.Tensor, factor: torch.Tensor, symbols: bool) -> torch.Tensor:
    """``y[..., l, q, r] = sum_p x[..., l, p, r] * factor[..., p, q]``."""
    right, columns = x.shape[-1], factor.shape[-1]
    if not symbols and right == 1:
        return (x.squeeze(-1) @ factor).unsqueeze(-1)
    if symbols or 2 * right < columns:  # lest autograd make a gradient of the factor for each l
        return (x.mT.flatten(-3, -2) @ factor).unflatten(-2, (x.shape[-3], right)).mT
    return factor.mT.unsqueeze(-3) @ x


def has_symbols(factors: list[torch.Tensor]) -> bool:
    """Whether a size is a symbol: a program of torch.compile holds for all sizes, and a decision by
    one would hold for some."""
    return any(isinstance(size, torch.SymInt) for f in factors for size in f.shape[-2:])


def _growth(factor: torch.Tensor) -> float:
    """The key by which factors are ordered. With sizes (P, Q) it is ``1 / P - 1 / Q``: of two
    factors the one with the smaller key comes first, for the fewest operations."""
    return 1 / factor.shape[-2] - 1 / factor.shape[-1]


def _arithmetic(descriptor: KroneckerProduct, x: torch.Tensor) -> torch.dtype:
    """The dtype of the sums: float64 where torch would compute float32 in TF32 though the
    descriptor does not permit it."""
    wide = accumulator(x.dtype)
    strict = descriptor.precision == "fp32" or x.dtype != torch.float32
    if wide == torch.float32 and x.device.type == "cuda" and strict:
        return torch.float64 if float32_precision() != "fp32" else wide
    return wide
