"""Torch-Blocksparse's names: its own 31 cases, and what it gets wrong, by the rows of that list."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn

import kernlib.compat.torch_blocksparse as torch_blocksparse
from kernlib.families.blocksparse.layout import Layout
from kernlib.nn.block_sparse.linear import BlockSparseLinear

HALF, DOUBLE = torch.float16, torch.float64
TOLERANCES = {torch.float32: (1e-4, 1e-2), HALF: (1e-2, 1e-3), DOUBLE: (1e-9, 1e-9)}


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(1)


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    rtol, atol = TOLERANCES[found.dtype]
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    assert torch.allclose(found, wanted, rtol=rtol, atol=atol)


def random_layout(heads: int, rows: int, cols: int, density: float = 0.5) -> torch.Tensor:
    return (torch.rand(heads, rows, cols) < density).long()


def blocks_of(dense: torch.Tensor, layout: torch.Tensor, block: int) -> torch.Tensor:
    """[Z, nnz, block, block] of [Z, H, rows, cols]."""
    h, r, c = layout.nonzero().unbind(1)
    apart = dense.unflatten(3, (-1, block)).unflatten(2, (-1, block)).transpose(3, 4)
    return apart[:, h, r, c]


def masked(dense: torch.Tensor, layout: torch.Tensor, block: int, fill: float = 0.0):
    kept = layout.repeat_interleave(block, 1).repeat_interleave(block, 2) != 0
    return dense.masked_fill(~kept, fill)


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
        op = torch_blocksparse.MatMul(self.layout, self.block, self.mode, *self.trans)
        a, b = self.sparse(1, self.a).requires_grad_(), self.sparse(2, self.b).requires_grad_()
        y = op(a, b)
        return [y.detach(), *torch.autograd.grad(y, (a, b), self.sparse(0, self.grad))]

    def check(self) -> None:
        for found, wanted in zip(self.found(), self.wanted(), strict=True):
            close(found, wanted)


# Its own cases.

TRANSPOSED = [(m, a, b, 32) for m in ("sdd", "dsd", "dds") for a in (0, 1) for b in (0, 1)]
SIZES = [(m, 0, 0, block) for m in ("sdd", "dsd", "dds") for block in (16, 32, 64)]


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
    op = torch_blocksparse.Softmax(layout, block)
    found = op(
        values, scale=scale, key_padding_mask=key, key_padding_mask_mode="add", attn_mask=attn,
        attn_mask_mode="mul",
    )  # fmt: skip
    found.backward(blocks_of(grad, layout, block))
    close(found.detach(), blocks_of(y.detach(), layout, block).to(dtype))
    close(values.grad, blocks_of(to_x, layout, block).to(dtype))


def test_attention():
    info = torch_blocksparse.MultiheadAttention.SparsityInfo()
    info.mode, info.block = "dense", 16
    torch.manual_seed(0)
    sparse = torch_blocksparse.MultiheadAttention(128, 2, info).half()
    torch.manual_seed(0)
    dense = nn.MultiheadAttention(128, 2)
    query, key, value = (torch.rand(128, 2, 128).half() for _ in range(3))
    dropped = torch.rand(2, 128) > 0.5
    added = torch.zeros(2, 128, dtype=HALF).masked_fill(dropped, -torch.inf)
    y, weights = sparse(query, key, value, key_padding_mask=added, need_weights=False)
    wanted, _ = dense(query.float(), key.float(), value.float(), key_padding_mask=dropped)
    assert weights is None
    close(y, wanted.half())


def relu_case(shape: tuple, dtype) -> None:
    x, residual, grad = (torch.randn(shape, dtype=dtype) for _ in range(3))
    scale, bias = torch.randn(1, dtype=dtype), torch.randn(1, dtype=dtype)
    given = [t.requires_grad_() for t in (x, scale, bias, residual)]
    y = torch_blocksparse.ReLU()(*given)
    wanted = torch.relu(x * scale + bias + residual)
    close(y, wanted)
    for one, other in zip(
        torch.autograd.grad(y, given, grad), torch.autograd.grad(wanted, given, grad), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-2) and one.shape == other.shape


def test_relu():
    relu_case((4, 64, 15, 15), torch.float32)
    given = [torch.randn(2, 3, dtype=DOUBLE), *torch.randn(2, 1, dtype=DOUBLE), torch.randn(2, 3)]
    given = [t.double().requires_grad_() for t in given]
    assert torch.autograd.gradcheck(torch_blocksparse.ReLU(), given)


ORDERS = {"NCHW": lambda n, c, h, w: (c * h * w, h * w, w, 1),
          "CHWN": lambda n, c, h, w: (1, h * w * n, w * n, n)}  # fmt: skip


@pytest.mark.parametrize("out_order", ORDERS)
@pytest.mark.parametrize("in_order", ORDERS)
def test_permute(in_order, out_order):
    shape = (32, 32, 4, 4)
    x = torch.rand(32 * 32 * 16).as_strided(shape, ORDERS[in_order](*shape)).requires_grad_()
    y = torch_blocksparse.Permute(in_order, out_order)(x)
    assert torch.equal(y, x) and y.stride() == ORDERS[out_order](*shape)
    assert y.data_ptr() != x.data_ptr()
    grad = torch.rand(shape)
    (found,) = torch.autograd.grad(y, x, grad)
    assert torch.equal(found, grad) and found.stride() == ORDERS[in_order](*shape)
    small = torch.rand(2, 3, 2, 2, dtype=DOUBLE, requires_grad=True)
    made = torch_blocksparse.Permute(in_order, out_order)
    assert torch.autograd.gradgradcheck(made, small)
    assert torch.autograd.gradcheck(made, small, check_forward_ad=True, check_batched_grad=True)
    several = torch.stack((small, 2 * small)).detach()
    assert torch.equal(torch.vmap(made)(several), several)


# What it gets wrong, by the rows of that list.


@pytest.mark.parametrize("mode", ("sdd", "dsd", "dds"))
def test_row_1_rows_of_few_blocks(mode):
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
def test_row_2_heads_and_layouts_without_blocks(mode, empty):
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
    assert torch_blocksparse.Softmax(layout, 16)(x).shape == x.shape


@pytest.mark.parametrize("mode", ("sdd", "dsd", "dds"))
def test_row_3_blocks_of_128(mode):
    problem = Problem(mode, False, False, 128, torch.float32, sizes=(256, 256, 256), z=1)
    problem.check()
    if mode == "sdd":
        assert problem.found()[0].any()


@pytest.mark.parametrize("size", (16, 32, 48, 80, 96, 7))
def test_row_4_any_size_to_sum_over(size):
    for trans in ((False, False), (True, False), (False, True)):
        Problem("sdd", *trans, 16, HALF, sizes=(32, 48, size), z=1).check()


@pytest.mark.parametrize("mode", ("sdd", "dsd", "dds"))
def test_row_5_a_gradient_of_one_operand(mode):
    problem = Problem(mode, False, True, 16, DOUBLE, sizes=(32, 48, 64))
    _, *wanted = problem.wanted()
    op = torch_blocksparse.MatMul(problem.layout, 16, mode, False, True)
    for index in (0, 1):
        given = [problem.sparse(1, problem.a).clone(), problem.sparse(2, problem.b).clone()]
        given[index] = given[index].requires_grad_()
        op(*given).backward(problem.sparse(0, problem.grad))
        close(given[index].grad, wanted[index])
        assert given[1 - index].grad is None


def test_row_6_modules_of_one_length_and_two_layouts():
    x = torch.rand(64, 1, 32)
    found = []
    for mode in ("dense", "fixed", "dense"):
        torch.manual_seed(0)
        info = torch_blocksparse.SparsityInfo(mode, 16, 32)
        found.append(torch_blocksparse.MultiheadAttention(32, 2, info)(x, x, x)[0])
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("mode", ("sdd", "dsd", "dds"))
def test_row_7_shapes_are_checked_and_strides_are_free(mode):
    problem = Problem(mode, False, False, 16, DOUBLE, sizes=(32, 48, 64))
    wanted = problem.wanted()[0]
    op = torch_blocksparse.MatMul(problem.layout, 16, mode)
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


def test_row_8_softmax_leaves_its_operands_alone():
    layout = random_layout(2, 4, 4)
    op = torch_blocksparse.Softmax(layout, 16)
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


def test_row_9_softmax_rounds_once():
    """Rounded numerators over rounded sums are 3.5e-4 off, one rounding is 2.1e-4."""
    torch.manual_seed(0)
    layout = torch.ones(1, 4, 8, dtype=torch.long)
    x = torch.randn(1, 32, 16, 16).half()
    y = torch_blocksparse.Softmax(layout, 16)(x)
    rows = x.double().view(4, 8, 16, 16).transpose(1, 2).flatten(2)
    wanted = rows.softmax(-1).unflatten(2, (8, 16)).transpose(1, 2).reshape(1, 32, 16, 16)
    assert (y.double() - wanted).norm() < 2.6e-4 * wanted.norm()


def test_row_10_rows_that_are_masked_out_are_zero():
    layout = torch.ones(1, 2, 2, dtype=torch.long)
    x = torch.rand(1, 4, 16, 16, requires_grad=True)
    attn = torch.ones(32, 32)
    attn[3] = 0
    y = torch_blocksparse.Softmax(layout, 16)(x, attn_mask=attn, attn_mask_mode="mul")
    y.sum().backward()
    assert not y[:, :2, 3].any() and not x.grad[:, :2, 3].any() and not x.grad.isnan().any()
    assert torch.allclose(
        y.sum(-1)[:, [0, 2]] + y.sum(-1)[:, [1, 3]], (attn[:, 0] > 0).float().view(1, 2, 16)
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_row_11_rows_of_any_length(dtype):
    layout = torch.ones(1, 1, 33000 // 16, dtype=torch.long)
    x = torch.rand(1, layout.numel(), 16, 16).to(dtype)
    y = torch_blocksparse.Softmax(layout, 16)(x)
    wanted = x.double().transpose(0, 2).flatten(1).softmax(-1)
    found = y.double().transpose(0, 2).flatten(1)
    gate = 1e-6 if dtype == torch.float32 else 2.1e-3
    assert (found - wanted).norm() < gate * wanted.norm()


@pytest.mark.parametrize("option", ("add_bias_kv", "add_zero_attn"))
def test_row_13_what_changes_the_length_of_keys_is_refused(option):
    info = torch_blocksparse.SparsityInfo("dense", 16)
    with pytest.raises(NotImplementedError, match=f"{option} "):
        torch_blocksparse.MultiheadAttention(32, 2, info, **{option: True})


def test_row_14_fixed_layouts():
    ragged = torch_blocksparse.make_layout(2, 6, "fixed", 4, True, 1, 1)
    assert ragged.shape == (2, 6, 6) and ragged.dtype == torch.int64
    assert not ragged.triu(1).any()
    wide = torch_blocksparse.make_layout(1, 8, "fixed", 4, True, 1, 4)
    assert torch.equal(wide[0], torch.ones(8, 8).tril().long())
    with pytest.raises(ValueError, match="stride must be a multiple of the block"):
        torch_blocksparse.SparsityInfo("fixed", 32, 48).layout(1, 64, 64)


@pytest.mark.parametrize("mode", ("dsd", "dds"))
def test_row_15_values_without_a_batch_stand_for_all(mode):
    problem = Problem(mode, False, False, 16, DOUBLE, sizes=(32, 48, 64))
    letter = mode.index("s")
    given = [problem.sparse(1, problem.a), problem.sparse(2, problem.b)]
    shared = given[letter - 1][0].clone().requires_grad_()
    repeated = shared.detach().expand(3, *shared.shape).clone().requires_grad_()
    op = torch_blocksparse.MatMul(problem.layout, 16, mode)
    results = []
    for values in (shared, repeated):
        operands = list(given)
        operands[letter - 1] = values
        results.append(op(*operands))
        results[-1].backward(problem.grad)
    close(*(y.detach() for y in results))
    close(shared.grad, repeated.grad.sum(0))


def test_row_16_linear_works():
    layout = random_layout(1, 2, 3, 0.7)
    layout[0, 0] = 1
    made = torch_blocksparse.Linear(32, 48, 16, layout, bias=True)
    assert made.weight.shape == (int(layout.sum()), 16, 16)
    assert list(made.state_dict()) == ["weight", "bias"]
    x = torch.rand(4, 32, requires_grad=True)
    assert torch.allclose(made(x), x @ made.to_dense() + made.bias, atol=1e-6)
    assert made(x[0]).shape == (48,) and made(x[None, None]).shape == (1, 1, 4, 48)
    close(blocks_of(made.to_dense()[None, None], layout, 16)[0].detach(), made.weight.detach())
    turned = BlockSparseLinear(32, 48, Layout(layout[0].T, 16))
    with torch.no_grad():
        turned.weight.copy_(turned.layout.to_blocks(made.to_dense().mT))
        turned.bias.copy_(made.bias)
    assert torch.allclose(turned(x), made(x), atol=1e-6)
    made(x).square().sum().backward()
    assert made.weight.grad.any() and x.grad.any()
    other = torch_blocksparse.BlockSparseLinear(32, 48, 16, layout, bias=True)
    other.load_state_dict(made.state_dict())
    for one in (other, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(one(x), made(x))
    assert made.watch_growth()(x).sum().backward() is None and made.growth_gradient is not None


def test_blocks_of_its_layers_do_not_change():
    """As a state_dict, like the project's, has no layout."""
    made = torch_blocksparse.Linear(32, 32, 16, torch.ones(1, 2, 2, dtype=torch.long))
    with pytest.raises(RuntimeError, match="the blocks of Linear do not change"):
        made.drop_(1)


