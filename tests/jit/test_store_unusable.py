"""Directories that cannot hold a store: one warning, and kernels are kept in memory."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import lmdb
import pytest

from kernlib.cli import places
from kernlib.jit import bundle, permissions
from kernlib.jit import store as module
from kernlib.jit.bundle import open_bundle
from kernlib.jit.entry import Entry
from kernlib.jit.locks import hold_file
from kernlib.jit.store import MemoryStore, open_store
from tests.jit.process_cases import forked, succeeds
from tests.jit.store_cases import (
    BUDGET,
    key,
    no_store_outlives_its_test,  # noqa: F401
    opened,
    run,
    start,
)
from tests.support.limits import LIMIT_S


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


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_store_that_this_process_has_opened_by_lmdb(tmp_path, when):
    """LMDB opens a file once in a process: one warning says so, and what would help."""
    store = opened(tmp_path)
    assert store.put(key(1), b"1")
    store.close()
    if when == "before":
        module._stores.clear()
    with lmdb.open(str(tmp_path / "v1" / "store"), max_dbs=4):
        if when == "before":
            unusable(tmp_path, "has it open by lmdb.open")
            return
        with pytest.warns(RuntimeWarning, match=r"by lmdb\.open, .* keeps no kernels") as caught:
            assert not store.put(key(2), b"2") and store.get(key(1)) is None
        assert len(caught) == 1 and str(tmp_path) in str(caught[0].message)
    assert store.put(key(2), b"2") and store.get(key(1)) == b"1"


def test_a_bundle_that_this_process_has_opened_by_lmdb(tmp_path):
    bundle.write(tmp_path, {key(1): Entry("k", b"cubin", {})})
    opened_once = open_bundle(tmp_path)
    opened_once.close()
    with lmdb.open(str(tmp_path / bundle.FILE), subdir=False, lock=False, readonly=True):
        with pytest.raises(OSError, match=r"by lmdb\.open, .* close that environment"):
            open_bundle(tmp_path)
        with pytest.warns(RuntimeWarning, match=r"by lmdb\.open") as caught:
            assert opened_once.get(key(1)) is None and list(opened_once.items()) == []
        assert len(caught) == 1
    assert opened_once.get(key(1)) is not None


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


OF_OTHER_HOSTS = "nfs4 nfs cifs smb3 lustre 9p fuse.sshfs fuse.dfuse fuse dvs gfs2 ocfs2 virtiofs"


def mounted(tmp_path, monkeypatch, kind):
    """The folder of a test with such a file system mounted on another below it."""
    mounts, folder = tmp_path / "mountinfo", tmp_path / f"my home of {kind}"
    escaped = str(folder).replace(" ", "\\040")
    mounts.write_text(MOUNTS.format(point=escaped, kind=kind))
    monkeypatch.setattr(permissions, "_MOUNTS", mounts)
    return folder


def test_a_network_file_system(tmp_path, monkeypatch):
    for kind in OF_OTHER_HOSTS.split():
        folder = mounted(tmp_path, monkeypatch, kind)
        unusable(folder / "cache", f"network file system ({kind})")
        assert not folder.exists()
    opened(tmp_path / f"{folder}s")


def test_a_local_file_system_beside_those_of_the_network(tmp_path, monkeypatch):
    for kind in ("xfs", "fuseblk", "fuse.mergerfs", "fuse.fuse-overlayfs", "overlay"):
        opened(mounted(tmp_path, monkeypatch, kind)).close()


def test_no_list_of_mounts(tmp_path, monkeypatch):
    monkeypatch.setattr(permissions, "_MOUNTS", tmp_path / "none")
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

    def put():
        assert store.put(key(2), bytes(900)) and store.get(key(1)) is not None
        assert store.info()["bytes_used"] == 1000

    succeeds(forked(put))


# A cache that nobody can write: on a read-only mount, say, of a container's image.


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """A store with a kernel and a tuning result, as it looks on a file system that is read only."""

    def mounted():
        store = opened(tmp_path)
        store.put(key(1), b"1"), store.put_tuning(key(2), b"2")
        store.close()
        module._stores.clear()

        open_plain = permissions.open_plain

        def refuse(path, flags):
            if flags & (os.O_WRONLY | os.O_RDWR):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return open_plain(path, flags)

        monkeypatch.setattr(permissions, "open_plain", refuse)
        return tmp_path

    return mounted


def opened_read_only(path):
    with pytest.warns(RuntimeWarning, match=r"cannot be written .*beside those it holds") as caught:
        store = open_store(path, BUDGET)
    assert len(caught) == 1 and isinstance(store, MemoryStore)
    return store


def test_a_cache_on_a_read_only_file_system_serves_and_stays_as_it_is(read_only):
    path = read_only()
    before = {each: each.stat().st_mtime_ns for each in path.rglob("*")}
    store = opened_read_only(path)
    assert store.get(key(1)) == b"1" and store.get_tuning(key(2)) == b"2"
    assert store.put(key(3), b"3") and store.get(key(3)) == b"3"
    assert store.get(key(4)) is None and store.get_tuning(key(4)) is None
    assert dict(store.items()) == {key(1): b"1", key(3): b"3"} and store.info()["entries"] == 2
    store.delete(key(1))  # which the driver has refused
    assert store.get(key(1)) is None and dict(store.items()) == {key(3): b"3"}
    assert {each: each.stat().st_mtime_ns for each in path.rglob("*")} == before

    def read():
        assert store.get_tuning(key(2)) == b"2"

    succeeds(forked(read))


def test_a_read_only_cache_that_is_damaged_or_anothers_is_not_read(read_only, monkeypatch):
    path = read_only()
    with monkeypatch.context() as patch:
        foreign(patch, path / "v1" / "store" / "data.mdb")
        unusable(path, "it belongs to user 4242")
    module._stores.clear()
    data = path / "v1" / "store" / "data.mdb"
    data.write_bytes(bytes(8192) + data.read_bytes()[8192:])
    assert unusable(path, os.strerror(errno.EROFS))._behind is None


def test_a_read_only_file_system_without_a_cache(tmp_path, read_only):
    read_only()
    shutil.rmtree(tmp_path / "v1" / "store")
    unusable(tmp_path, os.strerror(errno.EROFS))


# Two containers that share a cache, and their process ids.

HOLDER = """
import fcntl, struct
store = open_store(Path(sys.argv[1]), 8 << 20, 16 << 20)
assert store.put(key(1), b"1") and store.put_tuning(key(2), b"2")
if sys.argv[2]:
    # As LMDB marks a process that reads: a byte locked, as far into the file as its id is large.
    file = open(Path(sys.argv[1]) / "v1" / "store" / "lock.mdb", "r+b")
    fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
