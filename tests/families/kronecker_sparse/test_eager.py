"""Eager Kronecker-sparse calls whose gradient is recorded: on plain CPU tensors taken for those of
a GPU that exists only by name and whose kernels compute on the host."""

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import kernlib as kl
from kernlib.families.kronecker_sparse import operation as primitives
from kernlib.families.kronecker_sparse import operators, reference
from kernlib.runtime import autograd as runtime_autograd
from kernlib.runtime import operation
from kernlib.runtime.dtypes import KERNEL_TYPES
from tests.families.kronecker_sparse import fake_kernels
from tests.support import fakes

PATTERN = (2, 3, 5, 4)
FEATURES, OUT = 40, 24
EPILOGUES = {
    "none": (),
    "bias": (kl.Bias(),),
    "named": (kl.Bias("shift"),),
    "gelu": (kl.Bias(), kl.Gelu()),
    "late": (kl.Tanh(), kl.Bias("late")),
    "scaled": (kl.Bias(), kl.Scale(), kl.Bias("late")),
}
FACTOR = kl.KroneckerSparse(*PATTERN, epilogue=kl.Bias())


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    fakes.forget()
    yield fake_kernels.install_for_cpu(monkeypatch)
    fakes.forget()


def values(*shape, dtype=torch.float32):
    """Of which sums of products are exact in float32."""
    return (torch.randint(-8, 9, shape).double() / 4).to(dtype)


def operands(batch_last=False, dtype=torch.float32, grad=(True, True, True)):
    """x, weight and bias."""
    shape = (FEATURES, 2, 3) if batch_last else (2, 3, FEATURES)
    made = [values(*s, dtype=dtype) for s in (shape, PATTERN, (OUT,))]
    return [t.requires_grad_(needed) for t, needed in zip(made, grad, strict=True)]


def call(x, weight, bias):
    return kl.run_kernel(FACTOR, x, weight, bias=bias)


def expected(x, weight, bias):
    return reference.kronecker_sparse(FACTOR, x, weight, {"bias": bias})


def close(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)


class Listening(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


OURS = {
    "kernlib.kronecker_sparse_product.default",
    "kernlib.kronecker_sparse_weight_gradient.default",
}

# The same gradients as by the operators, to any order.


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", KERNEL_TYPES, ids=str)
@pytest.mark.parametrize("batch_last", [False, True])
def test_eager_gradients_are_those_of_the_operators(batch_last, dtype, epilogue, gpus):
    factor = kl.KroneckerSparse(*PATTERN, batch_last=batch_last, epilogue=EPILOGUES[epilogue])
    x, weight, _ = operands(batch_last, dtype)
    given = {
        name: (values(OUT, dtype=dtype) if name in factor.vectors else torch.tensor(0.75))
        for name in factor.parameters
    }
    tensors = [x, weight, *(t.requires_grad_() for t in given.values())]

    def results(run):
        y = run(factor, x, weight, given)
        first = torch.autograd.grad(y.float().square().sum(), tensors, create_graph=True)
        twice = torch.autograd.grad(sum(t.float().square().sum() for t in first), tensors)
        return y, *first, *twice

    def recorded(factor, x, weight, given):
        return operators.recorded(factor, (x, weight), given)

    def eager(factor, x, weight, given):
        return kl.run_kernel(factor, x, weight, **given)

    found = [results(run) for run in (eager, eager, recorded)]  # with a plan and without
    for ours, again, theirs in zip(*found, strict=True):
        for each in (ours, again):  # float16 may overflow
            torch.testing.assert_close(each, theirs, rtol=0, atol=0, equal_nan=True)
    fused = {type(part) for given, _ in gpus.lowering.problems for part in given}
    assert fused == {type(part) for part in factor.epilogue[:1]} & {kl.Bias}
    if dtype == torch.float32:
        for ours, wanted in zip(found[0], results(reference.kronecker_sparse), strict=True):
            assert (ours - wanted).norm() <= 1e-5 * wanted.norm()


def test_neither_way_passes_the_dispatcher_or_checks_what_is_known(gpus, monkeypatch):
    x, weight, bias = operands()
    wanted = torch.autograd.grad(call(x, weight, bias).sum(), (x, weight, bias))
    relu = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias("other"), kl.Relu()))
    kl.run_kernel(relu, x, weight, other=bias)
    for name in ("product", "weight_gradient", "recorded"):
        monkeypatch.setattr(operators, name, lambda *_: pytest.fail("an operator was called"))
    for name in ("check_operands", "check_gradient"):
        monkeypatch.setattr(primitives, name, lambda *_: pytest.fail("asked again"))
    for module in (operation, runtime_autograd):
        monkeypatch.setattr(module, "stand_ins", lambda *_: pytest.fail("asked again"))
    gpus.launches.clear()
    found = torch.autograd.grad(call(x, weight, bias).sum(), (x, weight, bias))
    assert all(map(torch.equal, found, wanted))
    assert len(gpus.launches) == 6  # two kernels each of y and both gradients
    y = kl.run_kernel(relu, x, weight, other=bias)
    assert torch.equal(y, expected(x, weight, bias).relu())


