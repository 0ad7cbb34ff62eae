"""The choice of the fastest of several kernels for one problem on one GPU model, kept beside the
kernels.

A choice is a few words: the values of knobs by name. What is read here is either what was kept, or
nothing. The family that reads a choice must judge whether it still means something.
"""

from __future__ import annotations

import hashlib

from kernlib import settings
from kernlib.canonical import encode
from kernlib.jit import entry, service
from kernlib.jit.entry import Entry

SCHEMA = 1  # raise it when the meaning of a signature or a choice changes for every family


def choice(family: str, model: tuple, signature: bytes) -> dict[str, str] | None:
    """The stored choice for a problem of a family on a GPU model; None for none and for damage."""
    key = _key(family, model, signature)
    value = service.layers().store.get_tuning(key)
    stored = None if value is None else entry.unpack(key, value)
    if stored is None or stored.kernel != family or stored.cubin:
        return None
    return stored.meta or None


def keep(family: str, model: tuple, signature: bytes, choice: dict[str, object]) -> bool:
    """Keep a choice for :func:`choice` in every process; False if the store cannot."""
    key = _key(family, model, signature)
    words = {name: str(value) for name, value in choice.items()}
    return service.layers().store.put_tuning(key, entry.pack(key, Entry(family, b"", words)))


def _key(family: str, model: tuple, signature: bytes) -> bytes:
    # With KERNLIB_PORTABLE the same model runs the kernels of other GPUs, which have their own
    # choices.
    extra = ("portable",) if settings.current().portable else ()
    return hashlib.sha256(encode((SCHEMA, family, tuple(model), signature, *extra))).digest()
