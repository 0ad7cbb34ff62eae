"""Unstructured sparse weights: matrices compressed on the GPU, and their products with vectors.

Names are loaded when first used. The model of the family is the MACKO-SpMV project.
"""

from importlib import import_module as _import_module

_NAMES = {
    "kernlib.families.sparse.matrix": ("SparseMatrix",),
    "kernlib.families.sparse.compression": ("compress",),
    "kernlib.families.sparse.csr": ("from_csr",),
    "kernlib.families.sparse.operation": ("matmul",),
    "kernlib.families.sparse.prune": ("magnitude",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = ("prune",)

__all__ = sorted((*_HOMES, *_MODULES))


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(_import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = _import_module(f"kernlib.sparse.{name}")
    else:
        raise _import_module("kernlib.hints.spelling").UnknownName(__name__, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
