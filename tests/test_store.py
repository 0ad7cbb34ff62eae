"""The store: two verbs that never fail the caller, whatever has happened to the disk."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import lmdb
import pytest
from store_cases import (
    BUDGET,
    MIB,
    SMALL_MAP,
    key,
    no_store_outlives_its_test,  # noqa: F401
    opened,
)

from kernlib.jit import store as module
from kernlib.jit.entry import Entry, pack, unpack
from kernlib.jit.locks import hold_file
from kernlib.jit.store import LmdbStore, MemoryStore


def value(number, size=60_000):
    return number.to_bytes(4, "big") * (size // 4)


@pytest.fixture
def store(tmp_path):
    return opened(tmp_path)


def run(code, *args, **options):
    """Run code in a fresh interpreter; returns its exit status, negative for a signal."""
    head = (
        "import os, sys\nfrom pathlib import Path\nfrom kernlib.jit.store import open_store\n"
        "key = lambda n: n.to_bytes(32, 'big')\n"
        "value = lambda n, size=60_000: n.to_bytes(4, 'big') * (size // 4)\n"
    )
    env = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[1]))
    command = [sys.executable, "-c", head + code, *map(str, args)]
    return subprocess.run(command, env=env, timeout=60, check=False, **options).returncode


def aside(path):
    return list((path / "v1").glob("store.corrupt-*"))


# The verbs.


@pytest.mark.parametrize("kind", ["lmdb", "memory"])
def test_verbs(kind, tmp_path):
    store = opened(tmp_path) if kind == "lmdb" else MemoryStore(BUDGET)
    assert store.get(key(1)) is None
    assert store.put(key(1), b"one") and store.put(key(2), b"two")
    assert store.get(key(1)) == b"one" and type(store.get(key(1))) is bytes
    assert store.put(key(1), b"uno") and store.get(key(1)) == b"uno"
    assert dict(store.items()) == {key(1): b"uno", key(2): b"two"}
    store.delete(key(2))
    store.delete(key(3))
    assert store.get(key(2)) is None
    info = store.info()
    assert info["kind"] == kind and info["entries"] == 1 and info["budget"] == BUDGET
    assert 0 < info["bytes_used"] < BUDGET
    store.clear()
    assert list(store.items()) == [] and store.info()["entries"] == 0
    store.close()


def test_persistence_over_reopen(store):
    assert store.put(key(1), value(1))
    store.close()
    assert store.get(key(1)) == value(1)
    store.close()
    code = "sys.exit(0 if open_store(Path(sys.argv[1]), 8 << 20).get(key(1)) == value(1) else 1)"
    assert run(code, store.directory) == 0


def test_nothing_heavy_is_imported():
    heavy = "{'torch', 'numpy', 'cuda'}"
    code = (
        "import kernlib.errors, kernlib.jit.entry, kernlib.jit.flights\n"
        "from kernlib import settings; settings.current()\n"
        f"sys.exit(bool({heavy} & {{*sys.modules}}))"
    )
    assert run(code) == 0


def test_import_makes_nothing(tmp_path):
    env = dict(os.environ, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    code = "import kernlib.jit.store, kernlib.jit.locks; from kernlib import settings"
    command = [sys.executable, "-c", code + "; settings.current()"]
    subprocess.run(command, env=env, timeout=60, check=True)
    assert list(tmp_path.iterdir()) == []


def test_one_environment_for_all_names(tmp_path, store):
    (tmp_path / "alias").symlink_to(tmp_path)
    assert opened(tmp_path / "alias") is store
    assert opened(tmp_path / "v1" / "..") is store
    assert opened(tmp_path, budget=2 * MIB).budget == 2 * MIB


def test_modes_and_length(tmp_path):
    old = os.umask(0)
    try:
        store = opened(tmp_path / "a" / "b")
        store.put(key(1), b"1")
    finally:
        os.umask(old)
    for folder in (store.directory, store.path.parent, store.path):
        assert folder.stat().st_mode & 0o777 == 0o700
    for file in [*store.path.iterdir(), store.path.parent / "store.lock"]:
        assert file.stat().st_mode & 0o777 == 0o600, file
    data = (store.path / "data.mdb").stat()
    assert data.st_size == SMALL_MAP and data.st_blocks * 512 < MIB  # whole, and sparse


def test_threads(store):
    def work(number):
        for at in range(number * 20, number * 20 + 20):
            good.append(store.put(key(at), value(at, 4000)) and store.get(key(at)) is not None)

    good = []
    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert good == [True] * 160 and store.info()["entries"] == 160


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


@pytest.mark.parametrize("size", [1_500, 10_000, 60_000, 500_000])
def test_a_full_map_is_left_again(store, monkeypatch, size):
    fill_the_map(store, size)
    monkeypatch.setattr(LmdbStore, "budget", property(lambda _: 1 << 40, lambda *_: None))
    assert store.put(key(1 << 30), value(1, size))
    assert store.get(key(1 << 30)) == value(1, size)


@pytest.mark.parametrize("size", [1_500, 60_000])
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


def test_too_little_address_space_means_a_smaller_map(tmp_path):
    code = (
        "import resource, warnings; warnings.simplefilter('error')\n"
        "resource.setrlimit(resource.RLIMIT_AS, (900 << 20,) * 2)\n"
        "store = open_store(Path(sys.argv[1]), 512 << 20)\n"
        "sys.exit(0 if store.put(key(1), b'1') and store.budget < (512 << 20) else 1)"
    )
    assert run(code, tmp_path) == 0
    assert opened(tmp_path).get(key(1)) == b"1"


def test_a_file_size_limit_means_a_smaller_map(tmp_path):
    code = (
        "import resource, warnings; warnings.simplefilter('error')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 20,) * 2)\n"
        "store = open_store(Path(sys.argv[1]), 512 << 20)\n"
        "sys.exit(0 if store.put(key(1), b'1') and store.info()['kind'] == 'lmdb' else 1)"
    )
    assert run(code, tmp_path) == 0


# Processes.


@pytest.mark.parametrize("closed", [False, True])
def test_fork_with_an_open_store(store, closed):
    store.put(key(1), value(1))
    if closed:
        store.close()
    pid = os.fork()
    if pid == 0:
        good = store._env is None  # LMDB would use the inherited one without a word
        good = good and store.get(key(1)) == value(1) and store.put(key(2), value(2))
        os._exit(0 if good and store.get(key(2)) == value(2) else 1)
    assert store.get(key(1)) == value(1) and store.put(key(3), value(3))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert {int.from_bytes(k, "big") for k, _ in store.items()} == {1, 2, 3}


def test_fork_while_threads_write(store):
    stop = threading.Event()

    def work():
        while not stop.is_set():
            store.put(key(1), value(1))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(10, 20):
            pid = os.fork()
            if pid == 0:
                os._exit(0 if store.put(key(number), value(number)) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert store.info()["entries"] == 11


def test_8_processes_put_at_once(tmp_path):
    code = (
        "import warnings; warnings.simplefilter('error')\n"
        "store, first = open_store(Path(sys.argv[1]), 12 << 20, 16 << 20), int(sys.argv[2])\n"
        "good = all(store.put(key(n), value(n, 6000)) for n in range(first, first + 50))\n"
        "sys.exit(0 if good else 1)"
    )
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda child: run(code, tmp_path, child * 100), range(8)))
    assert codes == [0] * 8
    assert opened(tmp_path).info()["entries"] == 400


def test_a_writer_killed_in_the_middle_is_rolled_back(store):
    store.put(key(1), b"1")
    code = (
        "import signal\nstore = open_store(Path(sys.argv[1]), 8 << 20, 16 << 20)\n"
        "store.get(key(1))\n"
        "def die(txn):\n"
        " txn.put(key(2), value(2), db=store._kernels); os.kill(os.getpid(), signal.SIGKILL)\n"
        "store._transact(die, True)"
    )
    assert run(code, store.directory) == -signal.SIGKILL
    assert store.get(key(1)) == b"1" and store.get(key(2)) is None
    assert store.put(key(2), b"2") and store.get(key(2)) == b"2"


def test_a_stopped_writer_costs_time_only(store, monkeypatch):
    store.put(key(1), b"1")
    monkeypatch.setattr(module, "GATE_TIMEOUT_S", 0.1)
    with hold_file(store.path.parent / "store.lock", 1):  # locks are per open file: not ours
        assert not store.put(key(2), b"2")
        assert store.get(key(1)) == b"1"
    assert store.put(key(2), b"2")


def test_a_removed_directory_is_made_again(store):
    store.put(key(1), b"1")
    subprocess.run(["rm", "-r", str(store.path.parent)], check=True)
    store.put(key(2), b"2")
    assert store.put(key(3), b"3") and store.get(key(3)) == b"3"


# Damage.


def filled(tmp_path, count=40):
    store = opened(tmp_path)
    for number in range(count):
        assert store.put(key(number), pack(key(number), Entry("k", value(number))))
    store.close()
    module._stores.clear()
    return tmp_path / "v1" / "store"


def entries(store, count=40):
    found = (unpack(key(n), store.get(key(n)) or b"") for n in range(count))
    return [entry for entry in found if entry is not None]


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


READ_AND_WRITE = (
    "import warnings; warnings.simplefilter('error')\n"
    "store = open_store(Path(sys.argv[1]), 8 << 20, 16 << 20)\n"
    "for n in range(60): store.get(key(n))\n"
    "good = [store.put(key(n), value(n)) for n in range(60)]\n"
    "good = [store.put(key(n), value(n)) and store.get(key(n)) == value(n) for n in range(60)]\n"
    "list(store.items()); store.info(); store.delete(key(1)); store.clear(); store.close()\n"
    "sys.exit(0 if all(good) else 1)"
)


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

    def corrupt(*_args):
        raise lmdb.CorruptedError("mdb_get: MDB_CORRUPTED")

    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "_transact", corrupt)
        assert store.get(key(1)) is None
    assert len(aside(tmp_path)) == 1
    assert store.get(key(1)) is None and store.put(key(1), b"1")
    store._file = (0, 0)  # as if it had opened what another process has moved aside since
    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "_transact", corrupt)
        assert not store.put(key(2), b"2")
    assert len(aside(tmp_path)) == 1 and store.get(key(1)) == b"1"


def test_any_lmdb_error_is_a_miss(store, monkeypatch):
    def fail(*_args):
        raise lmdb.PanicError("mdb_txn_begin: MDB_PANIC")

    with monkeypatch.context() as patch:
        patch.setattr(LmdbStore, "_transact", fail)
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
