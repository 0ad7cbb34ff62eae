"""The service on a compiler that only counts: one compile for all who want a kernel, and every
event of it."""

import gc
import threading
import time
import weakref

import pytest

from kernlib import settings
from kernlib.errors import CompileError, NotCachedError
from kernlib.jit import compiler, layers, service
from kernlib.jit.entry import Entry
from kernlib.jit.layers import Layers
from kernlib.jit.locks import MemoryLocks
from kernlib.jit.memory import MemoryStore
from kernlib.jit.spec import KernelSpec
from tests.jit.service_cases import ARCH, SPEC, in_threads, loading, made_of, spec
from tests.jit.store_cases import MIB
from tests.support.limits import LIMIT_S

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
        slow.join(LIMIT_S)
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
    assert service.layers().store.get(service.digest(SPEC, ARCH)) is None
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


# KERNLIB_ASSERT_CACHED, and events.


def test_assert_cached_forbids_a_compile_and_allows_a_hit(fake, monkeypatch):
    service.build(SPEC, ARCH)
    monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
    settings.reset()
    assert service.build(SPEC, ARCH) == made_of(SPEC, ARCH)
    with pytest.raises(NotCachedError, match=f"{SPEC.description} for sm_80 is not in the cache"):
        service.build(SPEC, "sm_80")
    assert sum(fake.counts.values()) == 1


def test_a_miss_is_told_before_the_compile_and_a_hit_is_not(fake, monkeypatch):
    told = []
    token = service.missed.set(lambda: told.append(sum(fake.counts.values())))
    try:
        for _ in range(2):
            service.build(SPEC, ARCH)
        assert told == [0]
        monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
        settings.reset()
        with pytest.raises(NotCachedError):
            service.build(SPEC, "sm_80")
        assert told == [0]
    finally:
        service.missed.reset(token)


def test_assert_cached_forbids_the_compile_that_replaces_a_refused_cubin(fake, monkeypatch):
    service.build(SPEC, ARCH)
    monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
    settings.reset()
    loading(monkeypatch, 9)
    with pytest.raises(Exception):  # noqa: B017 which one is not the point
        service.kernel(SPEC, 0, ARCH)
    assert sum(fake.counts.values()) == 1


def test_a_load_that_fails_for_want_of_memory_keeps_the_entry(fake, monkeypatch):
    service.build(SPEC, ARCH)
    loading(monkeypatch, 9, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        service.kernel(SPEC, 0, ARCH)
    assert sum(fake.counts.values()) == 1


def test_a_cubin_that_the_driver_refuses_is_compiled_once_more(fake, monkeypatch):
    service.build(SPEC, ARCH)
    loads = loading(monkeypatch, 9)
    with pytest.raises(RuntimeError, match="INVALID_IMAGE"):
        service.kernel(SPEC, 0, ARCH)
    assert len(loads) == 2 and fake.counts[SPEC.source, ARCH] == 2


def test_a_kernel_is_loaded_once_for_32_threads_and_once_a_device(fake, monkeypatch):
    loads = []

    def load(built, asked, device):
        loads.append(device)
        time.sleep(0.02)
        return service.Kernel(asked.spec, asked.key.hex(), asked.arch, device)

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


def test_a_first_call_makes_the_keys_of_a_kernel_once(fake, monkeypatch):
    encoded, canonical = [], KernelSpec.canonical
    monkeypatch.setattr(KernelSpec, "canonical", lambda s: encoded.append(s) or canonical(s))
    loading(monkeypatch)
    kernels = spec(1), spec(2)
    assert not any(service.loaded(each, 0, ARCH) for each in kernels)
    for each in kernels:
        service.build_ahead(each, ARCH)
    found = [service.kernel(each, 0, ARCH) for each in kernels]
    assert [service.loaded(each, 0, ARCH) for each in kernels] == found
    assert encoded == [*kernels]


@pytest.mark.few(2)
@pytest.mark.parametrize("where", ["store", "memory"])
def test_kernels_that_make_room_are_an_event(fake, seen, cache, where, monkeypatch):
    if where == "memory":
        monkeypatch.setattr(layers, "_open", lambda *_: Layers(MemoryStore(MIB), MemoryLocks()))
    big = Entry("entry", bytes(MIB // 3), made_of(SPEC, ARCH).meta)
    monkeypatch.setattr(compiler, "compile_spec", lambda *_: big)
    with settings.override(cache_bytes=MIB):
        for number in range(5):
            service.build(spec(number), ARCH)
        stored = layers.layers().store.info()["entries"]
    gone = [event for event in seen if event.name == "evict"]
    assert sum(event.fields["kernels"] for event in gone) == 5 - stored > 0
    assert all(event.fields["bytes"] >= MIB // 3 for event in gone)
    assert {event.fields["where"] for event in gone} == {where}
    names = [event.name for event in seen]
    assert names[names.index("evict") + 1] == "store"


def test_events_of_a_failure(fake, seen):
    fake.error = CompileError("no")
    with pytest.raises(CompileError):
        service.build(SPEC, ARCH)
    assert [event.name for event in seen] == ["lookup", "failed"]