def test_row_16_modules_are_replaced():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 48, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double().eval()
    x = torch.rand(3, 64, 32, dtype=DOUBLE)
    dropped = torch.arange(64) >= torch.tensor([[64], [40], [9]])
    wanted = model(x, src_key_padding_mask=dropped)
    torch_blocksparse.replace_mha(model, torch_blocksparse.SparsityInfo("dense", 16))
    layers = [layer.self_attn for layer in model.layers]
    assert all(type(m) is torch_blocksparse.MultiheadAttention for m in layers)
    assert not any(m.training for m in layers)
    assert torch.allclose(model(x, src_key_padding_mask=dropped), wanted)
    with torch.no_grad():  # where torch would nest what is padded
        assert torch.allclose(model(x, src_key_padding_mask=dropped), wanted)
    with pytest.raises(TypeError, match="in no place to be swapped"):
        torch_blocksparse.replace_mha(nn.MultiheadAttention(32, 2), None)
    dropping = nn.TransformerEncoderLayer(32, 2, 48, 0.1)
    torch_blocksparse.replace_mha(dropping, torch_blocksparse.SparsityInfo("dense", 16))
    assert dropping.self_attn.dropout == 0.1
    adding = nn.Sequential(nn.MultiheadAttention(32, 2, add_zero_attn=True))
    with pytest.raises(NotImplementedError, match="add_zero_attn"):
        torch_blocksparse.replace_mha(adding, torch_blocksparse.SparsityInfo("dense", 16))
    assert type(adding[0]) is nn.MultiheadAttention
    shared = nn.Sequential(*[nn.MultiheadAttention(32, 2)] * 2)
    torch_blocksparse.replace_mha(shared, torch_blocksparse.SparsityInfo("dense", 16))
    assert type(shared[1]) is torch_blocksparse.MultiheadAttention and shared[0] is shared[1]


