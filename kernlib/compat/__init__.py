"""Predecessors' names over kernlib's kernels, so that their users change one import."""

from importlib import import_module as _import_module

_MODULES = (
    "fastkron", "kermac", "linear_operator", "macko", "peft", "torch_blocksparse", "transformers",
)  # fmt: skip

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise _import_module("kernlib.hints.spelling").UnknownName(__name__, name)
    return _import_module(f"kernlib.compat.{name}")


def __dir__() -> list[str]:
    return __all__
