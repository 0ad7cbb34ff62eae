"""Products with compressed matrices as the suite of torch.library takes them."""

from __future__ import annotations

import torch

import kernlib as kl
from kernlib.sparse import SparseMatrix, compress, matmul
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
from tests.families.sparse.cases import BIASED, FORMATS, made, random
from tests.support.dynamo_messages import said

PLAIN = kl.SparseMatmul()
GELU = kl.SparseMatmul((kl.Bias(), kl.Gelu()))
SCALED = kl.SparseMatmul((kl.Bias(), kl.Silu(), kl.Custom("v * gain + shift", ("gain", "shift"))))
with torch.random.fork_rng():
    torch.manual_seed(5)
    DENSE = random(24, 40)
    OTHERS = [made(rows, 40, density=d)[1] for rows, d in ((24, 0.5), (24, 0.3), (16, 0.1))]
    SMALL, SMALL_TURNED = (made(4, 5)[1] for _ in range(2))
W, TURNED = (compress(DENSE, "bitmap") for _ in range(2))
TURNED.transpose(), SMALL_TURNED.transpose()  # which are known from now on
HALF = compress(DENSE.half(), "bitmap")
X, B, GAIN = values(6, 40), values(24), torch.tensor(1.5)
SIDES, THREE = (0, 1), (0, 1, 2)
NEAR = Near((1e-5, 1e-5), (1e-5, 1e-5), (1e-4, 1e-4))


def listed(w: SparseMatrix) -> tuple:
    """A matrix as operators take it, with its transpose if that is known."""
    turned = w.known_transpose()
    if turned is None:
        return [*w.operands], [], w.layout, ""
    return [*w.operands], [*turned.operands], w.layout, turned.layout


def biased(x, bias):
    return matmul(W, x, bias)


def scaled(x, bias, gain, shift=1.0, w=W):
    return kl.run_kernel(SCALED, w, x, bias=bias, gain=gain, shift=shift)


def of_layout(x, bias, *operands, **arguments):
    """A matrix that the function makes of tensors, as a layer does whose buffers somebody has put
    others in place of."""
    w = SparseMatrix.from_layout(W.layout, operands)
    return kl.run_kernel(GELU, w, x, bias=bias, **arguments)


def into(x, bias):
    """Written, and used again."""
    out = torch.full((6, 24), 2.0)
    first = kl.run_kernel(BIASED, W, x, bias=bias, out=out)
    return out + 1, first * 2


def of_format(w) -> Call:
    return Call(lambda x, bias: matmul(w, x, bias), (X, B), SIDES)


CALLS = {
    "plain": Call(lambda x: kl.run_kernel(PLAIN, W, x), (X,), (0,)),
    "epilogue": Call(lambda x, b: kl.run_kernel(GELU, W, x, bias=b), (X, B), SIDES),
    "matmul": Call(biased, (X, B), SIDES),
    "x alone": Call(biased, (X, B), (0,)),
    "matmul without a bias": Call(lambda x: matmul(W, x), (X,), (0,)),
    "matmul with an epilogue": Call(lambda x, b: matmul(W, x, b, kl.Gelu()), (X, B), SIDES),
    "an epilogue inside": Call(lambda x: matmul(W, x, epilogue=kl.Gelu()), (X,), (0,)),
    "matmul with a parameter": Call(
        lambda x: matmul(W, x, epilogue=(kl.Scale(),), scale=2.0), (X,), (0,)
    ),
    "further dimensions": Call(biased, (X.view(2, 1, 3, 40), B), SIDES),
    "one row": Call(lambda x, b: matmul(W, x[0], b), (X, B), SIDES),
    "numbers": Call(lambda x, b: scaled(x, b, 2, 0.5), (X, B), SIDES),
    "tensors": Call(lambda x, b, gain: scaled(x, b, gain, gain * 2), (X, B, GAIN), THREE),
    "a known transpose": Call(lambda x, b: matmul(TURNED, x, b), (X, B), SIDES),
    "the transpose": Call(
        lambda x, b: matmul(TURNED.transpose(), matmul(TURNED, x, b)), (X, B), SIDES
    ),
    "a layout": Call(of_layout, (X, B, *W.operands), SIDES),
    "debug": Call(
        lambda x, b: kl.run_kernel(BIASED, W, x, bias=b, debug=True), (X, B), SIDES,
        NEAR._replace(plain=(0, 0)),
    ),
    "out": Call(into, (X, B)),
} | {format: of_format(compress(DENSE, format)) for format in FORMATS}  # fmt: skip