# The rest.


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
        found = inspect.signature(getattr(torch_blocksparse, name)).parameters
        assert [n for n in found if n not in ("args", "kwargs")] == wanted, name
    linear = list(inspect.signature(torch_blocksparse.Linear).parameters)
    assert linear[:5] == ["in_features", "out_features", "block", "layout", "bench"]
    call = list(inspect.signature(torch_blocksparse.Softmax.__call__).parameters)
    assert call[1:] == [
        "x", "scale", "rpe", "key_padding_mask", "attn_mask", "key_padding_mask_mode",
        "attn_mask_mode", "is_causal", "inplace",
    ]  # fmt: skip
    assert sorted(torch_blocksparse.__all__) == dir(torch_blocksparse)
    with pytest.raises(AttributeError, match="no attribute 'BatchNorm2d'"):
        _ = torch_blocksparse.BatchNorm2d


def test_missing_axes_are_added_and_out_is_written():
    layout = random_layout(1, 2, 3)
    op = torch_blocksparse.MatMul(layout, 16, "sdd")
    a, b = torch.rand(32, 20), torch.rand(20, 48)
    y = op(a, b)
    assert y.shape == (1, int(layout.sum()), 16, 16) and op.spdims == layout.shape
    out = torch.empty_like(y)
    assert op(a, b, out) is out and torch.equal(out, y)
    assert torch_blocksparse.MatMul(layout, 16, "dsd")(y[0], b[:, :5].new_ones(48, 5)).shape == (
        1, 1, 32, 5,
    )  # fmt: skip


