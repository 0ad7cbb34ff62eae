"""`kernlib cache info`, `list` and `show`: what the store and the bundles hold."""

from __future__ import annotations

import json

from kernlib.jit import service
from tests.cli.cases import (
    aside,
    damage_bundle,
    damage_pages,
    fresh,
    keep,
    keep_damaged,
    keep_used,
    key_of,
    made,
    make_bundle,
    plain,
)

# info


def test_info(run, cache_dir):
    keep("one")
    service.layers().store.put_tuning(bytes(32), b"result")
    facts = json.loads(run("cache", "info", "--json").stdout)
    assert facts["kind"] == "lmdb" and facts["path"].startswith(str(cache_dir))
    assert (facts["entries"], facts["tuning"]) == (1, 1)
    assert 0 < facts["bytes_used"] < facts["budget"]
    assert facts["moved_aside"] == facts["bundles"] == []
    lines = dict(line.split(maxsplit=1) for line in run("cache", "info").stdout.splitlines())
    assert lines["kernels"] == "1" and lines["tuning"] == "1 result"
    assert lines["used"].endswith("of 512.0 MB")


def test_info_of_bundles(run, tmp_path, mount):
    folder = make_bundle(tmp_path / "b", made("x"), made("y", arch="sm_80"), made("z"))
    mount(folder, tmp_path / "nothing")
    found, refused = json.loads(run("cache", "info", "--json").stdout)["bundles"]
    assert found["path"] == str(folder) and found["entries"] == 3 and found["refused"] is None
    assert found["archs"] == {"sm_80": 1, "sm_90a": 2} and found["bytes_used"] > 0
    assert refused["entries"] == 0 and "holds no kernels.mdb" in refused["refused"]
    result = run("cache", "info")
    assert "3 kernels (1 sm_80, 2 sm_90a)" in result.stdout and result.exit_code == 0
    assert f"{tmp_path / 'nothing'} is passed over: " in result.stdout


def test_info_names_stores_that_were_moved_aside(run, cache_dir):
    keep("one")
    damage_pages(cache_dir)
    facts = json.loads(run("cache", "info", "--json").stdout)
    assert facts["moved_aside"][0]["path"] == str(*aside(cache_dir))
    assert 0 < facts["moved_aside"][0]["bytes"] < 1 << 20  # on disk: the file is sparse
    assert "moved aside" in run("cache", "info").stdout


def test_info_of_a_cache_in_memory(run, unusable_cache):
    result = run("cache", "info", "--json")
    assert result.exit_code == 0 and "KERNLIB_CACHE_DIR" in run("cache", "info").stderr
    facts = json.loads(result.stdout)
    assert (facts["kind"], facts["path"], facts["entries"]) == ("memory", None, 0)


# list


def listed(result):
    assert result.exit_code == 0, result.output
    return [kernel["description"] for kernel in json.loads(result.stdout)]


def test_list_as_json(run):
    key = keep("older", created="100", registers="32", spill_bytes="0", compile_ms="51")
    keep("newer", b"longer", created="200", registers="?")
    newer, older = json.loads(run("cache", "list", "--json").stdout)
    assert (newer["description"], older["description"]) == ("newer", "older")
    assert older["key"] == key.hex() and older["where"] == "store"
    assert (older["registers"], older["spill_bytes"], older["compile_ms"]) == (32, 0, 51)
    assert newer["registers"] is None and newer["cubin_bytes"] == 6


def test_list_in_a_pipe_keeps_whole_rows(run):
    description = "Pairwise(op=difference, inner=Power(), outer=Root()) float32 tile=64"
    key = keep(description, created="1700000000", registers="114", shared_bytes="17408")
    rows = [line for line in run("cache", "list").stdout.splitlines() if key.hex()[:12] in line]
    assert len(rows) == 1
    for cell in (description, "sm_90a", "114", "17408", "5 B", "2023-11-1", "store"):
        assert cell in rows[0]


def test_list_of_an_empty_and_a_damaged_cache(run):
    assert run("cache", "list").stdout == "The cache holds no kernels.\n"
    keep_damaged("bad")
    result = run("cache", "list", "--json")
    assert json.loads(result.stdout) == []
    assert "1 damaged entry left out" in result.stderr


def test_list_shows_bundles_too(run, tmp_path, mount):
    folder = make_bundle(tmp_path / "b", made("shipped"))
    keep("own", created="100")
    mount(folder, tmp_path / "nothing")
    result = run("cache", "list", "--json")
    own, shipped = json.loads(result.stdout)
    assert (own["where"], shipped["where"]) == ("store", str(folder))
    assert own["last_used"] is not None and shipped["last_used"] is None
    assert result.stderr.startswith("Warning: ") and "is passed over" in result.stderr


