"""Chains under autocast whose weights are float32: on GPUs that exist only by name, whose kernels
the host runs by their text."""

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import operation, plans
from kernlib.families.kronecker_sparse.chain import fused, gradient
from kernlib.families.kronecker_sparse.chain import operation as chain_operation
from kernlib.runtime import products
from tests.support import fakes
from tests.support.emulation import gpus
from tests.support.emulation.emulator import kernels_of

pytestmark = pytest.mark.emulated

FIRST, LAST = (16, 16, 8, 1), (1, 24, 16, 16)  # 128 features to 384, in tiles of 64 rows
ROWS = 64 * 72  # 72 of 132 multiprocessors have one
OPTIONS = False, None, False


@pytest.fixture(autouse=True)
def on_host(tmp_path_factory, monkeypatch):
    """The GPUs; ``specs`` are those that were launched."""
    fakes.forget()
    modules = products, operation, plans, fused, gradient
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    yield gpus.install(monkeypatch, kernels_of(tmp_path_factory), *modules)
    fakes.forget()


BIAS = (kl.Bias(),)


def chain(epilogue=BIAS) -> kl.KroneckerSparseChain:
    first, last = kl.KroneckerSparse(*FIRST), kl.KroneckerSparse(*LAST, epilogue=epilogue)
    return kl.KroneckerSparseChain((first, last))


def tensors(rows: int = ROWS) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows)
    weights = (torch.randn(each) / each[2] ** 0.5 for each in (FIRST, LAST))
    return torch.randn(rows, 128), *weights, torch.randn(384)


def kinds(on_host) -> list[str]:
    """Of the kernels that were launched since the last time."""
    kinds = [spec.description.split()[1] for spec in on_host.specs]
    on_host.specs.clear()
    return kinds


def called(descriptor, x, *weights, dtype=torch.float16, **parameters) -> torch.Tensor:
    values = {name: gpus.gpu(value) for name, value in parameters.items()}
    with torch.autocast("cuda", dtype):
        return gpus.host(kl.run_kernel(descriptor, *map(gpus.gpu, (x, *weights)), **values))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_plan_rounds_them(on_host, dtype):
    *operands, bias = tensors()
    halves = [t.to(dtype) for t in operands]
    expected = called(chain(), *halves, bias=bias.to(dtype), dtype=dtype)
    assert kinds(on_host) == ["pack", "chain"]
    for x in (operands[0], halves[0]):
        for _ in range(2):  # the second by the plan of the first
            y = called(chain(), x, *operands[1:], bias=bias, dtype=dtype)
            assert kinds(on_host) == ["cast", "pack", "chain"] and torch.equal(y, expected)


def test_other_vectors_are_rounded_before(on_host):
    descriptor = chain((kl.Bias(), kl.Relu(), kl.Bias("late")))
    *operands, bias = tensors()
    halves, late = [t.half() for t in (*operands, bias)], bias.flip(0)
    expected = called(descriptor, *halves[:3], bias=halves[3], late=late.half())
    on_host.specs.clear()
    assert torch.equal(called(descriptor, *operands, bias=bias, late=late), expected)
    assert kinds(on_host) == ["cast", "pack", "chain"]


def test_weights_anywhere(on_host):
    """Master weights whose first number does not lie at whole 16 bytes."""
    x, *weights, bias = tensors()
    expected = called(chain(), x, *weights, bias=bias)
    on_host.specs.clear()
    moved = [torch.cat((t.new_ones(1), t.flatten()))[1:].view(t.shape) for t in (*weights, bias)]
    assert torch.equal(called(chain(), x, *moved[:2], bias=moved[2]), expected)
    assert kinds(on_host) == ["cast", "pack", "chain"]


