"""Layouts by rule, each against its definition, element by element or block by block."""

import pytest
import torch

from kernlib.families.blocksparse import builders
from kernlib.families.blocksparse.layout import Layout

BLOCKS = (16, (16, 32), (64, 16))


def pair(block):
    return block if isinstance(block, tuple) else (block, block)


def stored(elements: torch.Tensor, block) -> torch.Tensor:
    """The blocks with an element of a mask (R, C)."""
    height, width = pair(block)
    rows, cols = elements.shape
    return elements.view(rows // height, height, cols // width, width).transpose(1, 2).any(3).any(2)


def places(length):
    at = torch.arange(length)
    return at[:, None], at[None, :]


def test_dense():
    made = builders.dense(64, 96, (32, 16))
    assert made.grid == (2, 6) and made.heads is None and made.mask().all()
    made = builders.dense(64, 0, 32, heads=3)
    assert made.grid == (2, 0) and made.heads == 3 and made.nnz == 0


@pytest.mark.parametrize("block", BLOCKS)
def test_causal(block):
    row, col = places(192)
    made = builders.causal(192, block, heads=2)
    wanted = stored(col <= row, block)
    assert torch.equal(made.mask(), wanted.expand(2, *wanted.shape))


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("window", [0, 1, 17, (32, 0), (0, 5), (500, 31)])
def test_sliding_windows(block, window):
    row, col = places(192)
    left, right = pair(window)
    wanted = stored((col >= row - left) & (col <= row + right), block)
    assert torch.equal(builders.sliding_window(192, block, window).mask(), wanted)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("size", [None, 1, 24, 48, 100, 1000])
def test_squares_along_the_diagonal(block, size):
    row, col = places(192)
    found = builders.block_diagonal(192, block, size).mask()
    size = max(pair(block)) if size is None else size
    assert torch.equal(found, stored(row // size == col // size, block))


@pytest.mark.parametrize("density", [0, 0.02, 0.3, 1])
def test_random_ones_have_the_number_of_blocks(density):
    made = builders.random(320, 640, 32, density, heads=3, seed=5)
    assert made.mask().flatten(1).sum(1).tolist() == [round(density * 200)] * 3
    again = builders.random(320, 640, 32, density, heads=3, seed=5)
    assert torch.equal(made.mask(), again.mask())
    if density == 0.3:
        other = builders.random(320, 640, 32, density, heads=3, seed=6)
        assert not torch.equal(made.mask(), other.mask())
        first, second, _ = made.mask()
        assert not torch.equal(first, second)
        assert builders.random(320, 640, 32, density).heads is None


def fixed(n, s, attention, numverts, vertsize, head):
    """As it is defined, an entry at a time."""
    mask = torch.zeros(n, n, dtype=torch.bool)
    causal = attention == "unidirectional"
    for row in range(n):
        begin = row // s * s
        for col in range(begin, min(begin + s, n)):
            mask[row, col] = col <= row or not causal
        for start in range(s - (1 + head % numverts) * vertsize, n, s):
            if start < row or not causal:
                for col in range(start, min(start + vertsize, n)):
                    mask[row, col] |= col <= row or not causal
    return mask


@pytest.mark.parametrize("attention", builders.ATTENTIONS)
@pytest.mark.parametrize(
    ("n", "s", "numverts", "vertsize"),
    [(10, 4, 1, 1), (16, 4, 4, 1), (13, 8, 2, 4), (9, 3, 1, 3), (5, 8, 2, 2), (7, 1, 1, 1)],
)
def test_fixed(n, s, numverts, vertsize, attention):
    made = builders.fixed(n * 32, 32, s * 32, attention, numverts, vertsize, heads=5)
    for head, found in enumerate(made.mask()):
        assert torch.equal(found, fixed(n, s, attention, numverts, vertsize, head))
    one = builders.fixed(n * 32, 32, s * 32, attention, numverts, vertsize)
    assert one.heads is None and torch.equal(one.mask(), made.mask()[0])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 100}, "length must be a multiple of the block's 16, got 100; the next .* 112$"),
        ({"stride": 72}, "stride must be a multiple of the block's 16, got 72"),
        ({"stride": 0}, "stride must be 1 to"),
        ({"vertsize": 3}, "must be a multiple of vertsize = 3"),
        ({"numverts": 5}, "numverts must be at most 4"),
        ({"vertsize": 2, "numverts": 3}, "numverts must be at most 2"),
        ({"attention": "both"}, "attention must be 'unidirectional' or 'bidirectional'"),
        ({"heads": 0}, "heads must be 1 to"),
    ],
)
def test_what_fixed_refuses(options, said):
    with pytest.raises(ValueError, match=said):
        builders.fixed(**{"length": 256, **options})


def test_the_best_of_each_row():
    scores = torch.tensor([[3.0, 5.0, 5.0, 1.0, 5.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    found = builders.top_k(scores, 16, 2)
    assert found.mask().int().tolist() == [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert (found.capacity, found.nnz, found.heads) == (4, 4, None)
    scores = torch.stack((scores, torch.arange(10.0).view(2, 5)))
    found = builders.top_k(scores, (32, 16), 3)
    assert found.heads == 2 and found.capacity == 12 and found.shape == (64, 80)
    assert found.mask()[1].int().tolist() == [[0, 0, 1, 1, 1]] * 2
    assert builders.top_k(scores, 16, 0).nnz == 0
    assert builders.top_k([[1, 2], [2, 1]], 16, 1).mask().tolist() == [[False, True], [True, False]]
    infinite = torch.tensor([[-float("inf"), float("nan"), float("inf")]])
    for k, wanted in ((1, [False, True, False]), (3, [False, True, True])):
        found = builders.top_k(infinite, 16, k)  # -inf says that a block is not to be
        assert found.mask().tolist() == [wanted] and found.capacity == k


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: builders.top_k(torch.rand(2, 3), 16, 4), ValueError, "k must be at most the 3"),
        (lambda: builders.top_k(torch.rand(3), 16, 1), ValueError, "scores must have shape"),
        (lambda: builders.top_k(torch.rand(2, 3), 16, 1.0), TypeError, "k must be an int"),
        (lambda: builders.dense(64, 40, 16), ValueError, "cols must be a multiple"),
        (lambda: builders.dense(64, 48, 24), ValueError, "block must have rows and columns in"),
        (lambda: builders.causal(-16, 16), ValueError, "length must be 0 to"),
        (lambda: builders.causal(64, 16, heads=True), TypeError, "heads must be an int"),
        (lambda: builders.sliding_window(64, 16, -1), ValueError, "window must be 0 to"),
        (lambda: builders.block_diagonal(64, 16, 0), ValueError, "size must be 1 to"),
        (lambda: builders.random(64, 64, 16, 1.5), ValueError, "density must be 0 to 1"),
        (lambda: builders.causal(64, 16, device="gpu"), ValueError, "device must be one of"),
    ],
)
def test_what_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_where_they_lie():
    assert isinstance(builders.causal(64, 16), Layout)
    assert builders.causal(64, 16).device == torch.device("cpu")
    with torch.device("meta"):
        made = builders.random(64, 64, 16, 0.5, heads=2)
        assert made.device.type == "meta" and made.capacity == 16
        assert builders.fixed(64, device="cpu").nnz == 10
    assert builders.sliding_window(64, 16, 16, device="meta").capacity == 10
