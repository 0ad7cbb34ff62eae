"""Five ways of torch's own to apply one Kronecker-sparse factor, beside the kernel.

Each takes ``x`` (..., in) or, batch last, (in, ...), the weight (a, b, c, d) and the pattern, and
gives (..., out) or (out, ...), with any number of batch dimensions, none included, and any strides.
All five have gradients of every order in ``x`` and the weight, and follow autocast as
``torch.nn.functional.linear`` does. ``stored``, where given, is what :data:`STORAGE` makes of the
weight, so that it is not made again.

The algorithms and their names are those of the KSMM project.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from kernlib.families.kronecker_sparse import reference
from kernlib.nn.derived import ordinary

Pattern = tuple[int, int, int, int]


def einsum(x, weight, pattern: Pattern, batch_last: bool = False) -> torch.Tensor:
    """One ``torch.einsum`` over the weight as it is."""
    return reference.multiply(pattern, x, weight, batch_last)


def bmm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    pattern: Pattern,
    batch_last: bool = False,
    stored: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gather the features of each of the ``a * d`` blocks, one ``torch.bmm``, scatter.

    ``stored`` is the weight as (a*d, b, c).
    """
    a, b, c, d = pattern
    stored = blocks(weight) if stored is None else stored
    if batch_last:
        gathered = _gather(x, pattern, batch_last).unflatten(0, (a * d, c))
        return _scatter(torch.bmm(stored, gathered).flatten(0, 1), x, pattern, batch_last)
    gathered = x.reshape(-1, a, c, d).permute(1, 3, 0, 2).flatten(0, 1)
    product = torch.bmm(gathered, stored.mT).unflatten(0, (a, d))
    return product.permute(2, 0, 3, 1).reshape(*x.shape[:-1], a * b * d)


def dense(x, weight, pattern: Pattern, batch_last: bool = False, stored=None) -> torch.Tensor:
    """A product with the dense matrix (a*b*d, a*c*d), which is ``stored``."""
    stored = reference.dense(pattern, weight) if stored is None else stored
    if batch_last:
        return _times_matrix(stored, x, batch_last)
    return F.linear(x, stored)


def sparse(x, weight, pattern: Pattern, batch_last: bool = False, stored=None) -> torch.Tensor:
    """A product with the matrix in CSR, which is ``stored``; gradients, and calls inside
    torch.compile, torch.export and torch.func, by :func:`einsum`.

    Tensors of 16 bits are computed in float32, as torch's own sums are wrong on GPUs in less.
    """
    return _sparse_product("sparse", x, weight, pattern, batch_last, stored)


def bsr(x, weight, pattern: Pattern, batch_last: bool = False, stored=None) -> torch.Tensor:
    """Gather as in :func:`bmm`, a product with the block diagonal matrix in BSR, scatter; else as
    :func:`sparse`. Blocks are squares of side gcd(b, c); where that is 1, ``stored`` is CSR.

    Tensors of 16 bits are computed in float32, as torch has no such product for every block.
    """
    return _sparse_product("bsr", x, weight, pattern, batch_last, stored)


ALGORITHMS: dict[str, Callable[..., torch.Tensor]] = {
    "einsum": einsum, "bmm": bmm, "dense": dense, "sparse": sparse, "bsr": bsr,
}  # fmt: skip


# What an algorithm stores in place of the weight.


def blocks(weight: torch.Tensor) -> torch.Tensor:
    """(a*d, b, c): the dense block of every pair (i, l)."""
    return weight.permute(0, 3, 1, 2).flatten(0, 1)


def csr(weight: torch.Tensor) -> torch.Tensor:
    """The matrix (a*b*d, a*c*d) in CSR, without a gradient, in the dtype it is multiplied in."""
    a, b, c, d = weight.shape
    weight = weight.detach().to(_wide(weight))
    i, l, k = (_places(weight, size) for size in (a, d, c))
    columns = i.view(-1, 1, 1, 1) * (c * d) + l.view(-1, 1) + k * d
    rows = _places(weight, a * b * d + 1) * c
    values = weight.transpose(2, 3).flatten()
    size = (a * b * d, a * c * d)
    return _compressed(
        torch.sparse_csr_tensor, rows, columns.expand(a, b, d, c).flatten(), values, size
    )


def bsr_blocks(weight: torch.Tensor) -> torch.Tensor:
    """The block diagonal matrix of :func:`blocks` in BSR, in CSR where the blocks are of 1, without
    a gradient, in the dtype it is multiplied in."""
    a, b, c, d = weight.shape
    weight = weight.detach().to(_wide(weight))
    side = _side(b, c, weight.device)
    high, wide = b // side, c // side
    tiles = blocks(weight).reshape(a * d, high, side, wide, side)
    values = tiles.transpose(2, 3).reshape(-1, side, side)
    make = torch.sparse_csr_tensor if side == 1 else torch.sparse_bsr_tensor
    rows = _places(weight, a * d * high + 1) * wide
    columns = _places(weight, a * d * wide).view(-1, 1, wide).expand(-1, high, -1).flatten()
    values = values.flatten() if side == 1 else values
    return _compressed(make, rows, columns, values, (a * d * b, a * d * c))


