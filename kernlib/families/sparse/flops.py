"""Operations of each operator, as torch's FlopCounterMode counts them: two for a product that is
added up."""

from __future__ import annotations

import math

import torch

from kernlib.families.sparse.fitted import fitted
from kernlib.families.sparse.layout import parse_layout
from kernlib.runtime.tensors import stand_ins


def _product(result: torch.Tensor, /, *, x, matrix, layout: str, **_) -> int:
    """Of the entries that are not zero; of fake tensors, where nobody knows these, of all."""
    known = not (stand_ins(*matrix) or matrix[0].is_meta)
    entries = fitted(layout, matrix).nnz if known else math.prod(parse_layout(layout)[1])
    return 2 * entries * x.shape[:-1].numel()


FORMULAS = {"sparse_matmul": _product, "sparse_matmul_product": _product}
