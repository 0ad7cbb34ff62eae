"""The sparse op: products of tensors with compressed matrices, as they are called."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.descriptors.epilogues import Bias, Epilogue, as_epilogues
from kernlib.families.sparse.descriptor import SparseMatmul
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.families.sparse.product import BIASED, PLAIN, PRODUCT, calls
from kernlib.run import run_kernel
from kernlib.runtime.products import front_door


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
