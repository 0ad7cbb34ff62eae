"""The service on a compiler that only counts: one compile for all who want a kernel, and no
broken cache fails a call."""

import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import Counter

import pytest

from kernlib import events, settings
from kernlib.errors import CompileError, NotCachedError
from kernlib.jit import compiler, service
from kernlib.jit.entry import Entry
from kernlib.jit.spec import KernelSpec

SPEC = KernelSpec("test", '#include "common/math.cuh"\n', "entry", 32, 0, (), "a kernel of tests")
ARCH = "sm_90a"


def spec(number):
    return SPEC._replace(source=f"{SPEC.source}// {number}\n")


def made_of(wanted, arch):
    meta = {"registers": "1", "spill_bytes": "0", "shared_bytes": "0", "compile_ms": "1"}
    return Entry(wanted.entry, f"{arch} {wanted.source}".encode(), meta)


class Compiler:
    """Counts compiles by source; waits, or fails, if told to."""

    def __init__(self):
        self.counts = Counter()
        self.error = None
        self.gates = {}

    def __call__(self, wanted, arch):
        self.counts[wanted.source, arch] += 1
        if wanted.source in self.gates:
            assert self.gates[wanted.source].wait(20)
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        return made_of(wanted, arch)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own."""
    monkeypatch.setenv("KERNLIB_CACHE_DIR", str(tmp_path / "cache"))
    settings.reset()
    service.forget()
    yield tmp_path / "cache"
    service.forget()
    monkeypatch.undo()
    settings.reset()


@pytest.fixture
def fake(cache, monkeypatch):
    compile_spec = Compiler()
    monkeypatch.setattr(compiler, "compile_spec", compile_spec)
    return compile_spec


@pytest.fixture
def seen():
    found = []
    stop = events.subscribe(found.append)
    yield found
    stop()


def in_threads(count, work):
    """Results of ``work(i)`` in threads that start together; exceptions are results too."""
    start, results = threading.Barrier(count), [None] * count

    def run(index):
        start.wait(20)
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return results


# Single flight between threads.


def test_32_threads_and_one_key_are_one_compile(fake):
    gate = fake.gates[SPEC.source] = threading.Event()
    threading.Timer(0.2, gate.set).start()
    results = in_threads(32, lambda _: service.build(SPEC, ARCH))
    assert fake.counts == {(SPEC.source, ARCH): 1}
    assert all(found == made_of(SPEC, ARCH) for found in results)


def test_another_key_does_not_wait(fake):
    gate = fake.gates[SPEC.source] = threading.Event()
    slow = threading.Thread(target=service.build, args=(SPEC, ARCH))
    slow.start()
    try:
        others = [spec(i) for i in range(64)]  # some of them in the shard of the slow one
        mine = service.digest(SPEC, ARCH)[0]
        others = [other for other in others if service.digest(other, ARCH)[0] != mine]
        for other in others[:8]:
            assert service.build(other, ARCH) == made_of(other, ARCH)
        assert slow.is_alive()
    finally:
        gate.set()
        slow.join(20)
    assert fake.counts[SPEC.source, ARCH] == 1


def test_a_failure_reaches_every_waiter_and_is_replayed(fake):
    fake.error = CompileError("no", "log", "source")
    gate = fake.gates[SPEC.source] = threading.Event()
    threading.Timer(0.2, gate.set).start()
    results = in_threads(16, lambda _: service.build(SPEC, ARCH))
    assert [type(found) for found in results] == [CompileError] * 16
    for _ in range(3):
        with pytest.raises(CompileError, match="no"):
            service.build(SPEC, ARCH)
    assert fake.counts[SPEC.source, ARCH] == 1


def test_forget_clears_a_failure_and_the_disk_never_had_it(fake):
    fake.error = CompileError("no")
    with pytest.raises(CompileError):
        service.build(SPEC, ARCH)
    assert service.layer()[0].get(service.digest(SPEC, ARCH)) is None
    fake.error = None
    with pytest.raises(CompileError):
        service.build(SPEC, ARCH)
    service.forget()
    assert service.build(SPEC, ARCH) == made_of(SPEC, ARCH)
    assert fake.counts[SPEC.source, ARCH] == 2


def test_what_is_no_verdict_on_the_source_is_tried_again(fake):
    fake.error = MemoryError("for now")
    with pytest.raises(MemoryError):
        service.build(SPEC, ARCH)
    fake.error = None
    assert service.build(SPEC, ARCH) == made_of(SPEC, ARCH)


def test_a_remembered_failure_keeps_nothing_of_its_callers_alive(fake):
    class Tensor:
        pass

    fake.error = CompileError("no")
    alive = []

    def call():
        tensor = Tensor()
        alive.append(weakref.ref(tensor))
        service.build(SPEC, ARCH)

    for _ in range(3):
        with pytest.raises(CompileError):
            call()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3


# Single flight between processes, without torch.

CHILD = """
import os, pathlib, sys, time, uuid
from kernlib.jit import compiler, entry, service
from kernlib.jit.spec import KernelSpec

