"""The command as a whole: help, versions, exit codes, settings, and the demo."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import click
import pytest

import kernlib
from kernlib import events, settings
from kernlib.cli import main
from tests.cli.cases import command

DEMO = import_module("kernlib.cli.demo")
KERNELS = 5  # of the demo


def commands(group, path=()):
    """Every command with the words that call it."""
    yield path, group
    for name, child in getattr(group, "commands", {}).items():
        yield from commands(child, (*path, name))


def counts(stderr: str) -> dict[str, int]:
    lines = [line.split()[1] for line in stderr.splitlines() if line.startswith("kernlib ")]
    return {name: lines.count(name) for name in events.NAMES}


def test_the_commands():
    found = {" ".join(path) for path, _ in commands(main)}
    cache = {"info", "list", "show", "verify", "prune", "clear", "export", "import"}
    assert found == {"", "demo", "doctor", "compile", "cache", *(f"cache {n}" for n in cache)}


def test_help_needs_no_torch():
    code = (
        "import sys; before = set(sys.modules)  # wheels of CUDA 12 leave cuda there\n"
        "from click.testing import CliRunner; from kernlib.cli import main\n"
        "def walk(command, path=()):\n"
        "    assert CliRunner().invoke(main, [*path, '--help']).exit_code == 0\n"
        "    for name, child in getattr(command, 'commands', {}).items():\n"
        "        walk(child, (*path, name))\n"
        "walk(main)\n"
        "print(sorted({'torch', 'lmdb', 'cuda', 'rich', 'numpy'} & set(sys.modules) - before))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.strip() == "[]", found.stderr


@pytest.mark.parametrize("path, found", list(commands(main)), ids=lambda part: str(part)[:40])
def test_every_command_and_option_has_a_help_text(path, found):
    first = found.get_short_help_str(200)
    assert first.endswith(".") and first[0].isupper()
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            assert parameter.help and parameter.help[0].isupper() and parameter.help.endswith(".")


def test_exit_codes_are_documented(run):
    text = run("--help").output
    assert all(line in text for line in ("Exit codes:", "  0  ", "  1  ", "  2  "))


def test_version(run):
    assert run("--version").output.strip() == f"kernlib, version {kernlib.__version__}"


@pytest.mark.parametrize("arguments", [("nothing",), ("cache", "nothing"), ("doctor", "--quick")])
def test_a_command_line_that_cannot_be_used(run, arguments):
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo",),
        ("compile", "gaussian"),
        ("cache", "info"),
        ("cache", "list"),
        ("cache", "show", "0"),
        ("cache", "verify"),
        ("cache", "prune", "--to", "1M"),
        ("cache", "clear"),
        ("cache", "export", "folder"),
        ("cache", "import", "folder"),
    ],
    ids=" ".join,
)
def test_commands_name_a_setting_that_cannot_be_used(run, monkeypatch, arguments):
    monkeypatch.setenv("KERNLIB_CACHE_BYTES", "plenty")
    settings.reset()
    result = run(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: KERNLIB_CACHE_BYTES='plenty'")


def test_a_pipe_that_nobody_reads_on_ends_the_command_quietly(cache_dir):
    code = "from kernlib.cli import main; main()"
    shell = f"'{sys.executable}' -c '{code}' cache info | true; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert "Error" not in found.stderr and "Traceback" not in found.stderr


# The demo.


@pytest.mark.slow
def test_the_second_demo_compiles_nothing(cache_dir):
    first = command("demo")
    assert first.returncode == 0, first.stderr
    seen = counts(first.stderr)
    assert (seen["lookup"], seen["compile"], seen["store"]) == (KERNELS, KERNELS, KERNELS)
    assert "registers=" in first.stderr and "spill_bytes=" in first.stderr
    assert f"{KERNELS} of {KERNELS} kernels were compiled" in first.stdout
    second = command("demo", KERNLIB_ASSERT_CACHED="1")
    assert second.returncode == 0, second.stderr
    seen = counts(second.stderr)
    assert (seen["lookup"], seen["compile"], seen["hit"]) == (KERNELS, 0, KERNELS)
    assert "Nothing was compiled" in second.stdout


@pytest.fixture
def small(monkeypatch):
    """A demo of few points."""
    for name in ("POINTS", "OTHERS"):
        monkeypatch.setattr(DEMO, name, 20)


def test_demo_with_asserted_cache_says_what_is_missing(run, monkeypatch, small):
    monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
    settings.reset()
    result = run("demo")
    assert result.exit_code == 1
    assert "is not in the cache" in result.stderr and "Traceback" not in result.stderr


def test_demo_fails_when_a_result_is_wrong(run, monkeypatch, compiles, small):
    monkeypatch.setattr(DEMO, "ERROR_BOUND", 0.0)
    result = run("demo")
    assert result.exit_code == 1
    assert "error above 0: laplace_l1" in result.stderr


def test_demo_without_a_cache_says_so_once_and_runs(run, compiles, small, unusable_cache):
    result = run("demo")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("Warning: the kernel cache in /proc/kernlib") == 1
    assert "are lost with this process" in result.stdout