assert store.put(key(3), b"3")
print("done", flush=True)
sys.stdin.readline()
"""


def test_a_process_id_that_another_container_uses_too(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with start(HOLDER, tmp_path, os.getpid(), **pipes) as holder:
        assert holder.stdout.readline() == "ready\n"
        with pytest.warns(RuntimeWarning, match="another container has the process id") as caught:
            store = open_store(tmp_path, BUDGET, 16 << 20)
        assert len(caught) == 1 and isinstance(store, MemoryStore)
        assert "KERNLIB_CACHE_DIR" in str(caught[0].message)
        assert store.get(key(1)) == b"1" and store.get_tuning(key(2)) == b"2"
        assert store.get(key(3)) is None and store.put(key(4), b"4") and store.get(key(4)) == b"4"
        holder.stdin.write("\n"), holder.stdin.flush()
        assert holder.stdout.readline() == "done\n"
        assert store.get(key(3)) == b"3"  # what others write meanwhile is found
        with hold_file(tmp_path / "v1" / "store.lock", 0) as owned:
            assert owned
        holder.communicate("\n", timeout=LIMIT_S)
    assert holder.returncode == 0
    store.close()
    module._stores.clear()
    assert opened(tmp_path).get(key(3)) == b"3"


# Files of the store that are not what they should be.


ODD = {
    "pipe": lambda path, _elsewhere: os.mkfifo(path),
    "folder": lambda path, _elsewhere: path.mkdir(),
    "link": lambda path, elsewhere: path.symlink_to(elsewhere),
}
FILES = (
    "store/data.mdb",
    "store/lock.mdb",
    "store.lock",
    "store.left",
    "open/1-1",
    "locks/00.lock",
)
HOW = """
import resource, warnings
resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
warnings.simplefilter("ignore")
from kernlib.jit.locks import KeyLocks
from kernlib.jit.store import locks_directory
store = open_store(Path(sys.argv[1]), 8 << 20, 16 << 20)
assert store.put(key(1), b"1") and store.get(key(1)) == b"1"
with KeyLocks(locks_directory(sys.argv[1])).hold(bytes(32), 0):
    pass
