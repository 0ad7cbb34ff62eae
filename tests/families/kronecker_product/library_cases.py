"""Products with Kronecker products as the suite of torch.library takes them."""

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

SHAPES = ((2, 3), (4, 5))  # 8 features to 15, on the left 15 to 8
EPILOGUE = (kl.Bias(), kl.Gelu())
PLAIN = kl.KroneckerProduct(SHAPES)
FIRST = kl.KroneckerProduct(SHAPES, epilogue=EPILOGUE)
LEFT = FIRST.replace(side="left")
TURNED = FIRST.replace(transposed=(True, False))
SCALED = PLAIN.replace(
    epilogue=(kl.Bias(), kl.Silu(), kl.Custom("v * gain + shift", ("gain", "shift")))
)
CUSTOM = PLAIN.replace(epilogue=kl.Custom("tanh(v)"))
X, A, B, BIAS = values(6, 8), values(2, 3), values(4, 5), values(15)
UNDER, SHORT, Y, GAIN = values(15, 6), values(8), values(6, 15), torch.tensor(1.5)
ONE, TWO, THREE, FOUR, FIVE = ((*range(count),) for count in (1, 2, 3, 4, 5))
NEAR = Near((1e-6, 1e-6), (1e-6, 1e-6), (1e-4, 1e-4))


def first(x, a, b, bias, **arguments):
    return kl.run_kernel(FIRST, x, a, b, bias=bias, **arguments)


def left(x, a, b, bias):
    return kl.run_kernel(LEFT, x, a, b, bias=bias)


def scaled(x, a, b, bias, gain, shift=1.0):
    return kl.run_kernel(SCALED, x, a, b, bias=bias, gain=gain, shift=shift)


def matmul(x, a, b, **arguments):
    return kl.kron_matmul(x, [a, b], **arguments)


def summed(x, a, b, y, alpha, beta=0.5):
    return matmul(x, a, b, alpha=alpha, beta=beta, y=y)


def into(x, a, b, bias):
    """Written, and used again."""
    out = torch.full((6, 15), 2.0)
    made = first(x, a, b, bias, out=out)
    matmul(x, a, b, alpha=2.0, beta=1.0, y=out, out=out)
    return out + 1, made * 2


def two_of_one_kind(x, a, b, c):
    return matmul(matmul(x, a, b), c, b.mT)


def inside(x, a, b, bias):
    made = kl.KroneckerProduct(((2, 3), (4, 5)), epilogue=(kl.Bias(), kl.Gelu()))
    return kl.run_kernel(made, x, a, b, bias=bias)


def custom_inside(x, a, b):
    made = kl.KroneckerProduct(((2, 3), (4, 5)), epilogue=kl.Custom("tanh(0.5 * v)"))
    return kl.run_kernel(made, x, a, b)


OF_MATMUL = {
    "matmul": Call(matmul, (X, A, B), THREE),
    "matmul left": Call(
        lambda x, a, b: matmul(x, a, b, side="left", alpha=2.0), (UNDER, A, B), THREE
    ),
    "matmul of a vector": Call(lambda x, a, b: matmul(x[0], a, b), (X, A, B), THREE),
    "matmul batches": Call(matmul, (values(3, 1, 6, 8), values(2, 2, 3), B), THREE),
    "sum": Call(lambda x, a, b, y: summed(x, a, b, y, 2.0), (X, A, B, Y), FOUR),
    "sum of tensors": Call(
        lambda x, a, b, y, n: summed(x, a, b, y, n, 2 * n), (X, A, B, BIAS, GAIN), FIVE
    ),
    "half": Call(
        lambda x, a, b: matmul(x, a, b, alpha=0.5), (X.half(), A.half(), B.half()), THREE,
        Near((1e-3, 1e-3), (1e-3, 1e-3), (5e-3, 5e-3)),
    ),
    "matmul debug": Call(lambda x, a, b: matmul(x, a, b, debug=True), (X, A, B), THREE),
    "three": Call(
        lambda x, a, b, c: kl.kron_matmul(x, (a, b, c)),
        (values(4, 24), A, B, values(3, 2)), FOUR,
    ),
}  # fmt: skip
CALLS = OF_MATMUL | {
    "plain": Call(lambda x, a, b: kl.run_kernel(PLAIN, x, a, b), (X, A, B), THREE),
    "epilogue": Call(first, (X, A, B, BIAS), FOUR),
    "bias alone": Call(first, (X, A, B, BIAS), (3,)),
    "further dimensions": Call(first, (X.view(2, 1, 3, 8), A, B, BIAS), FOUR),
    "one row": Call(lambda x, *rest: first(x[0], *rest), (X, A, B, BIAS), FOUR),
    "left": Call(left, (UNDER, A, B, SHORT), FOUR),
    "turned": Call(
        lambda x, a, *rest: kl.run_kernel(TURNED, x, a.mT, *rest[:1], bias=rest[1]),
        (X, A, B, BIAS), FOUR,
    ),
    "two of one kind": Call(two_of_one_kind, (X, A, B, values(3, 2)), FOUR),
    "numbers": Call(lambda *t: scaled(*t, 2, 0.5), (X, A, B, BIAS), FOUR),
    "tensors": Call(lambda *t: scaled(*t, t[-1] * 2), (X, A, B, BIAS, GAIN), FIVE),
    "custom": Call(lambda x, a, b: kl.run_kernel(CUSTOM, x, a, b), (X, A, B), THREE),
    "tf32": Call(
        lambda x, a, b: kl.run_kernel(PLAIN.replace(precision="tf32"), x, a, b), (X, A, B), THREE
    ),
    "debug": Call(lambda *t: first(*t, debug=True), (X, A, B, BIAS), FOUR),
    "out": Call(into, (X, A, B, BIAS)),
    "inside": Call(inside, (X, A, B, BIAS), FOUR),
}  # fmt: skip

