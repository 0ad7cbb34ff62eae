"""`kernlib cache verify`, `prune` and `clear`, and what all of them say without a disk."""

from __future__ import annotations

import json
import os

import pytest

from kernlib.jit import bundle, service
from kernlib.jit.environment import moved_aside
from tests.cli.cases import (
    aside,
    command,
    damage_bundle,
    damage_pages,
    fresh,
    keep,
    keep_damaged,
    keep_used,
    made,
    make_bundle,
    plain,
)


def entries():
    return service.layers().store.info()["entries"]


# verify


def test_verify_of_what_is_whole(run, tmp_path, mount, cache_dir):
    folder = make_bundle(tmp_path / "b", made("x"), made("y"))
    mount(folder)
    keep("one")
    fresh()
    result = run("cache", "verify", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    facts = json.loads(result.stdout)
    assert facts["ok"] is True
    assert facts["places"] == [
        {"where": "store", "path": str(cache_dir), "kernels": 1, "problems": []},
        {"where": "bundle", "path": str(folder), "kernels": 2, "problems": []},
    ]
    assert run("cache", "verify").stdout.count("  ok  ") == 2


def test_verify_names_damaged_entries_and_drops_them(run):
    keep("good")
    key = keep_damaged("bad").hex()
    result = run("cache", "verify", "--json")
    (problem,) = json.loads(result.stdout)["places"][0]["problems"]
    assert (problem["kind"], problem["key"], problem["repaired"]) == ("entry", key, False)
    plain(result, 1, "1 problem found", "--repair")
    plain(run("cache", "verify"), 1)
    assert entries() == 2
    repaired = run("cache", "verify", "--repair")
    assert repaired.exit_code == 0 and f"{key} the entry is damaged" in repaired.stdout
    assert "(repaired)" in repaired.stdout and entries() == 1
    assert run("cache", "verify").exit_code == 0


def test_verify_finds_damaged_pages_and_leaves_them_alone(run, cache_dir):
    keep("one")
    damage_pages(cache_dir)
    before = (cache_dir / "v1" / "store" / "data.mdb").stat()
    result = run("cache", "verify", "--json")
    plain(result, 1, "moves a damaged store aside")
    problems = json.loads(result.stdout)["places"][0]["problems"]
    assert {problem["kind"] for problem in problems} == {"pages"}
    assert aside(cache_dir) == []
    assert (cache_dir / "v1" / "store" / "data.mdb").stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("trusted", [True, False])
def test_verify_moves_a_damaged_store_aside(run, cache_dir, trusted):
    """Also one that the next process would have trusted, and might have died of."""
    keep("one")
    damage_pages(cache_dir)
    if trusted:
        data = (cache_dir / "v1" / "store" / "data.mdb").stat()
        note = f"{data.st_ino} {data.st_size} {data.st_mtime_ns}"
        (cache_dir / "v1" / "store.left").write_text(note)
    result = run("cache", "verify", "--repair")
    assert result.exit_code == 0, result.output
    (moved,) = aside(cache_dir)
    assert str(moved) in result.stdout and entries() == 0
    keep("again")
    fresh()
    assert run("cache", "verify").exit_code == 0


def test_verify_in_a_process_of_its_own_survives_any_damage(run, cache_dir):
    """LMDB ends some processes that read such pages by a signal; verify reads them itself."""
    for number in range(20):
        keep(f"{number}", bytes(9000))
    damage_pages(cache_dir)
    found = command("cache", "verify")
    assert found.returncode == 1 and found.stderr.count("Error: ") == 1
    assert command("cache", "verify", "--repair").returncode == 0
    assert command("cache", "verify").returncode == 0


def test_verify_of_junk_that_opening_moves_aside(run, cache_dir):
    keep("one")
    fresh()
    (cache_dir / "v1" / "store" / "data.mdb").write_bytes(b"")
    result = run("cache", "verify", "--repair")
    assert result.exit_code == 0 and str(aside(cache_dir)[0]) in result.stdout


def test_verify_of_bundles_that_are_damaged(run, tmp_path, mount):
    folder = make_bundle(tmp_path / "b", made("x"), made("y"))
    damage_bundle(folder)
    cut = make_bundle(tmp_path / "c", made("z"))
    os.truncate(cut / bundle.FILE, 5000)
    mount(folder, cut)
    for arguments in ((), ("--repair",)):
        result = run("cache", "verify", "--json", *arguments)
        plain(result, 1, "2 problems found", "exported again")
        assert "--repair drops" not in result.stderr
        store, first, second = json.loads(result.stdout)["places"]
        assert store["problems"] == [] and first["kernels"] == 1
        assert first["problems"][0]["kind"] == "entry"
        assert second["problems"][0]["kind"] == "refused"


# prune


def test_prune_drops_what_is_unused(run, monkeypatch):
    keep_used("old", 40, monkeypatch)
    keep_used("new", 20, monkeypatch)
    result = run("cache", "prune", "--unused", "30")
    assert result.exit_code == 0
    assert result.stdout.startswith("Dropped 1 kernel; 1 kernel left, ")
    facts = json.loads(run("cache", "prune", "--unused", "10", "--json").stdout)
    assert (facts["dropped"], facts["entries"], facts["removed"]) == (1, 0, [])


def test_prune_to_a_size(run, monkeypatch):
    for days in (3, 1, 2):
        keep_used(f"{days}", days, monkeypatch)
        keep(f"now{days}", bytes(100_000))
    facts = json.loads(run("cache", "prune", "--to", "250K", "--json").stdout)
    assert facts["bytes_used"] <= 250 << 10 and 1 <= facts["dropped"] < 6
    assert json.loads(run("cache", "prune", "--to", "0", "--json").stdout)["entries"] == 0


def test_prune_removes_what_was_moved_aside_and_asks_first(run, cache_dir):
    keep("one")
    damage_pages(cache_dir)
    refused = run("cache", "prune", "--to", "1M", input="n\n")
    (old,) = moved_aside(cache_dir)
    assert refused.exit_code == 0 and f"Remove the damaged store {old}" in refused.stderr
    assert old.exists()
    result = run("cache", "prune", "--to", "1M", input="y\n")
    assert f"Removed {old}." in result.stdout and not old.exists()


def test_prune_with_yes_does_not_ask(run, cache_dir):
    keep("one")
    damage_pages(cache_dir)
    service.layers()
    (old,) = moved_aside(cache_dir)
    result = run("cache", "prune", "--unused", "9", "--yes", "--json")
    assert json.loads(result.stdout)["removed"][0]["path"] == str(old) and result.stderr == ""
    assert moved_aside(cache_dir) == []


def test_prune_with_nobody_to_ask_prunes_and_keeps_the_rest(run, cache_dir, monkeypatch):
    keep("one")
    damage_pages(cache_dir)
    keep_used("old", 40, monkeypatch)
    result = run("cache", "prune", "--unused", "30")
    assert result.exit_code == 1 and "Dropped 1 kernel" in result.stdout
    assert len(moved_aside(cache_dir)) == 1


# clear


def test_clear_asks_first(run):
    keep("one")
    refused = run("cache", "clear", input="n\n")
    assert refused.exit_code == 1 and "Drop 1 kernel in" in refused.stderr
    assert entries() == 1
    assert "Dropped 1 kernel.\n" in run("cache", "clear", input="y\n").stdout
    assert entries() == 0


def test_clear_with_yes(run):
    keep("one")
    keep("two")
    service.layers().store.put_tuning(bytes(32), b"result")
    result = run("cache", "clear", "--yes")
    assert (result.exit_code, result.stdout) == (0, "Dropped 2 kernels.\n")
    assert service.layers().store.info()["tuning"] == 1
    assert run("cache", "clear").stdout == "The cache holds no kernels.\n"


def test_clear_of_tuning_results(run):
    service.layers().store.put_tuning(bytes(32), b"result")
    refused = run("cache", "clear", "--tuning", input="n\n")
    assert "Drop 0 kernels and 1 tuning result in" in refused.stderr
    result = run("cache", "clear", "--tuning", "--yes", "--json")
    assert json.loads(result.stdout) == {"dropped": 0, "tuning": 1}
    assert service.layers().store.info()["tuning"] == 0


def test_clear_says_what_could_not_be_dropped(run, monkeypatch):
    keep("one")
    monkeypatch.setattr(type(service.layers().store), "clear", lambda self: None)
    plain(run("cache", "clear", "--yes"), 1, "1 kernel could not be dropped")


# Without a disk.


@pytest.mark.parametrize(
    "arguments",
    [
        ("cache", "verify"),
        ("cache", "prune", "--to", "1M"),
        ("cache", "clear"),
        ("cache", "export", "folder"),
        ("cache", "import", "folder"),
        ("compile", "gaussian"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("again", [False, True])
def test_what_needs_a_disk_says_so(run, unusable_cache, compiles, arguments, again):
    if again:  # the service says it once
        with pytest.warns(RuntimeWarning):
            service.layers()
    result = run(*arguments)
    plain(result, 1, "/proc/kernlib cannot be used", "Set KERNLIB_CACHE_DIR to")
    assert result.stdout == "" and compiles == []


def test_a_cache_that_others_may_write(run, cache_dir):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    plain(run("cache", "verify"), 1, "others may write it (mode 777)", "KERNLIB_CACHE_DIR")
