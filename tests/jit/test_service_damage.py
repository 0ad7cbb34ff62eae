"""The service on a damaged or unusable cache: every call ends in the right kernel."""

import os
import struct
import tempfile
import warnings
import zlib
from pathlib import Path

import lmdb
import pytest

from kernlib.jit import entry, environment, permissions, service
from tests.jit.service_cases import ARCH, SPEC, made_of, spec

# Entries: each is a miss, and written again.

HEAD = struct.Struct("<4sHHI")
LENGTHS = struct.Struct("<III")


def rebuilt(key, whole, magic=entry.MAGIC, schema=entry.SCHEMA, lengths=(), crc=None):
    """The value with some fields replaced, under a checksum that fits."""
    payload = whole[HEAD.size :]
    if lengths:
        payload = LENGTHS.pack(*lengths) + payload[LENGTHS.size :]
    found = zlib.crc32(payload, zlib.crc32(key))
    return HEAD.pack(magic, schema, 0, found if crc is None else crc) + payload


ENTRIES = {
    "whole": lambda key, v: rebuilt(key, v),
    "empty": lambda key, v: b"",
    "shorter than its head": lambda key, v: v[:11],
    "cut in the lengths": lambda key, v: v[:20],
    "cut in the middle of the cubin": lambda key, v: v[:-30],
    "a byte too long": lambda key, v: v + b"x",
    "length of the cubin too large": lambda key, v: rebuilt(key, v, lengths=(5, 0, 1 << 31)),
    "length of the name too large": lambda key, v: rebuilt(key, v, lengths=(2**32 - 1, 0, 0)),
    "wrong magic": lambda key, v: rebuilt(key, v, magic=b"KLIC"),
    "old schema": lambda key, v: rebuilt(key, v, schema=entry.SCHEMA - 1),
    "future schema": lambda key, v: rebuilt(key, v, schema=entry.SCHEMA + 1),
    "bad crc": lambda key, v: rebuilt(key, v, crc=12345),
    "a bit of the cubin": lambda key, v: v[:-1] + bytes([v[-1] ^ 1]),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_with_damage_is_compiled_and_written_again(name, fake):
    service.build(SPEC, ARCH)
    store, key = service.layers().store, service.digest(SPEC, ARCH)
    whole = store.get(key)
    assert store.put(key, ENTRIES[name](key, whole))
    assert [service.build(SPEC, ARCH) for _ in range(2)] == [made_of(SPEC, ARCH)] * 2
    assert store.get(key) == whole
    assert fake.counts[SPEC.source, ARCH] == (1 if name == "whole" else 2)


def test_a_whole_value_under_the_key_of_another_is_a_miss(fake):
    service.build(SPEC, ARCH)
    store, key = service.layers().store, service.digest(spec(1), ARCH)
    store.put(key, store.get(service.digest(SPEC, ARCH)))
    assert [service.build(spec(1), ARCH) for _ in range(2)] == [made_of(spec(1), ARCH)] * 2
    assert fake.counts[spec(1).source, ARCH] == 1
    assert entry.unpack(key, store.get(key)) == made_of(spec(1), ARCH)


def refused_by_the_driver(times, monkeypatch):
    loads = []

    def load(built, asked, device):
        loads.append(built)
        if len(loads) <= times:
            raise RuntimeError("CUDA driver: CUDA_ERROR_INVALID_IMAGE")
        return service.Kernel(asked.spec, asked.key.hex(), asked.arch, 1)

    monkeypatch.setattr(service, "load", load)
    return loads


def test_what_the_driver_refuses_once_is_compiled_again_and_loaded(fake, monkeypatch):
    service.build(SPEC, ARCH)
    store, key = service.layers().store, service.digest(SPEC, ARCH)
    whole = store.get(key)
    store.put(key, entry.pack(key, entry.Entry("entry", b"no cubin", {})))
    loads = refused_by_the_driver(1, monkeypatch)
    service.kernel(SPEC, 0, ARCH)
    assert [found.cubin for found in loads] == [b"no cubin", made_of(SPEC, ARCH).cubin]
    assert fake.counts[SPEC.source, ARCH] == 2 and store.get(key) == whole


def test_what_the_driver_refuses_twice_is_raised(fake, monkeypatch):
    loads = refused_by_the_driver(9, monkeypatch)
    with pytest.raises(RuntimeError, match="INVALID_IMAGE"):
        service.kernel(SPEC, 0, ARCH)
    assert len(loads) == 2 and fake.counts[SPEC.source, ARCH] == 2


# The store's file: found damaged by a process of its own, which must survive.

COUNT = 40
FILL = f"compile_s = 0\nfor n in range({COUNT}): build(str(n))\n"


def empty(data):
    data.write_bytes(b"")


def junk(data):
    data.write_bytes(os.urandom(100_000))


def another_format(data):
    data.unlink()
    data.with_name("lock.mdb").unlink()
    lmdb.open(str(data.parent), lib_version=1).close()


def truncated(share):
    def cut(data):
        with open(data, "rb") as file:
            metas = file.read(8192)
        last = max(struct.unpack_from("<Q", metas, at + 136)[0] for at in (0, 4096))
        os.truncate(data, int((last + 1) * 4096 * share))

    return cut


def zeroed(first, count):
    def zero(data):
        with open(data, "r+b") as file:
            file.seek(first * 4096)
            file.write(bytes(count * 4096))

    return zero


def unlocked(kind):
    def change(data):
        lock = data.with_name("lock.mdb")
        lock.unlink()
        if kind != "missing":
            lock.write_bytes(b"" if kind == "empty" else os.urandom(65536))

    return change


FRESH = {"empty": empty, "junk": junk, "1.0 format": another_format}
FRESH |= {f"truncated at {share}": truncated(share) for share in (0.02, 0.1, 0.5, 0.9)}
FRESH |= {"both metas zeroed": zeroed(0, 2), "all pages zeroed": zeroed(0, 200)}
PARTIAL = {f"{n} pages zeroed from {at}": zeroed(at, n) for at in (2, 9, 40) for n in (1, 8, 500)}
WHOLE = {f"lock file {kind}": unlocked(kind) for kind in ("missing", "empty", "junk")}


def after(damage, lab):
    """Compiles by the one who comes after the damage, and by the next."""
    assert lab.run(FILL) == (0, "")
    damage(lab.cache / "v1" / "store" / "data.mdb")
    counts = []
    for _ in range(2):
        lab.clear()
        assert lab.run(FILL) == (0, "")  # no signal, no warning, every kernel right
        counts.append(sum(lab.compiles().values()))
    return counts, len(list((lab.cache / "v1").glob("store.corrupt-*")))


@pytest.mark.parametrize("name", FRESH)
def test_a_file_that_is_no_store_is_moved_aside_and_a_fresh_one_is_begun(name, lab):
    assert after(FRESH[name], lab) == ([COUNT, 0], 1)


@pytest.mark.parametrize("name", PARTIAL)
def test_zeroed_pages_are_misses_or_a_fresh_store(name, lab):
    (compiles, later), moved = after(PARTIAL[name], lab)
    assert later == 0 and moved <= 1
    assert compiles == COUNT if moved else compiles < COUNT


@pytest.mark.parametrize("name", WHOLE)
def test_without_the_lock_file_everything_is_found(name, lab):
    assert after(WHOLE[name], lab) == ([0, 0], 0)


def test_locks_of_a_dead_process_are_no_obstacle(lab):
    assert lab.run(FILL) == (0, "")
    dying = lab.start("store = layers.layers().store; store.get(key('1'))\n"
                      "held = store._env.begin()\nbuild('new')", COMPILE_S="60")  # fmt: skip
    lab.wait_for("compile-new")
    dying.kill()
    dying.wait()
    root = lab.cache / "v1"
    assert len(list((root / "open").iterdir())) == 1 and list((root / "locks").iterdir())
    lab.clear()
    assert lab.run(FILL + "build('new')") == (0, "")
    assert lab.compiles() == {"new": 1} and list((root / "open").iterdir()) == []


# A cache that cannot be used.


def file_in_the_way(cache, patch):
    cache.write_text("not a folder")


def someone_may_write(cache, patch):
    cache.mkdir()
    cache.chmod(0o777)


def a_dangling_link(cache, patch):
    cache.symlink_to("/proc/1/nowhere")


def a_foreign_owner(cache, patch):
    patch.setattr(permissions.os, "geteuid", lambda: 12345)


def no_space(cache, patch):
    patch.setattr(permissions.os, "write", lambda *_: 4096)


def a_network(cache, patch):
    mounts = cache.with_name("mountinfo")
    mounts.write_text(f"31 22 0:45 / {cache.parent} rw - nfs4 host:/export rw\n")
    patch.setattr(permissions, "_MOUNTS", mounts)


def no_locks(cache, patch):
    def refuse(*_arguments, **_options):
        raise lmdb.LockError("No locks available")

    patch.setattr(environment.lmdb, "open", refuse)


UNUSABLE = (
    file_in_the_way,
    someone_may_write,
    a_dangling_link,
    a_foreign_owner,
    no_space,
    a_network,
    no_locks,
)


@pytest.mark.parametrize("spoil", UNUSABLE, ids=lambda spoil: spoil.__name__)
def test_an_unusable_cache_costs_one_warning_and_no_call(spoil, cache, fake, monkeypatch):
    spoil(cache, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (1, 2, 1):
            assert service.build(spec(number), ARCH) == made_of(spec(number), ARCH)
    (text,) = [str(warning.message) for warning in caught]
    assert "KERNLIB_CACHE_DIR" in text and str(cache) in text
    assert set(fake.counts.values()) == {1}


# The same by the system's own hand, in processes that may be no root.

TWICE = """
warnings.simplefilter("always")
compile_s = 0
for name in ("one", "two", "one"): build(name)
assert len(list(marks.glob("compile-*"))) == 2
"""
NOBODY, STRANGER = 65534, 54321  # the second is in no list of users; root may write everywhere


@pytest.fixture
def folder(lab):
    """A folder that other users can reach, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="kernlib-test-", dir="/tmp") as path:
        os.chmod(path, 0o755)
        lab.cache, lab.marks = Path(path, "cache"), Path(path, "marks")
        lab.marks.mkdir()
        lab.marks.chmod(0o777)
        yield Path(path)


def as_user(number, lab, code="", **variables):
    """Runs TWICE as a user without rights; what it warned of."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    imports = "import email.parser, platformdirs.unix; key('one')\n"  # Python may be root's alone
    become = f"os.setgroups([]); os.setgid({number}); os.setuid({number}); os.chdir('/')\n"
    status, errors = lab.run(imports + become + code + TWICE, **variables)
    assert status == 0, errors
    assert errors.count("RuntimeWarning") == 1 and "KERNLIB_CACHE_DIR" in errors
    return errors


def test_a_folder_that_cannot_be_written(lab, folder):
    lab.cache.mkdir(mode=0o555)
    if os.geteuid() == 0:
        os.chown(lab.cache, NOBODY, NOBODY)
    assert "Permission denied" in as_user(NOBODY, lab)


def test_a_folder_of_somebody_else(lab, folder):
    lab.cache.mkdir(mode=0o755)
    assert "it belongs to user 0" in as_user(NOBODY, lab)


def test_a_user_without_a_home(lab, folder):
    code = "os.environ.pop('HOME'); os.environ.pop('XDG_CACHE_HOME', None)\n"
    assert "no home directory" in as_user(STRANGER, lab, code, KERNLIB_CACHE_DIR="")


def test_a_home_that_is_missing(lab):
    variables = {"HOME": "/proc/nowhere", "XDG_CACHE_HOME": "", "KERNLIB_CACHE_DIR": ""}
    status, errors = lab.run(TWICE, **variables)
    assert status == 0, errors
    assert errors.count("RuntimeWarning") == 1 and "/proc/nowhere" in errors


def test_files_that_may_hold_nothing(lab):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (10_000,) * 2)\n"
    status, errors = lab.run(limit + TWICE)
    assert status == 0, errors
    assert errors.count("RuntimeWarning") == 1 and "KERNLIB_CACHE_DIR" in errors


DISK = 'mount -t tmpfs -o mode=700,size="$1" tmpfs "$2" || exit 77; shift 2; exec "$@"'


@pytest.mark.parametrize("size", ["4k", "72k", "96k", "160k", "400k"])
def test_a_disk_that_is_full_from_the_start_or_becomes_so(lab, size):
    lab.cache.mkdir(mode=0o700)
    lab.before = ["unshare", "-m", "sh", "-c", DISK, "sh", size, str(lab.cache)]
    code = "warnings.simplefilter('always'); compile_s = 0\n" + (
        "for n in range(60): build(f'{n % 30}' + 'x' * 100)\nlayers.layers().store.close()"
    )
    status, errors = lab.run(code)
    if status == 77 or "unshare" in errors:
        pytest.skip("this user may mount nothing")
    assert status == 0, errors
    assert errors.count("RuntimeWarning") <= 1
