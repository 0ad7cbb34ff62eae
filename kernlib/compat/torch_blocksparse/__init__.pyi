"""What a type checker sees of kernlib.compat.torch_blocksparse: the names that its ``__getattr__``
loads."""

from kernlib.compat.torch_blocksparse.attention import (
    DeepSpeedSparseSelfAttention as DeepSpeedSparseSelfAttention,
)
from kernlib.compat.torch_blocksparse.attention import MultiheadAttention as MultiheadAttention
from kernlib.compat.torch_blocksparse.attention import SparsityInfo as SparsityInfo
from kernlib.compat.torch_blocksparse.attention import make_layout as make_layout
from kernlib.compat.torch_blocksparse.attention import replace_mha as replace_mha
from kernlib.compat.torch_blocksparse.elementwise import Permute as Permute
from kernlib.compat.torch_blocksparse.elementwise import ReLU as ReLU
from kernlib.compat.torch_blocksparse.layers import BlockSparseLinear as BlockSparseLinear
from kernlib.compat.torch_blocksparse.layers import Conv2d as Conv2d
from kernlib.compat.torch_blocksparse.layers import Linear as Linear
from kernlib.compat.torch_blocksparse.matmul import MatMul as MatMul
from kernlib.compat.torch_blocksparse.matmul import Softmax as Softmax