def test_softmax_with_relative_positions():
    layout = random_layout(2, 4, 4)
    x = torch.rand(3, int(layout.sum()), 16, 16, dtype=DOUBLE)
    rpe = torch.rand(3, 2, 64, 64, dtype=DOUBLE, requires_grad=True)
    op = torch_blocksparse.Softmax(layout, 16)
    y = op(x, rpe=rpe)
    assert torch.allclose(y, op(x + blocks_of(rpe, layout, 16)))
    y.square().sum().backward()
    assert rpe.grad.any() and not masked(rpe.grad, 1 - layout, 16).any()


@pytest.mark.parametrize("key", ("plain", "transposed"))
def test_deepspeeds_attention(key):
    q, k, v = (torch.rand(2, 3, 64, 8, dtype=DOUBLE) for _ in range(3))
    op = torch_blocksparse.DeepSpeedSparseSelfAttention(24, 3, "dense", 32)
    wanted = torch.softmax(q @ k.mT / 8**0.5, -1) @ v
    assert torch.allclose(op(q, k.mT.contiguous() if key == "transposed" else k, v), wanted)
    fixed = torch_blocksparse.DeepSpeedSparseSelfAttention(24, 3, stride=32)
    assert fixed(q, k, v).shape == v.shape and not torch.allclose(fixed(q, k, v), wanted)


