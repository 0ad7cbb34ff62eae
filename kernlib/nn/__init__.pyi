"""What a type checker sees of kernlib.nn: the names that its ``__getattr__`` loads."""

from kernlib.nn import compat as compat
from kernlib.nn.kronecker_linear import KroneckerLinear as KroneckerLinear
from kernlib.nn.kronecker_sparse import KSLinear as KSLinear
from kernlib.nn.replace import VIT_S16 as VIT_S16
from kernlib.nn.replace import replace_linear as replace_linear
from kernlib.nn.sparse_linear import SparseLinear as SparseLinear
from kernlib.nn.sparse_replace import sparsify as sparsify
