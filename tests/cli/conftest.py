"""Fixtures of the tests of the command line, which name this file in ``pytest_plugins``."""

import os

import pytest
from click.testing import CliRunner

from kernlib.cli import main
from kernlib.jit import compiler
from kernlib.jit.entry import Entry
from tests.cli.cases import fresh

VARIABLES = ("KERNLIB_CACHE_BYTES", "KERNLIB_DEBUG", "KERNLIB_ASSERT_CACHED")


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """A cache of this test's own, which the settings read anew, on a machine without a GPU. For who
    shows progress no time goes by."""
    folder = tmp_path / "cache"
    monkeypatch.setattr("kernlib.progress.clock", lambda: 0.0)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("kernlib.cli.checks.DRIVER_VERSION", tmp_path / "driver")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KERNLIB_CACHE_DIR", str(folder))
    fresh()
    yield folder
    fresh()


@pytest.fixture
def mount(cache_dir, monkeypatch):
    """Sets further folders of KERNLIB_CACHE_DIR."""

    def use(*folders):
        monkeypatch.setenv("KERNLIB_CACHE_DIR", os.pathsep.join(map(str, (cache_dir, *folders))))
        fresh()

    return use


@pytest.fixture
def run(cache_dir):
    return lambda *arguments, **options: CliRunner().invoke(
        main, [str(argument) for argument in arguments], **options
    )


@pytest.fixture
def unusable_cache(cache_dir, monkeypatch):
    monkeypatch.setenv("KERNLIB_CACHE_DIR", "/proc/kernlib")  # not even root makes a folder there
    fresh()


@pytest.fixture
def compiles(cache_dir, monkeypatch):
    """A compiler that notes what it is asked for."""
    made = []

    def compile_spec(spec, arch):
        made.append((spec.description, arch))
        meta = {"arch": arch, "description": spec.description, "family": spec.family}
        meta |= {"registers": "40", "spill_bytes": "0", "shared_bytes": "17408"}
        meta |= {"compile_ms": "50", "created": "1700000000", "nvrtc": "13.4.92"}
        return Entry(spec.entry, f"{arch} {spec.source}".encode(), meta)

    monkeypatch.setattr(compiler, "compile_spec", compile_spec)
    return made
