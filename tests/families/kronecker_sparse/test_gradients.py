"""Gradients of the Kronecker-sparse op on CPU tensors, by torch's own operators in eager calls and
by the registered ones, which CUDA tensors and compiled calls take."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

import kernlib as kl
from kernlib.families.kronecker_sparse import operators, reference
from tests.support.speeds import slow_but

PATTERN = (2, 3, 4, 2)
PATTERNS = [PATTERN, (1, 1, 1, 1), (1, 3, 2, 1), (3, 1, 2, 1), (1, 2, 3, 3)]
EPILOGUES = {
    "none": (),
    "bias": (kl.Bias(),),
    "gelu": (kl.Bias(), kl.Gelu()),
    "silu": (kl.Bias(), kl.Silu()),
    "late": (kl.Tanh(), kl.Bias("late")),
    "scalars": (kl.Bias(), kl.Scale(), kl.Custom("v * tanh(gain * v)", ("gain",)), kl.Bias("late")),
}
EAGER, REGISTERED = "eager", "registered"


def operands(pattern, batch, batch_last=False, dtype=torch.float64, grad=True):
    """x and weight."""
    a, _, c, d = pattern
    shape = (a * c * d, *batch) if batch_last else (*batch, a * c * d)
    made = [torch.randn(s, dtype=torch.float64).to(dtype) for s in (shape, pattern)]
    return [t.requires_grad_(grad) for t in made]


def parameters_of(descriptor, dtype=torch.float64):
    made = {}
    for name in descriptor.parameters:
        shape = (descriptor.out_features,) if name in descriptor.vectors else ()
        made[name] = torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_()
    return made


def call(how, descriptor, x, weight, parameters):
    if how == EAGER:
        return kl.run_kernel(descriptor, x, weight, **parameters)
    return operators.recorded(descriptor, (x, weight), parameters)


@pytest.mark.parametrize("how", slow_but((EAGER,), (EAGER, REGISTERED)))
@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("batch_last", [False, True])
def test_first_and_second_gradients_are_right(batch_last, epilogue, how, seed):
    descriptor = kl.KroneckerSparse(*PATTERN, batch_last=batch_last, epilogue=EPILOGUES[epilogue])
    x, weight = operands(PATTERN, (3,), batch_last)
    given = parameters_of(descriptor)

    def function(x, weight, *values):
        return call(how, descriptor, x, weight, dict(zip(given, values, strict=True)))

    tensors = (x, weight, *given.values())
    assert gradcheck(function, tensors, eps=1e-5, atol=1e-4)
    assert gradgradcheck(function, tensors, eps=1e-5, atol=1e-4)


@pytest.mark.parametrize("how", [EAGER, REGISTERED])
@pytest.mark.parametrize("batch", [(), (0,), (2, 3), (2, 1, 2)])
@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_are_those_of_the_dense_matrix(pattern, batch_last, batch, how, seed):
    descriptor = kl.KroneckerSparse(*pattern, batch_last=batch_last, epilogue=kl.Bias())
    x, weight = operands(pattern, batch, batch_last)
    bias = parameters_of(descriptor)["bias"]
    y = call(how, descriptor, x, weight, {"bias": bias})
    matrix = reference.dense(pattern, weight)
    if batch_last:
        flat = (matrix @ x.reshape(x.shape[0], -1)).reshape(len(matrix), *batch)
        wanted = flat + bias.view(-1, *[1] * len(batch))
    else:
        wanted = F.linear(x, matrix, bias)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight, bias), grad)
    expected = torch.autograd.grad(wanted, (x, weight, bias), grad)
    torch.testing.assert_close(y, wanted)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("batch_last", [False, True])
def test_the_gradient_of_a_weight_has_gradients_of_its_own(batch_last, seed):
    a, b, c, d = PATTERN
    grad, _ = operands((a, c, b, d), (3,), batch_last)
    x, _ = operands(PATTERN, (3,), batch_last)

    def function(grad, x):
        return operators.weight_gradient(grad, x, PATTERN, batch_last, None, False)

    assert gradcheck(function, (grad, x)) and gradgradcheck(function, (grad, x))
    wanted = reference.weight_gradient(PATTERN, grad, x, batch_last)
    assert torch.equal(function(grad, x), wanted)


@pytest.mark.parametrize("place", range(3))
def test_what_needs_no_gradient_is_not_computed(place, monkeypatch, seed):
    seen = []
    for name in ("product", "weight_gradient"):
        real = getattr(operators, name)
        monkeypatch.setattr(
            operators, name, lambda *a, _real=real, _name=name: seen.append(_name) or _real(*a)
        )
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=kl.Bias())
    x, weight = operands(PATTERN, (3,), grad=False)
    tensors = [x, weight, torch.randn(descriptor.out_features, dtype=torch.float64)]
    tensors[place].requires_grad_()
    y = operators.recorded(descriptor, tensors[:2], {"bias": tensors[2]})
    seen.clear()
    y.sum().backward()
    assert seen == [["product"], ["weight_gradient"], []][place]
    assert [t.grad is not None for t in tensors] == [i == place for i in range(3)]


def test_scalars_that_require_a_gradient_get_it(seed):
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(), kl.Scale()))
    x, weight = operands(PATTERN, (3,), grad=False)
    bias = torch.zeros(descriptor.out_features, dtype=torch.float64)
    for how in (EAGER, REGISTERED):
        scale = torch.tensor(2.0, requires_grad=True)
        y = call(how, descriptor, x, weight, {"bias": bias, "scale": scale})
        y.sum().backward()
        torch.testing.assert_close(scale.grad.double(), y.sum().detach() / 2)


def test_a_chain_trains(seed):
    first = kl.KroneckerSparse(2, 3, 4, 2, epilogue=(kl.Bias("b1"), kl.Tanh()))
    second = kl.KroneckerSparse(1, 5, 12, 1, epilogue=kl.Bias("b2"))
    chain = kl.KroneckerSparseChain((first, second))
    x, w1 = operands(first.pattern, (3,))
    _, w2 = operands(second.pattern, (3,))
    values = {"b1": torch.randn(12).double(), "b2": torch.randn(5).double()}
    tensors = (x, w1, w2, *(v.requires_grad_() for v in values.values()))

    def function(x, w1, w2, b1, b2):
        return kl.run_kernel(chain, x, w1, w2, b1=b1, b2=b2)

    assert gradcheck(function, tensors) and gradgradcheck(function, tensors)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "out"])
def test_out_takes_no_result_whose_gradient_is_recorded(name):
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=kl.Bias())
    x, weight = operands(PATTERN, (3,), grad=False)
    given = {"x": x, "weight": weight, "bias": torch.zeros(12).double()}
    given["out"] = torch.zeros(3, 12).double()
    given[name].requires_grad_()
    tensors = given.pop("x"), given.pop("weight")
    with pytest.raises(RuntimeError, match="out takes no result whose gradient is recorded"):
        kl.run_kernel(descriptor, *tensors, **given)
    with torch.no_grad():
        kl.run_kernel(descriptor, *tensors, **given)


def test_a_gradient_of_any_strides_is_taken(seed):
    descriptor = kl.KroneckerSparse(*PATTERN)
    x, weight = operands(PATTERN, (3, 4))
    for how in (EAGER, REGISTERED):
        y = call(how, descriptor, x, weight, {})
        for grad in (
            torch.ones((), dtype=y.dtype).expand_as(y),
            torch.randn(12, 4, 3).double().permute(2, 1, 0),
        ):
            found = torch.autograd.grad(y, (x, weight), grad, retain_graph=True)
            whole = torch.autograd.grad(y, (x, weight), grad.contiguous(), retain_graph=True)
            for one, other in zip(found, whole, strict=True):
                torch.testing.assert_close(one, other)


# torch.func and forward mode, on CPU tensors.


def test_transforms_of_torch_func_go_through(seed):
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(), kl.Gelu()))
    x, weight = operands(PATTERN, (5,), grad=False)
    bias = torch.randn(12, dtype=torch.float64)

    def function(x, weight, bias):
        return kl.run_kernel(descriptor, x, weight, bias=bias)

    wanted = function(x, weight, bias)
    mapped = torch.vmap(function, in_dims=(0, None, None))(x, weight, bias)
    torch.testing.assert_close(mapped, wanted)
    weights = torch.stack([weight, 2 * weight])
    several = torch.vmap(function, in_dims=(None, 0, None))(x, weights, bias)
    torch.testing.assert_close(several[1], function(x, weights[1], bias))

    def loss(weight, x):
        return function(x, weight, bias).square().sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weight, x)
    leaf = weight.clone().requires_grad_()
    loss(leaf, x).backward()
    torch.testing.assert_close(each.sum(0), leaf.grad)
    jacobian = torch.func.jacrev(function, argnums=1)(x, weight, bias)
    assert jacobian.shape == (5, 12, *PATTERN)
    forward = torch.func.jacfwd(function, argnums=1)(x, weight, bias)
    torch.testing.assert_close(forward, jacobian)


@pytest.mark.parametrize("recording", [False, True])
def test_forward_mode_is_not_dropped(recording, seed):
    descriptor = kl.KroneckerSparse(*PATTERN)
    x, weight = operands(PATTERN, (5,), grad=False)
    forward = torch.autograd.forward_ad
    with forward.dual_level(), torch.set_grad_enabled(recording):
        y = kl.run_kernel(descriptor, forward.make_dual(x, 2 * x), weight)
        found = forward.unpack_dual(y).tangent
    torch.testing.assert_close(found, 2 * kl.run_kernel(descriptor, x, weight))


def test_autocast_gives_gradients_in_the_parameters_dtype(seed):
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(), kl.Silu()))
    x, weight = operands(PATTERN, (33,), dtype=torch.float32)
    bias = torch.randn(12, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = kl.run_kernel(descriptor, x, weight, bias=bias)
    y.float().square().sum().backward()
    found = [t.grad for t in (x, weight, bias)]
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    kl.run_kernel(descriptor, *wide[:2], bias=wide[2]).square().sum().backward()
    for ours, theirs in zip(found, wide, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs.grad).norm() < 3e-2 * theirs.grad.norm()
