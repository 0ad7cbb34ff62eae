"""Shared by the tests of the store: keys, a small store, and a clean registry after each test."""

import warnings

import pytest

from kernlib.jit import store as module
from kernlib.jit.store import LmdbStore, open_store

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


@pytest.fixture(autouse=True)
def no_store_outlives_its_test():
    yield
    for store in module._stores.values():
        store.close()
    module._stores.clear()