def _compressed(make: Callable, rows, columns, values, size: tuple[int, int]) -> torch.Tensor:
    """A sparse tensor whose invariants hold by how its parts were made: asking torch would wait for
    a GPU. Its products read the parts as if these were contiguous, out of bounds where an expanded
    one that was flattened is still a view of fewer elements."""
    parts = [part.contiguous() for part in (rows, columns, values)]
    return make(*parts, size=size, dtype=values.dtype, device=values.device, check_invariants=False)


STORAGE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bmm": blocks,
    "dense": lambda weight: reference.dense(tuple(weight.shape), weight),
    "sparse": csr,
    "bsr": bsr_blocks,
}


def _side(b: int, c: int, device: torch.device) -> int:
    """Side of the square blocks. On CPUs torch has BSR only with MKL, which ARM lacks."""
    return math.gcd(b, c) if device.type != "cpu" or torch.backends.mkl.is_available() else 1


def _wide(t: torch.Tensor) -> torch.dtype:
    """The dtype of a sparse product. Of 16 bits torch has BSR for some blocks only, and CSR on GPUs
    whose sums are wrong: of 5000 ones in bfloat16 5984."""
    return torch.float32 if t.dtype in (torch.float16, torch.bfloat16) else t.dtype


def _places(weight: torch.Tensor, count: int) -> torch.Tensor:
    """0, 1, ... as indices: of 32 bits, as cuSPARSE and MKL want them, where those do."""
    dtype = torch.int32 if weight.numel() < 2**31 else torch.int64
    return torch.arange(count, device=weight.device, dtype=dtype)


# Gathering and scattering of features, from (i, k, l) to (i, l, k) and back.


def _gather(x: torch.Tensor, pattern: Pattern, batch_last: bool) -> torch.Tensor:
    """(batch, a*d*c) or (a*d*c, batch)."""
    a, _, c, d = pattern
    if batch_last:
        return x.reshape(a, c, d, -1).transpose(1, 2).flatten(0, 2)
    return x.reshape(-1, a, c, d).transpose(2, 3).flatten(1)


def _scatter(y: torch.Tensor, x: torch.Tensor, pattern: Pattern, batch_last: bool) -> torch.Tensor:
    """``y`` (batch, a*d*b) or (a*d*b, batch) with its features in place and the batch of ``x``."""
    a, b, _, d = pattern
    if batch_last:
        return y.unflatten(0, (a, d, b)).transpose(1, 2).reshape(a * b * d, *x.shape[1:])
    return y.unflatten(1, (a, d, b)).transpose(2, 3).reshape(*x.shape[:-1], a * b * d)


# Sparse products. torch gives them no second derivative, and BSR on a CPU no first: gradients are
# those of the einsum. What is compiled, traced or transformed can be computed by it alone.


def _sparse_product(algorithm, x, weight, pattern, batch_last, stored) -> torch.Tensor:
    if not ordinary(x, weight) or x.numel() == 0:
        return einsum(x, weight, pattern, batch_last)
    x, weight = _autocast(x, weight)
    with torch.autocast(x.device.type, enabled=False):
        return _SparseProduct.apply(x, weight, algorithm, pattern, batch_last, stored)


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, algorithm, pattern, batch_last, stored):
        dtype = _wide(x)
        if stored is None or stored.dtype != dtype:  # made of what autocast has narrowed since
            stored = STORAGE[algorithm](weight)
        if algorithm == "sparse":
            product = _times_matrix(stored, x.to(dtype), batch_last)
        else:
            product = _times_blocks(stored, x.to(dtype), pattern, batch_last)
        return product.to(x.dtype).contiguous()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _, ctx.pattern, ctx.batch_last, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        a, b, c, d = ctx.pattern
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = einsum(dy, weight.transpose(1, 2), (a, c, b, d), ctx.batch_last)
        if ctx.needs_input_grad[1]:
            dweight = reference.weight_gradient(ctx.pattern, dy, x, ctx.batch_last)
        return dx, dweight, None, None, None, None


def _times_matrix(stored, x, batch_last: bool) -> torch.Tensor:
    if batch_last:
        return (stored @ x.reshape(x.shape[0], -1)).reshape(stored.shape[0], *x.shape[1:])
    return (stored @ x.reshape(-1, x.shape[-1]).mT).mT.reshape(*x.shape[:-1], stored.shape[0])


def _times_blocks(stored, x, pattern: Pattern, batch_last: bool) -> torch.Tensor:
    gathered = _gather(x, pattern, batch_last)
    product = stored @ gathered if batch_last else (stored @ gathered.mT).mT
    return _scatter(product, x, pattern, batch_last)


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device; torch raises for those that have none, such as meta."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _autocast(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The operands of a product as autocast would have them."""
    device = tensors[0].device
    if not autocasts(device):
        return list(tensors)
    dtype = torch.get_autocast_dtype(device.type)
    return [t if t.dtype == torch.float64 else t.to(dtype) for t in tensors]


def nearest_factor(weight: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """The factor (a, b, c, d) whose matrix is nearest to ``weight`` (a*b*d, a*c*d) in the Frobenius
    norm: the values of ``weight`` on the support."""
    a, b, c, d = pattern
    spread = weight.reshape(a, b, d, a, c, d)
    return spread.diagonal(0, 0, 3).diagonal(0, 1, 3).permute(2, 0, 1, 3)
