"""Values on the GPU against float64: every kernel that could compute a product, and the rule."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import kernlib as kl
from kernlib.families.kronecker_sparse import operation as primitives
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from tests.gpu.families.kronecker_sparse import cases as ks

# Strides of whole 16 bytes or not, one row, tiles and their neighbours, several waves of tiles.
BATCHES = (1, 2, 3, 5, 8, 127, 128, 129, 1000, 25089, 25096)
WHOLE = (1000, 25089, 25096)  # those that every candidate computes, others one of each kind
# More terms than one part of 3xTF32 sums has, and than the kernels of a product take.
LONG = ((1, 9, 2500, 1), (2, 20, 1100, 2), (1, 40, 4100, 1), (1, 8, 8200, 1))


@pytest.fixture(scope="module")
def problems() -> list:
    """Those of test_products and test_long_sums."""
    found = [
        ((), ks.problem_of(ks.product(p, n, last), *ks.meta(p, batch, n, last)))
        for p in (*ks.PATTERNS, *LONG)
        for n in ks.NUMBERS
        for last in ks.LAYOUTS
        for batch in BATCHES
    ]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module", autouse=True)
def built(problems):
    ks.build([spec for each in problems for spec in ks.specs_of(*each, every=True)])


@ks.both_layouts
@ks.all_numbers
@pytest.mark.parametrize("pattern", ks.PATTERNS, ids=str)
def test_products(pattern, numbers, batch_last, seed):
    for batch in BATCHES:
        x, weight = ks.operands(pattern, batch, numbers, batch_last)
        descriptor, every = ks.product(pattern, numbers, batch_last), batch in WHOLE
        ks.check(descriptor, x, weight, numbers, every=every)


@ks.both_layouts
@ks.all_numbers
@pytest.mark.parametrize("pattern", LONG, ids=str)
def test_long_sums(pattern, numbers, batch_last, seed):
    for batch in (3, 128, 1000):
        x, weight = ks.operands(pattern, batch, numbers, batch_last)
        ks.check(ks.product(pattern, numbers, batch_last), x, weight, numbers, every=True)


@ks.both_layouts
@ks.all_numbers
@pytest.mark.parametrize("batch", (0, (0,), (3, 0), (2, 0, 5)), ids=str)
def test_an_empty_batch(batch, numbers, batch_last, seed):
    x, weight = ks.operands((2, 3, 5, 4), batch, numbers, batch_last)
    wanted = ks.exact(x, weight, batch_last).shape
    descriptor = ks.product((2, 3, 5, 4), numbers, batch_last, (kl.Bias(), kl.Relu()))
    bias = ks.random(24, dtype=x.dtype)
    found = kl.run_kernel(descriptor, x, weight, bias=bias)
    assert found.shape == wanted and found.dtype == x.dtype
    out = torch.empty_like(found)
    assert kl.run_kernel(descriptor, x, weight, bias=bias, out=out) is out
    grad = primitives.weight_gradient(found, x, (2, 3, 5, 4), batch_last)
    assert grad.shape == (2, 3, 5, 4) and (grad == 0).all()


@ks.both_layouts
@ks.all_numbers
@pytest.mark.parametrize("pattern", ((2, 3, 5, 4), *ks.FEW, (1, 72, 130, 2)), ids=str)
def test_gradients_of_a_weight(pattern, numbers, batch_last, seed):
    """Every kernel of them: the batch is the depth, in parts where it is long."""
    a, b, c, d = pattern
    precision = "tf32" if numbers == "tf32" else "fp32"
    cases, problems = [], []
    for batch in (1, 3, 128, 129, 1000, 5000, 25088):
        x, _ = ks.operands(pattern, batch, numbers, batch_last)
        grad = ks.random(*ks.shape_of(a * b * d, (batch,), batch_last), dtype=x.dtype)
        with ks.choosing(None) as seen:
            primitives.weight_gradient(grad, x, pattern, batch_last, precision)
        cases.append((grad, x))
        problems += seen.planned
    ks.build([spec for each in problems for spec in ks.specs_of(*each, every=True)])
    for grad, x in cases:
        left, right = (t.double() if batch_last else t.double().mT for t in (grad, x))
        left, right = left.reshape(a, b, d, -1), right.reshape(a, c, d, -1)
        wanted = torch.einsum("ijln,ikln->ijkl", left, right)
        call = partial(primitives.weight_gradient, grad, x, pattern, batch_last, precision)
        for name, found in ks.each(call, every=True):
            assert found.shape == pattern and found.is_contiguous()
            error = ks.relative_error(found, wanted)
            assert error <= ks.TOLERANCE[numbers], f"{tuple(x.shape)} {name}: error {error:.2e}"


def test_every_kind_of_kernel_is_a_candidate_here(problems, seed):
    """So that none goes by without a test."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("other GPUs lack Hopper's kinds")
    with ks.choosing(None) as seen:
        for pattern in (*ks.FEW, (1, 48, 40, 2)):
            for last in ks.LAYOUTS:
                x, weight = ks.operands(pattern, 5000, "fp16", last)
                y = kl.run_kernel(ks.product(pattern, "fp16", last), x, weight)
                primitives.weight_gradient(y, x, pattern, last)
    planned = (*problems, *seen.planned)
    found = {choice["kind"] for _, problem in planned for choice in ks.candidates(problem)}
    assert found == {kernel.name for kernel in lowering.kernels()}


