"""Every bad call of a Kronecker product says which argument is wrong, and what was given."""

import math
from functools import partial

import pytest
import torch

import kernlib as kl
from kernlib import ahead
from kernlib.families.kronecker_product import operators
from kernlib.runtime import operation

SHAPES = ((3, 2), (4, 5))
PLAIN = kl.KroneckerProduct(SHAPES)
LEFT = PLAIN.replace(side="left")
TURNED = PLAIN.replace(transposed=(True, False))
BIASED = PLAIN.replace(epilogue=(kl.Bias(), kl.Gelu()))
SCALED = PLAIN.replace(epilogue=kl.Scale())
ALONE = kl.KroneckerProduct(((12, 10),))


def ones(*shape, **options):
    return torch.ones(shape, **options)


X, A, B, BIAS, Y = ones(6, 12), ones(3, 2), ones(4, 5), ones(10), ones(6, 10)
F = [A, B]


def sparse(x):
    return x.to_sparse()


def meta(t):
    return t.to("meta")


def negated(*shape):
    return (ones(*shape) * 1j).conj().imag


def inference(*shape):
    with torch.inference_mode():
        return ones(*shape)


def call(descriptor, *tensors, **arguments):
    return lambda: kl.run_kernel(descriptor, *tensors, **arguments)


def matmul(x=X, factors=F, **arguments):
    return lambda: kl.kron_matmul(x, factors, **arguments)


added = partial(matmul, beta=2.0)
SPREAD = ones(1, 10).expand(6, 10)
ZERO = torch._efficientzerotensor((6, 10))
ONE_DTYPE = "x and {} must have one dtype, got torch.float32 and torch.float64"

