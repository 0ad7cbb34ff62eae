"""Plans of Kronecker-sparse calls, on GPUs that exist only by name and whose kernels compute on the
host what a problem says."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernlib as kl
from kernlib import ahead
from kernlib.errors import CaptureError
from kernlib.families.kronecker_sparse import operation as primitives
from kernlib.families.kronecker_sparse import reference
from kernlib.families.kronecker_sparse.operation import calls
from kernlib.jit import tuning
from kernlib.runtime import operation, products
from tests.families.kronecker_sparse import fake_kernels
from tests.families.kronecker_sparse.fake_kernels import TYPES, gpu, host
from tests.support import fakes, torch_settings
from tests.support.fakes import OnGpu, OnSecondGpu, on_gpu

PATTERN = (2, 3, 5, 4)
A, B, C, D = PATTERN
PATTERNS = [PATTERN, (1, 1, 1, 1), (1, 7, 3, 1), (3, 1, 4, 2), (2, 4, 1, 3), (4, 2, 2, 1)]
EPILOGUES = {
    "none": (),
    "bias": (kl.Bias(),),
    "all": (kl.Scale(), kl.Bias(), kl.Gelu(), kl.Bias("late"), kl.Scale("gain")),
}


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    fakes.forget()
    yield fake_kernels.install(monkeypatch)
    fakes.forget()


def values_of(epilogue, features, dtype=torch.float32):
    made = {}
    for part in epilogue:
        for name in part.parameters:
            made[name] = gpu(features, dtype=dtype) if name in part.vectors else 0.75
    return made


def expected(descriptor, x, weight, parameters):
    plain = {k: host(v) if isinstance(v, torch.Tensor) else v for k, v in parameters.items()}
    return reference.kronecker_sparse(descriptor, host(x), host(weight), plain)


@pytest.mark.parametrize("meta", [False, True])
def test_a_chain_under_autocast_is_prepared_as_it_is_cast(gpus, meta):
    chain = kl.KroneckerSparseChain([kl.KroneckerSparse(*PATTERN)])
    dtypes = torch.float32, torch.bfloat16
    x, weight = gpu(9, A * C * D, dtype=dtypes[0]), gpu(*PATTERN, dtype=dtypes[1])
    listed = (torch.empty_like(t, device="meta") for t in (x, weight)) if meta else (x, weight)
    with torch.autocast("cuda", torch.float16):
        kl.prepare(chain, *listed)
        loaded = len(gpus.loads)
        kl.run_kernel(chain, x, weight)
    assert loaded == len(gpus.loads) and "float16" in gpus.loads[0].what


TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_call_is_its_problem(pattern, batch_last, dtype, epilogue, gpus):
    descriptor = kl.KroneckerSparse(*pattern, batch_last=batch_last, epilogue=EPILOGUES[epilogue])
    shape = (descriptor.in_features, 6) if batch_last else (6, descriptor.in_features)
    x, weight = gpu(*shape, dtype=dtype), gpu(*pattern, dtype=dtype)
    values = values_of(descriptor.epilogue, descriptor.out_features, dtype)
    found = kl.run_kernel(descriptor, x, weight, **values)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        host(found), expected(descriptor, x, weight, values), rtol=tolerance, atol=tolerance
    )
    assert len(gpus.launches) == 2 and found.is_contiguous() and found.dtype == dtype


def spread(x, batch_last):
    """The same values in other memory."""
    yield "turned", x.mT.contiguous().mT
    wide = torch.zeros([n + 3 for n in x.shape]).as_subclass(OnGpu)
    part = wide[tuple(slice(1, n + 1) for n in x.shape)]
    part.copy_(x)
    yield "part", part
    odd = torch.zeros(x.numel() + 1)[1:].as_subclass(OnGpu).view(x.shape)
    yield "unaligned", odd.copy_(x)
    double = torch.zeros([2 * n for n in x.shape]).as_subclass(OnGpu)
    yield "every other", double[tuple(slice(None, None, 2) for _ in x.shape)].copy_(x)
    backwards = x.permute(*reversed(range(x.dim()))).contiguous()
    yield "backwards", backwards.permute(*reversed(range(x.dim())))


BATCHES = [(), (1,), (6,), (2, 3), (2, 1, 3), (1, 1), (0,), (2, 0)]


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("batch", BATCHES)
def test_strides_and_further_dimensions_are_those_of_the_tensor(batch, batch_last, gpus):
    descriptor = kl.KroneckerSparse(*PATTERN, batch_last=batch_last, epilogue=kl.Bias())
    shape = (A * C * D, *batch) if batch_last else (*batch, A * C * D)
    x, weight, bias = gpu(*shape), gpu(*PATTERN), gpu(A * B * D)
    wanted = expected(descriptor, x, weight, {"bias": bias})
    cases = [("itself", x), *(spread(x, batch_last) if x.dim() > 1 else ())]
    for name, other in cases:
        for turned in (weight, weight.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0)):
            assert turned.shape == PATTERN
            found = kl.run_kernel(descriptor, other, turned, bias=bias)
            torch.testing.assert_close(host(found), wanted, msg=name)
    assert bool(gpus.launches) == (0 not in batch)


@pytest.mark.parametrize("batch_last", [False, True])
def test_a_batch_of_one_stride_is_read_where_it_is(batch_last, monkeypatch):
    descriptor = kl.KroneckerSparse(*PATTERN, batch_last=batch_last)
    shape = (A * C * D, 2, 3) if batch_last else (2, 3, A * C * D)
    x, weight = gpu(*shape), gpu(*PATTERN)
    kl.run_kernel(descriptor, x, weight)
    part = gpu(*(n + 1 for n in shape))[tuple(slice(n) for n in shape)]
    kl.run_kernel(descriptor, part, weight)
    whole, apart = (calls.find(descriptor, (each, weight), None, {}) for each in (x, part))
    assert whole.place((x, weight)) == ([x.data_ptr(), weight.data_ptr()], None)
    _, (copied, _) = apart.place((part, weight))
    assert copied.shape == ((A * C * D, 6) if batch_last else (6, A * C * D))


@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("batch_last", [False, True])
def test_the_gradient_of_a_weight_is_its_problem(batch_last, batch, dtype):
    sizes = [(n, *batch) if batch_last else (*batch, n) for n in (A * B * D, A * C * D)]
    grad, x = (gpu(*shape, dtype=dtype) for shape in sizes)
    wanted = reference.weight_gradient(PATTERN, host(grad), host(x), batch_last)
    others = [x, *(t for _, t in spread(x, batch_last))] if dtype.itemsize == 4 and batch else [x]
    for other in others:
        for first in (grad, grad.clone().permute(*reversed(range(grad.dim()))).contiguous()
                      .permute(*reversed(range(grad.dim())))):  # fmt: skip
            found = primitives.weight_gradient(first, other, PATTERN, batch_last)
            tolerance = TOLERANCE[dtype]
            torch.testing.assert_close(host(found), wanted, rtol=tolerance, atol=tolerance)
            assert found.is_contiguous()


def test_scalars_are_numbers_or_stay_on_the_device(gpus):
    epilogue = (kl.Scale(), kl.Bias(), kl.Custom("v * gain + shift", ("gain", "shift")))
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=epilogue)
    x, weight, bias = gpu(6, A * C * D), gpu(*PATTERN), gpu(A * B * D)
    gain = torch.tensor(1.5).as_subclass(OnGpu)
    for scale, shift in ((2, 0.25), (0.5, -1), (3.0, 2.0)):
        given = {"scale": scale, "gain": gain, "shift": shift, "bias": bias[::1]}
        found = kl.run_kernel(descriptor, x, weight, **given)
        torch.testing.assert_close(host(found), expected(descriptor, x, weight, given))
        gain = gain + 1
    with pytest.raises(ValueError, match="shift must be a number, got nan"):
        kl.run_kernel(descriptor, x, weight, scale=1, gain=gain, shift=math.nan, bias=bias)
    with pytest.raises(TypeError, match=r"shift must be .*got '1'"):
        kl.run_kernel(descriptor, x, weight, scale=1, gain=gain, shift="1", bias=bias)
    assert len(gpus.lowering.problems) == 1


def test_a_vector_of_any_stride_is_taken():
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=kl.Bias())
    x, weight, bias = gpu(6, A * C * D), gpu(*PATTERN), gpu(2 * A * B * D)[::2]
    found = kl.run_kernel(descriptor, x, weight, bias=bias)
    torch.testing.assert_close(host(found), expected(descriptor, x, weight, {"bias": bias}))
    expanded = gpu(1).expand(A * B * D)
    found = kl.run_kernel(descriptor, x, weight, bias=expanded)
    torch.testing.assert_close(host(found), expected(descriptor, x, weight, {"bias": expanded}))


def test_the_lazy_negation_of_a_view_is_taken():
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=kl.Bias())
    tensors = [torch.complex(host(gpu(*s)), host(gpu(*s))).conj().imag.as_subclass(OnGpu)
               for s in ((6, A * C * D), PATTERN, (A * B * D,))]  # fmt: skip
    assert all(t.is_neg() for t in tensors)
    x, weight, bias = tensors
    found = kl.run_kernel(descriptor, x, weight, bias=bias)
    torch.testing.assert_close(host(found), expected(descriptor, x, weight, {"bias": bias}))
    grad = primitives.weight_gradient(found, x, PATTERN)
    wanted = reference.weight_gradient(PATTERN, host(found), host(x), False)
    torch.testing.assert_close(host(grad), wanted)


def test_a_chain_runs_its_factors_in_order(gpus):
    first = kl.KroneckerSparse(2, 3, 5, 4, epilogue=kl.Bias("b1"))
    second = kl.KroneckerSparse(3, 2, 8, 1, epilogue=(kl.Bias("b2"), kl.Relu()))
    chain = kl.KroneckerSparseChain((first, second))
    x, weights = gpu(2, 3, 40), (gpu(2, 3, 5, 4), gpu(3, 2, 8, 1))
    values, out = {"b1": gpu(24), "b2": gpu(6)}, on_gpu(2, 3, 6)
    found = kl.run_kernel(chain, x, *weights, out=out, **values)
    assert found is out and len(gpus.launches) == 4
    plain = {name: host(value) for name, value in values.items()}
    wanted = reference.chain(chain, host(x), tuple(map(host, weights)), plain)
    torch.testing.assert_close(host(out), wanted)


# Which plan a call finds.


def call(descriptor, batch=6, dtype=torch.float32, **arguments):
    x = gpu(batch, descriptor.in_features, dtype=dtype)
    return kl.run_kernel(descriptor, x, gpu(*descriptor.pattern, dtype=dtype), **arguments)


def test_the_precision_of_float32_is_read_at_each_call(gpus):
    descriptor = kl.KroneckerSparse(*PATTERN)
    before, seen = torch.get_float32_matmul_precision(), []
    try:
        for setting in ("highest", "high", "medium", "highest"):
            torch.set_float32_matmul_precision(setting)
            call(descriptor)
            call(descriptor.replace(precision="fp32"))
            call(descriptor.replace(precision="bf16"))
            call(descriptor, dtype=torch.float16)
            grad, x = gpu(6, A * B * D), gpu(6, A * C * D)
            primitives.weight_gradient(grad, x, PATTERN)
            seen.append(len(gpus.lowering.problems))
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [5, 7, 7, 7]
    kinds = [(p.dtype, p.precision) for _, p in gpus.lowering.problems]
    single, half = ("float32", "fp32"), ("float16", "fp32")
    loose = ("float32", "tf32")
    assert kinds == [single, single, loose, half, single, loose, loose]


def test_half_types_have_one_precision(gpus):
    for precision in (None, "fp32", "tf32"):
        call(kl.KroneckerSparse(*PATTERN, precision=precision), dtype=torch.float16)
        grad, x = gpu(6, A * B * D, dtype=torch.half), gpu(6, A * C * D, dtype=torch.half)
        primitives.weight_gradient(grad, x, PATTERN, False, precision)
    assert {problem.precision for _, problem in gpus.lowering.problems} == {"fp32"}


@pytest.mark.few(100)
@pytest.mark.parametrize("case", torch_settings.CASES)
def test_every_setting_of_torch_permits_what_it_permits_to_torch(case, gpus):
    """The older settings, the newer, which alone torch's products go by, and both."""
    with torch_settings.torch_permits(case) as rounded:
        call(kl.KroneckerSparse(*PATTERN))
        primitives.weight_gradient(gpu(6, A * B * D), gpu(6, A * C * D), PATTERN)
    wanted = "tf32" if rounded else "fp32"
    assert [problem.precision for _, problem in gpus.lowering.problems] == [wanted] * 2


