"""Where the layers of a model are that others may take the place of."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kernlib.descriptors.base import shown
from kernlib.errors import warn


def linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Linear]]:
    """Every place of an nn.Linear: its parent, its name there, its whole name, the layer."""
    for prefix, parent in module.named_modules():
        for child, layer in parent._modules.items():
            if type(layer) is nn.Linear:
                yield parent, child, f"{prefix}.{child}" if prefix else child, layer


def warn_of_nothing(task: str, module: nn.Module, chosen: str, given: object) -> None:
    """Warns that ``task`` swaps no layer of a model, which the argument ``chosen`` chooses from."""
    names = [f"{name!r}" for _, _, name, _ in linears(module)]
    if not names:
        derived = [type(m).__name__ for m in module.modules() if isinstance(m, nn.Linear)]
        which = f", only what derives from it: {derived[0]}" if derived else ""
        warn(f"{task} swaps nothing: {type(module).__name__} has no nn.Linear in it{which}")
        return
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    warn(
        f"{task} swaps nothing: {chosen}={shown(given)} takes none of the {len(names)} nn.Linear "
        f"of {type(module).__name__} ({some})"
    )
