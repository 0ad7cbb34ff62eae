"""NVRTC: which one a key names, which of its failures are remembered, and who may call it."""

import os
import pickle
import subprocess
import sys
import venv
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import kernlib as kl
from kernlib.errors import INSTALL
from kernlib.jit import compiler, layers, service, targets, toolchain
from kernlib.jit.compiler import NoVerdict
from tests.jit.process_cases import forked, succeeds
from tests.jit.service_cases import ARCH, SPEC, in_threads
from tests.support.paths import ROOT

BOTH = {"nvidia-cuda-nvrtc": "13.0.88", "nvidia-cuda-nvrtc-cu12": "12.9.86"}


@pytest.fixture
def installed(monkeypatch):
    """Say which wheels are installed."""

    def of(wheels):
        def version(name):
            if name not in wheels:
                raise metadata.PackageNotFoundError(name)
            return wheels[name]

        monkeypatch.setattr(toolchain.metadata, "version", version)
        monkeypatch.setattr(toolchain, "_loaded", None)
        toolchain._wheel_version.cache_clear()
        toolchain.cuda_major.cache_clear()
        return toolchain.nvrtc_version(), toolchain.cuda_major()

    yield of
    monkeypatch.undo()
    toolchain._wheel_version.cache_clear()
    toolchain.cuda_major.cache_clear()


def test_of_two_nvrtcs_the_one_is_named_that_the_bindings_load(installed):
    assert installed({**BOTH, "cuda-bindings": "12.9.4"}) == ("12.9.86", "12")
    assert installed({**BOTH, "cuda-bindings": "13.4.4"}) == ("13.0.88", "13")
    assert installed(BOTH) == ("13.0.88", "13")
    thirteen = {"cuda-bindings": "13.4.4", "nvidia-cuda-nvrtc-cu12": "12.9.86"}
    assert installed(thirteen) == (toolchain.UNKNOWN_VERSION, "13")
    assert installed({}) == (toolchain.UNKNOWN_VERSION, toolchain.UNKNOWN_VERSION)


