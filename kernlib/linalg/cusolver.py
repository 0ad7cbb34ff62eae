"""The steps of the dense solvers by cuSOLVER and cuBLAS, through nvmath-python, in place.

Functions and arguments are those of :mod:`kernlib.linalg.native`; columns may be padded, and
batches have any stride. Work goes to torch's current stream, and infos stay on the device.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch

from kernlib.errors import KernlibError
from kernlib.linalg.layouts import is_packed, leading_dimension

# As cublas_api.h and cusolver_common.h number them.
_LEFT, _NON_UNIT = 0, 0
_FILL = {False: 0, True: 1}  # by upper
_TRANSPOSE = {False: 0, True: 1}
_WITH_VECTORS = 1
_CUDA_TYPE = {torch.float32: 0, torch.float64: 1}
_LETTER = {torch.float32: "s", torch.float64: "d"}
_C_TYPE = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}
_DEFAULT_MATH = 0

# Matrices from this order on are factored one by one: each fills the GPU, and the batched kernels
# are made for small ones.
LOOP_FROM = 512


class MissingExtraError(KernlibError, ImportError):
    """nvmath-python, the extra ``linalg``, is needed and cannot be imported."""


class Handles(NamedTuple):
    """cuSOLVER's handle and parameters, used by one call at a time."""

    solver: int
    params: int


# Handles that no call uses, by device and stream: one that changed its stream would share its
# workspace between two.
_idle: dict[tuple[int, int], list[Handles]] = defaultdict(list)


def serves(t: torch.Tensor) -> bool:
    """Whether a tensor's solver can be cuSOLVER: it is on an NVIDIA GPU, and the extra is there."""
    return t.is_cuda and torch.version.hip is None and import_error() is None


def require(what: str) -> None:
    """Raises MissingExtraError, which says ``what`` needs the extra, unless it is there."""
    error = import_error()
    if error is not None:
        raise MissingExtraError(
            f"{what} needs nvmath-python, which cannot be imported ({error}); "
            'install it with pip install ".[linalg]" in the checkout of kernlib'
        ) from error


def cholesky(a: torch.Tensor, upper: bool) -> torch.Tensor:
    """Write the factor into the triangle that is read; returns info (L,)."""
    from nvmath.bindings import cusolverDn

    count, n = a.shape[:2]
    info, fill, lead = _info(a), _FILL[upper], leading_dimension(a)
    with _handles(a) as (solver, params):
        if count > 1 and n < LOOP_FROM:
            factor = getattr(cusolverDn, f"{_LETTER[a.dtype]}potrf_batched")
            addresses = address_array(a)
            factor(solver, fill, n, addresses.data_ptr(), lead, info.data_ptr(), count)
        else:
            kind = _CUDA_TYPE[a.dtype]
            shape = (fill, n, kind, a.data_ptr(), lead, kind)
            space = _workspace(a, cusolverDn.xpotrf_buffer_size(solver, params, *shape))
            for matrix, entry in zip(entry_addresses(a), entry_addresses(info), strict=True):
                shape = (fill, n, kind, matrix, lead, kind)
                cusolverDn.xpotrf(solver, params, *shape, *_spaces(space), entry)
    _written(a)
    return info


def cholesky_solve(factor: torch.Tensor, b: torch.Tensor, upper: bool) -> None:
    """Write the solutions into b."""
    from nvmath.bindings import cusolverDn

    count, n, columns = b.shape
    if count > 1 and n < LOOP_FROM:
        for transposed in (True, False) if upper else (False, True):
            _triangular_solve(factor, b, upper, transposed)
    else:
        kind, ignored = _CUDA_TYPE[b.dtype], _info(b)[:1]
        leads = leading_dimension(factor), leading_dimension(b)
        with _handles(b) as (solver, params):
            for matrix, columns_of in zip(entry_addresses(factor), entry_addresses(b), strict=True):
                cusolverDn.xpotrs(
                    *(solver, params, _FILL[upper], n, columns, kind, matrix, leads[0]),
                    *(kind, columns_of, leads[1], ignored.data_ptr()),
                )
    _written(b)