def test_a_batch_makes_a_plan_and_no_kernel(gpus):
    descriptor = kl.KroneckerSparse(*PATTERN)
    for batch in (1, 2, 3, 127, 129):
        call(descriptor, batch)
    assert len(gpus.lowering.problems) == 5 and len(gpus.loads) == 2


def test_a_tensor_at_another_alignment_has_another_plan(gpus):
    descriptor = kl.KroneckerSparse(*PATTERN)
    memory, weight = gpu(6 * A * C * D + 4), gpu(*PATTERN)
    for offset in range(5):
        kl.run_kernel(descriptor, memory[offset : offset + 6 * A * C * D].view(6, -1), weight)
    found = [problem.left.alignment for _, problem in gpus.lowering.problems]
    assert len(found) == 4 and len(set(found)) == 4


def test_float64_is_computed_by_torch(gpus):
    descriptor = kl.KroneckerSparse(*PATTERN)
    x, weight = gpu(6, A * C * D, dtype=torch.float64), gpu(*PATTERN, dtype=torch.float64)
    found = kl.run_kernel(descriptor, x, weight)
    torch.testing.assert_close(host(found), expected(descriptor, x, weight, {}))
    assert not gpus.launches and not gpus.lowering.problems
    assert calls.find(descriptor, (x, weight), None, {}) is None