def test_what_is_wrong_is_said_of_known_products_too():
    x, weight, bias = operands()
    call(x, weight, bias)
    for given, error, message in (
        ({}, ValueError, "needs bias"),
        ({"bias": bias, "gain": 1}, TypeError, "gain is no argument"),
        ({"shift": bias}, TypeError, "shift is no argument"),
        ({"bias": bias[1:]}, ValueError, "bias must have shape"),
        ({"bias": bias.double()}, TypeError, "must have one dtype"),
        ({"bias": 1.0}, TypeError, "bias must be a dense tensor"),
    ):
        with pytest.raises(error, match=message):
            kl.run_kernel(FACTOR, x, weight, **given)
    with pytest.raises(RuntimeError, match="out takes no result whose gradient"):
        kl.run_kernel(FACTOR, x, weight, bias=bias, out=torch.empty(2, 3, OUT))
    with pytest.raises(TypeError, match="weight must be a tensor"):
        kl.run_kernel(FACTOR, x, [1.0], bias=bias)


# What is computed and kept.


@pytest.mark.parametrize("needs", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (0, 1, 1)])
@pytest.mark.parametrize("double", [False, True])
def test_what_needs_no_gradient_is_neither_kept_nor_computed(needs, double, monkeypatch):
    x, weight, bias = operands(grad=map(bool, needs))
    seen, kept = [], []
    for name in ("product", "weight_gradient"):
        real = getattr(primitives, name)
        noted = lambda *a, name=name, real=real: seen.append(name) or real(*a)  # noqa: E731
        monkeypatch.setattr(primitives, name, noted)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = call(x, weight, bias)
    y.sum().backward()
    wanted = ["product"] * needs[0] + ["weight_gradient"] * needs[1]
    assert seen == wanted
    assert [t is weight for t in kept] == [False] * needs[1] + [True] * needs[0]
    tensors = (x, weight, bias)
    assert [t.grad is not None for t in tensors] == [bool(needed) for needed in needs]
    found = [t.grad for t in tensors if t.grad is not None]
    inputs = [t for t in tensors if t.requires_grad]
    close(found, torch.autograd.grad(expected(*tensors).sum(), inputs))


def test_what_is_kept_goes_with_the_backward_pass():
    x, weight, bias = operands()
    hidden = x * 2
    held = weakref.ref(hidden)
    y = call(hidden, weight, bias)
    del hidden
    assert held() is not None
    y.sum().backward()
    gc.collect()
    assert held() is None
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()


@pytest.mark.parametrize("changed", [0, 1])
def test_an_operand_changed_before_the_backward_is_noticed(changed):
    tensors = operands()
    for _ in range(2):  # without a plan, and with one
        y = call(*tensors)
        with torch.no_grad():
            tensors[changed].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = call(*tensors)
    with torch.no_grad():
        tensors[2].mul_(2)  # which no gradient needs
    y.sum().backward()


def test_nothing_is_recorded_without_a_need():
    x, weight, bias = operands()
    for _ in range(2):
        with torch.no_grad():
            assert not call(x, weight, bias).requires_grad
        assert not call(*(t.detach() for t in (x, weight, bias))).requires_grad
        assert call(x, weight, bias).requires_grad


def test_a_gradient_of_a_gradient_is_recorded_only_where_it_is_asked_for():
    x, weight, bias = operands()
    y = call(x, weight, bias)
    assert not any(
        t.requires_grad for t in torch.autograd.grad(y.sum(), (x, weight, bias), retain_graph=True)
    )
    to_x, to_weight, to_bias = torch.autograd.grad(y.sum(), (x, weight, bias), create_graph=True)
    assert to_x.requires_grad and to_weight.requires_grad and not to_bias.requires_grad


@pytest.mark.parametrize("needed", [(False, True, False), (True, True, False)], ids=str)
def test_second_derivatives_by_way_of_one_operand_of_a_weights_gradient(needed):
    """By way of the gradient alone, where x requires none, or of x, where that is constant."""
    tensors = operands(grad=needed)
    place = 0 if needed[0] else 1
    found, wanted = [], []
    for run, made in ((call, found), (expected, wanted)):
        y = run(*tensors)
        loss = y.sum() if needed[0] else y.square().sum()
        (slope,) = torch.autograd.grad(loss, tensors[1], create_graph=True)
        made += torch.autograd.grad(slope.square().sum(), tensors[place])
    close(found, wanted)


