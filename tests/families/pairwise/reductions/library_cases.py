"""Reductions of kernel matrices as the suite of torch.library takes them."""

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

M, N, K, L, C = 5, 7, 3, 2, 4
GAUSSIAN, SYMMETRIC, L1 = kl.gaussian(), kl.gaussian(symmetric=True), kl.l1_distance()
SIGNED = kl.Pairwise(inner=kl.Identity(), epilogue=kl.Custom("tanh(v / s)", ("s",)))
A, B, BATCH_A, BATCH_B = values(M, K), values(N, K), values(L, M, K), values(L, N, K)
V, COLUMNS, BATCH_V = values(N), values(N, C), values(L, N, C)
WIDTH, WIDTHS = torch.tensor(2.0), torch.tensor([1.0, 2.0])
SIDES, THREE, FOUR = (0, 1), (0, 1, 2), (0, 1, 2, 3)
ROUNDED = (1e-5, 1e-6)


def product(a, b, v, width=2.0, **arguments):
    return kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=width, **arguments)


CALLS = {
    "vector": Call(product, (A, B, V), THREE),
    "columns": Call(lambda a, b, v, w: product(a, b, v, w).sin(), (A, B, COLUMNS, WIDTH), FOUR),
    "batch": Call(product, (BATCH_A, B, BATCH_V, WIDTHS), FOUR),
    "batch of v": Call(
        lambda a, b, v: kl.kernel_matmul(kl.matern52(), a, b, v, bandwidth=2),
        (A, B, BATCH_V), THREE,
    ),
    "symmetric": Call(
        lambda a, v: kl.kernel_matmul(SYMMETRIC, a, None, v, bandwidth=2.0, regularization=0.5),
        (A, values(M, C)), SIDES,
    ),
    "signed": Call(
        lambda a, b, v, s: kl.kernel_matmul(SIGNED, a, b, v, s=s), (A, B, COLUMNS, WIDTH), FOUR
    ),
    "mapped": Call(
        lambda a, b, v, f: product(a, b, v, feature_map=f), (A, B, COLUMNS, values(K)), FOUR
    ),
    "sum": Call(
        lambda a, b, w: kl.kernel_sum(kl.laplace_l1(), a, b, bandwidth=w),
        (A, BATCH_B, WIDTH), THREE,
    ),
    "sum inside": Call(
        lambda a, b: kl.kernel_sum(kl.gaussian(), a, b, bandwidth=2.0), (A, B), SIDES
    ),
    "logsumexp": Call(
        lambda a, b, w: kl.kernel_logsumexp(GAUSSIAN, a, b, bandwidth=w), (A, B, WIDTH), THREE
    ),
    "offsets": Call(
        lambda a, b: kl.kernel_sum(
            GAUSSIAN, a, b, bandwidth=2.0, regularization=3.0, row_offset=2, col_offset=1
        ),
        (A, B), SIDES,
    ),
    "min": Call(
        lambda a, b, w: kl.kernel_min(GAUSSIAN, a, b, bandwidth=w), (A, BATCH_B, WIDTHS), THREE
    ),
    "topk": Call(
        lambda a, b, w: kl.kernel_topk(GAUSSIAN, a, b, 3, bandwidth=w, regularization=w),
        (A, B, WIDTH), THREE,
    ),
    "topk inside": Call(lambda a, b: kl.kernel_topk(kl.l1_distance(), a, b, 3), (A, B), SIDES),
    "largest": Call(lambda a, b: kl.kernel_topk(L1, a, b, 4, True), (BATCH_A, B), SIDES),
    "argmin": Call(lambda a, b: kl.kernel_argmin(L1, a, b), (BATCH_A, B)),
    "bfloat16": Call(product, (A.bfloat16(), B.bfloat16(), COLUMNS.bfloat16()), THREE),
    "half": Call(product, (A.half(), B.half(), COLUMNS.half()), THREE),
    "out": Call(lambda a, b, v: product(a, b, v, out=torch.ones(M, C)) + 1, (A, B, COLUMNS)),
}  # fmt: skip


def custom_inside(a, b):
    custom = kl.Custom("tanh(gain * v)", ("gain",))
    return kl.kernel_sum(kl.l1_distance(epilogue=custom), a, b, gain=0.5)


