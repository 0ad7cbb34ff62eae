"""Every bad call of the Kronecker-sparse op says which argument is wrong, and what was given."""

import numpy as np
import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import operators
from kernlib.families.kronecker_sparse import product as primitives
from kernlib.runtime import operation

PATTERN = (2, 3, 5, 4)
PLAIN = kl.KroneckerSparse(*PATTERN)
LAST = kl.KroneckerSparse(*PATTERN, batch_last=True)
BIASED = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(), kl.Gelu()))
SCALED = kl.KroneckerSparse(*PATTERN, epilogue=kl.Scale())
LAPLACE = kl.KroneckerSparse(*PATTERN, epilogue=kl.Laplace())
SQUARE = kl.KroneckerSparse(2, 3, 3, 2, epilogue=kl.Bias())
CHAIN = kl.KroneckerSparseChain((BIASED, kl.KroneckerSparse(3, 2, 8, 1)))


def ones(*shape, **options):
    return torch.ones(shape, **options)


X, W, B = ones(6, 40), ones(*PATTERN), ones(24)
W2 = ones(3, 2, 8, 1)


def sparse(x):
    return x.to_sparse()


def meta(t):
    return t.to("meta")


def call(descriptor, *tensors, **arguments):
    return lambda: kl.run_kernel(descriptor, *tensors, **arguments)


TYPE_ERRORS = {
    "x list": (call(PLAIN, [[1.0]], W), "x must be a tensor, got list"),
    "x array": (call(PLAIN, np.ones((6, 40)), W), "x must be a tensor, got ndarray"),
    "x None": (call(PLAIN, None, W), "x must be a tensor, got NoneType"),
    "weight str": (call(PLAIN, X, "w"), "weight must be a tensor, got str"),
    "weight None": (call(PLAIN, X, None), "weight must be a tensor, got NoneType"),
    "weight missing": (call(PLAIN, X), "weight"),
    "out list": (call(PLAIN, X, W, out=[]), "out must be a tensor, got list"),
    "x sparse": (call(PLAIN, sparse(X), W), "x must be a dense tensor, .*sparse_coo"),
    "weight sparse": (call(PLAIN, X, sparse(W)), "weight must be a dense tensor, .*sparse_coo"),
    "x int": (
        call(PLAIN, X.int(), W.int()),
        r"x must be one of float32, float16, bfloat16, float64, got torch\.int32",
    ),
    "row 8: x int8": (call(PLAIN, X.to(torch.int8), W), "x must be one of .*torch.int8"),
    "x complex": (call(PLAIN, X + 0j, W + 0j), "x must be one of .*torch.complex64"),
    "weight int": (call(PLAIN, X, W.int()), "weight must be one of .*torch.int32"),
    "two dtypes": (call(PLAIN, X, W.double()), "x and weight .*one dtype, .*float32 and .*float64"),
    "bias double": (call(BIASED, X, W, bias=B.double()), "x and bias .*float32 and .*float64"),
    "bias number": (call(BIASED, X, W, bias=1.0), r"bias .*tensor of shape \(24,\), got float"),
    "bias None": (call(BIASED, X, W, bias=None), "bias must be a dense tensor .*got NoneType"),
    "bias nested": (
        call(BIASED, X, W, bias=torch.nested.nested_tensor([ones(3), ones(2)])),
        "bias must be a dense tensor",
    ),
    "bias sparse": (call(BIASED, X, W, bias=sparse(B)), "bias must be a dense tensor"),
    "out double": (call(PLAIN, X, W, out=ones(6, 24).double()), "out must be .*float32.*float64"),
    "scale str": (call(SCALED, X, W, scale="2"), r"scale .*number or a tensor of shape \(\).*'2'"),
    "scale bool": (call(SCALED, X, W, scale=True), "scale must be .*got True"),
    "scale complex": (call(SCALED, X, W, scale=torch.tensor(2j)), "scale must be real"),
    "unknown": (call(BIASED, X, W, bias=B, gain=1), "gain is no argument .*it takes bias"),
    "unknown of none": (call(PLAIN, X, W, bias=B), "bias is no argument .*it takes none"),
    "two weights": (call(PLAIN, X, W, W), "takes x and one weight, got 2"),
    "chain's weights": (
        call(CHAIN, X, W, bias=B),
        r"takes x and 2 weights, one a factor in its order, got 1",
    ),
    "chain's unknown": (call(CHAIN, X, W, W2, bias=B, bias2=B), "bias2 is no argument"),
    "no descriptor": (call("kronecker_sparse", X, W), "descriptor must be"),
    "class as descriptor": (call(kl.KroneckerSparse, X, W), "descriptor must be"),
    "gradient dtypes": (
        lambda: primitives.weight_gradient(ones(6, 24), X.double(), PATTERN),
        "x and grad must have one dtype",
    ),
}

