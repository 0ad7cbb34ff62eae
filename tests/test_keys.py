"""The key of a kernel: all that decides its code, and nothing else. And what bad code costs."""

import os
import pickle
import subprocess
import sys

import pytest

from kernlib.errors import CompileError
from kernlib.jit import compiler, entry, service, sources, toolchain
from kernlib.jit.spec import KernelSpec

SPEC = KernelSpec("test", '#include "common/math.cuh"\n', "entry", 32, 0, (), "a kernel of tests")
ARCH = "sm_90a"

CHANGES = {
    "source": SPEC._replace(source=SPEC.source + " "),
    "entry": SPEC._replace(entry="other"),
    "family": SPEC._replace(family="other"),
    "options": SPEC._replace(options=("-O2",)),
    "threads": SPEC._replace(threads=64),
    "shared": SPEC._replace(shared_bytes=1024),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_key_changes_with_everything_that_decides_the_code(name):
    assert service.digest(CHANGES[name], ARCH) != service.digest(SPEC, ARCH)


def test_the_key_changes_with_arch_compiler_options_and_schema(monkeypatch):
    keys = {
        service.digest(SPEC, ARCH),
        service.digest(SPEC, "sm_90"),
        service.digest(SPEC, "sm_80"),
    }
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "99.9.9")
    keys.add(service.digest(SPEC, ARCH))
    monkeypatch.setattr(toolchain, "OPTIONS", ("--std=c++20",))
    keys.add(service.digest(SPEC, ARCH))
    monkeypatch.setattr(entry, "SCHEMA", 99)
    keys.add(service.digest(SPEC, ARCH))
    assert len(keys) == 6


def test_the_key_ignores_the_description():
    assert service.digest(SPEC._replace(description="x"), ARCH) == service.digest(SPEC, ARCH)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the kernel sources that a test may change; returns it and a switch to a folder."""

    def use(folder):
        monkeypatch.setattr(sources, "root", lambda: folder)
        sources._digest_of.cache_clear()
        sources._read.cache_clear()

    original = sources.root()
    names = sources.closure('#include "pairwise/pairwise.cuh"\n')
    for folder in ("first", "second"):
        for name in names:
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((original / name).read_bytes())
    yield tmp_path, names, use
    monkeypatch.undo()
    sources.forget()


def test_the_key_changes_with_every_header_and_not_with_its_place(tree):
    folder, names, use = tree
    wanted = SPEC._replace(source='#include "pairwise/pairwise.cuh"\n')
    use(folder / "first")
    keys = {service.digest(wanted, ARCH)}
    use(folder / "second")
    assert service.digest(wanted, ARCH) in keys
    assert len(names) >= 6
    for name in names:
        path = folder / "second" / name
        path.write_text(path.read_text() + "// changed\n")
        use(folder / "second")
        keys.add(service.digest(wanted, ARCH))
    assert len(keys) == len(names) + 1


KEY_CHILD = """
from kernlib.jit import service
from kernlib.jit.spec import KernelSpec
print(service.digest(KernelSpec(*{fields!r}), "sm_90a").hex())
"""


def test_the_key_is_the_same_in_every_process_and_folder(tmp_path):
    fields = ("test", SPEC.source, "entry", 32, 0, (), "another description")
    keys = {
        subprocess.check_output(
            [sys.executable, "-c", KEY_CHILD.format(fields=fields)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONHASHSEED": seed},
            text=True,
        ).strip()
        for seed in ("1", "2")
    }
    assert keys == {service.digest(SPEC, ARCH).hex()}


BAD = '#include "common/math.cuh"\nextern "C" __global__ void entry() {\n    int x = nonsense;\n}\n'


def test_the_error_for_bad_source_shows_line_message_and_kernel_and_is_picklable():
    with pytest.raises(CompileError) as caught:
        compiler.compile_spec(SPEC._replace(source=BAD), ARCH)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        text = str(error)
        assert "> 3 |     int x = nonsense;" in text
        assert 'identifier "nonsense" is undefined' in text
        assert SPEC.description in text and ARCH in text
        assert error.source == BAD


FIRST_COMPILES = """
import threading
import time
from kernlib.jit import compiler
from kernlib.jit.spec import KernelSpec

failed = []

def run(index):
    source = 'extern "C" __global__ void entry() {}' + f" // {index}"
    time.sleep(0.01 * index)  # the later ones meet a cuda.core that is half imported
    try:
        compiler.compile_spec(KernelSpec("test", source, "entry", 32), "sm_90a")
    except Exception as error:
        failed.append(repr(error))

threads = [threading.Thread(target=run, args=(index,)) for index in range(40)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failed, failed[0]
"""


def test_the_first_compiles_of_a_process_may_come_from_many_threads():
    run = subprocess.run([sys.executable, "-c", FIRST_COMPILES], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
