"""Compiling for GPUs that are not here, and preparing those that are."""

import importlib.machinery
import sys
import threading
import types
from functools import partial

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import kernlib as kl
from kernlib import ahead as pairwise_ahead
from kernlib.errors import CaptureError, CompileError, UnsupportedError
from kernlib.families.pairwise import checks
from kernlib.families.pairwise.lowering import choose
from kernlib.families.pairwise.request import Request, problem_of
from kernlib.jit import service, targets
from kernlib.jit.entry import Entry
from kernlib.progress import wanted
from tests.support.fakes import OnGpu, OnSecondGpu, on_gpu
from tests.support.limits import LIMIT_S

X = torch.empty(3000, 64, device="meta")
SMALL = torch.empty(50, 64, device="meta")  # few pairs
L1, LAPLACE = kl.l1_distance(), kl.laplace_l1()


@pytest.fixture
def built(monkeypatch):
    """(arch, description) of each kernel that would be compiled."""
    found = []

    def build(spec, arch):
        found.append((arch, spec.description))
        return Entry(spec.entry, spec.description.encode(), {})

    monkeypatch.setattr(service, "build", build)
    return found


# compile: which kernels.


def test_one_tensor_one_arch_and_one_descriptor_need_no_tuples(built):
    kl.compile(kl.gaussian(symmetric=True), archs="sm_80", specs=X, bandwidth=1.0)
    kl.compile([kl.gaussian(symmetric=True)], archs=["sm_80"], specs=(X,), bandwidth=1.0)
    assert len(built) == 2 and built[0] == built[1] and built[0][0] == "sm_80"


@pytest.mark.parametrize("dtype, count", [(torch.float32, 37), (torch.float16, 74)])
def test_all_variants_of_every_arch(built, dtype, count):
    kl.compile(L1, archs=("sm_80", "sm_90a"), dtypes=dtype)
    assert len(built) == 2 * count
    wide = [what for _, what in built if "float16->float32" in what]
    assert len(wide) == (74 if dtype == torch.float16 else 0)


TILES = [  # points, arch, tiles: tiles of 128 against the multiprocessors of its GPUs
    (500, "sm_90a", ["64"]),  # 16 tiles, and 78 to 132 multiprocessors
    (1200, "sm_90a", ["128", "64"]),  # 100
    (1500, "sm_90a", ["128", "64"]),  # 144
    (3000, "sm_90a", ["128"]),  # 576
    (1000, "sm_80", ["128", "64"]),  # 64 for 56 to 108
    (500, "sm_121", ["64"]),
    (900, "sm_121", ["64"]),  # 64 for 48, or 225 small ones
    (1500, "sm_121", ["128"]),  # 144, or 576
]


@pytest.mark.parametrize("points, arch, tiles", TILES)
def test_a_call_is_compiled_for_the_small_and_the_large_gpus_of_an_arch(built, points, arch, tiles):
    x = torch.empty(points, 64, device="meta")
    kl.compile(L1, archs=arch, specs=(x, x), workers=1)
    assert sorted(what.partition("tile=")[2].split()[0] for _, what in built) == sorted(tiles)


CALLS = [(L1, arch, points, 64) for arch in targets.MULTIPROCESSORS
         for points in (200, 600, 1000, 1400, 2000)]  # fmt: skip
# Behind whose products are tiles that depend on the multiprocessors.
CALLS += [(kl.l2_distance(), "sm_90a", points, 200) for points in (1000, 1500, 3000)]


@pytest.mark.parametrize("descriptor, arch, points, features", CALLS)
def test_no_gpu_of_an_arch_misses_what_was_compiled_for_a_call(descriptor, arch, points, features):
    x = torch.empty(points, features, device="meta")
    specs = set(pairwise_ahead.specs(descriptor, arch, (x, x), {}))
    fewest, most = targets.MULTIPROCESSORS[arch]
    request = Request(descriptor, x, x, None, False, 0, 0, {})
    problem, strides = problem_of(request, checks.check_call(*request))
    given = descriptor, problem, arch
    made = [choose.lower(*given, n, strides, "fp32").specs for n in range(fewest, most + 1)]
    assert specs == {spec for found in made for spec in found}
    assert len(specs) > 1 or descriptor == L1


