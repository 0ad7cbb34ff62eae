"""What a type checker sees of kernlib: the names that its ``__getattr__`` loads."""

from kernlib import blocksparse as blocksparse
from kernlib import checkpoints as checkpoints
from kernlib import compat as compat
from kernlib import descriptors as descriptors
from kernlib import distributed as distributed
from kernlib import events as events
from kernlib import linalg as linalg
from kernlib import nn as nn
from kernlib import settings as settings
from kernlib import sparse as sparse
from kernlib.ahead import compile as compile
from kernlib.ahead import prepare as prepare
from kernlib.bundles import recording as recording
from kernlib.descriptors.epilogues import Add as Add
from kernlib.descriptors.epilogues import Bias as Bias
from kernlib.descriptors.epilogues import Cauchy as Cauchy
from kernlib.descriptors.epilogues import Custom as Custom
from kernlib.descriptors.epilogues import Gaussian as Gaussian
from kernlib.descriptors.epilogues import Gelu as Gelu
from kernlib.descriptors.epilogues import Laplace as Laplace
from kernlib.descriptors.epilogues import LeakyRelu as LeakyRelu
from kernlib.descriptors.epilogues import Matern as Matern
from kernlib.descriptors.epilogues import Polynomial as Polynomial
from kernlib.descriptors.epilogues import PowerExponential as PowerExponential
from kernlib.descriptors.epilogues import RationalQuadratic as RationalQuadratic
from kernlib.descriptors.epilogues import Relu as Relu
from kernlib.descriptors.epilogues import Scale as Scale
from kernlib.descriptors.epilogues import Sigmoid as Sigmoid
from kernlib.descriptors.epilogues import Silu as Silu
from kernlib.descriptors.epilogues import Tanh as Tanh
from kernlib.descriptors.gates import Gate as Gate
from kernlib.errors import CaptureError as CaptureError
from kernlib.errors import CompileError as CompileError
from kernlib.errors import ConvergenceWarning as ConvergenceWarning
from kernlib.errors import DistributedError as DistributedError
from kernlib.errors import KernlibError as KernlibError
from kernlib.errors import KernlibWarning as KernlibWarning
from kernlib.errors import NotCachedError as NotCachedError
from kernlib.errors import UnsupportedError as UnsupportedError
from kernlib.families.blocksparse.attention.descriptor import (
    BlockSparseAttention as BlockSparseAttention,
)
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul as BlockSparseMatmul
from kernlib.families.blocksparse.scaled.descriptor import (
    BlockSparseScaledMatmul as BlockSparseScaledMatmul,
)
from kernlib.families.blocksparse.softmax.descriptor import (
    BlockSparseSoftmax as BlockSparseSoftmax,
)
from kernlib.families.kronecker_product.descriptor import KroneckerProduct as KroneckerProduct
from kernlib.families.kronecker_product.matmul import kron_matmul as kron_matmul
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse as KroneckerSparse
from kernlib.families.kronecker_sparse.descriptor import (
    KroneckerSparseChain as KroneckerSparseChain,
)
from kernlib.families.pairwise.descriptor import Pairwise as Pairwise
from kernlib.families.pairwise.descriptor import cauchy as cauchy
from kernlib.families.pairwise.descriptor import dot_product as dot_product
from kernlib.families.pairwise.descriptor import exp_power_sum as exp_power_sum
from kernlib.families.pairwise.descriptor import gaussian as gaussian
from kernlib.families.pairwise.descriptor import l1_distance as l1_distance
from kernlib.families.pairwise.descriptor import l2_distance as l2_distance
from kernlib.families.pairwise.descriptor import laplace_l1 as laplace_l1
from kernlib.families.pairwise.descriptor import laplace_l2 as laplace_l2
from kernlib.families.pairwise.descriptor import laplace_pq as laplace_pq
from kernlib.families.pairwise.descriptor import matern32 as matern32
from kernlib.families.pairwise.descriptor import matern52 as matern52
from kernlib.families.pairwise.descriptor import p_distance as p_distance
from kernlib.families.pairwise.descriptor import polynomial as polynomial
from kernlib.families.pairwise.descriptor import power_sum as power_sum
from kernlib.families.pairwise.descriptor import rational_quadratic as rational_quadratic
from kernlib.families.pairwise.descriptor import squared_distance as squared_distance
from kernlib.families.pairwise.formula.descriptor import Formula as Formula
from kernlib.families.pairwise.formula.pairs import Pairs as Pairs
from kernlib.families.pairwise.functions.agop import agop as agop
from kernlib.families.pairwise.functions.expadd import cdist_expadd as cdist_expadd
from kernlib.families.pairwise.functions.expadd import cdist_grad_expadd as cdist_grad_expadd
from kernlib.families.pairwise.functions.of_formulas import kernel_count as kernel_count
from kernlib.families.pairwise.functions.of_formulas import kernel_mean as kernel_mean
from kernlib.families.pairwise.functions.of_formulas import kernel_neighbors as kernel_neighbors
from kernlib.families.pairwise.functions.of_formulas import (
    kernel_softmax_matmul as kernel_softmax_matmul,
)
from kernlib.families.pairwise.functions.reductions import kernel_argmin as kernel_argmin
from kernlib.families.pairwise.functions.reductions import kernel_logsumexp as kernel_logsumexp
from kernlib.families.pairwise.functions.reductions import kernel_matmul as kernel_matmul
from kernlib.families.pairwise.functions.reductions import kernel_min as kernel_min
from kernlib.families.pairwise.functions.reductions import kernel_sum as kernel_sum
from kernlib.families.pairwise.functions.reductions import kernel_topk as kernel_topk
from kernlib.families.pairwise.gradients.points import cdist_grad as cdist_grad
from kernlib.families.pairwise.operation import cdist as cdist
from kernlib.families.pairwise.stages import Abs as Abs
from kernlib.families.pairwise.stages import ExpPower as ExpPower
from kernlib.families.pairwise.stages import Identity as Identity
from kernlib.families.pairwise.stages import Power as Power
from kernlib.families.pairwise.stages import PowerLog as PowerLog
from kernlib.families.pairwise.stages import Root as Root
from kernlib.families.pairwise.stages import Sqrt as Sqrt
from kernlib.families.pairwise.stages import Square as Square
from kernlib.families.sparse.descriptor import SparseMatmul as SparseMatmul
from kernlib.run import register_operators as register_operators
from kernlib.run import run_kernel as run_kernel
from kernlib.tuner import tune as tune

