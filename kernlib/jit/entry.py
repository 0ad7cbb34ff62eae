"""The bytes that one compiled kernel is kept as: a fixed header, a kernel name, meta, a cubin.

No pickle and no JSON: opening a cache must not run code, and a damaged entry must read as a miss.

    magic 4 | schema u16 | flags u16 | crc32 u32 |  name u32 | meta u32 | cubin u32 | bytes ...
                                                  \\_____________ payload _________________/

The crc covers the key and the payload, lengths included, so a whole value that sits under the wrong
key is damage too. crc32 takes 14 us for 60 KB where sha256 takes 31.
"""

from __future__ import annotations

import struct
import zlib

from kernlib.records import NamedTuple

MAGIC = b"KLIB"
SCHEMA = 1  # raise it whenever the layout or the meaning of a field changes

_HEAD = struct.Struct("<4sHHI")
_LENGTHS = struct.Struct("<III")
_PAIR = struct.Struct("<II")


class Entry(NamedTuple):
    """A compiled kernel: its entry point, its cubin, and free text about it."""

    kernel: str
    cubin: bytes
    meta: dict[str, str]

    def __repr__(self) -> str:  # without the cubin, which is 50 KB
        what = f"{self.meta.get('arch', '')} {self.meta.get('description', '')}".strip()
        return f"Entry({self.kernel!r}, {len(self.cubin)} bytes{what and ', ' + what})"


def pack(key: bytes, entry: Entry) -> bytes:
    """The value to keep under `key`. Text that utf-8 cannot hold is kept escaped."""
    name = _encode(entry.kernel)
    meta = _pack_meta(entry.meta)
    cubin = bytes(entry.cubin)
    payload = _LENGTHS.pack(len(name), len(meta), len(cubin)) + name + meta + cubin
    return _HEAD.pack(MAGIC, SCHEMA, 0, _crc(key, payload)) + payload


def unpack(key: bytes, value: bytes) -> Entry | None:
    """The entry of a value read under `key`; None for damage of any kind. Never raises."""
    payload = _payload(key, value)
    if payload is None:
        return None
    try:
        return _read(payload)
    except (struct.error, UnicodeDecodeError):
        return None


def _payload(key: bytes, value: bytes) -> bytes | None:
    if len(value) < _HEAD.size + _LENGTHS.size:
        return None
    magic, schema, flags, crc = _HEAD.unpack_from(value)
    if (magic, schema, flags) != (MAGIC, SCHEMA, 0):
        return None
    payload = value[_HEAD.size :]
    return payload if crc == _crc(key, payload) else None


def _read(payload: bytes) -> Entry | None:
    name_len, meta_len, cubin_len = _LENGTHS.unpack_from(payload)
    meta_at = _LENGTHS.size + name_len
    cubin_at = meta_at + meta_len
    if cubin_at + cubin_len != len(payload):
        return None
    meta = _unpack_meta(payload[meta_at:cubin_at])
    if meta is None:
        return None
    name = payload[_LENGTHS.size : meta_at].decode()
    return Entry(name, payload[cubin_at:], meta)


def _crc(key: bytes, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(key))


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")  # a lone surrogate must not fail a compile


def _pack_meta(meta: dict[str, str]) -> bytes:
    out = bytearray()
    for name in sorted(meta):  # one entry, one sequence of bytes
        key, value = _encode(name), _encode(meta[name])
        out += _PAIR.pack(len(key), len(value)) + key + value
    return bytes(out)


def _unpack_meta(data: bytes) -> dict[str, str] | None:
    """None when the last pair does not end with the data. Raises struct.error when it is cut."""
    meta: dict[str, str] = {}
    at = 0
    while at < len(data):
        key_len, value_len = _PAIR.unpack_from(data, at)
        key_at = at + _PAIR.size
        value_at, at = key_at + key_len, key_at + key_len + value_len
        meta[data[key_at:value_at].decode()] = data[value_at:at].decode()
    return meta if at == len(data) else None