@ks.both_layouts
@ks.few_patterns
def test_rows_of_every_scale_keep_their_accuracy(pattern, batch_last, seed):
    x, weight = ks.operands(pattern, 1000)
    scales = torch.linspace(-12, 12, 1000, device=ks.DEVICE).round()[torch.randperm(1000)]
    x = x * torch.exp2(scales)[:, None]
    x = x.mT.contiguous() if batch_last else x
    ks.check(ks.product(pattern, "fp32", batch_last), x, weight, "fp32")


@ks.both_layouts
@ks.all_numbers
@ks.few_patterns
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf))
def test_what_is_not_finite_stays_in_its_products(bad, pattern, numbers, batch_last, seed):
    """In the outputs of its vector and of its block (i, l), whatever tile it shares with others. An
    infinity may become NaN: it has no low word."""
    descriptor = ks.product(pattern, numbers, batch_last)
    x, weight = ks.operands(pattern, 200, numbers, batch_last)
    spoilt = x.clone()
    by_row = spoilt.mT if batch_last else spoilt
    touched = torch.zeros(200, descriptor.out_features, dtype=torch.bool, device=ks.DEVICE)
    for row, feature in ((0, 0), (63, descriptor.in_features - 1), (199, 7)):
        by_row[row, feature] = bad
        touched[row] |= ks.matrix(weight)[:, feature] != 0
    touched = touched.mT if batch_last else touched

    def call() -> tuple[torch.Tensor, ...]:
        return kl.run_kernel(descriptor, x, weight), kl.run_kernel(descriptor, spoilt, weight)

    for name, (clean, found) in ks.each(call):
        assert torch.equal(~found.isfinite(), touched), name
        assert torch.equal(found[~touched], clean[~touched]), name


# Epilogues: their arguments for a number of output features, and what torch makes of a product.


EPILOGUES = {
    "bias": ((kl.Bias(),), lambda v, bias: v + bias),
    "bias, gelu": ((kl.Bias(), kl.Gelu()), lambda v, bias: F.gelu(v + bias)),
    "relu": ((kl.Relu(),), F.relu),
    "silu": ((kl.Silu(),), F.silu),
    "scale": ((kl.Scale(),), lambda v, scale: v * scale),
    "all": (
        (kl.Scale(), kl.Bias(), kl.Gelu("tanh"), kl.Bias("late"), kl.Scale("gain")),
        lambda v, scale, bias, late, gain: (
            gain * (F.gelu(v * scale + bias, approximate="tanh") + late)
        ),
    ),
}  # fmt: skip


def arguments_of(descriptor, dtype: torch.dtype) -> dict:
    """Vectors of ``dtype``; of scalars one on the device, others as numbers."""
    made = {}
    for name in descriptor.parameters:
        if name in descriptor.vectors:
            made[name] = ks.random(descriptor.out_features, dtype=dtype)
        else:
            made[name] = torch.tensor(0.3125, device=ks.DEVICE) if name == "scale" else -1.75
    return made


