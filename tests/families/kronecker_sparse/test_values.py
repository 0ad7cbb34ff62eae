"""The Kronecker-sparse op on CPU tensors: its values against loops over the formula, in float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import kernlib as kl
from kernlib.families.kronecker_sparse import reference

GATES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
PATTERN = (2, 3, 5, 4)
PATTERNS = [PATTERN, (1, 1, 1, 1), (1, 4, 7, 1), (3, 2, 2, 1), (1, 3, 4, 5), (4, 1, 6, 2),
            (2, 8, 1, 3)]  # fmt: skip
ODD = (1, 3, 7, 8, 10, 14, 20, 100, 514)


def matrix(pattern, weight):
    """K by loops over its formula."""
    a, b, c, d = pattern
    made = torch.zeros(a * b * d, a * c * d, dtype=torch.float64)
    for i, j, k, l in itertools.product(range(a), range(b), range(c), range(d)):
        made[i * b * d + j * d + l, i * c * d + k * d + l] = weight[i, j, k, l].double()
    return made


def operands(pattern, batch, batch_last=False, dtype=torch.float64, seed=0):
    """x, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    a, b, c, d = pattern
    shape = (a * c * d, *batch) if batch_last else (*batch, a * c * d)
    sizes = (shape, pattern, (a * b * d,))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in sizes]


def product(pattern, x, weight, batch_last, bias=None):
    """The formula in float64."""
    k, wide = matrix(pattern, weight), x.double()
    if batch_last:
        y = (k @ wide.reshape(k.shape[1], -1)).reshape(k.shape[0], *x.shape[1:])
        return y if bias is None else y + bias.double().view(-1, *[1] * (x.dim() - 1))
    y = wide @ k.T
    return y if bias is None else y + bias.double()


def assert_near(found, wanted, dtype=None):
    """Within the gate, as a whole."""
    gate = GATES[dtype or found.dtype]
    assert found.shape == wanted.shape
    error = (found.double() - wanted).norm()
    assert error <= gate * wanted.norm().clamp(min=1e-30), error / wanted.norm()


def run(pattern, x, weight, batch_last=False, **arguments):
    epilogue = kl.Bias() if "bias" in arguments else ()
    made = kl.KroneckerSparse(*pattern, batch_last=batch_last, epilogue=epilogue)
    return kl.run_kernel(made, x, weight, **arguments)


@pytest.mark.parametrize("dtype", GATES, ids=str)
@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_product_is_its_formula(pattern, batch_last, dtype):
    x, weight, bias = operands(pattern, (9,), batch_last, dtype)
    found = run(pattern, x, weight, batch_last, bias=bias)
    assert found.dtype == dtype and found.is_contiguous()
    assert_near(found, product(pattern, x, weight, batch_last, bias))
    assert_near(run(pattern, x, weight, batch_last), product(pattern, x, weight, batch_last))


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("batch", [0, 1, 2, 3, 5, 127, 129])
def test_any_batch(batch, batch_last):
    x, weight, bias = operands(PATTERN, (batch,), batch_last)
    found = run(PATTERN, x, weight, batch_last, bias=bias)
    assert_near(found, product(PATTERN, x, weight, batch_last, bias))
    around = torch.full([n + 4 for n in found.shape], 7.0, dtype=found.dtype)
    inside = around[2:-2, 2:-2].fill_(torch.nan)
    assert run(PATTERN, x, weight, batch_last, bias=bias, out=inside) is inside
    assert torch.equal(inside, found)
    inside.fill_(7.0)
    assert (around == 7.0).all()


@pytest.mark.parametrize("size", ODD)
@pytest.mark.parametrize("place", ["b", "c", "d"])
def test_any_size(place, size):
    sizes = {"a": 2, "b": 3, "c": 2, "d": 1} | {place: size}
    pattern = tuple(sizes.values())
    for batch_last in (False, True):
        x, weight, _ = operands(pattern, (3,), batch_last, torch.float32)
        assert_near(run(pattern, x, weight, batch_last), product(pattern, x, weight, batch_last))


def layouts(x):
    """The same values in other memory."""
    yield "turned", x.mT.contiguous().mT
    yield (
        "backwards",
        x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim()))),
    )
    wide = torch.zeros([2 * n + 1 for n in x.shape], dtype=x.dtype)
    yield "strided", wide[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)
    yield "unaligned", torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    yield "negated", torch.complex(x, -x).conj().imag


@pytest.mark.parametrize("batch_last", [False, True])
def test_any_strides(batch_last):
    x, weight, bias = operands(PATTERN, (3, 4), batch_last)
    wanted = run(PATTERN, x, weight, batch_last, bias=bias)
    for name, other in layouts(x):
        assert torch.equal(other, x)
        found = run(PATTERN, other, weight, batch_last, bias=bias)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=name)
    for name, other in layouts(weight):
        found = run(PATTERN, x, other, batch_last, bias=bias)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12, msg=name)
    doubled = torch.stack((bias, bias), 1)[:, 0]
    assert torch.equal(run(PATTERN, x, weight, batch_last, bias=doubled), wanted)


