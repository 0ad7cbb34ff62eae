"""Every bad call of the Kronecker-sparse op says which argument is wrong, and what was given."""

import pytest
import torch

import kernlib as kl
from kernlib.families.kronecker_sparse import operation as primitives
from kernlib.families.kronecker_sparse import operators
from kernlib.runtime import operation

PATTERN = (2, 3, 5, 4)
PLAIN = kl.KroneckerSparse(*PATTERN)
LAST = kl.KroneckerSparse(*PATTERN, batch_last=True)
BIASED = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(), kl.Gelu()))
SCALED = kl.KroneckerSparse(*PATTERN, epilogue=kl.Scale())
LAPLACE = kl.KroneckerSparse(*PATTERN, epilogue=kl.Laplace())
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
    "weight missing": (call(PLAIN, X), "weight"),
    "out list": (call(PLAIN, X, W, out=[]), "out must be a tensor, got list"),
    "x int": (
        call(PLAIN, X.int(), W.int()),
        r"x must be one of float32, float16, bfloat16, float64, got torch\.int32",
    ),
    "bias double": (call(BIASED, X, W, bias=B.double()), "x and bias .*float32 and .*float64"),
    "bias None": (call(BIASED, X, W, bias=None), "bias must be a dense tensor .*got NoneType"),
    "out double": (call(PLAIN, X, W, out=ones(6, 24).double()), "out must be .*float32.*float64"),
    "scale str": (call(SCALED, X, W, scale="2"), r"scale .*number or a tensor of shape \(\).*'2'"),
    "unknown of none": (call(PLAIN, X, W, bias=B), "bias is no argument .*it takes none"),
    "two weights": (call(PLAIN, X, W, W), "takes x and one weight, got 2"),
    "chain's weights": (
        call(CHAIN, X, W, bias=B),
        r"takes x and 2 weights, one a factor in its order, got 1",
    ),
    "chain's unknown": (call(CHAIN, X, W, W2, bias=B, bias2=B), "bias2 is no argument"),
    "gradient dtypes": (
        lambda: primitives.weight_gradient(ones(6, 24), X.double(), PATTERN),
        "x and grad must have one dtype",
    ),
}

VALUE_ERRORS = {
    "x features": (
        call(PLAIN, ones(6, 41), W),
        r"x must be \(\.\.\., 40\) for the pattern \(2, 3, 5, 4\), got shape \(6, 41\)",
    ),
    "x of batch last": (call(LAST, X, W), r"x must be \(40, \.\.\.\) .*\(6, 40\)"),
    "weight shape": (
        call(PLAIN, X, W.mT),
        r"weight must have shape \(2, 3, 5, 4\), the pattern, got \(2, 3, 4, 5\)",
    ),
    "bias long": (call(BIASED, X, W, bias=ones(40)), r"bias must have shape \(24,\), got \(40,\)"),
    "bias missing": (call(BIASED, X, W), "needs bias"),
    "chain's missing": (call(CHAIN, X, W, W2), "needs bias"),
    "chain's weight": (call(CHAIN, X, W, W, bias=B), r"weight must have shape \(3, 2, 8, 1\)"),
    "scale (L,)": (call(SCALED, X, W, scale=ones(6)), r"scale must have shape \(\), got \(6,\)"),
    "scale nan": (call(SCALED, X, W, scale=float("nan")), "scale must be a number, got nan"),
    "bandwidth 0": (call(LAPLACE, X, W, bandwidth=0), "bandwidth must be greater than 0, got 0"),
    "bandwidth tensor": (
        call(LAPLACE, X, W, bandwidth=torch.tensor(-1.0)),
        "bandwidth must be greater than 0, got -1",
    ),
    "bias's device": (call(BIASED, X, W, bias=meta(B)), "x and bias .*cpu and meta"),
    "out's device": (call(PLAIN, X, W, out=meta(ones(6, 24))), "out must be .*cpu, got meta"),
    "out's shape": (
        call(PLAIN, X, W, out=ones(24, 6)),
        r"out must have shape \(6, 24\), got \(24, 6\)",
    ),
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
        with pytest.raises((TypeError, ValueError, RuntimeError), match=f"{message}|out takes no"):
            run()
    finally:
        X.requires_grad_(False)


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


@pytest.mark.few(by="case")
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
        operators.whole.overload(X, W, "nonsense", "", [], [], False)
