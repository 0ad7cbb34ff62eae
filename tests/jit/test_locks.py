"""Key locks: exclusive between threads and processes, never a hang, gone with their owner."""

import os
import signal
import subprocess
import threading
import time

import pytest

from kernlib.jit.locks import ForkGuard, KeyLocks, MemoryLocks, hold_file
from tests.jit.process_cases import forked, succeeds
from tests.jit.store_cases import start
from tests.support.limits import LIMIT_S

KEY = b"\x07" + bytes(31)
SAME_SHARD = b"\x07" + bytes(range(31))
OTHER = b"\x08" + bytes(31)


LOCKS = (
    "import time\nfrom kernlib.jit.locks import KeyLocks\n"
    "folder, KEY = Path(sys.argv[1]), bytes([7]) + bytes(31)\nlocks = KeyLocks(folder)\n"
)


def python(code, folder, **options):
    """A child interpreter with `locks` on the folder, whose lines we read."""
    return start(LOCKS + code, folder, stdout=subprocess.PIPE, text=True, **options)


HOLD = "with locks.hold(KEY, 10) as owned:\n print(owned, flush=True)\n time.sleep(60)"


def taken(locks, key=KEY, timeout=0.05):
    with locks.hold(key, timeout) as owned:
        return not owned


@pytest.fixture(params=["files", "memory"])
def locks(request, tmp_path):
    return KeyLocks(tmp_path / "locks") if request.param == "files" else MemoryLocks()


def test_threads_exclude_each_other(locks):
    inside, most = [], []

    def work():
        for _ in range(20):
            with locks.hold(KEY, 30) as owned:
                assert owned
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert most == [1] * 160


def test_timeout_yields_false_and_waits_once(locks):
    waits, got = [], []

    def second():
        with locks.hold(SAME_SHARD, 0.3, lambda: waits.append(1)) as owned:
            got.append(owned)

    with locks.hold(KEY, 1, lambda: waits.append("first")):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(LIMIT_S)
        assert not taken(locks, OTHER)
    assert waits == [1] and got == [False]
    assert not taken(locks)


def test_an_error_in_on_wait_frees_what_was_taken(tmp_path):
    locks = KeyLocks(tmp_path)

    def fail():
        raise ValueError("mine")

    with hold_file(tmp_path / "07.lock", 1) as owned:
        assert owned
        with pytest.raises(ValueError, match="mine"), locks.hold(KEY, 1, fail):
            pass
    assert not taken(locks)


def test_unusable_directory_yields_false_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    waits = []
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with KeyLocks(folder).hold(KEY, 10, lambda: waits.append(1)) as owned:
            assert not owned
    assert waits == []


def test_read_only_directory_yields_false(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(30, "Read-only file system")

    locks = KeyLocks(tmp_path)
    monkeypatch.setattr(os, "open", refuse)
    assert taken(locks, timeout=10)


def test_8_processes_exclude_each_other(tmp_path):
    code = (
        "for _ in range(25):\n"
        " with locks.hold(KEY, 60) as owned:\n"
        "  assert owned\n"
        "  fd = os.open(folder / 'inside', os.O_CREAT | os.O_EXCL)\n"
        "  number = int((folder / 'count').read_text())\n"
        "  (folder / 'count').write_text(str(number + 1))\n"
        "  os.close(fd); os.unlink(folder / 'inside')\n"
    )
    (tmp_path / "count").write_text("0")
    children = [python(code, tmp_path) for _ in range(8)]
    assert [child.wait(LIMIT_S) for child in children] == [0] * 8
    assert (tmp_path / "count").read_text() == "200"


def test_a_killed_owner_frees_the_lock_at_once(tmp_path):
    locks = KeyLocks(tmp_path)
    child = python(HOLD, tmp_path)
    assert child.stdout.readline() == "True\n"
    waits = []
    with locks.hold(KEY, 0.1, lambda: waits.append(1)) as owned:
        assert not owned and waits == [1]
    child.send_signal(signal.SIGKILL)
    child.wait()
    with locks.hold(KEY, 0) as owned:
        assert owned


def test_a_removed_lock_file_does_not_make_two_owners(tmp_path):
    locks = KeyLocks(tmp_path)
    code = "with locks.hold(KEY, 10) as owned:\n print(owned, flush=True)\n sys.stdin.readline()"
    with locks.hold(KEY, 1):
        child = python(code, tmp_path, stdin=subprocess.PIPE)
        time.sleep(0.5)  # it waits on the file that goes now
        os.unlink(tmp_path / "07.lock")
        assert child.stdout.readline() == "True\n"
    assert taken(locks)
    child.communicate("\n", timeout=LIMIT_S)
    assert not taken(locks)


def test_a_child_that_leaves_the_block_keeps_the_parents_lock(tmp_path):
    locks = KeyLocks(tmp_path)
    held = locks.hold(KEY, 1)
    assert held.__enter__()

    def leave():
        held.__exit__(None, None, None)
        assert taken(locks)

    succeeds(forked(leave))
    other = python("with locks.hold(KEY, 0) as owned: print(owned)", tmp_path)
    assert other.communicate(timeout=LIMIT_S)[0] == "False\n"
    held.__exit__(None, None, None)
    assert not taken(locks)


def test_an_idle_child_does_not_hold_a_dead_owners_lock(tmp_path):
    code = (
        "with locks.hold(KEY, 10):\n"
        " pid = os.fork()\n"
        " if pid == 0: time.sleep(60); os._exit(0)\n"
        " print(pid, flush=True)\n time.sleep(60)"
    )
    owner = python(code, tmp_path)
    grandchild = int(owner.stdout.readline())
    time.sleep(0.2)
    try:
        assert taken(KeyLocks(tmp_path))
        owner.kill()
        owner.wait()
        assert not taken(KeyLocks(tmp_path))
    finally:
        os.kill(grandchild, signal.SIGKILL)
        owner.stdout.close()


# Work that a fork waits for.


def test_a_fork_waits_for_the_work_of_others_and_lets_none_begin():
    guard, order = ForkGuard(), []
    inside, begun = threading.Event(), threading.Event()

    def work():
        with guard.work():
            inside.set()
            time.sleep(0.2)
            order.append("first")

    def later():
        begun.set()
        with guard.work():
            order.append("second")

    threads = [threading.Thread(target=work), threading.Thread(target=later)]
    threads[0].start()
    assert inside.wait(LIMIT_S)
    guard.before_fork()
    threads[1].start()
    assert begun.wait(LIMIT_S)
    time.sleep(0.1)
    assert order == ["first"]
    guard.after_in_parent()
    for thread in threads:
        thread.join(LIMIT_S)
    assert order == ["first", "second"]


def test_a_guard_whose_hooks_come_in_the_middle_of_a_fork_stays_open():
    guard = ForkGuard()
    guard.after_in_parent()  # the thread that forks has passed the other hook's turn
    entered = threading.Event()

    def work():
        with guard.work():
            entered.set()

    threading.Thread(target=work, daemon=True).start()
    assert entered.wait(LIMIT_S)