CHANGES = {
    "numbers": Changes(scaled, tuple((X, A, B, BIAS, gain) for gain in (1.5, 2.5, 3.5, 4))),
    "tensors": Changes(
        scaled, tuple((X, A, B, BIAS, torch.tensor(gain)) for gain in (0.5, 2.0, 3.0)), programs=1
    ),
    "alpha": Changes(summed, tuple((X, A, B, Y, alpha) for alpha in (1.5, 2.5, 3.5, 4))),
    "alpha tensor": Changes(
        summed, tuple((X, A, B, Y, torch.tensor(alpha)) for alpha in (0.5, 2.0, 3.0)), programs=1
    ),
    "factors": Changes(
        matmul,
        tuple((values(5, 2 * p), values(2, 3), values(p, q)) for p, q in ((4, 5), (3, 7), (9, 2))),
    ),
}
OTHERS = (((3, 2), (4, 5)), ((2, 3), (5, 4)), ((8, 15),), ((2, 3), (2, 3), (3, 1)))
DESCRIPTORS = Descriptors(
    kl.run_kernel,
    (
        *(
            (made, values(3, made.in_features), *(values(*shape) for shape in shapes))
            for shapes in OTHERS
            for made in (kl.KroneckerProduct(shapes),)
        ),
        (PLAIN.replace(side="left"), UNDER, A, B),
        (PLAIN.replace(transposed=True), X, A.mT, B.mT),
        *((PLAIN.replace(epilogue=end), X, A, B) for end in (kl.Relu(), kl.Silu())),
    ),
)


def trained(run, turned):
    """What a layer and its loss are made of: calls that share tensors."""

    def call(x, a, b, bias, gain):
        y = scaled(x, a, b, bias, gain, 1.0)
        shorter = bias[:8] if turned else bias
        return y.sum() + run(y.mT if turned else x, a, b, shorter).square().sum()

    return call


ROWS = tuple((values(rows, 8), A, B, BIAS, GAIN) for rows in (7, 9, 11))
SIZES = {
    "right": Sizes(trained(first, False), ROWS, FIVE),
    "left": Sizes(trained(left, True), ROWS, FIVE),
}

