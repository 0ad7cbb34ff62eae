"""Who has a store open: after an unclean end its pages are walked before LMDB sees them, after a
clean one they are not."""

import errno
import fcntl
import multiprocessing
import os
import shutil
import signal
import subprocess
from contextlib import contextmanager

import lmdb
import pytest

from kernlib.jit import environment, locks, open_stores
from kernlib.jit import store as module
from kernlib.jit.open_stores import fingerprint
from kernlib.jit.store import MemoryStore, open_store
from tests.jit.process_cases import forked, succeeds
from tests.jit.store_cases import (
    READ_AND_WRITE,
    aside,
    entries,
    failing,
    filled,
    key,
    no_store_outlives_its_test,  # noqa: F401
    opened,
    run,
    start,
    value,
)
from tests.support.limits import LIMIT_S

OPEN = "store = open_store(Path(sys.argv[1]), 8 << 20, 16 << 20)\nstore.get(key(0))\n"
WAIT = OPEN + "print(os.getpid(), flush=True)\nsys.stdin.readline()\n"
DIE = OPEN + "os.kill(os.getpid(), 9)"


@pytest.fixture
def walks(monkeypatch):
    """The files whose pages were walked in this process."""
    found, walk = [], environment.walk
    monkeypatch.setattr(environment, "walk", lambda data: (found.append(data), walk(data))[1])
    return found


def marks(path):
    return list((path / "v1" / "open").iterdir())


