"""Canonical bytes of plain values: equal values give equal bytes, in every process and version.

Each value carries a type tag and a length, each dataclass its name and its fields' names, so that
no two values share bytes: ``1``, ``True``, ``1.0`` and ``"1"`` all differ. ``repr``, ``hash`` and
pickle would let addresses, hash seeds or versions into a cache key. A field with ``repr=False`` was
added to its dataclass later. It is left out where it has its default, so that the bytes of older
values stay what they were.
"""

from __future__ import annotations

import dataclasses
import struct


def encode(value: object) -> bytes:
    """Canonical bytes of None, bool, int, float, str, bytes, and tuples or dataclasses of them.

    Raises TypeError for any other type.
    """
    if value is None:
        return _tagged(b"N", b"")
    if isinstance(value, bool):
        return _tagged(b"B", b"1" if value else b"0")
    if isinstance(value, int):
        return _tagged(b"I", str(value).encode())
    if isinstance(value, float):
        return _tagged(b"F", struct.pack("<d", value))
    if isinstance(value, str):
        return _tagged(b"S", value.encode())
    if isinstance(value, bytes):
        return _tagged(b"Y", value)
    if isinstance(value, tuple):
        return _tagged(b"T", b"".join(encode(item) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _tagged(b"D", _encode_fields(value))
    raise TypeError(f"no canonical bytes for {type(value).__name__}: {value!r}")


def _encode_fields(value) -> bytes:
    fields = (
        f
        for f in dataclasses.fields(value)
        if f.init and (f.repr or getattr(value, f.name) != f.default)
    )
    body = b"".join(encode(f.name) + encode(getattr(value, f.name)) for f in fields)
    return encode(type(value).__name__) + body


def _tagged(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body
