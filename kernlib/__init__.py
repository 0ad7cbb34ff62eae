"""kernlib: describe a kernel; it is assembled, compiled once, kept, and launched on torch tensors.

Importing kernlib touches no GPU, no disk and no CUDA library: every name below is loaded when it is
first used.
"""

from importlib import import_module as _import_module

_import_module("kernlib.forks")  # its hook has to come before threads do
_import_module("kernlib.hooks")  # for transformers, which may come later

__version__ = "0.1.0"

_NAMES = {
    "kernlib.run": ("register_operators", "run_kernel"),
    "kernlib.families.pairwise.operation": ("cdist",),
    "kernlib.families.pairwise.functions.agop": ("agop",),
    "kernlib.families.pairwise.functions.expadd": ("cdist_expadd", "cdist_grad_expadd"),
    "kernlib.families.pairwise.gradients.points": ("cdist_grad",),
    "kernlib.families.pairwise.functions.reductions": (
        "kernel_argmin",
        "kernel_logsumexp",
        "kernel_matmul",
        "kernel_min",
        "kernel_sum",
        "kernel_topk",
    ),
    "kernlib.ahead": ("compile", "prepare"),
    "kernlib.bundles": ("recording",),
    "kernlib.tuner": ("tune",),
    "kernlib.families.pairwise.descriptor": (
        "Pairwise",
        "cauchy",
        "dot_product",
        "exp_power_sum",
        "gaussian",
        "l1_distance",
        "l2_distance",
        "laplace_l1",
        "laplace_l2",
        "laplace_pq",
        "matern32",
        "matern52",
        "p_distance",
        "polynomial",
        "power_sum",
        "rational_quadratic",
        "squared_distance",
    ),
    "kernlib.families.pairwise.formula.descriptor": ("Formula",),
    "kernlib.families.pairwise.formula.pairs": ("Pairs",),
    "kernlib.families.pairwise.functions.of_formulas": (
        "kernel_count",
        "kernel_mean",
        "kernel_neighbors",
        "kernel_softmax_matmul",
    ),
    "kernlib.families.blocksparse.attention.descriptor": ("BlockSparseAttention",),
    "kernlib.families.blocksparse.descriptor": ("BlockSparseMatmul",),
    "kernlib.families.blocksparse.scaled.descriptor": ("BlockSparseScaledMatmul",),
    "kernlib.families.blocksparse.softmax.descriptor": ("BlockSparseSoftmax",),
    "kernlib.families.kronecker_product.descriptor": ("KroneckerProduct",),
    "kernlib.families.kronecker_product.matmul": ("kron_matmul",),
    "kernlib.families.kronecker_sparse.descriptor": ("KroneckerSparse", "KroneckerSparseChain"),
    "kernlib.families.sparse.descriptor": ("SparseMatmul",),
    "kernlib.families.pairwise.stages": (
        "Abs",
        "ExpPower",
        "Identity",
        "Power",
        "PowerLog",
        "Root",
        "Sqrt",
        "Square",
    ),
    "kernlib.descriptors.epilogues": (
        "Add",
        "Bias",
        "Cauchy",
        "Custom",
        "Gaussian",
        "Gelu",
        "Laplace",
        "LeakyRelu",
        "Matern",
        "Polynomial",
        "PowerExponential",
        "RationalQuadratic",
        "Relu",
        "Scale",
        "Sigmoid",
        "Silu",
        "Tanh",
    ),
    "kernlib.descriptors.gates": ("Gate",),
    "kernlib.errors": (
        "CaptureError",
        "CompileError",
        "ConvergenceWarning",
        "DistributedError",
        "KernlibError",
        "KernlibWarning",
        "NotCachedError",
        "UnsupportedError",
    ),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = (
    "blocksparse", "checkpoints", "compat", "descriptors", "distributed", "events", "linalg", "nn",
    "settings", "sparse",
)  # fmt: skip

_PUBLIC = sorted((*_HOMES, *_MODULES, "__version__"))
# A star import brings all of them but the one whose name is a builtin's, which it would replace.
__all__ = [name for name in _PUBLIC if name != "compile"]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(_import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = _import_module(f"kernlib.{name}")
    else:
        raise _import_module("kernlib.hints.spelling").UnknownName(__name__, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return _PUBLIC