CHANGES = {
    "numbers": Changes(
        lambda a, b, v, width, offset: product(
            a, b, v, width, regularization=1.0, row_offset=offset
        ),
        tuple((A, B, V, *numbers) for numbers in ((2.0, 0), (3.0, 0), (4.5, 1), (5, 2), (2.0, 0))),
    ),
    "tensors": Changes(
        product, tuple((A, B, V, torch.tensor(w)) for w in (0.5, 2.0, 3.0)), programs=1
    ),
    "counts": Changes(
        lambda a, b, k: kl.kernel_topk(L1, a, b, k), tuple((A, B, k) for k in (1, 3, 4, 2, 1))
    ),
}
DESCRIPTORS = Descriptors(
    lambda descriptor, a, b: kl.kernel_sum(descriptor, a, b, bandwidth=2.0),
    tuple((made(), A, B) for made in (kl.laplace_l1, kl.laplace_l2, kl.gaussian, kl.matern52)),
)


ROWS = ((4, 6, 9), (8, 5, 2), (3, 7, 6))
SIZES = {
    "product": Sizes(
        product, tuple((values(m, K), values(n, K), values(n, c), WIDTH) for m, n, c in ROWS), FOUR
    ),
    "nearest": Sizes(
        lambda a, b, w: kl.kernel_topk(GAUSSIAN, a, b, 2, bandwidth=w)[0].sum(1, keepdim=True),
        tuple((values(m, K), values(n, K), WIDTH) for m, n, _ in ROWS),
        THREE,
    ),
}

WRONG = {
    "v": Wrong(
        lambda a, b, v: kl.kernel_matmul(GAUSSIAN, a, b, a[:, 0], bandwidth=1.0),
        "v must have a row",
    ),
    "features": Wrong(
        lambda a, b, v: kl.kernel_sum(GAUSSIAN, a, b[:, 1:], bandwidth=1.0), "same number of feat"
    ),
    "missing": Wrong(lambda a, b, v: kl.kernel_sum(GAUSSIAN, a, b), "needs bandwidth"),
    "negative": Wrong(
        lambda a, b, v: kl.kernel_min(GAUSSIAN, a, b, bandwidth=-1.0), "bandwidth must be greater"
    ),
    "k": Wrong(
        lambda a, b, v: kl.kernel_topk(GAUSSIAN, a, b, N + 1, bandwidth=1.0), "k must be from 1 to"
    ),
    "b missing": Wrong(
        lambda a, b, v: kl.kernel_logsumexp(GAUSSIAN, a, bandwidth=1.0), "b is missing"
    ),
    "no v": Wrong(
        lambda a, b, v: kl.kernel_matmul(GAUSSIAN, a, b, None, bandwidth=1.0), "v must be a tensor"
    ),
    "unknown": Wrong(
        lambda a, b, v: kl.kernel_sum(GAUSSIAN, a, b, width=1.0), "width is no argument"
    ),
    "out": Wrong(
        lambda a, b, v: product(a, b, v, out=torch.ones(M + 1)), "out must have shape",
        recorded=False,
    ),
    "out's dtype": Wrong(
        lambda a, b, v: product(a, b, v, out=torch.ones(M).int()), "out must be torch.float32",
        recorded=False,
    ),
}  # fmt: skip
NONSENSE = {
    "bandwidth": lambda a, b, v: product(a, b, v, "wide"),
    "descriptor": lambda a, b, v: kl.kernel_matmul("wide", a, b, v, bandwidth=2.0),
}

OUT = {"names": ("a", "b", "v", "bandwidth", "out"), "refusal": said("out takes no gradient")}
OUTS = {
    "columns": Out(product, (A, B, COLUMNS, WIDTH), (M, C), **OUT),
    "half into float": Out(product, (A.half(), B.half(), COLUMNS.half(), WIDTH), (M, C)),
    "half": Out(
        product, (A.half(), B.half(), COLUMNS.half(), WIDTH), (M, C), torch.half
    ),
    "batch": Out(product, (BATCH_A, B, values(N, 1), WIDTH), (L, M, 1)),
}  # fmt: skip


class Smoothed(torch.nn.Module):
    """Values of points of its own at the input's, and how far the nearest is."""

    def __init__(self):
        super().__init__()
        self.points = torch.nn.Parameter(B.clone())
        self.values = torch.nn.Parameter(COLUMNS.clone())

    def forward(self, x):
        near, _ = kl.kernel_min(kl.l1_distance(), x, self.points)
        return product(x, self.points, self.values) + near[:, None]


EXPORTED = {
    "smoothed": Exported(
        Smoothed,
        lambda count: values(count, K, seed=3),
        ("pairwise_reduce", "pairwise_choose"),
        (M, 2, 11),
    )
}

