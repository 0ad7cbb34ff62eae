"""Pruned checkpoints on disk, and the compressed ones made from them.

``Checkpoint`` reads, ``convert`` compresses, ``to_dense`` lays out again, ``plan`` says what
convert would do.
"""

from importlib import import_module as _import_module

_HOMES = {
    "Checkpoint": "kernlib.checkpoints.files",
    "CheckpointError": "kernlib.checkpoints.files",
    "Layer": "kernlib.checkpoints.estimate",
    "convert": "kernlib.checkpoints.conversion",
    "plan": "kernlib.checkpoints.conversion",
    "to_dense": "kernlib.checkpoints.conversion",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise _import_module("kernlib.hints.spelling").UnknownName(__name__, name)
    value = getattr(_import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