# Ahead of calls.


def test_prepare_loads_what_the_call_needs(gpus):
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(), kl.Gelu()))
    x, weight, bias = gpu(6, A * C * D), gpu(*PATTERN), gpu(A * B * D)
    kl.prepare(descriptor, x, weight, bias=bias)
    assert ahead.prepared(descriptor, x, weight, bias=bias)
    loads = len(gpus.loads)
    assert loads == 2 and not gpus.launches
    gpus.capturing = True
    kl.prepare(descriptor, x, weight, bias=bias)
    gpus.capturing = False
    kl.run_kernel(descriptor, x, weight, bias=bias)
    assert len(gpus.loads) == loads


def test_prepare_of_a_recorded_call_loads_its_gradients(gpus):
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(), kl.Gelu()))
    x, weight, bias = (gpu(6, A * C * D), gpu(*PATTERN), gpu(A * B * D))
    for t in (x, weight, bias):
        t.requires_grad_()
    kl.prepare(descriptor, x, weight, bias=bias)
    problems = [(e, (p.rows, p.columns, p.depth)) for e, p in gpus.lowering.problems]
    assert {*problems} == {((kl.Bias(),), (6, B, C)), ((), (6, C, B)), ((), (B, C, 6))}
    loads = len(gpus.loads)
    with torch.no_grad():
        y = primitives.product(x.detach(), weight.detach(), bias.detach(), False, None, False)
        primitives.product(y, weight.detach().transpose(1, 2), None, False, None, False)
        primitives.weight_gradient(y, x.detach(), PATTERN, False, None, False)
    assert len(gpus.loads) == loads
    gpus.capturing = True
    kl.prepare(descriptor, x, weight, bias=bias)