FAKES = {name: call for name, call in CALLS.items() if "out" not in name} | {
    "min of a batch": Call(
        lambda a, b: kl.kernel_min(GAUSSIAN, a, b, bandwidth=2.0), (BATCH_A, B), SIDES
    ),
    "topk of a batch": Call(
        lambda a, b: kl.kernel_topk(GAUSSIAN, a, b, 3, bandwidth=2.0), (BATCH_A, B), SIDES
    ),
    "one column": Call(product, (BATCH_A, B, values(N, 1)), THREE),
}
WRONG_FAKES = {"features": (Call(product, (A, B[:, 1:], V)), "same number of feat")}
GRADIENT = ("pairwise_reduce", "pairwise_reduce_gradient")
GRAPHS = {
    "columns": Graph(CALLS["columns"], GRADIENT[:1], GRADIENT[:1], GRADIENT),
    "topk": Graph(CALLS["topk"], ("pairwise_choose",), ("pairwise_choose",)),
}

TRANSFORM = r"[abv] is inside a transform of torch\.func"
CHOSEN = r"kernlib\.pairwise\.default"  # by which the values of what was chosen are recorded
TRANSFORMS = {
    "matmul": Transform(
        Call(product, (A, B, V), THREE), SIDES, None, None, TRANSFORM,
        r"kernlib\.pairwise_reduce\.default",
    ),
    "topk": Transform(
        Call(lambda a, b: kl.kernel_topk(L1, a, b, 2)[0], (A, B), SIDES), SIDES,
        None, None, TRANSFORM, CHOSEN,
    ),
    "min": Transform(
        Call(lambda a, b: kl.kernel_min(L1, a, b)[0], (A, B), SIDES), SIDES,
        None, None, TRANSFORM, CHOSEN,
    ),
}  # fmt: skip


def checks(reduction: str, numbers: list, tensors: list) -> dict[str, Check]:
    """Of a reduction, of its gradients, and of what chooses entries."""
    names = "epsilon bandwidth" if len(numbers) == len(tensors) else "bandwidth"
    v = COLUMNS if reduction == "matmul" else None
    rest = (GAUSSIAN.text, names, numbers, tensors, 1, 0)
    shape = (*(WIDTHS.shape if numbers and tensors else ()), M, *(() if v is None else (C,)))
    result, along = values(*shape), values(*shape, seed=1)
    kept = (along, result, A, B, v, "a b", reduction, *rest)
    return {
        "": Check("pairwise_reduce", (A, B, v, reduction, *rest), (0, 1, 2, 7)),
        " gradient": Check("pairwise_reduce_gradient", kept),
        " choice": Check("pairwise_choose", (A, B, 2, True, "topk", *rest)),
    }


MADE = {
    f"{reduction} {name}": checks(reduction, *given)
    for reduction in ("matmul", "logsumexp")
    for name, given in {
        "number": ([2.0], []),
        "tensor": ([], [WIDTH]),
        "both": ([0.5], [WIDTHS]),
    }.items()
}


def reduced(reduction: str):
    def run(a, b, width, *v):
        rest = (reduction, GAUSSIAN.text, "bandwidth", [], [width], 0, 0)
        return torch.ops.kernlib.pairwise_reduce(a, b, v[0] if v else None, *rest)

    return run


DOUBLES = (A.double(), B.double(), torch.tensor(1.5, dtype=torch.float64))
NUMERIC = {
    "matmul": Numeric(reduced("matmul"), (*DOUBLES, values(N, 2).double())),
    "sum": Numeric(reduced("sum"), DOUBLES),
    "logsumexp": Numeric(reduced("logsumexp"), DOUBLES),
}
HERE = "kernlib.families.pairwise.reductions"
QUIET = Quiet(
    "kl.kernel_sum(kl.l1_distance(), torch.ones(2, 3), torch.ones(4, 3))\n"
    "kl.kernel_min(kl.l1_distance(), torch.ones(2, 3), torch.ones(4, 3))",
    tuple(f"{HERE}.{name}" for name in ("library", "gradients", "pairs")),
)
OPERATIONS = (
    Operation(
        name="reductions",
        operator="pairwise_reduce",
        typical=Call(lambda a, b, v: product(a, b, v), (A, B, V), THREE),
        text="epilogue=(Gaussian(),)",
        dynamo_sees=True,
        near=Near(ROUNDED, ROUNDED, ROUNDED),
        calls=CALLS,
        inductor=("columns", "sum", "topk"),
        breaking=Call(custom_inside, (A, B)),
        changes=CHANGES,
        descriptors=DESCRIPTORS,
        sizes=SIZES,
        autocast=Autocast(CALLS["vector"], torch.float32, ROUNDED),
        wrong=WRONG,
        nonsense=NONSENSE,
        outs=OUTS,
        exported=EXPORTED,
        fakes=FAKES,
        wrong_fakes=WRONG_FAKES,
        graphs=GRAPHS,
        transforms=TRANSFORMS,
        checks={f"{name}{end}": one for name, made in MADE.items() for end, one in made.items()},
        numeric=NUMERIC,
        quiet=QUIET,
    ),
)
