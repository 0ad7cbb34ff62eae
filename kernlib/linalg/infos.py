"""Infos of factorizations, of NaN too, which cuSOLVER reads as a positive pivot in a Cholesky
factorization and as 0 in one by LU. Nothing waits for the device but :func:`raise_for_info`."""

from __future__ import annotations

import torch

from kernlib.linalg.checks import refuse_meta

NOT_POSITIVE = "{what} is not positive definite: the leading minor of order {info} is not positive"
SINGULAR = "{what} is singular: pivot {info} is zero"
NOT_CONVERGED = "the eigenvalues did not converge (info {info}), as with NaN in {what}"


def of_cholesky(info: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The infos of Cholesky factors (..., N, N): where they are 0, the order of the first leading
    minor that is NaN."""
    pivots = factor.detach().diagonal(dim1=-2, dim2=-1)
    # NaN of one spreads to all that follow it, so those before it are as many as are numbers.
    first = (pivots == pivots).sum(-1, dtype=info.dtype).add_(1).remainder_(pivots.shape[-1] + 1)
    return torch.where(info == 0, first, info)


def holds_nan(matrix: torch.Tensor) -> torch.Tensor:
    """Whether matrices (..., N, N) hold NaN, N above 0. They are read once, before a factorization
    by LU overwrites them, whose factors may hold none."""
    return matrix.detach().amax((-2, -1)).isnan()


def of_lu(info: torch.Tensor, spoilt: torch.Tensor, order: int) -> torch.Tensor:
    """The infos of factorizations by LU: N + 1, which is no pivot, for matrices that hold NaN."""
    return info.masked_fill(spoilt, order + 1)


def raise_for_info(
    info: torch.Tensor, task: str, failure: str, what: str = "it", order: int | None = None
) -> None:
    """Raises LinAlgError for the first entry of a batch whose info is not 0; waits for the device.
    ``failure`` is said of ``what``; an info above ``order`` says that it holds NaN."""
    refuse_meta("a, of which check_errors=True reads the outcome,", info)
    values = info.reshape(-1).tolist()
    failed = [index for index, value in enumerate(values) if value]
    if failed:
        where = f"batch entry {failed[0]}: " if info.dim() else ""
        more = f" ({len(failed)} of {len(values)} entries failed)" if len(failed) > 1 else ""
        value = values[failed[0]]
        spoilt = order is not None and value > order
        reason = f"{what} holds NaN" if spoilt else failure.format(what=what, info=value)
        raise torch.linalg.LinAlgError(f"{task}: {where}{reason}{more}")
