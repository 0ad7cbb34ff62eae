"""The commands: demo, doctor, and the three that look into the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module

import pytest
from click.testing import CliRunner

import kernlib
from kernlib import events, settings
from kernlib.cli import main
from kernlib.jit import entry, service

KERNELS = 5  # of the demo


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """A cache of this test's own, which the settings read anew."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KERNLIB_CACHE_DIR", str(folder))
    for name in ("KERNLIB_CACHE_BYTES", "KERNLIB_DEBUG", "KERNLIB_ASSERT_CACHED"):
        monkeypatch.delenv(name, raising=False)
    settings.reset()
    service.forget()
    yield folder
    settings.reset()


@pytest.fixture
def run(cache_dir):
    return lambda *arguments, **options: CliRunner().invoke(main, arguments, **options)


@pytest.fixture
def unusable_cache(monkeypatch):
    monkeypatch.setenv("KERNLIB_CACHE_DIR", "/proc/kernlib")  # not even root makes a folder there
    settings.reset()
    yield
    settings.reset()


def keep(description: str, cubin: bytes = b"cubin", **meta: str) -> bytes:
    """Put an entry that nobody compiled into the store; returns its key."""
    key = description.encode().ljust(32, b".")
    made = entry.Entry("pairwise", cubin, {"description": description, "arch": "sm_90a", **meta})
    assert service.layer()[0].put(key, entry.pack(key, made))
    return key


def counts(stderr: str) -> dict[str, int]:
    lines = [line.split()[1] for line in stderr.splitlines() if line.startswith("kernlib ")]
    return {name: lines.count(name) for name in events.NAMES}


def test_help_needs_no_torch():
    code = (
        "import sys; from click.testing import CliRunner; from kernlib.cli import main\n"
        "for command in ([], ['demo'], ['doctor'], ['cache'], ['cache', 'list']):\n"
        "    assert CliRunner().invoke(main, [*command, '--help']).exit_code == 0\n"
        "print(sorted({'torch', 'lmdb', 'cuda', 'rich'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


def test_version(run):
    assert run("--version").output.strip() == f"kernlib, version {kernlib.__version__}"


def test_the_second_demo_compiles_nothing(cache_dir):
    first = demo(cache_dir)
    assert first.returncode == 0, first.stderr
    seen = counts(first.stderr)
    assert (seen["lookup"], seen["compile"], seen["store"]) == (KERNELS, KERNELS, KERNELS)
    assert "registers=" in first.stderr and "spill_bytes=" in first.stderr
    assert f"{KERNELS} of {KERNELS} kernels were compiled" in first.stdout
    second = demo(cache_dir, KERNLIB_ASSERT_CACHED="1")
    assert second.returncode == 0, second.stderr
    seen = counts(second.stderr)
    assert (seen["lookup"], seen["compile"], seen["hit"]) == (KERNELS, 0, KERNELS)
    assert "Nothing was compiled" in second.stdout


def demo(cache_dir, **variables: str) -> subprocess.CompletedProcess:
    """The demo without a GPU, as a user runs it."""
    return subprocess.run(
        [sys.executable, "-c", "from kernlib.cli import main; main()", "demo"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
    )


def test_demo_with_asserted_cache_says_what_is_missing(run, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
    settings.reset()
    result = run("demo")
    assert result.exit_code == 1
    assert "is not in the cache" in result.stderr and "Traceback" not in result.stderr


def test_demo_fails_when_a_result_is_wrong(run, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(import_module("kernlib.cli.demo"), "ERROR_BOUND", 0.0)
    result = run("demo")
    assert result.exit_code == 1
    assert "error above 0: laplace_l1" in result.stderr


def test_doctor_passes_with_a_compiler_and_a_cache(run, cache_dir):
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output
    assert f"lmdb, {cache_dir}" in result.output
    for variable in settings.VARIABLES:
        assert variable.name in result.output


def test_doctor_fails_for_a_cache_in_memory(run, unusable_cache):
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAIL  cache       the kernel cache in /proc/kernlib cannot be used" in result.output
    assert "-> set KERNLIB_CACHE_DIR" in result.output


def test_doctor_fails_without_a_compiler(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAIL  compile" in result.output
    assert "pip install 'kernlib[cu13]'" in result.output


def test_doctor_names_a_setting_that_cannot_be_used(run, monkeypatch):
    monkeypatch.setenv("KERNLIB_CACHE_BYTES", "plenty")
    settings.reset()
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAIL  settings    KERNLIB_CACHE_BYTES='plenty'" in result.output


@pytest.mark.parametrize("command", [("demo",), ("cache", "info"), ("cache", "list")])
def test_commands_name_a_setting_that_cannot_be_used(run, monkeypatch, command):
    monkeypatch.setenv("KERNLIB_CACHE_BYTES", "plenty")
    settings.reset()
    result = run(*command)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: KERNLIB_CACHE_BYTES='plenty'")


def test_cache_info(run, cache_dir):
    keep("one")
    facts = json.loads(run("cache", "info", "--json").stdout)
    assert facts["kind"] == "lmdb"
    assert facts["path"].startswith(str(cache_dir))
    assert facts["entries"] == 1
    assert 0 < facts["bytes_used"] < facts["budget"]
    assert "kernels  1" in run("cache", "info").stdout


def test_cache_list_as_json(run):
    key = keep("older", created="100", registers="32", spill_bytes="0", compile_ms="51")
    keep("newer", b"longer", created="200", registers="?")
    newer, older = json.loads(run("cache", "list", "--json").stdout)
    assert (newer["description"], older["description"]) == ("newer", "older")
    assert older["key"] == key.hex()
    assert (older["registers"], older["spill_bytes"], older["compile_ms"]) == (32, 0, 51)
    assert newer["registers"] is None
    assert newer["cubin_bytes"] == 6


def test_cache_list_in_a_pipe_keeps_whole_rows(run):
    description = "Pairwise(op=difference, inner=Power(), outer=Root()) float32 tile=64"
    key = keep(description, created="1700000000", registers="114", shared_bytes="17408")
    rows = [line for line in run("cache", "list").stdout.splitlines() if key.hex()[:12] in line]
    assert len(rows) == 1
    for cell in (description, "sm_90a", "114", "17408", "5 B", "2023-11-1"):
        assert cell in rows[0]


def test_cache_list_of_an_empty_and_a_damaged_cache(run):
    assert run("cache", "list").stdout == "The cache holds no kernels.\n"
    service.layer()[0].put(bytes(32), b"junk")
    result = run("cache", "list", "--json")
    assert json.loads(result.stdout) == []
    assert "1 damaged" in result.stderr


def test_cache_clear_asks_first(run):
    keep("one")
    refused = run("cache", "clear", input="n\n")
    assert refused.exit_code == 1
    assert service.layer()[0].info()["entries"] == 1
    assert "Dropped 1 kernels" in run("cache", "clear", input="y\n").stdout
    assert service.layer()[0].info()["entries"] == 0


def test_cache_clear_with_yes(run):
    keep("one")
    keep("two")
    result = run("cache", "clear", "--yes")
    assert (result.exit_code, result.stdout) == (0, "Dropped 2 kernels.\n")
    assert run("cache", "clear").stdout == "The cache holds no kernels.\n"
