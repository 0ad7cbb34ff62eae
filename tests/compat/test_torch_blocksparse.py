"""Torch-Blocksparse's products and softmax under their names, by dense matrices, and what its names
refuse."""

from __future__ import annotations

import inspect

import pytest
import torch

from kernlib.compat import torch_blocksparse as compat
from tests.compat.blocksparse_cases import DOUBLE, HALF, blocks_of, close, masked, random_layout


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


class Problem:
    """Operands of a product, and its result and gradients by dense matrices."""

    def __init__(self, mode, trans_a, trans_b, block, dtype, layout=None, sizes=None, **shape):
        z, h = shape.get("z", 3), shape.get("h", 2)
        m, n, k = sizes or (256, 512, 384)
        a = (k, m) if trans_a else (m, k)
        b = (n, k) if trans_b else (k, n)
        rows, cols = {"sdd": (m, n), "dsd": a, "dds": b}[mode]
        if layout is None:
            layout = random_layout(h, rows // block, cols // block)
        self.mode, self.trans, self.block, self.layout = mode, (trans_a, trans_b), block, layout
        self.a, self.b = (torch.rand(z, h, *shape, dtype=dtype) for shape in (a, b))
        self.grad = torch.rand(z, h, m, n, dtype=dtype)

    def sparse(self, letter: int, t: torch.Tensor) -> torch.Tensor:
        return blocks_of(t, self.layout, self.block) if self.mode[letter] == "s" else t

    def mask(self, letter: int, t: torch.Tensor) -> torch.Tensor:
        return masked(t, self.layout, self.block) if self.mode[letter] == "s" else t

    def wanted(self) -> list[torch.Tensor]:
        """Result and gradients, sums in float32 at least."""
        wide = torch.promote_types(self.a.dtype, torch.float32)
        a, b = (t.to(wide, copy=True).requires_grad_() for t in (self.a, self.b))
        left, right = self.mask(1, a), self.mask(2, b)
        left, right = (
            t.mT if turn else t for t, turn in zip((left, right), self.trans, strict=True)
        )
        y = self.sparse(0, left @ right)
        to_a, to_b = torch.autograd.grad(y, (a, b), self.sparse(0, self.grad).to(wide))
        found = y, self.sparse(1, to_a), self.sparse(2, to_b)
        return [t.detach().to(self.a.dtype) for t in found]

    def found(self) -> list[torch.Tensor]:
        op = compat.MatMul(self.layout, self.block, self.mode, *self.trans)
        a, b = self.sparse(1, self.a).requires_grad_(), self.sparse(2, self.b).requires_grad_()
        y = op(a, b)
        return [y.detach(), *torch.autograd.grad(y, (a, b), self.sparse(0, self.grad))]

    def check(self) -> None:
        for found, wanted in zip(self.found(), self.wanted(), strict=True):
            close(found, wanted)


TRANSPOSED = [(m, a, b, 32) for m in ("sdd", "dsd", "dds") for a in (0, 1) for b in (0, 1)]
SIZES = [(m, 0, 0, block) for m in ("sdd", "dsd", "dds") for block in (16, 32, 64, 128)]


@pytest.mark.parametrize("case", TRANSPOSED + SIZES, ids=str)
def test_matmul(case):
    mode, trans_a, trans_b, block = case
    Problem(mode, bool(trans_a), bool(trans_b), block, HALF).check()


@pytest.mark.parametrize("width", (256, 576))
@pytest.mark.parametrize("dtype", (HALF, torch.float32), ids=str)
def test_softmax(dtype, width):
    layout, block, scale = random_layout(4, 8, width // 16, 0.6), 16, 0.4
    layout[:, :, 0] = 1
    x, grad = (torch.rand(2, 4, 128, width, dtype=dtype) for _ in range(2))
    key = torch.zeros(2, width, dtype=dtype)
    key[:, torch.rand(width) > 0.5] = -torch.inf
    key[:, 0] = 0
    attn = (torch.rand(128, width) > 0.5).to(dtype)
    attn[:, 0] = 1
    wide = x.to(torch.float32, copy=True).requires_grad_()
    logits = masked(wide, layout, block, -torch.inf).masked_fill(attn == 0, -torch.inf)
    y = torch.softmax(logits * scale + key[:, None, None].float(), -1)
    (to_x,) = torch.autograd.grad(y, wide, masked(grad.float(), layout, block))
    values = blocks_of(x, layout, block).requires_grad_()
    op = compat.Softmax(layout, block)
    found = op(
        values, scale=scale, key_padding_mask=key, key_padding_mask_mode="add", attn_mask=attn,
        attn_mask_mode="mul",
    )  # fmt: skip
    found.backward(blocks_of(grad, layout, block))
    close(found.detach(), blocks_of(y.detach(), layout, block).to(dtype))
    close(values.grad, blocks_of(to_x, layout, block).to(dtype))


@pytest.mark.parametrize("mode", ("sdd", "dsd", "dds"))
def test_rows_of_few_blocks(mode):
    layout = torch.zeros(1, 4, 4, dtype=torch.long)
    for row, size in enumerate((3, 2, 0, 1)):
        layout[0, row, :size] = 1
    problem = Problem(mode, False, False, 16, HALF, layout, (64, 64, 64), h=1)
    problem.check()
    first = problem.found()
    for _ in range(3):
        assert all(map(torch.equal, first, problem.found()))


@pytest.mark.parametrize("mode", ("sdd", "dsd", "dds"))
@pytest.mark.parametrize("empty", ("a head", "all"))
def test_heads_and_layouts_without_blocks(mode, empty):
    layout = random_layout(2, 4, 4)
    layout[1 if empty == "a head" else slice(None)] = 0
    problem = Problem(mode, False, False, 16, DOUBLE, layout, (64, 64, 64))
    problem.check()
    y, *_ = problem.found()
    if mode != "sdd":
        assert y.shape == (3, 2, 64, 64) and not y[:, 1].any()
    else:
        assert y.shape == (3, int(layout.sum()), 16, 16)
    x = blocks_of(torch.rand(3, 2, 64, 64), layout, 16)
    assert compat.Softmax(layout, 16)(x).shape == x.shape


@pytest.mark.parametrize("size", (16, 32, 48, 80, 96, 7))
def test_any_size_to_sum_over(size):
    for trans in ((False, False), (True, False), (False, True)):
        Problem("sdd", *trans, 16, HALF, sizes=(32, 48, size), z=1).check()


@pytest.mark.parametrize("mode", ("sdd", "dsd", "dds"))
def test_a_gradient_of_one_operand(mode):
    problem = Problem(mode, False, True, 16, DOUBLE, sizes=(32, 48, 64))
    _, *wanted = problem.wanted()
    op = compat.MatMul(problem.layout, 16, mode, False, True)
    for index in (0, 1):
        given = [problem.sparse(1, problem.a).clone(), problem.sparse(2, problem.b).clone()]
        given[index] = given[index].requires_grad_()
        op(*given).backward(problem.sparse(0, problem.grad))
        close(given[index].grad, wanted[index])
        assert given[1 - index].grad is None


@pytest.mark.parametrize("mode", ("sdd", "dsd", "dds"))
def test_shapes_are_checked_and_strides_are_free(mode):
    problem = Problem(mode, False, False, 16, DOUBLE, sizes=(32, 48, 64))
    wanted = problem.wanted()[0]
    op = compat.MatMul(problem.layout, 16, mode)
    given = [problem.sparse(1, problem.a), problem.sparse(2, problem.b)]
    odd = []
    for t in given:
        room = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 3), torch.nan, dtype=t.dtype)
        odd.append(room[..., 3::2].copy_(t))
    close(op(*odd), wanted)
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in given]
    close(op(*turned), wanted)
    for index in (0, 1):
        wrong = list(given)
        wrong[index] = wrong[index][..., :-1, :-1]
        with pytest.raises(ValueError, match=r"\b(a|b|values)\b .*"):
            op(*wrong)


