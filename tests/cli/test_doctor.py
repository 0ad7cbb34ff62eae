"""`kernlib doctor`: what it finds, what it advises, and when it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from importlib import metadata

import pytest
import torch

from kernlib import errors, settings
from kernlib.cli import checks, machine
from kernlib.cli.machine import Gpu
from kernlib.jit import bundle, toolchain
from tests.cli.cases import (
    aside,
    command,
    damage_bundle,
    damage_pages,
    keep,
    keep_damaged,
    made,
    make_bundle,
    on_terminal,
)
from tests.support.paths import ROOT


@pytest.fixture
def major(monkeypatch):
    monkeypatch.setattr(toolchain, "cuda_major", lambda: "13")


def findings(run, label, code=0):
    """What doctor says under one label."""
    result = run("doctor", "--json")
    assert result.exit_code == code, result.output
    facts = json.loads(result.stdout)
    assert facts["ok"] is (code == 0)
    return [finding for finding in facts["findings"] if finding["label"] == label]


def test_it_passes_with_a_compiler_and_a_cache(run, cache_dir):
    keep("one")
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "FAIL" not in result.output and result.stderr == ""
    assert f"lmdb, {cache_dir}, 1 kernel, 0 tuning results, " in result.output
    for variable in settings.VARIABLES:
        assert variable.name in result.output


def test_json_has_every_line(run):
    lines = run("doctor").stdout.partition("\nWhat to do next:\n")[0].splitlines()
    found = json.loads(run("doctor", "--json").stdout)["findings"]
    assert len(found) == len(lines)
    for finding in found:
        assert set(finding) == {"status", "label", "text", "advice", "details"}
        assert finding["status"] in ("ok", "note", "fail")
    labels = {finding["label"] for finding in found}
    assert {"torch", "GPU", "NVRTC", "headers", "compile", "settings", "cache", "disk"} <= labels


def test_a_real_process_is_quick_and_quiet(cache_dir):
    found = command("doctor", "--json")
    assert found.returncode == 0 and found.stderr == ""
    (compiled,) = (f for f in json.loads(found.stdout)["findings"] if f["label"] == "compile")
    assert compiled["details"]["arch"] == "sm_90a" and compiled["details"]["ms"] >= 0


# What to do next.


def steps(run, code=0):
    """The last lines, which are numbered."""
    result = run("doctor")
    assert result.exit_code == code, result.output
    lines = result.stdout.partition("\nWhat to do next:\n")[2].splitlines()
    told = [line.partition(f"  {number}. ")[2] for number, line in enumerate(lines, 1)]
    assert told == json.loads(run("doctor", "--json").stdout)["next"]
    return told


def test_where_nothing_is_wrong_it_ends_with_commands_to_run(run, monkeypatch):
    gpu, demo, ahead = steps(run)
    assert "NVIDIA GPU since sm_80" in gpu and errors.INSTALL in gpu
    assert "`kernlib demo`, then README's first example" in demo
    assert "`kernlib compile --arch ARCH`" in ahead
    monkeypatch.setattr(machine, "gpus", lambda: [Gpu(0, "A", "sm_80")])
    (both,) = steps(run)
    assert "`kernlib demo`" in both and "`kernlib bench`" in both


def test_what_is_needed_comes_before_what_is_worth_a_look(run, monkeypatch, cache_dir):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 3 << 20))
    first, *_ = steps(run)
    assert first.startswith("disk: the cache may still grow")
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: toolchain.UNKNOWN_VERSION)
    needed, disk, again = steps(run, code=1)
    assert needed.startswith('NVRTC: pip install ".[cu13]" in the checkout')
    assert disk == first and again == "then run `kernlib doctor` again"


def test_equal_advice_is_given_once(run, monkeypatch):
    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: toolchain.UNKNOWN_VERSION)
    assert steps(run, code=1)[0].startswith("cuda.core, bindings, NVRTC: pip install")
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    assert steps(run, code=1)[0].startswith("cuda.core, bindings, NVRTC, compile: pip install")
    (solvers,) = findings(run, "nvmath", code=1)  # which kernels do without
    assert solvers["status"] == "ok" and "torch in place of cuSOLVER" in solvers["text"]


def advising() -> dict:
    """The texts that may advise an installation, by their paths."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for part in ("kernlib", "examples", "docs"):
        paths += (ROOT / part).rglob("*.[pm][yd]")
    return {path: path.read_text() for path in paths}


