"""What families ask of tensors and numbers, whatever they compute."""

import math
import subprocess
import sys

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse.operation import weight_gradient
from kernlib.runtime import numbers, tensors
from kernlib.runtime.plan import Plan
from tests.families.kronecker_sparse import fake_kernels
from tests.support import fakes
from tests.support.fakes import OnGpu, on_gpu
from tests.support.limits import LIMIT_S

SPARSE = torch.eye(3).to_sparse()


def test_none_will_do_where_it_is_not_required():
    tensors.check_dense(("x",), x=torch.ones(2), bias=None)
    with pytest.raises(TypeError, match="x must be a tensor, got NoneType"):
        tensors.check_dense(("x",), x=None, bias=None)


@pytest.mark.parametrize(
    ("value", "message"),
    [([1.0], "bias must be a tensor, got list"), (SPARSE, "bias .*sparse_coo")],
)
def test_what_is_no_dense_tensor_is_named(value, message):
    with pytest.raises(TypeError, match=message):
        tensors.check_dense(("x",), x=torch.ones(2), bias=value)


def test_a_transform_is_refused_with_the_familys_advice():
    def inside(x):
        tensors.refuse_transforms("no kernel takes: call it outside", y=None, x=x)
        return x

    tensors.refuse_transforms("no kernel takes", x=torch.ones(2))
    with pytest.raises(RuntimeError, match=r"x is inside .*vmap.*, which no kernel takes: call it"):
        torch.vmap(inside)(torch.ones(2))


def test_signatures_tell_apart_what_plans_depend_on():
    x = torch.zeros(8, 8)
    z = torch.zeros(8, 8, dtype=torch.complex64)
    alike = [x, torch.zeros(8, 8), x.clone()]
    others = [x[:, 1:], x.T[1:], x.double(), x[:7], x.view(4, 16), z.imag, z.conj().imag]
    assert len({tensors.signature(t) for t in alike}) == 1
    assert len({tensors.signature(t) for t in [x, *others]}) == 1 + len(others)


# Zero tensors.


def zeros(*shape, **options):
    """As autograd makes them for gradients that are not defined."""
    return torch._efficientzerotensor(shape, **options)


def test_what_has_no_memory_has_no_signature_of_what_has():
    x = torch.zeros(9, 4)
    real, zero = x[1:], zeros(9, 4)[1:]  # 16 bytes behind address 0
    assert zero.data_ptr() % 16 == 0 and zero.stride() == real.stride()
    assert tensors.signature(zero) not in [tensors.signature(t) for t in (real, x[:8])]
    with torch._subclasses.FakeTensorMode():
        fake = torch.zeros(9, 4)[1:]
    assert tensors.signature(fake) != tensors.signature(x[:8])


@pytest.mark.parametrize(
    "turn", [lambda t: t, lambda t: t.mT, lambda t: t[1:, ::2], lambda t: t[:1].expand(5, 4)]
)
def test_lazy_tensors_are_given_memory(turn):
    z = torch.complex(torch.ones(3, 4), torch.ones(3, 4)).conj()
    for lazy, dense in (
        (zeros(3, 4), torch.zeros(3, 4)),
        (torch._neg_view(zeros(3, 4)), torch.zeros(3, 4)),
        (z.imag, -torch.ones(3, 4)),
    ):
        assert tensors.is_lazy(turn(lazy)) and not tensors.is_lazy(turn(dense))
        made = tensors.materialised(turn(lazy))
        assert not tensors.is_lazy(made) and made.data_ptr() and torch.equal(made, turn(dense))
        assert tensors.materialised(dense) is dense


@pytest.fixture
def gpus(request, monkeypatch):
    fakes.forget()
    yield request.param.install(monkeypatch)
    fakes.forget()


launched = pytest.mark.parametrize("gpus", [fakes], indirect=True)
computed = pytest.mark.parametrize("gpus", [fake_kernels], indirect=True)