def test_entries_come_in_order_and_equal_kernels_are_compiled_once(built):
    same = torch.empty(60, 64, device="meta")
    entries = kl.compile([L1, LAPLACE.replace(epilogue=()), kl.l2_distance()], specs=(SMALL, same))
    assert [entry.cubin.decode() for entry in entries] == [
        L1.describe() + " few pairs float32",
        L1.describe() + " few pairs float32",
        kl.l2_distance().describe() + " few pairs float32",
    ]
    assert len(built) == 2


def test_nothing_to_compile_is_fine(built):
    assert kl.compile([]) == []
    assert kl.compile(L1, specs=(X[:0], X), progress=True) == []
    assert built == []


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"archs": "sm_75", "specs": (X, X)}, ValueError, "arch must be one of .*sm_75'"),
        ({"archs": "90a", "specs": (X, X)}, ValueError, "'90a'; did you mean sm_90a.$"),
        ({"archs": (90,), "specs": (X, X)}, ValueError, "arch must be one of .*, got 90$"),
        (
            {"bandwidth": 1.0},
            TypeError,
            "bandwidth: arguments of a call need its tensors",
        ),
        ({"specs": (X, X, X)}, TypeError, "specs must be the tensors of one call, got 3"),
        ({"specs": (X, 3)}, TypeError, "specs must be the tensors of one call, got Tensor, int"),
        (
            {"specs": (X, torch.zeros(3, 64))},
            ValueError,
            "specs must be on one device, got meta and cpu",
        ),
        ({"dtypes": torch.int8}, TypeError, "dtypes: pairwise has no kernels for torch.int8"),
        ({"workers": 0}, ValueError, "workers must be a positive int, got 0"),
        ({"workers": -2}, ValueError, "workers must be a positive int, got -2"),
        ({"workers": 1.5}, TypeError, "workers must be a positive int or None, got 1.5"),
        ({"workers": True}, TypeError, "workers must be a positive int or None, got True"),
    ],
)
def test_what_does_not_fit_is_said(built, arguments, error, message):
    with pytest.raises(error, match=message):
        kl.compile(L1, **arguments)
    assert built == []


# compile: the pool.


@pytest.mark.parametrize("workers", [1, 3, None])
def test_workers_compile_at_the_same_time(monkeypatch, workers):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 5, 7})  # of more cores
    width = workers or 3
    # Broken unless that many are inside at once.
    together = threading.Barrier(width, timeout=LIMIT_S)
    threads = set()

    def build(spec, arch):
        threads.add(threading.get_ident())
        together.wait()

    monkeypatch.setattr(service, "build", build)
    kl.compile(L1, archs=("sm_80", "sm_90a", "sm_120"), workers=workers)  # a multiple of three
    assert len(threads) == width and threading.get_ident() not in threads


def test_the_first_failure_is_raised_and_nothing_is_begun_after_it(monkeypatch):
    begun = []

    def build(spec, arch):
        begun.append(spec)
        if len(begun) == 3:
            raise CompileError("refused", "log", "source")

    monkeypatch.setattr(service, "build", build)
    with pytest.raises(CompileError, match="refused"):
        kl.compile(L1, workers=1, progress=True)
    assert len(begun) == 3


def test_what_fails_first_wins_over_what_was_asked_for_first(monkeypatch):
    failed = threading.Event()

    def build(spec, arch):
        if arch == "sm_80":
            assert failed.wait(LIMIT_S)
            raise CompileError("the later one")
        failed.set()
        raise CompileError("the earlier one")

    monkeypatch.setattr(service, "build", build)
    with pytest.raises(CompileError, match="the earlier one"):
        kl.compile(L1, archs=("sm_80", "sm_90a"), specs=(SMALL, X), workers=2)


def test_debug_shows_the_events_of_the_worker_threads(capsys):
    kl.compile(kl.cauchy(), specs=(SMALL, X), bandwidth=1.0, debug=True)
    assert "kernlib compile" in capsys.readouterr().err
    kl.compile(kl.cauchy(), specs=(SMALL, X), bandwidth=1.0)
    assert capsys.readouterr().err == ""


def test_progress_says_what_is_done(built, capsys, monkeypatch):
    monkeypatch.setattr("kernlib.progress.clock", lambda: 0.0)
    kl.compile(L1, progress=True)
    shown = capsys.readouterr().err
    assert "compiling" in shown and "37/37" in shown and "sm_90a" in shown
    for progress in (None, False):
        kl.compile(L1, progress=progress)
        assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    kl.compile(L1, progress=False)
    assert capsys.readouterr().err == ""
    kl.compile(L1)
    assert "compiling" in capsys.readouterr().err
    assert len(built) == 5 * 37