@ks.both_layouts
@pytest.mark.parametrize(
    "name, numbers",
    [
        *((name, numbers) for name in EPILOGUES for numbers in ("fp32", "fp16")),
        ("bias, gelu", "bf16"),
        ("all", "bf16"),
    ],
)
def test_epilogues(name, numbers, batch_last, seed):
    """Fused into each kind of kernel: features of every tile's edge, of blocks and of lanes."""
    epilogue, function = EPILOGUES[name]
    dtype, cases = ks.DTYPES[numbers], []
    for pattern, batch in (
        (ks.LANES, 200),
        (ks.BLOCKS, 200),
        (ks.ODD, 1100),
        ((1, 514, 20, 2), 136),
    ):
        descriptor = ks.product(pattern, numbers, batch_last, epilogue)
        given = arguments_of(descriptor, dtype)
        cases.append((descriptor, *ks.operands(pattern, batch, numbers, batch_last), given))
    problems = [ks.problem_of(d, x, weight, **given) for d, x, weight, given in cases]
    ks.build([spec for problem in problems for spec in ks.specs_of(epilogue, problem)])
    for descriptor, x, weight, given in cases:
        vectors = {name: ks.lay(given[name], batch_last) for name in descriptor.vectors}
        values = {name: vectors.get(name, value) for name, value in given.items()}
        wanted = function(ks.exact(x, weight, batch_last), **values)
        tolerance = 2e-6 if numbers == "fp32" else None  # of two functions
        ks.check(descriptor, x, weight, numbers, wanted=wanted, tolerance=tolerance, **given)


@ks.both_layouts
def test_epilogues_far_from_zero(batch_last, seed):
    """Where exp of what they receive is no float any more. Values are off by 0.01 there."""
    x, weight = ks.operands(ks.LANES, 128, "fp32", batch_last)
    for epilogue, function in (
        (kl.Silu(), F.silu), (kl.Sigmoid(), torch.sigmoid), (kl.Gelu("tanh"), F.gelu),
        (kl.Tanh(), torch.tanh), (kl.LeakyRelu(0.1), lambda v: F.leaky_relu(v, 0.1)),
    ):  # fmt: skip
        wanted = function(ks.exact(1e4 * x, weight, batch_last))
        descriptor = ks.product(ks.LANES, "fp32", batch_last, epilogue)
        ks.check(descriptor, 1e4 * x, weight, "fp32", wanted=wanted, tolerance=1e-3)


@ks.both_layouts
def test_float64_by_the_library(batch_last, seed):
    for pattern in ((2, 3, 5, 4), ks.BLOCKS):
        x, weight = (t.double() for t in ks.operands(pattern, 129, "fp32", batch_last))
        descriptor = kl.KroneckerSparse(
            *pattern, batch_last=batch_last, epilogue=(kl.Bias(), kl.Gelu())
        )
        bias = ks.random(descriptor.out_features, dtype=torch.float64)
        wanted = F.gelu(ks.exact(x, weight, batch_last) + ks.lay(bias, batch_last))
        out = torch.full_like(wanted, ks.POISON)
        with ks.choosing(None) as seen:
            kl.run_kernel(descriptor, x, weight, bias=bias, out=out)
        assert ks.relative_error(out, wanted) <= 1e-13 and not seen.launched


@ks.all_numbers
@ks.both_layouts
def test_a_chain_is_the_product_of_its_factors(batch_last, numbers, seed):
    patterns = ((2, 48, 192, 1), (1, 192, 48, 2))
    ends = ((), (kl.Bias(), kl.Relu()))
    chain = kl.KroneckerSparseChain(
        [ks.product(p, numbers, batch_last, end) for p, end in zip(patterns, ends, strict=True)]
    )
    x, first = ks.operands(patterns[0], (5, 40), numbers, batch_last)
    second, bias = ks.random(*patterns[1], dtype=x.dtype), ks.random(384, dtype=x.dtype)
    whole = ks.matrix(second) @ ks.matrix(first)
    laid = bias.double().view(-1, 1, 1) if batch_last else bias.double()
    wanted = F.relu(ks.times(whole, x.double(), batch_last) + laid)
    found = kl.run_kernel(chain, x, first, second, bias=bias)
    assert ks.relative_error(found, wanted) <= 2 * ks.TOLERANCE[numbers]
