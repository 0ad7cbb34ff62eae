"""torch.compile, its CUDA graphs and torch's own checks of operators: all give the eager result."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import kernlib as kl
from kernlib.nn import KSLinear
from tests.gpu.families.kronecker_sparse import cases as ks

END = (kl.Bias(), kl.Gelu())
STEPS = 4  # with CUDA graphs the first runs eagerly, the second records, the others replay


@pytest.fixture(scope="module", autouse=True)
def built():
    """The kernels of most tests here, compiled side by side."""
    cases = [(p, n, 136) for p in (ks.LANES, ks.BLOCKS) for n in ("fp32", "fp16")]
    cases += [(ks.LANES, n, batch) for n in ("fp32", "fp16") for batch in (40, 129, 1000, 5001)]
    cases += [(pattern, n, 256) for pattern in ks.CHAIN for n in ("fp32", "bf16")]
    specs = []
    for pattern, numbers, batch in cases:
        for last in ks.LAYOUTS:
            descriptor = ks.product(pattern, numbers, last, END)
            specs += ks.specs_of_step(descriptor, batch, numbers)
    ks.build(specs)


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def close(found, wanted, numbers: str) -> None:
    """Equal but for what Inductor fuses around the operators."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert ks.relative_error(ours, theirs.detach().double()) <= 2 * ks.TOLERANCE[numbers]


