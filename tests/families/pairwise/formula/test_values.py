"""Formulas beside plain torch in float64."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.formula import operation, reference
from kernlib.families.pairwise.reductions import blocks
from tests.families.pairwise.formula import plain

X, Y = ("row", "feature"), ("col", "feature")
XY = {"x": X, "y": Y}
UW = {"u": X, "w": Y}  # of another number of features
S, T, P = {"s": "row"}, {"t": "col"}, {"p": ("row", "col")}
G, C = {"g": "feature"}, {"c": ()}
I, Q = {"i": "row", "i2": "col"}, {"q": "row", "q2": "col"}

FORMULAS = {
    "exp(-sum((x - y) ** 2))": XY,
    "sum(x * y)": XY,
    "sum(y * x)": XY,
    "exp(-sum((x - y) ** 2) / (s * t))": XY | S | T,
    "sum((x - y) ** 2) + sum(u * w)": XY | UW,
    "exp(-sum((x - y) ** 2) / c) * (1 + sum(u * w)) ** 2": XY | UW | C,
    "sum(abs(x - y), 0, 2) * sum(x * y, 1, 3) + sum(x + y)": XY,
    "exp(-sum(g * (x - y) ** 2))": XY | G,
    "sum(g) * s + t": G | S | T,
    "sum(x) * t": {"x": X} | T,
    "s * t + p": S | T | P,
    "p * 2 - s": P | S,
    "sum(p * x * y)": XY | P,
    "sum((s * x - t * y + c) ** 2)": XY | S | T | C,
    "where(s < t, s, t) * p": S | T | P,
    "sum(where(x < y, x, y * y))": XY,
    "where((i == i2) | (row == col), sum(x * y), 0)": XY | I,
    "where(i != i2, 1, 2) * i * i2 + s": I | S,
    "(i // 3 - i2 % 3) * s": I | S,
    "where(q & ~q2, s, -t)": Q | S | T,
    "where(q == q2, 1, 0) + 0 * s": Q | S,
    "exp(-abs(row - col) / c) * s * t": S | T | C,
    "where(row >= col, s * t, 0)": S | T,
    "sum(sin(x * pi) * cos(y) + tanh(x - y))": XY,
    "erf(s) * ndtr(t) + log1p(s * t) + expm1(-s)": S | T,
    "max(s, t) - min(s, p) + clamp(t, 0.7, 1.2)": S | T | P,
    "sign(s - t) * floor(3 * s) + pow(s, t)": S | T,
    "sqrt(sum((x - y) ** 2)) ** 3": XY,
    "sum(x * x * y) / sqrt(sum(x * x) * sum(y * y))": XY,
    "1e-3 + sum(x * y) ** 2 - sum(x * y) ** 2 + sum(x * y)": XY,
    "log(sum(exp(x * y)))": XY,
    "sum(x * y * g, 1, 3) + sum(g, 0, 1)": XY | G,
    "sum((x - y) ** 2) * 1e30 * 1e-30": XY,
}


def check(formula, values, rtol=1e-10):
    """All reductions of a formula beside those of its matrix."""
    exact = plain.matrix(formula, values)
    batched = any(
        isinstance(t, torch.Tensor) and t.dim() > len(dict(formula.axes)[name])
        for name, t in values.items()
    )

    def same(result, expected):
        expected = expected if batched else expected[0]
        assert result.shape == expected.shape
        torch.testing.assert_close(result.double(), expected, rtol=rtol, atol=rtol)

    same(kl.run_kernel(formula, **values), exact)
    cols = exact.shape[-1]
    generator = torch.Generator().manual_seed(1)
    dtype = kl.run_kernel(formula, **values).dtype
    v = torch.randn(cols, 2, generator=generator, dtype=torch.float64).to(dtype)
    same(kl.kernel_matmul(formula, v=v, **values), exact @ v.double())
    same(kl.kernel_matmul(formula, v=v[:, 0], **values), exact @ v[:, 0].double())
    same(kl.kernel_sum(formula, **values), exact.sum(2))
    same(kl.kernel_logsumexp(formula, **values), exact.logsumexp(2))
    if not cols:
        return
    entries, places = kl.kernel_min(formula, **values)
    same(entries, exact.amin(2))
    assert torch.equal(places, kl.kernel_argmin(formula, **values))
    same(exact.reshape(-1, *exact.shape[-2:]).gather(2, places.reshape(-1, exact.shape[1], 1))
         [..., 0], exact.amin(2)) if batched else None  # fmt: skip
    for largest in (False, True):
        entries, places = kl.kernel_topk(formula, k=min(3, cols), largest=largest, **values)
        same(entries, exact.topk(min(3, cols), 2, largest=largest)[0])


@pytest.mark.few(60)
@pytest.mark.parametrize("text", FORMULAS)
def test_a_formula_is_its_text(text):
    formula = kl.Formula(text, FORMULAS[text])
    check(formula, plain.drawn(FORMULAS[text]))


BATCHES = [
    ("exp(-sum((x - y) ** 2) / s) * t", XY | S | T, ("x",)),
    ("exp(-sum((x - y) ** 2) / s) * t", XY | S | T, ("t", "s")),
    ("sum(g * x * y) + p * c", XY | G | P | C, ("g", "c")),
    ("sum(g * x * y) + p * c", XY | G | P | C, ("p",)),
    ("sum(g * x * y) + p * c", XY | G | P | C, ("x", "y", "g", "p", "c")),
]


@pytest.mark.parametrize("text, axes, batch", BATCHES)
def test_batches_broadcast(text, axes, batch):
    formula, values = kl.Formula(text, axes), plain.drawn(axes, batch=batch)
    check(formula, values)
    if "x" in values and "x" not in batch:
        check(formula, values | {"x": values["x"][None]})  # a batch of 1


def test_axes_are_of_any_order_and_strides():
    axes = {"x": ("feature", "row"), "y": ("feature", "col"), "p": ("col", "row"), "s": "row"}
    formula = kl.Formula("sum((x - y) ** 2) * p / s", axes)
    check(formula, plain.drawn(axes))
    check(formula, plain.drawn(axes, batch=("x", "p")))
    wide = {name: t.repeat_interleave(2, -1)[..., ::2] for name, t in plain.drawn(axes).items()}
    check(formula, wide | {"s": wide["s"][:1].expand(plain.M)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype):
    axes = XY | S | T
    formula = kl.Formula("exp(-sum((x - y) ** 2) / s) * t", axes)
    values = plain.drawn(axes, dtype=dtype)
    result = kl.run_kernel(formula, **values)
    assert result.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        result.double(), plain.matrix(formula, values)[0], rtol=4 * eps, atol=4 * eps
    )
    mixed = values | {"t": values["t"].double()}
    assert kl.run_kernel(formula, **mixed).dtype == torch.float64
    check(formula, mixed)


@pytest.mark.parametrize("rows, cols, features", [(1, 1, 1), (0, 7, 3), (5, 0, 3), (5, 7, 0),
                                                  (0, 0, 0), (1, 7, 3), (5, 1, 3)])  # fmt: skip
def test_sizes_of_one_and_none(rows, cols, features):
    formula = kl.Formula("exp(-sum((x - y) ** 2)) * s + t", XY | S | T)
    one = dict(dtype=torch.float64)
    values = {"x": torch.rand(rows, features, **one), "y": torch.rand(cols, features, **one),
              "s": torch.rand(rows, **one), "t": torch.rand(cols, **one)}  # fmt: skip
    check(formula, values)
    for t in values.values():
        t.requires_grad_()
    kl.kernel_sum(formula, **values).sum().backward()
    assert all(t.grad.shape == t.shape for t in values.values())
    if not cols:
        with pytest.raises(ValueError, match="at least one column"):
            kl.kernel_min(formula, **values)


def test_numbers_of_the_host_and_of_the_device():
    axes = XY | {"c": (), "d": ()}
    formula = kl.Formula("exp(-sum((x - y) ** 2) / c) + d", axes)
    values = plain.drawn(XY)
    exact = (-(values["x"][:, None] - values["y"]).square().sum(-1) / 2).exp() + 3
    import numpy as np

    for c in (2, 2.0, np.float32(2), np.int64(2), torch.tensor(2), torch.tensor(2.0)):
        for d in (3, np.float64(3), torch.tensor(3, dtype=torch.int32)):
            torch.testing.assert_close(kl.run_kernel(formula, **values, c=c, d=d), exact)


def test_sums_of_some_features_read_tensors_of_different_widths():
    formula = kl.Formula("sum(x * y, 0, 2) + sum(y, 3, 5)", XY)
    x, y = torch.rand(3, 2), torch.rand(4, 5)
    torch.testing.assert_close(kl.run_kernel(formula, x=x, y=y), x @ y[:, :2].T + y[:, 3:].sum(1))


def test_out_is_written_and_checked():
    formula = kl.Formula("s * t", S | T)
    s, t = torch.rand(3), torch.rand(4)
    out = torch.empty(4, 3).T
    assert kl.run_kernel(formula, s=s, t=t, out=out) is out
    torch.testing.assert_close(out, s[:, None] * t)
    product = torch.empty(3)
    assert kl.kernel_matmul(formula, s=s, t=t, v=t, out=product) is product
    torch.testing.assert_close(product, s * (t @ t))
    with pytest.raises(ValueError, match="out"):
        kl.run_kernel(formula, s=s, t=t, out=torch.empty(3, 3))
    with pytest.raises((ValueError, TypeError), match="out"):
        kl.run_kernel(formula, s=s, t=t, out=torch.empty(3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="out"):
        kl.kernel_matmul(formula, s=s, t=t, v=t, out=s)


def test_ties_and_nan_of_the_smallest():
    formula = kl.Formula("0 * s + t", S | T)
    t = torch.tensor([2.0, 1.0, 1.0, 3.0])
    assert kl.kernel_argmin(formula, s=torch.zeros(2), t=t).tolist() == [1, 1]
    assert kl.kernel_topk(formula, s=torch.zeros(1), t=t, k=3)[1].tolist() == [[1, 2, 0]]
    t = torch.tensor([2.0, torch.nan, 1.0, torch.nan])
    entry, place = kl.kernel_min(formula, s=torch.zeros(1), t=t)
    assert entry.isnan().all() and place.tolist() == [1]


def test_where_keeps_nan_out():
    formula = kl.Formula("where(s > 0, log(s * t), 0)", S | T)
    s = torch.tensor([-1.0, 2.0], requires_grad=True)
    t = torch.tensor([1.0, 3.0], requires_grad=True)
    kl.kernel_sum(formula, s=s, t=t).sum().backward()
    torch.testing.assert_close(s.grad, torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(t.grad, torch.tensor([1.0, 1 / 3]))


def test_a_log_of_no_exponentials_has_no_gradient_of_nan():
    formula = kl.Formula("where(q, s * t, -inf)", S | T | {"q": "row"})
    s = torch.tensor([1.0, 2.0], requires_grad=True)
    values = {"s": s, "t": torch.ones(3), "q": torch.tensor([True, False])}
    result = kl.kernel_logsumexp(formula, **values)
    assert result[1] == -torch.inf
    result[0].backward()
    torch.testing.assert_close(s.grad, torch.tensor([1.0, 0.0]))


def test_great_whole_numbers_are_exact():
    formula = kl.Formula("where(i == i2 + 1, 1, 0) + 0 * s", I | S)
    big = 2**60
    values = {"i": torch.tensor([big, big + 1]), "i2": torch.tensor([big]), "s": torch.zeros(2)}
    assert kl.run_kernel(formula, **values).tolist() == [[0], [1]]


def test_blocks_of_rows_know_their_places(monkeypatch):
    axes = XY | S | P | C
    formula = kl.Formula("where(row < col, sum(x * y) / s, p * c + row)", axes)
    monkeypatch.setattr(reference, "BLOCK", 50)
    monkeypatch.setattr(blocks, "entries_of", lambda *_: 2 * plain.N)
    check(formula, plain.drawn(axes))
    check(formula, plain.drawn(axes, batch=("x", "p")))


def test_ranges_are_columns_of_each_row():
    axes = XY | T
    formula, values = kl.Formula("sum((x - y) ** 2) * t + col", axes), plain.drawn(axes)
    matrix = plain.matrix(formula, values)[0]
    ranges = torch.tensor([[0, 3], [0, 3], [2, 7], [4, 4], [6, 7]])
    of_columns = torch.tensor([[0, 2], [0, 2], [0, 3], [2, 3], [2, 3], [2, 3], [2, 5]])
    cols = torch.arange(plain.N)
    inside = (cols >= ranges[:, :1]) & (cols < ranges[:, 1:])
    pairs = kl.Pairs(ranges[None], of_columns[None])
    result = operation.total(formula, values, pairs=pairs)
    torch.testing.assert_close(result, (matrix * inside).sum(1))
    result = operation.logsumexp(formula, values, pairs=pairs)
    torch.testing.assert_close(result, matrix.masked_fill(~inside, -torch.inf).logsumexp(1))
