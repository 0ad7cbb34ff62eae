"""The key of a kernel: all that decides its code, and nothing else. And what bad code costs."""

import hashlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from kernlib.errors import CompileError
from kernlib.jit import compiler, entry, layers, service, sources, toolchain, tuning
from kernlib.jit.spec import KernelSpec
from tests.support.limits import LIMIT_S

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


# Of each family the canonical bytes, the portable and the exact key. What they are made of is held
# still, so that only another scheme changes them: it empties every user's cache.
GOLDEN = {
    "pairwise": (
        "218acb7579809a4a7b39adfc7a1eae02e266ed8a91d763b76dc00839f7c000d2",
        "b472c9f27fdb8a6029a173c89468824bdaa6e57a6804fe4c86801c2cc31f2826",
        "46b652d2d9e199f17ca7fdd51234b1cb433ed8289bbad91b329e8d7fbbddd858",
    ),
}


def golden(family):
    return KernelSpec(
        family, '#include "x.cuh"\nusing T = float;\n', family, 256, 49152, ("-O3",), "words"
    )


@pytest.mark.parametrize("family", GOLDEN)
def test_the_scheme_of_keys_is_that_of_every_earlier_release(family, monkeypatch):
    monkeypatch.setattr(sources, "digest", lambda source: hashlib.sha256(b"a header").digest())
    monkeypatch.setattr(sources, "system_includes", lambda source: frozenset())
    monkeypatch.setattr(toolchain, "nvrtc_version", lambda: "13.0.88")
    monkeypatch.setattr(toolchain, "cuda_major", lambda: "13")
    monkeypatch.setattr(toolchain, "OPTIONS", ("c++17",))
    monkeypatch.setattr(entry, "SCHEMA", 1)
    wanted = layers.request_of(golden(family), ARCH)
    canonical = hashlib.sha256(wanted.spec.canonical())
    found = tuple(digest.hex() for digest in (canonical.digest(), wanted.portable, wanted.key))
    assert found == GOLDEN[family]


def test_the_digest_of_headers_is_that_of_every_earlier_release(tmp_path, monkeypatch):
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "a.cuh").write_text('#include "b.cuh"\n#include <cuda_fp16.h>\n')
    (tmp_path / "b.cuh").write_text("// b\n")
    monkeypatch.setattr(sources, "root", lambda: tmp_path)
    sources._digest_of.cache_clear(), sources.read.cache_clear()
    try:
        found = sources.digest('#include "common/a.cuh"\n').hex()
    finally:
        monkeypatch.undo()
        sources.forget()
    assert found == "f960b49524186f709ab1ff4a65615d2b920374eba86bfd9031f82eeb70fb3e55"


def test_the_key_of_a_tuning_result_is_that_of_every_earlier_release():
    found = tuning._key("pairwise", ("NVIDIA H200", 132), b"signature").hex()
    assert found == "e167a28ec825ef4f6c0fa2dcfed318117b5fb68045108d97119ac1d7d14990b8"


ALIKE = [1, "1", True, 1.0, b"1", (1,), None, "", 0, False, "True", "1.0"]


def test_values_that_look_alike_make_different_keys():
    """As fields of what is lowered: options of the compiler, threads, bytes of shared memory."""
    specs = [SPEC._replace(options=(value,)) for value in ALIKE]
    specs += [SPEC._replace(threads=value, shared_bytes=other)
              for value, other in itertools.permutations(ALIKE[:4], 2)]  # fmt: skip
    assert len({service.digest(spec, ARCH) for spec in specs}) == len(specs)


def test_fields_do_not_run_together():
    pairs = [("ab", "c"), ("a", "bc"), ("", "abc"), ("abc", "")]
    specs = [SPEC._replace(family=family, entry=name) for family, name in pairs]
    specs += [SPEC._replace(options=options) for options in (("ab", "c"), ("a", "bc"), ("abc",))]
    assert len({service.digest(spec, ARCH) for spec in specs}) == len(specs)


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
        sources.read.cache_clear()

    original = sources.root()
    names = sources.closure('#include "pairwise/direct/direct.cuh"\n')
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
    wanted = SPEC._replace(source='#include "pairwise/direct/direct.cuh"\n')
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
LOWERED_CHILD = """
import hashlib
import kernlib as kl
from kernlib.jit import service
from kernlib.families.pairwise.lowering import direct
digest = hashlib.sha256()
chain = (kl.Laplace(), kl.Custom("tanh(gain * v) + shift", ("shift", "gain")))
for descriptor in (kl.p_distance(), kl.polynomial(3), kl.l1_distance(epilogue=chain)):
    for spec in direct.variants(descriptor, "sm_90a", ("float32", "float16")):
        digest.update(service.digest(spec, "sm_90a"))
print(digest.hexdigest())
"""


def test_the_key_is_the_same_in_every_process_and_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "_loaded", None)  # another test may have named another wheel
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


@pytest.mark.slow
def test_what_is_lowered_has_the_same_keys_under_every_hash_seed(tmp_path):
    seeds = ("0", "1", "77")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", LOWERED_CHILD],
            cwd=tmp_path,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in seeds
    ]
    keys = {child.communicate(timeout=LIMIT_S)[0].strip() for child in children}
    assert [child.returncode for child in children] == [0, 0, 0] and len(keys) == 1


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


def test_the_error_for_an_unknown_arch_says_what_to_do_and_is_picklable():
    with pytest.raises(CompileError) as caught:
        compiler.compile_spec(SPEC, "sm_999")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert "does not know sm_999; install a newer one" in str(error)


@pytest.mark.parametrize(
    "version, caches",
    [
        ((0, 12, 4), False),
        ((0, 12, 8), False),
        ((0, 12, 9), True),
        ((0, 13, 0), True),
        ((1,), True),
    ],
)
def test_the_option_against_nvrtcs_cache_is_given_where_there_is_one(version, caches, monkeypatch):
    monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", lambda: version)
    assert toolchain.nvrtc_caches() is caches


def test_another_thread_goes_on_while_nvrtc_works(monkeypatch):
    """NVRTC works without the lock of the interpreter: ticks go on from its begin to its end."""
    source = "".join(f'#include "{name}"\n' for name in ("common/types.cuh", "common/math.cuh"))
    heavy = "".join(f"__device__ double f{i}(double x) {{ return sin(x) * pow(x, {i}.5); }}\n"
                    for i in range(60))  # fmt: skip
    used = " + ".join(f"f{i}(*out)" for i in range(60))
    source += heavy + f'extern "C" __global__ void entry(double* out) {{ *out = {used}; }}\n'
    compiler.compile_spec(SPEC, ARCH)  # imports and loads everything
    core, ticks, done, seen = toolchain.cuda_core(), [], threading.Event(), []

    class Program(core.Program):
        def compile(self, *arguments, **options):
            before = len(ticks)
            made = super().compile(*arguments, **options)
            seen.append(len(ticks) - before)
            return made

    fields = {"ProgramOptions": core.ProgramOptions, "Program": Program}
    monkeypatch.setattr(toolchain, "cuda_core", lambda: SimpleNamespace(**fields))

    def observe():
        while not done.wait(0.001):
            ticks.append(None)

    observer = threading.Thread(target=observe)
    observer.start()
    compiler.compile_spec(SPEC._replace(source=source), ARCH)
    done.set()
    observer.join()
    assert seen[0] >= 5  # with the lock held none, or the one that waits at its beginning


FIRST_COMPILES = """
import threading
from types import SimpleNamespace
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
