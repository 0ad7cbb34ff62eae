"""Products with block-sparse matrices, as they are called."""

from __future__ import annotations

from kernlib.families.blocksparse.attention import operation as attention
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.product import PRODUCT, calls
from kernlib.families.blocksparse.scaled import operation as scaled
from kernlib.families.blocksparse.scaled.descriptor import BlockSparseScaledMatmul
from kernlib.families.blocksparse.softmax import operation as softmax
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.runtime.products import front_door


def _recorded(*request):
    from kernlib.families.blocksparse import gradients  # which calls without a gradient do without

    return gradients.recorded(*request)


run = front_door(PRODUCT, calls, _recorded)
RUNS = {
    BlockSparseMatmul: run,
    BlockSparseScaledMatmul: scaled.run,
    BlockSparseSoftmax: softmax.run,
    BlockSparseAttention: attention.run,
}