def test_modules_with_layouts_of_lengths_are_pickled():
    made = torch_blocksparse.MultiheadAttention(32, 2, torch_blocksparse.SparsityInfo("dense", 16))
    x = torch.rand(32, 1, 32)
    wanted = made(x, x, x)[0]
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(x, x, x)[0], wanted)
    short = torch.rand(16, 1, 32)
    assert made(short, x, x)[0].shape == short.shape


@pytest.mark.parametrize("order", ("NHWC", "CHWN"))
def test_convolutions(order):
    layout = (torch.rand(2, 2, 3, 3) > 0.5).long()
    made = torch_blocksparse.Conv2d(32, 32, (3, 3), layout, 16, (1, 1), (2, 2), order)
    assert list(made.state_dict()) == ["weight"]
    x = torch.rand(4, 32, 9, 9)
    y = made(x)
    wanted = nn.functional.conv2d(x, made.to_dense(), None, 2, 1)
    assert torch.allclose(y, wanted, atol=1e-5)
    memory = {"NHWC": (0, 2, 3, 1), "CHWN": (1, 2, 3, 0)}[order]
    assert y.permute(memory).is_contiguous()
    k, r, s, c = layout.permute(0, 2, 3, 1).nonzero().unbind(1)
    dense = made.to_dense().unflatten(0, (2, 16)).unflatten(2, (2, 16))
    assert torch.equal(made.weight, dense[k, :, c, :, r, s])


