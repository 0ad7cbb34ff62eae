"""Single flight: one make for each key, whatever it ends with."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kernlib.jit.single_flight import SingleFlight
from tests.jit.process_cases import exit_status
from tests.support.limits import LIMIT_S


def test_32_threads_one_make():
    flights, made, barrier = SingleFlight(), [], threading.Barrier(32)

    def make():
        made.append(threading.get_ident())
        time.sleep(0.1)
        return object()

    def call(_):
        barrier.wait(LIMIT_S)
        return flights.do("key", make)

    with ThreadPoolExecutor(32) as pool:
        values = set(pool.map(call, range(32)))
    assert len(made) == len(values) == 1


def test_exception_reaches_all_then_a_retry_works():
    flights, made, barrier = SingleFlight(), [], threading.Barrier(8)

    def fail():
        made.append(1)
        time.sleep(0.1)
        raise ValueError("no")

    def call(_):
        barrier.wait(LIMIT_S)
        with pytest.raises(ValueError) as caught:
            flights.do("key", fail)
        return caught.value

    with ThreadPoolExecutor(8) as pool:
        errors = {id(error) for error in pool.map(call, range(8))}
    assert len(made) == len(errors) == 1
    assert flights.do("key", lambda: 7) == 7


def test_other_keys_do_not_wait():
    flights, release, inside = SingleFlight(), threading.Event(), threading.Event()

    def slow():
        inside.set()
        return release.wait(LIMIT_S)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(flights.do, "slow", slow)
        assert inside.wait(LIMIT_S)
        assert flights.do("other", lambda: "at once") == "at once"
        assert not running.done()
        release.set()
        assert running.result(LIMIT_S) is True


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
