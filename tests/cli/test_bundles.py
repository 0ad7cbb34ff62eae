"""`kernlib cache export` and `import`: kernels travel from one cache to another."""

from __future__ import annotations

import hashlib
import json

import pytest

from kernlib.jit import bundle, service, toolchain
from tests.cli.cases import (
    command,
    damage_bundle,
    fresh,
    keep,
    keep_damaged,
    key_of,
    made,
    make_bundle,
    plain,
)

# export


def test_export(run, tmp_path):
    keep("a")
    keep("b", arch="sm_80")
    result = run("cache", "export", tmp_path / "b", "--json")
    assert result.exit_code == 0 and result.stderr == ""
    facts = json.loads(result.stdout)
    path = tmp_path / "b" / bundle.FILE
    assert facts["path"] == str(path) and facts["kernels"] == 2
    assert facts["archs"] == {"sm_80": 1, "sm_90a": 1}
    assert facts["bytes"] == path.stat().st_size
    assert facts["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert facts["use"] == f"KERNLIB_CACHE_DIR=$HOME/.cache/kernlib:{tmp_path / 'b'}"


def test_export_says_how_to_use_it(run, tmp_path, monkeypatch):
    keep("a")
    monkeypatch.chdir(tmp_path)
    text = run("cache", "export", "b").stdout
    assert "Exported 1 kernel: 1 sm_90a" in text and "sha256  " in text
    assert f"KERNLIB_CACHE_DIR=$HOME/.cache/kernlib:{tmp_path / 'b'}" in text


def test_export_of_some_archs(run, tmp_path):
    keep("a")
    keep("b", arch="sm_80")
    result = run("cache", "export", tmp_path / "b", "--arch", "sm_80", "--arch", "sm_120", "--json")
    assert json.loads(result.stdout)["archs"] == {"sm_80": 1}
    assert result.stderr == "Warning: the cache holds no kernels for sm_120\n"
    refused = run("cache", "export", tmp_path / "c", "--arch", "sm_120")
    plain(refused, 1, "no kernels for sm_120, but 1 sm_80, 1 sm_90a")
    assert not (tmp_path / "c").exists()
    plain(run("cache", "export", tmp_path / "c", "--arch", "sm_75"), 2, "--arch", "sm_75")


def test_export_of_nothing(run, tmp_path):
    plain(run("cache", "export", tmp_path / "b"), 1, "no kernels to export", "kernlib compile")
    assert not (tmp_path / "b").exists()


def test_export_leaves_damage_out(run, tmp_path):
    keep("a")
    keep_damaged("bad")
    result = run("cache", "export", tmp_path / "b", "--json")
    assert json.loads(result.stdout)["kernels"] == 1
    assert "1 damaged entry left out" in result.stderr


def test_export_replaces_only_when_told(run, tmp_path):
    keep("a")
    first = json.loads(run("cache", "export", tmp_path / "b", "--json").stdout)
    keep("b")
    plain(run("cache", "export", tmp_path / "b"), 1, "has a bundle already", "--force")
    again = json.loads(run("cache", "export", tmp_path / "b", "--force", "--json").stdout)
    assert again["kernels"] == 2 and again["sha256"] != first["sha256"]


def test_export_of_a_bundle_that_is_mounted(run, tmp_path, mount):
    mount(make_bundle(tmp_path / "b", made("x")))
    keep("a")
    assert run("cache", "export", tmp_path / "b", "--force").exit_code == 0


def test_export_to_where_it_cannot_be(run, tmp_path, cache_dir):
    keep("a")
    plain(run("cache", "export", cache_dir), 1, "is a cache", "a folder of its own")
    (tmp_path / "file").write_text("")
    plain(run("cache", "export", tmp_path / "file"), 1, str(tmp_path / "file"))
    plain(run("cache", "export", tmp_path / "file" / "b"), 1, str(tmp_path / "file"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    plain(run("cache", "export", tmp_path / "open"), 1, "cannot be used", "chmod go-w")


# import


def test_import(run, tmp_path, cache_dir):
    folder = make_bundle(tmp_path / "b", made("x"), made("y"))
    result = run("cache", "import", folder)
    assert (result.exit_code, result.stdout) == (0, f"Added 2 kernels to {cache_dir}.\n")
    assert service.layers().store.get(key_of("x")) is not None
    counts = json.loads(run("cache", "import", folder, "--json").stdout)
    known = {"added": 0, "known": 2, "damaged": 0, "declined": 0}
    assert counts == {**known, "path": str(cache_dir)}
    assert "2 were there already." in run("cache", "import", folder).stdout


def test_import_of_ones_own_bundle_adds_nothing(run, compiles, tmp_path, monkeypatch):
    """Else each kernel would be there twice, under its own key and under a bundle's."""
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "13.4.92")  # which compiles say
    call = ("--shape", "1000x64", "--shape", "800x64", "--argument", "bandwidth=8.0")
    run("compile", "gaussian", "laplace_l1", "--arch", "sm_80", "--arch", "120", *call)
    before = json.loads(run("cache", "info", "--json").stdout)["entries"]
    assert before == len(compiles) > 1
    assert run("cache", "export", tmp_path / "b").exit_code == 0
    counts = json.loads(run("cache", "import", tmp_path / "b", "--json").stdout)
    assert (counts["added"], counts["known"]) == (0, before)
    assert json.loads(run("cache", "info", "--json").stdout)["entries"] == before


def test_import_of_what_another_compiler_made_here(run, compiles, tmp_path, monkeypatch):
    """Under its own key it would not be found with the compiler of today, as a bundle's it is."""
    run("compile", "gaussian", "--arch", "sm_80", "--shape", "9x4", "--shape", "9x4",
        "--argument", "bandwidth=1")  # fmt: skip
    assert run("cache", "export", tmp_path / "b").exit_code == 0
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "13.99.1")
    counts = json.loads(run("cache", "import", tmp_path / "b", "--json").stdout)
    assert (counts["added"], counts["known"]) == (len(compiles), 0)


def test_import_of_a_bundle_that_is_mounted(run, tmp_path, mount):
    folder = make_bundle(tmp_path / "b", made("x"))
    (tmp_path / "link").symlink_to(folder)
    mount(folder)
    assert run("cache", "import", tmp_path / "link").exit_code == 0


def test_import_says_what_it_left(run, tmp_path, monkeypatch):
    folder = make_bundle(tmp_path / "b", made("x"), made("y"))
    damage_bundle(folder)
    result = run("cache", "import", folder, "--json")
    plain(result, 1, "not copied: 1 damaged", "exported again")
    assert json.loads(result.stdout)["added"] == 1
    fresh()
    monkeypatch.setattr(type(service.layers().store), "put", lambda self, key, value: False)
    plain(run("cache", "import", make_bundle(tmp_path / "c", made("z"))), 1, "1 declined", "doctor")


@pytest.mark.parametrize("name", ["nothing", "file", "cache"])
def test_import_of_no_bundle(run, tmp_path, name):
    keep("a")
    (tmp_path / "file").write_text("")
    plain(run("cache", "import", tmp_path / name), 1, str(tmp_path / name), "kernels.mdb")


@pytest.mark.slow
def test_from_one_machine_to_another(tmp_path, cache_dir):
    """Real kernels: compiled for two targets, exported, mounted, imported, in processes each."""
    call = ("laplace_l1", "--shape", "100x8", "--shape", "50x8", "--argument", "bandwidth=8.0")
    archs = ("--arch", "sm_80", "--arch", "sm_90a")
    assert command("compile", *call, *archs).returncode == 0
    assert command("cache", "export", tmp_path / "b").returncode == 0
    other = {"KERNLIB_CACHE_DIR": f"{tmp_path / 'other'}:{tmp_path / 'b'}"}
    found = command("compile", *call, *archs, "--json", KERNLIB_ASSERT_CACHED="1", **other)
    facts = json.loads(found.stdout)
    assert (facts["compiled"], facts["found"]) == (0, len(facts["kernels"]))
    assert {row["from"] for row in facts["kernels"]} == {"bundle"}
    third = {"KERNLIB_CACHE_DIR": str(tmp_path / "third")}
    assert command("cache", "import", tmp_path / "b", **third).returncode == 0
    found = command("compile", *call, *archs, "--json", KERNLIB_ASSERT_CACHED="1", **third)
    assert {row["from"] for row in json.loads(found.stdout)["kernels"]} == {"store"}
    assert command("cache", "verify", **third).returncode == 0
