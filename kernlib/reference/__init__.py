"""The same operations in plain PyTorch: the CPU backend, and the oracle of every test."""

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Those of the grammar of expressions that torch leaves to MKL's vector functions.
_BY_MKL = (
    torch.cos, torch.erf, torch.exp, torch.expm1, torch.log, torch.log1p, torch.sin, torch.sqrt,
    torch.tanh,
)  # fmt: skip


def _settle_vector_functions() -> None:
    """Call each once for one number, in 0.7 ms. MKL before 2025 looks for the code of a function at
    its first call, and one by several threads at once may get some of its results from code of low
    accuracy: 2e-5 in place of 6e-8, in one process of 90 (pytorch/pytorch#188792)."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype, device="cpu")
        for function in _BY_MKL:
            function(one)


if torch.backends.mkl.is_available() and not is_in_torch_dispatch_mode():
    _settle_vector_functions()