def test_softmax_leaves_its_operands_alone():
    layout = random_layout(2, 4, 4)
    op = compat.Softmax(layout, 16)
    x = torch.rand(2, int(layout.sum()), 16, 16, requires_grad=True)
    before, grad = x.detach().clone(), torch.rand_like(x)
    y, kept = op(x, 0.5), grad.clone()
    y.backward(grad)
    assert torch.equal(x, before) and torch.equal(grad, kept)
    with torch.no_grad():
        other = before.clone()
        assert op(other, 0.5, inplace=True) is other and torch.equal(other, y)
    recorded = x * 1
    found = op(recorded, 0.5, inplace=True)
    assert found is recorded and torch.equal(found, y)
    assert torch.equal(*torch.autograd.grad(found, x, grad), x.grad)
    trained = torch.tensor(0.5, requires_grad=True)
    both = [op(x * 1, trained, inplace=inplace) for inplace in (False, True)]
    assert len({torch.autograd.grad(y, trained, grad)[0].item() for y in both}) == 1


@pytest.mark.parametrize("mode", ("dsd", "dds"))
def test_values_without_a_batch_stand_for_all(mode):
    problem = Problem(mode, False, False, 16, DOUBLE, sizes=(32, 48, 64))
    letter = mode.index("s")
    given = [problem.sparse(1, problem.a), problem.sparse(2, problem.b)]
    shared = given[letter - 1][0].clone().requires_grad_()
    repeated = shared.detach().expand(3, *shared.shape).clone().requires_grad_()
    op = compat.MatMul(problem.layout, 16, mode)
    results = []
    for values in (shared, repeated):
        operands = list(given)
        operands[letter - 1] = values
        results.append(op(*operands))
        results[-1].backward(problem.grad)
    close(*(y.detach() for y in results))
    close(shared.grad, repeated.grad.sum(0))


