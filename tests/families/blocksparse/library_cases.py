"""Block-sparse products as the suite of torch.library takes them."""

from __future__ import annotations

import torch

import kernlib as kl
from kernlib.families.blocksparse.descriptor import BlockSparseMatmul
from kernlib.families.blocksparse.functions import dds, dsd, sdd
from kernlib.families.blocksparse.layout import Layout
from tests.contract.library.cases import (
    Autocast,
    Call,
    Changes,
    Check,
    Descriptors,
    Exported,
    Graph,
    Near,
    Operation,
    Out,
    Quiet,
    Sizes,
    Transform,
    Wrong,
    values,
)
from tests.support.dynamo_messages import said

MASK = [[1, 0, 1], [0, 1, 0]]
LAYOUT = Layout(MASK, 16, 4)  # 32 rows, 48 columns, a slot without a block
OTHERS = [Layout(mask, 16, 4) for mask in (MASK, [[0, 1, 1], [1, 0, 0]], [[0, 0, 0], [1, 0, 0]])]
HEADS = Layout([MASK, [[0, 0, 1], [0, 0, 0]]], 16, 4)
EPILOGUE = (kl.Bias(), kl.Gelu())
SDD, DSD, DDS = (BlockSparseMatmul(mode) for mode in ("sdd", "dsd", "dds"))
FIRST = BlockSparseMatmul("dds", transpose_b=True, epilogue=EPILOGUE)
SCALED = FIRST.replace(
    epilogue=(kl.Bias(), kl.Silu(), kl.Custom("v * gain + shift", ("gain", "shift")))
)
CUSTOM = SDD.replace(epilogue=kl.Custom("tanh(v)"))
SHIFTED = SDD.replace(epilogue=kl.Custom("v + 2.0"))
X, W, BIAS, GAIN = values(6, 48), values(4, 16, 16), values(32), torch.tensor(1.5)
A, B, UNDER, Y = values(32, 5), values(5, 48), values(48, 6), values(32, 6)
A3, B3, ROWS = values(2, 32, 5), values(2, 5, 48), values(6, 32)
TWO, THREE, FOUR = ((*range(count),) for count in (2, 3, 4))
NEAR = Near((1e-5, 1e-5), (1e-5, 1e-5), (1e-4, 1e-4))


def first(x, w, bias, **arguments):
    """A layer: x W^T, a bias and an activation."""
    return kl.run_kernel(FIRST, LAYOUT, x, w, bias=bias, **arguments)


def scaled(x, w, bias, gain, shift=1.0, layout=LAYOUT):
    return kl.run_kernel(SCALED, layout, x, w, bias=bias, gain=gain, shift=shift)


def of_layout(x, w, bias, *tensors, **arguments):
    """A layout that the function makes of tensors, as that of a layer whose buffers somebody has
    put others in place of."""
    layout = Layout.from_layout(LAYOUT.text, tensors)
    return kl.run_kernel(FIRST, layout, x, w, bias=bias, **arguments)


def attention(q, k, v):
    """Of scores that are stored in blocks."""
    return dsd(sdd(q, k, HEADS), v, HEADS, transpose_b=True)


def summed(w, b, y, beta):
    return dsd(w, b, LAYOUT, epilogue=(kl.Add(), kl.Relu()), y=y, beta=beta)


def into(x, w, bias):
    """Written, and used again."""
    out = torch.full((6, 32), 2.0)
    made = first(x, w, bias, out=out)
    dds(x, w, LAYOUT, transpose_b=True, epilogue=kl.Add(), y=out, beta=1.0, out=out)
    return out + 1, made * 2


def inside(x, w, bias):
    made = BlockSparseMatmul("dds", transpose_b=True, epilogue=(kl.Bias(), kl.Gelu()))
    return kl.run_kernel(made, LAYOUT, x, w, bias=bias)


def custom_inside(x, w):
    return dds(x, w, LAYOUT, transpose_b=True, epilogue=kl.Custom("tanh(0.5 * v)"))