LEFT_ALONE = {
    "few rows": {"rows": 64},
    "a weight of another layout": {"turned": True},
    "a weight in half precision": {"half": True},
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_plans_do_not_round_is_cast_before(on_host, name):
    options = LEFT_ALONE[name]
    x, first, second, bias = tensors(options.get("rows", ROWS))
    expected = called(chain(), x.half(), first.half(), second.half(), bias=bias.half())
    on_host.specs.clear()
    if "turned" in options:
        first = first.transpose(1, 2).contiguous().transpose(1, 2)
    if "half" in options:
        second = second.half()
    for _ in range(2):
        assert torch.equal(called(chain(), x, first, second, bias=bias), expected)
        assert "cast" not in kinds(on_host)


@pytest.mark.parametrize("rows", [ROWS, 64])
def test_operators_choose_once(on_host, rows, monkeypatch):
    """What compiled code calls, with master weights and without autocast."""
    x, *weights, bias = tensors(rows)
    expected, asked, takes = called(chain(), x, *weights, bias=bias), [], fused.takes
    monkeypatch.setattr(fused, "takes", lambda *request: asked.append(1) or takes(*request))
    operands = tuple(map(gpus.gpu, (x.half(), *weights)))
    fakes.forget()
    for _ in range(2):
        y = chain_operation.of_masters(chain(), operands, {"bias": gpus.gpu(bias)})
        assert torch.equal(gpus.host(y), expected) and len(asked) == 1


def test_without_autocast_dtypes_must_be_one(on_host):
    x, *weights, bias = tensors()
    called(chain(), x.half(), *weights, bias=bias)  # which leaves a plan of these dtypes
    with pytest.raises(TypeError, match="x and weight must have one dtype"):
        kl.run_kernel(chain(), *map(gpus.gpu, (x.half(), *weights)), bias=gpus.gpu(bias))


# Gradients.


CHAINS = {
    "two l": ((6, 16, 16, 1), (1, 136, 48, 2), 1100),
    "three l": ((6, 16, 32, 1), (1, 64, 32, 3), 1100),
    "sixteen l": ((16, 16, 8, 1), (1, 24, 16, 16), 1104),
    "l in both": ((2, 8, 4, 4), (1, 8, 8, 8), 64),
}


@pytest.mark.parametrize("needs", [(1, 1, 1, 1), (0, 1, 0, 1), (1, 0, 1, 0)])
@pytest.mark.parametrize("name", CHAINS)
def test_gradients_are_widened(on_host, name, needs):
    first, last, rows = CHAINS[name]
    torch.manual_seed(rows)
    needs = tuple(map(bool, needs))
    x, grad = (torch.randn(rows, p[0] * p[n] * p[3]).half() for p, n in ((first, 2), (last, 1)))
    masters = tuple(torch.randn(each) / each[2] ** 0.5 for each in (first, last))

    def computed(weights) -> list:
        placed = gpus.gpu(grad), gpus.gpu(x), tuple(map(gpus.gpu, weights))
        grads = gradient.calls.execute(*placed, needs, OPTIONS)
        return [None if t is None else gpus.host(t) for t in grads]

    expected = computed([weight.half() for weight in masters])
    launched = kinds(on_host)
    for _ in range(2):
        grads = computed(masters)
        assert kinds(on_host) == ["cast", *launched, "cast"]
        for index, (y, other) in enumerate(zip(grads, expected, strict=True)):
            if other is None:
                assert y is None
                continue
            assert y.dtype is (torch.float32 if index else torch.float16)
            assert torch.equal(y, other.to(y.dtype))


def test_gradients_of_weights_of_another_layout(on_host):
    """As hooks of saved tensors may return them."""
    first, last, rows = CHAINS["two l"]
    torch.manual_seed(rows)
    x, grad = (torch.randn(rows, p[0] * p[n] * p[3]).half() for p, n in ((first, 2), (last, 1)))
    weights = [torch.randn(each) / each[2] ** 0.5 for each in (first, last)]
    turned = [weight.transpose(1, 2).contiguous().transpose(1, 2) for weight in weights]
    request = (True,) * 4, OPTIONS
    some, others = (
        gradient.by_plans(gpus.gpu(grad), [gpus.gpu(x)], list(map(gpus.gpu, each)), *request)
        for each in (weights, turned)
    )
    for y, other in zip(some, others, strict=True):
        assert torch.equal(gpus.host(y), gpus.host(other))


def recorded(x, weights: list, bias, grad, *wanted: str) -> tuple:
    """A call under autocast, and the gradients of a backward pass by the ``wanted``."""
    named = {"x": x, "first": weights[0], "second": weights[1], "bias": bias}
    leaves = {name: gpus.gpu(t).requires_grad_(name in wanted) for name, t in named.items()}
    x, first, second, bias = leaves.values()
    with torch.autocast("cuda", torch.float16):
        y = kl.run_kernel(chain(), x, first, second, bias=bias)
    grads = torch.autograd.grad(y, [leaves[name] for name in wanted], gpus.gpu(grad))
    return gpus.host(y), [gpus.host(t) for t in grads]


@pytest.mark.parametrize("wanted", ["x first second bias", "second", "first bias"])
@pytest.mark.parametrize("rows", [ROWS, 192])
def test_recorded_calls(on_host, wanted, rows):
    """The same numbers as by casts outside, whose own steps of autograd widen the gradients."""
    x, *weights, bias = tensors(rows)
    grad, wanted = torch.randn(rows, 384).half(), wanted.split()
    halves = [t.half() for t in weights]
    expected, others = recorded(x.half(), halves, bias.half(), grad, *wanted)
    on_host.specs.clear()
    for _ in range(2):
        y, grads = recorded(x.half(), weights, bias, grad, *wanted)
        assert torch.equal(y, expected)
        casts = kinds(on_host).count("cast")
        assert casts == 2 + (rows == ROWS)  # few rows: by factors, forward
        for name, t, other in zip(wanted, grads, others, strict=True):
            assert t.dtype is (torch.float16 if name == "x" else torch.float32)
            assert torch.equal(t, other.to(t.dtype))


def test_weights_of_inference_mode(on_host):
    """Which no backward pass may save: they are cast before, as by a linear layer."""
    x, *weights, bias = tensors()
    with torch.inference_mode():
        frozen = [gpus.gpu(t.clone()) for t in (*weights, bias)]
    leaf = gpus.gpu(x).requires_grad_()
    with torch.autocast("cuda", torch.float16):
        y = kl.run_kernel(chain(), leaf, *frozen[:2], bias=frozen[2])
    assert "cast" not in kinds(on_host)
    assert torch.equal(gpus.host(y), called(chain(), x, *weights, bias=bias))


def test_of_a_bias_alone_no_weight_is_saved(on_host):
    """A step between forward and backward may change the weights then."""
    x, *weights, bias = tensors()
    leaf, (first, second) = gpus.gpu(bias).requires_grad_(), map(gpus.gpu, weights)
    with torch.autocast("cuda", torch.float16):
        y = kl.run_kernel(chain(), gpus.gpu(x.half()), first, second, bias=leaf)
    first.mul_(2)
    (to_bias,) = torch.autograd.grad(y, [leaf], gpus.gpu(torch.ones(ROWS, 384).half()))
    assert to_bias.dtype is torch.float32 and torch.equal(to_bias, torch.full((384,), float(ROWS)))
