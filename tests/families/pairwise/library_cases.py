"""Matrices of pairwise values, and their gradients, as the suite of torch.library takes them."""

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
from tests.families.pairwise.library_calls import (
    BATCH_A,
    CALLS,
    CUSTOM,
    EXPONENTIAL,
    GRADIENTS,
    INSIDE,
    LAPLACE,
    ONE,
    PQ,
    SEVERAL,
    SIDES,
    SYMMETRIC,
    THREE,
    A,
    B,
    K,
    L,
    M,
    N,
    both,
    laplace,
)
from tests.support.dynamo_messages import said


def custom_inside(a, b):
    custom = kl.Custom("tanh(gain * v)", ("gain",))
    return kl.run_kernel(kl.l1_distance(epilogue=custom), a, b, gain=0.5)


def with_offset(a, b, width, offset):
    return laplace(a, b, width, regularization=1.0, row_offset=offset)


def with_out(a, b):
    out = a.new_zeros(a.shape[0], b.shape[0])
    laplace(a, b, out=out, regularization=1.0, row_offset=a.shape[0] - b.shape[0])
    return out, kl.run_kernel(SYMMETRIC, a, bandwidth=2.0)


CHANGES = {
    "numbers": Changes(
        with_offset,
        tuple(
            (A, B, *numbers) for numbers in [(2.0, 0), (3.0, 0), (4.5, 1), (5, 2), (7, 2), (2.0, 0)]
        ),
    ),
    # Each has a formula of its own.
    "exponents": Changes(
        lambda a, b, p: kl.cdist(a, b, p),
        tuple((A, B, p) for p in (2.0, 1.0, 1.5, 0.0, float("inf"), 2.5)),
    ),
    "tensors": Changes(
        laplace, tuple((A, B, torch.tensor(w)) for w in (0.5, 2.0, 3.0)), programs=1
    ),
    "sizes": Changes(
        with_out, tuple((values(m, K), values(n, K)) for m, n in ((4, 6), (8, 5), (3, 3)))
    ),
}
DESCRIPTORS = Descriptors(
    lambda descriptor, a, b: kl.run_kernel(descriptor, a, b, bandwidth=2.0),
    (
        *(
            (LAPLACE.replace(epilogue=epilogue), A, B)
            for epilogue in (kl.Laplace(), kl.Gaussian(), kl.Matern(1.5), kl.Matern(2.5))
        ),
        (kl.laplace_l2(), A, B),
        (kl.gaussian(), A, B),
    ),
)


SIZES = {
    "batches": Sizes(
        lambda a, b, w: laplace(a, b, w) + kl.cdist(a, b),
        tuple(
            (values(batch, m, K + n), values(batch, n, K + n), values(batch).abs() + 0.5)
            for batch, m, n in [(4, 6, 5), (7, 2, 8), (2, 9, 3)]
        ),
    ),
    "out": Sizes(
        with_out, tuple((values(m, K), values(n, K)) for m, n in ((4, 6), (8, 5), (3, 2)))
    ),
    "gradients": Sizes(
        lambda a, b, w: kl.run_kernel(kl.laplace_l2(), a, b, bandwidth=w).square(),
        tuple((values(m, K), values(n, K), ONE) for m, n in ((4, 6), (8, 5), (3, 7))),
        THREE,
    ),
}

