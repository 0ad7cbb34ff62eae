"""Kronecker-sparse products as the suite of torch.library takes them."""

from __future__ import annotations

import torch

import kernlib as kl
from tests.contract.library.cases import (
    Autocast,
    Call,
    Changes,
    Check,
    Descriptors,
    Exported,
    Graph,
    Near,
    Numeric,
    Operation,
    Out,
    Quiet,
    Sizes,
    Transform,
    Wrong,
    values,
)
from tests.support.dynamo_messages import said

PATTERN = (2, 3, 5, 4)
EPILOGUE = (kl.Bias(), kl.Gelu())
FIRST = kl.KroneckerSparse(*PATTERN, epilogue=EPILOGUE)
LAST = kl.KroneckerSparse(*PATTERN, batch_last=True, epilogue=EPILOGUE)
PLAIN = kl.KroneckerSparse(*PATTERN)
SCALED = kl.KroneckerSparse(
    *PATTERN, epilogue=(kl.Bias(), kl.Silu(), kl.Custom("v * gain + shift", ("gain", "shift")))
)
CUSTOM = kl.KroneckerSparse(*PATTERN, epilogue=kl.Custom("tanh(v)"))
SECOND = kl.KroneckerSparse(3, 2, 8, 1, epilogue=(kl.Bias("b2"), kl.Relu()))
CHAIN = kl.KroneckerSparseChain((FIRST, SECOND))
PLAINS = kl.KroneckerSparseChain((PLAIN, SECOND.replace(epilogue=())))
X, W, B, W2, B2 = values(6, 40), values(*PATTERN), values(24), values(3, 2, 8, 1), values(6)
ONE, TWO, GAIN = values(5, 4, 4, 2), values(5, 8, 4, 2), torch.tensor(1.5)
SIDES, THREE, FOUR = (0, 1), (0, 1, 2), (0, 1, 2, 3)
NEAR = Near((1e-6, 1e-6), (1e-6, 1e-6), (1e-4, 1e-4))


def first(x, weight, bias, **arguments):
    return kl.run_kernel(FIRST, x, weight, bias=bias, **arguments)


def last(x, weight, bias):
    return kl.run_kernel(LAST, x, weight, bias=bias)


def scaled(x, weight, bias, gain, shift=1.0):
    return kl.run_kernel(SCALED, x, weight, bias=bias, gain=gain, shift=shift)


def chain(x, weight, bias, weight2, bias2):
    return kl.run_kernel(CHAIN, x, weight, weight2, bias=bias, b2=bias2)


def into(x, weight, bias):
    """Written, and used again."""
    out = torch.full((6, 24), 2.0)
    made = first(x, weight, bias, out=out)
    return out + 1, made * 2


def two_of_one_kind(x, one, two):
    made = kl.run_kernel(kl.KroneckerSparse(5, 4, 4, 2), x, one)
    return kl.run_kernel(kl.KroneckerSparse(5, 8, 4, 2), made, two)


def inside(x, weight, bias):
    made = kl.KroneckerSparse(2, 3, 5, 4, epilogue=(kl.Bias(), kl.Gelu()))
    return kl.run_kernel(made, x, weight, bias=bias)


def leaky_inside(x, weight):
    made = kl.KroneckerSparse(2, 3, 5, 4, epilogue=kl.LeakyRelu(0.1))
    return kl.run_kernel(made, x, weight)


def custom_inside(x, weight):
    made = kl.KroneckerSparse(2, 3, 5, 4, epilogue=kl.Custom("tanh(0.5 * v)"))
    return kl.run_kernel(made, x, weight)


