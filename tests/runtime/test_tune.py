"""Tuning: what is timed, what is kept, what later calls make of it."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kernlib as kl
from kernlib import ahead as pairwise_ahead
from kernlib import settings, tuner
from kernlib.errors import CaptureError, UnsupportedError
from kernlib.families.pairwise import checks
from kernlib.families.pairwise.lowering import choose as lowering
from kernlib.families.pairwise.request import Request, problem_of
from kernlib.jit import entry, service, tuning
from kernlib.jit.memory import MemoryStore
from kernlib.runtime import devices
from kernlib.runtime.plan import Plan, forget_plans
from tests.support.fakes import OnGpu, OnSecondGpu, on_gpu
from tests.support.limits import LIMIT_S

L1, LAPLACE = kl.l1_distance(), kl.laplace_l1()
MODEL = devices.Model("GPU", 132)
BIG, SMALL = {"tile": 128}, {"tile": 64}


@pytest.fixture
def store(monkeypatch):
    """The service's store, of the test's own."""
    layers = SimpleNamespace(store=MemoryStore(1 << 20))
    monkeypatch.setattr(service, "layers", lambda: layers)
    return layers.store


@pytest.fixture
def gpus(store, gpus):
    return gpus


def slower(tile: int):
    """A cost by which kernels of one tile take twice the time of the others."""
    return lambda launched: 0.2 if f"tile={tile} " in launched.what else 0.1


def grid(gpus, a, b, descriptor=L1, **arguments) -> tuple:
    """The grid that a call launches."""
    out = arguments.pop("out", None)
    out = on_gpu(a.shape[0], b.shape[0], kind=type(a)) if out is None else out
    kl.run_kernel(descriptor, a, b, out=out, **arguments)
    return gpus.launches[-1].grid


# What is kept.


def test_a_choice_is_found_under_what_it_was_kept_for(store):
    assert tuning.choice("f", MODEL, b"s") is None
    assert tuning.keep("f", MODEL, b"s", {"tile": 64, "split": 3})
    assert tuning.choice("f", MODEL, b"s") == {"tile": "64", "split": "3"}
    for other in (
        ("g", MODEL, b"s"),
        ("f", MODEL._replace(name="GPU2"), b"s"),
        ("f", MODEL._replace(multiprocessors=114), b"s"),
        ("f", MODEL, b"s2"),
    ):
        assert tuning.choice(*other) is None
    assert tuning.keep("f", MODEL, b"s", {"tile": 128})
    assert tuning.choice("f", MODEL, b"s") == {"tile": "128"}


def test_kernels_of_other_gpus_have_choices_of_their_own(store, monkeypatch):
    """With KERNLIB_PORTABLE, on the same GPU."""
    tuning.keep("f", MODEL, b"s", BIG)
    with settings.override(portable=True):
        assert tuning.choice("f", MODEL, b"s") is None
        tuning.keep("f", MODEL, b"s", SMALL)
        assert tuning.choice("f", MODEL, b"s") == {"tile": "64"}
    assert tuning.choice("f", MODEL, b"s") == {"tile": "128"}


def damaged(key):
    good = entry.pack(key, entry.Entry("f", b"", {"tile": "64"}))
    return {
        "empty": b"",
        "cut": good[:-1],
        "flipped": good[:-1] + b"5",
        "of another key": entry.pack(bytes(32), entry.Entry("f", b"", {"tile": "64"})),
        "of another family": entry.pack(key, entry.Entry("g", b"", {"tile": "64"})),
        "a kernel": entry.pack(key, entry.Entry("f", b"cubin", {"tile": "64"})),
        "no choice": entry.pack(key, entry.Entry("f", b"", {})),
    }


@pytest.mark.parametrize("damage", damaged(bytes(32)))
def test_whatever_is_odd_reads_as_nothing(store, damage, monkeypatch):
    keys, put = [], store.put_tuning
    monkeypatch.setattr(store, "put_tuning", lambda key, _: keys.append(key) or True)
    tuning.keep("f", MODEL, b"s", SMALL)
    put(keys[0], damaged(keys[0])[damage])
    assert tuning.choice("f", MODEL, b"s") is None


def test_the_store_that_is_used_keeps_choices_for_other_processes():
    assert tuning.keep("test_tune", MODEL, b"s", SMALL)
    code = "from kernlib.jit import tuning\nprint(tuning.choice('test_tune', ('GPU', 132), b's'))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout.strip() == "{'tile': '64'}", done.stderr


def test_devices_of_one_model_share_choices(monkeypatch, gpus):
    asked = []
    ask = torch.cuda.get_device_properties
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: (asked.append(index), ask(index))[1]
    )
    assert devices.model(0) == devices.model(0) == ("GPU 0", 132)
    assert devices.model(1) == ("GPU 1", 84)
    assert asked == [0, 1]


# What a call makes of it.


CALLS = {  # what a choice for the first call must not depend on, and what it must
    "again": ({}, True),
    "another place of the diagonal": ({"row_offset": 5}, True),
    "another number": ({"bandwidth": 3.0}, True),
    "another size": ({"a": on_gpu(3001, 64)}, False),
    "another layout": ({"a": on_gpu(64, 3000).T}, False),
    "another dtype": ({"a": on_gpu(3000, 64).double(), "b": on_gpu(2000, 64).double()}, False),
    "another device": (
        {"a": on_gpu(3000, 64, kind=OnSecondGpu), "b": on_gpu(2000, 64, kind=OnSecondGpu)},
        False,
    ),
    "another descriptor": ({"descriptor": kl.laplace_l2(direct=True)}, False),
    "accumulating": ({"accumulate": True}, False),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_choice_is_for_calls_of_the_same_speed(gpus, monkeypatch, case):
    changes, shared = CALLS[case]
    call = {"descriptor": LAPLACE, "a": on_gpu(3000, 64), "b": on_gpu(2000, 64)}
    options = {"bandwidth": 2.0}
    gpus.cost = slower(128)
    kl.tune(*call.values(), **options)
    asked = []
    real = tuning.choice
    monkeypatch.setattr(tuning, "choice", lambda *k: (asked.append(real(*k)), real(*k))[1])
    call |= {name: value for name, value in changes.items() if name in call}
    options |= {name: value for name, value in changes.items() if name not in call}
    a, b = call["a"], call["b"]
    out = on_gpu(a.shape[0], b.shape[0], kind=type(a), dtype=a.dtype)
    kl.run_kernel(call["descriptor"], a, b, out=out, **options)
    if case == "another dtype":
        assert asked == []  # doubles have one kernel, and nobody to ask
    else:
        assert asked == [{"tile": "64"} if shared else None]
        assert ("tile=64 " in gpus.launches[-1].what) == shared


def test_only_a_new_signature_asks_for_a_choice(gpus, monkeypatch):
    asked = []
    monkeypatch.setattr(tuning, "choice", lambda *key: asked.append(key))
    a, b = on_gpu(3000, 64), on_gpu(2000, 64)
    out = on_gpu(3000, 2000)
    for _ in range(5):
        grid(gpus, a, b, out=out)
    assert len(asked) == 1
    grid(gpus, on_gpu(60, 64), on_gpu(5000, 64))  # thin: one kernel
    assert len(asked) == 1


OUTDATED = [{}, {"tile": "96"}, {"tile": "128", "split": "2"}, {"shape": "64"}, {"tile": "12 8"}]


@pytest.mark.parametrize("choice", OUTDATED)
def test_a_choice_that_is_not_known_is_passed_over(gpus, monkeypatch, choice):
    a, b = on_gpu(3000, 64), on_gpu(2000, 64)
    untuned = grid(gpus, a, b)
    forget_plans()
    monkeypatch.setattr(tuning, "choice", lambda *key: choice)
    assert grid(gpus, a, b) == untuned == (24 * 16, 1)


# tune.


@pytest.mark.parametrize("tile, blocks", [(128, 24 * 16), (64, 47 * 32)])
def test_the_fastest_is_kept_and_used_by_the_next_call(gpus, tile, blocks):
    a, b = on_gpu(3000, 64), on_gpu(2000, 64)
    assert grid(gpus, a, b) == (24 * 16, 1)
    gpus.cost = slower(64 if tile == 128 else 128)
    found = kl.tune(L1, a, b)
    assert found.winner == {"tile": tile} and found.kept
    assert [timing.choice for timing in found.timings] == [BIG, SMALL]
    assert [timing.milliseconds for timing in found.timings] == pytest.approx(
        [0.1, 0.2] if tile == 128 else [0.2, 0.1]
    )
    assert grid(gpus, a, b) == (blocks, 1)
    forget_plans()
    assert grid(gpus, a, b) == (blocks, 1)
    assert grid(gpus, a, on_gpu(2001, 64)) == (24 * 16, 1)


def test_meta_tensors_prepare_the_tuned_kernel(gpus):
    a, b = on_gpu(3000, 64), on_gpu(2000, 64)
    gpus.cost = slower(128)
    kl.tune(L1, a, b)
    meta = [torch.empty(t.shape, device="meta") for t in (a, b)]
    (spec,) = pairwise_ahead.specs(L1, "sm_90a", meta, {}, 0)
    assert "tile=64 " in spec.description
    spec, *_ = pairwise_ahead.specs(L1, "sm_90a", meta, {})  # of some GPUs the other one too
    assert "tile=128 " in spec.description


def test_candidates_take_turns_in_batches_that_events_can_time(gpus):
    a, b = on_gpu(3000, 64), on_gpu(2000, 64)
    kl.tune(L1, a, b)  # 1 ms a launch
    tiles = [launched.what.partition("tile=")[2].split()[0] for launched in gpus.launches]
    turns = [tile for i, tile in enumerate(tiles) if i == 0 or tiles[i - 1] != tile]
    assert turns[-2 * tuner.ROUNDS :] == ["128", "64"] * tuner.ROUNDS
    assert tiles.count("128") == tiles.count("64")
    batches = len(gpus.launches) / 2 / tuner.ROUNDS
    assert batches >= tuner.BATCH_MS
    assert all(launched.grid[0] in (24 * 16, 47 * 32) for launched in gpus.launches)


@pytest.mark.parametrize("cost, most", [(0.0, 40_000), (0.003, 40_000), (2000.0, 20), (9000.0, 8)])
def test_the_time_of_tuning_is_bounded(gpus, cost, most):
    gpus.cost = lambda launched: cost
    found = kl.tune(L1, on_gpu(3000, 64), on_gpu(2000, 64))
    assert len(gpus.launches) <= most
    assert [timing.milliseconds for timing in found.timings] == pytest.approx([cost, cost])


def test_one_slow_batch_does_not_decide(gpus):
    def cost(launched):
        hiccup = len(gpus.launches) in (20, 21)
        return 50.0 if hiccup else slower(64)(launched)

    gpus.cost = cost
    assert kl.tune(L1, on_gpu(3000, 64), on_gpu(2000, 64)).winner == BIG


@pytest.mark.parametrize("layout", [lambda t: t, lambda t: t.T.contiguous().T, lambda t: t[:, 1:]])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_callers_output_is_left_alone(gpus, monkeypatch, layout, accumulate):
    a, b = on_gpu(300, 64), on_gpu(200, 64)
    out = layout(on_gpu(300, 201)).as_subclass(OnGpu)
    b = on_gpu(out.shape[1], 64)
    outputs, strides = [], []
    real = Plan.launch

    def noted(plan, pointers, numbers=None):
        outputs.append(pointers[2])
        return real(plan, pointers, numbers)

    new = OnGpu.new_empty_strided

    def noted_new(like, *layout, **options):
        strides.append(layout)
        return new(like, *layout, **options)

    monkeypatch.setattr(OnGpu, "new_empty_strided", noted_new)
    monkeypatch.setattr(Plan, "launch", noted)
    version = out._version
    kl.tune(L1, a, b, out=out, accumulate=accumulate)
    assert len(set(outputs)) == 1 == len(strides)
    assert out.data_ptr() not in outputs and out._version == version
    assert strides == [(out.shape, out.stride())]


def test_a_transposed_output_swaps_the_inputs_of_a_trial(gpus, monkeypatch):
    given = []
    monkeypatch.setattr(Plan, "launch", lambda plan, pointers, _: given.append(pointers[:2]))
    monkeypatch.setattr(tuner, "measure", lambda launches, *_: [1.0 for _ in launches])
    a, b = on_gpu(800, 64), on_gpu(600, 64)
    kl.tune(L1, a, b)
    kl.tune(L1, a, b, out=on_gpu(600, 800).T)
    straight = (a.data_ptr(), b.data_ptr())
    assert given == [straight, straight, straight[::-1], straight[::-1]]
    given.clear()
    a, b = on_gpu(300, 64), on_gpu(200, 64)
    kl.tune(L1, a, b, out=on_gpu(200, 300).T)
    straight = (a.data_ptr(), b.data_ptr())  # as the kernel of few pairs takes any output
    assert given == [straight, straight[::-1], straight[::-1]]


def test_numbers_reach_the_trial(gpus, monkeypatch):
    numbers = []
    real = Plan.launch
    monkeypatch.setattr(Plan, "launch", lambda plan, p, n: (numbers.append(n), real(plan, p, n))[1])
    width = on_gpu(1, dtype=torch.float64)
    kl.tune(LAPLACE, on_gpu(300, 64), on_gpu(200, 64), bandwidth=2.5, epsilon=width)
    slot = checks.slots(LAPLACE)
    assert {n[slot["bandwidth"]] for n in numbers} == {2.5}
    assert all(n[slot["epsilon"] + 1] not in (0, width.data_ptr()) for n in numbers)  # as float32


def test_few_pairs_are_tuned_to_the_kernel_of_theirs_or_a_tile(gpus, store):
    """A call that takes a tile by rule takes what was faster, from then on."""
    a, b = on_gpu(500, 9), on_gpu(500, 9)
    assert grid(gpus, a, b) == (64, 1)
    gpus.cost = lambda launched: 0.1 if "few pairs" in launched.what else 0.2
    found = kl.tune(L1, a, b)
    assert [timing.choice for timing in found.timings] == [{"kind": "few"}, BIG, SMALL]
    assert found.kept and found.winner == {"kind": "few"}
    assert grid(gpus, a, b) == (-(-125 * 125 // 8), 1)


def test_with_one_candidate_there_is_nothing_to_keep(gpus, store):
    found = kl.tune(L1, on_gpu(30, 64), on_gpu(9000, 64))
    assert [timing.choice for timing in found.timings] == [SMALL]
    assert found.winner == SMALL and not found.kept
    assert "one kernel for this call, tile=64" in str(found)
    assert store.info()["tuning"] == 0


def test_an_output_without_elements_has_nothing_to_time(gpus, store):
    found = kl.tune(L1, on_gpu(0, 64), on_gpu(2000, 64))
    assert found.timings == () and found.winner is None and not found.kept
    assert str(found).splitlines() == [
        f"{L1.describe()} on GPU 0",
        "The output has no elements, so nothing was timed and nothing kept.",
    ]
    assert gpus.launches == [] and store.info()["tuning"] == 0


def test_a_store_that_cannot_keep_is_said(gpus, store, monkeypatch):
    monkeypatch.setattr(MemoryStore, "put_tuning", lambda *given: False)
    gpus.cost = slower(128)
    found = kl.tune(L1, on_gpu(800, 64), on_gpu(600, 64))
    assert not found.kept and found.winner == SMALL
    assert "cannot keep it" in str(found)


def test_the_device_of_the_tensors_is_tuned(gpus):
    found = kl.tune(L1, *(on_gpu(3000, 64, kind=OnSecondGpu) for _ in range(2)))
    assert found.gpu == "GPU 1"
    assert {launched.device for launched in gpus.launches} == {1}
    assert {made.arch for made in gpus.builds} == {"sm_86"}
    assert gpus.entered == [0]


def test_candidates_are_compiled_by_worker_threads(gpus):
    kl.tune(L1, on_gpu(300, 64), on_gpu(200, 64))
    assert threading.current_thread() not in [made.thread for made in gpus.builds[:2]]
    assert {made.thread for made in gpus.loads} == {threading.current_thread()}


def test_nothing_is_tuned_during_a_capture(gpus):
    gpus.capturing = True
    with pytest.raises(CaptureError, match="tune before the capture"):
        kl.tune(L1, on_gpu(300, 64), on_gpu(200, 64))
    assert gpus.builds == [] and gpus.launches == []


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_on_no_gpu_are_refused(device):
    x = torch.empty(3, 2, device=device)
    with pytest.raises(UnsupportedError, match=rf"on {device}; move the tensors to a CUDA device"):
        kl.tune(L1, x, x)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({}, ValueError, "needs bandwidth"),
        ({"bandwidth": -1.0}, ValueError, "bandwidth must be greater than 0"),
        ({"bandwidth": 1.0, "out": on_gpu(2, 2)}, ValueError, "out must have shape"),
        ({"bandwidth": 1.0, "tile": 64}, TypeError, "tile is no argument"),
        ({"bandwidth": 1.0, "accumulate": True}, ValueError, "adds to out, and no out"),
        ({"bandwidth": 1.0, "reduction": "kernel_sum"}, TypeError, "reduction is no argument of"),
    ],
)
def test_tune_refuses_what_run_kernel_refuses(gpus, arguments, error, message):
    with pytest.raises(error, match=message):
        kl.tune(LAPLACE, on_gpu(300, 4), on_gpu(300, 4), **arguments)
    with pytest.raises(error, match=message):
        kl.run_kernel(LAPLACE, on_gpu(300, 4), on_gpu(300, 4), **arguments)
    with pytest.raises(TypeError, match="descriptor must be a kernlib descriptor"):
        kl.tune("laplace", on_gpu(3, 4), on_gpu(3, 4))
    assert gpus.launches == []


# What a person sees.


def test_the_result_reads_as_a_table(gpus):
    gpus.cost = slower(64)
    text = str(kl.tune(L1, on_gpu(3000, 64), on_gpu(2000, 64)))
    lines = text.splitlines()
    assert lines[0] == f"{L1.describe()} on GPU 0"
    (row,) = (line for line in lines if "tile=128" in line and "0.1000" in line)
    assert row.split("│")[3:6] == ["       100 ", "        67584 ", "      2 "]
    assert lines[-1] == "Fastest is tile=128: kept for this call on every GPU 0."
    assert max(map(len, lines)) <= 100


def test_progress_and_table_go_to_stderr(gpus, capsys, monkeypatch):
    monkeypatch.setattr("kernlib.progress.clock", lambda: 0.0)
    a, b = on_gpu(3000, 64), on_gpu(2000, 64)
    kl.tune(L1, a, b, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in ("compiling", "warming up", "timing", "14/14", "registers", "Fastest is"):
        assert part in shown.err
    kl.tune(L1, a, b)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    kl.tune(L1, a, b, progress=False)
    assert capsys.readouterr() == ("", "")


def test_what_nvrtc_did_not_say_is_a_question_mark(gpus, monkeypatch):
    made = entry.Entry("pairwise", b"", {"registers": "?"})
    monkeypatch.setattr(service, "build", lambda spec, arch: made)
    found = kl.tune(L1, on_gpu(300, 64), on_gpu(200, 64))
    timing = found.timings[0]
    assert (timing.registers, timing.shared_bytes, timing.blocks) == (None, None, None)
    assert "?" in str(found)


def test_the_module_does_not_take_the_functions_name():
    code = "import kernlib.tuner, kernlib; import kernlib.tuner; print(callable(kernlib.tune))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout.strip() == "True", done.stderr


@given(st.dictionaries(st.sampled_from(["tile", "split"]), st.text(max_size=4)))
def test_no_record_makes_lowering_fail(choice):
    x = torch.empty(3000, 64, device="meta")
    request = Request(L1, x, x, None, False, 0, 0, {})
    problem, strides = problem_of(request, checks.check_call(*request))
    found = lowering.lower(L1, problem, "sm_90a", 132, strides, "fp32", choice)
    tile = 64 if choice == {"tile": "64"} else 128
    assert f"tile={tile} " in found.specs[0].description