def step(call, *tensors) -> tuple[torch.Tensor, ...]:
    """The result of a call, and the gradients of its square."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = call(*leaves)
    return y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)


@ks.both_layouts
@pytest.mark.parametrize("pattern, numbers", ((ks.LANES, "fp16"), (ks.BLOCKS, "fp32")), ids=str)
def test_a_compiled_step_is_the_eager_one(pattern, numbers, batch_last, seed):
    descriptor = ks.product(pattern, numbers, batch_last, END)

    def call(x, weight, bias):
        return 2 * kl.run_kernel(descriptor, x + 1, weight, bias=bias)

    compiled = torch.compile(call, fullgraph=True)
    for _ in range(2):
        x, weight = ks.operands(pattern, 136, numbers, batch_last)
        bias = ks.random(descriptor.out_features, dtype=x.dtype)
        close(step(compiled, x, weight, bias), step(call, x, weight, bias), numbers)
        with torch.no_grad():
            close([compiled(x, weight, bias)], [call(x, weight, bias)], numbers)


@ks.both_layouts
def test_a_dynamic_batch(batch_last, seed):
    """One program for all sizes, forward and backward."""
    descriptor = ks.product(ks.LANES, "fp32", batch_last, END)
    programs = []

    def count(module, inputs):
        programs.append(module)
        return module

    def call(x, weight, bias):
        return kl.run_kernel(descriptor, x, weight, bias=bias) + 1

    compiled = torch.compile(call, fullgraph=True, dynamic=True)
    counted = torch.compile(call, fullgraph=True, dynamic=True, backend=count)
    for batch in (136, 129, 1000, 5001, 136):  # a 40 would count as that of the pattern
        x, weight = ks.operands(ks.LANES, batch, "fp32", batch_last)
        bias = ks.random(descriptor.out_features)
        close(step(compiled, x, weight, bias), step(call, x, weight, bias), "fp32")
        counted(x, weight, bias)
    assert len(programs) == 1


@ks.both_layouts
@pytest.mark.parametrize("numbers", ("fp32", "fp16"))
def test_replays_see_weights_that_were_written(numbers, batch_last, seed):
    """With CUDA graphs: x, weight and bias change in place and by other tensors."""
    descriptor = ks.product(ks.LANES, numbers, batch_last, END)
    _, weight = ks.operands(ks.LANES, 136, numbers, batch_last)
    bias = ks.random(descriptor.out_features, dtype=weight.dtype)

    def call(x, weight, bias):
        return kl.run_kernel(descriptor, x, weight, bias=bias)

    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for _ in range(STEPS):
        x, _ = ks.operands(ks.LANES, 136, numbers, batch_last)
        weight.data.copy_(torch.randn_like(weight))
        bias.copy_(torch.randn_like(bias))
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            close([compiled(x, weight, bias).clone()], [call(x, weight, bias)], numbers)


@ks.both_layouts
@pytest.mark.parametrize("amp", (None, torch.bfloat16), ids=str)
def test_a_compiled_layer_trains_like_an_eager_one(amp, batch_last, seed):
    plain = KSLinear(ks.CHAIN, bs_last=batch_last, device=ks.DEVICE,
                     activation="gelu", algo="kernel")  # fmt: skip
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, fullgraph=True)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.5) for layer in (plain, other)]
    numbers = "fp32" if amp is None else "bf16"
    for _ in range(3):
        x, results = ks.random(*ks.shape_of(48, (4, 64), batch_last)), []
        for call, optimizer in zip((plain, compiled), optimizers, strict=True):
            optimizer.zero_grad()
            with torch.autocast(ks.DEVICE, dtype=amp or torch.bfloat16, enabled=amp is not None):
                y = call(x)
            y.float().square().mean().backward()
            optimizer.step()
            results.append([y])
        close(*results, numbers)
        close(other.parameters(), plain.parameters(), numbers)


def test_an_out_of_the_function_itself(seed):
    descriptor = ks.product(ks.BLOCKS, "fp16", False, kl.Relu())

    def call(x, weight):
        out = torch.zeros(136, descriptor.out_features, dtype=x.dtype, device=x.device)
        kl.run_kernel(descriptor, x, weight, out=out)
        return out + 1

    x, weight = ks.operands(ks.BLOCKS, 136, "fp16")
    close([torch.compile(call, fullgraph=True)(x, weight)], [call(x, weight)], "fp16")


def test_an_exported_program_is_the_eager_one(seed):
    layer = KSLinear((ks.BLOCKS,), device=ks.DEVICE, algo="kernel", activation="relu")
    rows = torch.export.Dim("rows", min=2)
    example = (ks.random(40, layer.in_features),)
    with torch.no_grad():
        program = torch.export.export(layer, example, dynamic_shapes=({0: rows},)).module()
        for batch in (40, 129):
            x = ks.random(batch, layer.in_features)
            assert torch.equal(program(x), layer(x))


def test_a_fake_tensor_never_finds_the_plan_of_a_real_one(seed):
    descriptor = ks.product(ks.LANES, "fp16")
    x, weight = ks.operands(ks.LANES, 136, "fp16")
    shape = kl.run_kernel(descriptor, x, weight).shape
    mode = FakeTensorMode()
    with mode:
        found = kl.run_kernel(descriptor, *(mode.from_tensor(t) for t in (x, weight)))
    assert found.fake_mode is mode and found.device == x.device and found.shape == shape


OPERATORS = torch.ops.kernlib


@pytest.mark.parametrize("recording", (False, True))
@pytest.mark.parametrize("batch_last, numbers", ((False, "fp16"), (True, "fp32")))
def test_torchs_own_checks_of_the_operators(numbers, batch_last, recording, seed):
    descriptor = ks.product(ks.LANES, numbers, batch_last, END)
    x, weight = ks.operands(ks.LANES, 40, numbers, batch_last)
    bias = ks.random(descriptor.out_features, dtype=x.dtype)
    grad = torch.randn_like(ks.exact(x, weight, batch_last)).to(x.dtype)
    kl.register_operators()
    x, weight, bias, grad = (t.requires_grad_(recording) for t in (x, weight, bias, grad))
    options = (batch_last, descriptor.precision, False)
    opcheck(OPERATORS.kronecker_sparse.default,
            (x, weight, descriptor.text, "bias", [], [bias], False))  # fmt: skip
    opcheck(OPERATORS.kronecker_sparse_product.default, (x, weight, bias, *options))
    opcheck(OPERATORS.kronecker_sparse_weight_gradient.default,
            (grad, x, list(ks.LANES), *options))  # fmt: skip
