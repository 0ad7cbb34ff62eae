"""Products with d = 1 that torch computes on a GPU, as rules have it: with GPUs that exist only by
name, whose lowering leaves to torch whatever it may compute."""

import pytest
import torch

import kernlib as kl
from kernlib import ahead, events
from kernlib.families.kronecker_sparse import operation as primitives
from kernlib.families.kronecker_sparse import plans, reference
from kernlib.families.kronecker_sparse.lowering import by_torch
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.families.kronecker_sparse.operation import calls
from kernlib.jit import tuning
from tests.families.kronecker_sparse import fake_kernels
from tests.families.kronecker_sparse.fake_kernels import gpu, host
from tests.support import fakes
from tests.support.fakes import OnSecondGpu, on_gpu

F16 = torch.float16
PATTERNS = ((3, 5, 7, 1), (1, 9, 4, 1))
PATTERN = A, B, C, _ = PATTERNS[0]
both_patterns = pytest.mark.parametrize("pattern", PATTERNS, ids=str)


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    fakes.forget()
    torch.set_float32_matmul_precision("highest")
    made = fake_kernels.install(monkeypatch)
    kernels = made.lowering.lower

    def lower(epilogue, problem, arch, count, choice=None, torch_may=False):
        is_torchs = torch_may and (arch, count) == by_torch.GPU and by_torch.takes(problem)
        if is_torchs and choice is None:
            return None
        return kernels(epilogue, problem, arch, count, choice)

    monkeypatch.setattr(lowering, "lower", lower)
    yield made
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    fakes.forget()


def given(pattern=PATTERN, batch=(6,), dtype=torch.float32, **options):
    """A descriptor, and the operands on a GPU."""
    descriptor = kl.KroneckerSparse(*pattern, **options)
    x = gpu(*batch, descriptor.in_features, dtype=dtype)
    return descriptor, x, gpu(*pattern, dtype=dtype)


def check(found, descriptor, x, weight) -> None:
    wanted = reference.kronecker_sparse(descriptor, host(x).double(), host(weight).double())
    found = host(found)
    assert found.shape == wanted.shape and found.dtype == x.dtype
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=0)  # of quarters


def is_torchs(*request, out=None) -> bool:
    descriptor, *operands = request
    return calls.find(descriptor, tuple(operands), out, {}).compute is not None


@both_patterns
@pytest.mark.parametrize("batch", [(), (1,), (6,), (2, 3), (2, 1, 3), (1, 1)], ids=str)
def test_values_without_a_kernel(pattern, batch, gpus):
    request = given(pattern, batch)
    for _ in range(2):
        found = kl.run_kernel(*request)
        check(found, *request)
        assert found.is_contiguous()
    assert is_torchs(*request) and not gpus.loads and not gpus.launches


@both_patterns
def test_rows_that_lie_apart_are_read_and_written_where_they_are(pattern, gpus):
    descriptor, _, weight = given(pattern)
    for batch in ((6,), (2, 3), (1,), ()):
        sizes = [(*batch, n) for n in (descriptor.in_features, descriptor.out_features)]
        wide = [gpu(*shape[:-1], shape[-1] + 3) for shape in sizes]
        inside, out = (t[..., 2:-1] for t in wide)
        before = host(wide[1]).clone()
        kl.prepare(descriptor, inside, weight, out=out)
        assert torch.equal(host(wide[1]), before)
        assert is_torchs(descriptor, inside, weight, out=out)
        version = out.fill_(torch.nan)._version
        assert kl.run_kernel(descriptor, inside, weight, out=out) is out
        assert out._version > version
        check(out, descriptor, inside, weight)
        assert torch.equal(host(wide[1])[..., :2], before[..., :2])
        assert torch.equal(host(wide[1])[..., -1], before[..., -1])
    assert not gpus.launches


def test_out_must_not_share_memory_with_an_operand(gpus):
    descriptor, _, weight = given()
    memory = gpu(9, A * C + A * B)
    x = memory[:4, : A * C]
    for _ in range(2):
        with pytest.raises(ValueError, match="out shares memory with x;"):
            kl.run_kernel(descriptor, x, weight, out=memory[2:6, : A * B])
        out = memory[:4, A * C :]
        check(kl.run_kernel(descriptor, x, weight, out=out), descriptor, x, weight)
    assert not gpus.launches