def lu(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write both factors into a; returns pivots (L, N), int32 or int64, and info (L,)."""
    from nvmath.bindings import cublas, cusolverDn

    count, n = a.shape[:2]
    info, lead = _info(a), leading_dimension(a)
    if count > 1 and n < LOOP_FROM:
        pivots = torch.empty((count, n), dtype=torch.int32, device=a.device)
        factor, addresses = getattr(cublas, f"{_LETTER[a.dtype]}getrf_batched"), address_array(a)
        with _blas(a) as blas:
            outputs = pivots.data_ptr(), info.data_ptr()
            factor(blas, n, addresses.data_ptr(), lead, *outputs, count)
        _written(a)
        return pivots, info
    pivots = torch.empty((count, n), dtype=torch.int64, device=a.device)
    kind = _CUDA_TYPE[a.dtype]
    with _handles(a) as (solver, params):
        shape = (n, n, kind, a.data_ptr(), lead, kind)
        space = _workspace(a, cusolverDn.xgetrf_buffer_size(solver, params, *shape))
        for matrix, order, entry in zip(*map(entry_addresses, (a, pivots, info)), strict=True):
            shape = (n, n, kind, matrix, lead, order, kind)
            cusolverDn.xgetrf(solver, params, *shape, *_spaces(space), entry)
    _written(a)
    return pivots, info


def lu_solve(
    factors: torch.Tensor, pivots: torch.Tensor, b: torch.Tensor, transposed: bool
) -> None:
    """Write the solutions into b, those with the transposed matrix if ``transposed``."""
    from nvmath.bindings import cublas, cusolverDn

    count, n, columns = b.shape
    turn, leads = _TRANSPOSE[transposed], (leading_dimension(factors), leading_dimension(b))
    if pivots.dtype == torch.int32:
        solve, status = getattr(cublas, f"{_LETTER[b.dtype]}getrs_batched"), ctypes.c_int()
        addresses, pivots = (address_array(factors), address_array(b)), pivots.contiguous()
        with _blas(b) as blas:
            solve(
                *(blas, turn, n, columns, addresses[0].data_ptr(), leads[0], pivots.data_ptr()),
                *(addresses[1].data_ptr(), leads[1], ctypes.addressof(status), count),
            )
    else:
        kind, ignored = _CUDA_TYPE[b.dtype], _info(b)[:1]
        with _handles(b) as (solver, params):
            for matrix, order, columns_of in zip(
                *map(entry_addresses, (factors, pivots, b)), strict=True
            ):
                cusolverDn.xgetrs(
                    *(solver, params, turn, n, columns, kind, matrix, leads[0], order),
                    *(kind, columns_of, leads[1], ignored.data_ptr()),
                )
    _written(b)


def eigh(a: torch.Tensor, upper: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Write eigenvectors into a's columns; returns eigenvalues (L, N) and info (L,)."""
    # By one call where memory allows it: the host then goes on at N = 64 to 512, where one call for
    # each matrix waits, and 32 matrices of order 128 take 1.1 ms on an H200 in place of 48.
    if is_packed(a) or a.shape[1] < LOOP_FROM:
        packed = a if is_packed(a) else a.mT.contiguous().mT
        result = eigh_batched(packed, upper)
        if packed is not a:
            a.copy_(packed)
        return result
    return eigh_looped(a, upper)


def eigh_batched(a: torch.Tensor, upper: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`eigh` of packed matrices, by one call."""
    from nvmath.bindings import cusolverDn

    count, n = a.shape[:2]
    w, info, kind = a.new_empty(a.shape[:2]), _info(a), _CUDA_TYPE[a.dtype]
    shape = (_WITH_VECTORS, _FILL[upper], n, kind, a.data_ptr(), n, kind, w.data_ptr(), kind)
    with _handles(a) as (solver, params):
        sizes = cusolverDn.xsyev_batched_buffer_size(solver, params, *shape, count)
        space = _workspace(a, sizes)
        cusolverDn.xsyev_batched(solver, params, *shape, *_spaces(space), info.data_ptr(), count)
    _written(a)
    return w, info


def eigh_looped(a: torch.Tensor, upper: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`eigh`, one matrix after the other."""
    from nvmath.bindings import cusolverDn

    w, info, kind = a.new_empty(a.shape[:2]), _info(a), _CUDA_TYPE[a.dtype]
    n, lead, fill = a.shape[1], leading_dimension(a), _FILL[upper]
    with _handles(a) as (solver, params):
        shape = (_WITH_VECTORS, fill, n, kind, a.data_ptr(), lead, kind, w.data_ptr(), kind)
        space = _workspace(a, cusolverDn.xsyevd_buffer_size(solver, params, *shape))
        for matrix, values, entry in zip(*map(entry_addresses, (a, w, info)), strict=True):
            shape = (_WITH_VECTORS, fill, n, kind, matrix, lead, kind, values, kind)
            cusolverDn.xsyevd(solver, params, *shape, *_spaces(space), entry)
    _written(a)
    return w, info


def _triangular_solve(a: torch.Tensor, b: torch.Tensor, upper: bool, transposed: bool) -> None:
    """Small systems of one triangle, in one call."""
    from nvmath.bindings import cublas

    count, n, columns = b.shape
    solve, scalar = getattr(cublas, f"{_LETTER[b.dtype]}trsm_batched"), _C_TYPE[b.dtype](1)
    addresses = address_array(a), address_array(b)
    with _blas(b) as blas:
        solve(
            *(blas, _LEFT, _FILL[upper], _TRANSPOSE[transposed], _NON_UNIT, n, columns),
            *(ctypes.addressof(scalar), addresses[0].data_ptr(), leading_dimension(a)),
            *(addresses[1].data_ptr(), leading_dimension(b), count),
        )


@cache
def import_error() -> ImportError | None:
    """Why the extra cannot be imported, None where it can."""
    try:
        from nvmath.bindings import cublas, cusolverDn  # noqa: F401
    except ImportError as error:
        return error
    return None


@contextmanager
def _handles(t: torch.Tensor) -> Iterator[Handles]:
    """Handles of a tensor's device and its current stream, which no other call uses meanwhile."""
    from nvmath.bindings import cusolverDn

    with torch.cuda.device(t.device):
        stream = torch.cuda.current_stream().cuda_stream
        idle = _idle[t.get_device(), stream]
        try:
            handles = idle.pop()
        except IndexError:
            handles = Handles(cusolverDn.create(), cusolverDn.create_params())
            cusolverDn.set_stream(handles.solver, stream)
        try:
            yield handles
        finally:
            idle.append(handles)


@contextmanager
def _blas(t: torch.Tensor) -> Iterator[int]:
    """torch's cuBLAS handle of a tensor's device and current stream. Without TF32, which torch
    permits anew whenever it takes the handle."""
    from nvmath.bindings import cublas

    with torch.cuda.device(t.device):
        blas = torch.cuda.current_blas_handle()
        cublas.set_math_mode(blas, _DEFAULT_MATH)
        yield blas


def _workspace(t: torch.Tensor, sizes: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes on the device and on the host."""
    device, host = sizes
    space = torch.empty(device, dtype=torch.uint8, device=t.device)
    return space, torch.empty(host, dtype=torch.uint8, device="cpu")


def _spaces(workspace: tuple[torch.Tensor, torch.Tensor]) -> tuple[int, int, int, int]:
    device, host = workspace
    return device.data_ptr(), device.numel(), host.data_ptr(), host.numel()


def entry_addresses(t: torch.Tensor) -> list[int]:
    """The address of each entry of a batch."""
    step = t.stride(0) * t.element_size()
    return [t.data_ptr() + index * step for index in range(t.shape[0])]


def address_array(t: torch.Tensor) -> torch.Tensor:
    """:func:`entry_addresses` in an array on the device, as batched routines take them."""
    step = t.stride(0) * t.element_size()
    index = torch.arange(t.shape[0], dtype=torch.int64, device=t.device)
    return index.mul_(step).add_(t.data_ptr())


def _info(t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(t.shape[0], dtype=torch.int32, device=t.device)


def _written(t: torch.Tensor) -> None:
    """Tell autograd of a change that torch did not make."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)