OF_MODES = {
    "sdd": Call(lambda a, b: sdd(a, b, LAYOUT), (A, B), TWO),
    "sdd turned": Call(
        lambda a, b: sdd(a, b, LAYOUT, transpose_a=True, transpose_b=True),
        (A.mT.contiguous(), B.mT.contiguous()), TWO,
    ),
    "dsd": Call(lambda w, b: dsd(w, b, LAYOUT), (W, UNDER), TWO),
    "dsd turned": Call(
        lambda w, b: dsd(w, b, LAYOUT, transpose_a=True, transpose_b=True), (W, ROWS), TWO
    ),
    "dds": Call(lambda a, w: dds(a, w, LAYOUT), (ROWS, W), TWO),
    "heads": Call(lambda a, b: sdd(a, b, HEADS), (A3, B3), TWO),
    "one matrix for heads": Call(lambda a, b: sdd(a, b, HEADS), (A3[:1], B3), TWO),
    "attention": Call(attention, (A3, B3, values(2, 7, 48)), THREE),
    "batches": Call(
        lambda w, b: dsd(w, b, LAYOUT), (values(3, 1, 4, 16, 16), values(2, 48, 6)), TWO
    ),
}  # fmt: skip
CALLS = OF_MODES | {
    "plain": Call(lambda w, b: kl.run_kernel(DSD, LAYOUT, w, b), (W, UNDER), TWO),
    "epilogue": Call(first, (X, W, BIAS), THREE),
    "bias alone": Call(first, (X, W, BIAS), (2,)),
    "further dimensions": Call(first, (X.view(2, 1, 3, 48), W, BIAS), THREE),
    "slots without a block": Call(
        lambda a, b: kl.run_kernel(SHIFTED, LAYOUT, a, b), (A, B), TWO
    ),
    "sum": Call(lambda w, b, y: summed(w, b, y, 0.5), (W, UNDER, Y), THREE),
    "sum of tensors": Call(summed, (W, UNDER, Y[:, :1], GAIN), FOUR),
    "numbers": Call(lambda *t: scaled(*t, 2, 0.5), (X, W, BIAS), THREE),
    "tensors": Call(lambda *t: scaled(*t, t[-1] * 2), (X, W, BIAS, GAIN), FOUR),
    "custom": Call(lambda a, b: kl.run_kernel(CUSTOM, LAYOUT, a, b), (A, B), TWO),
    "tf32": Call(lambda a, b: sdd(a, b, LAYOUT, precision="tf32"), (A, B), TWO),
    "half": Call(
        lambda w, b: dsd(w, b, LAYOUT), (W.half(), UNDER.half()), TWO,
        Near((1e-3, 1e-3), (1e-3, 1e-3), (5e-3, 5e-3)),
    ),
    "a layout": Call(of_layout, (X, W, BIAS, *LAYOUT.tensors), THREE),
    "debug": Call(lambda *t: first(*t, debug=True), (X, W, BIAS), THREE),
    "out": Call(into, (X, W, BIAS)),
    "inside": Call(inside, (X, W, BIAS), THREE),
}  # fmt: skip

CHANGES = {
    "numbers": Changes(scaled, tuple((X, W, BIAS, gain) for gain in (1.5, 2.5, 3.5, 4))),
    "tensors": Changes(
        scaled, tuple((X, W, BIAS, torch.tensor(gain)) for gain in (0.5, 2.0, 3.0)), programs=1
    ),
    "beta tensor": Changes(
        summed, tuple((W, UNDER, Y, torch.tensor(beta)) for beta in (0.5, 0.0, 3.0)), programs=1
    ),
    "layouts": Changes(
        lambda w, b, layout: dsd(w, b, layout), tuple((W, UNDER, one) for one in OTHERS)
    ),
    "layouts' tensors": Changes(
        of_layout, tuple((X, W, BIAS, *one.tensors) for one in OTHERS), programs=1
    ),
}
DESCRIPTORS = Descriptors(
    lambda descriptor, a, b: kl.run_kernel(descriptor, LAYOUT, a, b),
    (
        (SDD, A, B),
        (SDD.replace(transpose_a=True), A.mT, B),
        (DSD, W, UNDER),
        (DSD.replace(transpose_b=True), W, X),
        (DSD.replace(transpose_a=True), W, A),
        (DDS, ROWS, W),
        *((DDS.replace(epilogue=end), ROWS, W) for end in (kl.Relu(), kl.Silu())),
    ),
)


def trained(x, w, bias, gain):
    """What a layer and its loss are made of: calls that share tensors."""
    scores = sdd(bias[:, None].expand(32, x.shape[0]), x, LAYOUT)
    return scaled(x, w, bias, gain, 1.0).sum() + (scores * w).square().sum()


SEVERAL = (7, 9, 11)
SIZES = {
    "rows": Sizes(trained, tuple((values(rows, 48), W, BIAS, GAIN) for rows in SEVERAL), FOUR),
    "batches": Sizes(
        lambda x, w, bias: first(x, w, bias).square().sum(),
        tuple((values(rows, 3, 48), W, BIAS) for rows in SEVERAL), THREE,
    ),
    "attention": Sizes(
        lambda q, k, v: attention(q, k, v).square().sum(),
        tuple((values(n, 2, 32, 5), values(n, 2, 5, 48), values(n, 2, 6, 48)) for n in SEVERAL),
        THREE,
    ),
}  # fmt: skip

