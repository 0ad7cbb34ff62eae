"""Whether a call promises the same bits each time; for the CPU and for a GPU.

Each family has a ``repeats.py`` with its calls: names, and functions of operands that a ``Maker``
made. ``same_bits`` makes the operands once, calls twice, and twice more under
``torch.use_deterministic_algorithms``; ``unchanged`` calls twice under each of other settings.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class Maker:
    """Operands by a seed on a device, float32."""

    def __init__(self, device: str, rows: int) -> None:
        self.device, self.rows = device, rows
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, recorded: bool = False) -> torch.Tensor:
        made = torch.randn(shape, generator=self.generator).to(self.device)
        return made.requires_grad_(recorded)


def slopes(call: Callable, sides: tuple, twice: bool) -> tuple[torch.Tensor, ...]:
    """A result, its gradients, and with ``twice`` those of these."""
    y = call(*sides)
    first = torch.autograd.grad(y.square().sum(), sides, create_graph=twice)
    if not twice:
        return (y.detach(), *first)
    second = torch.autograd.grad(sum(f.square().sum() for f in first), sides)
    return (y.detach(), *(f.detach() for f in first), *second)


@contextmanager
def deterministic() -> Iterator[None]:
    """Warns, as cuBLAS asks for an environment variable that is read once a process."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
    texts = [str(w.message) for w in found]
    assert not [t for t in texts if "does not have a deterministic implementation" in t], texts


def same_bits(calls: Callable, device: str, rows: int) -> None:
    """Fails where a call of ``calls(make)`` has other bits the next time."""
    for name, call in calls(Maker(device, rows)):
        first = call()
        found = [call()]
        with deterministic():
            found += [call(), call()]
        for again in found:
            for x, y in zip(first, again, strict=True):
                assert x.dtype == y.dtype and torch.equal(x, y), name


def unchanged(calls: Callable, device: str, rows: int, settings: dict[str, Callable]) -> None:
    """Fails where a call of ``calls(make)`` has other bits under one of ``settings``, contexts."""
    for name, call in calls(Maker(device, rows)):
        first = call()
        for setting, entered in settings.items():
            with entered():
                again = call()
            for x, y in zip(first, again, strict=True):
                assert x.dtype == y.dtype and torch.equal(x, y), f"{name}, {setting}"
