"""Products with block-sparse matrices, as they are called."""

from __future__ import annotations

from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.product import PRODUCT, calls
from kernlib.runtime.products import front_door


def _recorded(*request):
    from kernlib.families.blocksparse import gradients  # which calls without a gradient do without

    return gradients.recorded(*request)


run = front_door(PRODUCT, calls, _recorded)
RUNS = {BlockSparseMatmul: run}