def custom_inside(x):
    return matmul(W, x, epilogue=kl.Custom("tanh(0.5 * v)"))


CHANGES = {
    "numbers": Changes(scaled, tuple((X, B, gain) for gain in (1.5, 2.5, 3.5, 4))),
    "tensors": Changes(
        scaled, tuple((X, B, torch.tensor(gain)) for gain in (0.5, 2.0, 3.0)), programs=1
    ),
    "matrices": Changes(lambda w, x: matmul(w, x), tuple((w, X) for w in OTHERS)),
}
DESCRIPTORS = Descriptors(
    lambda descriptor, x: kl.run_kernel(descriptor, W, x),
    tuple((kl.SparseMatmul(end), X) for end in ((), kl.Gelu(), kl.Relu(), (kl.Silu(), kl.Relu()))),
)


def trained(x, bias, gain, w):
    """What a layer and its loss are made of: calls that share tensors."""
    y = matmul(w, x, bias, kl.Gelu())
    return y.square().sum() + scaled(x, bias, gain, 1.0, w).sum()


def rows_by(w) -> tuple:
    return tuple((values(rows, 40), B, GAIN, w) for rows in (7, 9, 31))


SIZES = {
    "no transpose": Sizes(trained, rows_by(W), THREE),
    "a transpose": Sizes(trained, rows_by(TURNED), THREE),
    "a layout": Sizes(
        of_layout, tuple((values(rows, 40), B, *W.operands) for rows in (7, 9, 31)), SIDES
    ),
}

WRONG = {
    "features": Wrong(lambda x, b: matmul(W, x[:, 1:]), r"x must be \(\.\.\., 40\)"),
    "dtypes": Wrong(lambda x, b: matmul(W, x.half()), "must have one dtype"),
    "bias": Wrong(lambda x, b: matmul(W, x, b[1:]), "bias must have shape"),
    "missing": Wrong(lambda x, b: kl.run_kernel(BIASED, W, x), "needs bias"),
    "unknown": Wrong(lambda x, b: kl.run_kernel(PLAIN, W, x, gain=1), "gain is no argument"),
    "operands": Wrong(lambda x, b: kl.run_kernel(PLAIN, W, x, x), "takes w and x, got 3"),
    "no matrix": Wrong(lambda x, b: kl.run_kernel(PLAIN, x, x), "w must be a SparseMatrix"),
    "a list": Wrong(lambda x, b: kl.run_kernel(PLAIN, W, [1.0]), "x must be a tensor"),
    "out": Wrong(lambda x, b: matmul(W, x, out=X), "out must have shape", recorded=False),
    "out's dtype": Wrong(
        lambda x, b: matmul(W, x, out=torch.ones(6, 24).int()), "out must be torch.float",
        recorded=False,
    ),
    "number": Wrong(lambda x, b: scaled(x, b, "1"), "gain must be a real number"),
    "nan": Wrong(lambda x, b: scaled(x, b, float("nan")), "gain must be a number, got nan"),
}  # fmt: skip
WRONG = {name: wrong._replace(message=said(wrong.message)) for name, wrong in WRONG.items()}
NONSENSE = {
    "descriptor": lambda x, b: kl.run_kernel("wide", W, x),
}

REFUSAL = said("out takes no result whose gradient")
OUTS = {
    "biased": Out(
        lambda x, bias, out: matmul(W, x, bias, out=out), (X, B), (6, 24),
        names=("x", "bias", "out"), refusal=REFUSAL, fake=False,
    ),
    "plain": Out(
        lambda x, out: matmul(W, x, out=out), (X,), (6, 24), names=("x", "out"),
        refusal=REFUSAL, fake=False,
    ),
    "a layout": Out(
        of_layout, (X, B, *W.operands), (6, 24), names=("x", "bias", "out"), refusal=REFUSAL
    ),
}  # fmt: skip


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.bias = W, torch.nn.Parameter(B.clone())

    def forward(self, x):
        return matmul(self.w, x, self.bias, kl.Gelu()) + 1


class Frozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = W

    def forward(self, x):
        return matmul(self.w, x) + 1


def rows(count: int) -> torch.Tensor:
    return values(count, 40, seed=3)


