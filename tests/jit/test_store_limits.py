"""The store's limits: what goes when the budget is used, a full map, a grown or a smaller one."""

import subprocess
import warnings

import lmdb
import pytest

from kernlib.jit import environment, permissions
from kernlib.jit import store as module
from kernlib.jit.store import LmdbStore
from tests.jit.store_cases import (
    BUDGET,
    MIB,
    SMALL_MAP,
    key,
    no_store_outlives_its_test,  # noqa: F401
    opened,
    run,
    start,
    value,
)
from tests.support.limits import LIMIT_S


@pytest.fixture
def store(tmp_path):
    return opened(tmp_path)


# Eviction.


def test_the_longest_unused_go_first(store, monkeypatch):
    for day, number in enumerate([3, 1, 2, 0]):
        monkeypatch.setattr(module, "_today", lambda day=day: 20_000 + day)
        store.put(key(number), value(number, MIB))
    monkeypatch.setattr(module, "_today", lambda: 20_010)
    assert store.get(key(3)) is not None  # noted, and written with the next put
    for number in range(10, 15):
        assert store.put(key(number), value(number, MIB))
    left = {int.from_bytes(k, "big") for k, _ in store.items()}
    assert left == {3, 10, 11, 12, 13, 14}
    assert store.info()["bytes_used"] <= BUDGET


def test_budget_holds_over_many_puts(store):
    for number in range(600):
        assert store.put(key(number), value(number))
        assert store.info()["bytes_used"] <= BUDGET
    assert store.get(key(599)) == value(599)
    assert store.info()["entries"] > 60


def test_a_value_over_the_budget_is_not_kept(store):
    store.put(key(1), b"one")
    assert not store.put(key(2), bytes(BUDGET + 1))
    assert store.get(key(1)) == b"one"
    assert store.put(key(3), bytes(BUDGET - MIB))  # over 75 % of it: alone


def test_budget_is_at_most_80_percent_of_the_map(tmp_path):
    assert opened(tmp_path, budget=1 << 40).budget == int(SMALL_MAP * 0.8)


def test_eviction_spares_tuning(store):
    store.put(key(1), b"one")
    with store._env.begin(write=True) as txn:
        txn.put(b"tuned", b"64x64", db=store._tuning)
    for number in range(300):
        store.put(key(number), value(number))
    store.clear()
    with store._env.begin() as txn:
        assert txn.get(b"tuned", db=store._tuning) == b"64x64"


def test_hits_are_written_once_a_day_and_at_close(store, monkeypatch):
    def stamps():
        with store._env.begin() as txn:
            return {int.from_bytes(d, "little") for _, d in txn.cursor(db=store._days)}

    monkeypatch.setattr(module, "_today", lambda: 1)
    store.put(key(1), b"1")
    monkeypatch.setattr(module, "_today", lambda: 5)
    store.get(key(1))
    store.get(key(1))
    assert stamps() == {1}  # a read does not write
    monkeypatch.setattr(module, "_today", lambda: 6)
    store.get(key(1))
    assert stamps() == {5}  # but for the first of a new day
    store.close()
    store.get(key(1))
    assert stamps() == {6}


def fill_the_map(store, size):
    """Past the budget, until LMDB itself says no."""
    store.put(key(0), b"")
    with pytest.raises(lmdb.MapFullError):
        for number in range(1, 1 << 20):
            store._transact(lambda txn, n=number: store._write(txn, key(n), value(n, size)), True)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [60_000, 1_500, 10_000, 500_000])
def test_a_full_map_is_left_again(store, monkeypatch, size):
    fill_the_map(store, size)
    monkeypatch.setattr(LmdbStore, "budget", property(lambda _: 1 << 40, lambda *_: None))
    assert store.put(key(1 << 30), value(1, size))
    assert store.get(key(1 << 30)) == value(1, size)