@pytest.mark.parametrize("batch_last", [False, True])
def test_gradients_without_memory(batch_last):
    """Zero tensors, as other functions may hand them back, whole or a view of them."""
    factor = FACTOR.replace(batch_last=batch_last)
    tensors = operands(batch_last)
    shape = (OUT, 2, 3) if batch_last else (2, 3, OUT)
    longer = (OUT + 1, 2, 3) if batch_last else (3, 3, OUT)
    zeros = torch._efficientzerotensor(shape), torch._efficientzerotensor(longer)[1:]
    for create_graph in (False, True):
        for zero in (*zeros, values(*shape), *zeros):  # without a plan, and with one
            y = kl.run_kernel(factor, *tensors[:2], bias=tensors[2])
            wanted = reference.kronecker_sparse(factor, *tensors[:2], {"bias": tensors[2]})
            found, expected_ = (
                torch.autograd.grad(each, tensors, given, create_graph=create_graph)
                for each, given in ((y, zero), (wanted, zero.clone()))
            )
            close(found, expected_)
            assert not any(t._is_zerotensor() for t in found[:2])


def test_checkpoints_and_hooks_are_torchs():
    tensors = operands()
    wanted = torch.autograd.grad(call(*tensors).square().sum(), tensors)
    for reentrant in (False, True):
        for t in tensors:
            t.grad = None
        y = torch.utils.checkpoint.checkpoint(call, *tensors, use_reentrant=reentrant)
        y.square().sum().backward()
        assert all(map(torch.equal, (t.grad for t in tensors), wanted))
    with torch.autograd.graph.save_on_cpu():
        y = call(*tensors)
    assert all(map(torch.equal, torch.autograd.grad(y.square().sum(), tensors), wanted))


def test_autocast_of_a_backward_pass_changes_nothing():
    tensors = operands()
    y = call(*tensors)
    wanted = torch.autograd.grad(y.sum(), tensors, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.autograd.grad(y.sum(), tensors)
    assert all(map(torch.equal, found, wanted))


# Who must see operators sees them.


def test_who_records_a_backward_pass_sees_the_operators():
    tensors = operands()
    y = call(*tensors)

    def backward(grad):
        return torch.autograd.grad(y, tensors, grad, retain_graph=True)

    grad = values(*y.shape)
    graph = make_fx(backward)(grad)
    assert {str(node.target) for node in graph.graph.nodes} >= OURS
    assert all(map(torch.equal, graph(grad), backward(grad)))
    with Listening() as mode:
        backward(grad)
    assert set(mode.seen) >= OURS
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        found = backward(fake.from_tensor(grad))
    assert [t.shape for t in found] == [t.shape for t in tensors]


def test_a_mode_sees_the_operator_of_a_forward_pass():
    with Listening() as mode:
        call(*operands())
    assert "kernlib.kronecker_sparse_product.default" in mode.seen


# Transforms.


@pytest.mark.parametrize("create_graph", [False, True])
def test_batches_of_gradients(create_graph):
    tensors = operands()
    y, other = call(*tensors), expected(*tensors)
    grads = values(5, *y.shape)
    found, wanted = (
        torch.autograd.grad(t, tensors, grads, is_grads_batched=True, create_graph=create_graph)
        for t in (y, other)
    )
    close(found, wanted)
    assert [t.requires_grad for t in found] == [t.requires_grad for t in wanted]


def test_transforms_of_torch_func_go_through():
    x, weight, bias = operands(grad=(False, False, False))

    def loss(run, weight, x):
        return run(x, weight, bias).square().sum()

    for transform in (
        lambda run: torch.func.grad(lambda w: loss(run, w, x))(weight),
        lambda run: torch.vmap(torch.func.grad(lambda w, x: loss(run, w, x)), (None, 0))(weight, x),
        lambda run: torch.func.jvp(lambda w: run(x, w, bias), (weight,), (weight,))[1],
        lambda run: torch.func.hessian(lambda b: run(x, weight, b).square().sum())(bias),
    ):
        call(x, weight, bias)  # the plan is there
        close([transform(call)], [transform(expected)])


def test_a_transform_that_does_not_touch_a_call_leaves_its_gradient():
    """Functions of torch.autograd would refuse it."""
    tensors = operands()
    found, wanted = (
        torch.autograd.grad(
            torch.func.grad(lambda scale, run=run: (scale * run(*tensors)).square().sum())(
                torch.ones(())
            ),
            tensors,
        )
        for run in (call, expected)
    )
    close(found, wanted)
    found = torch.vmap(lambda scale: scale * call(*tensors).sum())(torch.ones(3))
    assert found.requires_grad and torch.equal(found[0], call(*tensors).sum())


@pytest.mark.parametrize("recording", [False, True])
def test_tangents_are_not_dropped(recording):
    x, weight, bias = operands()
    call(x, weight, bias)
    with torch.autograd.forward_ad.dual_level(), torch.set_grad_enabled(recording):
        y = call(torch.autograd.forward_ad.make_dual(x, 2 * x.detach()), weight, bias)
        found = torch.autograd.forward_ad.unpack_dual(y).tangent
    close([found], [2 * (expected(x, weight, bias) - bias)])