def test_meta_tensors_stand_for_those_of_the_gpu(gpus):
    first, second = kl.KroneckerSparse(2, 3, 5, 4), kl.KroneckerSparse(3, 2, 8, 1)
    chain = kl.KroneckerSparseChain((first, second))
    shapes = ((2, 3, 40), (2, 3, 5, 4), (3, 2, 8, 1))
    meta = [torch.empty(shape, device="meta") for shape in shapes]
    kl.prepare(chain, *meta)
    loads = len(gpus.loads)
    assert loads == 2  # of one kind: patterns and sizes are launch arguments
    gpus.capturing = True
    with pytest.raises(CaptureError, match=r"kernlib\.prepare"):
        kl.run_kernel(chain, *(gpu(*shape, dtype=torch.float16) for shape in shapes))
    found = ahead.specs(chain, "sm_90a", tuple(meta), {})
    assert [spec.entry for spec in found] == ["sum", "end"]


def test_variants_are_those_of_lowering():
    descriptor = kl.KroneckerSparse(*PATTERN)
    chain = kl.KroneckerSparseChain((descriptor, kl.KroneckerSparse(*PATTERN[:1], 2, 3, 4)))
    dtypes = (torch.float32, torch.float16, torch.float64)
    sums = ["sum 'float32' 64", "sum 'float16' 64"]
    casts = [f"kronecker_sparse cast {pair}" for pair in ("float32 float16", "float16 float32")]
    for each, of_masters in ((descriptor, []), (chain, casts)):
        found = ahead.variants(each, "sm_90a", dtypes)
        assert [spec.description for spec in found] == sums + of_masters
    assert ahead.variants(descriptor, "sm_90a", (torch.float64,)) == []
    with pytest.raises(TypeError, match=r"kronecker_sparse has no kernels for torch\.int8"):
        kl.compile(descriptor, dtypes=torch.int8)


def test_tune_times_every_candidate_and_keeps_the_fastest(gpus, monkeypatch):
    gpus.cost = lambda launch: 5.0 if launch.what.endswith("64") else 1.0
    kept = {}
    monkeypatch.setattr(tuning, "keep", lambda f, m, s, c: kept.update({(f, m, s): c}) or True)
    monkeypatch.setattr(tuning, "choice", lambda f, m, s: kept.get((f, m, s)))
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(), kl.Scale()))
    x, weight, bias = gpu(6, A * C * D), gpu(*PATTERN), gpu(A * B * D)
    given = {"bias": bias, "scale": 0.5}
    before = kl.run_kernel(descriptor, x, weight, **given)
    result = kl.tune(descriptor, x, weight, **given)
    assert result.winner == {"tile": 32} and result.kept and len(kept) == 1
    gpus.launches.clear()
    after = kl.run_kernel(descriptor, x, weight, **given)
    assert [each.what.split(" ")[-1] for each in gpus.launches] == ["32", "32"]
    assert torch.equal(host(before), host(after))


