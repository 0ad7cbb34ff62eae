"""The entry format: everything packed comes back, everything damaged is a miss."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernlib.jit.entry import MAGIC, SCHEMA, Entry, pack, unpack

KEY = bytes(range(32))
ENTRY = Entry("kernlib_main", bytes(range(256)) * 16, {"arch": "sm_90a", "nvrtc": "13.4", "": "é"})
VALUE = pack(KEY, ENTRY)


@given(
    key=st.binary(min_size=32, max_size=32),
    kernel=st.text(),
    cubin=st.binary(max_size=4096),
    meta=st.dictionaries(st.text(), st.text(), max_size=8),
)
def test_round_trip(key, kernel, cubin, meta):
    entry = Entry(kernel, cubin, meta)
    assert unpack(key, pack(key, entry)) == entry


@given(st.binary(max_size=200))
def test_junk_is_a_miss(junk):
    assert unpack(KEY, junk) is None


@given(at=st.integers(0, len(VALUE) - 1), bit=st.integers(0, 7))
def test_every_bit_counts(at, bit):
    damaged = bytearray(VALUE)
    damaged[at] ^= 1 << bit
    assert unpack(KEY, bytes(damaged)) is None


def rebuilt(magic=MAGIC, schema=SCHEMA, flags=0, payload=VALUE[12:], crc=None):
    """A value whose crc is right, so that only the named field is wrong."""
    crc = zlib.crc32(payload, zlib.crc32(KEY)) if crc is None else crc
    return struct.pack("<4sHHI", magic, schema, flags, crc) + payload


def lengths(name, meta, cubin, rest=VALUE[24:]):
    return rebuilt(payload=struct.pack("<III", name, meta, cubin) + rest)


def meta_of(data):
    return rebuilt(payload=struct.pack("<III", 0, len(data), 0) + data)


DAMAGE = {
    "empty": b"",
    "shorter than the header": VALUE[:11],
    "header only": VALUE[:12],
    "cut in the lengths": VALUE[:23],
    "cut mid-cubin": VALUE[:-1000],
    "one byte more": VALUE + b"\0",
    "cubin length too large": lengths(12, 0, 1 << 31),
    "name length too large": lengths((1 << 32) - 1, 0, 0),
    "lengths too small": lengths(1, 0, 1),
    "wrong magic": rebuilt(magic=b"KLIC"),
    "old schema": rebuilt(schema=SCHEMA - 1),
    "future schema": rebuilt(schema=SCHEMA + 1),
    "unknown flag": rebuilt(flags=1),
    "bad crc": rebuilt(crc=0),
    "meta cut in a length": meta_of(b"\1\0\0"),
    "meta value beyond its end": meta_of(struct.pack("<II", 1, 9) + b"ab"),
    "meta not utf-8": meta_of(struct.pack("<II", 1, 0) + b"\xff"),
    "name not utf-8": rebuilt(payload=struct.pack("<III", 1, 0, 0) + b"\xff"),
}


@pytest.mark.parametrize("value", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_a_miss(value):
    assert unpack(KEY, value) is None


def test_its_repr_is_short():
    assert repr(ENTRY) == "Entry('kernlib_main', 4096 bytes, sm_90a)"


def test_wrong_key_is_a_miss():
    assert unpack(KEY[::-1], VALUE) is None


def test_bytes_do_not_depend_on_dict_order():
    turned = Entry(ENTRY.kernel, ENTRY.cubin, dict(reversed(ENTRY.meta.items())))
    assert pack(KEY, turned) == VALUE


def test_lone_surrogates_are_escaped():
    entry = unpack(KEY, pack(KEY, Entry("k", b"", {"path": "/tmp/\udcff"})))
    assert entry.meta == {"path": "/tmp/\\udcff"}
