"""The service on a damaged cache: every call ends in the right kernel."""

import os
import struct
import warnings

import lmdb
import pytest

from kernlib.jit import entry, service
from tests.jit.service_cases import ARCH, SPEC, loading, made_of, spec


def test_an_entry_with_damage_is_compiled_and_written_again(fake):
    service.build(SPEC, ARCH)
    store, key = service.layers().store, service.digest(SPEC, ARCH)
    whole = store.get(key)
    assert store.put(key, whole[:-30])
    assert [service.build(SPEC, ARCH) for _ in range(2)] == [made_of(SPEC, ARCH)] * 2
    assert store.get(key) == whole
    assert fake.counts[SPEC.source, ARCH] == 2


def test_what_the_driver_refuses_once_is_compiled_again_and_loaded(fake, monkeypatch):
    service.build(SPEC, ARCH)
    store, key = service.layers().store, service.digest(SPEC, ARCH)
    whole = store.get(key)
    store.put(key, entry.pack(key, entry.Entry("entry", b"no cubin", {})))
    loads = loading(monkeypatch, 1)
    service.kernel(SPEC, 0, ARCH)
    assert [found.cubin for found in loads] == [b"no cubin", made_of(SPEC, ARCH).cubin]
    assert fake.counts[SPEC.source, ARCH] == 2 and store.get(key) == whole


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_an_unusable_cache_costs_one_warning_and_no_call(kind, cache, fake):
    if kind == "file":
        cache.write_text("not a folder")
    else:
        cache.symlink_to("/proc/1/nowhere")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (1, 2, 1):
            assert service.build(spec(number), ARCH) == made_of(spec(number), ARCH)
    (text,) = [str(warning.message) for warning in caught]
    assert "KERNLIB_CACHE_DIR" in text and str(cache) in text
    assert set(fake.counts.values()) == {1}


# The store's file: found damaged by a process of its own, which must survive.

COUNT = 40
FILL = f"compile_s = 0\nfor n in range({COUNT}): build(str(n))\n"


def empty(data):
    data.write_bytes(b"")


def short(data):
    data.write_bytes(b"junk")


def junk(data):
    data.write_bytes(os.urandom(100_000))


def header_alone(data):
    os.truncate(data, 5000)


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


FRESH = {"empty": empty, "short": short, "junk": junk, "1.0 format": another_format}
FRESH["header alone"] = header_alone
FRESH |= {f"truncated at {share}": truncated(share) for share in (0.02, 0.1, 0.5, 0.9)}
FRESH |= {"both metas zeroed": zeroed(0, 2), "all pages zeroed": zeroed(0, 200)}
PARTIAL = {
    f"{n} pages zeroed from {at}": zeroed(at, n) for at in (2, 3, 4, 9, 40) for n in (1, 8, 500)
}
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