def test_nothing_is_advised_that_no_index_has():
    """Until there is a package, extras are those of a checkout."""
    wrong = re.compile(r"pip install (-\S+ )*[\"']?kernlib\b")
    texts = advising()
    assert len(texts) > 100 and not [path for path, text in texts.items() if wrong.search(text)]


def test_every_extra_that_is_advised_is_there():
    project = (ROOT / "pyproject.toml").read_text()
    table = project[project.index("[project.optional-dependencies]") :].partition("\n[")[0]
    known = set(re.findall(r"^(\w+) = \[", table, re.M))
    found = {
        extra
        for text in advising().values()
        for line in text.splitlines()
        if "pip " in line or "INSTALL" in line
        for extras in re.findall(r"""["'][^"' ]*\[([a-z\d,]+)\]["']""", line)
        for extra in extras.split(",")
    }
    assert {"cu12", "cu13", "linalg", "test"} <= found <= known


@pytest.mark.parametrize("advice", [errors.INSTALL, checks.INSTALL_CUDA_12])
def test_an_installation_that_is_advised_says_where(advice):
    assert re.match(r'pip install "\.\[cu1[23]\]" in the checkout of kernlib', advice)


@pytest.mark.few(0)
@pytest.mark.parametrize("width", [80, 100, 160])
def test_lines_are_folded_between_words(cache_dir, width):
    code, lines = on_terminal(width, "doctor")
    # What is longer is one word, a path.
    assert code == 0 and all(len(line) <= width or " " not in line[18:] for line in lines)
    assert "What to do next:" in lines
    told = " ".join(" ".join(lines).split())
    assert "CPU tensors are computed in PyTorch, kernels can be built" in told


# The machine.


def test_each_target_of_this_machine_is_compiled_for(run, monkeypatch):
    found = [Gpu(0, "A", "sm_80"), Gpu(1, "B", "sm_120"), Gpu(2, "C", None, "C is too old")]
    monkeypatch.setattr(machine, "gpus", lambda: found)
    assert [f["details"]["arch"] for f in findings(run, "compile")] == ["sm_80", "sm_120"]
    (old,) = findings(run, "GPU 2")
    assert (old["status"], old["advice"]) == ("note", "C is too old")


DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Jan  9 22:05:07 UTC 2024\n"


