"""Block-sparse matrices: which blocks are stored, products with them, softmax over
their rows, and attention.

Names are loaded when first used. The model of the family is the Torch-Blocksparse project.
"""

from importlib import import_module as _import_module

_NAMES = {
    "kernlib.families.blocksparse.layout": ("Layout",),
    "kernlib.families.blocksparse.builders": (
        "block_diagonal",
        "causal",
        "dense",
        "fixed",
        "random",
        "sliding_window",
        "top_k",
    ),
    "kernlib.families.blocksparse.attention.as_torch": ("scaled_dot_product_attention",),
    "kernlib.families.blocksparse.attention.functions": ("attention",),
    "kernlib.families.blocksparse.functions": ("dds", "dsd", "sdd"),
    "kernlib.families.blocksparse.scaled.functions": ("quantize", "scaled_dds", "scaled_dsd"),
    "kernlib.families.blocksparse.softmax.functions": ("softmax",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise _import_module("kernlib.hints.spelling").UnknownName(__name__, name)
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