store.close()
assert open_store(Path(sys.argv[1]), 8 << 20, 16 << 20).get(key(1)) in (b"1", None)
"""


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_plain_file_hangs_nobody_and_is_not_written(tmp_path, name, kind):
    opened(tmp_path).close()
    module._stores.clear()
    path = tmp_path / "v1" / name
    path.unlink(missing_ok=True)
    (tmp_path / "elsewhere").write_bytes(b"precious")
    ODD[kind](path, tmp_path / "elsewhere")
    assert run(HOW, tmp_path) == 0
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


def test_a_bundle_that_is_a_pipe_is_passed_over(tmp_path):
    (tmp_path / "bundle").mkdir(mode=0o755)
    os.mkfifo(tmp_path / "bundle" / "kernels.mdb", 0o644)
    with pytest.raises(OSError, match="no plain file"):
        open_bundle(tmp_path / "bundle")


def test_a_pipe_in_place_of_the_store_does_not_hang_its_verification(tmp_path):
    (tmp_path / "v1" / "store").mkdir(parents=True)
    os.mkfifo(tmp_path / "v1" / "store" / "data.mdb")
    assert places.before_opening(tmp_path).pages == []


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb"])
def test_a_file_of_the_store_that_others_may_write_or_own(tmp_path, monkeypatch, name):
    opened(tmp_path).close()
    module._stores.clear()
    path = tmp_path / "v1" / "store" / name
    path.chmod(0o666)
    unusable(tmp_path, "others may write it (mode 666), chmod go-w would do")
    module._stores.clear()
    path.chmod(0o600)
    foreign(monkeypatch, path)
    unusable(tmp_path, "it belongs to user 4242")


def foreign(monkeypatch, *paths):
    """Files that look as if another user owned them: only root could really give them away."""
    stat, lstat = os.stat, os.lstat

    def owned(call):
        def of(path, *arguments, **options):
            found = call(path, *arguments, **options)
            if not isinstance(path, int) and Path(path) in paths:
                fields = list(found)
                fields[4] = 4242
                return os.stat_result(fields)
            return found

        return of

    monkeypatch.setattr(os, "stat", owned(stat))
    monkeypatch.setattr(os, "lstat", owned(lstat))


@pytest.mark.parametrize("below", ["v1/locks", "v1/open"])
def test_folders_of_locks_that_others_may_write(tmp_path, below):
    opened(tmp_path).close()
    module._stores.clear()
    (tmp_path / below).chmod(0o777)
    unusable(tmp_path, "chmod go-w")


@pytest.mark.parametrize("part", ["", "kernels.mdb"])
def test_a_bundle_of_another_user_is_passed_over(tmp_path, monkeypatch, part):
    bundle.write(tmp_path / "bundle", {key(1): Entry("k", b"cubin", {})})
    folder = tmp_path / "bundle"
    open_bundle(folder).close()
    with monkeypatch.context() as patch:
        foreign(patch, folder / part)
        with pytest.raises(PermissionError, match="belongs to user 4242"):
            open_bundle(folder)
    with monkeypatch.context() as patch:  # root's are everybody's
        patch.setattr(os, "geteuid", lambda: 4242)
        owner = os.stat(folder).st_uid
        if owner == 0:
            open_bundle(folder).close()


MASKS = """
os.umask(int(sys.argv[2], 8))
from kernlib.jit.locks import KeyLocks
from kernlib.jit.store import locks_directory
for _ in range(2):
    store = open_store(Path(sys.argv[1]), 8 << 20, 16 << 20)
    assert store.put(key(1), b"1") and store.info()["kind"] == "lmdb"
    with KeyLocks(locks_directory(sys.argv[1])).hold(bytes(32), 0) as owned:
        assert owned
    store.close()
"""


@pytest.mark.parametrize("mask", ["000", "022", "077", "777"])
def test_modes_are_the_same_under_every_umask(tmp_path, mask):
    """Also those of the folders above the cache that it has made."""
    assert run(MASKS, tmp_path / "above" / "cache", mask) == 0
    found = {path for path in (tmp_path / "above").rglob("*")} | {tmp_path / "above"}
    assert {path.name for path in found} >= {"store.left", "store.lock", "data.mdb", "00.lock"}
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
