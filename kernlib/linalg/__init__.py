"""Solvers: Cholesky, LU and symmetric eigenproblems, conjugate gradients for kernel systems, and
Kronecker products of matrices.

The dense ones follow torch.linalg, report failures in ``info`` tensors that stay on the device, and
can work in place; the iterative ones need products with the matrix alone. The model of the dense
ones is the kermac project.
"""

from kernlib.linalg.cusolver import MissingExtraError
from kernlib.linalg.dense import eigh, solve_cholesky, solve_lu
from kernlib.linalg.falkon import FalkonResult, falkon
from kernlib.linalg.iterative import CGResult, conjugate_gradient
from kernlib.linalg.kernel_systems import solve_kernel
from kernlib.linalg.kronecker import (
    KronEigh,
    kron_cholesky,
    kron_eigh,
    kron_inverse,
    kron_logdet,
    kron_solve,
)
from kernlib.linalg.masked_kronecker import masked_kron_matmul, masked_kron_solve
from kernlib.linalg.nystrom import NystromPreconditioner, nystrom

__all__ = [
    "CGResult",
    "FalkonResult",
    "KronEigh",
    "MissingExtraError",
    "NystromPreconditioner",
    "conjugate_gradient",
    "eigh",
    "falkon",
    "kron_cholesky",
    "kron_eigh",
    "kron_inverse",
    "kron_logdet",
    "kron_solve",
    "masked_kron_matmul",
    "masked_kron_solve",
    "nystrom",
    "solve_cholesky",
    "solve_kernel",
    "solve_lu",
]
