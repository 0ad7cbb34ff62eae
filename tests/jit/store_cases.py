"""Shared by the tests of the store: keys, a small store, and a clean registry after each test."""

import os
import subprocess
import sys
import warnings
from contextlib import contextmanager

import pytest

from kernlib.jit import store as module
from kernlib.jit.entry import Entry, pack, unpack
from kernlib.jit.store import LmdbStore, open_store
from tests.support.limits import LIMIT_S
from tests.support.paths import ROOT

MIB = 1 << 20
SMALL_MAP = 16 * MIB
BUDGET = 8 * MIB


def key(number):
    return number.to_bytes(32, "big")


def opened(path, budget=BUDGET, map_bytes=SMALL_MAP):
    """The store, and no warning on the way to it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = open_store(path, budget, map_bytes)
    assert isinstance(found, LmdbStore)
    return found


def value(number, size=60_000):
    return number.to_bytes(4, "big") * (size // 4)


def run(code, *args, **options):
    """Run code in a fresh interpreter; returns its exit status, negative for a signal."""
    with start(code, *args, **options) as child:
        try:
            return child.wait(LIMIT_S)
        finally:
            child.kill()  # else the end of the block waits for one that hangs


def start(code, *args, **options):
    """Start code in a fresh interpreter, with the store's names at hand and without torch."""
    head = (
        "import os, sys\nfrom pathlib import Path\nfrom kernlib.jit.store import open_store\n"
        "key = lambda n: n.to_bytes(32, 'big')\n"
        "value = lambda n, size=60_000: n.to_bytes(4, 'big') * (size // 4)\n"
        "assert 'torch' not in sys.modules\n"
    )
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    command = [sys.executable, "-c", head + code, *map(str, args)]
    return subprocess.Popen(command, env=env, **options)


@contextmanager
def failing(error):
    """Every transaction of every store raises ``error`` inside the block."""

    def fail(*_args):
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LmdbStore, "_transact", fail)
        yield


def aside(path):
    return list((path / "v1").glob("store.corrupt-*"))


def filled(tmp_path, count=40):
    store = opened(tmp_path)
    for number in range(count):
        assert store.put(key(number), pack(key(number), Entry("k", value(number), {})))
    store.close()
    module._stores.clear()
    return tmp_path / "v1" / "store"


def entries(store, count=40):
    found = (unpack(key(n), store.get(key(n)) or b"") for n in range(count))
    return [entry for entry in found if entry is not None]


READ_AND_WRITE = (
    "import warnings; warnings.simplefilter('error')\n"
    "store = open_store(Path(sys.argv[1]), 8 << 20, 16 << 20)\n"
    "for n in range(60): store.get(key(n))\n"
    "good = [store.put(key(n), value(n)) for n in range(60)]\n"
    "good = [store.put(key(n), value(n)) and store.get(key(n)) == value(n) for n in range(60)]\n"
    "list(store.items()); store.info(); store.delete(key(1)); store.clear(); store.close()\n"
    "sys.exit(0 if all(good) else 1)"
)


@pytest.fixture(autouse=True)
def no_store_outlives_its_test():
    yield
    for store in module._stores.values():
        store.close()
    module._stores.clear()