WRONG = {
    "features": Wrong(lambda x, *rest: first(x[:, 1:], *rest), r"x must be \(\.\.\., 8\)"),
    "factor": Wrong(lambda x, a, b, v: first(x, a.mT, b, v), r"factors\[0\] must have shape"),
    "dtypes": Wrong(lambda x, a, b, v: first(x, a, b.double(), v), "must have one dtype"),
    "bias": Wrong(lambda x, a, b, v: first(x, a, b, v[1:]), "bias must have shape"),
    "missing": Wrong(lambda x, a, b, v: kl.run_kernel(FIRST, x, a, b), "needs bias"),
    "unknown": Wrong(lambda *t: first(*t, gain=1), "gain is no argument"),
    "factors": Wrong(
        lambda x, a, b, v: kl.run_kernel(FIRST, x, a, bias=v), "takes x and 2 factors"
    ),
    "a list": Wrong(
        lambda x, a, b, v: kl.run_kernel(PLAIN, x, a, [1.0]), r"factors\[1\] must be a tensor"
    ),
    "out": Wrong(
        lambda x, a, b, v: kl.run_kernel(PLAIN, x, a, b, out=X), "out must have shape",
        recorded=False,
    ),
    "out's dtype": Wrong(
        lambda x, a, b, v: kl.run_kernel(PLAIN, x, a, b, out=torch.ones(6, 15).int()),
        "out must be torch.float32", recorded=False,
    ),
    "number": Wrong(lambda *t: scaled(*t, "1"), "gain must be a real number"),
    "nan": Wrong(lambda *t: scaled(*t, float("nan")), "gain must be a number, got nan"),
    "matmul": Wrong(lambda x, a, b, v: matmul(x[:, 1:], a, b), r"x must be \(\.\.\., 8\)"),
    "matmul's factors": Wrong(lambda x, a, b, v: kl.kron_matmul(x, a), "factors must be a list"),
    "no factors": Wrong(lambda x, a, b, v: kl.kron_matmul(x, []), "must hold at least one matrix"),
    "matmul's dtypes": Wrong(lambda x, a, b, v: matmul(x, a, b.double()), "must have one dtype"),
    "alpha": Wrong(lambda x, a, b, v: matmul(x, a, b, alpha="1"), "alpha must be a real number"),
    "beta": Wrong(lambda x, a, b, v: matmul(x, a, b, beta=1.0), "no y is given"),
    "y": Wrong(
        lambda x, a, b, v: matmul(x, a, b, beta=1.0, y=v[1:]), r"y must broadcast to \(6, 15\)"
    ),
    "side": Wrong(lambda x, a, b, v: matmul(x, a, b, side="top"), "side must be one of"),
    "matmul's out": Wrong(
        lambda x, a, b, v: matmul(x, a, b, alpha=2.0, out=UNDER), "out must have shape",
        recorded=False,
    ),
}  # fmt: skip
WRONG = {name: wrong._replace(message=said(wrong.message)) for name, wrong in WRONG.items()}
NONSENSE = {"descriptor": lambda x, a, b, v: kl.run_kernel("wide", x, a, b)}

REFUSAL = said("out takes no result whose gradient")
OPERANDS = ("x", "factors[0]", "factors[1]")
OUTS = {
    "plain": Out(
        lambda x, a, b, out: kl.run_kernel(PLAIN, x, a, b, out=out), (X, A, B), (6, 15),
        names=(*OPERANDS, "out"), refusal=REFUSAL,
    ),
    "epilogue": Out(
        first, (X, A, B, BIAS), (6, 15), names=(*OPERANDS, "bias", "out"), refusal=REFUSAL
    ),
    "matmul": Out(matmul, (X, A, B), (6, 15), names=(*OPERANDS, "out"), refusal=REFUSAL),
    "sum": Out(
        lambda x, a, b, y, out: matmul(x, a, b, alpha=2.0, beta=0.5, y=y, out=out),
        (X, A, B, Y), (6, 15), names=(*OPERANDS, "y", "out"), refusal=REFUSAL,
    ),
}  # fmt: skip


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factors = torch.nn.ParameterList(t.clone() for t in (A, B))
        self.bias = torch.nn.Parameter(BIAS.clone())

    def forward(self, x):
        return first(x, *self.factors, self.bias) + 1


class Frozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("a", A.clone())
        self.register_buffer("b", B.clone())

    def forward(self, x):
        return matmul(x, self.a, self.b, alpha=0.5) + 1


def rows(count: int) -> torch.Tensor:
    return values(count, 8, seed=3)


EXPORTED = {
    "parameters": Exported(Layer, rows, ("kronecker_product",), (6, 2, 11)),
    "buffers": Exported(Frozen, rows, ("kronecker_product",), (6, 2, 11), trains=False),
}

BATCHES = [(), (6,), (0,), (2, 3), (1, 2, 2)]
FAKES = {f"right {n}": Call(first, (torch.ones(*n, 8), A, B, BIAS), FOUR) for n in BATCHES}
FAKES |= {
    "left": Call(left, (UNDER, A, B, SHORT), FOUR),
    "left, a column": Call(left, (UNDER[:, 0], A, B, SHORT), FOUR),
    "left, none": Call(left, (UNDER[:, :0], A, B, SHORT), FOUR),
    "a factor alone": Call(first, (X, A, B, BIAS), (1,)),
    "batches": Call(first, (X.view(3, 1, 2, 8), values(2, 2, 3), B, BIAS), FOUR),
    "half": Call(first, (X.view(2, 3, 8).half(), A.half(), B.half(), BIAS.half()), FOUR),
    "strided": Call(
        first, (X.T.contiguous().T, A.mT.contiguous().mT, B[:, :1].expand(4, 5), BIAS), FOUR
    ),
    "matmul": Call(matmul, (X, A, B), THREE),
    "sum": Call(lambda x, a, b, y: summed(x, a, b, y, 2.0), (X, A, B, Y), FOUR),
}
WRONG_FAKES = {"features": (Call(first, (torch.ones(2, 7), A, B, BIAS)), "x must be")}