def test_names_and_order_of_arguments():
    signatures = {
        "MatMul": ["layout", "block", "mode", "trans_a", "trans_b", "bench"],
        "Softmax": ["layout", "block", "bench"],
        "MultiheadAttention": [
            "embed_dim", "num_heads", "sparsity", "dropout", "bias", "add_bias_kv",
            "add_zero_attn", "kdim", "vdim", "key_padding_mask_mode", "attn_mask_mode",
        ],
        "SparsityInfo": ["mode", "block", "stride", "unidirectional", "numverts", "vertsize"],
        "Conv2d": [
            "in_channels", "out_channels", "kernel_size", "layout", "block", "padding", "stride",
            "order", "bias",
        ],
        "Permute": ["in_order", "out_order"],
        "ReLU": [],
        "make_layout": [
            "num_heads", "num_blocks", "mode", "block_stride", "unidirectional", "numverts",
            "vertsize",
        ],
        "replace_mha": ["model", "info"],
    }  # fmt: skip
    for name, wanted in signatures.items():
        found = inspect.signature(getattr(compat, name)).parameters
        assert [n for n in found if n not in ("args", "kwargs")] == wanted, name
    linear = list(inspect.signature(compat.Linear).parameters)
    assert linear[:5] == ["in_features", "out_features", "block", "layout", "bench"]
    call = list(inspect.signature(compat.Softmax.__call__).parameters)
    assert call[1:] == [
        "x", "scale", "rpe", "key_padding_mask", "attn_mask", "key_padding_mask_mode",
        "attn_mask_mode", "is_causal", "inplace",
    ]  # fmt: skip
    assert sorted(compat.__all__) == dir(compat)
    with pytest.raises(AttributeError, match="no attribute 'BatchNorm2d'"):
        _ = compat.BatchNorm2d


def test_missing_axes_are_added_and_out_is_written():
    layout = random_layout(1, 2, 3)
    op = compat.MatMul(layout, 16, "sdd")
    a, b = torch.rand(32, 20), torch.rand(20, 48)
    y = op(a, b)
    assert y.shape == (1, int(layout.sum()), 16, 16) and op.spdims == layout.shape
    out = torch.empty_like(y)
    assert op(a, b, out) is out and torch.equal(out, y)
    assert compat.MatMul(layout, 16, "dsd")(y[0], b[:, :5].new_ones(48, 5)).shape == (
        1, 1, 32, 5,
    )  # fmt: skip


def test_softmax_with_relative_positions():
    layout = random_layout(2, 4, 4)
    x = torch.rand(3, int(layout.sum()), 16, 16, dtype=DOUBLE)
    rpe = torch.rand(3, 2, 64, 64, dtype=DOUBLE, requires_grad=True)
    op = compat.Softmax(layout, 16)
    y = op(x, rpe=rpe)
    assert torch.allclose(y, op(x + blocks_of(rpe, layout, 16)))
    y.square().sum().backward()
    assert rpe.grad.any() and not masked(rpe.grad, 1 - layout, 16).any()