@pytest.mark.parametrize(
    ("version", "cuda", "advice"),
    [
        ("550.54.15", "13.0", f"update it to 580 or newer, or {checks.INSTALL_CUDA_12}"),
        ("470.223.02", "12.8", "update it to 525 or newer"),
        ("550.54.15", "12.8", None),
        ("580.65.06", "13.0", None),
        ("550.54.15", None, None),  # of which the line of torch tells
    ],
)
def test_a_driver_that_is_older_than_torch_is_named(
    run, monkeypatch, tmp_path, version, cuda, advice
):
    path = tmp_path / "version"
    path.write_text(DRIVER.format(version))
    monkeypatch.setattr(checks, "DRIVER_VERSION", path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = findings(run, "driver")
    assert [(finding["status"], finding["advice"]) for finding in found] == (
        [("note", advice)] if advice else []
    )
    assert all(version in finding["text"] and cuda in finding["text"] for finding in found)


@pytest.mark.parametrize(
    ("cuda", "hidden", "advice"),
    [
        ("13.0", "1", "CUDA_VISIBLE_DEVICES=1 says which GPUs torch may see: unset it"),
        ("13.0", None, "nvidia-smi lists the GPUs that it sees"),
        (None, None, ""),  # of which the line of torch tells
    ],
)
def test_a_driver_without_a_gpu_that_torch_sees(run, monkeypatch, tmp_path, cuda, hidden, advice):
    path = tmp_path / "version"
    path.write_text(DRIVER.format("580.65.06"))
    monkeypatch.setattr(checks, "DRIVER_VERSION", path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if hidden is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    (finding,) = findings(run, "GPU")
    assert advice in finding["advice"] and bool(advice) == (finding["status"] == "note")
    told = steps(run)
    assert not any("there is none here" in step for step in told)  # it is, and not used
    assert told[0].startswith("GPU: " if advice else "torch: ")


def test_it_fails_without_a_compiler(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAIL  compile     not possible without cuda-core\n" in result.output
    assert '1. compile: pip install ".[cu13]" in the checkout' in result.output


def test_it_names_a_setting_that_cannot_be_used(run, monkeypatch):
    monkeypatch.setenv("KERNLIB_CACHE_BYTES", "plenty")
    settings.reset()
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAIL  settings    KERNLIB_CACHE_BYTES='plenty'" in result.output


def test_a_variable_that_kernlib_does_not_read_is_noted(run, monkeypatch):
    monkeypatch.setenv("KERNLIB_CACHEDIR", "/tmp/x")
    monkeypatch.setenv("kernlib_debug", "1")
    noted = {f["details"]["name"]: f for f in findings(run, "settings") if f["status"] == "note"}
    assert set(noted) == {"KERNLIB_CACHEDIR", "kernlib_debug"}
    assert "did you mean KERNLIB_CACHE_DIR?" in noted["KERNLIB_CACHEDIR"]["text"]
    assert "did you mean KERNLIB_DEBUG?" in noted["kernlib_debug"]["text"]


def test_a_check_that_breaks_is_a_finding(run, monkeypatch):
    def broken():
        raise RuntimeError("out of order")

    monkeypatch.setattr(machine, "gpus", broken)
    (finding,) = findings(run, "GPU", code=1)
    assert finding["status"] == "fail" and finding["text"] == "RuntimeError: out of order"
    assert findings(run, "cache", code=1)[0]["status"] == "ok"


@pytest.mark.parametrize("number, code", [(13000, 0), (12090, 1)])
def test_a_driver_older_than_the_compiler(run, monkeypatch, number, code):
    """NVRTC 13 makes what only a driver for CUDA 13 loads."""
    monkeypatch.setattr(machine, "gpus", lambda: [Gpu(0, "A", "sm_90a")])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("cuda.bindings.driver.cuDriverGetVersion", lambda: (0, number))
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "13.0.88")
    monkeypatch.setattr(toolchain, "confirm_nvrtc", lambda: None)  # which would see another
    (finding,) = findings(run, "driver", code)
    assert finding["details"]["cuda"] == f"{number // 1000}.{number % 1000 // 10}"
    assert code == 0 or "NVRTC 13 do not load there" in finding["advice"]


# The store.


def test_it_fails_for_a_cache_in_memory(run, unusable_cache):
    result = run("doctor")
    assert result.exit_code == 1
    assert "FAIL  cache       the kernel cache in /proc/kernlib cannot be used" in result.output
    assert "1. cache: set KERNLIB_CACHE_DIR" in result.output


def test_damaged_entries_are_counted(run):
    keep("good")
    key = keep_damaged("bad")
    _, note = findings(run, "cache")
    assert note["status"] == "note" and note["text"].startswith("1 damaged entry of 2")
    assert note["details"]["damaged"] == [key.hex()] and "verify --repair" in note["advice"]


def test_it_fails_for_damaged_pages_and_touches_nothing(run, cache_dir, mount, tmp_path, major):
    keep("one")
    mount(make_bundle(tmp_path / "b", made("x", nvrtc="13.4")))
    damage_pages(cache_dir)
    (failure,) = findings(run, "cache", code=1)
    assert failure["status"] == "fail" and "verify --repair" in failure["advice"]
    assert aside(cache_dir) == []
    assert findings(run, "bundle", code=1)[0]["status"] == "ok"


def test_stores_that_were_moved_aside(run, cache_dir):
    keep("one")
    damage_pages(cache_dir)
    assert run("cache", "verify", "--repair").exit_code == 0
    (old,) = aside(cache_dir)
    _, note = findings(run, "cache")
    assert note["status"] == "note" and note["details"]["path"] == str(old)
    assert note["details"]["bytes"] > 0 and f"rm -r {old}" in note["advice"]


def test_an_unclean_end(run, cache_dir):
    code = (
        "import os, signal; from kernlib.jit import layers\n"
        "layers.layers().store.put(bytes(32), b'1'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    found = subprocess.run([sys.executable, "-c", code], env=dict(os.environ))
    assert found.returncode == -signal.SIGKILL
    told = [f for f in findings(run, "cache") if "died with it open" in f["text"]]
    assert len(told) == 1 and told[0]["status"] == "ok" and len(told[0]["details"]["died"]) == 1
    assert not [f for f in findings(run, "cache") if "died with it open" in f["text"]]


def test_a_disk_that_is_nearly_full(run, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 30, 1 << 30, 3 << 20))
    (note,) = findings(run, "disk")
    assert note["status"] == "note" and note["text"] == "3.0 MB left on its disk"
    assert "KERNLIB_CACHE_BYTES" in note["advice"] and note["details"]["free"] == 3 << 20


# Bundles.


def bundled(run, mount, tmp_path, *entries):
    mount(make_bundle(tmp_path / "b", *entries))
    (finding,) = findings(run, "bundle")
    return finding


def test_a_bundle(run, mount, tmp_path, major):
    entries = [made("x", nvrtc="13.0"), made("y", nvrtc="13.4", arch="sm_80")]
    finding = bundled(run, mount, tmp_path, *entries)
    assert finding["text"] == f"{tmp_path / 'b'}, 2 kernels: 1 sm_80, 1 sm_90a"
    assert finding["status"] == "ok" and finding["details"]["archs"] == {"sm_80": 1, "sm_90a": 1}


@pytest.mark.parametrize("arch, status", [("sm_90a", "ok"), ("sm_80", "note")])
def test_a_bundle_with_or_without_kernels_for_this_gpu(
    run, mount, tmp_path, major, monkeypatch, arch, status
):
    monkeypatch.setattr(machine, "gpus", lambda: [Gpu(0, "A", arch)])
    finding = bundled(run, mount, tmp_path, made("x", nvrtc="13.0"))
    assert finding["status"] == status
    assert status == "ok" or "--arch sm_80" in finding["advice"]


def test_a_bundle_for_another_cuda(run, mount, tmp_path, major):
    finding = bundled(run, mount, tmp_path, made("x", nvrtc="12.9.86"))
    assert finding["status"] == "note" and "for CUDA 13" in finding["advice"]


def test_an_empty_and_a_damaged_bundle(run, mount, tmp_path, major):
    empty, damaged = make_bundle(tmp_path / "a"), make_bundle(tmp_path / "b", made("x"))
    damage_bundle(damaged)
    mount(empty, damaged)
    first, second = findings(run, "bundle")
    assert "empty" in first["advice"] and "1 entry damaged" in second["advice"]


def test_bundles_that_are_passed_over(run, mount, tmp_path):
    cut = make_bundle(tmp_path / "b", made("x"))
    os.truncate(cut / bundle.FILE, 5000)
    mount(tmp_path / "nothing", cut)
    result = run("doctor")
    assert result.exit_code == 0 and result.stderr == ""
    missing, damaged = findings(run, "bundle")
    assert missing["status"] == damaged["status"] == "note"
    assert "holds no kernels.mdb" in missing["text"] and "is damaged" in damaged["text"]