__version__: str

# What a star import brings: all but compile, whose name is a builtin's.
__all__ = [
    "Abs", "Add", "Bias", "BlockSparseAttention", "BlockSparseMatmul", "BlockSparseScaledMatmul",
    "BlockSparseSoftmax", "CaptureError", "Cauchy", "CompileError", "ConvergenceWarning", "Custom",
    "DistributedError", "ExpPower", "Formula", "Gate", "Gaussian", "Gelu", "Identity",
    "KernlibError", "KernlibWarning", "KroneckerProduct", "KroneckerSparse", "KroneckerSparseChain",
    "Laplace", "LeakyRelu", "Matern", "NotCachedError", "Pairs", "Pairwise", "Polynomial", "Power",
    "PowerExponential", "PowerLog", "RationalQuadratic", "Relu", "Root", "Scale", "Sigmoid", "Silu",
    "SparseMatmul", "Sqrt", "Square", "Tanh", "UnsupportedError", "__version__", "agop",
    "blocksparse", "cauchy", "cdist", "cdist_expadd", "cdist_grad", "cdist_grad_expadd",
    "checkpoints", "compat", "descriptors", "distributed", "dot_product", "events", "exp_power_sum",
    "gaussian", "kernel_argmin", "kernel_count", "kernel_logsumexp", "kernel_matmul", "kernel_mean",
    "kernel_min", "kernel_neighbors", "kernel_softmax_matmul", "kernel_sum", "kernel_topk",
    "kron_matmul", "l1_distance", "l2_distance", "laplace_l1", "laplace_l2", "laplace_pq", "linalg",
    "matern32", "matern52", "nn", "p_distance", "polynomial", "power_sum", "prepare",
    "rational_quadratic", "recording", "register_operators", "run_kernel", "settings", "sparse",
    "squared_distance", "tune",
]  # fmt: skip
