"""The sparse op: products of tensors with compressed matrices, as they are called."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.epilogues import Bias, Epilogue, as_epilogues
from kernlib.families.sparse import checks
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.product import BIASED, PLAIN, PRODUCT, calls
from kernlib.run import run_kernel
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.products import front_door

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned


def matmul(
    w: SparseMatrix,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue | tuple[Epilogue, ...] = (),
    out: torch.Tensor | None = None,
    **parameters: float | torch.Tensor,
) -> torch.Tensor:
    """``y[..., r] = epilogue(sum_c W[r, c] * x[..., c] + bias[r])`` for a compressed matrix.

    ``x`` (..., C), ``bias`` (R,) or None, the result (..., R) as from
    ``torch.nn.functional.linear``; ``epilogue`` of :mod:`kernlib.descriptors.epilogues` with one
    keyword argument for each of its parameters. It is :func:`kernlib.run_kernel` of a
    :class:`kernlib.SparseMatmul`, and raises what that does. The model is MACKO-SpMV's
    ``multiply``.
    """
    if bias is None:
        descriptor = _descriptor(epilogue, False) if epilogue else PLAIN
        return run_kernel(descriptor, w, x, out=out, **parameters)
    descriptor = _descriptor(epilogue, True) if epilogue else BIASED
    return run_kernel(descriptor, w, x, out=out, bias=bias, **parameters)


def _descriptor(epilogue, bias: bool) -> SparseMatmul:
    epilogue = as_epilogues(epilogue)
    whole = (Bias(), *epilogue) if bias else epilogue
    return SparseMatmul(whole) if is_dynamo_compiling() else _made(whole)


_made = lru_cache(maxsize=256)(SparseMatmul)  # which Dynamo cannot trace


def _recorded(*request) -> torch.Tensor:
    from kernlib.families.sparse import gradients  # which calls without a gradient do without

    return gradients.recorded(*request)


run = front_door(PRODUCT, calls, _recorded)
RUNS = {SparseMatmul: run}


# Calls before anybody makes them.


def planned(descriptor: SparseMatmul, tensors: tuple, arguments: dict) -> list[Planned]:
    """What of a call has a plan, and of its gradient by x, for which the transpose is made."""
    from kernlib.families.sparse.gradients import parts, transpose_for
    from kernlib.runtime.ahead import planned_product

    checks.check_kinds(descriptor, tensors)
    checks.check_dense(("x",), x=tensors[1], out=arguments.get("out"))
    call = planned_product(PRODUCT, calls, parts, descriptor, tensors, arguments)
    w, x = call.request[1]
    if not call.recorded or not x.requires_grad or x.device.type != "cuda" or not x.numel():
        return [call]
    grad = x.new_empty((*x.shape[:-1], w.shape[0]))
    back = transpose_for(w, grad)
    if back is None:
        return [call]
    return [call, planned_product(PRODUCT, calls, None, PLAIN, (back, grad), {})]


def variants(
    descriptor: SparseMatmul, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, matrices of ``dtypes`` and any
    format; none for float64. Raises KeyError for other dtypes."""
    from kernlib.families.sparse.gradients import parts
    from kernlib.families.sparse.lowering import choose

    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    specs: dict[KernelSpec, None] = {}
    for epilogue in (descriptor.epilogue, parts(descriptor).product.epilogue, ()):
        for name in choose.FORMATS:
            specs |= dict.fromkeys(choose.variants(name, epilogue, names, arch))
    return list(specs)
