"""Bundles: equal kernels make equal bytes; a mounted one is found, a bad one passed over."""

import os
import shutil
import warnings

import lmdb
import pytest

from kernlib import events, settings
from kernlib.errors import NotCachedError
from kernlib.jit import bundle, compiler, entry, layers, service, toolchain
from kernlib.jit.entry import Entry
from tests.jit.process_cases import forked, succeeds
from tests.jit.service_cases import ARCH, SPEC, loading, spec
from tests.jit.store_cases import key, no_store_outlives_its_test, opened  # noqa: F401


@pytest.fixture
def compiles(monkeypatch):
    """A compiler that notes what it is asked for; each run takes another time."""
    made = []

    def compile_spec(wanted, arch):
        made.append((wanted.source, arch))
        meta = {"arch": arch, "description": wanted.description, "nvrtc": toolchain.nvrtc_version()}
        meta |= {"registers": "1", "spill_bytes": "0", "shared_bytes": "0"}
        meta |= {"compile_ms": str(len(made)), "created": str(1000 + len(made))}
        return Entry(wanted.entry, f"{arch} {wanted.source}".encode() * 500, meta)

    monkeypatch.setattr(compiler, "compile_spec", compile_spec)
    service.forget()
    yield made
    service.forget()


@pytest.fixture
def roots(monkeypatch):
    """Sets KERNLIB_CACHE_DIR as a process that starts now would see it."""

    def use(*folders):
        monkeypatch.setenv("KERNLIB_CACHE_DIR", os.pathsep.join(map(str, folders)))
        monkeypatch.setattr(layers, "_layers", None)
        monkeypatch.setattr(layers, "_bundles", {})
        monkeypatch.setattr(layers, "_refused", set())
        settings.reset()

    yield use
    monkeypatch.undo()
    settings.reset()


def exported(path, archs=()):
    kernels = bundle.collect(layers.layers().store.items(), archs)
    bundle.write(path, kernels)
    return kernels


def made_bundle(tmp_path, roots, numbers=(1, 2), archs=(ARCH,)):
    """A bundle of what one machine has compiled; the cache in force is another, empty one."""
    roots(tmp_path / "maker")
    for number in numbers:
        for arch in archs:
            service.build(spec(number), arch)
    exported(tmp_path / "bundle")
    layers.layers().store.close()
    roots(tmp_path / "user", tmp_path / "bundle")
    return tmp_path / "bundle"


def where(wanted, arch=ARCH):
    """Where a build found its kernel; None when it was compiled."""
    seen = []
    stop = events.subscribe(seen.append)
    service.build(wanted, arch)
    stop()
    return next((e.fields["where"] for e in seen if e.name == "hit"), None)


# Reading.


def test_a_bundle_is_hit_and_nothing_is_compiled(tmp_path, roots, compiles):
    made_bundle(tmp_path, roots)
    compiles.clear()
    assert where(spec(1)) == where(spec(2)) == "bundle"
    assert compiles == [] and layers.layers().store.info()["entries"] == 0


def test_a_bundle_for_another_arch_is_a_miss(tmp_path, roots, compiles):
    made_bundle(tmp_path, roots, archs=("sm_80", "sm_120"))
    compiles.clear()
    assert where(SPEC) is None and where(spec(1), "sm_80") == "bundle"
    assert compiles == [(SPEC.source, ARCH)]


def test_a_miss_in_all_layers_is_an_error_when_the_cache_is_asserted(tmp_path, roots, compiles):
    made_bundle(tmp_path, roots)
    with settings.override(assert_cached=True):
        assert where(spec(1)) == "bundle"
        with pytest.raises(NotCachedError):
            service.build(spec(3), ARCH)


def test_what_the_store_has_compiled_itself_comes_first(tmp_path, roots, compiles):
    made_bundle(tmp_path, roots)
    roots(tmp_path / "maker", tmp_path / "bundle")
    assert where(spec(1)) == "store"


def test_several_bundles_are_asked_in_order(tmp_path, roots, compiles):
    first = made_bundle(tmp_path / "a", roots, numbers=(1,))
    second = made_bundle(tmp_path / "b", roots, numbers=(2,))
    roots(tmp_path / "user", first, second)
    assert [where(spec(n)) for n in (1, 2, 3)] == ["bundle", "bundle", None]


@pytest.mark.parametrize("version", ["13.0.88", "13.9.1"])
def test_another_nvrtc_of_the_same_major_finds_it(tmp_path, roots, compiles, monkeypatch, version):
    made_bundle(tmp_path, roots)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: version)
    assert where(spec(1)) == "bundle"