def test_an_expanded_input_is_taken():
    x, weight, _ = operands(PATTERN, (1,))
    found = run(PATTERN, x.expand(5, -1), weight)
    assert_near(found, product(PATTERN, x.expand(5, -1), weight, False))
    one = torch.ones(1, dtype=torch.float64)
    found = run(PATTERN, one.expand(3, 40), one.expand(PATTERN))
    assert torch.equal(found, torch.full((3, 24), 5.0, dtype=torch.float64))


# What holds for all factors.

small = st.integers(1, 6)
patterns = st.tuples(small, small, small, small)
batches = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=60)
@given(patterns, batches, st.booleans(), st.integers(0, 1000))
def test_batch_last_is_the_transpose_of_batch_first(pattern, batch, bias, seed):
    x, weight, added = operands(pattern, batch, seed=seed)
    given_bias = {"bias": added} if bias else {}
    first = run(pattern, x, weight, **given_bias)
    last = run(pattern, x.movedim(-1, 0), weight, batch_last=True, **given_bias)
    torch.testing.assert_close(last.movedim(0, -1), first, rtol=1e-12, atol=1e-12)
    assert_near(first, product(pattern, x, weight, False, added if bias else None))


@settings(max_examples=40)
@given(patterns, st.booleans(), st.integers(0, 1000))
def test_the_transposed_factor_is_the_adjoint(pattern, batch_last, seed):
    made = kl.KroneckerSparse(*pattern, batch_last=batch_last)
    x, weight, _ = operands(pattern, (3,), batch_last, seed=seed)
    y, _, _ = operands(made.transposed().pattern, (3,), batch_last, seed=seed + 1)
    left = (kl.run_kernel(made, x, weight) * y).sum()
    right = (x * kl.run_kernel(made.transposed(), y, weight.transpose(1, 2))).sum()
    torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)


@settings(max_examples=30)
@given(patterns, st.integers(0, 1000))
def test_the_dense_matrix_is_the_formula_and_its_density(pattern, seed):
    a, b, c, d = pattern
    _, weight, _ = operands(pattern, (1,), seed=seed)
    made = reference.dense(pattern, weight)
    assert torch.equal(made, matrix(pattern, weight))
    assert made.count_nonzero() == a * b * c * d
    assert a * b * c * d == made.numel() * kl.KroneckerSparse(*pattern).density


def test_the_dense_matrix_has_zeros_beside_what_is_not_finite():
    weight = torch.full(PATTERN, float("nan"))
    made = reference.dense(PATTERN, weight)
    assert made.isnan().sum() == weight.numel() and (made.nan_to_num(0) == 0).all()
    with pytest.raises(ValueError, match=r"weight must have shape \(2, 3, 5, 4\).*\(2, 3, 4, 5\)"):
        reference.dense(PATTERN, weight.mT)


def test_parts_of_one_tensor_that_share_nothing_may_be_x_and_out():
    memory = torch.randn(6, 24)
    wanted = run((2, 3, 3, 2), memory[:, :12].clone(), weight := torch.randn(2, 3, 3, 2))
    assert torch.equal(run((2, 3, 3, 2), memory[:, :12], weight, out=memory[:, 12:]), wanted)


ACTIVATIONS = {
    "relu": (kl.Relu(), F.relu),
    "gelu": (kl.Gelu(), F.gelu),
    "silu": (kl.Silu(), F.silu),
    "tanh": (kl.Tanh(), torch.tanh),
    "sigmoid": (kl.Sigmoid(), torch.sigmoid),
    "leaky": (kl.LeakyRelu(0.2), lambda v: F.leaky_relu(v, 0.2)),
    "laplace": (kl.Laplace(), lambda v: torch.exp(-v / 2)),
}


