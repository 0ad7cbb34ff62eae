"""What a type checker sees of kernlib.nn: the names that its ``__getattr__`` loads."""

from kernlib.nn import compat as compat
from kernlib.nn.block_sparse.attention import (
    BlockSparseMultiheadAttention as BlockSparseMultiheadAttention,
)
from kernlib.nn.block_sparse.attention import block_sparse_attention as block_sparse_attention
from kernlib.nn.block_sparse.conv import BlockSparseConv2d as BlockSparseConv2d
from kernlib.nn.block_sparse.conv import taps_layout as taps_layout
from kernlib.nn.block_sparse.linear import BlockSparseLinear as BlockSparseLinear
from kernlib.nn.block_sparse.linear import block_sparsify as block_sparsify
from kernlib.nn.chains import suggest_chains as suggest_chains
from kernlib.nn.kronecker_linear import KroneckerLinear as KroneckerLinear
from kernlib.nn.kronecker_sparse import KSLinear as KSLinear
from kernlib.nn.replace import VIT_B16 as VIT_B16
from kernlib.nn.replace import VIT_S16 as VIT_S16
from kernlib.nn.replace import replace_linear as replace_linear
from kernlib.nn.sparse_linear import SparseLinear as SparseLinear
from kernlib.nn.sparse_replace import sparsify as sparsify
