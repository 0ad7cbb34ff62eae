"""Suggestions for a name that does not exist: what may have been meant. Loaded when that
happens."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

# Modules that are searched for a name that another module lacks. The light ones can be imported
# without torch; of the others only the text is read, unless they are loaded already.
_LIGHT = (
    *("kernlib", "kernlib.nn", "kernlib.sparse", "kernlib.blocksparse"),
    *("kernlib.events", "kernlib.settings"),
)
_HEAVY = ("kernlib.linalg",)
_COMPAT = (
    *("kernlib.nn.compat", "kernlib.compat.torch_blocksparse"),
    *("kernlib.compat.kermac", "kernlib.compat.macko"),
)

# Gives the largest entry of each row, and its column.
_LARGEST = ("kernlib.kernel_topk(..., k=1, largest=True)",)
# Names of other libraries, in lower case and without underscores, and kernlib's names for the same
# thing, which may be written as a call with arguments.
OTHERS = {
    "rbf": ("kernlib.gaussian",),
    "rbfkernel": ("kernlib.gaussian",),
    "squaredexponential": ("kernlib.gaussian",),
    "exponential": ("kernlib.laplace_l2",),
    "laplacian": ("kernlib.laplace_l1", "kernlib.laplace_l2"),
    "laplacekernel": ("kernlib.laplace_l1", "kernlib.laplace_l2"),
    "laplace": ("kernlib.laplace_l1", "kernlib.laplace_l2", "kernlib.Laplace"),
    "matern12": ("kernlib.laplace_l2",),  # nu = 0.5
    "matern": ("kernlib.matern32", "kernlib.matern52", "kernlib.Matern"),
    "kernel": ("kernlib.run_kernel", "kernlib.Pairwise"),
    "topk": ("kernlib.kernel_topk", "kernlib.blocksparse.top_k"),
    "kernelmax": _LARGEST,
    "kernelargmax": _LARGEST,
    # As a quotient of two reductions of exp(K) it would overflow.
    "kernelsoftmax": ("kernlib.blocksparse.attention",),
    "lazytensor": (
        *("kernlib.kernel_matmul", "kernlib.kernel_sum", "kernlib.kernel_logsumexp"),
        *("kernlib.kernel_min", "kernlib.kernel_topk"),
    ),
    "rq": ("kernlib.rational_quadratic",),
    "poly": ("kernlib.polynomial",),
    "dot": ("kernlib.dot_product",),
    "linearkernel": ("kernlib.dot_product",),
    "innerproduct": ("kernlib.dot_product",),
    "mma": ("kernlib.dot_product",),
    "euclidean": ("kernlib.l2_distance",),
    "sqeuclidean": ("kernlib.squared_distance",),
    "cityblock": ("kernlib.l1_distance",),
    "manhattan": ("kernlib.l1_distance",),
    "minkowski": ("kernlib.p_distance",),
    "chebyshev": ("kernlib.p_distance",),
    "l1norm": ("kernlib.l1_distance",),
    "l2norm": ("kernlib.l2_distance",),
    "pnorm": ("kernlib.p_distance",),
    "pairwisedistance": ("kernlib.cdist", "kernlib.l2_distance"),
    "pdist": ("kernlib.cdist",),
    "swish": ("kernlib.Silu",),
    "gelutanh": ("kernlib.Gelu",),
    "linear": (
        *("kernlib.nn.KSLinear", "kernlib.nn.SparseLinear", "kernlib.nn.BlockSparseLinear"),
        "kernlib.nn.KroneckerLinear",
    ),
    "ksmm": ("kernlib.nn.KSLinear", "kernlib.nn.compat"),
    "butterfly": ("kernlib.nn.KSLinear",),
    "butterflylinear": ("kernlib.nn.KSLinear",),
    "monarch": ("kernlib.nn.KSLinear",),
    "monarchlinear": ("kernlib.nn.KSLinear",),
    "gemkm": ("kernlib.kron_matmul", "kernlib.compat.fastkron"),
    "gekmm": ("kernlib.kron_matmul", "kernlib.compat.fastkron"),
    "fastkronmgsgemm": ("kernlib.distributed.kron_matmul",),
    "kron": ("kernlib.kron_matmul", "kernlib.KroneckerProduct"),
    "spmv": ("kernlib.sparse.matmul",),
    "multiply": ("kernlib.sparse.matmul", "kernlib.compat.macko.multiply"),
    "prune": ("kernlib.sparse.magnitude", "kernlib.nn.sparsify"),
    "cg": ("kernlib.linalg.conjugate_gradient",),
}
# The same for arguments of a call.
_ARGUMENTS = {
    "sigma": "bandwidth",
    "length": "bandwidth",
    "scale": "bandwidth",
    "bw": "bandwidth",
    "h": "bandwidth",
    "swish": "silu",
    "ridge": "regularization",
    "reg": "regularization",
    "nugget": "regularization",
    "jitter": "regularization",
    "coef0": "offset",
    "ard": "lengthscale",
    "arch": "archs",
    "spec": "specs",
    "dtype": "dtypes",
    # Of attention, as torch, FlexAttention and FlashAttention call them.
    "query": "q",
    "key": "k",
    "value": "v",
    "iscausal": "causal",
    "attnmask": "mask",
    "attentionmask": "mask",
    "maskmod": "mask",
    "scoremod": "score",
    "blockmask": "layout",
    "softmaxscale": "scale",
    "smscale": "scale",
    "dropout": "dropout_p",
    "windowsize": "window",
    "returnaux": "return_lse",
}


class UnknownName(AttributeError):
    """A module has no such attribute; the text says what may have been meant. That is looked for
    when the text is asked for, which most code that tries names, such as ``hasattr`` and the import
    of a submodule, never does."""

    def __init__(self, module: str, name: str):
        # With its name given, Python adds no suggestion of its own to the traceback.
        super().__init__(module, name, name=name)

    def __str__(self) -> str:
        module, name = self.args
        names = [] if name.startswith("_") else meant(module, name)
        return f"module {module!r} has no attribute {name!r}{asked(names)}"


def asked(names: Iterable[str]) -> str:
    """``; did you mean a, b or c?``, or "" where nothing was found."""
    *rest, last = tuple(names) or ("",)
    if not last:
        return ""
    return f"; did you mean {', '.join(rest)}{' or ' if rest else ''}{last}?"


def meant(module: str, name: str) -> list[str]:
    """Full names that may have been meant by a name that ``module`` lacks, the likeliest first."""
    names, word = _public(module), _plain(name)
    if module == "kernlib" and word in OTHERS:
        return list(OTHERS[word])
    if spelt := [f"{module}.{candidate}" for candidate in names if _plain(candidate) == word]:
        return spelt
    if module == "kernlib.compat":  # which has modules alone
        return [f"{module}.{candidate}" for candidate in _close(name, names)]
    if word in OTHERS:
        return list(OTHERS[word])
    for modules in ((*_LIGHT, *_HEAVY), _COMPAT):
        pairs = [(home, public) for home in modules for public in _public(home)]
        matches = [f"{home}.{public}" for home, public in pairs if _plain(public) == word]
        if matches:
            return matches
    if near := _close(name, names):
        return [f"{module}.{candidate}" for candidate in near]
    homes = {candidate: other for other in (*_LIGHT, *_HEAVY) for candidate in _public(other)}
    return [f"{homes[candidate]}.{candidate}" for candidate in _close(name, homes)]


def argument(name: str, names: Iterable[str]) -> str:
    """``; did you mean bandwidth?`` for an argument that is none of ``names``, or ""."""
    names = list(names)
    other = _ARGUMENTS.get(_plain(name))
    return asked([other] if other in names else _close(name, names)[:1])


def _close(name: str, names: Iterable[str]) -> list[str]:
    from difflib import get_close_matches

    by_word: dict[str, list[str]] = {}
    for candidate in names:
        by_word.setdefault(_plain(candidate), []).append(candidate)
    words = get_close_matches(_plain(name), by_word, n=2, cutoff=0.7)
    # Of Gaussian and gaussian the one comes first whose first letter has the case of the given
    # name.
    near = [candidate for word in words for candidate in by_word[word]]
    return sorted(near, key=lambda each: each[0].isupper() != name[0].isupper())


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _public(module: str) -> list[str]:
    """The public names of a module. One that would import torch is not imported: its text is
    read."""
    if module in sys.modules or module not in (*_HEAVY, *_COMPAT):
        loaded = import_module(module)
        lazy = "__getattr__" in vars(loaded)
        names = dir(loaded) if lazy else getattr(loaded, "__all__", None) or _defined(loaded)
        return [name for name in names if name[0] != "_"]
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return []
    return _names_in(Path(spec.origin).read_text(encoding="utf-8"))


def _defined(module: ModuleType) -> list[str]:
    """The names of what a module without ``__all__`` defines itself."""
    items = vars(module).items()
    return [n for n, value in items if getattr(value, "__module__", None) == module.__name__]


def _names_in(source: str) -> list[str]:
    """The public functions and classes of a module's text, and the names that it imports."""
    import ast

    names = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernlib."):
            names += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.append(node.name)
    return [name for name in names if name[0] != "_"]