def another_major(monkeypatch, version):
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: version)
    monkeypatch.setattr(toolchain, "cuda_major", toolchain.cuda_major.__wrapped__)


def test_another_major_does_not(tmp_path, roots, compiles, monkeypatch):
    made_bundle(tmp_path, roots)
    another_major(monkeypatch, "13.0.88" if toolchain.cuda_major() == "12" else "12.9.86")
    assert where(spec(1)) is None


def test_a_machine_without_a_compiler_runs_what_a_bundle_holds(
    tmp_path, roots, compiles, monkeypatch
):
    made_bundle(tmp_path, roots)
    another_major(monkeypatch, toolchain.UNKNOWN_VERSION)
    assert where(spec(1)) == "bundle"


def test_what_the_driver_refuses_of_a_bundle_is_compiled(tmp_path, roots, compiles, monkeypatch):
    made_bundle(tmp_path, roots)
    compiles.clear()
    loads = loading(monkeypatch, 1)
    service.kernel(spec(1), 0, ARCH)
    assert len(loads) == 2 and compiles == [(spec(1).source, ARCH)]


def test_it_is_found_after_a_fork_and_by_many_threads(tmp_path, roots, compiles):
    made_bundle(tmp_path, roots)
    assert where(spec(1)) == "bundle"
    compiles.clear()

    def find():
        assert where(spec(2)) == "bundle" and not compiles

    succeeds(forked(find))
    assert where(spec(1)) == "bundle"


# What is no good bundle costs a warning, and no call.


def passed_over(reason):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [where(spec(n)) for n in (1, 1)] == [None, "store"]
        layers._layers = None
        assert where(spec(1)) == "store"
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "KERNLIB_CACHE_DIR" in text and reason in text


@pytest.mark.parametrize("share", [0.02, 0.1, 0.5, 0.9, 0.999])
def test_a_truncated_bundle_is_refused(tmp_path, roots, compiles, share):
    path = made_bundle(tmp_path, roots) / bundle.FILE
    os.truncate(path, int(path.stat().st_size * share))
    passed_over("is damaged")


@pytest.mark.parametrize("page", range(3))
def test_a_bundle_with_a_zeroed_page_is_refused(tmp_path, roots, compiles, page):
    path = made_bundle(tmp_path, roots) / bundle.FILE
    with open(path, "r+b") as file:
        file.seek(page * 4096)
        file.write(bytes(4096))
    passed_over("is damaged")


def test_a_damaged_entry_of_a_bundle_is_a_miss(tmp_path, roots, compiles):
    path = made_bundle(tmp_path, roots) / bundle.FILE
    data = bytearray(path.read_bytes())
    at = data.rfind(b"math.cuh")
    data[at] ^= 1
    path.write_bytes(data)
    assert {where(spec(1)), where(spec(2))} == {"bundle", None}


def test_no_bundle_at_all(tmp_path, roots, compiles):
    roots(tmp_path / "user", tmp_path / "nothing")
    passed_over("holds no kernels.mdb")


def test_a_cache_is_no_bundle(tmp_path, roots, compiles):
    roots(tmp_path / "maker")
    service.build(spec(1), ARCH)
    roots(tmp_path / "user", tmp_path / "maker")
    passed_over("this is a cache")


def test_the_file_in_place_of_its_folder(tmp_path, roots, compiles):
    folder = made_bundle(tmp_path, roots)
    roots(tmp_path / "user", folder / bundle.FILE)
    passed_over("name the folder that holds kernels.mdb")


def test_a_link_that_leads_to_itself(tmp_path, roots, compiles):
    (tmp_path / "loop").symlink_to("loop")
    roots(tmp_path / "user", tmp_path / "loop")
    passed_over("loop")


def test_a_bundle_is_no_place_to_write(tmp_path, roots, compiles):
    folder = made_bundle(tmp_path, roots)
    roots(folder)
    with pytest.warns(RuntimeWarning, match="it is a bundle, .*behind a colon"):
        assert where(spec(1)) is None
    assert [path.name for path in folder.iterdir()] == [bundle.FILE]