@pytest.mark.few(1)
@pytest.mark.parametrize("size", [60_000, 1_500])
def test_a_full_map_can_be_cleared_and_evicted_from(store, size):
    fill_the_map(store, size)
    assert store.put(key(1 << 30), value(1, size))
    assert store.info()["bytes_used"] <= BUDGET
    fill_the_map(store, size)
    store.clear()
    assert store.info()["entries"] == 0
    assert store.put(key(1), value(1, size))


def test_a_map_that_another_process_grew(store):
    assert store.put(key(1), value(1))
    code = (
        "store = open_store(Path(sys.argv[1]), 100 << 20, 256 << 20)\n"
        "sys.exit(0 if all(store.put(key(n), value(n, 1 << 20)) for n in range(2, 42)) else 1)"
    )
    assert run(code, store.directory) == 0
    assert store.get(key(1)) == value(1)
    assert store.get(key(41)) == value(41, MIB)
    assert (store.path / "data.mdb").stat().st_size >= store._env.info()["map_size"] > SMALL_MAP
    assert run(code.replace("42", "80"), store.directory) == 0
    assert store.put(key(1), value(2)) and store.get(key(1)) == value(2)


def test_a_smaller_map_on_reopen(tmp_path, store):
    store.put(key(1), value(1))
    store.close()
    small = LmdbStore(tmp_path, BUDGET, 4 * MIB)
    assert small.get(key(1)) == value(1) and small.put(key(2), value(2))
    small.close()


@pytest.mark.parametrize("limit", ["RLIMIT_AS, (900 << 20,) * 2", "RLIMIT_FSIZE, (100 << 20,) * 2"])
def test_a_limit_of_addresses_or_of_file_sizes_means_a_smaller_map(tmp_path, limit):
    code = (
        "import resource, warnings; warnings.simplefilter('error')\n"
        f"resource.setrlimit(resource.{limit})\n"
        "store = open_store(Path(sys.argv[1]), 512 << 20)\n"
        "kept = store.put(key(1), b'1') and store.info()['kind'] == 'lmdb'\n"
        "sys.exit(0 if kept and store.budget < (512 << 20) else 1)"
    )
    assert run(code, tmp_path) == 0
    assert opened(tmp_path).get(key(1)) == b"1"


# Readers.

TAKE_ALL = (
    "import lmdb\nstore = open_store(Path(sys.argv[1]), 8 << 20, 16 << 20)\nstore.get(key(0))\n"
    "held = []\n"
    "try:\n"
    " while True: held.append(store._env.begin())\n"
    "except lmdb.ReadersFullError: print(len(held), flush=True)\n"
    "sys.stdin.readline(); os._exit(0)"
)


@pytest.fixture
def few_readers(tmp_path, monkeypatch):
    """A store with room for a few readers, open here without a read so far."""
    monkeypatch.setattr(environment, "MAX_READERS", 2)
    monkeypatch.setattr(permissions, "LOCK_FILE_BYTES", 512)
    assert opened(tmp_path).put(key(1), value(1))
    module._stores[str(tmp_path)].close()
    module._stores.clear()
    return opened(tmp_path)


def all_slots_taken(store):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    child = start(TAKE_ALL, store.directory, **pipes)
    assert 0 < int(child.stdout.readline()) < 10
    return child


def test_readers_without_room_are_misses_and_no_errors(few_readers):
    with warnings.catch_warnings(), all_slots_taken(few_readers) as child:
        warnings.simplefilter("error")
        assert few_readers.get(key(1)) is None
        assert not few_readers.put(key(2), value(2))
        assert few_readers.info()["entries"] == 0 and list(few_readers.items()) == []
        child.communicate("\n", timeout=LIMIT_S)
        assert few_readers.get(key(1)) == value(1) and few_readers.put(key(2), value(2))


def test_slots_of_dead_readers_are_taken_back(few_readers):
    with all_slots_taken(few_readers) as child:
        child.kill()
        child.wait(LIMIT_S)
    assert few_readers.get(key(1)) == value(1)
    assert few_readers._env.max_readers() < 10