WRONG = {
    "features": Wrong(lambda x, w, v: first(x[:, 1:], w, v), r"a must be \(\.\.\., n, 48\)"),
    "values": Wrong(lambda x, w, v: first(x, w[1:], v), "values must hold the layout's blocks"),
    "dtypes": Wrong(lambda x, w, v: first(x, w.double(), v), "must have one dtype"),
    "bias": Wrong(lambda x, w, v: first(x, w, v[1:]), "bias must have shape"),
    "missing": Wrong(lambda x, w, v: kl.run_kernel(FIRST, LAYOUT, x, w), "needs bias"),
    "operands": Wrong(
        lambda x, w, v: kl.run_kernel(FIRST, LAYOUT, x, bias=v), "takes layout, a and b"
    ),
    "sizes": Wrong(lambda x, w, v: sdd(x[:, :32].mT, x[1:], LAYOUT), "one size to sum over"),
    "batches": Wrong(
        lambda x, w, v: dds(x.view(2, 3, 48), w.expand(3, 4, 16, 16), LAYOUT, transpose_b=True),
        "must broadcast",
    ),
    "out": Wrong(
        lambda x, w, v: dds(x, w, LAYOUT, transpose_b=True, out=X), "out must have shape",
        recorded=False,
    ),
    "out's dtype": Wrong(
        lambda x, w, v: dds(x, w, LAYOUT, transpose_b=True, out=torch.ones(6, 32).int()),
        "out must be torch.float32", recorded=False,
    ),
    "nan": Wrong(lambda *t: scaled(*t, float("nan")), "gain must be a number, got nan"),
}  # fmt: skip
WRONG = {name: wrong._replace(message=said(wrong.message)) for name, wrong in WRONG.items()}
NONSENSE = {"descriptor": lambda x, w, v: kl.run_kernel("wide", LAYOUT, x, w)}

REFUSAL = said("out takes no result whose gradient")
OUTS = {
    "epilogue": Out(
        first, (X, W, BIAS), (6, 32), names=("a", "values", "bias", "out"), refusal=REFUSAL,
        fake=False,
    ),
    "sdd": Out(
        lambda a, b, out: sdd(a, b, LAYOUT, out=out), (A, B), (4, 16, 16),
        names=("a", "b", "out"), refusal=REFUSAL, fake=False,
    ),
    "dsd": Out(
        lambda w, b, out: dsd(w, b, LAYOUT, out=out), (W, UNDER), (32, 6),
        names=("values", "b", "out"), refusal=REFUSAL, fake=False,
    ),
    "a layout": Out(of_layout, (X, W, BIAS, *LAYOUT.tensors), (6, 32)),
}  # fmt: skip


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layout = LAYOUT
        self.weight, self.bias = (torch.nn.Parameter(t.clone()) for t in (W, BIAS))

    def forward(self, x):
        return kl.run_kernel(FIRST, self.layout, x, self.weight, bias=self.bias) + 1