def test_nothing_before_the_first_colon_is_the_users_own_cache(tmp_path, roots, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    roots("", tmp_path / "bundle")
    assert settings.current().cache_dir == (tmp_path / "kernlib", tmp_path / "bundle")


@pytest.mark.parametrize("part", ["", bundle.FILE])
def test_a_bundle_that_others_may_write(tmp_path, roots, compiles, part):
    (made_bundle(tmp_path, roots) / part).chmod(0o777)
    passed_over("chmod go-w")


def test_a_bundle_in_another_format(tmp_path, roots, compiles):
    path = made_bundle(tmp_path, roots) / bundle.FILE
    path.unlink()
    lmdb.open(str(path), subdir=False, lock=False, lib_version=1).close()
    passed_over("cannot be opened")


# Writing.


def test_equal_kernels_give_equal_bytes(tmp_path, roots, compiles):
    """Compiled in another order, at another time, in another place, with a miss in between."""
    digests = set()
    for index, numbers in enumerate([(1, 2, 3), (3, 1, 2)]):
        roots(tmp_path / str(index))
        for number in numbers:
            service.build(spec(number), ARCH)
        exported(tmp_path / f"bundle{index}")
        digests.add((tmp_path / f"bundle{index}" / bundle.FILE).read_bytes())
    assert len(digests) == 1


def test_export_and_import_round_trip(tmp_path, roots, compiles):
    path = made_bundle(tmp_path, roots)
    roots(tmp_path / "other")
    store, found = layers.layers().store, bundle.open_bundle(path)
    assert bundle.copy_into(store, found) == {"added": 2, "known": 0, "damaged": 0, "declined": 0}
    assert bundle.copy_into(store, found)["known"] == 2
    compiles.clear()
    assert where(spec(1)) == "store" and compiles == []
    exported(tmp_path / "again")
    assert (tmp_path / "again" / bundle.FILE).read_bytes() == (path / bundle.FILE).read_bytes()


def test_an_import_beyond_the_budget_says_what_was_not_kept(tmp_path):
    kernels = {key(n): Entry("k", os.urandom(200_000), {}) for n in range(60)}
    bundle.write(tmp_path / "bundle", kernels)
    store = opened(tmp_path / "cache")
    counts = bundle.copy_into(store, bundle.open_bundle(tmp_path / "bundle"))
    assert counts["added"] == store.info()["entries"] < 60
    assert counts["added"] + counts["declined"] == 60


def test_an_import_copies_no_damaged_entry(tmp_path, roots):
    roots(tmp_path / "user")
    good = Entry("k", b"cubin", {})
    bundle.write(tmp_path / "bundle", {key(1): good})
    path = tmp_path / "bundle" / bundle.FILE
    path.write_bytes(path.read_bytes().replace(b"cubin", b"CUBIN"))
    counts = bundle.copy_into(layers.layers().store, bundle.open_bundle(tmp_path / "bundle"))
    assert counts == {"added": 0, "known": 0, "damaged": 1, "declined": 0}


def test_only_the_archs_asked_for_and_only_whole_entries(tmp_path, roots, compiles):
    roots(tmp_path / "maker")
    for arch in (ARCH, "sm_80"):
        service.build(SPEC, arch)
    layers.layers().store.put(key(9), b"junk")
    assert len(exported(tmp_path / "all")) == 2
    assert [e.meta["arch"] for e in exported(tmp_path / "one", ("sm_80",)).values()] == ["sm_80"]


def test_of_two_nvrtcs_the_newer_is_shipped():
    def packed(version):
        made = Entry("k", version.encode(), {"nvrtc": version, "portable": key(1).hex()})
        number = key(len(version))
        return number, entry.pack(number, made)

    pairs = [packed("13.10.1"), packed("13.4")]
    for order in (pairs, pairs[::-1]):
        assert bundle.collect(order)[key(1)].cubin == b"13.10.1"


def test_a_reader_keeps_the_file_it_has_open_while_it_is_replaced(tmp_path):
    folder = tmp_path / "bundle"
    bundle.write(folder, {key(1): Entry("k", b"old" * 5000, {})})
    found = bundle.open_bundle(folder)
    bundle.write(folder, {key(2): Entry("k", b"new" * 5000, {})})
    assert entry.unpack(key(1), found.get(key(1))).cubin == b"old" * 5000
    found.close()
    assert found.get(key(1)) is None and found.get(key(2)) is not None
    assert [path.name for path in folder.iterdir()] == [bundle.FILE]


def test_an_empty_bundle_is_one(tmp_path):
    bundle.write(tmp_path, {})
    found = bundle.open_bundle(tmp_path)
    assert found.info()["entries"] == 0 and found.get(key(1)) is None
    shutil.rmtree(tmp_path)
    assert found.info()["entries"] == 0
