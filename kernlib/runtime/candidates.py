"""What a family's ``candidates`` answers to :func:`kernlib.tune`: the kernels that it can time."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kernlib.jit.spec import KernelSpec


class Candidate(NamedTuple):
    """One of the kernels that could compute a call. ``ready()`` loads it, launches it, and returns
    a function that launches it again: into an output that the call's candidates share, and nobody
    else sees."""

    choice: dict[str, int]  # what sets it apart, as the family's lowering takes it
    spec: KernelSpec
    ready: Callable[[], Callable[[], None]]


class Candidates(NamedTuple):
    """All kernels for one call on a device, and the bytes under which the fastest is kept, which
    calls of the same speed share."""

    device: int
    signature: bytes
    kernels: list[Candidate]
