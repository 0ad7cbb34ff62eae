"""The command as a whole: help, versions, exit codes, settings."""

from __future__ import annotations

import shlex
import subprocess
import sys

import click
import pytest

import kernlib
from kernlib import settings
from kernlib.cli import main
from tests.cli.cases import plain


def commands(group, path=()):
    """Every command with the words that call it."""
    yield path, group
    for name, child in getattr(group, "commands", {}).items():
        yield from commands(child, (*path, name))


def test_the_commands():
    found = {" ".join(path) for path, _ in commands(main)}
    cache = {"info", "list", "show", "verify", "prune", "clear", "export", "import"}
    plain = {"", "bench", "demo", "doctor", "compile", "convert", "explain", "show", "cache"}
    assert found == plain | {f"cache {name}" for name in cache}


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


def test_every_command_prints_json_for_programs():
    found = {path for path, command in commands(main) if not hasattr(command, "commands")}
    with_it = {
        path
        for path, command in commands(main)
        for parameter in command.params
        if "--json" in parameter.opts
    }
    assert found == with_it and len(found) > 10


def test_exit_codes_are_documented(run):
    text = run("--help").output
    assert all(line in text for line in ("Exit codes:", "  0  ", "  1  ", "  2  "))


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "kernlib", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"kernlib, version {kernlib.__version__}"


def test_version(run):
    assert run("--version").output.strip() == f"kernlib, version {kernlib.__version__}"


REFUSED = {
    "nothing": ("nothing",),
    "cache nothing": ("nothing",),
    "doctor --quick": ("--quick",),
    "doctor --distributed": ("torchrun --nproc-per-node gpu -m kernlib doctor --distributed",),
    "cache list --arch sm_75": ("--arch", "sm_80", "sm_75"),
    "cache list --unused -1": ("--unused",),
    "cache list --unused long": ("--unused", "long"),
    "cache show xyz": ("KEY-PREFIX",),
    "cache show ''": ("KEY-PREFIX",),
    "cache show 12 --force": ("--cubin",),
    "cache prune": ("--unused DAYS", "--to SIZE"),
    "cache prune --yes": ("--unused DAYS", "--to SIZE"),
    "cache prune --to plenty": ("--to", "plenty", "100M"),
    "cache prune --unused -3": ("--unused",),
    "cache export": ("FOLDER",),
    "cache import": ("FOLDER",),
}


@pytest.mark.parametrize("line", REFUSED)
def test_a_command_line_that_cannot_be_used_says_why(run, line):
    plain(run(*shlex.split(line)), 2, *REFUSED[line])


@pytest.mark.parametrize(
    "arguments",
    [
        ("bench",),
        ("demo",),
        ("compile", "gaussian"),
        ("explain", "gaussian"),
        ("show", "gaussian", "--source"),
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


@pytest.mark.parametrize("text", ["9" * 5000, "0" * 5000 + "1", "9" * 5000 + "M", "x" * 5000])
def test_a_size_of_thousands_of_characters_is_refused_in_a_line(text):
    with pytest.raises(ValueError, match=r"KERNLIB_CACHE_BYTES=.* expected a size") as caught:
        settings.Settings.read({"KERNLIB_CACHE_BYTES": text})
    assert len(str(caught.value)) < 300
    assert settings.Settings.read({"KERNLIB_CACHE_BYTES": "0" * 5000 + "2M"}).cache_bytes == 2 << 20


def test_a_pipe_that_nobody_reads_on_ends_the_command_quietly(cache_dir):
    code = "from kernlib.cli import main; main()"
    shell = f"'{sys.executable}' -c '{code}' cache info | true; exit ${{PIPESTATUS[0]}}"
    found = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert "Error" not in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize("width", [80, 100, 160])
def test_help_says_whole_sentences(run, width):
    """Of each command, on one line of a terminal."""
    for group in ((), ("cache",)):
        found = run(*group, "--help", terminal_width=width).output
        assert "..." not in found.replace("DESCRIPTOR...", "").replace("[ARGS]...", "")
