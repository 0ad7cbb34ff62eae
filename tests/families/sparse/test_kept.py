"""What is kept of products on a CPU: the matrix laid out, until the compressed one is written or
goes."""

import gc
import weakref

import pytest
import torch

import kernlib as kl
from kernlib.families.sparse import kept
from kernlib.families.sparse.kept import laid_out
from kernlib.families.sparse.matrix import compress
from kernlib.sparse import matmul


def matrix(rows=9, cols=40, dtype=torch.float32, format="bitmap"):
    dense = torch.randn(rows, cols) * (torch.rand(rows, cols) < 0.3)
    return dense.to(dtype), compress(dense.to(dtype), format)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16), ids=str)
@pytest.mark.parametrize("format", ("bitmap", "u8", "dense"))
def test_it_is_laid_out_once_in_the_dtype_of_the_sums(format, dtype, seed):
    dense, w = matrix(dtype=dtype, format=format)
    first = laid_out(w)
    assert first.dtype == torch.float32 and torch.equal(first, dense.float())
    assert laid_out(w) is first
    x = torch.randn(3, 40).to(dtype)
    wanted = (x.double() @ dense.double().T).to(dtype)
    for _ in range(2):
        torch.testing.assert_close(matmul(w, x), wanted, rtol=1e-2, atol=1e-2)


def test_a_write_lays_it_out_anew(seed):
    dense, w = matrix()
    x = torch.randn(3, 40)
    before = matmul(w, x)
    for mine, other in zip(w.operands, compress(2 * dense, "bitmap").operands, strict=True):
        mine.copy_(other)
    torch.testing.assert_close(matmul(w, x), 2 * before)
    torch.testing.assert_close(matmul(w, x), 2 * x @ dense.T)


def test_it_ends_with_its_matrix(seed):
    _, w = matrix()
    dense = weakref.ref(laid_out(w))
    del w
    gc.collect()
    assert dense() is None


def test_no_more_than_the_budget_is_kept(monkeypatch, seed):
    monkeypatch.setattr(kept, "MOST_BYTES", 3 * 9 * 40 * 4)
    made = [matrix()[1] for _ in range(4)]
    first = [laid_out(w) for w in made]
    again = [laid_out(w) for w in reversed(made)]
    assert [new is old for new, old in zip(again, reversed(first), strict=True)][:3] == [True] * 3
    assert laid_out(made[0]) is again[-1] and torch.equal(again[-1], first[0])
    _, large = matrix(40, 40)
    assert laid_out(large) is not laid_out(large)


def test_tensors_of_inference_mode_are_laid_out_each_time(seed):
    with torch.inference_mode():
        dense, w = matrix()
        assert laid_out(w) is not laid_out(w) and torch.equal(laid_out(w), dense)
    _, w = matrix()
    with torch.inference_mode():
        known = laid_out(w)
    assert laid_out(w) is known and not known.is_inference()


def test_gradients_and_transforms_take_what_was_laid_out(seed):
    dense, w = matrix()
    x = torch.randn(5, 40, requires_grad=True)
    for _ in range(2):
        found = torch.autograd.grad(matmul(w, x).square().sum(), x)[0]
        torch.testing.assert_close(found, 2 * (x @ dense.T) @ dense)
    mapped = torch.vmap(lambda one: matmul(w, one))(x.detach())
    torch.testing.assert_close(mapped, x.detach() @ dense.T)
    _, fresh = matrix()
    _, tangent = torch.func.jvp(lambda y: matmul(fresh, y), (x.detach(),), (x.detach(),))
    torch.testing.assert_close(tangent, x.detach() @ fresh.to_dense().T)
    torch.testing.assert_close(kl.sparse.matmul(fresh, x), x @ fresh.to_dense().T)
