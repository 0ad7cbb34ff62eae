"""Torch's settings: what those for products of float32 permit, the older ones, the newer and mixes,
and those that change no call of kernlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# torch before 2.9 has the older settings alone.
HAS_NEWER = hasattr(torch.backends, "fp32_precision")
MODULES = {
    "all": torch.backends,
    "mkldnn": torch.backends.mkldnn,
    "mkldnn.matmul": getattr(torch.backends.mkldnn, "matmul", None),
    "cudnn": torch.backends.cudnn,  # all of cuda
    "cudnn.conv": getattr(torch.backends.cudnn, "conv", None),
    "cuda.matmul": torch.backends.cuda.matmul,
}

# What is set, in this order, and whether torch's products are in TF32 then.
OLDER = {
    "default": ((), False),
    "high": (("precision", "high"), True),
    "medium": (("precision", "medium"), True),
    "highest": (("precision", "high", "precision", "highest"), False),
    "allow_tf32": (("allow_tf32", True), True),
    "high, then not allow_tf32": (("precision", "high", "allow_tf32", False), False),
}
NEWER = {
    "products": (("cuda.matmul", "tf32"), True),
    "high, then exact products": (("precision", "high", "cuda.matmul", "ieee"), False),
    "allow_tf32, then exact products": (("allow_tf32", True, "cuda.matmul", "ieee"), False),
    "products, then highest": (("cuda.matmul", "tf32", "precision", "highest"), False),
    "all": (("all", "tf32"), True),
    "all, but not products": (("all", "tf32", "cuda.matmul", "ieee"), False),
    "all of cuda": (("cudnn", "tf32"), True),
    "all, but not of cuda": (("all", "tf32", "cudnn", "ieee"), False),
    "all in bfloat16": (("all", "bf16"), False),
    "convolutions": (("cudnn.conv", "tf32"), False),
    "on a CPU": (("mkldnn.matmul", "bf16"), False),
}
CASES = OLDER | NEWER if HAS_NEWER else OLDER


@contextmanager
def torch_permits(name: str) -> Iterator[bool]:
    """Set torch's settings as a case says; yields whether its products are in TF32 then."""
    steps, rounded = CASES[name]
    try:
        for what, value in zip(steps[::2], steps[1::2], strict=True):
            if what == "precision":
                torch.set_float32_matmul_precision(value)
            elif what == "allow_tf32":
                torch.backends.cuda.matmul.allow_tf32 = value
            else:
                MODULES[what].fp32_precision = value
        yield rounded
    finally:
        torch.set_float32_matmul_precision("highest")
        for module in filter(None, MODULES.values() if HAS_NEWER else ()):
            module.fp32_precision = "none"
        if HAS_NEWER:
            torch.backends.cudnn.allow_tf32 = True  # as torch begins


@contextmanager
def attributes(owner, **values) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


_MATMUL = torch.backends.cuda.matmul
# Of torch's own products, attention and convolutions on GPUs: nothing to kernels.
OF_TORCH_ALONE = {
    "float16 sums": lambda: attributes(_MATMUL, allow_fp16_accumulation=True),
    "split float16 sums": lambda: attributes(_MATMUL, allow_fp16_reduced_precision_reduction=False),
    "split bfloat16 sums": lambda: attributes(
        _MATMUL, allow_bf16_reduced_precision_reduction=False
    ),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "cudnn": lambda: torch.backends.cudnn.flags(
        enabled=False, benchmark=True, deterministic=True, allow_tf32=False
    ),
}
