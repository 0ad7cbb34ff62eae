"""Chains of two factors as one kernel, from the call to the last store: on GPUs that exist only by
name, whose kernels the host runs by their text."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernlib as kl
from kernlib import ahead, bundles
from kernlib.families.kronecker_sparse import operation, plans, reference
from kernlib.families.kronecker_sparse.chain import fused
from kernlib.families.kronecker_sparse.chain.operation import planned
from kernlib.runtime import products
from tests.support import fakes
from tests.support.emulation import gpus
from tests.support.emulation.emulator import kernels_of

pytestmark = pytest.mark.emulated

FIRST, LAST = (16, 16, 8, 1), (1, 24, 16, 16)  # 128 features to 384, in tiles of 64 rows
ROWS = 64 * 72  # 72 of 132 multiprocessors have one
TOLERANCE = 3e-4


@pytest.fixture(autouse=True)
def on_host(tmp_path_factory, monkeypatch):
    """The GPUs; ``specs`` are those that were launched."""
    fakes.forget()
    modules = products, operation, plans, fused
    yield gpus.install(monkeypatch, kernels_of(tmp_path_factory), *modules)
    fakes.forget()


BIAS = (kl.Bias(),)


def chain(epilogue=BIAS, before=(), **options) -> kl.KroneckerSparseChain:
    first = kl.KroneckerSparse(*FIRST, epilogue=before, **options)
    return kl.KroneckerSparseChain((first, kl.KroneckerSparse(*LAST, epilogue=epilogue, **options)))


def operands(rows: int = ROWS, dtype=torch.float16) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows)
    x = torch.randn(rows, 128).to(dtype)
    return x, *((torch.randn(each) / each[2] ** 0.5).to(dtype) for each in (FIRST, LAST))


def bias(dtype=torch.float16) -> torch.Tensor:
    return torch.linspace(-1, 1, 384).to(dtype)


def run(descriptor, *tensors, **arguments) -> torch.Tensor:
    values = {name: gpus.gpu(value) for name, value in arguments.items()}
    return gpus.host(kl.run_kernel(descriptor, *map(gpus.gpu, tensors), **values))


def kinds(on_host) -> list[str]:
    """Of the kernels that were launched since the last time."""
    kinds = [spec.description.split()[1] for spec in on_host.specs]
    on_host.specs.clear()
    return kinds


def error(y, descriptor, x, *weights, **parameters) -> float:
    """Beside float64, but that the result of the first factor is rounded."""
    first, last = descriptor.factors
    h = reference.kronecker_sparse(first, x, weights[0]).double()
    wide = {name: value.double() for name, value in parameters.items()}
    exact = reference.kronecker_sparse(last, h, weights[1].double(), wide)
    return ((y.double() - exact).norm() / exact.norm()).item()


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_two_factors_are_one_kernel(on_host, dtype):
    tensors, vector, scale = operands(dtype=dtype), bias(dtype), 1 if dtype == torch.float16 else 8
    for batch in ((ROWS,), (8, ROWS // 8)):
        x = tensors[0].reshape(*batch, 128)
        for _ in range(2):  # the second by the plan of the first
            y = run(chain(), x, *tensors[1:], bias=vector)
            assert y.shape == (*batch, 384) and kinds(on_host) == ["pack", "chain"]
            assert error(y.reshape(ROWS, 384), chain(), *tensors, bias=vector) < scale * TOLERANCE


def test_autocast_has_the_same_kernel(on_host):
    tensors, vector = operands(), bias()
    wide = [t.float() for t in (*tensors, vector)]
    with torch.autocast("cuda", torch.float16):
        y = run(chain(), *wide[:3], bias=wide[3])
    assert y.dtype is torch.float16 and kinds(on_host)[-1] == "chain"
    assert torch.equal(y, run(chain(), *tensors, bias=vector))


def test_numbers_of_epilogues(on_host):
    descriptor = chain((kl.Bias(), kl.Scale(), kl.Relu(), kl.Bias("late")))
    tensors, vectors = operands(), {"bias": bias(), "late": bias().flip(0)}
    y = run(descriptor, *tensors, scale=0.5, **vectors)
    scale = torch.tensor(0.5)
    assert error(y, descriptor, *tensors, scale=scale, **vectors) < TOLERANCE
    assert torch.equal(y, run(descriptor, *tensors, scale=scale, **vectors))
    assert kinds(on_host) == ["pack", "chain"] * 2


BY_FACTOR = {
    "few rows": (chain(), {"rows": 64}),
    "float32": (chain(), {"dtype": torch.float32}),
    "an epilogue between": (chain(before=(kl.Relu(),)), {}),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", BY_FACTOR)
def test_what_it_does_not_take_is_a_call_for_each_factor(name):
    descriptor, options = BY_FACTOR[name]
    tensors = [gpus.gpu(t) for t in operands(**options)]
    assert not fused.takes(descriptor, tuple(tensors), {"bias": gpus.gpu(bias(tensors[0].dtype))})


def test_a_recorded_chain_is_one_kernel_of_the_bias_alone():
    x, *weights = map(gpus.gpu, operands(64))
    assert len(plans_of(chain(), x, *weights, bias=gpus.gpu(bias()))) == 2
    x, *weights = map(gpus.gpu, operands())
    assert len(plans_of(chain(), x, *weights, bias=gpus.gpu(bias()))) == 1
    weights[0].requires_grad_()
    recorded = chain((kl.Bias(), kl.Gelu()))
    (plan,) = plans_of(recorded, x, *weights, bias=gpus.gpu(bias()))
    assert plan.recorded and plan.fused[0] == chain() and plan.request[0] == recorded


def plans_of(descriptor, *tensors, **arguments) -> list:
    return planned(descriptor, tensors, arguments)


def test_prepare_loads_what_the_call_launches(on_host):
    tensors, vector = [gpus.gpu(t) for t in operands()], gpus.gpu(bias())
    kl.prepare(chain(), *tensors, bias=vector)
    loads = len(on_host.loads)
    kl.run_kernel(chain(), *tensors, bias=vector)
    assert len(on_host.loads) == loads and kinds(on_host) == ["pack", "chain"]


WRONG = {
    "bias of another size": {"bias": bias()[1:]},
    "no tensor": {"bias": 1.0},
    "on the host": {"bias": bias()},
    "no bias": {"gain": 1.0},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_for_the_factors_to_say(name):
    tensors = tuple(map(gpus.gpu, operands()))
    assert fused.takes(chain(), tensors, {"bias": gpus.gpu(bias())})
    assert not fused.takes(chain(), tensors, WRONG[name])
    x, first, last = tensors
    for others in ((x[:, 1:], first, last), (x, first, last[:, 1:]), (x, first.float(), last)):
        assert not fused.takes(chain(), others, {"bias": gpus.gpu(bias())})


def test_kernels_ahead_are_those_of_gpus_that_take_the_chain_and_of_others():
    """3000 rows fill half of a GPU of 78 multiprocessors, not of one of 132."""
    factors = (kl.KroneckerSparse(4, 16, 24, 1), kl.KroneckerSparse(2, 24, 16, 2))
    shapes = (3000, 96), (4, 16, 24, 1), (2, 24, 16, 2)
    tensors = tuple(torch.empty(shape, dtype=torch.float16, device="meta") for shape in shapes)
    specs = ahead.specs(kl.KroneckerSparseChain(factors), "sm_90a", tensors, {})
    kinds = {spec.description.split()[1] for spec in specs}
    assert {"chain", "pack", "hopper", "interleaved"} <= kinds
    older = ahead.specs(kl.KroneckerSparseChain(factors), "sm_80", tensors, {})
    assert "chain" not in {spec.description.split()[1] for spec in older}


def test_a_recording_has_the_factors_of_other_targets(tmp_path, monkeypatch):
    jobs = []

    def build(some, *_):
        jobs.extend(some)
        raise InterruptedError

    monkeypatch.setattr(bundles, "build_all", build)
    tensors = [gpus.gpu(t) for t in operands()]
    with (
        pytest.raises(InterruptedError),
        kl.recording(tmp_path / "bundle", archs=("sm_80", "sm_90a")),
    ):
        kl.run_kernel(chain(), *tensors, bias=gpus.gpu(bias()))
    kinds = {(arch, spec.description.split()[1]) for spec, arch in jobs}
    assert kinds >= {("sm_80", "portable"), ("sm_90a", "chain")}


def test_a_fake_tensor_outside_its_mode_has_a_fake_result():
    with FakeTensorMode():
        tensors = [torch.empty_like(t, device="cuda") for t in operands()]
        vector = torch.empty_like(bias(), device="cuda")
    y = kl.run_kernel(chain(), *tensors, bias=vector)
    assert type(y) is type(vector) and y.shape == (ROWS, 384)