CALLS = {
    "plain": Call(lambda x, w: kl.run_kernel(PLAIN, x, w), (X, W), SIDES),
    "epilogue": Call(first, (X, W, B), THREE),
    "bias alone": Call(first, (X, W, B), (2,)),
    "further dimensions": Call(first, (X.view(2, 1, 3, 40), W, B), THREE),
    "one row": Call(lambda x, w, b: first(x[0], w, b), (X, W, B), THREE),
    "batch last": Call(lambda x, w, b: last(x.T, w, b), (X, W, B), THREE),
    "chain": Call(chain, (X, W, B, W2, B2), (0, 1, 2, 3, 4)),
    "two of one kind": Call(two_of_one_kind, (X, ONE, TWO), THREE),
    "numbers": Call(lambda x, w, b: scaled(x, w, b, 2, 0.5), (X, W, B), THREE),
    "tensors": Call(lambda x, w, b, gain: scaled(x, w, b, gain, gain * 2), (X, W, B, GAIN), FOUR),
    "custom": Call(lambda x, w: kl.run_kernel(CUSTOM, x, w), (X, W), SIDES),
    "tf32": Call(
        lambda x, w: kl.run_kernel(PLAIN.replace(precision="tf32"), x, w), (X, W), SIDES
    ),
    "debug": Call(
        lambda x, w, b: first(x, w, b, debug=True), (X, W, B), THREE, NEAR._replace(plain=(0, 0))
    ),
    "out": Call(into, (X, W, B)),
    "inside": Call(inside, (X, W, B), THREE),
    "leaky inside": Call(leaky_inside, (X, W), SIDES),
}  # fmt: skip

CHANGES = {
    "numbers": Changes(scaled, tuple((X, W, B, gain) for gain in (1.5, 2.5, 3.5, 4))),
    "tensors": Changes(
        scaled, tuple((X, W, B, torch.tensor(gain)) for gain in (0.5, 2.0, 3.0)), programs=1
    ),
}
FACTORS = tuple(map(kl.KroneckerSparse, *zip(PATTERN, (2, 3, 4, 5), (4, 3, 5, 2), strict=True)))
DESCRIPTORS = Descriptors(
    kl.run_kernel,
    (
        *((one, values(3, one.in_features), values(*one.pattern)) for one in FACTORS),
        *((PLAIN.replace(epilogue=end), X, W) for end in (kl.Relu(), kl.Silu())),
    ),
)


def trained(run, turned):
    """What a layer and its loss are made of: calls that share tensors."""

    def call(x, weight, bias, gain):
        y = scaled(x.mT if turned else x, weight, bias, gain, 1.0)
        return y.sum() + run(x, weight, bias).square().sum()

    return call


# A 4 would count as that of the pattern.
SIZES = {
    "batch first": Sizes(
        trained(first, False), tuple((values(rows, 40), W, B, GAIN) for rows in (7, 9, 11)), FOUR
    ),
    "batch last": Sizes(
        trained(last, True), tuple((values(40, rows), W, B, GAIN) for rows in (7, 9, 11)), FOUR
    ),
}

WRONG = {
    "features": Wrong(lambda x, w, b: first(x[:, 1:], w, b), r"x must be \(\.\.\., 40\)"),
    "weight": Wrong(lambda x, w, b: first(x, w.mT, b), "weight must have shape"),
    "weight of a chain": Wrong(  # of as many features
        lambda x, w, b: kl.run_kernel(PLAINS, x, w.reshape(1, 3, 5, 8), W2),
        "weight must have shape",
    ),
    "dtypes": Wrong(lambda x, w, b: first(x, w.double(), b), "must have one dtype"),
    "bias": Wrong(lambda x, w, b: first(x, w, b[1:]), "bias must have shape"),
    "missing": Wrong(lambda x, w, b: kl.run_kernel(FIRST, x, w), "needs bias"),
    "unknown": Wrong(lambda x, w, b: first(x, w, b, gain=1), "gain is no argument"),
    "weights": Wrong(
        lambda x, w, b: kl.run_kernel(CHAIN, x, w, bias=b, b2=B2), "takes x and 2 weights"
    ),
    "a list": Wrong(lambda x, w, b: kl.run_kernel(PLAIN, x, [1.0]), "weight must be a tensor"),
    "out": Wrong(
        lambda x, w, b: kl.run_kernel(PLAIN, x, w, out=X), "out must have shape", recorded=False
    ),
    "out's dtype": Wrong(
        lambda x, w, b: kl.run_kernel(PLAIN, x, w, out=torch.ones(6, 24).int()),
        "out must be torch.float32",
        recorded=False,
    ),
    "number": Wrong(lambda x, w, b: scaled(x, w, b, "1"), "gain must be a real number"),
    "nan": Wrong(lambda x, w, b: scaled(x, w, b, float("nan")), "gain must be a number, got nan"),
}
WRONG = {name: wrong._replace(message=said(wrong.message)) for name, wrong in WRONG.items()}
NONSENSE = {
    "descriptor": lambda x, w, b: kl.run_kernel("wide", x, w),
}

