"""What a type checker sees of kernlib.sparse: the names that its ``__getattr__`` loads."""

from kernlib.families.sparse.compression import compress as compress
from kernlib.families.sparse.csr import from_csr as from_csr
from kernlib.families.sparse.matrix import SparseMatrix as SparseMatrix
from kernlib.families.sparse.operation import matmul as matmul
from kernlib.families.sparse.prune import magnitude as magnitude
from kernlib.sparse import prune as prune
