"""Directories that cannot hold a store: one warning, and kernels are kept in memory."""

import errno
import os
from pathlib import Path

import lmdb
import pytest
from store_cases import (
    BUDGET,
    key,
    no_store_outlives_its_test,  # noqa: F401
    opened,
)

from kernlib.jit import private
from kernlib.jit.store import MemoryStore, open_store


def unusable(path, reason):
    """Opens it twice: one warning that says all, and a store that works."""
    with pytest.warns(RuntimeWarning) as caught:
        store, again = [open_store(path, BUDGET) for _ in range(2)]
    assert again is store
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "KERNLIB_CACHE_DIR" in text and str(path) in text and reason in text
    assert caught[0].filename == __file__
    assert isinstance(store, MemoryStore)
    assert store.put(key(1), b"1") and store.get(key(1)) == b"1"
    return store


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "open", "truncate"])
def test_a_directory_that_cannot_be_written(tmp_path, monkeypatch, code, call):
    def refuse(*_args, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, call, refuse)
    unusable(tmp_path / "cache", os.strerror(code))


def test_no_space_for_the_lock_file(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "write", lambda *_: 4096)
    store = unusable(tmp_path, os.strerror(errno.ENOSPC))
    assert store.info()["kind"] == "memory"
    assert not (tmp_path / "v1" / "store" / "lock.mdb").exists()


def test_lmdb_that_cannot_be_opened(tmp_path, monkeypatch):
    def refuse(*_args, **_options):
        raise lmdb.Error("No locks available")

    monkeypatch.setattr(lmdb, "open", refuse)
    unusable(tmp_path, "No locks available")


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    unusable(tmp_path / "file", "File exists")
    unusable(tmp_path / "file" / "below", "Not a directory")


def test_no_home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    unusable(Path("~/.cache/kernlib"), "no home directory")
    assert list(tmp_path.iterdir()) == []


def test_a_foreign_owner(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    unusable(tmp_path, "belongs to user")


@pytest.mark.parametrize("below", ["", "v1", "v1/store"])
def test_a_directory_that_others_may_write(tmp_path, below):
    (tmp_path / "v1" / "store").mkdir(parents=True)
    (tmp_path / below).chmod(0o770)
    unusable(tmp_path, "chmod go-w")


MOUNTS = """\
22 1 253:0 / / rw - ext4 /dev/vda rw
31 22 0:45 / {point} rw,relatime shared:1 - {kind} host:/export rw
"""


@pytest.mark.parametrize("kind", ["nfs4", "nfs", "cifs", "smb3", "lustre", "9p", "fuse.sshfs"])
def test_a_network_file_system(tmp_path, monkeypatch, kind):
    mounts = tmp_path / "mountinfo"
    escaped = str(tmp_path / "my home").replace(" ", "\\040")
    mounts.write_text(MOUNTS.format(point=escaped, kind=kind))
    monkeypatch.setattr(private, "_MOUNTS", mounts)
    unusable(tmp_path / "my home" / "cache", kind)
    assert not (tmp_path / "my home").exists()
    opened(tmp_path / "my homes")


def test_no_list_of_mounts(tmp_path, monkeypatch):
    monkeypatch.setattr(private, "_MOUNTS", tmp_path / "none")
    opened(tmp_path)


def test_memory_store_keeps_to_its_budget():
    store = MemoryStore(1000)
    for number in range(20):
        assert store.put(key(number), bytes([number]) * 100)
    assert store.info()["bytes_used"] == 1000 and store.get(key(9)) is None
    assert not store.put(key(1), bytes(1001))


def test_a_child_forked_in_the_middle_of_a_put_counts_its_bytes_anew():
    store = MemoryStore(1000)
    store.put(key(1), bytes(100))
    store._bytes += 900  # as another thread leaves it for a moment
    pid = os.fork()
    if pid == 0:
        good = store.put(key(2), bytes(900)) and store.get(key(1)) is not None
        os._exit(0 if good and store.info()["bytes_used"] == 1000 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