def test_list_chooses_by_arch_and_family(run):
    keep("a")
    keep("b", arch="sm_80")
    keep("c", arch="sm_80", family="sparse")
    assert set(listed(run("cache", "list", "--json", "--arch", "sm_80"))) == {"b", "c"}
    both = run("cache", "list", "--json", "--arch", "sm_80", "--arch", "sm_90a")
    assert set(listed(both)) == {"a", "b", "c"}
    assert listed(run("cache", "list", "--json", "--family", "sparse")) == ["c"]
    assert run("cache", "list", "--family", "none").stdout == "No such kernels.\n"


def test_list_of_what_is_unused(run, monkeypatch, tmp_path, mount):
    mount(make_bundle(tmp_path / "b", made("shipped")))
    keep_used("old", 10, monkeypatch)
    keep_used("new", 2, monkeypatch)
    assert listed(run("cache", "list", "--json", "--unused", "5")) == ["old"]
    assert listed(run("cache", "list", "--json", "--unused", "10")) == []
    assert set(listed(run("cache", "list", "--json", "--unused", "0"))) == {"old", "new"}


def test_listing_is_no_use(run, monkeypatch):
    key = keep_used("old", 10, monkeypatch)
    for arguments in (("list",), ("show", key.hex()), ("verify",), ("info",)):
        assert run("cache", *arguments).exit_code == 0
        fresh()
    assert listed(run("cache", "list", "--json", "--unused", "9")) == ["old"]


# show


def test_show_tells_everything(run):
    key = keep("a kernel", b"code" * 300, created="1700000000", portable="ab", nvrtc="13.4")
    result = run("cache", "show", key.hex()[:8].upper())
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["key"] == key.hex() and lines["description"] == "a kernel"
    assert lines["portable"] == "ab" and lines["cubin"] == "bytes   1200 (1.2 KB)"
    assert lines["created"].startswith("2023-11-1") and lines["where"] == "store"
    assert lines["registers"] == "?" and result.exit_code == 0


def test_show_as_json(run, tmp_path, mount):
    mount(make_bundle(tmp_path / "b", made("both"), made("shipped")))
    keep("both", created="100", more="word")
    facts = json.loads(run("cache", "show", key_of("both").hex(), "--json").stdout)
    assert facts["where"] == ["store", str(tmp_path / "b")]
    assert facts["meta"]["more"] == "word" and facts["created"] == 100
    facts = json.loads(run("cache", "show", key_of("shipped").hex(), "--json").stdout)
    assert facts["where"] == [str(tmp_path / "b")] and facts["last_used"] is None


def test_show_writes_the_cubin(run, tmp_path):
    key, path = keep("one", b"\x7fELF code").hex(), tmp_path / "one.cubin"
    result = run("cache", "show", key, "--cubin", path, "--json")
    assert json.loads(result.stdout)["key"] == key and path.read_bytes() == b"\x7fELF code"
    path.write_bytes(b"mine")
    plain(run("cache", "show", key, "--cubin", path), 1, str(path), "--force")
    assert path.read_bytes() == b"mine"
    assert "Wrote 9 B" in run("cache", "show", key, "--cubin", path, "--force").stdout
    assert path.read_bytes() == b"\x7fELF code"
    plain(run("cache", "show", key, "--cubin", tmp_path / "no" / "f"), 1, "No such file")


def test_show_lists_candidates(run):
    for number in range(10):
        keep(f"a{number}")
    several = run("cache", "show", "61")
    plain(several, 1, "several kernels' keys begin with 61", key_of("a1").hex()[:16], "2 more")
    unknown = run("cache", "show", "6139ff")
    plain(unknown, 1, "no kernel's key begins with 6139ff", key_of("a9").hex()[:16])
    assert len(unknown.stderr.splitlines()) == 9 and unknown.stdout == ""


def test_show_of_nothing_and_of_damage(run):
    plain(run("cache", "show", "12"), 1, "the cache holds no kernels")
    key = keep_damaged("bad")
    plain(run("cache", "show", key.hex()), 1, "is damaged", "verify --repair")


def test_show_of_a_kernel_that_a_bundle_holds_whole(run, tmp_path, mount):
    first, second = (make_bundle(tmp_path / name, made("x")) for name in "ab")
    damage_bundle(first)
    mount(first, second)
    facts = json.loads(run("cache", "show", key_of("x").hex(), "--json").stdout)
    assert facts["where"] == [str(second)]