@pytest.mark.few(2)
@pytest.mark.parametrize("progress", [None, True])
def test_where_nothing_can_be_drawn_a_line_is_written_every_ten_seconds(
    built, capsys, monkeypatch, progress
):
    ticks = iter(range(0, 4000, 3))  # seconds; each look at the clock takes three
    monkeypatch.setattr("kernlib.progress.clock", lambda: next(ticks))
    kl.compile(L1, workers=1, progress=progress)
    lines = capsys.readouterr().err.splitlines()
    counts = [int(line.split()[2].partition("/")[0]) for line in lines]
    assert counts == [*range(4, 38, 4), *([37] if progress else [])]
    assert lines[0].startswith("kernlib compiling 4/37, 15 s: sm_90a l1_distance")


class Shell:
    """What IPython gives in a notebook's process."""

    kernel = None


@pytest.mark.few(3)
@pytest.mark.parametrize("shell, widgets", [(Shell(), True), (Shell(), False), (None, True)])
def test_a_notebook_with_widgets_is_drawn_in(monkeypatch, shell, widgets):
    notebook = types.ModuleType("IPython")
    notebook.get_ipython = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    spec = importlib.machinery.ModuleSpec("ipywidgets", None) if widgets else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert wanted(None) is (shell is not None and widgets)
    assert wanted(True) and not wanted(False)


# prepare.


def test_prepare_compiles_in_worker_threads_and_loads_in_this_one(gpus):
    a, b = on_gpu(3000, 64), on_gpu(2000, 64)
    others = (kl.l2_distance(direct=True), kl.squared_distance(direct=True))
    descriptors = [kl.l1_distance(), *others]
    kl.prepare(descriptors, a, b, workers=2)
    first = gpus.builds[:3]
    assert {made.what for made in first} == {made.what for made in gpus.loads}
    assert all(made.thread is not threading.current_thread() for made in first)
    assert [made.thread for made in gpus.loads] == [threading.current_thread()] * 3
    assert gpus.launches == []
    count = len(gpus.builds)
    out = on_gpu(3000, 2000)
    for descriptor in descriptors:
        kl.prepare(descriptor, a, b, out=out)
        kl.run_kernel(descriptor, a, b, out=out)
    assert len(gpus.builds) == count and len(gpus.launches) == 3


def test_what_is_prepared_is_not_looked_at_again(gpus, monkeypatch):
    a, b = on_gpu(300, 64), on_gpu(200, 64)
    kl.prepare(LAPLACE, a, b, bandwidth=1.0)
    monkeypatch.setattr(checks, "check_call", None)
    kl.prepare(LAPLACE, a, b, bandwidth=2.0)
    kl.prepare([LAPLACE, LAPLACE], a, b, bandwidth=3.0, workers=1)


def test_the_device_of_the_tensors_is_prepared(gpus):
    a, b = (on_gpu(300, 64, kind=OnSecondGpu) for _ in range(2))
    kl.prepare(L1, a, b)
    assert [made.device for made in gpus.loads] == [1]
    assert {made.arch for made in gpus.builds} == {"sm_86"}
    assert gpus.entered == [0]


@pytest.mark.parametrize("meta", [False, True])
def test_while_a_stream_captures_nothing_is_compiled(gpus, meta):
    a, b = (X, X) if meta else (on_gpu(3000, 64), on_gpu(3000, 64))
    kl.prepare(L1, a, b)
    before = len(gpus.builds)
    gpus.capturing = True
    kl.prepare(L1, a, b)
    with pytest.raises(CaptureError, match=r"not loaded on cuda:0.*kernlib\.prepare"):
        kl.prepare([L1, kl.l2_distance()], a, b)
    assert len(gpus.builds) == before


def test_meta_tensors_load_the_kernels_of_the_current_device(gpus):
    for device, points, tile in ((0, 1000, 64), (0, 1400, 128), (1, 1000, 128), (1, 1200, 64)):
        with gpus.device(device):
            x = torch.empty(points, 64, device="meta")
            kl.prepare(kl.gaussian(), x, x, bandwidth=1.0)
        assert gpus.loads[-1].device == device and f"tile={tile} " in gpus.loads[-1].what
    assert gpus.launches == []


