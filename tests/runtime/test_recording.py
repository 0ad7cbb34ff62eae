"""Recorded blocks: the bundle that they leave, on GPUs that exist by name, and what they refuse."""

from __future__ import annotations

import os
import re
import threading
import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import kernlib as kl
from kernlib import ahead, settings
from kernlib.jit import bundle, compiler, layers, service, toolchain
from kernlib.jit.entry import Entry
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered, Step
from kernlib.runtime import devices, rehearsal
from kernlib.runtime.sequence import StepsCache
from tests.architecture import golden_gradients, walks
from tests.jit.service_cases import loading
from tests.support import fakes
from tests.support.fakes import OnSecondGpu, on_gpu
from tests.support.limits import LIMIT_S

L1, RELU, TANH = kl.l1_distance(), kl.Pairwise(epilogue=kl.Relu()), kl.Pairwise(epilogue=kl.Tanh())


def step(descriptor=L1, points=3000, **kind):
    """A call on a GPU."""
    x = on_gpu(points, 64, **kind)
    kl.run_kernel(descriptor, x, x, out=on_gpu(points, points, **kind))


def portable(specs, arch):
    return {layers.request_of(spec, arch).portable for spec in specs}


def of_call(descriptor, arch, points=3000):
    """The keys of what a call of :func:`step` takes on any GPU of an arch."""
    x = torch.empty(points, 64, device="meta")
    return portable(ahead.specs(descriptor, arch, (x, x), {}), arch)


def keys(folder):
    found = bundle.open_bundle(folder)
    try:
        return {key for key, _ in found.items()}
    finally:
        found.close()


REAL = {name: getattr(service, name) for name in ("build", "loaded", "kernel")}

# What is recorded.


def test_a_warm_program_is_recorded_whole(gpus, tmp_path):
    for _ in range(2):
        step()
    loads = len(gpus.loads)
    with kl.recording(tmp_path / "bundle"):
        step()
    assert keys(tmp_path / "bundle") == of_call(L1, "sm_90a")
    assert len(gpus.loads) == loads and not rehearsal.recorders


def test_the_step_elsewhere_compiles_nothing(gpus, tmp_path, monkeypatch):
    """By the real service, whose compiler and driver alone are not there."""
    compiles = []

    def compile_spec(spec, arch):
        compiles.append(spec.description)
        meta = {"arch": arch, "description": spec.description, "nvrtc": toolchain.nvrtc_version()}
        meta |= {"registers": "1", "spill_bytes": "0", "shared_bytes": "0", "compile_ms": "1"}
        return Entry(spec.entry, spec.source.encode(), meta)

    def elsewhere(*folders):
        monkeypatch.setenv("KERNLIB_CACHE_DIR", os.pathsep.join(map(str, folders)))
        settings.reset()
        service.forget()
        fakes.forget()
        compiles.clear()
        for _ in range(2):
            step(), step(RELU, 700)
        return len(compiles)

    for name, function in REAL.items():
        monkeypatch.setattr(service, name, function)
    loading(monkeypatch)
    monkeypatch.setattr(compiler, "compile_spec", compile_spec)
    gpus.loads.append(SimpleNamespace(device=0, what="a kernel"))  # that every function launches
    monkeypatch.setattr(service.Kernel, "function", 1)
    try:
        assert elsewhere(tmp_path / "maker") == 2
        with kl.recording(tmp_path / "bundle", workers=1):
            step(), step(RELU, 700)
        assert elsewhere(tmp_path / "user", tmp_path / "bundle") == 0
        with settings.override(assert_cached=True), pytest.raises(kl.NotCachedError):
            step(TANH)
    finally:
        monkeypatch.undo()
        settings.reset()
        service.forget()


def test_a_call_of_another_thread_is_recorded(gpus, tmp_path):
    begun, over = threading.Event(), threading.Event()

    def work():
        step()
        begun.set()
        assert over.wait(LIMIT_S)
        step()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert begun.wait(LIMIT_S)
    with kl.recording(tmp_path / "bundle"):
        over.set()
        thread.join(LIMIT_S)
    assert keys(tmp_path / "bundle") == of_call(L1, "sm_90a")


def test_each_of_two_recordings_has_what_was_called_while_it_was_open(gpus, tmp_path):
    outer, inner = (kl.recording(tmp_path / name, workers=1) for name in ("outer", "inner"))
    with outer:
        step()
        with inner:
            step(RELU)
        step(TANH)
    of_inner = of_call(RELU, "sm_90a")
    assert keys(tmp_path / "inner") == of_inner
    assert keys(tmp_path / "outer") == of_inner | of_call(L1, "sm_90a") | of_call(TANH, "sm_90a")


