"""Single flight: one make for each key, whatever it ends with."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernlib.jit.single_flight import SingleFlight
from tests.jit.process_cases import exit_status
from tests.support.limits import LIMIT_S


def test_nothing_is_kept():
    flights, counter = SingleFlight(), iter(range(9))
    assert [flights.do("key", lambda: next(counter)) for _ in range(3)] == [0, 1, 2]


def test_none_is_a_value():
    assert SingleFlight().do("key", lambda: None) is None


def test_an_interrupted_runner_hands_over():
    flights, inside = SingleFlight(), threading.Event()

    def interrupted():
        inside.set()
        time.sleep(0.1)
        raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(flights.do, "key", interrupted)
        assert inside.wait(LIMIT_S)
        second = pool.submit(flights.do, "key", lambda: "mine")
        assert second.result(LIMIT_S) == "mine"
        assert isinstance(first.exception(LIMIT_S), KeyboardInterrupt)


def test_asking_for_the_own_key_is_refused():
    flights = SingleFlight()
    with pytest.raises(RuntimeError, match="key"):
        flights.do("key", lambda: flights.do("key", lambda: 1))
    assert flights.do("key", lambda: 2) == 2


def test_a_forked_child_starts_with_none():
    flights = SingleFlight()
    release, inside = threading.Event(), threading.Event()

    def slow():
        inside.set()
        return release.wait(LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(flights.do, "key", slow)
        assert inside.wait(LIMIT_S)
        pid = os.fork()
        if pid == 0:
            os._exit(flights.do("key", lambda: 42))
        assert exit_status(pid) == 42
        release.set()
        assert running.result(LIMIT_S) is True
