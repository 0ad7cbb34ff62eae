"""What torch asks of the operators besides their results. FlopCounterMode gets the number of
operations, two for each product that is added up. DTensors get the tensors that may be sharded, and
how the result is sharded then."""

from __future__ import annotations

import math

import torch

from kernlib.families.sparse.fitted import fitted
from kernlib.families.sparse.layout import shape_of
from kernlib.runtime.tensors import stand_ins
from kernlib.sharding import Choice

# Operations.


def _count_product(result: torch.Tensor, /, *, x, matrix, layout: str, **_) -> int:
    """Operations of the entries other than zero; of all entries for fake tensors, whose zeros are
    unknown."""
    has_values = not (stand_ins(*matrix) or matrix[0].is_meta)
    entries = fitted(layout, matrix).nnz if has_values else math.prod(shape_of(layout, matrix)[0])
    return 2 * entries * x.shape[:-1].numel()


FORMULAS = {"sparse_matmul": _count_product, "sparse_matmul_product": _count_product}


# Shardings.


def _shard_product(*, x, **_) -> list[Choice]:
    return [Choice({"x": dim}, (dim,)) for dim in range(x.dim() - 1)]


SHARDINGS = {"sparse_matmul": _shard_product, "sparse_matmul_product": _shard_product}