VALUE_ERRORS = {
    "x 0-D": (call(PLAIN, ones(), W), r"x must be \(\.\.\., 40\) .*got shape \(\)"),
    "x features": (
        call(PLAIN, ones(6, 41), W),
        r"x must be \(\.\.\., 40\) for the pattern \(2, 3, 5, 4\), got shape \(6, 41\)",
    ),
    "x turned": (call(PLAIN, X.T, W), r"x must be \(\.\.\., 40\) .*\(40, 6\)"),
    "x of batch last": (call(LAST, X, W), r"x must be \(40, \.\.\.\) .*\(6, 40\)"),
    "weight shape": (
        call(PLAIN, X, W.mT),
        r"weight must have shape \(2, 3, 5, 4\), the pattern, got \(2, 3, 4, 5\)",
    ),
    "weight flat": (call(PLAIN, X, W.flatten()), r"weight must have shape .*got \(120,\)"),
    "bias long": (call(BIASED, X, W, bias=ones(40)), r"bias must have shape \(24,\), got \(40,\)"),
    "bias column": (call(BIASED, X, W, bias=ones(24, 1)), r"bias must have .*got \(24, 1\)"),
    "bias 0-D": (call(BIASED, X, W, bias=ones()), r"bias must have shape \(24,\), got \(\)"),
    "bias missing": (call(BIASED, X, W), "needs bias"),
    "scale missing": (call(SCALED, X, W), "needs scale"),
    "chain's missing": (call(CHAIN, X, W, W2), "needs bias"),
    "chain's weight": (call(CHAIN, X, W, W, bias=B), r"weight must have shape \(3, 2, 8, 1\)"),
    "scale (L,)": (call(SCALED, X, W, scale=ones(6)), r"scale must have shape \(\), got \(6,\)"),
    "scale nan": (call(SCALED, X, W, scale=float("nan")), "scale must be a number, got nan"),
    "bandwidth 0": (call(LAPLACE, X, W, bandwidth=0), "bandwidth must be greater than 0, got 0"),
    "bandwidth tensor": (
        call(LAPLACE, X, W, bandwidth=torch.tensor(-1.0)),
        "bandwidth must be greater than 0, got -1",
    ),
    "weight's device": (call(PLAIN, X, meta(W)), "x and weight .*cpu and meta"),
    "bias's device": (call(BIASED, X, W, bias=meta(B)), "x and bias .*cpu and meta"),
    "scale's device": (call(SCALED, X, W, scale=meta(ones())), "scale is on meta, x on cpu"),
    "out's device": (call(PLAIN, X, W, out=meta(ones(6, 24))), "out must be .*cpu, got meta"),
    "out's shape": (
        call(PLAIN, X, W, out=ones(24, 6)),
        r"out must have shape \(6, 24\), got \(24, 6\)",
    ),
    "out's dimensions": (call(PLAIN, X, W, out=ones(6 * 24)), r"out must have .*got \(144,\)"),
    "out expanded": (
        call(PLAIN, X, W, out=ones(1, 24).expand(6, 24)),
        r"out overlaps itself.*\(0, 1\)",
    ),
    "out negated": (
        call(PLAIN, X, W, out=(ones(6, 24) * 1j).conj().imag),
        "out is a negated view",
    ),
    "out zero": (
        call(PLAIN, X, W, out=torch._efficientzerotensor((6, 24))),
        r"out is a zero tensor.*no memory; pass out\.clone\(\)",
    ),
    "gradient's features": (
        lambda: primitives.weight_gradient(ones(6, 25), X, PATTERN),
        r"grad must have 24 features .*\(6, 25\)",
    ),
    "gradient's batch": (
        lambda: primitives.weight_gradient(ones(5, 24), X, PATTERN),
        r"one batch, got \(5, 24\) and \(6, 40\)",
    ),
    "operator's weight": (
        lambda: torch.ops.kernlib.kronecker_sparse_product(
            meta(X), meta(W[0]), None, False, None, False
        ),
        "weight must have shape",
    ),
}


@pytest.mark.parametrize("case", TYPE_ERRORS)
def test_what_is_of_the_wrong_kind_is_a_type_error(case):
    run, message = TYPE_ERRORS[case]
    with pytest.raises(TypeError, match=message):
        run()


@pytest.mark.parametrize("case", VALUE_ERRORS)
def test_what_does_not_fit_is_a_value_error(case):
    run, message = VALUE_ERRORS[case]
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize("case", [c for c in {**TYPE_ERRORS, **VALUE_ERRORS} if "'s" not in c])
def test_a_call_whose_gradient_would_be_recorded_says_the_same(case):
    """By way of x, where x can require a gradient."""
    run, message = {**TYPE_ERRORS, **VALUE_ERRORS}[case]
    try:
        X.requires_grad_()
        with pytest.raises((TypeError, ValueError, RuntimeError), match=f"{message}|out takes no"):
            run()
    finally:
        X.requires_grad_(False)


