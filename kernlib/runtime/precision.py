"""Torch's products: the precision that its settings permit for float32, autocast, and long sums."""

from __future__ import annotations

from contextlib import nullcontext

import torch

# From 2.9 on torch has a setting for each backend and operation. A setting "none" takes the
# backend's, and a backend's "none" the one for all. torch's products go by what this function makes
# of the three; the older settings write them too, but do not show what was written to them since.
_setting = getattr(torch._C, "_get_fp32_precision_getter", None)
# Terms that a product may add one after the other, and those of a part of a longer sum.
LONGEST_SUM, PART_OF_SUM = 1024, 256


def float32_precision() -> str:
    """The precision that torch permits on GPUs for products of float32, "fp32" or "tf32", as it is
    at the call."""
    if _setting is None:
        return "tf32" if torch._C._get_cublas_allow_tf32() else "fp32"
    return "tf32" if _setting("cuda", "matmul") == "tf32" else "fp32"


def kernel_precision(permitted: str | None, dtype: torch.dtype) -> str:
    """The precision of products for lowering, "fp32" or "tf32": the descriptor's, or torch's
    setting where it has none. "bf16" is computed as "tf32"."""
    if dtype is not torch.float32:
        return "fp32"
    return "fp32" if (permitted or float32_precision()) == "fp32" else "tf32"


def rounds(t: torch.Tensor) -> bool:
    """Whether torch may round to TF32 what it multiplies of a tensor on a GPU."""
    return t.dtype is torch.float32 and t.is_cuda and float32_precision() == "tf32"


def times(precision: str | None, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` by torch, not in TF32 where a descriptor's ``precision`` forbids it."""
    if precision == "fp32" and rounds(left):
        return (left.double() @ right.double()).to(left.dtype)
    return left @ right


def rounds_gradients(t: torch.Tensor) -> bool:
    """Whether torch may round what its own gradients multiply of a tensor: in TF32, or, where they
    are taken inside of autocast as this is, in half types. float64 is left alone by both."""
    if t.dtype is not torch.float32 or t.is_meta:
        return False
    casts = torch.is_grad_enabled() and torch.is_autocast_enabled(t.device.type)
    return casts or rounds(t)


def is_rounded_on_cpu() -> bool:
    """Whether torch's products of float32 on a CPU may be in bfloat16 or TF32, of oneDNN."""
    if _setting is None:
        return torch.get_float32_matmul_precision() != "highest"
    return _setting("mkldnn", "matmul") in ("bf16", "tf32")


def without_autocast(device: torch.device):
    """A context in which autocast does not round the operands of torch's products."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """``left @ right`` of (..., M, N) and (..., N, C). Torch's products on the CPU may add up all
    terms of a sum one after the other: of 200,000 in float32 they were 2e-4 off. There long sums go
    by parts, in memory of no more numbers than the operands have."""
    (rows, terms), columns = left.shape[-2:], right.shape[-1]
    if left.device.type != "cpu" or left.dtype != torch.float32 or terms <= LONGEST_SUM:
        return left @ right
    length = max(PART_OF_SUM, min(rows, columns))  # so that partial sums are fewer than terms
    parts = terms // length
    covered = parts * length
    lines = left[..., :covered].unflatten(-1, (parts, length)).movedim(-2, 0)
    points = right[..., :covered, :].unflatten(-2, (parts, length)).movedim(-3, 0)
    total = (lines @ points).sum(0)
    return total if covered == terms else total + left[..., covered:] @ right[..., covered:, :]
