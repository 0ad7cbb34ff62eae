"""The gate of a store: a queue for it is waited for, a process that was stopped with it is not."""

import os
from types import SimpleNamespace

import pytest

from kernlib.jit import locks
from kernlib.jit.locks import MOST_TURNS, GateHold, hold_file


class Clock:
    """Time that passes in sleep alone, and others' turns at the gate while it does."""

    def __init__(self, path, turns):
        self.now, self.path, self.turns = 0.0, path, turns

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.now > self.turns[0]:
            os.utime(self.path, (self.now, self.turns.pop(0)))


@pytest.fixture
def waited(tmp_path, monkeypatch):
    """How long a gate that others hold at these times is waited for, of a deadline of a second."""

    def wait(*turns):
        clock = Clock(tmp_path / "gate", [*turns, float("inf")])
        monkeypatch.setattr(locks, "time", SimpleNamespace(monotonic=clock.monotonic))
        locks.time.sleep = clock.sleep
        with hold_file(clock.path, 0) as other, GateHold(clock.path, 1) as owned:
            assert other and not owned
        return clock.now

    return wait


def test_a_stopped_holder_is_waited_for_until_the_deadline(waited):
    assert waited() == pytest.approx(1)


def test_a_queue_is_waited_for_beyond_it(waited):
    assert waited(0.9, 1.8, 2.7) == pytest.approx(3.7, abs=0.2)


def test_no_queue_is_waited_for_for_ever(waited):
    assert waited(*(turn / 2 for turn in range(1000))) == pytest.approx(MOST_TURNS)


def test_whoever_takes_the_gate_says_so(tmp_path):
    path = tmp_path / "gate"
    path.touch()
    os.utime(path, (0, 0))
    with GateHold(path, 0) as owned:
        assert owned and path.stat().st_mtime > 0


def test_a_gate_that_goes_with_its_folder_is_made_again(tmp_path, monkeypatch):
    path = tmp_path / "gate"
    with hold_file(path, 0):
        monkeypatch.setattr(locks.time, "sleep", lambda seconds: path.unlink())
        with GateHold(path, 5) as owned:
            assert owned and path.exists()