assert "torch" not in sys.modules
marks = pathlib.Path(sys.argv[1])
source = sys.argv[2] + chr(10)

def compile_spec(spec, arch):
    (marks / f"compile-{uuid.uuid4()}").touch()
    time.sleep(0.3)
    meta = {"registers": "1", "spill_bytes": "0", "shared_bytes": "0", "compile_ms": "1"}
    return entry.Entry(spec.entry, spec.source.encode(), meta)

compiler.compile_spec = compile_spec
(marks / f"ready-{os.getpid()}").touch()
end = time.monotonic() + 30
while not (marks / "go").exists() and time.monotonic() < end:
    time.sleep(0.002)
made = service.build(KernelSpec("test", source, "entry", 32), "sm_90a")
assert made.cubin == source.encode()
"""


def children(marks, *keys):
    """Run a child for each key, all past their imports before one begins; count the compiles."""
    for mark in marks.glob("*"):
        mark.unlink()
    running = [
        subprocess.Popen([sys.executable, "-c", CHILD, str(marks), f"// {key}"]) for key in keys
    ]
    end = time.monotonic() + 60
    while len(list(marks.glob("ready-*"))) < len(keys) and time.monotonic() < end:
        time.sleep(0.005)
    (marks / "go").touch()
    assert [child.wait(60) for child in running] == [0] * len(keys)
    return len(list(marks.glob("compile-*")))


def test_processes_share_compiles(cache, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    assert children(marks, *["one"] * 8) == 1
    assert children(marks, "one") == 0
    assert children(marks, "two", "three", "two", "one") == 2


# KERNLIB_ASSERT_CACHED, and events.


def test_assert_cached_forbids_a_compile_and_allows_a_hit(fake, monkeypatch):
    service.build(SPEC, ARCH)
    monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
    settings.reset()
    assert service.build(SPEC, ARCH) == made_of(SPEC, ARCH)
    with pytest.raises(NotCachedError, match=f"{SPEC.description} for sm_80 is not in the cache"):
        service.build(SPEC, "sm_80")
    assert sum(fake.counts.values()) == 1


def test_assert_cached_forbids_the_compile_that_replaces_a_refused_cubin(fake, monkeypatch):
    service.build(SPEC, ARCH)
    monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
    settings.reset()

    def load(*_):
        raise RuntimeError("CUDA driver: CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setattr(service, "load", load)
    with pytest.raises(Exception):  # noqa: B017 which one is not the point
        service.kernel(SPEC, 0, ARCH)
    assert sum(fake.counts.values()) == 1


def test_a_load_that_fails_for_want_of_memory_keeps_the_entry(fake, monkeypatch):
    service.build(SPEC, ARCH)

    def load(*_):
        raise RuntimeError("CUDA driver: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(service, "load", load)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        service.kernel(SPEC, 0, ARCH)
    assert sum(fake.counts.values()) == 1


def test_a_cubin_that_the_driver_refuses_is_compiled_once_more(fake, monkeypatch):
    service.build(SPEC, ARCH)
    loads = []

    def load(built, *_):
        loads.append(built)
        raise RuntimeError("CUDA driver: CUDA_ERROR_INVALID_IMAGE")

    monkeypatch.setattr(service, "load", load)
    with pytest.raises(RuntimeError, match="INVALID_IMAGE"):
        service.kernel(SPEC, 0, ARCH)
    assert len(loads) == 2 and fake.counts[SPEC.source, ARCH] == 2


def test_a_kernel_is_loaded_once_for_32_threads_and_once_a_device(fake, monkeypatch):
    loads = []

    def load(built, wanted, key, device, arch):
        loads.append(device)
        time.sleep(0.02)
        return service.Kernel(wanted, key.hex(), arch, device, built)

    monkeypatch.setattr(service, "load", load)
    found = in_threads(32, lambda index: service.kernel(SPEC, index % 2, ARCH))
    assert sorted(loads) == [0, 1]
    assert len({kernel.function for kernel in found}) == 2
    assert service.loaded(SPEC, 1, ARCH) in found
    assert service.loaded(SPEC, 2, ARCH) is None


def test_events_of_a_miss_and_of_a_hit(fake, seen):
    service.build(SPEC, ARCH)
    assert [event.name for event in seen] == ["lookup", "compile", "store"]
    key = service.digest(SPEC, ARCH).hex()
    assert {(e.key, e.arch, e.description) for e in seen} == {(key, ARCH, SPEC.description)}
    assert {"ms", "registers", "spill_bytes", "shared_bytes"} <= set(seen[1].fields)
    seen.clear()
    service.build(SPEC, ARCH)
    assert [event.name for event in seen] == ["lookup", "hit"]
    assert seen[1].fields["where"] == "store"


def test_events_of_a_failure(fake, seen):
    fake.error = CompileError("no")
    with pytest.raises(CompileError):
        service.build(SPEC, ARCH)
    assert [event.name for event in seen] == ["lookup", "failed"]


def test_debug_in_the_environment_writes_a_line_an_event_to_stderr(cache, tmp_path):
    marks = tmp_path / "marks"
    marks.mkdir()
    (marks / "go").touch()
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(marks), "// debug"],
        env=os.environ | {"KERNLIB_DEBUG": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [line.split() for line in run.stderr.splitlines()]
    assert [line[:2] for line in lines] == [
        ["kernlib", name] for name in ("lookup", "compile", "store")
    ]
    assert run.stdout == ""


# A cache that cannot be used.


def damage(cache, fake, how):
    """The cache as an earlier process left it, damaged; nothing of it is open here."""
    service.build(SPEC, ARCH)
    service.layer()[0].close()
    how(next(cache.rglob("data.mdb")))
    fake.counts.clear()


def truncate(path):
    os.truncate(path, 6000)


DAMAGES = {
    "truncated": truncate,
    "junk": lambda path: path.write_bytes(b"junk" * 5000),
    "empty": lambda path: path.write_bytes(b""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_store_is_replaced_without_a_word_to_the_user(name, cache, fake):
    damage(cache, fake, DAMAGES[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert service.build(SPEC, ARCH) == made_of(SPEC, ARCH)
        assert service.build(SPEC, ARCH) == made_of(SPEC, ARCH)
    assert fake.counts[SPEC.source, ARCH] == 1


def file_in_the_way(cache):
    cache.write_text("not a folder")


def someone_may_write(cache):
    cache.mkdir()
    cache.chmod(0o777)


def beyond(cache):
    cache.parent.mkdir(exist_ok=True)
    cache.symlink_to("/proc/1/nowhere")


@pytest.mark.parametrize("spoil", [file_in_the_way, someone_may_write, beyond])
def test_an_unusable_cache_costs_one_warning_and_no_call(spoil, cache, fake):
    spoil(cache)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (1, 2, 1):
            assert service.build(spec(number), ARCH) == made_of(spec(number), ARCH)
    assert [str(w.message).count("KERNLIB_CACHE_DIR") for w in caught] == [1]
    assert set(fake.counts.values()) == {1}


def flipped(value):
    return value[:-1] + bytes([value[-1] ^ 1])


@pytest.mark.parametrize("spoil", [flipped, lambda v: v[:50], lambda v: b"", lambda v: v + b"x"])
def test_an_entry_with_damaged_bytes_is_compiled_and_written_again(spoil, fake):
    service.build(SPEC, ARCH)
    store, key = service.layer()[0], service.digest(SPEC, ARCH)
    whole = store.get(key)
    store.put(key, spoil(whole))
    assert service.build(SPEC, ARCH) == made_of(SPEC, ARCH)
    assert store.get(key) == whole
    assert service.build(SPEC, ARCH) == made_of(SPEC, ARCH)
    assert fake.counts[SPEC.source, ARCH] == 2


def test_a_value_under_the_key_of_another_is_a_miss(fake):
    service.build(SPEC, ARCH)
    store = service.layer()[0]
    store.put(service.digest(spec(1), ARCH), store.get(service.digest(SPEC, ARCH)))
    assert service.build(spec(1), ARCH) == made_of(spec(1), ARCH)