LEAF = A.clone().requires_grad_()
WRONG = {
    "features": Wrong(lambda a, b, w: laplace(a, b[:, 1:]), "same number of feat"),
    "dimensions": Wrong(lambda a, b, w: laplace(a[0], b), "a must be .* got shape"),
    "dtypes": Wrong(lambda a, b, w: laplace(a, b.double()), "must have one dtype"),
    "int": Wrong(lambda a, b, w: laplace(a.int(), b.int()), "a must be one of"),
    "batches": Wrong(
        lambda a, b, w: laplace(a.expand(L, M, K), b.expand(L - 1, N, K)), "a: 3, b: 2"
    ),
    "batch of p": Wrong(
        lambda a, b, w: kl.cdist(a.expand(L, M, K), b, SEVERAL[:2]), "batches must be 1 or equal"
    ),
    "matrix": Wrong(lambda a, b, w: laplace(a, b, a), "bandwidth must have shape"),
    "bool": Wrong(lambda a, b, w: laplace(a, b, w > 1), "bandwidth must be real"),
    "out": Wrong(
        lambda a, b, w: kl.cdist(a, b, out=torch.ones(N, M)), "out must have shape", recorded=False
    ),
    "out's dtype": Wrong(
        lambda a, b, w: kl.cdist(a, b, out=torch.ones(M, N).int()),
        "out must be torch.float32",
        recorded=False,
    ),
    "recorded out": Wrong(
        lambda a, b, w: laplace(LEAF, b, out=torch.empty(M, N)),
        said("a requires a gradient.* out"),
    ),
    "missing": Wrong(lambda a, b, w: kl.run_kernel(LAPLACE, a, b), "needs bandwidth"),
    "b missing": Wrong(lambda a, b, w: kl.run_kernel(LAPLACE, a, bandwidth=w), "b is missing"),
    "unknown": Wrong(lambda a, b, w: kl.run_kernel(LAPLACE, a, b, width=w), "width is no argument"),
    "negative": Wrong(lambda a, b, w: laplace(a, b, -2.0), "bandwidth .* than 0"),
}  # fmt: skip
NONSENSE = {
    "bandwidth": lambda a, b, w: laplace(a, b, "wide"),
    "descriptor": lambda a, b, w: kl.run_kernel("wide", a, b, bandwidth=2.0),
}


def writing(descriptor, accumulate=False, **numbers):
    def run(*tensors, out):
        *sides, width = tensors
        return kl.run_kernel(
            descriptor, *sides, out=out, accumulate=accumulate, bandwidth=width, **numbers
        )

    return run


NAMES = ("a", "b", "bandwidth", "out")
SHIFTED = {"regularization": 0.5, "row_offset": 1, "col_offset": 1}
OUTS = {
    "written": Out(
        writing(LAPLACE, regularization=1.0), (A, B, ONE), (M, N), names=NAMES,
        refusal="{name} requires a gradient", copied=False,
    ),
    "added to": Out(
        writing(LAPLACE, True, regularization=1.0), (A, B, ONE), (M, N), copied=False
    ),
    "half": Out(
        writing(LAPLACE), (A.half(), B.half(), ONE), (M, N), torch.half, copied=False
    ),
    "half into float": Out(
        writing(LAPLACE, True), (A.half(), B.half(), ONE), (M, N), copied=False
    ),
    "batches": Out(
        writing(PQ, True, p=1.3, q=0.8), (BATCH_A, B, SEVERAL), (L, M, N), copied=False
    ),
    "symmetric": Out(
        writing(SYMMETRIC, True, **SHIFTED), (A, ONE), (M, M), copied=False
    ),
}  # fmt: skip


