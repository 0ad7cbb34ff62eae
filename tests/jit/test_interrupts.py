"""An interrupt at any place of the service's code spoils nothing: the next call finds no lock
taken, no compile under way, and a store that works, in this process and in others."""

import itertools
import sys
import threading
from pathlib import Path

import pytest

from kernlib import settings
from kernlib.jit import (
    bundle,
    environment,
    layers,
    locks,
    open_stores,
    service,
    single_flight,
    store,
)
from kernlib.jit.locks import hold_file
from kernlib.jit.store import LmdbStore
from tests.jit.service_cases import ARCH, SPEC, loading
from tests.support.interrupts import Interrupt
from tests.support.limits import LIMIT_S

pytestmark = [
    pytest.mark.skipif(sys.version_info < (3, 11), reason="names no handlers of code"),
    # One that is raised while a generator is closed reaches nobody.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODULES = (
    bundle,
    environment,
    single_flight,
    layers,
    locks,
    open_stores,
    service,
    store,
)
FILES = {module.__file__ for module in MODULES}


# Every place, and of all runs some: a thousand stores take a minute to make.
strides = pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])


@pytest.fixture
def loads(fake, monkeypatch):
    """Kernels that are loaded without a driver."""
    loading(monkeypatch)
    return fake


def use(folder, monkeypatch, *bundles):
    """A process that has used no cache yet, as far as the service can tell."""
    close()
    monkeypatch.setenv("KERNLIB_CACHE_DIR", ":".join(map(str, (folder, *bundles))))
    settings.reset()
    service.forget()


def close():
    for each in store._stores.values():
        each.close()
    for each in layers._bundles.values():
        each.close()
    store._stores.clear(), store._opening.clear()
    layers._bundles.clear(), layers._opening_bundles.clear(), layers._refused.clear()
    layers._layers = None


def interrupted(work, at):
    """Whether ``work()`` was interrupted at a place, and where. What was raised lives on for as
    long as the caller keeps it, as in an interactive session."""
    with Interrupt(at, FILES) as found:
        try:
            work()
        except KeyboardInterrupt as error:
            return found, error
    return found, None


def in_thread(work):
    """``work()`` of another thread, which must come to an end."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it hangs"
    return results[0]


def assert_nothing_is_held(folder):
    assert not service._loads._flights and not service._builds._flights
    assert not service._unforked._inside
    disk = layers.layers().store
    owned = [layers._opening, store._registry, locks._guard, disk._lock, service._unforked._gate]
    owned += [service._loads._lock, service._builds._lock, *layers.layers().locks._threads._shards]
    owned += [found._lock for found in layers.layers().bundles]
    assert not any(lock._is_owned() for lock in owned)
    # Stores of other folders may be open: earlier tests had them.
    held = [hold.path for hold in locks._open_fds.values() if folder in hold.path.parents]
    assert held == [disk._presence._mark.path], held
    paths = [folder / "v1" / "store.lock", *(folder / "v1" / "locks").iterdir()]
    for path in paths:
        with hold_file(path, 0) as free:
            assert free, path


def each_place(work, check, stride=1):
    """``work(at)`` interrupted at one place after the other, and ``check`` behind it; how many
    places there are."""
    for at in itertools.count(1, stride):
        folder, run = work(at)
        found, error = interrupted(run, at)
        try:
            check(folder)
        except BaseException as failure:
            raise AssertionError(f"after an interrupt at place {at}: {found.where}") from failure
        if found.places < at:
            return found.places
        del error


@strides
def test_a_first_build_can_be_interrupted_anywhere(tmp_path, loads, monkeypatch, stride):
    def first(at):
        folder = tmp_path / str(at)
        use(folder, monkeypatch)
        return folder, lambda: service.kernel(SPEC, 0, ARCH)

    def check(folder):
        made = in_thread(lambda: service.kernel(SPEC, 0, ARCH))
        disk = layers.layers().store
        assert isinstance(disk, LmdbStore)
        assert in_thread(lambda: disk.get(bytes.fromhex(made.key))) is not None
        assert_nothing_is_held(folder)

    assert each_place(first, check, stride) > 300
    close()


@strides
def test_finding_in_a_bundle_can_be_interrupted_anywhere(tmp_path, loads, monkeypatch, stride):
    use(tmp_path / "maker", monkeypatch)
    service.build(SPEC, ARCH)
    bundle.write(tmp_path / "bundle", bundle.collect(layers.layers().store.items()))
    compiles = sum(loads.counts.values())

    def find(at):
        folder = tmp_path / str(at)
        use(folder, monkeypatch, tmp_path / "bundle")
        return folder, lambda: service.kernel(SPEC, 0, ARCH)

    def check(folder):
        in_thread(lambda: service.kernel(SPEC, 0, ARCH))
        assert [found.folder for found in layers.layers().bundles] == [tmp_path / "bundle"]
        (folder / "v1" / "locks").mkdir(exist_ok=True)
        assert_nothing_is_held(folder)

    assert each_place(find, check, stride) > 200
    assert sum(loads.counts.values()) == compiles
    close()


def test_closing_a_store_can_be_interrupted_anywhere(tmp_path, loads, monkeypatch):
    use(tmp_path, monkeypatch)

    def closing(at):
        service.build(SPEC, ARCH)
        service.forget()
        return tmp_path, lambda: layers.layers().store.close()

    def check(folder):
        key = service.digest(SPEC, ARCH)
        assert in_thread(lambda: layers.layers().store.get(key)) is not None
        assert_nothing_is_held(folder)

    assert each_place(closing, check) > 30
    close()


def test_locks_can_be_interrupted_anywhere(tmp_path):
    key = bytes(32)
    for made in (locks.KeyLocks(tmp_path / "locks"), locks.MemoryLocks()):

        def hold(made=made):
            held = made.hold(key, 1)
            with locks.surely(held), held as owned:
                assert owned

        def free(_folder, made=made):
            with made.hold(key, 0) as owned:
                assert owned
            with in_thread(lambda: made.hold(key, 0)) as owned:
                assert owned
            assert not locks._open_fds

        assert each_place(lambda _at, hold=hold: (tmp_path, hold), free) > 8


def test_a_guard_of_forks_can_be_interrupted_anywhere(tmp_path):
    guard = locks.ForkGuard()

    def work():
        outer, inner = guard.work(), guard.work()
        with locks.surely(outer), outer, locks.surely(inner), inner:
            pass

    def fork():
        try:
            guard.before_fork()
        finally:
            guard.after_in_parent()

    def check(_folder):
        guard.after_in_parent()  # which a fork calls whatever its first hook came to
        assert not guard._inside and not guard._gate._is_owned()

    assert each_place(lambda _at: (tmp_path, work), check) > 10
    assert each_place(lambda _at: (tmp_path, fork), check) > 4


def test_the_watched_files_are_those_that_take_locks():
    folder = Path(locks.__file__).parent
    takers = {str(path) for path in folder.glob("*.py") if "surely(" in path.read_text()}
    assert takers <= FILES
