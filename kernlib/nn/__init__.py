"""Modules for networks: :class:`KSLinear`, :class:`KroneckerLinear`, :class:`SparseLinear` and
:class:`BlockSparseLinear` in place of ``torch.nn.Linear``, what swaps them, and block-sparse
convolution and attention.

Names are loaded when first used.
"""

from importlib import import_module as _import_module

_NAMES = {
    "kernlib.nn.block_sparse.attention": (
        "BlockSparseMultiheadAttention",
        "block_sparse_attention",
    ),
    "kernlib.nn.block_sparse.conv": ("BlockSparseConv2d", "taps_layout"),
    "kernlib.nn.block_sparse.linear": ("BlockSparseLinear", "block_sparsify"),
    "kernlib.nn.chains": ("suggest_chains",),
    "kernlib.nn.kronecker_linear": ("KroneckerLinear",),
    "kernlib.nn.kronecker_sparse": ("KSLinear",),
    "kernlib.nn.replace": ("VIT_B16", "VIT_S16", "replace_linear"),
    "kernlib.nn.sparse_linear": ("SparseLinear",),
    "kernlib.nn.sparse_replace": ("sparsify",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
_MODULES = ("compat",)

__all__ = sorted((*_HOMES, *_MODULES))


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(_import_module(_HOMES[name]), name)
    elif name in _MODULES:
        value = _import_module(f"kernlib.nn.{name}")
    else:
        raise _import_module("kernlib.hints.spelling").UnknownName(__name__, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