class Frozen(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layout = LAYOUT
        self.register_buffer("weight", W.clone())

    def forward(self, x):
        return dds(x, self.weight, self.layout, transpose_b=True) + 1


def rows(count: int) -> torch.Tensor:
    return values(count, 48, seed=3)


EXPORTED = {
    "parameters": Exported(Layer, rows, ("blocksparse_matmul",), (6, 2, 11)),
    "buffers": Exported(Frozen, rows, ("blocksparse_matmul",), (6, 2, 11), trains=False),
}

BATCHES = [(6,), (0,), (2, 3), (1, 2, 2)]
FAKES = {
    str(n): Call(of_layout, (torch.ones(*n, 48), W, BIAS, *LAYOUT.tensors), THREE) for n in BATCHES
}


def of_mode(descriptor, layout, a, b, places=TWO) -> Call:
    """Of a layout that is made of tensors."""
    text = layout.text

    def run(a, b, *tensors):
        return kl.run_kernel(descriptor, Layout.from_layout(text, tensors), a, b)

    return Call(run, (a, b, *layout.tensors), places)


FAKES |= {
    "sdd": of_mode(SDD, LAYOUT, A, B),
    "sdd heads": of_mode(SDD, HEADS, A3[:1], B3),
    "dsd": of_mode(DSD, LAYOUT, W, UNDER),
    "dsd batches": of_mode(DSD, LAYOUT, values(3, 1, 4, 16, 16), values(2, 48, 6)),
    "values alone": of_mode(DSD, LAYOUT, W, UNDER, (0,)),
    "strided": of_mode(DDS, LAYOUT, A.mT, W.mT),
    "half": of_mode(SDD, LAYOUT, A.half(), B.half()),
    "none": of_mode(DSD, LAYOUT, W, UNDER[:, :0]),
}
WRONG_FAKES = {
    "features": (Call(of_layout, (torch.ones(2, 47), W, BIAS, *LAYOUT.tensors)), "a must be")
}

OPERATOR, PRODUCT = ("blocksparse_matmul",), ("blocksparse_matmul_product",)
GRAPHS = {
    "a layout": Graph(CALLS["a layout"], OPERATOR, PRODUCT, PRODUCT),
    "sdd": Graph(of_mode(SDD, LAYOUT, A, B), OPERATOR, PRODUCT, PRODUCT),
    "dsd": Graph(
        of_mode(DSD, LAYOUT, W, UNDER),
        OPERATOR,
        PRODUCT,
        (*PRODUCT, "blocksparse_matmul_gradients"),
    ),
}
TRANSFORMS = {  # of those whose gradients have the strides of eager calls'
    name: Transform(CALLS[name], CALLS[name].places, None, None, None, None)
    for name in ("dsd", "batches", "one matrix for heads")
}


def whole(descriptor, a, b, names="", numbers=(), tensors=(), layout=LAYOUT) -> Check:
    given = (a, b, [*layout.tensors], layout.text, descriptor.text)
    given += (names, [*numbers], [*tensors], False)
    return Check("blocksparse_matmul", given, (0, 1, 7))


def product(descriptor, a, b, bias=None, layout=LAYOUT) -> Check:
    given = (a, b, [*layout.tensors], layout.text, descriptor.text, bias, False)
    return Check("blocksparse_matmul_product", given, (0, 1, 5))


def gradients(descriptor, a, b, needs, layout=LAYOUT) -> Check:
    grad = kl.run_kernel(descriptor, layout, a, b)
    given = (grad, a, b, [*layout.tensors], layout.text, descriptor.text, needs, False)
    return Check("blocksparse_matmul_gradients", given, (0, 1, 2))


BIASED = FIRST.replace(epilogue=kl.Bias())
CHECKS = {
    "sdd": whole(SDD, A, B),
    "epilogue": whole(FIRST, X, W, "bias", tensors=[BIAS]),
    "mixed": whole(SCALED, X.view(2, 3, 48), W, "shift bias gain", [0.5], [BIAS, GAIN]),
    "batches": whole(DSD, values(3, 1, 4, 16, 16), values(2, 48, 6)),
    "strided": whole(DSD, W.mT, X.mT),
    "heads": whole(SDD, A3[:1], B3, layout=HEADS),
    "product of sdd": product(SDD, A, B),
    "product of dsd": product(DSD.replace(transpose_a=True, transpose_b=True), W, ROWS),
    "product of dds": product(BIASED, X, W, BIAS),
    "product of batches": product(DDS, values(3, 2, 32), W),
    "product of heads": product(SDD, A3[:1], B3, layout=HEADS),
    "gradients of sdd": gradients(SDD, A, B, [True, True]),
    "gradients of dds": gradients(DDS, values(3, 2, 32), W, [False, True]),
    "gradients of heads": gradients(SDD, A3[:1], B3, [True, False], layout=HEADS),
}


QUIET = Quiet(
    """
from kernlib.families.blocksparse.functions import dds, sdd
from kernlib.families.blocksparse.layout import Layout
layout = Layout([[1, 0], [0, 1]], 16)
x, w, bias = (torch.ones(s, requires_grad=True) for s in ((6, 32), (2, 16, 16), (32,)))
dds(x, w, layout, transpose_b=True, epilogue=(kl.Bias(), kl.Gelu()), bias=bias).sum().backward()
sdd(x.mT, x, layout).sum().backward()
""",
    ("kernlib.families.blocksparse.operators", "kernlib.families.sparse.operation"),
)
OPERATIONS = (
    Operation(
        name="blocksparse",
        operator="blocksparse_matmul",
        typical=Call(first, (X, W, BIAS), THREE),
        text="Gelu(",
        dynamo_sees=False,
        near=NEAR,
        calls=CALLS,
        inductor=("epilogue", "sdd", "attention", "sum of tensors"),
        breaking=Call(custom_inside, (X, W)),
        changes=CHANGES,
        descriptors=DESCRIPTORS,
        sizes=SIZES,
        autocast=Autocast(CALLS["attention"], torch.bfloat16, (5e-2, 2e-1)),
        wrong=WRONG,
        nonsense=NONSENSE,
        outs=OUTS,
        exported=EXPORTED,
        fakes=FAKES,
        wrong_fakes=WRONG_FAKES,
        graphs=GRAPHS,
        transforms=TRANSFORMS,
        checks=CHECKS,
        numeric={},  # they are in test_gradients.py
        quiet=QUIET,
        strides=False,  # compiled, gradients are contiguous
    ),
)