ONES = torch.ones(1, 2, 2, dtype=torch.long)
WRONG = {
    "mode": (
        lambda: compat.MatMul(ONES, 16, "ssd"), NotImplementedError,
        "Supported modes are: sdd, dsd, dds",
    ),
    "trans": (lambda: compat.MatMul(ONES, 16, "sdd", 1), TypeError, "trans_a must be"),
    "layout": (lambda: compat.MatMul(ONES[0], 16, "sdd"), ValueError, r"got \(2, 2\)"),
    "list": (lambda: compat.Softmax([[[1]]], 16), ValueError, "got list"),
    "floats": (lambda: compat.Softmax(ONES.float(), 16), TypeError, "bools or ints"),
    "block": (lambda: compat.MatMul(ONES, 24, "sdd"), ValueError, "block must have"),
    "operand": (lambda: compat.MatMul(ONES, 16, "sdd")([1.0], ONES), TypeError, "a must be"),
    "mask": (
        lambda: compat.Softmax(ONES, 16)(
            torch.rand(1, 4, 16, 16), attn_mask=torch.ones(32, 32).half()
        ),
        ValueError, "attn_mask must be torch.float32 as x is, got torch.float16",
    ),
    "inplace": (
        lambda: compat.Softmax(ONES, 16)(torch.rand(1, 4, 16, 16), inplace=1),
        TypeError, "inplace must be",
    ),
    "sparsity": (lambda: compat.MultiheadAttention(32, 2, "fixed"), TypeError, "a SparsityInfo"),
    "layout alone": (lambda: compat.MultiheadAttention(32, 2, ONES), TypeError, "block must be"),
    "block alone": (
        lambda: compat.MultiheadAttention(32, 2, compat.SparsityInfo("dense"), block=16),
        TypeError, "block goes with a layout",
    ),
    "both": (
        lambda: compat.MultiheadAttention(32, 2, compat.SparsityInfo(), layout=ONES, block=16),
        TypeError, "sparsity and layout both say",
    ),
    "argument": (
        lambda: compat.MultiheadAttention(32, 2, ONES, 16, droput=0.1),
        TypeError, "unexpected keyword argument 'droput'; it takes .*dropout",
    ),
    "twice": (
        lambda: compat.MultiheadAttention(32, 2, ONES, 16, 0.1, dropout=0.1),
        TypeError, "multiple values for argument 'dropout'",
    ),
    "heads": (lambda: compat.MultiheadAttention(32, 2, ONES, 16), ValueError, "num_heads = 2"),
    "sparsity's mode": (
        lambda: compat.SparsityInfo("strided", 16).layout(1, 32, 32), ValueError,
        "mode of the sparsity must be one of",
    ),
    "lengths": (
        lambda: compat.SparsityInfo("fixed", 16).layout(1, 128, 256), ValueError,
        "a fixed layout is of one length",
    ),
    "query": (
        lambda: compat.DeepSpeedSparseSelfAttention(8, 2)(*[torch.rand(1, 3, 9, 4)] * 3),
        ValueError, r"query must be \[B, 2, L, D\]",
    ),
    "order": (lambda: compat.Permute("NCHW", "NHCC"), ValueError, "out_order must be"),
    "image": (lambda: compat.Permute("NCHW", "CHWN")(ONES), ValueError, "x must have shape"),
    "scale": (lambda: compat.ReLU()(*[torch.ones(3)] * 4), ValueError, "scale must be one num"),
    "residual": (
        lambda: compat.ReLU()(torch.ones(3), *[torch.ones(1)] * 3), ValueError,
        "residual must have the shape of x",
    ),
    "linear": (
        lambda: compat.Linear(32, 48, 16, torch.ones(1, 3, 2).long()), ValueError,
        r"= \[1, 2, 3\], got \(1, 3, 2\)",
    ),
    "features": (lambda: compat.Linear(32, 40, 16, ONES), ValueError, "must be multiples of 16"),
    "blocks": (
        lambda: compat.Linear(32, 32, 16, ONES).drop_(1), RuntimeError,
        "the blocks of Linear do not change",
    ),
    "conv": (
        lambda: compat.Conv2d(16, 16, 1, ONES[None, :, :1, :1], 16, order="NCHW"),
        ValueError, "order must be NHWC or CHWN",
    ),
    "conv's bias": (
        lambda: compat.Conv2d(16, 16, 1, ONES[None, :, :1, :1], 16, bias=True),
        NotImplementedError, "bias is not supported",
    ),
    "keys of a bias": (
        lambda: compat.MultiheadAttention(32, 2, compat.SparsityInfo("dense"), add_bias_kv=True),
        NotImplementedError, "add_bias_kv ",
    ),
    "keys of zeros": (
        lambda: compat.MultiheadAttention(32, 2, compat.SparsityInfo("dense"), add_zero_attn=True),
        NotImplementedError, "add_zero_attn ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    make, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        make()