@launched
def test_no_pairwise_kernel_is_given_the_address_of_a_zero_tensor(gpus, monkeypatch):
    given = []
    real = Plan.launch

    def noted(plan, pointers, scalars=None):
        given.append((pointers[:2], scalars))
        return real(plan, pointers, scalars)

    monkeypatch.setattr(Plan, "launch", noted)
    a, b, out = on_gpu(30, 64), on_gpu(20, 64), on_gpu(30, 20)
    lazy = [zeros(n + 1, 64)[1:].as_subclass(OnGpu) for n in (30, 20)]
    widths = (1.0, on_gpu(()), zeros().as_subclass(OnGpu), zeros(2).as_subclass(OnGpu)[1])
    calls = [(a, b), (lazy[0], b), (a, lazy[1]), tuple(lazy)]
    laplace = kl.laplace_l1()
    for x, y in [*calls, *calls[::-1]]:  # with the plan of others there, and before it
        kl.prepare(laplace, x, y, out=out, bandwidth=1.0)
        for width in widths:
            kl.run_kernel(laplace, x, y, out=out, bandwidth=width)
    for x, y in calls:
        kl.tune(laplace, x, y, out=out, bandwidth=widths[-1])
    assert len(given) > 8 * len(widths)
    assert all(min(pointers) > 1 << 16 for pointers, _ in given)
    held = {address for _, scalars in given for address in scalars[1::2]}
    assert held == {0, widths[1].data_ptr()}


PATTERN = (2, 3, 5, 4)
ZEROS = {
    "whole": lambda t: zeros(*t.shape),
    "further on": lambda t: zeros(4, *t.shape)[3],
    "turned": lambda t: zeros(*t.shape[::-1]).permute(tuple(reversed(range(t.dim())))),
    "expanded": lambda t: zeros(*[1] * t.dim()).expand(t.shape),
}


def gpu(*shape):
    return (torch.randint(-8, 9, shape) / 4).as_subclass(OnGpu)


def host(t):
    return t.as_subclass(torch.Tensor)


@computed
@pytest.mark.parametrize("zero", ZEROS)
def test_no_kronecker_sparse_kernel_is_given_the_address_of_a_zero_tensor(zero, gpus):
    """The kernels of these GPUs read what they are given."""
    factor = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(), kl.Scale()))
    real = [gpu(6, 40), gpu(*PATTERN), gpu(24), gpu(), gpu(6, 24)]
    lazy = [ZEROS[zero](t).as_subclass(OnGpu) for t in real]
    dense = [torch.zeros_like(t) for t in real]
    calls = [[n] for n in range(4)] + [list(range(4)), []]

    def call(others, chosen):
        *given, grad = (others[n] if n in chosen else t for n, t in enumerate(real))
        x, weight, *values = given
        values = dict(zip(factor.parameters, values, strict=True))
        kl.prepare(factor, x, weight, **values)
        y = kl.run_kernel(factor, x, weight, **values)
        return host(y), host(weight_gradient(grad, x, PATTERN))

    for chosen in (*calls, *calls, [0, 4], [4]):  # before there are plans of others, and with them
        found, wanted = call(lazy, chosen), call(dense, chosen)
        assert all(map(torch.equal, found, wanted)), chosen
        assert not any(t._is_zerotensor() for t in found)


def test_pairwise_takes_zero_tensors_on_the_cpu():
    a, b = torch.arange(12.0).view(3, 4), zeros(3, 4)[1:]
    found = kl.run_kernel(kl.l1_distance(), a, b)
    assert torch.equal(found, kl.run_kernel(kl.l1_distance(), a, torch.zeros(2, 4)))
    with pytest.raises(ValueError, match=r"out is a zero tensor.*pass out\.clone\(\)"):
        kl.run_kernel(kl.l1_distance(), a, a, out=zeros(3, 3))


@pytest.mark.parametrize(
    ("inputs", "meets"),
    [([], False), ([(0, 10)], False), ([(0, 11)], True), ([(20, 5)], False), ([(19, 1)], True),
     ([(0, 1), (12, 2)], True), ([(0, 1), (30, 1)], False)],
)  # fmt: skip
def test_ranges_meet_where_they_share_a_byte(inputs, meets):
    assert tensors.ranges_meet(10, 10, inputs) is meets


