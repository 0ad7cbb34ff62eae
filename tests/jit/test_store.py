"""The store: two verbs that never fail the caller, whatever has happened to the disk."""

import os
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import lmdb
import pytest

from kernlib.jit import environment
from kernlib.jit.locks import hold_file
from kernlib.jit.store import MemoryStore
from tests.jit.process_cases import forked, succeeds
from tests.jit.store_cases import (
    BUDGET,
    MIB,
    SMALL_MAP,
    key,
    no_store_outlives_its_test,  # noqa: F401
    opened,
    run,
    value,
)
from tests.support.limits import CHILD_LIMIT_S


@pytest.fixture
def store(tmp_path):
    return opened(tmp_path)


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


# Processes.


@pytest.mark.parametrize("closed", [False, True])
def test_fork_with_an_open_store(store, closed):
    store.put(key(1), value(1))
    if closed:
        store.close()

    def use():
        assert store._env is None  # LMDB would use the inherited one without a word
        assert store.get(key(1)) == value(1) and store.put(key(2), value(2))
        assert store.get(key(2)) == value(2)

    pid = forked(use)
    assert store.get(key(1)) == value(1) and store.put(key(3), value(3))
    succeeds(pid)
    assert {int.from_bytes(k, "big") for k, _ in store.items()} == {1, 2, 3}


def test_a_child_leaves_the_parents_reader_alone(store, monkeypatch):
    """The slot in the lock file that both of them map: LMDB would refuse the next read, of which
    the store knows no better than to open itself anew."""
    store.put(key(1), value(1)), store.get(key(1))
    succeeds(forked(lambda: store.get(key(1))))
    monkeypatch.delattr(lmdb, "open")
    assert store.get(key(1)) == value(1)
    assert store.put(key(2), value(2)) and store.get(key(2)) == value(2)


def test_fork_while_threads_write(store):
    stop = threading.Event()

    def work():
        while not stop.is_set():
            store.put(key(1), value(1))

    def put(number):
        assert store.put(key(number), value(number))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(10, 20):
            succeeds(forked(lambda number=number: put(number)))
    finally:
        stop.set()
        for thread in threads:
            thread.join(CHILD_LIMIT_S)
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


def test_a_stopped_writer_costs_time_only(store, monkeypatch):
    store.put(key(1), b"1")
    monkeypatch.setattr(environment, "GATE_TIMEOUT_S", 0.1)
    with hold_file(store.path.parent / "store.lock", 1):  # locks are per open file: not ours
        assert not store.put(key(2), b"2")
        assert store.get(key(1)) == b"1"
    assert store.put(key(2), b"2")


def test_a_removed_directory_is_made_again(store):
    store.put(key(1), b"1")
    subprocess.run(["rm", "-r", str(store.path.parent)], check=True)
    store.put(key(2), b"2")
    assert store.put(key(3), b"3") and store.get(key(3)) == b"3"