def is_locked(mark):
    with open(mark) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def another(path, code=WAIT):
    """Another process that has the store open; a line ends it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with start(code, path, **pipes) as child:
        child.pid_of_worker = int(child.stdout.readline())
        yield child
        if child.poll() is None:
            child.communicate("\n", timeout=LIMIT_S)


# A clean end, and all others.


def test_a_clean_close_leaves_word_and_no_mark_and_the_next_one_walks_nothing(tmp_path, walks):
    data = filled(tmp_path) / "data.mdb"
    assert marks(tmp_path) == []
    assert (tmp_path / "v1" / "store.left").read_text() == fingerprint(data)
    assert len(entries(opened(tmp_path))) == 40
    assert walks == [] and [is_locked(mark) for mark in marks(tmp_path)] == [True]


def test_the_end_of_a_process_is_a_clean_close(tmp_path, walks):
    filled(tmp_path)
    assert run(OPEN + "store.put(key(90), b'90')", tmp_path) == 0
    assert opened(tmp_path).get(key(90)) == b"90" and walks == []


def test_after_a_kill_the_pages_are_walked_once(tmp_path, walks):
    filled(tmp_path)
    assert run(DIE, tmp_path) == -signal.SIGKILL
    assert [is_locked(mark) for mark in marks(tmp_path)] == [False]
    store = opened(tmp_path)
    assert len(walks) == 1 and len(entries(store)) == 40
    store.close()
    assert marks(tmp_path) == [] and aside(tmp_path) == []
    module._stores.clear()
    opened(tmp_path)
    assert len(walks) == 1


@pytest.mark.parametrize("count", [1, 100])
def test_marks_that_a_reboot_left_are_those_of_the_dead_and_cost_one_walk(tmp_path, walks, count):
    filled(tmp_path)
    for number in range(count):
        (tmp_path / "v1" / "open" / f"{number}-1").write_bytes(b"")
    assert len(entries(opened(tmp_path))) == 40
    assert len(walks) == 1 and len(marks(tmp_path)) == 1


def touched(data):
    os.utime(data)


def copied(data):
    shutil.copy2(data, data.with_name("copy"))
    os.replace(data.with_name("copy"), data)


def longer(data):
    found = data.stat()
    os.truncate(data, found.st_size + 4096)
    os.utime(data, ns=(found.st_atime_ns, found.st_mtime_ns))


@pytest.mark.parametrize("change", [touched, copied, longer])
def test_a_file_changed_while_nobody_had_it_open_is_walked(tmp_path, walks, change):
    change(filled(tmp_path) / "data.mdb")
    assert len(entries(opened(tmp_path))) == 40
    assert len(walks) == 1 and aside(tmp_path) == []


@pytest.mark.parametrize("lost", ["missing", "empty", "junk"])
def test_without_the_last_ones_word_it_is_walked(tmp_path, walks, lost):
    filled(tmp_path)
    note = tmp_path / "v1" / "store.left"
    note.unlink()
    if lost != "missing":
        note.write_bytes(b"" if lost == "empty" else b"\xff\xfe")
    assert len(entries(opened(tmp_path))) == 40 and len(walks) == 1


def damaged(path, pages):
    """Random bytes over pages of the file, whose time of change stays."""
    data = path / "data.mdb"
    found = data.stat()
    with open(data, "r+b") as file:
        for page in pages(data):
            file.seek(page * 4096 + 16)
            file.write(os.urandom(2000))
    os.utime(data, ns=(found.st_atime_ns, found.st_mtime_ns))


def metas(_):
    return 0, 1


def of_kind(flag):
    """Pages of a kind, by the flags in their head; those of old transactions among them."""

    def pages(data):
        content = data.read_bytes()[: 1200 * 4096]
        heads = ((p, content[p * 4096 :][:12]) for p in range(2, len(content) // 4096))
        return [p for p, head in heads if head == p.to_bytes(8, "little") + bytes(2) + flag]

    return pages


STRUCTURE = {"meta": metas, "branch": of_kind(b"\1\0"), "leaf": of_kind(b"\2\0")}


@pytest.mark.parametrize("kind", STRUCTURE)
def test_damage_after_an_unclean_end_is_moved_aside_without_a_signal(tmp_path, kind):
    path = filled(tmp_path, 100)
    assert run(DIE, tmp_path) == -signal.SIGKILL
    assert STRUCTURE[kind](path / "data.mdb")
    damaged(path, STRUCTURE[kind])
    assert run(READ_AND_WRITE, tmp_path) == 0
    assert len(aside(tmp_path)) == 1


# Several processes.


def test_another_live_process_is_trusted(tmp_path, walks):
    filled(tmp_path)
    with another(tmp_path, OPEN + "store.put(key(91), b'91')\n" + WAIT):
        assert (tmp_path / "v1" / "store.left").read_text() != fingerprint(
            tmp_path / "v1" / "store" / "data.mdb"
        )
        assert opened(tmp_path).get(key(91)) == b"91"
        assert walks == [] and len(marks(tmp_path)) == 2


def test_a_live_one_is_not_enough_where_another_has_died(tmp_path, walks):
    filled(tmp_path)
    with another(tmp_path):
        assert run(DIE, tmp_path) == -signal.SIGKILL
        store = opened(tmp_path)
        assert len(walks) == 1 and len(entries(store)) == 40 and len(marks(tmp_path)) == 2


def test_a_live_process_follows_to_the_store_that_another_has_begun(tmp_path):
    filled(tmp_path)
    store = opened(tmp_path)
    assert store.get(key(1)) is not None
    assert run(OPEN + "store.set_aside(); store.put(key(92), b'92')", tmp_path) == 0
    assert len(aside(tmp_path)) == 1
    assert store.get(key(92)) == b"92" and store.get(key(1)) is None
    assert store.put(key(93), b"93")
    code = OPEN + "sys.exit(0 if store.get(key(93)) == b'93' else 1)"
    assert run(code, tmp_path) == 0
    store.close()
    assert marks(tmp_path) == []


def test_a_forked_child_has_a_mark_of_its_own(tmp_path, walks):
    filled(tmp_path)
    store = opened(tmp_path)
    (mine,) = marks(tmp_path)

    def use():
        assert store.get(key(1)) is not None and len(marks(tmp_path)) == 2 and not walks
        store.close()
        assert marks(tmp_path) == [mine] and is_locked(mine)

    succeeds(forked(use))
    assert marks(tmp_path) == [mine] and is_locked(mine)
    assert store.put(key(94), b"94")
    store.close()
    assert marks(tmp_path) == [] and walks == []


def test_a_child_does_not_hold_the_mark_of_its_dead_parent(tmp_path, walks):
    filled(tmp_path)
    code = OPEN + (
        "import time\n"
        "if os.fork() == 0: print(os.getpid(), flush=True)\n"
        "time.sleep(60); os._exit(0)"
    )
    with another(tmp_path, code) as child:
        child.kill()
        child.wait(LIMIT_S)
        try:
            assert [is_locked(mark) for mark in marks(tmp_path)] == [False]
            opened(tmp_path)
            assert len(walks) == 1
        finally:
            os.kill(child.pid_of_worker, signal.SIGKILL)


def test_children_that_leave_by_exit_cost_a_walk_and_nothing_else(tmp_path, walks):
    filled(tmp_path)
    store = opened(tmp_path)

    def put(number):
        assert store.put(key(number), value(number))

    for number in range(95, 98):
        succeeds(forked(lambda number=number: put(number)))
    assert len(marks(tmp_path)) == 2  # each child has removed that of the one before
    store.close()
    module._stores.clear()
    store = opened(tmp_path)
    assert len(walks) == 1 and aside(tmp_path) == [] and len(marks(tmp_path)) == 1
    assert [store.get(key(n)) == value(n) for n in range(95, 98)] == [True] * 3


# When a step fails.


def fails(code=errno.EIO):
    def fail(*_args, **_options):
        raise OSError(code, os.strerror(code))

    return fail


FAILURES = {
    "the walk": (environment, "walk"),
    "LMDB": (lmdb, "open"),
    "the length": (os, "truncate"),
    "the identity": (environment.permissions, "identity"),
    "moving aside": (os, "rename"),
}


@pytest.mark.parametrize("step", FAILURES)
def test_an_open_that_fails_after_its_mark_leaves_nothing_locked(
    tmp_path, monkeypatch, walks, step
):
    data = filled(tmp_path) / "data.mdb"
    if step == "moving aside":
        data.write_bytes(b"junk")
    os.utime(data)
    (tmp_path / "v1" / "open" / "dead").write_bytes(b"")
    before = set(locks._open_fds)
    with monkeypatch.context() as patch:
        if step == "the length":
            os.truncate(data, data.stat().st_size - 4096)  # or there would be nothing to extend
        patch.setattr(*FAILURES[step], fails())
        with pytest.warns(RuntimeWarning, match="Input/output error"):
            assert isinstance(open_store(tmp_path, 8 << 20, 16 << 20), MemoryStore)
    module._stores.clear()
    assert set(locks._open_fds) == before
    assert marks(tmp_path) and not any(map(is_locked, marks(tmp_path)))
    walks.clear()
    opened(tmp_path)
    assert len(walks) == 1  # nobody knows what happened


def test_dead_marks_stay_until_there_is_another(tmp_path, monkeypatch, walks):
    filled(tmp_path)
    dead = tmp_path / "v1" / "open" / "dead"
    dead.write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(locks.FileHold, "_try", fails(errno.EMFILE))
        with pytest.warns(RuntimeWarning, match="Too many open files"):
            open_store(tmp_path, 8 << 20, 16 << 20)
    module._stores.clear()
    assert marks(tmp_path) == [dead]
    opened(tmp_path)
    assert len(walks) == 1


@pytest.mark.parametrize(
    "call",
    [(open_stores.permissions, "write_note"), (open_stores.Path, "unlink")],
    ids=["write", "unlink"],
)
def test_a_close_that_fails_leaves_nothing_locked(tmp_path, monkeypatch, walks, call):
    filled(tmp_path)
    store, before = opened(tmp_path), set(locks._open_fds)
    with monkeypatch.context() as patch:
        patch.setattr(*call, fails(errno.ENOSPC))
        store.close()
    assert set(locks._open_fds) < before and store._env is None
    assert [is_locked(mark) for mark in marks(tmp_path)] == [False]
    assert len(entries(store)) == 40 and len(walks) == 1


def test_a_close_behind_a_stopped_process_leaves_nothing_locked(tmp_path, monkeypatch):
    filled(tmp_path)
    store = opened(tmp_path)
    monkeypatch.setattr(environment, "GATE_TIMEOUT_S", 0.05)
    with locks.hold_file(tmp_path / "v1" / "store.lock", 1):
        store.close()
    assert store._env is None and [is_locked(mark) for mark in marks(tmp_path)] == [False]


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_junk_among_the_marks_costs_a_walk(tmp_path, walks, kind):
    filled(tmp_path)
    strange = tmp_path / "v1" / "open" / "strange"
    if kind == "folder":
        strange.mkdir()
    else:
        strange.symlink_to("/proc/nowhere")
    assert len(entries(opened(tmp_path))) == 40 and len(walks) == 1


def test_an_error_in_use_costs_a_walk_of_the_pages(tmp_path, walks):
    filled(tmp_path)
    store = opened(tmp_path)
    with failing(lmdb.PageFullError("mdb_put: MDB_PAGE_FULL")):
        assert store.get(key(1)) is None
    assert store._env is None and not any(map(is_locked, marks(tmp_path)))
    assert store.get(key(1)) is not None and len(walks) == 1 and aside(tmp_path) == []


def worker(folder):
    opened(folder).put(key(1), b"1")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_of_multiprocessing_ends_cleanly(tmp_path, method):
    process = multiprocessing.get_context(method).Process(target=worker, args=(tmp_path,))
    process.start()
    try:
        process.join(LIMIT_S)
        assert process.exitcode == 0
    finally:
        process.kill()  # else the end of pytest waits for one that hangs
    assert list((tmp_path / "v1" / "open").iterdir()) == []
    assert (tmp_path / "v1" / "store.left").exists()
