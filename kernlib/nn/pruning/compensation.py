"""SparseGPT of one weight: entries are dropped column by column, and the columns behind make up for
the error."""

from __future__ import annotations

import torch

from kernlib.families.sparse.prune import largest_of, n_m
from kernlib.runtime.precision import without_autocast


def compensated(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    density: float,
    pattern: tuple[int, int] | None,
    block_size: int,
    dampening: float,
) -> torch.Tensor:
    """A weight (R, C) with ``round(density * R * C)`` entries, or those of an N:M pattern, in the
    dtype of ``hessian`` (C, C), which is overwritten. Raises LinAlgError for a Hessian that is not
    positive definite.

    With U the upper Cholesky factor of the inverse of the dampened Hessian, the entries of a block
    of columns that stay are those of largest ``W^2 / diag(U)^2``. Column j of a block is dropped to
    q, its error ``(w - q) / U_jj`` times row j of U is taken from the columns behind it: at once
    within the block, and behind the block by one product.
    """
    weight = weight.to(hessian.dtype, copy=True, memory_format=torch.contiguous_format)
    with without_autocast(weight.device):
        weight[:, hessian.diagonal() == 0] = 0  # inputs that are always 0
        upper = _upper(hessian, dampening)
        rows, columns = weight.shape
        for start in range(0, columns, block_size):
            end = min(start + block_size, columns)
            part, factor = weight[:, start:end], upper[start:end, start:end]
            mask = None
            if pattern is None:
                # Rounded by the columns so far, so that all blocks together have the count.
                stay = round(density * rows * end) - round(density * rows * start)
                mask = largest_of(_scores(part, factor.diagonal()), stay)
            errors = _drop(part, factor, mask, pattern)
            weight[:, end:].addmm_(errors, upper[start:end, end:], alpha=-1)
    return weight


def _upper(hessian: torch.Tensor, dampening: float) -> torch.Tensor:
    """The upper Cholesky factor of the inverse of the dampened Hessian, in whose place it is
    computed."""
    diagonal = hessian.diagonal()
    diagonal[diagonal == 0] = 1
    diagonal += dampening * diagonal.mean()
    factor, info = torch.linalg.cholesky_ex(hessian)
    if not int(info):  # or there is no inverse
        # Column-major as LAPACK writes it, into the same memory: row-major would take a copy more.
        torch.cholesky_inverse(factor, out=hessian.mT)
        del factor  # before the next one, as large as the Hessian
        factor, info = torch.linalg.cholesky_ex(hessian, upper=True)
    if int(info):
        raise torch.linalg.LinAlgError(
            f"the Hessian of the inputs is not positive definite with dampening = {dampening:g}: "
            f"dampening must be higher, such as {max(10 * dampening, 0.01):g}, or batches must "
            "have more rows"
        )
    return factor


def _scores(part: torch.Tensor, diagonal: torch.Tensor) -> torch.Tensor:
    return (part / diagonal).square()


def _drop(
    part: torch.Tensor, factor: torch.Tensor, mask: torch.Tensor | None, pattern
) -> torch.Tensor:
    """Set the entries of a block that the mask drops to zero, in place, and return the errors of
    its columns. Masks of a pattern are chosen at the first column of each group, by what it is
    then."""
    errors = torch.empty_like(part, memory_format=torch.contiguous_format)
    diagonal = factor.diagonal()
    group = None
    for j in range(part.shape[1]):
        if pattern is not None:
            n, m = pattern
            if j % m == 0:
                group = n_m(_scores(part[:, j : j + m], diagonal[j : j + m]), n, m)
            stays = group[:, j % m]
        else:
            stays = mask[:, j]
        column = part[:, j]
        errors[:, j] = column.masked_fill(stays, 0) / diagonal[j]
        part[:, j + 1 :].addr_(errors[:, j], factor[j, j + 1 :], alpha=-1)
        column.masked_fill_(~stays, 0)
    return errors