class Kernel(torch.nn.Module):
    """Kernel matrix of the input and points of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("points", B.clone())
        self.register_buffer("width", ONE.clone())
        self.descriptor = CUSTOM

    def forward(self, x):
        kernel = laplace(x, self.points, self.width)
        kl.run_kernel(self.descriptor, x, self.points, out=kernel, accumulate=True, gain=2, shift=1)
        return kernel + kl.cdist(x, self.points, p=float("inf"))


class Trained(torch.nn.Module):
    """The same of points and a width that are parameters."""

    def __init__(self):
        super().__init__()
        self.points = torch.nn.Parameter(B.clone())
        self.width = torch.nn.Parameter(ONE.clone())

    def forward(self, x):
        return laplace(x, self.points, self.width) + kl.cdist(x, self.points)


def rows(count: int) -> torch.Tensor:
    return values(count, K, seed=3)


EXPORTED = {
    "buffers": Exported(Kernel, rows, ("pairwise", "pairwise_out"), (M, 2, 11), trains=False),
    "parameters": Exported(Trained, rows, ("pairwise",), (M, 2, 11)),
}

SHAPES = [
    ((M, K), (N, K)),
    ((L, M, K), (N, K)),
    ((1, M, K), (N, K)),
    ((1, M, K), (L, N, K)),
    ((L, M, K), (L, N, K)),
    ((0, K), (N, K)),
    ((0, M, K), (1, N, K)),
    ((M, 0), (N, 0)),
]


def into_new(a, b, width):
    batches = {len(t) for t in (a, b) if t.dim() == 3} | ({len(width)} if width.dim() else set())
    shape = (*((max(batches - {1}, default=1),) if batches else ()), a.shape[-2], b.shape[-2])
    return laplace(a, b, width, out=a.new_empty(shape))


FAKES = {
    f"{left} {right} {tuple(width.shape)}": Call(
        laplace, (torch.ones(left), torch.ones(right), width), THREE
    )
    for left, right in SHAPES
    for width in (torch.tensor(2.0), torch.tensor([2.0]), torch.ones(L))
    if left[0] or len(left) == 2 or len(width.shape) == 0 or len(width) < L
}
FAKES |= {f"{left} {right}": both(laplace, torch.ones(left), torch.ones(right))
          for left, right in SHAPES}  # fmt: skip
FAKES |= {
    f"{name} out": Call(into_new, call.operands)
    for name, call in FAKES.items()
    if call.places == THREE
}
FAKES |= {
    "half": Call(laplace, (BATCH_A.half(), B.half(), SEVERAL), THREE),
    "one of several": Call(laplace, (BATCH_A, B, SEVERAL), (0, 2)),
    "cdist": both(kl.cdist, BATCH_A, B),
    "symmetric": CALLS["symmetric"],
    "transposed": CALLS["transposed"],
}
WRONG_FAKES = {
    "features": (Call(laplace, (BATCH_A.half(), torch.ones(N, 1).half())), "same number of feat")
}


def with_an_out(a, b, width):
    out = torch.ones(a.shape[0], b.shape[0])
    laplace(a, b, width, out=out, accumulate=True)
    return laplace(a, b, width) + out + kl.cdist(a, b, 1.5)


SUMS = ("pairwise_sums",)
GRAPHS = {
    "out": Graph(Call(with_an_out, (A, B, ONE)), ("pairwise", "pairwise_out")),
    "gradients": Graph(
        GRADIENTS["gaussian"], ("pairwise",), SUMS, (*SUMS, "pairwise_gradient")
    ),
}  # fmt: skip

INSIDE_GRAD = r"kernlib\.pairwise\.default"
TRANSFORMS = {
    "run_kernel": Transform(
        Call(laplace, (A, B, ONE), THREE), THREE, None, None,
        r"a is inside a transform of torch\.func", INSIDE_GRAD,
    ),
    "cdist": Transform(
        both(kl.cdist), SIDES, None, None,
        r"x1 is inside a transform of torch\.func", INSIDE_GRAD,
    ),
}  # fmt: skip


def matrix(a, b, descriptor, names, numbers, tensors, places=()) -> dict[str, Check]:
    """Of a result that is new, and of one that is given."""
    rest = (descriptor.text, names, numbers, tensors, 1, 1, False)
    given = dict(zip(names.split(), numbers + tensors, strict=True))
    sides = [a] if b is None else [a, b]
    out = torch.zeros_like(kl.run_kernel(descriptor, *sides, **given))
    return {
        "": Check("pairwise", (a, b, *rest), places),
        " out": Check("pairwise_out", (a, b, out, False, *rest)),
        " added to": Check("pairwise_out", (a, b, out, True, *rest)),
    }


def sums(descriptor, p=None, scale=None, p_tensor=None, scale_tensor=None) -> dict[str, Check]:
    """Of the sums of a matrix, and of their gradients."""
    inner = (descriptor.text, p, scale, p_tensor, scale_tensor)
    batch = 1 if p_tensor is None else len(p_tensor)
    a, b, weights = values(batch, M, K), values(1, N, K), values(batch, M, N)
    return {
        " sums": Check("pairwise_sums", (a, b, *inner), (0, 1, 5, 6)),
        " gradients": Check("pairwise_gradient", (a, b, weights, True, *inner), (0, 1, 2, 7, 8)),
    }


def norms(p=None, p_tensor=None) -> dict[str, Check]:
    """The same of norms."""
    inner = (kl.power_sum().text, p, None, p_tensor, None)
    batch = 1 if p_tensor is None else len(p_tensor)
    a, b, weights = values(batch, M, K), values(1, N, K), values(batch, M, N)
    sides = (a, b, weights, kl.cdist(a, b, p if p_tensor is None else p_tensor), True, *inner)
    return {
        " norms": Check("pairwise_norms", (a, b, *inner), (0, 1, 5)),
        " gradients": Check("pairwise_norm_gradient", sides, (0, 1, 2, 3, 8)),
    }


MADE = {
    "plain": matrix(A, B, LAPLACE, "bandwidth", [2.0], [], SIDES),
    "mixed": matrix(BATCH_A, B, PQ, "p q bandwidth", [1.3, 0.8], [SEVERAL], (0, 1, 5)),
    "one side": matrix(A, None, SYMMETRIC, "bandwidth regularization", [2.0, 0.5], [], (0,)),
    "strided": matrix(A.T.contiguous().T, B.expand(L, N, K), kl.l1_distance(), "", [], [], SIDES),
    "squares": sums(kl.squared_distance()),
    "dot": sums(kl.dot_product()),
    "power": sums(kl.power_sum(), 1.5),
    "tensor p": sums(kl.power_sum(), p_tensor=torch.tensor([1.5, 2.5])),
    "norm": norms(1.5),
    "tensor p of norms": norms(p_tensor=torch.tensor([1.5, 2.5])),
    "exponential": sums(EXPONENTIAL, 2.5, scale_tensor=torch.tensor(-0.5)),
}


def numeric_sums(descriptor, *numbers) -> Numeric:
    def run(a, b):
        return torch.ops.kernlib.pairwise_sums(a, b, descriptor.text, *numbers, None, None)

    return Numeric(run, (values(1, 3, 2).double(), values(1, 2, 2, seed=7).double()))


QUIET = Quiet(
    "kl.cdist(torch.ones(2, 3), torch.ones(4, 3))",
    ("kernlib.families.pairwise.operators", "kernlib.descriptors.text"),
)
ROOT = (
    "outside of their mode torch.where makes a number a real tensor, which the gradient of a root "
    "gives beside fake ones"
)
OPERATIONS = (
    Operation(
        name="pairwise",
        operator="pairwise",
        typical=Call(lambda a, b, w: laplace(a, b, w), (A, B, ONE), THREE),
        text="epilogue=(Laplace(),)",
        dynamo_sees=True,
        near=Near(),
        calls=CALLS | {f"{name} inside": call for name, call in INSIDE.items()}
        | {f"{name} recorded": call for name, call in GRADIENTS.items()},
        inductor=("0-d", "symmetric", "gaussian recorded"),
        breaking=Call(custom_inside, (A, B)),
        changes=CHANGES,
        descriptors=DESCRIPTORS,
        sizes=SIZES,
        autocast=Autocast(Call(laplace, (A, B, ONE), THREE), torch.float32, (1e-5, 1e-6)),
        wrong=WRONG,
        nonsense=NONSENSE,
        outs=OUTS,
        exported=EXPORTED,
        fakes=FAKES,
        wrong_fakes=WRONG_FAKES,
        graphs=GRAPHS,
        transforms=TRANSFORMS,
        checks={f"{name}{end}": one for name, made in MADE.items() for end, one in made.items()},
        numeric={"power sums": numeric_sums(kl.power_sum(), 2.5, None)},
        quiet=QUIET,
        broken={
            "recorded outside cdist": ROOT,
            "AOTInductor buffers": "torch reads no infinite number in its own programs",
        },
    ),
)  # fmt: skip
