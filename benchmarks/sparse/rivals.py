"""Ways to multiply with a sparse matrix: kernlib's formats, cuBLAS on the dense one, cuSPARSE.

Each is a list of calls without arguments, each call on a copy of the matrix of its own, so that a
replay of all finds none of them in L2.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks.common.timing import MAX_SETS, ROTATED_BYTES
from benchmarks.sparse.problems import LARGE, Problem
from kernlib.sparse import SparseMatrix, compress, matmul

Calls = list[Callable[[], torch.Tensor]]
CUSPARSE_SHAPES, CUSPARSE_DENSITIES = ((4096, 4096), LARGE[0]), (0.5, 0.1)


class Contender(NamedTuple):
    """Forms of one contender, of which the fastest counts, and whether a graph can hold them."""

    forms: dict[str, Calls]
    captured: bool = True


def copies(nbytes: int) -> int:
    """How many copies of so many bytes are ROTATED_BYTES in all."""
    return min(MAX_SETS, max(2, math.ceil(ROTATED_BYTES / max(nbytes, 1))))


def compressed(matrix: SparseMatrix, x: torch.Tensor, frozen: bool = False) -> Contender:
    """A product with a compressed matrix."""
    every = [matrix, *(copy.deepcopy(matrix) for _ in range(copies(matrix.nbytes) - 1))]
    if frozen:
        for w in every:
            w.freeze()
    return Contender({"": [lambda w=w: matmul(w, x) for w in every]})


def cublas(dense: torch.Tensor, x: torch.Tensor) -> Contender:
    """The product with the dense matrix in every way that torch has for it."""
    count = copies(dense.numel() * dense.element_size())
    weights = [dense, *(dense.clone() for _ in range(count - 1))]
    shape = (dense.shape[0],) if x.dim() == 1 else (x.shape[0], dense.shape[0])
    outs = [dense.new_empty(shape) for _ in weights]
    pairs = list(zip(weights, outs, strict=True))
    forms = {"linear": [lambda w=w: F.linear(x, w) for w in weights]}
    if x.dim() == 1:
        forms["mv"] = [lambda w=w: torch.mv(w, x) for w in weights]
        forms["mv out"] = [lambda w=w, y=y: torch.mv(w, x, out=y) for w, y in pairs]
        rows = x[None]
        forms["mm out"] = [lambda w=w, y=y: torch.mm(rows, w.t(), out=y[None])[0] for w, y in pairs]
    else:
        forms["mm out"] = [lambda w=w, y=y: torch.mm(x, w.t(), out=y) for w, y in pairs]
        forms["turned"] = [lambda w=w: torch.mm(w, x.t()).t() for w in weights]
    return Contender(forms)


def cusparse(dense: torch.Tensor, x: torch.Tensor) -> Contender:
    """The product with the matrix in CSR, indices of 32 bits."""
    found = dense.to_sparse_csr()
    crow, col, values = found.crow_indices().int(), found.col_indices().int(), found.values()
    del found
    count = copies(values.numel() * (values.element_size() + 4))
    matrices = [
        torch.sparse_csr_tensor(
            crow, col.clone(), values.clone(), dense.shape, check_invariants=False
        )
        for _ in range(count)
    ]
    return Contender({"": [lambda w=w: w @ x for w in matrices]}, captured=False)


def rivals(problem: Problem, dense: torch.Tensor, x: torch.Tensor) -> dict[str, Callable]:
    """What makes each rival of a case, but for cuBLAS."""
    found: dict[str, Callable[[], Contender]] = {}
    if problem.format != "auto" or problem.frozen:  # those stand beside the same without it
        return found
    if problem.values is not None:
        return {f"kernlib {problem.kind}": lambda: compressed(compress(dense), x)}
    if problem.columns in (1, 8):
        found["macko"] = lambda: compressed(compress(dense, "macko"), x)
    measured = (problem.rows, problem.cols) in CUSPARSE_SHAPES
    if (
        measured and problem.density in CUSPARSE_DENSITIES
        and (problem.section, problem.kind, problem.columns) == ("headline", "fp16", 1)
    ):  # fmt: skip
        found["cusparse"] = lambda: cusparse(dense, x)
    return found