def test_meta_tensors_stand_for_tensors_of_their_layout(gpus):
    meta, real = torch.empty(3000, 68, device="meta"), on_gpu(3000, 68)
    for view in (lambda t: t[:, :64], lambda t: t[:, 1:65], lambda t: t[1:], lambda t: t[:, ::2]):
        kl.prepare(L1, view(meta), view(meta))
        loads = len(gpus.loads)
        kl.prepare(L1, view(real), view(real))
        assert len(gpus.loads) == loads


def test_meta_tensors_need_a_gpu(gpus, monkeypatch):
    advice = r"kernlib\.compile\(.*builds for GPUs that are not here"
    with gpus.device(2), pytest.raises(UnsupportedError, match=rf"GPU 2 has .*7\.5.*{advice}"):
        kl.prepare(L1, X, X)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match=f"no CUDA device.*{advice}"):
        kl.prepare(L1, X, X)


def test_cpu_tensors_are_only_checked(built):
    x = torch.zeros(3, 2)
    kl.prepare([L1, LAPLACE.replace(epilogue=())], x, x)
    with pytest.raises(ValueError, match="needs bandwidth"):
        kl.prepare([L1, LAPLACE], x, x)
    assert built == []


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"workers": 0}, ValueError, "workers must be a positive int"),
        ({"workers": "2"}, TypeError, "workers must be a positive int or None, got '2'"),
        ({"p": 2.0}, ValueError, "p needs inner=Power"),
        ({"out": on_gpu(2, 2)}, ValueError, r"out must have shape \(300, 300\)"),
        ({"row_offset": [1]}, TypeError, r"row_offset must be an int, got \[1\]"),
    ],
)
def test_prepare_says_what_does_not_fit(gpus, arguments, error, message):
    a = on_gpu(300, 4)
    with pytest.raises(error, match=message):
        kl.prepare(L1, a, a, **arguments)
    assert gpus.builds == []


def test_tensors_of_two_devices_are_refused(gpus):
    with pytest.raises(ValueError, match="one device, got cuda:0 and meta"):
        kl.prepare(L1, on_gpu(30, 64), X)
    with pytest.raises(ValueError, match="one device, got meta and cuda:0"):
        kl.prepare(L1, X, on_gpu(30, 64))


ON_META = {  # calls whose gradient is recorded
    "factor": (
        kl.KroneckerSparse(2, 48, 192, 1),
        (X.new_empty(256, 384), X.new_empty(2, 48, 192, 1)),
    ),
    "sum": (kl.gaussian(), (X, SMALL)),
}


@pytest.mark.parametrize(
    "mode",
    [
        FakeTensorMode,
        partial(FlopCounterMode, display=False),
        torch.autograd.graph.save_on_cpu,
        partial(torch.autograd.graph.disable_saved_tensors_hooks, "none here"),
        partial(torch.autograd.set_detect_anomaly, True),
    ],
)
@pytest.mark.parametrize("call", ON_META)
def test_what_a_program_has_switched_on_changes_no_kernel(call, mode):
    descriptor, tensors = ON_META[call]
    recorded = tuple(t.detach().requires_grad_() for t in tensors)
    arguments = {"bandwidth": 1.0, "reduction": "kernel_sum"} if call == "sum" else {}
    specs = pairwise_ahead.specs(descriptor, "sm_90a", recorded, arguments)
    with mode() as entered:
        assert pairwise_ahead.specs(descriptor, "sm_90a", recorded, arguments) == specs
    assert len(specs) > 2 and not getattr(entered, "get_total_flops", int)()


def test_a_negated_view_is_prepared_as_the_call_will_read_it(gpus):
    a = torch.zeros(600, 64, dtype=torch.complex64).conj().imag.as_subclass(OnGpu)
    b, out = on_gpu(500, 64), on_gpu(600, 500)
    kl.prepare(L1, a, b, out=out)
    before = len(gpus.loads)
    kl.run_kernel(L1, a, b, out=out)
    assert len(gpus.loads) == before == 1
    assert "features/features" in gpus.loads[0].what  # as strided as a is, it would not be
    assert pairwise_ahead.prepared(L1, a.resolve_neg(), b, out=out)
    assert pairwise_ahead.prepared(L1, a, b, out=out)  # as a copy with its sign
