"""What a kernel is compiled from is what its key was made of, wherever that happens."""

import os
import pickle
import shutil
import subprocess
import sys

import pytest

import kernlib as kl
from kernlib.families.pairwise.kernels.direct import DIRECT
from kernlib.families.pairwise.kernels.split import Split
from kernlib.families.pairwise.lowering.problem import Scope
from kernlib.jit import compiler, layers, service, sources, toolchain
from kernlib.jit.spec import KernelSpec
from tests.support.paths import ROOT

ARCH = "sm_90a"
PLAIN = KernelSpec(
    "test",
    '#include "common/types.cuh"\n#include "common/math.cuh"\n'
    'extern "C" __global__ void entry(float* out) { out[0] = out[1] / out[2]; }\n',
    "entry",
    32,
)
HALF = PLAIN._replace(
    source='#include <cuda_fp16.h>\n#include "common/types.cuh"\n'
    'extern "C" __global__ void entry(float* out) {\n'
    "    out[0] = __half2float(__float2half(out[1]));\n}\n"
)
SPECS = {
    "plain": PLAIN,
    "half": HALF,
    "pairwise": DIRECT.specs(kl.gaussian(), Scope(("float32",), ARCH), ARCH)[0],
}

# Of files that kernels include, that CUDA's headers include, and that NVRTC asks the working
# directory about by itself.
TOOLKIT = ("cuda_fp16.h", "cuda_fp16.hpp", "vector_types.h", "nv/target", "cstring")
INTERNAL = ("__nv_nvrtc_builtin_header.h", "__nv_name_map", "kernlib_test.cu")