REFUSAL = said("out takes no result whose gradient")
OUTS = {
    "plain": Out(
        lambda x, w, out: kl.run_kernel(PLAIN, x, w, out=out), (X, W), (6, 24),
        names=("x", "weight", "out"), refusal=REFUSAL,
    ),
    "epilogue": Out(
        first, (X, W, B), (6, 24), names=("x", "weight", "bias", "out"), refusal=REFUSAL
    ),
}  # fmt: skip


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(W.clone()), torch.nn.Parameter(B.clone())

    def forward(self, x):
        return first(x, self.weight, self.bias) + 1


class Frozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", W.clone())

    def forward(self, x):
        return kl.run_kernel(PLAIN, x, self.weight) + 1


def rows(count: int) -> torch.Tensor:
    return values(count, 40, seed=3)


EXPORTED = {
    "parameters": Exported(Layer, rows, ("kronecker_sparse",), (6, 2, 11)),
    "buffers": Exported(Frozen, rows, ("kronecker_sparse",), (6, 2, 11), trains=False),
}

BATCHES = [(), (6,), (0,), (2, 3), (1, 2, 2)]
FAKES = {f"batch first {n}": Call(first, (torch.ones(*n, 40), W, B), THREE) for n in BATCHES}
FAKES |= {f"batch last {n}": Call(last, (torch.ones(40, *n), W, B), THREE) for n in BATCHES}
FAKES |= {
    "weight alone": Call(first, (X, W, B), (1,)),
    "half": Call(first, (X.view(2, 3, 40).half(), W.half(), B.half()), THREE),
    "chain": CALLS["chain"],
    "strided": Call(first, (X.T.contiguous().T, W.mT.contiguous().mT, B), THREE),
}
WRONG_FAKES = {"features": (Call(first, (torch.ones(2, 39), W, B)), "x must be")}

EPILOGUED = Call(lambda x, w, b: first(x, w, b), (X, W, B), THREE)
PRODUCT = ("kronecker_sparse_product",)
GRAPHS = {
    "epilogue": Graph(
        EPILOGUED, ("kronecker_sparse",), PRODUCT,
        (*PRODUCT, "kronecker_sparse_chain_gradients"),
    ),
    "weight alone": Graph(EPILOGUED._replace(places=(1,)), ("kronecker_sparse",), PRODUCT),
}  # fmt: skip

TRANSFORMS = {
    "epilogue": Transform(CALLS["epilogue"], SIDES, None, None, None, None),
}


SECOND = values(3, 2, 8, 1)  # the weight of a factor behind


def whole(x, weight, descriptor, names="", numbers=(), tensors=()) -> Check:
    arguments = (x, weight, descriptor.text, names, [*numbers], [*tensors], False)
    return Check("kronecker_sparse", arguments, (0, 1, 5))