def test_recordings_that_overlap_in_two_threads(gpus, tmp_path):
    """Both know the plan of the call that runs while both are open, though it was there before."""
    entered, ended = threading.Event(), threading.Event()

    def work():
        with kl.recording(tmp_path / "second", workers=1):
            entered.set()
            assert ended.wait(LIMIT_S)

    thread = threading.Thread(target=work, daemon=True)
    with kl.recording(tmp_path / "first", workers=1):
        step()
        thread.start()
        assert entered.wait(LIMIT_S)
        step()
    step(RELU)
    ended.set()
    thread.join(LIMIT_S)
    of_first = of_call(L1, "sm_90a")
    assert keys(tmp_path / "first") == of_first
    assert keys(tmp_path / "second") == of_first | of_call(RELU, "sm_90a")


def test_by_default_it_is_for_the_gpus_that_were_used(gpus, tmp_path):
    with kl.recording(tmp_path / "bundle"):
        step()
        with torch.cuda.device(1):
            step(RELU, kind=OnSecondGpu)
    assert keys(tmp_path / "bundle") == of_call(L1, "sm_90a") | of_call(RELU, "sm_86")


def test_targets_that_are_not_here_get_the_kernels_of_their_smallest_and_largest(gpus, tmp_path):
    targets = ("sm_80", "sm_121")
    with kl.recording(tmp_path / "bundle", archs=targets):
        step(points=1500)
    wanted = [of_call(L1, arch, 1500) for arch in targets]
    assert keys(tmp_path / "bundle") == wanted[0] | wanted[1]
    assert [len(each) for each in wanted] == [2, 1]  # tiles of 64 and 128, and of 128 alone


def passes(family, name):
    """A call of those whose launches are kept in tests/architecture, with its backward pass."""
    kl.register_operators()  # whose names some families' cases take
    case = getattr(golden_gradients, family)()[name]
    count = len(case.tensors) if case.count is None else case.count

    def run():
        leaves = [t.detach().requires_grad_(i < count) for i, t in enumerate(case.tensors)]
        y = case.call(*leaves).as_subclass(torch.Tensor)
        if count:
            y.backward(golden_gradients.tensor(*y.shape, dtype=y.dtype))

    return run


def on_hopper(monkeypatch):
    """Plain CPU tensors pass for those of a Hopper."""
    walks.install(monkeypatch)
    meta, cuda = torch.device("meta"), torch.device("cuda", 0)
    monkeypatch.setattr(torch.Tensor, "device", property(lambda t: meta if t.is_meta else cuda))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda t: -1 if t.is_meta else 0)


CALLS = walks.WAYS | {
    name: partial(passes, family, name)
    for family, name in (
        ("pairwise", "categories"), ("pairwise", "min"), ("pairwise", "topk"),
        ("pairwise", "logsumexp of gaussian"), ("pairwise", "matmul by blocks"),
        ("kronecker", "kronecker biased"), ("blocks", "softmax"), ("blocks", "layout"),
        ("blocks", "attention scored"),
    )
}  # fmt: skip


@pytest.mark.few(5)
@pytest.mark.parametrize("name", CALLS)
def test_a_block_has_all_that_another_gpu_takes_for_its_calls(name, tmp_path, monkeypatch):
    """Recorded on a Hopper, for an A100: on that nothing else is loaded."""
    on_hopper(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error", kl.KernlibWarning)
        with kl.recording(tmp_path / "here", archs="sm_80"):
            CALLS[name]()()
        monkeypatch.setitem(fakes.MODELS, 0, ((8, 0), "A100", 108))
        fakes.forget()
        with kl.recording(tmp_path / "there"):
            CALLS[name]()()
    fakes.forget()
    assert keys(tmp_path / "there") <= keys(tmp_path / "here")


def test_a_call_is_recorded_under_each_of_torchs_settings(tmp_path, monkeypatch):
    on_hopper(monkeypatch)
    pattern = kl.KroneckerSparse(8, 64, 64, 8)
    x = golden_gradients.tensor(100, pattern.in_features)
    weight = golden_gradients.tensor(*pattern.weight_shape)

    def recorded(*settings):
        folder = tmp_path / " ".join(settings)
        with kl.recording(folder, archs="sm_80"):
            for setting in settings:
                torch.set_float32_matmul_precision(setting)
                kl.run_kernel(pattern, x, weight)
        return keys(folder)

    former = torch.get_float32_matmul_precision()
    try:
        exact, rounded = recorded("highest"), recorded("high")
        assert exact != rounded and recorded("highest", "high") == exact | rounded
    finally:
        torch.set_float32_matmul_precision(former)
        fakes.forget()


def test_a_call_without_a_rehearsal_is_lowered_for_each_gpu_of_a_target(gpus, tmp_path):
    """It is asked as if the device were that GPU, and is not launched."""
    cache = StepsCache()

    def spec(arch, count):
        return KernelSpec("test", f"// {arch} {min(count, 100)}", "entry", 32)

    def lower():
        one = spec(devices.arch_of(0), devices.model(0).multiprocessors)
        return Lowered((Step(one, (1, 1), b"", (("a", 0),)),))

    with kl.recording(tmp_path / "bundle", archs="sm_80"):
        cache.of((), ("a",), torch.device("cuda", 0), lower)
    wanted = [spec("sm_80", count) for count in range(56, 101)]
    assert keys(tmp_path / "bundle") == portable(wanted, "sm_80")
    assert len(gpus.loads) == 1


def test_prepared_calls_are_recorded(gpus, tmp_path):
    with kl.recording(tmp_path / "bundle", archs=("sm_80", "sm_90a")):
        kl.prepare(L1, on_gpu(3000, 64), on_gpu(3000, 64))
    assert keys(tmp_path / "bundle") == of_call(L1, "sm_80") | of_call(L1, "sm_90a")


def test_the_very_kernels_that_ran_are_there_too(gpus, tmp_path):
    """As a tuned one, which no rule would choose."""
    (tuned,) = ahead.specs(RELU, "sm_80", (torch.empty(50, 64, device="meta"),) * 2, {})
    with kl.recording(tmp_path / "bundle", archs=("sm_80", "sm_90a")):
        rehearsal.note_kernel(tuned, "sm_90a")
    assert keys(tmp_path / "bundle") == portable([tuned], "sm_90a")


def test_equal_blocks_give_equal_bytes(gpus, tmp_path):
    for name in ("first", "second"):
        with kl.recording(tmp_path / name, archs=("sm_120", "sm_80")):
            step(), step(RELU)
    files = [(tmp_path / name / bundle.FILE).read_bytes() for name in ("first", "second")]
    assert files[0] == files[1]


# What is refused.


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"archs": "sm_12"}, ValueError, "arch must be one of .*, got 'sm_12'"),
        ({"archs": ("sm_80", 90)}, ValueError, "arch must be one of .*, got 90"),
        ({"archs": ()}, ValueError, "archs names no target; leave it out"),
        ({"arch": "sm_80"}, TypeError, "unexpected keyword argument 'arch'; did you mean archs?"),
        ({"replace": 1}, TypeError, "replace must be a bool, got 1"),
        ({"workers": 0}, ValueError, "workers must be a positive int"),
        ({"progress": 1}, TypeError, "progress must be"),
    ],
)
def test_a_bad_argument_is_refused_before_the_block(options, error, text, tmp_path):
    with pytest.raises(error, match=text), kl.recording(tmp_path / "bundle", **options):
        pytest.fail("the block runs")
    assert not (tmp_path / "bundle").exists()