def hostile(folder, text="#error this file was read\n"):
    """A folder full of files of every name that a compile might ask for."""
    own = [path.relative_to(sources.root()).as_posix() for path in sources.root().rglob("*.cuh")]
    assert len(own) > 50
    for name in [*own, *TOOLKIT, *INTERNAL]:
        for path in (folder / name, folder / "include" / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder


CHILD = """
import hashlib, os, shutil, sys
sys.path.insert(0, {root!r})
from kernlib.jit import compiler, layers
from kernlib.jit.spec import KernelSpec
if {gone!r}:
    os.rmdir(os.getcwd())
for fields in {specs!r}:
    spec = KernelSpec(*fields)
    made = compiler.compile_spec(spec, "sm_90a")
    print(layers.request_of(spec, "sm_90a").key.hex(), hashlib.sha256(made.cubin).hexdigest())
"""


def compiled_in(folder, gone=False, **variables):
    specs = [tuple(spec) for spec in SPECS.values()]
    code = CHILD.format(root=str(ROOT), specs=specs, gone=gone)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_working_directory_and_the_environment_reach_no_kernel(tmp_path):
    """Whatever lies there: files that break a compile, and ones that would change its code."""
    clean = tmp_path / "clean"
    clean.mkdir()
    wanted = compiled_in(clean)
    broken = hostile(tmp_path / "broken")
    assert compiled_in(broken) == wanted
    changed = hostile(tmp_path / "changed", "#define volatile\n#define float double\n")
    path = f"{changed}:{changed / 'include'}"
    names = ("CPATH", "CPLUS_INCLUDE_PATH", "C_INCLUDE_PATH", "INCLUDE", "EDG_BASE")
    assert compiled_in(changed, **dict.fromkeys((*names, "EDG_MODULES_PATH"), path)) == wanted


def test_a_working_directory_that_was_removed_does_not_matter(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    assert compiled_in(gone, gone=True) == compiled_in(tmp_path)


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A copy of the kernel sources that a test may change."""
    folder = tmp_path / "sources"
    shutil.copytree(sources.root(), folder)
    monkeypatch.setattr(sources, "root", lambda: folder)
    forget()
    yield folder
    monkeypatch.undo()
    sources.forget()


def forget():
    for cached in (sources.closure, sources.system_includes, sources._digest_of, sources.read):
        cached.cache_clear()


def texts(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.few(1)
@pytest.mark.parametrize("change", ["removed", "broken", "changed"])
def test_sources_that_change_after_their_key_was_made_are_compiled_as_they_were(
    tree, cache, change
):
    spec = SPECS["pairwise"]
    before = compiler.compile_spec(spec, ARCH).cubin
    forget()
    asked = service.digest(spec, ARCH)
    for path in texts(tree):
        if change == "removed":
            path.unlink()
        else:
            path.write_text("#error new\n" if change == "broken" else "#define float double\n")
    assert service.build(spec, ARCH).cubin == before
    assert service.digest(spec, ARCH) == asked


def test_what_was_compiled_while_sources_were_read_anew_is_not_kept(tree, fake, monkeypatch):
    """Nobody knows which of the two texts it was made of."""

    def edit_and_forget(wanted, arch):
        with open(tree / "common" / "math.cuh", "a") as file:
            file.write("// edited\n")
        forget()
        return fake(wanted, arch)

    monkeypatch.setattr(compiler, "compile_spec", edit_and_forget)
    spec = PLAIN._replace(source='#include "common/math.cuh"\n')
    old = layers.request_of(spec, ARCH)
    service.build(spec, ARCH)
    new = layers.request_of(spec, ARCH)
    assert old.key != new.key
    assert [layers.layers().store.get(key) for key in (old.key, new.key)] == [None, None]
    monkeypatch.setattr(compiler, "compile_spec", fake)
    service.build(spec, ARCH)
    assert layers.layers().store.get(new.key) is not None


def test_the_key_changes_with_every_header_and_not_with_its_place(tree, monkeypatch):
    spec = PLAIN._replace(source='#include "pairwise/direct/direct.cuh"\n')
    keys, names = {service.digest(spec, ARCH)}, sources.closure(spec.source)
    moved = shutil.copytree(tree, tree.with_name("moved"))
    monkeypatch.setattr(sources, "root", lambda: moved)
    forget()
    assert service.digest(spec, ARCH) in keys and len(names) >= 6
    for name in names:
        with open(moved / name, "a") as file:
            file.write("// changed\n")
        forget()
        keys.add(service.digest(spec, ARCH))
    assert len(keys) == len(names) + 1


# One text of many.


def by_include_path(spec):
    """The cubin of a source whose includes NVRTC follows itself."""
    core = toolchain.cuda_core()
    options = core.ProgramOptions(
        name=f"kernlib_{spec.family}.cu",
        arch=ARCH,
        std=toolchain.STANDARD,
        include_path=str(sources.root()),
        ptxas_options=["-v", *spec.options],
    )
    return bytes(core.Program(spec.source, "c++", options).compile("cubin").code)


@pytest.mark.few(0)
def test_the_assembled_text_gives_the_code_that_includes_give():
    found = [PLAIN, *DIRECT.specs(kl.gaussian(), Scope(("float16",), ARCH), ARCH)[:2]]
    found += Split().specs(kl.gaussian(), Scope(("float32",), ARCH), ARCH)[:1]
    for spec in found:
        assert compiler.compile_spec(spec, ARCH).cubin == by_include_path(spec)


def test_every_file_of_a_closure_is_in_the_text_once_and_no_include_is_left(tree):
    (tree / "a.cuh").write_text('#pragma once\n#include "b.cuh"\nint a;\n')
    (tree / "b.cuh").write_text("// b\n#pragma once\nint b;\n")
    text = sources.assemble('#include "a.cuh"\n  #  include "b.cuh"  // again\nint c;', "main.cu")
    assert text.count("int a;") == text.count("int b;") == text.count("int c;") == 1
    assert "include" not in text.replace("// again", "") and "pragma" not in text
    assert text.index("int b;") < text.index("int a;") < text.index("int c;")


CONDITIONAL = """
#if SOME
#include "a.cuh"
#endif
#include "b.cuh"
extern "C" __global__ void entry(int* out) { out[0] = b() + BASE; }
"""


@pytest.mark.parametrize("some", [0, 1])
def test_an_include_that_is_skipped_hides_no_later_one(tree, some):
    (tree / "a.cuh").write_text('#pragma once\n#include "b.cuh"\n#include "a.cuh"\n#define A 1\n')
    text = "#pragma once\n#ifndef BASE\n#define BASE 1\n#endif\n__device__ int b() { return 2; }\n"
    (tree / "b.cuh").write_text(text)
    spec = PLAIN._replace(source=f"#define SOME {some}\n{CONDITIONAL}")
    assert compiler.compile_spec(spec, ARCH).cubin == by_include_path(spec)


def test_messages_name_the_file_and_its_line(tree):
    (tree / "a.cuh").write_text("#pragma once\n\nint wrong = nonsense_a;\n")
    source = '\n#include "a.cuh"\n#include "common/types.cuh"\nint x = nonsense_x;\n'
    with pytest.raises(kl.CompileError) as caught:
        compiler.compile_spec(PLAIN._replace(source=source, description="a kernel"), ARCH)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert "a.cuh(3): error" in error.log and "kernlib_test.cu(4): error" in error.log
        assert 'identifier "nonsense_x" is undefined' in error.log and error.source == source
        text = str(error)
        assert "> 4 | int x = nonsense_x;" in text and "a kernel" in text and ARCH in text


def test_an_include_that_no_digest_covers_is_refused(tmp_path):
    """One by a macro, which is not expanded before: no folder is searched for it."""
    for name in ("types.cuh", "common/types.cuh"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("typedef int u32;\n")
    source = '#define NAME "types.cuh"\n#include NAME\n' + PLAIN.source.split("\n", 2)[2]
    here = os.getcwd()
    os.chdir(tmp_path)
    try:
        with pytest.raises(kl.CompileError):
            compiler.compile_spec(PLAIN._replace(source=source), ARCH)
    finally:
        os.chdir(here)


# What the keys name of the compiler's own.


def test_keys_change_with_the_headers_of_cuda_for_those_who_include_them(tmp_path, monkeypatch):
    folder = tmp_path / "toolkit"
    (folder / "deep").mkdir(parents=True)
    (folder / "cuda_fp16.h").write_text('#include "deep/cuda_fp16.hpp"\n#include <cstring>\n')
    (folder / "deep" / "cuda_fp16.hpp").write_text('#  include "beside.h"\n')
    (folder / "deep" / "beside.h").write_text("// 1\n")
    (folder / "deep" / "unused.h").write_text("// 1\n")
    monkeypatch.setattr(toolchain, "header_directory", lambda: str(folder))

    def keys(spec):
        toolchain.header_digest.cache_clear()
        return layers.request_of(spec, ARCH)

    half, plain = keys(HALF), keys(PLAIN)
    (folder / "deep" / "unused.h").write_text("// 2\n")
    assert keys(HALF) == half
    (folder / "deep" / "beside.h").write_text("// 2\n")
    assert keys(HALF).key != half.key and keys(HALF).portable == half.portable
    assert keys(PLAIN) == plain
    toolchain.header_digest.cache_clear()


def test_a_kernel_is_looked_for_where_no_cuda_headers_are(monkeypatch):
    def missing():
        raise kl.UnsupportedError("none")

    monkeypatch.setattr(toolchain, "header_directory", missing)
    toolchain.header_digest.cache_clear()
    assert layers.request_of(HALF, ARCH).portable == layers.request_of(HALF, ARCH).portable
    assert toolchain.header_digest(frozenset({"cuda_fp16.h"})) == toolchain.UNKNOWN_VERSION
    toolchain.header_digest.cache_clear()


@pytest.mark.parametrize("name", toolchain.CODE_VARIABLES)
def test_what_the_environment_tells_the_compiler_is_part_of_the_keys(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    without = layers.request_of(PLAIN, ARCH)
    monkeypatch.setenv(name, "1")
    with_one = layers.request_of(PLAIN, ARCH)
    monkeypatch.setenv(name, "2")
    found = {without, with_one, layers.request_of(PLAIN, ARCH)}
    assert len({each.key for each in found}) == len({each.portable for each in found}) == 3
