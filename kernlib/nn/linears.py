"""Where the layers of a model are that others may take the place of."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def linears(module: nn.Module) -> Iterator[tuple[nn.Module, str, str, nn.Linear]]:
    """Every place of an nn.Linear: its parent, its name there, its whole name, the layer."""
    for prefix, parent in module.named_modules():
        for child, layer in parent._modules.items():
            if type(layer) is nn.Linear:
                yield parent, child, f"{prefix}.{child}" if prefix else child, layer
