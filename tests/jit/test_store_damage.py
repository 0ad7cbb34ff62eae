"""A damaged store is moved aside or read as a miss; it kills nobody and fails no verb."""

import os

import lmdb
import pytest

from kernlib.jit.store import LmdbStore
from tests.jit.store_cases import (
    READ_AND_WRITE,
    SMALL_MAP,
    aside,
    entries,
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


@pytest.mark.parametrize("damage", ["empty", "short", "junk", "1.0"])
def test_a_foreign_data_file_is_moved_aside(tmp_path, damage):
    path = filled(tmp_path)
    if damage == "1.0":
        (path / "data.mdb").unlink()
        (path / "lock.mdb").unlink()
        lmdb.open(str(path), lib_version=1).close()
    else:
        junk = {"empty": b"", "short": b"junk", "junk": os.urandom(100_000)}[damage]
        (path / "data.mdb").write_bytes(junk)
    store = opened(tmp_path)
    assert store.get(key(1)) is None
    assert store.put(key(1), b"1") and store.get(key(1)) == b"1"
    assert len(aside(tmp_path)) == 1


def test_only_the_newest_damaged_store_is_kept(tmp_path):
    for _ in range(3):
        path = filled(tmp_path, 1)
        (path / "data.mdb").write_bytes(b"")
    opened(tmp_path)
    assert len(aside(tmp_path)) == 1


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9, "header"])
def test_a_truncated_file_kills_nobody(tmp_path, share):
    data = filled(tmp_path) / "data.mdb"
    used = 40 * 61_440
    os.truncate(data, 5000 if share == "header" else int(used * share))
    assert run(READ_AND_WRITE, tmp_path) == 0
    assert len(aside(tmp_path)) == 1


def test_a_truncated_file_is_noticed_at_open(tmp_path):
    os.truncate(filled(tmp_path) / "data.mdb", int(40 * 61_440 * 0.9))
    opened(tmp_path)
    assert len(aside(tmp_path)) == 1


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9])
def test_the_length_of_the_map_alone_saves_a_truncated_file(tmp_path, share):
    data = filled(tmp_path) / "data.mdb"
    os.truncate(data, int(40 * 61_440 * share))
    os.truncate(data, SMALL_MAP)
    assert run(READ_AND_WRITE, tmp_path) == 0


@pytest.mark.parametrize("first", [2, 3, 4, 8, 100, 300])
@pytest.mark.parametrize("count", [1, 20, 1000])
def test_zeroed_pages_are_misses(tmp_path, first, count):
    data = filled(tmp_path) / "data.mdb"
    with open(data, "r+b") as file:
        file.seek(first * 4096)
        file.write(bytes(count * 4096))
    assert run(READ_AND_WRITE, tmp_path) == 0
    with open(data, "r+b") as file:
        file.seek(first * 4096)
        file.write(bytes(count * 4096))
    store = opened(tmp_path)
    assert len(entries(store)) <= 40


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


@pytest.mark.parametrize("lock", ["missing", "junk", "empty"])
def test_a_lost_lock_file(tmp_path, lock):
    path = filled(tmp_path) / "lock.mdb"
    path.unlink()
    if lock != "missing":
        path.write_bytes(b"" if lock == "empty" else os.urandom(65536))
    store = opened(tmp_path)
    assert len(entries(store)) == 40 and store.put(key(50), b"50")


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