EPILOGUED = Call(lambda x, a, b, bias: first(x, a, b, bias), (X, A, B, BIAS), FOUR)
OPERATOR = ("kronecker_product",)
GRAPHS = {
    "epilogue": Graph(EPILOGUED, OPERATOR),
    "matmul": Graph(Call(lambda x, a, b: matmul(x, a, b), (X, A, B), THREE), OPERATOR),
    "sum of tensors": Graph(
        Call(lambda x, a, b, y, n: summed(x, a, b, y, n, n), (X, A, B, Y, GAIN), FIVE), OPERATOR
    ),
}

TRANSFORMS = {
    "plain": Transform(CALLS["plain"], THREE, None, None, None, None),
    "matmul": Transform(OF_MATMUL["matmul"], THREE, None, None, None, None),
}


def whole(x, factors, descriptor, names="", numbers=(), tensors=()) -> Check:
    arguments = (x, [*factors], descriptor.text, names, [*numbers], [*tensors], False)
    return Check("kronecker_product", arguments, (0, 1, 5))


def recorded(x, factors, descriptor, bias=None) -> Check:
    arguments = (x, [*factors], descriptor.text, bias, False)
    return Check("kronecker_product_of", arguments, (0, 1, 3))


def gradients(x, factors, descriptor, needs) -> Check:
    grad = kl.run_kernel(descriptor.replace(epilogue=()), x, *factors)
    arguments = (grad, x, [*factors], descriptor.text, needs, False)
    return Check("kronecker_product_gradients", arguments, (0, 1, 2))


CHECKS = {
    "recorded": recorded(X, (A, B), FIRST, BIAS),
    "recorded left": recorded(UNDER, (A, B), LEFT.replace(epilogue=())),
    "gradients": gradients(X, (A, B), FIRST, [True, True, True]),
    "gradients by x": gradients(X, (A, B), PLAIN, [True, False, False]),
    "gradients of batches": gradients(
        X.view(3, 1, 2, 8), (values(2, 2, 3), B), PLAIN, [False, True, True]
    ),
    "plain": whole(X, (A, B), PLAIN),
    "epilogue": whole(X, (A, B), FIRST, "bias", tensors=[BIAS]),
    "left": whole(UNDER, (A, B), LEFT, "bias", tensors=[SHORT]),
    "batches": whole(X.view(3, 1, 2, 8), (values(2, 2, 3), B), PLAIN),
    "mixed": whole(X.view(2, 3, 8), (A, B), SCALED, "shift bias gain", [0.5], [BIAS, GAIN]),
    "strided": whole(
        X.T.contiguous().T, (A.mT.contiguous().mT, B[:, :1].expand(4, 5)), FIRST, "bias",
        tensors=[BIAS[:1].expand(15)],
    ),
}  # fmt: skip


def by_operator(x, *factors):
    made = kl.KroneckerProduct(tuple(tuple(f.shape[-2:]) for f in factors))
    arguments = (x, [*factors], made.text, "", [], [], False)
    return torch.ops.kernlib.kronecker_product(*arguments)


SMALL = values(2, 4).double(), values(2, 3).double(), values(2, 1).double()
NUMERIC = {
    "two": Numeric(by_operator, SMALL),
    "batches": Numeric(by_operator, (SMALL[0], values(2, 2, 3).double(), SMALL[2]), twice=False),
}
QUIET = Quiet(
    """
made = kl.KroneckerProduct(((2, 3), (4, 5)), epilogue=(kl.Bias(), kl.Gelu()))
tensors = [torch.ones(s, requires_grad=True) for s in ((6, 8), (2, 3), (4, 5), (15,))]
kl.run_kernel(made, *tensors[:3], bias=tensors[3]).sum().backward()
kl.kron_matmul(tensors[0], tensors[1:3], alpha=tensors[3][0]).sum().backward()
""",
    ("kernlib.families.kronecker_product.operators", "kernlib.families.pairwise.operation"),
)
OPERATIONS = (
    Operation(
        name="kronecker_product",
        operator="kronecker_product",
        typical=EPILOGUED,
        text="Gelu(",
        dynamo_sees=False,
        near=NEAR,
        calls=CALLS,
        inductor=("epilogue", "left", "sum of tensors", "matmul batches"),
        breaking=Call(custom_inside, (X, A, B)),
        changes=CHANGES,
        descriptors=DESCRIPTORS,
        sizes=SIZES,
        autocast=Autocast(CALLS["two of one kind"], torch.bfloat16, (2e-2, 2e-2)),
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
        strides=False,  # compiled, gradients of factors are contiguous
    ),
)