EXPORTED = {
    "parameters": Exported(Layer, rows, ("sparse_matmul",), (6, 2, 31)),
    "buffers": Exported(Frozen, rows, ("sparse_matmul",), (6, 2, 31), trains=False),
}

FAKES = {
    str(leading): Call(of_layout, (torch.ones(*leading, 40), B, *W.operands), SIDES)
    for leading in [(), (6,), (0,), (2, 3), (1, 2, 2)]
}
FAKES |= {"x alone": Call(of_layout, (X, B, *W.operands), (0,))}
WRONG_FAKES = {"features": (Call(of_layout, (torch.ones(2, 39), B, *W.operands)), "x must be")}
PRODUCT = ("sparse_matmul_product",)
GRAPHS = {"a layout": Graph(CALLS["a layout"], ("sparse_matmul",), PRODUCT, PRODUCT)}
TRANSFORMS = {
    "matmul": Transform(CALLS["matmul"], SIDES, None, None, None, None),
}


def whole(x, descriptor, names="", numbers=(), tensors=(), w=W) -> Check:
    given = (x, *listed(w), descriptor.text, names, [*numbers], [*tensors], False)
    return Check("sparse_matmul", given, (0, 8))


def checks(w) -> dict[str, Check]:
    y, x = values(2, 3, 24), values(2, 3, 40)
    return {
        "plain": whole(X, PLAIN, w=w),
        "epilogue": whole(X, GELU, "bias", tensors=[B], w=w),
        "mixed": whole(X.view(2, 3, 40), SCALED, "shift bias gain", [0.5], [B, GAIN], w),
        "strided": whole(X.t().contiguous().t(), GELU, "bias", tensors=[B.expand(24)], w=w),
        "one": whole(X[0], PLAIN, w=w),
        "product": Check("sparse_matmul_product", (x, *listed(w), None, False, False), (0,)),
        "biased": Check("sparse_matmul_product", (x, *listed(w), B, False, False), (0, 5)),
        "turned": Check("sparse_matmul_product", (y, *listed(w), None, True, False), (0,)),
    }


MATRICES = {"no transpose": W, "a transpose": TURNED}


def numeric(w) -> dict[str, Numeric]:
    """In float32: differences are coarse, and these functions are linear."""

    def product(x, *bias, turned=False):
        arguments = (*listed(w), *(bias or (None,)), turned, False)
        return torch.ops.kernlib.sparse_matmul_product(x, *arguments)

    options = (("eps", 0.1), ("atol", 1e-2), ("rtol", 1e-2))
    return {
        "product": Numeric(product, (values(5),), options),
        "biased": Numeric(product, (values(5), values(4)), options),
        "turned": Numeric(lambda y: product(y, turned=True), (values(4),), options, twice=False),
    }


QUIET = Quiet(
    """
from kernlib.sparse import compress, matmul
w = compress(torch.eye(40), "bitmap")
x, bias = torch.ones(6, 40, requires_grad=True), torch.ones(40, requires_grad=True)
matmul(w, x, bias, kl.Gelu()).sum().backward()
""",
    ("kernlib.families.sparse.operators", "kernlib.families.kronecker_sparse.operation"),
)
OPERATIONS = (
    Operation(
        name="sparse",
        operator="sparse_matmul",
        typical=Call(lambda x, b: matmul(W, x, b), (X, B), SIDES),
        text="SparseMatmul(epilogue=(Bias",
        dynamo_sees=False,
        near=NEAR,
        calls=CALLS,
        inductor=("matmul with an epilogue", "a known transpose"),
        breaking=Call(custom_inside, (X,)),
        changes=CHANGES,
        descriptors=DESCRIPTORS,
        sizes=SIZES,
        autocast=Autocast(
            Call(lambda x, b: matmul(HALF, x, b), (X, B), SIDES), torch.float16, (1e-3, 1e-3)
        ),
        wrong=WRONG,
        nonsense=NONSENSE,
        outs=OUTS,
        exported=EXPORTED,
        fakes=FAKES,
        wrong_fakes=WRONG_FAKES,
        graphs=GRAPHS,
        transforms=TRANSFORMS,
        checks={
            f"{name}, {known}": check
            for known, w in MATRICES.items()
            for name, check in checks(w).items()
        },
        numeric=numeric(SMALL) | {f"known {n}": one for n, one in numeric(SMALL_TURNED).items()},
        quiet=QUIET,
    ),
)