def test_what_torch_must_not_compute_is_kernels(gpus):
    """Epilogues, other dtypes and precisions, batches that take a copy, and the batch last."""
    descriptor, x, weight = given()
    apart = gpu(2, 4, A * C)[:, :3]  # whose batch is not of one stride
    biased = descriptor.replace(epilogue=kl.Bias())
    last = descriptor.replace(batch_last=True)
    tf32, lanes = descriptor.replace(precision="tf32"), given((2, 3, 5, 4))
    cases = (
        (biased, (x, weight), {"bias": gpu(A * B)}),
        (descriptor, (x.half(), weight.half()), {}),
        (descriptor, (x.bfloat16(), weight.bfloat16()), {}),
        (tf32, (x, weight), {}),
        (descriptor, (apart, weight), {}),
        (descriptor, (x, weight), {"out": gpu(A * B, 6).mT}),
        (descriptor, (x[:1].expand(6, -1), weight), {}),
        (descriptor, (x, weight.transpose(1, 2).contiguous().transpose(1, 2)), {}),
        (last, (gpu(A * C, 6), weight), {}),
        (lanes[0], lanes[1:], {}),
    )
    for index, (each, operands, rest) in enumerate(cases, 1):
        kl.run_kernel(each, *operands, **rest)
        assert len(gpus.launches) == 2 * index, each
    kl.run_kernel(descriptor.replace(precision="fp32"), x, weight)
    assert len(gpus.launches) == 2 * len(cases)


@pytest.mark.parametrize("precision", [None, "fp32"])
def test_float32_is_never_in_tf32_without_leave(precision, gpus):
    """A plan by torch is for where torch's setting is "highest"; else kernels compute."""
    request = given(precision=precision)
    for _ in range(2):
        gpus.launches.clear()
        check(kl.run_kernel(*request), *request)
        assert not gpus.launches
        torch.set_float32_matmul_precision("high")
        check(kl.run_kernel(*request), *request)
        assert len(gpus.launches) == 2
        assert gpus.lowering.problems[-1][1].precision == ("fp32" if precision else "tf32")
        torch.set_float32_matmul_precision("highest")


def test_deterministic_algorithms_are_kernels(gpus):
    """As torch refuses cuBLAS's without an environment for them."""
    request = given()
    for _ in range(2):
        kl.run_kernel(*request)
        assert not gpus.launches
        torch.use_deterministic_algorithms(True)
        check(kl.run_kernel(*request), *request)
        assert len(gpus.launches) == 2
        gpus.launches.clear()
        torch.use_deterministic_algorithms(False)


def test_other_gpus_are_kernels(gpus):
    descriptor, x, weight = given()
    x, weight = (t.as_subclass(OnSecondGpu) for t in (x, weight))
    check(kl.run_kernel(descriptor, x, weight), descriptor, x, weight)
    assert [launch.device for launch in gpus.launches] == [1, 1]


def test_autocast_does_not_round_the_products(gpus, monkeypatch):
    """Of a gradient that is taken inside of it; here by the autocast of the CPU that computes."""
    _, x, weight = given()
    x = gpu(6, A * C) + 2**-12
    monkeypatch.setattr(plans, "no_autocast", lambda x: torch.autocast("cpu", enabled=False))
    with torch.autocast("cpu", torch.bfloat16):
        found = primitives.product(x, weight, None, False, None, False)
    check(found, kl.KroneckerSparse(*PATTERN), x, weight)
    assert not gpus.launches


def test_tensors_of_inference_mode(gpus):
    descriptor, x, weight = given()
    outside = on_gpu(6, A * B)
    with torch.inference_mode():
        read = gpu(6, A * C)
        found = kl.run_kernel(descriptor, x, weight)
        check(found, descriptor, x, weight)
        for out in (found, outside):
            assert kl.run_kernel(descriptor, read, weight, out=out) is out
            check(out, descriptor, read, weight)
    assert found.is_inference() and read.is_inference()
    again = kl.run_kernel(descriptor, read, weight)
    check(again, descriptor, read, weight)
    assert not again.is_inference() and not gpus.launches
    with pytest.raises((ValueError, RuntimeError), match=r"(?i)inference ?mode"):
        kl.run_kernel(descriptor, x, weight, out=found)


def test_it_is_said_that_torch_computes(gpus, capsys):
    request, found = given(), []
    stop = events.subscribe(found.append)
    try:
        for _ in range(2):
            kl.run_kernel(*request)
    finally:
        stop()
    said = "kronecker_sparse on cuda:0: no kernel, computed by torch"
    assert [(event.name, event.description) for event in found] == [("torch", said)] * 2
    kl.run_kernel(*request, debug=True)
    assert said in capsys.readouterr().err


def test_prepare_makes_the_plan_and_loads_what_stands_in_for_it(gpus):
    """For streams that capture on threads without that plan."""
    request, heard = given(), []
    assert not ahead.prepared(*request)
    stop = events.subscribe(lambda event: heard.append(event.name))
    try:
        kl.prepare(*request)
    finally:
        stop()
    assert heard.count("torch") == 1 and not gpus.launches and len(gpus.loads) == 2
    assert ahead.prepared(*request) and is_torchs(*request)
    gpus.capturing = True
    check(kl.run_kernel(*request), *request)
    fakes.forget_plans()  # as on another thread
    with pytest.raises(AssertionError):  # a launch, as gpus have it that do not capture
        kl.run_kernel(*request)
    assert not is_torchs(*request)


def test_a_capture_asks_no_cublas_that_nobody_prepared(gpus):
    gpus.capturing = True
    with pytest.raises(kl.CaptureError, match=r"kernlib\.prepare"):
        kl.run_kernel(*given())