def refused(folder, error, text):
    with pytest.raises(error, match=re.escape(text)), kl.recording(folder):
        pytest.fail("the block runs")


def test_a_folder_that_takes_no_bundle_is_refused_before_the_block(gpus, tmp_path):
    file = tmp_path / "file"
    file.touch()
    refused(file, FileExistsError, "no bundle can be written there: File exists")
    refused(file / "bundle", NotADirectoryError, "no bundle can be written there: Not a directory")
    refused(3, TypeError, "folder must be a path, got 3")
    (tmp_path / "cache" / "v1").mkdir(parents=True)
    refused(tmp_path / "cache", FileExistsError, "is a cache; give the bundle a folder of its own")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    refused(tmp_path / "open", PermissionError, "others may write")
    assert not rehearsal.recorders


def test_a_bundle_is_replaced_only_where_that_is_asked_for(gpus, tmp_path):
    folder = tmp_path / "bundle"
    with kl.recording(folder):
        step()
    refused(folder, FileExistsError, "has a bundle already; replace=True replaces it")
    with kl.recording(folder, replace=True):
        step(RELU)
    assert keys(folder) == of_call(RELU, "sm_90a")


def test_a_block_without_kernels_says_so_and_leaves_no_bundle(gpus, tmp_path):
    x = torch.randn(4, 3)
    with (
        pytest.raises(RuntimeError, match="used no kernel of kernlib, so no bundle is written"),
        kl.recording(tmp_path / "bundle"),
    ):
        kl.run_kernel(L1, x, x)
    assert not list((tmp_path / "bundle").iterdir())


def test_an_exception_of_the_block_comes_through_and_leaves_no_bundle(gpus, tmp_path):
    for work in (step, lambda: None):
        with pytest.raises(ZeroDivisionError), kl.recording(tmp_path / "bundle"):
            work()
            raise ZeroDivisionError
    assert not list((tmp_path / "bundle").iterdir()) and not rehearsal.recorders


def test_a_call_that_another_gpu_does_not_take_is_left_out_with_a_warning(gpus, tmp_path):
    def call(t):
        if t.is_meta:
            raise kl.UnsupportedError("no such kernel")

    with (
        pytest.warns(kl.KernlibWarning, match="could not be planned for a target: sm_80: no such"),
        kl.recording(tmp_path / "bundle", archs=("sm_80", "sm_90a")),
    ):
        rehearsal.note_call(call, (on_gpu(3),), 0)
        step()
    assert keys(tmp_path / "bundle") == of_call(L1, "sm_90a") | of_call(L1, "sm_80")
    with (
        pytest.raises(RuntimeError, match=r"no bundle .* sm_80: no such kernel"),
        kl.recording(tmp_path / "other", archs="sm_80"),
    ):
        rehearsal.note_call(call, (on_gpu(3),), 0)
        rehearsal.note_kernel(None, "sm_90a")
