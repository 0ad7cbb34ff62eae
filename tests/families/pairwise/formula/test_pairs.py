"""Ragged batches and blocks of pairs: every reduction beside the masked matrix."""

from __future__ import annotations

import pytest
import torch

import kernlib as kl

ROWS, COLS = torch.tensor([0, 5, 5, 17, 20]), torch.tensor([0, 10, 15, 15, 30])
OF_ROW, OF_COL = (torch.arange(4).repeat_interleave(s.diff()) for s in (ROWS, COLS))
BLOCKS = torch.tensor([[1, 0, 1, 1], [0, 1, 0, 1], [1, 1, 0, 0], [0, 1, 0, 1]]).bool()
FORMULA = kl.squared_distance(
    epilogue=kl.Custom(
        "exp(-v / (s * t)) * w + 0.01 * row", axes={"s": "row", "t": "col", "w": "col"}
    )
)
WAYS = {
    "all": (None, torch.ones(20, 30, dtype=torch.bool)),
    "splits": (kl.Pairs.from_splits(ROWS, COLS.tolist()), OF_ROW[:, None] == OF_COL),
    "batch": (kl.Pairs.from_batch(OF_ROW, OF_COL), OF_ROW[:, None] == OF_COL),
    "blocks": (kl.Pairs.from_blocks(BLOCKS, ROWS, COLS), BLOCKS[OF_ROW][:, OF_COL]),
}


def values() -> dict:
    generator = torch.Generator().manual_seed(0)

    def drawn(*size):
        return torch.rand(size, generator=generator, dtype=torch.float64).add(0.5).requires_grad_()

    shapes = {"a": (20, 3), "b": (30, 3), "s": (20,), "t": (30,), "w": (30,), "v": (30, 2)}
    return {name: drawn(*size) for name, size in shapes.items()}


def reductions(tensors: dict, pairs) -> dict:
    named = {name: t for name, t in tensors.items() if name != "v"} | {"pairs": pairs}
    v = tensors["v"]
    return {
        "matmul": kl.kernel_matmul(FORMULA, v=v, **named),
        "sum": kl.kernel_sum(FORMULA, **named),
        "mean": kl.kernel_mean(FORMULA, v=v, **named),
        "logsumexp": kl.kernel_logsumexp(FORMULA, **named),
        "softmax": kl.kernel_softmax_matmul(FORMULA, v=v, **named),
        "min": kl.kernel_min(FORMULA, **named)[0],
    }