MEMORY = {
    "x itself": lambda m, w, b: (m[:4, :12], w, b, m[:4, :12], "x"),
    "x's last element": lambda m, w, b: (m[:4, :12], w, b, m[3:7, 11:23], "x"),
    "x turned": lambda m, w, b: (m[:12, :12], w, b, m[:12, :12].T, "x"),
    "weight": lambda m, w, b: (m[:3, :12], w, b, w.view(3, 12), "weight"),
    "bias": lambda m, w, b: (m[:1, :12], w, b, b.view(1, 12), "bias"),
}


@pytest.mark.parametrize("case", MEMORY)
def test_out_must_not_share_memory_with_an_operand(case):
    x, weight, bias, out, name = MEMORY[case](ones(24, 24), ones(2, 3, 3, 2), ones(12))
    with pytest.raises(ValueError, match=f"out shares memory with {name};"):
        kl.run_kernel(SQUARE, x, weight, bias=bias, out=out)


@pytest.mark.parametrize("place", [(0, 0), (5, 23)])
def test_out_must_not_share_memory_with_a_scalar(place):
    out = torch.full((6, 24), 7.0)
    with pytest.raises(ValueError, match="out shares memory with scale;"):
        kl.run_kernel(SCALED, X, W, scale=out[place], out=out)
    assert (out == 7.0).all()
    kl.run_kernel(SCALED, X, W, scale=out[place].clone(), out=out)
    assert (out == 35.0).all()


OF_CHAIN = {
    "x": lambda x, w, b: (x, x),
    "first weight": lambda x, w, b: (w[0], w[0].view(12, 12)[:4]),
    "last weight": lambda x, w, b: (w[1], w[1].view(12, 12)[:4]),
    "first bias": lambda x, w, b: (b[0], b[0].view(1, 12)),
    "last bias": lambda x, w, b: (b[1], b[1].view(1, 12)),
}
NAMES = {"first weight": r"weights\[0\]", "last weight": r"weights\[1\]", "x": "x",
         "first bias": "bias", "last bias": "bias2"}  # fmt: skip


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("case", OF_CHAIN)
def test_out_must_not_share_memory_with_an_operand_of_a_chain(case, autocast):
    """Which the last factor does not see."""
    factors = [kl.KroneckerSparse(1, 12, 12, 1, epilogue=kl.Bias(n)) for n in ("bias", "bias2")]
    chain = kl.KroneckerSparseChain(tuple(factors))
    weights, biases = [ones(1, 12, 12, 1) for _ in range(2)], [ones(12) for _ in range(2)]
    x = ones(4, 12)
    operand, out = OF_CHAIN[case](x, weights, biases)
    given = x[: len(out)]
    if autocast:
        out, given = operand.view(torch.bfloat16).reshape(-1)[:12].view(1, 12), x[:1]
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        pytest.raises(ValueError, match=f"out shares memory with {NAMES[case]};"),
    ):
        kl.run_kernel(chain, given, *weights, bias=biases[0], bias2=biases[1], out=out)
    assert (operand == 1).all()
    kl.run_kernel(chain, given, *weights, bias=biases[0], bias2=biases[1], out=ones(len(given), 12))


def test_a_refused_call_writes_nothing():
    out = torch.full((6, 24), 7.0)
    for bad in ({"bias": ones(23)}, {"bias": B.double()}, {}):
        with pytest.raises((ValueError, TypeError)):
            kl.run_kernel(BIASED, X, W, out=out, **bad)
    assert (out == 7.0).all()


def test_a_device_without_a_backend_is_named(monkeypatch):
    monkeypatch.setattr(operation, "stand_ins", lambda *_: False)

    class Elsewhere(torch.Tensor):
        device = torch.device("xpu", 0)

    x, weight = (t.as_subclass(Elsewhere) for t in (X, W))
    with pytest.raises(kl.UnsupportedError, match="x is on xpu:0"):
        kl.run_kernel(PLAIN, x, weight)


def test_prepare_refuses_what_run_kernel_refuses():
    with pytest.raises(ValueError, match="needs bias"):
        kl.prepare(BIASED, X, W)
    with pytest.raises(TypeError, match="x must be a tensor"):
        kl.prepare(PLAIN, [1.0], W)
    with pytest.raises(TypeError, match="takes x and one weight, got 2"):
        kl.prepare(PLAIN, X, W, W)
    with pytest.raises(TypeError, match="takes x and one weight, got 0"):
        kl.prepare(PLAIN, X)
    with pytest.raises(RuntimeError, match="out takes no result"):
        kl.prepare(PLAIN, X.clone().requires_grad_(), W, out=ones(6, 24))


def test_the_operators_check_what_eager_calls_check():
    with pytest.raises(ValueError, match=r"x must be \(\.\.\., 40\)"):
        operators.product(ones(6, 39), W, None, False, None, False)
    with pytest.raises(ValueError, match=r"bias must have shape \(24,\)"):
        operators.product(X, W, ones(23), False, None, False)
    with pytest.raises(ValueError, match="grad must have 24 features"):
        operators.weight_gradient(X, X, PATTERN, False, None, False)
    with pytest.raises(ValueError, match="is not the text of a descriptor"):
        operators.whole(X, W, "nonsense", "", [], [], False)