@pytest.mark.parametrize(
    ("hidden", "named"),
    [
        (["cuda.core"], "cuda-core"),
        (["cuda.bindings"], "cuda-bindings"),
        (["cuda.bindings", "cuda.core"], "cuda-bindings and cuda-core"),
        (["cuda"], "cuda-pathfinder, cuda-bindings and cuda-core"),
    ],
)
def test_what_is_missing_is_named(hidden, named):
    """Whichever import of whose fails without it."""
    code = (
        "import sys; from kernlib.jit import toolchain\n"
        f"sys.modules.update(dict.fromkeys({hidden}))\n"
        "try: toolchain.cuda_core()\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    start = f"UnsupportedError kernels cannot be compiled or launched without {named} ("
    assert found.stdout.startswith(start), found.stderr
    assert found.stdout.rstrip().endswith(f"To install: {INSTALL}")


ELSEWHERE = """
import sysconfig
from kernlib.jit import compiler
from kernlib.jit.spec import KernelSpec
assert not os.path.exists(sysconfig.get_path("purelib") + "/cuda"), "it is of site-packages"
spec = KernelSpec("test", 'extern "C" __global__ void entry() {}', "entry", 32)
print(compiler.compile_spec(spec, "sm_80").meta["nvrtc"])
"""


def test_packages_that_pip_has_put_elsewhere_compile(tmp_path):
    """As ``pip install --target`` does, with PYTHONPATH, where no torch brings an NVRTC."""

    (packages,) = {Path(find_spec(name).origin).parents[1] for name in ("lmdb", "click")}
    (tmp_path / "target").mkdir()
    for path in packages.iterdir():
        if path.suffix != ".pth" and "kernlib" not in path.name:
            (tmp_path / "target" / path.name).symlink_to(path)
    venv.create(tmp_path / "bare", symlinks=True)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path / 'target'}"}
    command = [tmp_path / "bare" / "bin" / "python", "-c", "import os" + ELSEWHERE]
    found = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == toolchain.nvrtc_version(), found.stderr


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_error_says_whether_nvrtc_is_there(cache, monkeypatch, installed, is_installed):
    def find():
        raise RuntimeError("no file")

    installed({**BOTH, "cuda-bindings": "13.4.4"} if is_installed else {"cuda-bindings": "13.4.4"})
    monkeypatch.setattr(toolchain, "nvrtc_caches", find)
    start = "NVRTC 13.0.88 is installed, and" if is_installed else "kernels cannot be compiled"
    with pytest.raises(kl.UnsupportedError, match=start) as caught:
        service.build(SPEC, ARCH)
    assert (INSTALL in str(caught.value)) is not is_installed and "no file" in str(caught.value)


def test_what_another_nvrtc_has_made_is_kept_under_its_name(cache, installed):
    from cuda.bindings import nvrtc

    source = 'extern "C" __global__ void entry(float* out) { out[0] = 1; }\n'
    spec = SPEC._replace(source=source)
    major, minor = nvrtc.nvrtcVersion()[1:]
    wheel = "nvidia-cuda-nvrtc" if major > 12 else "nvidia-cuda-nvrtc-cu12"
    installed({wheel: f"{major}.{minor + 1}.1", "cuda-bindings": f"{major}.4"})
    before = layers.request_of(spec, ARCH)
    made = service.build(spec, ARCH)
    after = layers.request_of(spec, ARCH)
    assert made.meta["nvrtc"] == f"{major}.{minor}" and before.key != after.key
    store = layers.layers().store
    assert store.get(before.key) is None and store.get(after.key) is not None


def test_the_wheel_of_this_machine_is_the_one_that_is_loaded(monkeypatch):
    monkeypatch.setattr(toolchain, "_loaded", None)  # another test may have named another wheel
    compiler.compile_spec(SPEC._replace(source='extern "C" __global__ void entry() {}'), ARCH)
    assert toolchain._loaded is None


def test_every_target_that_nvrtc_knows_is_known():
    """From the oldest GPU on that kernels run on: else a new GPU is refused. NVIDIA's list of GPUs
    has none of sm_88, and sm_101 is what sm_110 was called before CUDA 13."""
    from cuda.bindings import nvrtc

    numbers = [number for number in nvrtc.nvrtcGetSupportedArchs()[1] if number >= 80]
    assert {f"sm_{number}" for number in numbers} - {"sm_88", "sm_101"} <= set(targets.SHARED_BYTES)


class NVRTCError(Exception):
    """As cuda.core raises it."""


PASSING = (
    "1: NVRTC_ERROR_OUT_OF_MEMORY",
    "11: NVRTC_ERROR_INTERNAL_ERROR",
    "7: NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
    "6: NVRTC_ERROR_COMPILATION, log:\n\nptxas fatal : Memory allocation failure",
)


@pytest.mark.parametrize("text", PASSING)
def test_failures_of_the_moment_are_tried_again(cache, monkeypatch, text):
    class Program:
        def __init__(self, *_arguments):
            raise NVRTCError(text)

    core = toolchain.cuda_core()
    source = 'extern "C" __global__ void entry() {}'
    spec = SPEC._replace(source=source)
    with monkeypatch.context() as patch:
        patch.setattr(core, "Program", Program)
        with pytest.raises(kl.CompileError, match="tries again") as caught:
            service.build(spec, ARCH)
    again = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(again, NoVerdict) and again.log == caught.value.log
    assert service.build(spec, ARCH).cubin[:4] == b"\x7fELF"


def test_a_compile_without_code_is_an_error_and_is_not_kept(cache):
    """As cuda.core's of a virtual architecture: no bytes, and no error."""
    spec = SPEC._replace(source='extern "C" __global__ void entry() {}')
    with pytest.raises(kl.CompileError, match="no code of the source of a kernel"):
        service.build(spec, "compute_90")
    assert layers.layers().store.info()["entries"] == 0
    assert service.build(spec, ARCH).cubin[:4] == b"\x7fELF"


def test_an_import_may_come_back_for_what_it_loads(monkeypatch):
    """As a finalizer does that the interpreter runs in the middle of it."""

    def load(name):
        return toolchain.cuda_driver() if name == "cuda.core" else name

    monkeypatch.setattr(toolchain, "import_module", load)
    assert in_threads(1, lambda _: toolchain.cuda_core()) == ["cuda.bindings.driver"]


def test_a_child_has_none_of_its_parents_kernels(monkeypatch):
    """They are of a driver that it cannot use."""
    kernel = service.Kernel(SPEC, "key", ARCH, 1)
    monkeypatch.setitem(service._kernels, (0, b"key"), kernel)

    def child():
        assert not service._kernels

    succeeds(forked(child))
    assert service._kernels[0, b"key"] is kernel


def test_the_error_for_an_unknown_arch_says_what_to_do_and_is_picklable():
    with pytest.raises(kl.CompileError) as caught:
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