def test_a_recorded_call_is_prepared_and_captured(gpus):
    """Kernels are its gradients', and a prepared one launches nothing while a stream captures."""
    descriptor, x, weight = given()
    request = descriptor, x.requires_grad_(), weight.requires_grad_()
    kl.prepare(*request)
    assert [p.depth for _, p in gpus.lowering.problems[-2:]] == [B, 6]
    loads, heard = len(gpus.loads), []
    gpus.capturing = True
    stop = events.subscribe(lambda event: heard.append(event.name))
    try:
        kl.prepare(*request)
    finally:
        stop()
    assert len(gpus.loads) == loads and "torch" not in heard


def test_meta_tensors_stand_for_those_of_the_gpu(gpus):
    shapes = ((6, A * C), PATTERN)
    kl.prepare(given()[0], *(torch.empty(shape, device="meta") for shape in shapes))
    assert len(gpus.loads) == 2
    request = given()
    check(kl.run_kernel(*request), *request)
    assert is_torchs(*request) and len(gpus.loads) == 2


def test_a_gradient_by_x_may_be_torchs(gpus):
    """Of a weight whose transpose is contiguous; that of a weight is kernels'."""
    descriptor = kl.KroneckerSparse(*PATTERN)
    weight = gpu(A, C, B, 1).transpose(1, 2)
    grad = gpu(6, A * B)
    found = primitives.product(grad, weight.transpose(1, 2), None, False, None, False)
    check(found, descriptor.transposed(), grad, weight.transpose(1, 2))
    assert not gpus.launches
    for last in (False, True):  # with one block, batch last, a product's strides
        sides = [(n, 6) if last else (6, n) for n in (9, 4)]
        gradient = primitives.weight_gradient(*(gpu(*s) for s in sides), (1, 9, 4, 1), last)
        assert gradient.shape == (1, 9, 4, 1)
    assert len(gpus.launches) == 4


def test_a_recorded_result_may_be_written_in_place(gpus, monkeypatch):
    """Which autograd forbids of views that are made inside a function of its own. Plain CPU tensors
    are taken for those of a GPU, so that autograd hands on what it has."""
    monkeypatch.setitem(fakes.MODELS, -1, fakes.MODELS[0])
    monkeypatch.setattr("kernlib.runtime.products.is_on_gpu", lambda device: True)
    descriptor, x, weight = given()
    x, weight = host(x).requires_grad_(), host(weight).requires_grad_()
    y = kl.run_kernel(descriptor, x, weight)
    check(y.detach(), descriptor, x.detach(), weight.detach())
    assert not gpus.launches and not y._is_view()
    grad = torch.randn(y.shape)
    found = torch.autograd.grad(y.mul_(2), (x, weight), grad)
    wanted = reference.kronecker_sparse(descriptor, x, weight)
    wanted = torch.autograd.grad(wanted, (x, weight), 2 * grad)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_chain_has_factors_of_both_kinds(gpus):
    first, second = kl.KroneckerSparse(*PATTERN), kl.KroneckerSparse(3, 4, 5, 1, epilogue=kl.Relu())
    chain = kl.KroneckerSparseChain((first, second))
    x, weights = gpu(6, A * C), (gpu(*PATTERN), gpu(3, 4, 5, 1))
    found = kl.run_kernel(chain, x, *weights)
    wanted = reference.chain(chain, host(x), tuple(map(host, weights)), {})
    torch.testing.assert_close(host(found), wanted)
    assert len(gpus.launches) == 2


def test_a_tuned_kernel_goes_first(gpus, monkeypatch):
    kept = {}
    monkeypatch.setattr(tuning, "keep", lambda f, m, s, c: kept.update({(f, m, s): c}) or True)
    monkeypatch.setattr(tuning, "choice", lambda f, m, s: kept.get((f, m, s)))
    request = given()
    kl.run_kernel(*request)
    assert is_torchs(*request)
    found = kl.tune(*request)
    assert [timing.choice for timing in found.timings] == [{"tile": 64}, {"tile": 32}]
    gpus.launches.clear()
    check(kl.run_kernel(*request), *request)
    assert len(gpus.launches) == 2 and not is_torchs(*request)


def test_a_kept_choice_goes_first_where_there_is_one_kernel(gpus, monkeypatch):
    """Which is looked for where torch may compute the call, and nowhere else."""
    asked = []
    monkeypatch.setattr(lowering, "candidates", lambda problem, arch: [{"tile": 64}])
    monkeypatch.setattr(tuning, "choice", lambda *key: asked.append(key) or {"tile": "64"})
    request = given()
    check(kl.run_kernel(*request), *request)
    assert len(asked) == 1 and len(gpus.launches) == 2 and not is_torchs(*request)
    kl.run_kernel(*given(dtype=F16))
    assert len(asked) == 1 and len(gpus.launches) == 4


def test_no_rows_and_no_launches(gpus):
    descriptor, x, weight = given(batch=(0,))
    assert kl.run_kernel(descriptor, x, weight).shape == (0, A * B)
    assert not gpus.loads and not gpus.launches