def parts(batch_last: bool, batch: tuple) -> dict[str, Check]:
    """Of the operators that a recorded call and its gradients are."""
    x = values(40, *batch) if batch_last else values(*batch, 40)
    grad = values(24, *batch) if batch_last else values(*batch, 24)
    factors = ((2, 3, 5, 4), kl.Bias("first")), ((3, 2, 8, 1), kl.Bias("second"))
    both = kl.KroneckerSparseChain(
        tuple(kl.KroneckerSparse(*p, batch_last=batch_last, epilogue=bias) for p, bias in factors)
    )
    return {
        "product": Check("kronecker_sparse_product", (x, W, B, batch_last, None, False), THREE),
        "no bias": Check("kronecker_sparse_product", (x, W, None, batch_last, None, False), SIDES),
        "weight gradient": Check(
            "kronecker_sparse_weight_gradient",
            (grad, x, list(PATTERN), batch_last, "tf32", False), SIDES,
        ),
        "chain": Check(
            "kronecker_sparse_chain_product",
            (x, [W, SECOND], values(6), batch_last, None, False), THREE,
        ),
        "whole chain": Check(
            "kronecker_sparse_chain",
            (x, [W, SECOND], both.text, "first second", [], [B, values(6)], False), (0, 1, 5),
        ),
        "chain gradients": Check(
            "kronecker_sparse_chain_gradients",
            (values(6, *batch) if batch_last else values(*batch, 6), [x, grad], [W, SECOND],
             [True, False, True, True], batch_last, "tf32", False), THREE,
        ),
    }  # fmt: skip


CHECKS = {
    "plain": whole(X, W, PLAIN),
    "epilogue": whole(X, W, FIRST, "bias", tensors=[B]),
    "batch last": whole(X.T, W, LAST, "bias", tensors=[B]),
    "mixed": whole(X.view(2, 3, 40), W, SCALED, "shift bias gain", [0.5], [B, GAIN]),
    "strided": whole(
        X.T.contiguous().T, W.mT.contiguous().mT, FIRST, "bias", tensors=[B.expand(24)]
    ),
}
CHECKS |= {
    f"{name} {'last' if batch_last else 'first'} {batch}": check
    for batch_last in (False, True)
    for batch in ((6,), (2, 3), ())
    for name, check in parts(batch_last, batch).items()
}


def product(x, weight, *bias, batch_last=False):
    arguments = (*(bias or (None,)), batch_last, None, False)
    return torch.ops.kernlib.kronecker_sparse_product(x, weight, *arguments)


SMALL = values(2, 6).double(), values(1, 2, 3, 2).double()
NUMERIC = {
    "product": Numeric(product, (*SMALL, values(4).double())),
    "no bias": Numeric(product, SMALL),
}
QUIET = Quiet(
    """
layer = kl.KroneckerSparse(2, 3, 5, 4, epilogue=(kl.Bias(), kl.Gelu()))
tensors = [torch.ones(s, requires_grad=True) for s in ((6, 40), (2, 3, 5, 4), (24,))]
kl.run_kernel(layer, *tensors[:2], bias=tensors[2]).sum().backward()
""",
    ("kernlib.families.kronecker_sparse.operators", "kernlib.families.pairwise.operation"),
)
RELU = (
    "outside of their mode torch.where makes a number a real tensor, which Relu's gradient gives "
    "beside fake ones"
)
OPERATIONS = (
    Operation(
        name="kronecker_sparse",
        operator="kronecker_sparse",
        typical=EPILOGUED,
        text="Gelu(",
        dynamo_sees=False,
        near=NEAR,
        calls=CALLS,
        inductor=("epilogue", "batch last", "chain"),
        breaking=Call(custom_inside, (X, W)),
        changes=CHANGES,
        descriptors=DESCRIPTORS,
        sizes=SIZES,
        autocast=Autocast(CALLS["chain"], torch.bfloat16, (2e-2, 2e-2)),
        wrong=WRONG,
        nonsense=NONSENSE,
        outs=OUTS,
        exported=EXPORTED,
        fakes=FAKES,
        wrong_fakes=WRONG_FAKES,
        graphs=GRAPHS,
        transforms=TRANSFORMS,
        checks=CHECKS,
        numeric=NUMERIC,
        quiet=QUIET,
        strides=False,  # compiled, gradients of weights are contiguous
        broken={
            "recorded outside chain": RELU,
        },
    ),
)
