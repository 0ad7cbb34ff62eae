"""What a type checker sees of kernlib.sparse: the names that its ``__getattr__`` loads."""

from kernlib.ops.sparse import matmul as matmul
from kernlib.ops.sparse_csr import from_csr as from_csr
from kernlib.ops.sparse_matrix import SparseMatrix as SparseMatrix
from kernlib.ops.sparse_matrix import compress as compress
from kernlib.sparse.prune import magnitude as magnitude
