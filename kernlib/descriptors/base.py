"""What every descriptor is: a frozen value that names a computation and knows no tensor."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kernlib.canonical import encode


class Descriptor:
    """Base of the frozen dataclasses that :func:`kernlib.run_kernel` accepts.

    ``family`` names the modules that implement it: ``kernlib.ops.<family>`` and
    ``kernlib.reference.<family>``. Copies and pickles rebuild through the constructor, so that a
    descriptor is always a validated one.
    """

    __slots__ = ()
    family: ClassVar[str]

    def canonical(self) -> bytes:
        """Bytes that equal descriptors share in every process."""
        return encode(self)

    def describe(self) -> str:
        """One line for people."""
        return repr(self)

    def replace(self, **changes):
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def __reduce__(self):
        fields = (f for f in dataclasses.fields(self) if f.init)
        return type(self), tuple(getattr(self, f.name) for f in fields)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


PRECISIONS = ("fp32", "tf32", "bf16")


def check_precision(precision: str | None) -> None:
    """``precision`` permits less accuracy and never asks for it; raises ValueError for others."""
    require(
        precision is None or precision in PRECISIONS,
        f"precision must be None or one of {PRECISIONS}, got {precision!r}",
    )
