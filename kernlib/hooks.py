"""Actions when another package is imported, and when layers of a model are swapped.

``import kernlib`` suffices for transformers to load models with layers of kernlib, whichever of the
two is imported first, and imports nothing of transformers: a finder of modules waits for the one
module of it that kernlib has to add to, and does nothing until then.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # of typing, whose import costs more than the rest of this module
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

AWAITED = "transformers.quantizers.auto"  # holds the classes by the names in a model's config
ADDED = "kernlib.compat.transformers"  # which enters its own there when it is imported

# Called with each model whose layers were swapped. Integrations add to it.
AFTER_SWAPS: list[Callable[[Any], None]] = []


def swapped(model: Any) -> None:
    """Tell integrations that layers of a model were swapped."""
    for tell in AFTER_SWAPS:
        tell(model)


class _Finder:
    """Finds the awaited module by the other finders, with a loader that adds to it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != AWAITED:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if find is None or _is_ours(finder):
                continue
            spec = find(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """Another loader, with an action once it has run the module, which keeps that loader."""

    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that has none yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _stop_waiting()
        _add()


def _is_ours(finder: Any) -> bool:
    """Whether a finder is this module's, also from an earlier import that was undone."""
    kind = type(finder)
    return (kind.__module__, kind.__name__) == (__name__, "_Finder")


def _stop_waiting() -> None:
    for finder in list(sys.meta_path):
        if _is_ours(finder):
            try:
                sys.meta_path.remove(finder)
            except ValueError:  # another thread did
                continue


def _add() -> None:
    try:
        import_module(ADDED)
    except ImportError:  # versions that lack what is needed: a call says so
        return


def install() -> None:
    """Add to the awaited module now, or when it is imported."""
    _stop_waiting()
    if AWAITED in sys.modules:
        _add()
    else:
        sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


install()