def test_what_cannot_be_tuned_says_why():
    descriptor = kl.KroneckerSparse(*PATTERN)
    chain = kl.KroneckerSparseChain((descriptor,))
    x, weight = gpu(6, A * C * D), gpu(*PATTERN)
    with pytest.raises(TypeError, match="tune its factors one at a time"):
        kl.tune(chain, x, weight)
    for bad in ((host(x), host(weight)), (x.double(), weight.double())):
        with pytest.raises(kl.UnsupportedError, match="kernels are timed on the GPU"):
            kl.tune(descriptor, *bad)


# The steady state.


def test_a_call_that_is_known_is_neither_checked_nor_lowered(gpus, monkeypatch):
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=kl.Bias())
    x, weight, bias = gpu(6, A * C * D), gpu(*PATTERN), gpu(A * B * D)
    wanted = host(kl.run_kernel(descriptor, x, weight, bias=bias)).clone()
    grad = host(primitives.weight_gradient(wanted.as_subclass(OnGpu), x, PATTERN)).clone()
    # What every call without a plan asks.
    for module, name in ((operation, "stand_ins"), (products, "is_on_gpu")):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("asked again"))
    equal = kl.KroneckerSparse(*PATTERN, epilogue=kl.Bias())
    assert torch.equal(host(kl.run_kernel(equal, x, weight, bias=bias)), wanted)
    assert torch.equal(
        host(primitives.weight_gradient(wanted.as_subclass(OnGpu), x, PATTERN)), grad
    )


@pytest.mark.parametrize("dtype", TYPES.values(), ids=str)
def test_tensors_of_another_device_are_computed_there(dtype, gpus):
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=kl.Bias())
    tensors = [gpu(*s, dtype=dtype) for s in ((6, A * C * D), PATTERN, (A * B * D,))]
    x, weight, bias = (t.as_subclass(OnSecondGpu) for t in tensors)
    for _ in range(2):
        y = kl.run_kernel(descriptor, x, weight, bias=bias)
        primitives.weight_gradient(
            gpu(6, A * B * D, dtype=dtype).as_subclass(OnSecondGpu), x, PATTERN
        )
    wanted = expected(descriptor, x, weight, {"bias": bias})
    torch.testing.assert_close(host(y), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert [launch.device for launch in gpus.launches] == [1] * 8 and gpus.entered == [0]


def test_events_tell_of_each_launch(gpus):
    descriptor = kl.KroneckerSparse(*PATTERN)
    x, weight, heard = gpu(6, A * C * D), gpu(*PATTERN), []
    kl.run_kernel(descriptor, x, weight)
    stop = kl.events.subscribe(heard.append)
    try:
        kl.run_kernel(descriptor, x, weight)
    finally:
        stop()
    assert [event.name for event in heard] == ["launch"] * 2
    assert [event.description for event in heard] == [each.what for each in gpus.launches[2:]]


def test_results_that_are_held_do_not_share_memory():
    descriptor = kl.KroneckerSparse(*PATTERN)
    x, weight = gpu(6, A * C * D), gpu(*PATTERN)
    wanted = expected(descriptor, x, weight, {})
    found = [kl.run_kernel(descriptor, x * n, weight) for n in (1, 2, 3)]
    for n, y in enumerate(found, 1):
        torch.testing.assert_close(host(y), n * wanted)


def test_parameters_without_memory_find_no_plan(monkeypatch):
    """Whether they are inside a transform or stand for others: a plan would read address 0."""
    monkeypatch.setitem(fakes.MODELS, -1, fakes.MODELS[0])  # as in a recorded call above
    monkeypatch.setattr(products, "is_on_gpu", lambda device: True)
    descriptor = kl.KroneckerSparse(1, 3, 2, 1, epilogue=kl.Bias())
    x, weight, bias = torch.ones(4, 2), torch.ones(1, 3, 2, 1), torch.ones(5, 3)
    found = []

    def look(one):
        found.append(calls.find(descriptor, (x, weight), None, {"bias": one}))
        return one

    kl.run_kernel(descriptor, x, weight, bias=bias[0])
    look(bias[0])
    torch.vmap(look)(bias)
    with FakeTensorMode():
        look(torch.ones(3))
    assert found[0] is not None and found[1:] == [None, None]