ONES = torch.ones(1, 2, 2, dtype=torch.long)
WRONG = {
    "mode": (
        lambda: torch_blocksparse.MatMul(ONES, 16, "ssd"), NotImplementedError,
        "Supported modes are: sdd, dsd, dds",
    ),
    "trans": (
        lambda: torch_blocksparse.MatMul(ONES, 16, "sdd", 1), TypeError, "trans_a must be",
    ),
    "layout": (lambda: torch_blocksparse.MatMul(ONES[0], 16, "sdd"), ValueError, r"got \(2, 2\)"),
    "list": (lambda: torch_blocksparse.Softmax([[[1]]], 16), ValueError, "got list"),
    "floats": (lambda: torch_blocksparse.Softmax(ONES.float(), 16), TypeError, "bools or ints"),
    "block": (lambda: torch_blocksparse.MatMul(ONES, 24, "sdd"), ValueError, "block must have"),
    "operand": (
        lambda: torch_blocksparse.MatMul(ONES, 16, "sdd")([1.0], ONES), TypeError, "a must be",
    ),
    "mask": (
        lambda: torch_blocksparse.Softmax(ONES, 16)(
            torch.rand(1, 4, 16, 16), attn_mask=torch.ones(32, 32).half()
        ),
        ValueError, "attn_mask must be torch.float32 as x is, got torch.float16",
    ),
    "inplace": (
        lambda: torch_blocksparse.Softmax(ONES, 16)(torch.rand(1, 4, 16, 16), inplace=1),
        TypeError, "inplace must be",
    ),
    "sparsity": (
        lambda: torch_blocksparse.MultiheadAttention(32, 2, ONES), TypeError, "a SparsityInfo",
    ),
    "sparsity's mode": (
        lambda: torch_blocksparse.SparsityInfo("strided", 16).layout(1, 32, 32), ValueError,
        "mode of the sparsity must be one of",
    ),
    "lengths": (
        lambda: torch_blocksparse.SparsityInfo("fixed", 16).layout(1, 128, 256), ValueError,
        "a fixed layout is of one length",
    ),
    "query": (
        lambda: torch_blocksparse.DeepSpeedSparseSelfAttention(8, 2)(*[torch.rand(1, 3, 9, 4)] * 3),
        ValueError, r"query must be \[B, 2, L, D\]",
    ),
    "order": (lambda: torch_blocksparse.Permute("NCHW", "NHCC"), ValueError, "out_order must be"),
    "image": (
        lambda: torch_blocksparse.Permute("NCHW", "CHWN")(ONES), ValueError, "x must have shape",
    ),
    "scale": (
        lambda: torch_blocksparse.ReLU()(*[torch.ones(3)] * 4), ValueError, "scale must be one num",
    ),
    "residual": (
        lambda: torch_blocksparse.ReLU()(torch.ones(3), *[torch.ones(1)] * 3), ValueError,
        "residual must have the shape of x",
    ),
    "linear": (
        lambda: torch_blocksparse.Linear(32, 48, 16, torch.ones(1, 3, 2).long()), ValueError,
        r"= \[1, 2, 3\], got \(1, 3, 2\)",
    ),
    "features": (
        lambda: torch_blocksparse.Linear(32, 40, 16, ONES), ValueError, "must be multiples of 16",
    ),
    "conv": (
        lambda: torch_blocksparse.Conv2d(16, 16, 1, ONES[None, :, :1, :1], 16, order="NCHW"),
        ValueError, "order must be NHWC or CHWN",
    ),
    "conv's bias": (
        lambda: torch_blocksparse.Conv2d(16, 16, 1, ONES[None, :, :1, :1], 16, bias=True),
        NotImplementedError, "bias is not supported",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_refused(case):
    make, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        make()