@pytest.mark.parametrize("dtype", GATES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_bias_and_activation_are_one_epilogue(name, dtype):
    activation, wanted = ACTIVATIONS[name]
    x, weight, bias = operands(PATTERN, (9,), dtype=dtype)
    values = {"bandwidth": 2.0} if name == "laplace" else {}
    for batch_last in (False, True):
        epilogue = (kl.Bias(), activation)
        made = kl.KroneckerSparse(*PATTERN, batch_last=batch_last, epilogue=epilogue)
        given_x = x.mT if batch_last else x
        found = kl.run_kernel(made, given_x, weight, bias=bias, **values)
        assert_near(found, wanted(product(PATTERN, given_x, weight, batch_last, bias)))


def test_scalars_are_numbers_or_tensors():
    epilogue = (kl.Scale(), kl.Bias(), kl.Custom("v * gain", ("gain",)), kl.Bias("late"))
    made = kl.KroneckerSparse(*PATTERN, epilogue=epilogue)
    x, weight, bias = operands(PATTERN, (9,))
    wanted = (product(PATTERN, x, weight, False) * 3 + bias) * 0.5 - bias
    for scale, gain in ((3, 0.5), (3.0, torch.tensor(0.5)), (torch.tensor(3), torch.tensor(0.5))):
        found = kl.run_kernel(made, x, weight, bias=bias, scale=scale, gain=gain, late=-bias)
        assert_near(found, wanted)


# Chains.

VIT = {
    "qkv": ((2, 48, 192, 1), (1, 192, 48, 2)),
    "up": ((6, 64, 64, 1), (1, 768, 192, 2)),
    "down": ((6, 64, 256, 1), (1, 128, 128, 3)),
}


@pytest.mark.parametrize("batch_last", [False, True])
@pytest.mark.parametrize("name", VIT)
def test_a_chain_is_the_product_of_its_factors(name, batch_last):
    factors = [kl.KroneckerSparse(*p, batch_last=batch_last) for p in VIT[name]]
    chain = kl.KroneckerSparseChain(factors)
    weights = [torch.randn(p) / p[2] ** 0.5 for p in VIT[name]]
    whole = torch.eye(chain.in_features, dtype=torch.float64)
    for pattern, weight in zip(VIT[name], weights, strict=True):
        whole = reference.dense(pattern, weight.double()) @ whole
    x = torch.randn(5, chain.in_features)
    wanted = x.double() @ whole.T
    found = kl.run_kernel(chain, x.mT if batch_last else x, *weights)
    assert_near(found, wanted.mT if batch_last else wanted)
    assert torch.equal(reference.chain(chain, x.mT if batch_last else x, weights), found)


def test_each_factor_of_a_chain_has_its_own_epilogue():
    first = kl.KroneckerSparse(2, 3, 5, 4, epilogue=(kl.Bias("b1"), kl.Relu()))
    second = kl.KroneckerSparse(3, 2, 8, 1, epilogue=(kl.Scale(), kl.Bias("b2")))
    chain = kl.KroneckerSparseChain((first, second))
    x, w1, b1 = operands(first.pattern, (2, 3))
    _, w2, b2 = operands(second.pattern, (1,))
    middle = F.relu(product(first.pattern, x, w1, False, b1))
    wanted = product(second.pattern, middle, w2, False) * 0.5 + b2
    out = torch.empty(2, 3, 6, dtype=torch.float64)
    found = kl.run_kernel(chain, x, w1, w2, b1=b1, b2=b2, scale=0.5, out=out)
    assert found is out
    assert_near(out, wanted)


# Settings of torch.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_that_of_a_linear_layer(dtype):
    x, weight, bias = operands((1, 6, 9, 1), (4,), dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        found = run((1, 6, 9, 1), x, weight, bias=bias)
        wanted = F.linear(x, weight[0, :, :, 0], bias)
        kept = run((1, 6, 9, 1), *(t.double() for t in (x, weight)), bias=bias.double())
        of_two = run((1, 6, 9, 1), x.bfloat16(), weight, bias=bias.half())
    assert found.dtype == wanted.dtype == of_two.dtype == dtype and kept.dtype == torch.float64
    low = [t.to(dtype) for t in (x, weight, bias)]
    assert torch.equal(found, run((1, 6, 9, 1), *low[:2], bias=low[2]))
    torch.testing.assert_close(found, wanted)
    mixed = run((1, 6, 9, 1), x, weight)
    with torch.autocast("cpu", dtype=dtype, enabled=False):
        assert torch.equal(run((1, 6, 9, 1), x, weight), mixed)


def test_no_setting_of_precision_changes_cpu_results():
    x, weight, _ = operands(PATTERN, (4,), dtype=torch.float32)
    wanted = run(PATTERN, x, weight)
    for precision in ("fp32", "tf32", "bf16"):
        made = kl.KroneckerSparse(*PATTERN, precision=precision)
        assert torch.equal(kl.run_kernel(made, x, weight), wanted)


def test_inference_mode_is_no_hindrance():
    x, weight, bias = operands(PATTERN, (4,))
    with torch.inference_mode():
        out = run(PATTERN, x.clone(), weight, bias=bias)
        run(PATTERN, x, weight, bias=bias, out=out)
    assert_near(out, product(PATTERN, x, weight, False, bias))


def test_prepare_checks_and_compile_takes_cpu_tensors_for_those_of_a_gpu():
    x, weight, bias = operands(PATTERN, (4,), dtype=torch.float32)
    made = kl.KroneckerSparse(*PATTERN, epilogue=kl.Bias())
    kl.prepare(made, x, weight, bias=bias)
    with pytest.raises(ValueError, match="needs bias"):
        kl.prepare(made, x, weight)
    kl.prepare(made, x.requires_grad_(), weight, bias=bias)
    doubles = [t.double() for t in (x, weight)]
    assert kl.compile(made, specs=tuple(doubles), bias=bias.double()) == []
