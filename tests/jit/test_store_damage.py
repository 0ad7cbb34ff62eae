"""A damaged store is moved aside or read as a miss; it kills nobody and fails no verb."""

import os

import lmdb
import pytest

from kernlib.jit.store import LmdbStore
from tests.jit.store_cases import (
    READ_AND_WRITE,
    SMALL_MAP,
    aside,
    failing,
    filled,
    key,
    no_store_outlives_its_test,  # noqa: F401
    opened,
    run,
)


@pytest.fixture
def store(tmp_path):
    return opened(tmp_path)


def test_only_the_newest_damaged_store_is_kept(tmp_path):
    for _ in range(3):
        path = filled(tmp_path, 1)
        (path / "data.mdb").write_bytes(b"")
    opened(tmp_path)
    assert len(aside(tmp_path)) == 1


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
def test_the_length_of_the_map_alone_saves_a_truncated_file(tmp_path, share):
    data = filled(tmp_path) / "data.mdb"
    os.truncate(data, int(40 * 61_440 * share))
    os.truncate(data, SMALL_MAP)
    assert run(READ_AND_WRITE, tmp_path) == 0


def test_damage_found_in_use_is_moved_aside_once(tmp_path, monkeypatch):
    filled(tmp_path)
    store = opened(tmp_path)

    corrupted = lmdb.CorruptedError("mdb_get: MDB_CORRUPTED")
    with failing(corrupted):
        assert store.get(key(1)) is None
    assert len(aside(tmp_path)) == 1
    assert store.get(key(1)) is None and store.put(key(1), b"1")

    def corrupt_and_gone(*_args):
        store._file = (0, 0)  # as if another process had moved it aside meanwhile
        raise corrupted

    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "_transact", corrupt_and_gone)
        assert not store.put(key(2), b"2")
    assert len(aside(tmp_path)) == 1 and store.get(key(1)) == b"1"


def test_any_lmdb_error_is_a_miss(store):
    with failing(lmdb.PanicError("mdb_txn_begin: MDB_PANIC")):
        assert store.get(key(1)) is None and not store.put(key(1), b"1")
        assert list(store.items()) == [] and store.info()["entries"] == 0
    assert store.put(key(1), b"1") and aside(store.directory) == []


PAGE_SIZE_AT, LAST_PAGE_AT = 40, 136  # of a meta page


@pytest.mark.parametrize(
    ("at", "content"),
    [
        (PAGE_SIZE_AT, (3_365_650_483).to_bytes(4, "little")),  # "Invalid argument"
        (LAST_PAGE_AT, (1 << 50).to_bytes(8, "little")),  # a map of 4 EiB: "Cannot allocate memory"
        (LAST_PAGE_AT, (1 << 35).to_bytes(8, "little")),  # of 128 TiB
    ],
)
def test_a_damaged_head_that_nothing_announced_is_moved_aside_too(tmp_path, at, content):
    data = filled(tmp_path) / "data.mdb"
    found = data.stat()
    with open(data, "r+b") as file:
        for meta in (0, 4096):
            file.seek(meta + at)
            file.write(content)
    os.utime(data, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert run(READ_AND_WRITE, tmp_path) == 0
    assert len(aside(tmp_path)) == 1