def expected(tensors: dict, inside: torch.Tensor) -> dict:
    named = {name: t for name, t in tensors.items() if name != "v"}
    matrix, v = kl.run_kernel(FORMULA, **named), tensors["v"]
    # Rows without columns are looked at elsewhere: torch's gradients of theirs are NaN.
    out = matrix.masked_fill(~inside & inside.any(1, keepdim=True), -torch.inf)
    return {
        "matmul": (matrix * inside) @ v,
        "sum": (matrix * inside).sum(1),
        "mean": (matrix * inside) @ v / inside.sum(1, keepdim=True).clamp(min=1),
        "logsumexp": out.logsumexp(1),
        "softmax": out.softmax(1) @ v,
        "min": matrix.masked_fill(~inside, torch.inf).amin(1),
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(4)
def test_values_and_gradients(way):
    pairs, inside = WAYS[way]
    has_any = inside.any(1)
    tensors = values()
    for (name, result), exact in zip(
        reductions(tensors, pairs).items(), expected(tensors, inside).values(), strict=True
    ):
        torch.testing.assert_close(result[has_any], exact[has_any])
        losses = [(x[has_any].sin() * 3).sum() for x in (result, exact)]
        grads = [
            torch.autograd.grad(x, [*tensors.values()], allow_unused=True, retain_graph=True)
            for x in losses
        ]
        for x, y in zip(*grads, strict=True):
            assert (x is None) == (y is None), name
            if x is not None:
                torch.testing.assert_close(x, y)


def test_rows_without_columns():
    tensors = values()
    pairs, inside = WAYS["splits"]
    alone = ~inside.any(1)
    results = reductions(tensors, pairs)
    assert alone.any() and not results["sum"][alone].any() and not results["softmax"][alone].any()
    assert (results["logsumexp"][alone] == -torch.inf).all() and results["mean"][
        alone
    ].isnan().all()
    assert (results["min"][alone] == torch.inf).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.few(4)
def test_nearest_counts_and_neighbors(way):
    pairs, inside = WAYS[way]
    named = {name: t for name, t in values().items() if name != "v"}
    matrix = kl.run_kernel(FORMULA, **named).detach()
    masked = matrix.masked_fill(~inside, torch.inf)
    entries, places = kl.kernel_topk(FORMULA, k=12, pairs=pairs, **named)
    exact = masked.topk(12, largest=False)
    torch.testing.assert_close(entries, exact.values)
    assert torch.equal(places, exact.indices.where(exact.values.isfinite(), -1))
    counts = kl.kernel_count(FORMULA, threshold=0.4, pairs=pairs, **named)
    assert torch.equal(counts, (masked <= 0.4).sum(1))
    splits, columns, scores = kl.kernel_neighbors(FORMULA, threshold=0.4, pairs=pairs, **named)
    row, col = (masked <= 0.4).nonzero(as_tuple=True)
    assert torch.equal(splits.diff(), counts) and torch.equal(columns, col)
    torch.testing.assert_close(scores, matrix[row, col])
    assert scores.requires_grad


def test_second_gradients():
    pairs = WAYS["blocks"][0]
    tensors = list(values().values())

    def call(*tensors):
        named = dict(zip(("a", "b", "s", "t", "w"), tensors, strict=False))
        return kl.kernel_softmax_matmul(FORMULA, v=tensors[-1], pairs=pairs, **named)

    torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


def test_descriptors_and_potentials():
    x, y, v = (torch.randn(n, 3) for n in (20, 30, 30))
    pairs, inside = WAYS["splits"]
    matrix = kl.run_kernel(kl.gaussian(), x, y, bandwidth=2.0)
    result = kl.kernel_matmul(kl.gaussian(), x, y, v, bandwidth=2.0, pairs=pairs)
    torch.testing.assert_close(result, (matrix * inside) @ v)
    logs = kl.kernel_logsumexp(
        kl.gaussian(), x, y, bandwidth=2.0, pairs=pairs, col_potential=v[:, 0]
    )
    exact = (matrix + v[:, 0]).masked_fill(~inside, -torch.inf).logsumexp(1)
    torch.testing.assert_close(logs, exact)


WRONG = {
    "must begin at 0": lambda: kl.Pairs.from_splits([1, 2], [0, 2]),
    "must not decrease, got 3 before 2": lambda: kl.Pairs.from_splits([0, 3, 2], [0, 1, 2]),
    "sort the points by batch": lambda: kl.Pairs.from_batch(torch.tensor([1, 0]), OF_COL),
    "of 1 batches and col_splits of 2": lambda: kl.Pairs.from_splits([0, 2], [0, 1, 2]),
    "row_splits must be whole numbers": lambda: kl.Pairs.from_splits(torch.rand(3), [0, 1, 2]),
    "mask must be a tensor of bools": lambda: kl.Pairs.from_blocks(torch.eye(2), [0, 1], [0, 1]),
    r"mask must be \(1, 1\)": lambda: kl.Pairs.from_blocks(BLOCKS, [0, 1], [0, 1]),
    "pairs must be a kl.Pairs": lambda: kl.kernel_sum(kl.l1_distance(), OF, OF, pairs=[0, 2]),
    "pairs are of 20 rows": lambda: kl.kernel_sum(
        kl.l1_distance(), OF, OF, pairs=WAYS["splits"][0]
    ),
    "pairs are batches already": lambda: kl.kernel_sum(
        kl.l1_distance(), torch.rand(2, 20, 1), torch.rand(30, 1), pairs=WAYS["splits"][0]
    ),
    "row_offset and col_offset": lambda: kl.kernel_sum(
        kl.gaussian(), OF, OF, bandwidth=1.0, row_offset=1, pairs=WAYS["splits"][0]
    ),
}
OF = torch.rand(4, 2)


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.few(99)
def test_what_is_wrong_is_said(text):
    with pytest.raises((TypeError, ValueError), match=text):
        WRONG[text]()