TYPE_ERRORS = {
    "x int": (
        matmul(X.int(), [f.int() for f in F]),
        r"x must be one of float32, float16, bfloat16, float64, got torch\.int32",
    ),
    "x int, scaled": (matmul(X.int(), alpha=2.0), "x must be one of .*torch.int32"),
    "factors tensor": (matmul(X, A), "factors must be a list or tuple of matrices, got Tensor"),
    "factors generator": (matmul(X, (f for f in F)), "factors must be .*got generator"),
    "two dtypes": (matmul(X, [A, B.double()]), ONE_DTYPE.format(r"factors\[1\]")),
    "two dtypes, scaled": (
        matmul(X.half(), [A.half(), B], alpha=2.0),
        r"x and factors\[1\] must have one dtype, got torch.float16 and torch.float32",
    ),
    "alpha bool": (matmul(alpha=True), "alpha must be .*got True"),
    "y double": (added(y=Y.double()), ONE_DTYPE.format("y")),
    "y unread": (matmul(beta=0, y=Y.int()), "y must be .*got torch.int32"),
    "debug 1": (matmul(debug=1), "debug must be a bool, got 1"),
    "unknown": (matmul(gain=1), "gain"),
    "by position": (lambda: kl.kron_matmul(X, F, 2.0), "positional"),
    "no factors": (lambda: kl.kron_matmul(X), "factors"),
    # run_kernel
    "a list of factors": (call(PLAIN, X, F), "takes x and 2 factors in their order, got 1"),
    "lists of factors": (call(PLAIN, X, F, F), r"factors\[0\] must be a tensor, got list"),
    "a factor missing": (call(PLAIN, X, A), r"KroneckerProduct\(3x2, 4x5\) takes .*, got 1"),
    "a factor more": (call(PLAIN, X, *F, A), "takes x and 2 factors in their order, got 3"),
    "x alone": (call(ALONE, X), "takes x and one factor, got 0"),
    "nothing": (call(PLAIN), "takes x and 2 factors in their order, got neither"),
    "bias double": (call(BIASED, X, *F, bias=BIAS.double()), ONE_DTYPE.format("bias")),
    "unknown bias": (call(PLAIN, X, *F, bias=BIAS), "bias is no argument of .*it takes none"),
    "unknown gain": (call(BIASED, X, *F, bias=BIAS, gain=1), "gain is no argument .*takes bias"),
    "alpha of run_kernel": (call(PLAIN, X, *F, alpha=2.0), "alpha is no argument of"),
}
VALUE_ERRORS = {
    "x 0-D": (matmul(ones()), r"x must be \(\.\.\., 12\) for .*3x2, 4x5\), got shape \(\)"),
    "x features": (matmul(ones(6, 13)), r"x must be \(\.\.\., 12\) .*got shape \(6, 13\)"),
    "x on the left": (
        matmul(X, side="left"),
        r"x must be \(10,\) or \(\.\.\., 10, M\) for .*4x5, left\), got shape \(6, 12\)",
    ),
    "x vector on the left": (matmul(ones(12), side="left"), r"x must be \(10,\) or"),
    "no factors": (matmul(X, []), "factors must hold at least one matrix, got none"),
    "a vector": (matmul(X, [ones(3), B]), r"factors\[0\] must be a matrix, .*\(3,\)"),
    "a number": (matmul(X, [A, ones()]), r"factors\[1\] must be a matrix, got shape \(\)"),
    "a size of 0": (
        matmul(X, [A, ones(4, 0)]),
        r"factors\[1\] must have sizes above 0, .*\(4, 0\)",
    ),
    "65 of 2": (matmul(X, [ones(2, 2)] * 65), r"shapes multiply to 2\*\*60"),
    "batches": (
        matmul(ones(4, 6, 12), [ones(3, 3, 2), B]),
        r"dimensions in front .* must broadcast, .*got x \(4,\), factors\[0\] \(3,\)",
    ),
    "batches of factors": (
        matmul(X, [ones(2, 3, 2), ones(3, 4, 5)]),
        r"must broadcast, .*got factors\[0\] \(2,\), factors\[1\] \(3,\)",
    ),
    "batch of a vector": (
        matmul(ones(12), [ones(2, 3, 2), ones(3, 4, 5)]),
        r"must broadcast, .*got factors\[0\] \(2,\), factors\[1\] \(3,\)",
    ),
    "a factor's device": (matmul(X, [A, meta(B)]), r"x and factors\[1\] .*cpu and meta"),
    "side": (matmul(side="top"), r"side must be one of \('right', 'left'\), got 'top'"),
    "precision": (matmul(precision="fp8"), "precision must be None or one of .*'fp8'"),
    "alpha nan": (matmul(alpha=math.nan), "alpha must be a number, got nan"),
    "beta without y": (matmul(beta=2.0), "beta says how much of y is added, and no y is given"),
    "beta tensor without y": (matmul(beta=torch.tensor(0.0)), "beta says .* no y is given"),
    "y columns": (added(y=ones(6, 9)), r"y must broadcast to \(6, 10\), got \(6, 9\)"),
    "y of a vector": (added(ones(12), y=Y), r"y must broadcast to \(10,\), got \(6, 10\)"),
    "y unread": (matmul(beta=0.0, y=ones(6, 9)), r"y must broadcast to \(6, 10\), got \(6, 9\)"),
    "y's device": (added(y=meta(Y)), "x and y must be on one device, got cpu and meta"),
    # run_kernel
    "a factor's shape": (
        call(PLAIN, X, A.mT, B),
        r"factors\[0\] must have shape \(3, 2\), or a batch of it, got \(2, 3\)",
    ),
    "a factor not turned": (call(TURNED, X, A, B), r"factors\[0\] must have shape \(2, 3\)"),
    "a flat factor": (call(PLAIN, X, A, B.flatten()), r"factors\[1\] must have .*got \(20,\)"),
    "x left": (call(LEFT, X, *F), r"x must be \(10,\) or \(\.\.\., 10, M\)"),
    "bias long": (call(BIASED, X, *F, bias=ones(12)), r"bias must have shape \(10,\), got \(12,\)"),
    "bias missing": (call(BIASED, X, *F), "needs bias"),
    "scale (L,)": (call(SCALED, X, *F, scale=ones(6)), r"scale must have shape \(\), got \(6,\)"),
}
# Of out, by each way that a call may go.
OUT_TYPE_ERRORS = {
    "list": ([], "out must be a tensor, got list"),
    "sparse": (sparse(Y), "out must be a dense tensor, .*sparse_coo"),
    "double": (Y.double(), "out must be torch.float32 as x is, got torch.float64"),
    "int": (Y.int(), "out must be torch.float32 as x is, got torch.int32"),
}
OUT_VALUE_ERRORS = {
    "turned": (ones(10, 6), r"out must have shape \(6, 10\), got \(10, 6\)"),
    "flat": (ones(60), r"out must have shape \(6, 10\), got \(60,\)"),
    "batch": (ones(2, 6, 10), r"out must have shape \(6, 10\), got \(2, 6, 10\)"),
    "device": (meta(Y), "out must be on the device of x, cpu, got meta"),
    "expanded": (SPREAD, r"out overlaps itself.*\(0, 1\)"),
    "negated": (negated(6, 10), "out is a negated view"),
    "zero": (ZERO, r"out is a zero tensor.*no memory; pass out\.clone\(\)"),
    "inference": (inference(6, 10), "out was made in inference mode"),
}
WAYS = {
    "plain": {},
    "alpha": {"alpha": 2.0},
    "beta": {"beta": 2.0, "y": Y},
    "beta tensor": {"alpha": torch.tensor(2.0), "beta": torch.tensor(2.0), "y": Y},
}


CASES = [
    pytest.param(kind, *case, id=name)
    for kind, cases in ((TypeError, TYPE_ERRORS), (ValueError, VALUE_ERRORS))
    for name, case in cases.items()
]


@pytest.mark.parametrize(("kind", "run", "message"), CASES)
def test_what_is_wrong_is_said(kind, run, message):
    with pytest.raises(kind, match=message):
        run()


