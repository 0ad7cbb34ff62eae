"""What the solvers ask of their tensors, and what they say of the outcome by infos."""

from __future__ import annotations

import torch

from kernlib.descriptors.base import check_flag
from kernlib.records import NamedTuple
from kernlib.runtime.tensors import (
    broadcast_shapes,
    check_dense,
    is_lazy,
    materialised,
    overlaps_itself,
    refuse_distributed,
    refuse_overlap,
    refuse_transforms,
)

DTYPES = (torch.float32, torch.float64)
_NO_TRANSFORMS = "kernlib.linalg does not support; give it a batch of matrices instead"


NOT_POSITIVE = "{what} is not positive definite: the leading minor of order {info} is not positive"
SINGULAR = "{what} is singular: pivot {info} is zero"
NOT_CONVERGED = "the eigenvalues did not converge (info {info}), as with NaN in {what}"


class System(NamedTuple):
    """A checked ``a x = b``: b as columns, and the batch of x."""

    a: torch.Tensor  # (..., N, N)
    b: torch.Tensor  # (..., N, C)
    vector: bool  # b was given without the dimension of columns
    batch: torch.Size


def check_flags(**flags) -> None:
    """Raises TypeError for what is neither True nor False."""
    for name, flag in flags.items():
        check_flag(name, flag)


def refuse_meta(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a tensor of the meta device where its values decide what follows."""
    if tensor.is_meta:
        raise ValueError(f"{name} must have values, which one on the meta device has not")


def refuse_not_finite(name: str, tensor: torch.Tensor) -> None:
    """Raises ValueError for a NaN or an infinity among values; waits for the device."""
    wrong = int((~tensor.isfinite()).sum())
    if wrong:
        kind = "NaN" if tensor.isnan().any() else "infinity"
        raise ValueError(
            f"{name} must be finite, and holds {kind}: {wrong} of its {tensor.numel()} values are "
            "NaN or infinite"
        )


def check_system(a: torch.Tensor, b: torch.Tensor, overwrite_a: bool, overwrite_b: bool) -> System:
    """Raises TypeError and ValueError that name the argument, RuntimeError for gradients."""
    a, b = check_matrix(a, overwrite_a), _check_tensor("b", b, overwrite_b)
    if b.dtype != a.dtype:
        raise TypeError(f"b must be {a.dtype} as a is, got {b.dtype}")
    if b.device != a.device:
        raise ValueError(f"b must be on a's device {a.device}, got {b.device}")
    vector = b.dim() == 1 or b.shape == a.shape[:-1]
    columns = b.unsqueeze(-1) if vector else b
    if columns.dim() < 2 or columns.shape[-2] != a.shape[-1]:
        raise ValueError(
            f"b must be (N,), (..., N) with the batch of a, or (..., N, C) for a of shape "
            f"{tuple(a.shape)}, got {tuple(b.shape)}"
        )
    batch = _broadcast(a, columns)
    if overwrite_b and batch != columns.shape[:-2]:
        raise ValueError(
            f"overwrite_b needs b of the batch {tuple(batch)} that x has, got shape "
            f"{tuple(b.shape)}"
        )
    if overwrite_a or overwrite_b:
        _refuse_shared(a, b)
    return System(a, columns, vector, batch)


def check_matrix(a: torch.Tensor, overwrite: bool) -> torch.Tensor:
    """A square (..., N, N), with values in memory. Raises as :func:`check_system`."""
    a = _check_tensor("a", a, overwrite)
    if a.dim() < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"a must be square, (..., N, N), got shape {tuple(a.shape)}")
    return a


def _check_tensor(name: str, tensor: torch.Tensor, overwrite: bool) -> torch.Tensor:
    check_dense((name,), **{name: tensor})
    refuse_distributed(**{name: tensor})
    refuse_transforms(_NO_TRANSFORMS, **{name: tensor})
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be float32 or float64, got {tensor.dtype}")
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name} requires a gradient, which kernlib.linalg does not compute; use torch.linalg, "
            f"or pass {name}.detach()"
        )
    if not overwrite:
        return materialised(tensor)
    if is_lazy(tensor):
        raise ValueError(
            f"{name} is a negated view or zero tensor, which overwrite_{name} cannot "
            f"write; pass {name}.clone()"
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made in inference mode, outside of which overwrite_{name} cannot write it"
        )
    if overlaps_itself(tensor):
        raise ValueError(
            f"{name} overlaps itself (shape {tuple(tensor.shape)}, strides {tensor.stride()}), "
            f"which overwrite_{name} cannot write; clone it"
        )
    return tensor


def _broadcast(a: torch.Tensor, b: torch.Tensor) -> torch.Size:
    try:
        return broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"the batches of a {tuple(a.shape)} and b {tuple(b.shape)} do not broadcast"
        ) from None


def _refuse_shared(a: torch.Tensor, b: torch.Tensor) -> None:
    try:
        refuse_overlap(b, a=a)
    except ValueError:
        raise ValueError(
            "b shares memory with a, of which overwrite_a or overwrite_b would change both; give "
            "it memory of its own"
        ) from None


# Infos of factorizations, of NaN too, which cuSOLVER reads as a positive pivot in a Cholesky
# factorization and as 0 in one by LU.


def cholesky_info(info: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
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


def lu_info(info: torch.Tensor, spoilt: torch.Tensor, order: int) -> torch.Tensor:
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