def far_from(x: torch.Tensor) -> torch.Tensor:
    """A tensor in memory of its own: more of it than two views are compared over lies between."""
    address, needed = x.data_ptr(), tensors.MAX_EXACT_OVERLAP * x.element_size()
    kept = []
    for _ in range(64):
        kept.append(torch.empty(needed // 16, dtype=x.dtype))  # reserved, never written
        if abs(kept[-1].data_ptr() - address) > needed:
            return kept[-1][:4].fill_(0)
    pytest.skip("no memory is far enough from x")


def test_an_input_far_away_is_not_taken_for_one_that_is_shared():
    whole = torch.zeros(2, 4, 16)
    out, beside = whole[..., 8:], whole[..., :8]
    tensors.refuse_overlap(out, beside=beside, far=far_from(out))
    with pytest.raises(ValueError, match="out shares memory with late"):
        tensors.refuse_overlap(out, beside=beside, far=far_from(out), late=whole[..., 7:9])


BYTES = torch.zeros(64, dtype=torch.uint8)
WORDS, HALVES = BYTES.view(torch.float32), BYTES.view(torch.float16)


@pytest.mark.few(20)
@pytest.mark.parametrize(
    ("out", "x", "shared"),
    [
        (WORDS[:3].as_strided((1, 3), (0, 1)), WORDS[2:5].expand(4, 3), True),
        (WORDS[:3].as_strided((1, 3), (0, 1)), WORDS[3:6].expand(4, 3), False),
        (WORDS[:3].as_strided((1, 3), (0, 1)), WORDS[2:5].expand(1 << 40, 3), True),
        (WORDS[::2], WORDS[1].expand(1 << 40), False),
        (WORDS.view(4, 4)[:, :2], WORDS.view(4, 4)[:, 2:], False),
        # Rows of as many elements, and of as many bytes.
        (HALVES[4:].as_strided((4, 2), (4, 1)), WORDS.view(4, 4)[:, :1], True),
        (WORDS.view(4, 4)[:, :1], HALVES.view(4, 8)[:, 2:], False),
        (WORDS.view(4, 4)[:, :1], HALVES.view(4, 8)[:, 1:], True),
        # Memory that is aligned to less than its elements.
        (WORDS[:1], torch.frombuffer(BYTES.numpy(), dtype=torch.float32, count=2, offset=3), True),
        (WORDS[:1], torch.frombuffer(BYTES.numpy(), dtype=torch.float32, count=2, offset=5), False),
    ],
)
def test_views_share_memory_exactly_where_an_element_does(out, x, shared):
    if not shared:
        tensors.refuse_overlap(out, x=x)
        tensors.refuse_overlap(x, out=out)
        return
    with pytest.raises(ValueError, match="out shares memory with x"):
        tensors.refuse_overlap(out, x=x)


def test_memory_that_cannot_be_written_is_refused():
    tensors.check_memory(torch.zeros(3, 4).T)
    with pytest.raises(ValueError, match=r"out overlaps itself .*\(3, 4\).*\(0, 1\)"):
        tensors.check_memory(torch.zeros(4).expand(3, 4))
    with pytest.raises(ValueError, match="out is a negated view"):
        tensors.check_memory(torch.zeros(3, dtype=torch.complex64).conj().imag)
    with pytest.raises(ValueError, match=r"out is a zero tensor.* has no memory"):
        tensors.check_memory(zeros(3))


def test_the_shapes_that_an_error_offers_are_those_that_would_do():
    with pytest.raises(TypeError, match=r"of shape \(\), got 'x'"):
        numbers.host_value("gain", "x", dimensions=0)
    with pytest.raises(TypeError, match=r"of shape \(\) or \(L,\), got 'x'"):
        numbers.host_value("gain", "x")
    with pytest.raises(ValueError, match=r"gain must have shape \(\), got \(2,\)"):
        numbers.check_kind("gain", torch.ones(2), dimensions=0)
    numbers.check_kind("gain", torch.ones(2))


@pytest.mark.parametrize("name", ["p", "inner_p", "epsilon", "gain"])
def test_no_name_has_a_meaning_to_all_families(name):
    numbers.check_host(name, -1.0, frozenset())
    numbers.check_tensor(name, torch.tensor(-1.0), frozenset())
    for wrong in (math.nan, -1.0, 0.0):
        with pytest.raises(ValueError, match=f"{name} must be greater than 0, got {wrong}"):
            numbers.check_tensor(name, torch.tensor([1.0, wrong]), frozenset((name,)))
    with pytest.raises(ValueError, match=f"{name} must be a number, got nan"):
        numbers.check_host(name, math.nan, frozenset())


def test_a_call_loads_nothing_that_only_tuning_needs():
    code = (
        "import sys, torch, kernlib as kl; kl.run_kernel(kl.l1_distance(), *torch.ones(2, 3, 4)); "
        "print(sorted(m for m in sys.modules if m.endswith(('choices', 'candidates', 'tuner')) "
        "and m.startswith('kernlib')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.stdout.strip() == "[]", done.stderr