@pytest.mark.parametrize(("kind", "run", "message"), CASES)
def test_a_call_whose_gradient_would_be_recorded_says_the_same(kind, run, message):
    """By way of x, where x can require a gradient."""
    try:
        X.requires_grad_()
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            run()
    finally:
        X.requires_grad_(False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", OUT_TYPE_ERRORS)
def test_an_out_of_the_wrong_kind_is_a_type_error(case, way):
    out, message = OUT_TYPE_ERRORS[case]
    with pytest.raises(TypeError, match=message):
        kl.kron_matmul(X, F, out=out, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", OUT_VALUE_ERRORS)
def test_an_out_that_does_not_fit_is_a_value_error(case, way):
    out, message = OUT_VALUE_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        kl.kron_matmul(X, F, out=out, **WAYS[way])


@pytest.mark.parametrize("way", WAYS)
def test_the_out_of_a_vector_is_one(way):
    arguments = WAYS[way] | ({"y": BIAS} if "y" in WAYS[way] else {})
    for shape in ((1, 10), (10, 1), (9,), ()):
        with pytest.raises(ValueError, match=r"out must have shape \(10,\), got"):
            kl.kron_matmul(X[0], F, out=ones(*shape), **arguments)
    with pytest.raises(TypeError, match="out must be a tensor, got list"):
        kl.kron_matmul(X[0], F, out=[], **arguments)


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_call_writes_nothing(way):
    out = torch.full((6, 10), 7.0)
    bad = ([A, B.double()], [A, ones(4, 6)], [A], [ones(2, 3, 2), ones(3, 4, 5)])
    for factors in bad:
        with pytest.raises((ValueError, TypeError)):
            kl.kron_matmul(X, factors, out=out, **WAYS[way])
    with pytest.raises(ValueError, match="y must broadcast"):
        kl.kron_matmul(X, F, out=out, **WAYS[way] | {"y": ones(6, 9)})
    assert (out == 7).all()


def test_out_must_not_share_memory_with_a_scalar():
    out = torch.full((6, 10), 7.0)
    with pytest.raises(ValueError, match="out shares memory with scale;"):
        kl.run_kernel(SCALED, X, *F, scale=out[5, 9], out=out)
    assert (out == 7.0).all()


def test_a_device_without_a_backend_is_named(monkeypatch):
    monkeypatch.setattr(operation, "stand_ins", lambda *_: False)

    class Elsewhere(torch.Tensor):
        device = torch.device("xpu", 0)

    x, *factors = (t.as_subclass(Elsewhere) for t in (X, *F))
    with pytest.raises(kl.UnsupportedError, match="x is on xpu:0"):
        kl.run_kernel(PLAIN, x, *factors)


# Ahead of time, and by the operator.

AHEAD = {
    "nothing": (PLAIN, (), {}, "takes x and 2 factors"),
    "x": (PLAIN, (ones(6, 13), *F), {}, r"x must be \(\.\.\., 12\)"),
    "a list": (PLAIN, ([1.0], *F), {}, "x must be a tensor, got list"),
    "a factor": (PLAIN, (X, A.mT, B), {}, r"factors\[0\] must have shape"),
    "factors": (PLAIN, (X, A), {}, "takes x and 2 factors in their order, got 1"),
    "dtypes": (PLAIN, (X, A, B.double()), {}, r"x and factors\[1\] must have one dtype"),
    "bias": (BIASED, (X, *F), {}, "needs bias"),
    "unknown": (PLAIN, (X, *F), {"alpha": 2.0}, "alpha is no argument"),
    "out": (PLAIN, (X, *F), {"out": ones(10, 6)}, r"out must have shape \(6, 10\)"),
    "out list": (PLAIN, (X, *F), {"out": []}, "out must be a tensor, got list"),
    "a vector's out": (PLAIN, (X[0], *F), {"out": ones(1, 10)}, r"out must have shape \(10,\)"),
    "a vector's out list": (PLAIN, (X[0], *F), {"out": []}, "out must be a tensor, got list"),
}


@pytest.mark.parametrize("case", AHEAD)
def test_what_is_done_ahead_refuses_what_run_kernel_refuses(case):
    descriptor, tensors, arguments, message = AHEAD[case]
    for ask in (
        kl.run_kernel,
        kl.prepare,
        ahead.prepared,
        ahead.candidates,
        lambda *_, **__: ahead.specs(descriptor, "sm_90a", tensors, arguments),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ask(descriptor, *tensors, **arguments)


def test_the_operator_checks_what_eager_calls_check():
    whole = partial(operators.whole.overload, names="", numbers=[], tensors=[], debug=False)
    with pytest.raises(ValueError, match=r"x must be \(\.\.\., 12\)"):
        whole(ones(6, 13), F, PLAIN.text)
    with pytest.raises(TypeError, match="takes x and 2 factors in their order, got 1"):
        whole(X, F[:1], PLAIN.text)
    with pytest.raises(ValueError, match=r"factors\[1\] must have shape \(4, 5\)"):
        whole(X, [A, B.mT], PLAIN.text)
    with pytest.raises(ValueError, match="needs bias"):
        whole(X, F, BIASED.text)
    with pytest.raises(ValueError, match="is not the text of a descriptor"):
        whole(X, F, "nonsense")
