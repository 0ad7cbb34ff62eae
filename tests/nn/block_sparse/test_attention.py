"""Attention over stored blocks against torch's in float64: values, gradients, masks, states."""

from __future__ import annotations

import copy
import inspect
import math
import pickle

import pytest
import torch
from torch import nn

from kernlib.families.blocksparse import builders
from kernlib.families.blocksparse.layout import Layout
from kernlib.nn.block_sparse import attention as block_sparse
from kernlib.nn.block_sparse.attention import (
    BlockSparseMultiheadAttention,
    block_sparse_attention,
)

DOUBLE = torch.float64
HEADS, LENGTHS, SIZE = 4, (64, 96), 32


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(params=("three kernels", "one"))
def route(request, monkeypatch):
    """How attention is computed: as on a GPU half types are by one kernel."""
    is_one = request.param == "one"
    monkeypatch.setattr(block_sparse, "takes", lambda *_: is_one)
    return request.param


def layout_of(heads: int | None = HEADS, density: float = 0.6) -> Layout:
    return builders.random(*LENGTHS, (16, 32), density, heads)


def stored(layout: Layout) -> torch.Tensor:
    """Which elements are stored, (H, Lq, Lk)."""
    ones = layout.to_dense(torch.ones(layout.capacity, *layout.block)) != 0
    return ones.expand(HEADS, *layout.shape)


def operands(heads: int = HEADS, lead: tuple = (2,)) -> list[torch.Tensor]:
    lengths = LENGTHS[0], LENGTHS[1], LENGTHS[1]
    return [torch.randn(*lead, heads, n, 8, dtype=DOUBLE, requires_grad=True) for n in lengths]


def by_hand(q, k, v, layout, scale, added, taken) -> torch.Tensor:
    """The same by torch; rows that nothing is left of are 0."""
    scores = (q @ k.mT) * scale + added
    scores = scores.masked_fill(~(stored(layout) & taken), -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v


MASKS = {
    "none": lambda: ({}, 0.0, True),
    "key": lambda: added_key(),
    "key bools": lambda: bools("key_padding_mask", (2, 96)),
    "attn": lambda: added_attn(),
    "attn bools": lambda: bools("attn_mask", LENGTHS),
    "attn factors": lambda: factors(),
    "causal": lambda: (
        {"causal": True}, 0.0, torch.ones(LENGTHS, dtype=torch.bool).tril(),
    ),
    "rpe": lambda: with_rpe(),
}  # fmt: skip


def added_key():
    mask = torch.zeros(2, 96, dtype=DOUBLE).masked_fill(torch.rand(2, 96) > 0.7, -torch.inf)
    return {"key_padding_mask": mask}, mask[:, None, None], True


def added_attn():
    mask = torch.randn(LENGTHS, dtype=DOUBLE)
    return {"attn_mask": mask}, mask, True


def bools(name: str, shape: tuple):
    mask = torch.rand(shape) > 0.3
    return {name: mask}, 0.0, mask[:, None, None] if name == "key_padding_mask" else mask


def factors():
    mask = (torch.rand(LENGTHS) > 0.3).to(DOUBLE)
    return {"attn_mask": mask, "attn_mask_mode": "mul"}, 0.0, mask != 0


def with_rpe():
    rpe = torch.randn(HEADS, *LENGTHS, dtype=DOUBLE)
    return {"rpe": rpe}, rpe, True


@pytest.mark.parametrize("heads", (None, HEADS), ids=("one for all", "each head"))
@pytest.mark.parametrize("case", MASKS)
def test_values_and_gradients(case, heads, route):
    layout, given = layout_of(heads), operands()
    options, added, taken = MASKS[case]()
    taken = torch.as_tensor(taken)
    y = block_sparse_attention(*given, layout, 0.4, **options)
    wanted = by_hand(*given, layout, 0.4, added, taken)
    assert torch.allclose(y, wanted)
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, given, grad)
    for one, other in zip(found, torch.autograd.grad(wanted, given, grad), strict=True):
        assert torch.allclose(one, other.nan_to_num(0.0))


def test_keys_may_be_transposed_and_scales_left_out(route):
    q, k, v = operands()
    layout = layout_of()
    wanted = block_sparse_attention(q, k, v, layout, 1 / math.sqrt(8))
    assert torch.equal(block_sparse_attention(q, k, v, layout), wanted)
    turned = k.mT.contiguous()
    assert torch.allclose(block_sparse_attention(q, turned, v, layout, key_transposed=True), wanted)
    tensor = torch.tensor(1 / math.sqrt(8), dtype=DOUBLE)
    assert torch.allclose(block_sparse_attention(q, k, v, layout, tensor), wanted)


def test_other_leading_dimensions_and_value_sizes(route):
    for lead in ((), (2, 3)):
        for heads in (None, HEADS):
            q, k, v = operands(lead=lead)
            v = torch.cat((v, v), -1)
            layout = layout_of(heads)
            y = block_sparse_attention(q, k, v, layout)
            assert y.shape == (*lead, HEADS, LENGTHS[0], 16)
            assert torch.allclose(
                y, by_hand(q, k, v, layout, 1 / math.sqrt(8), 0.0, torch.tensor(True))
            )


@pytest.mark.parametrize("batch", (0, 2, HEADS))
def test_operands_of_one_head_are_those_of_each_head_of_the_layout(batch, route):
    """Of as many batches as the layout has heads too."""
    q, k, v = given = operands(heads=1, lead=(batch,))
    layout = layout_of()
    y = block_sparse_attention(*given, layout)
    assert y.shape == (batch, HEADS, LENGTHS[0], 8)
    assert torch.allclose(y, by_hand(q, k, v, layout, 1 / math.sqrt(8), 0.0, torch.tensor(True)))


def test_a_scale_and_masks_have_gradients(route):
    """Of more than one batch too."""
    layout = layout_of()
    for lead in ((), (2,), (2, 3)):
        given = operands(lead=lead)
        scale = torch.tensor(0.3, dtype=DOUBLE, requires_grad=True)
        rpe = torch.randn(*lead[-1:], *[HEADS] * bool(lead), *LENGTHS, dtype=DOUBLE)
        key = torch.randn(*lead[-1:], LENGTHS[1], dtype=DOUBLE, requires_grad=True)
        inputs = *given, scale, rpe.requires_grad_(), key
        y = block_sparse_attention(*given, layout, scale, rpe=rpe, key_padding_mask=key)
        added = rpe + key.reshape(*lead[-1:], 1, 1, LENGTHS[1])
        wanted = by_hand(*given, layout, scale, added, torch.tensor(True))
        assert torch.allclose(y, wanted)
        grad = torch.randn_like(y)
        pairs = (torch.autograd.grad(t, inputs, grad) for t in (y, wanted))
        for one, other in zip(*pairs, strict=True):
            assert torch.allclose(one, other.nan_to_num(0.0))


def test_what_the_function_refuses(route):
    q, k, v = operands()
    layout = layout_of()
    for given, options, kind, words in (
        ((q[..., :-1, :], k, v), {}, ValueError, r"q must be \(..., H, 64, D\)"),
        ((q, k.mT, v), {}, ValueError, r"k must be \(..., H, 96, D\)"),
        ((q, k, v), {"key_transposed": True}, ValueError, r"k must be \(..., H, D, 96\)"),
        ((q, k, v[..., :-1, :]), {}, ValueError, r"v must be \(..., H, 96, Dv\)"),
        ((q[:, :3], k, v), {}, ValueError, "q must have 4 heads as layout does, got 3"),
        ((q, k[..., :-1], v), {}, ValueError, "k must have D = 8 as q has, got 7"),
        ((q, k.half(), v), {}, TypeError, r"k must be torch\.float64 on cpu as q is"),
        ((q, k, v.half()), {}, TypeError, r"v must be torch\.float64 on cpu as q is"),
        ((None, k, v), {}, TypeError, "q must be a tensor"),
        ((q, k, v), {"attn_mask": q}, ValueError, "attn_mask must have shape .* an rpe of floats"),
        ((q, k, v), {"attn_mask_mode": "max"}, ValueError, "attn_mask_mode must be one of"),
        ((q, k, v), {"key_transposed": 1}, TypeError, "key_transposed must be a bool"),
    ):
        with pytest.raises(kind, match=words):
            block_sparse_attention(*given, layout, **options)
    with pytest.raises(TypeError, match=r"layout must be a kernlib\.blocksparse\.Layout, got"):
        block_sparse_attention(q, k, v, torch.ones(4, 4, 3))
    mask = torch.ones(len(q), 95, dtype=torch.bool)
    one = Layout(layout.mask()[0], layout.block)
    with pytest.raises(ValueError, match=rf"to \({len(q)}, 96\), got \({len(q)}, 95\)"):
        block_sparse_attention(q, k, v, one, key_padding_mask=mask)
    with pytest.raises(ValueError, match=r"must broadcast in front of .* fewer heads of k and v"):
        block_sparse_attention(q, k[:, :2], v[:, :2], one)


# The module.


def pair(layout, **options) -> tuple[BlockSparseMultiheadAttention, nn.MultiheadAttention]:
    """The layer and torch's, of one seed."""
    made = []
    for kind, more in ((BlockSparseMultiheadAttention, (layout,)), (nn.MultiheadAttention, ())):
        torch.manual_seed(1)
        made.append(kind(SIZE, HEADS, *more, dtype=DOUBLE, **options))
    return tuple(made)


def inputs(batch_first: bool, *sizes: int) -> list[torch.Tensor]:
    lengths = LENGTHS[0], LENGTHS[1], LENGTHS[1]
    shapes = [
        (2, n, size) if batch_first else (n, 2, size)
        for n, size in zip(lengths, sizes, strict=True)
    ]
    return [torch.randn(shape, dtype=DOUBLE, requires_grad=True) for shape in shapes]


def test_arguments():
    assert list(inspect.signature(BlockSparseMultiheadAttention).parameters) == [
        "embed_dim", "num_heads", "layout", "block", "dropout", "bias", "add_bias_kv",
        "add_zero_attn", "kdim", "vdim", "key_padding_mask_mode", "attn_mask_mode", "batch_first",
        "device", "dtype", "precision",
    ]  # fmt: skip
    theirs = list(inspect.signature(nn.MultiheadAttention.forward).parameters)
    own = list(inspect.signature(BlockSparseMultiheadAttention.forward).parameters)
    assert own == [*theirs, "rpe"]


@pytest.mark.parametrize("batch_first", (False, True))
@pytest.mark.parametrize("heads", (None, HEADS), ids=("one for all", "each head"))
@pytest.mark.parametrize("sizes", ({}, {"kdim": 24, "vdim": 40}, {"bias": False}), ids=str)
def test_the_layer_is_torchs_where_that_is_masked(sizes, heads, batch_first, route):
    layout = layout_of(heads)
    made, plain = pair(layout, batch_first=batch_first, **sizes)
    for mine, theirs in zip(made.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    given = inputs(batch_first, SIZE, sizes.get("kdim", SIZE), sizes.get("vdim", SIZE))
    dropped = torch.rand(2, 96) > 0.8
    y, weights = made(*given, key_padding_mask=dropped)
    mask = ~stored(layout).repeat(2, 1, 1)
    wanted, _ = plain(*given, key_padding_mask=dropped, attn_mask=mask)
    seen = ~wanted.isnan()
    assert weights is None and y.shape == wanted.shape and seen.any()
    assert torch.allclose(y[seen], wanted[seen])


@pytest.mark.parametrize("batch_first", (False, True))
def test_gradients_of_the_layer(batch_first, route):
    layout = builders.dense(*LENGTHS, 16, HEADS)
    made, plain = pair(layout, batch_first=batch_first)
    given = inputs(batch_first, SIZE, SIZE, SIZE)
    added = torch.randn(LENGTHS, dtype=DOUBLE)
    y, wanted = made(*given, attn_mask=added)[0], plain(*given, attn_mask=added)[0]
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (*given, *made.parameters()), grad)
    others = torch.autograd.grad(wanted, (*given, *plain.parameters()), grad)
    for one, other in zip(found, others, strict=True):
        assert torch.allclose(one, other)


def test_self_attention_and_inputs_without_a_batch():
    layout = builders.causal(64, 16)
    made, plain = pair(layout)
    x = torch.randn(64, 3, SIZE, dtype=DOUBLE)
    later = torch.ones(64, 64, dtype=torch.bool).triu(1)
    wanted, _ = plain(x, x, x, attn_mask=later)
    assert torch.allclose(made(x, x, x, is_causal=True)[0], wanted)
    assert torch.allclose(made(x, x.clone(), x, is_causal=True, attn_mask=later)[0], wanted)
    values = torch.randn_like(x)  # beside one tensor for queries and keys
    wanted_of_values, _ = plain(x, x, values, attn_mask=later)
    assert torch.allclose(made(x, x, values, is_causal=True)[0], wanted_of_values)
    one = x[:, 1]
    padding = torch.zeros(64, dtype=torch.bool)
    assert torch.allclose(made(one, one, one, padding, is_causal=True)[0], wanted[:, 1])


def test_modes_of_masks(route):
    """Bools are torch's where masks are added, factors where they are multiplied by."""
    layout = builders.dense(*LENGTHS, 16)
    given, kept, some = (
        inputs(False, *[SIZE] * 3),
        torch.rand(LENGTHS) > 0.3,
        torch.rand(2, 96) > 0.3,
    )
    wanted, _ = pair(layout)[1](*given, key_padding_mask=~some, attn_mask=~kept)
    as_floats = torch.zeros(LENGTHS, dtype=DOUBLE).masked_fill(~kept, -torch.inf)
    for options, masks in (
        ({}, (~some, ~kept)),
        ({}, (~some, as_floats)),
        ({"attn_mask_mode": "mul"}, (~some, kept)),
        ({"attn_mask_mode": "mul", "key_padding_mask_mode": "mul"}, (some.double(), kept.double())),
    ):
        torch.manual_seed(1)
        made = BlockSparseMultiheadAttention(SIZE, HEADS, layout, dtype=DOUBLE, **options)
        assert torch.allclose(made(*given, masks[0], attn_mask=masks[1])[0], wanted)


def test_dropout():
    """In training alone, of so many probabilities as it says."""
    made = BlockSparseMultiheadAttention(SIZE, HEADS, layout_of(), dropout=0.25, dtype=DOUBLE)
    given = [t.detach() for t in inputs(False, *[SIZE] * 3)]
    one, other = made(*given)[0], made(*given)[0]
    assert not torch.allclose(one, other)
    made.eval()
    assert torch.equal(made(*given)[0], made(*given)[0])
    q, k, _ = (t.detach() for t in operands())
    ones = torch.eye(LENGTHS[1], dtype=DOUBLE).expand(2, HEADS, -1, -1)
    layout = layout_of()
    weights = block_sparse_attention(q, k, ones, layout)
    dropped = block_sparse_attention(q, k, ones, layout, dropout_p=0.25, seed=5)
    again = block_sparse_attention(q, k, ones, layout, dropout_p=0.25, seed=5)
    assert torch.equal(dropped, again)
    kept = dropped != 0
    assert torch.allclose(dropped[kept], weights[kept] / 0.75)
    assert abs(float(kept.sum() / (weights != 0).sum()) - 0.75) < 0.02
    with pytest.raises(ValueError, match="dropout_p must be a number from 0 to 1"):
        block_sparse_attention(q, k, ones, layout_of(), dropout_p=1.5)


def test_states_load_both_ways():
    made, plain = pair(layout_of())
    torch.manual_seed(2)
    other = nn.MultiheadAttention(SIZE, HEADS, dtype=DOUBLE)
    assert list(made.state_dict()) == list(plain.state_dict())
    assert not any(made.load_state_dict(other.state_dict()))
    assert not any(plain.load_state_dict(made.state_dict()))
    assert torch.equal(plain.in_proj_weight, other.in_proj_weight)


def test_copies_pickles_and_moves():
    layout = layout_of()
    made, _ = pair(layout)
    given = inputs(False, *[SIZE] * 3)
    wanted, _ = made(*given)
    assert made.layout is layout
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(other(*given)[0], wanted) and other.layout is not layout
    half = copy.deepcopy(made).bfloat16()
    y, _ = half(*(t.bfloat16() for t in given))
    assert torch.allclose(y.double(), wanted, atol=0.05)
    empty = BlockSparseMultiheadAttention(SIZE, HEADS, layout, device="meta", dtype=DOUBLE)
    assert empty(*(t.to("meta") for t in given))[0].shape == wanted.shape
    empty.to_empty(device="cpu").load_state_dict(made.state_dict())
    assert torch.equal(empty(*given)[0], wanted)


def test_a_layer_that_is_made_on_meta_has_its_blocks_behind_it():
    x = torch.randn(32, 2, 64)
    for given, block in (
        (lambda: builders.random(32, 32, 16, 0.8), None),
        (lambda: [[1, 0], [1, 1]], 16),
        (lambda: lambda rows, cols: builders.random(rows, cols, 16, 0.8), None),
    ):
        wanted = BlockSparseMultiheadAttention(64, 4, given(), block)
        with torch.device("meta"):
            made = BlockSparseMultiheadAttention(64, 4, given(), block)
        for fill in (
            lambda m, state: m.load_state_dict(state, assign=True),
            lambda m, state: m.to_empty(device="cpu").load_state_dict(state),
        ):
            other = copy.deepcopy(made)
            fill(other, wanted.state_dict())
            assert torch.equal(other(x, x, x)[0], wanted(x, x, x)[0])


def test_layouts_by_masks_and_functions():
    mask = torch.rand(HEADS, 4, 6) > 0.4
    made, _ = pair(Layout(mask, 16))
    given = inputs(False, *[SIZE] * 3)
    wanted, _ = made(*given)
    asked = []

    def of_lengths(*lengths):
        asked.append(lengths)
        return builders.dense(*lengths, 16) if lengths != LENGTHS else Layout(mask, 16)

    for layout, block in ((mask, 16), (of_lengths, None)):
        torch.manual_seed(1)
        other = BlockSparseMultiheadAttention(SIZE, HEADS, layout, block, dtype=DOUBLE)
        assert torch.equal(other(*given)[0], wanted) and torch.equal(other(*given)[0], wanted)
    short = given[0][:32]
    assert other(short, short, short)[0].shape == short.shape
    assert asked == [LENGTHS, (32, 32)] and other.layout is None


def test_inside_of_a_transformer_it_is_called():
    """Torch's layers have a fast way that reads weights past the attention itself."""
    layout = builders.causal(64, 16)
    plain = nn.TransformerEncoderLayer(SIZE, HEADS, 48, 0.0, batch_first=True, dtype=DOUBLE).eval()
    other = copy.deepcopy(plain)
    made = BlockSparseMultiheadAttention(SIZE, HEADS, layout, batch_first=True, dtype=DOUBLE)
    made.load_state_dict(plain.self_attn.state_dict())
    other.self_attn = made.eval()
    x = torch.randn(2, 64, SIZE, dtype=DOUBLE)
    mask = nn.Transformer.generate_square_subsequent_mask(64, dtype=DOUBLE)
    with torch.no_grad():
        wanted = plain(x, mask, is_causal=True)
        assert torch.allclose(other(x, mask, is_causal=True), wanted)
        assert not torch.allclose(other(x), plain(x))  # which sees all


def test_rows_that_nothing_is_left_of(route):
    made, _ = pair(builders.dense(*LENGTHS, 16))
    given = inputs(False, *[SIZE] * 3)
    nothing = torch.ones(2, 96, dtype=torch.bool)
    y, _ = made(*given, key_padding_mask=nothing)
    assert torch.equal(y, made.out_proj.bias.expand_as(y))
    y.sum().backward()
    assert not given[0].grad.any() and not given[0].grad.isnan().any()


def test_compiled_it_is_one_graph(route):
    made, _ = pair(layout_of())
    given = [t.detach() for t in inputs(False, *[SIZE] * 3)]
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.allclose(compiled(*given)[0], made(*given)[0])


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"dropout": 1.0}, ValueError, "dropout must be a number from 0 to 1, without 1, got 1.0"),
        ({"add_bias_kv": True}, NotImplementedError, "add_bias_kv is not supported"),
        ({"add_zero_attn": True}, NotImplementedError, "add_zero_attn is not supported"),
        ({"num_heads": 5}, ValueError, "embed_dim must be a multiple of num_heads, got 32 and 5"),
        ({"embed_dim": 0}, ValueError, "embed_dim must be 1 to"),
        ({"layout": builders.dense(64, 96, 16, 3)}, ValueError, "4 heads, or none, got 3"),
        ({"layout": [[1]]}, ValueError, "block must be given with a mask"),
        ({"layout": 0.1}, TypeError, "layout must be a Layout, a mask of blocks, or .*, got 0.1"),
        ({"block": 16}, ValueError, "block goes with a mask"),
        ({"attn_mask_mode": "max"}, ValueError, "attn_mask_mode must be one of"),
        ({"dropout": "no"}, TypeError, "dropout must be a number from 0 to 1, without 1, got 'no'"),
        ({"precision": "fp8"}, ValueError, "precision"),
    ],
)  # fmt: skip
def test_what_is_refused(options, kind, words):
    given = {"embed_dim": SIZE, "num_heads": HEADS, "layout": builders.dense(64, 96, 16)}
    with pytest.raises(kind, match=words):
        BlockSparseMultiheadAttention(**{**given, **options})


def test_inputs_that_are_refused():
    made, _ = pair(layout_of())
    q, k, v = inputs(False, *[SIZE] * 3)
    for given, words in (
        ((k, k, v), r"lengths \(96, 96\), and the layout is of \(64, 96\)"),
        ((q[..., 1:], k, v), r"query must be \(L, B, 32\) or \(L, 32\)"),
        ((q, k[:, 0], v), "key must be"),
        ((q, k, v[1:]), "key and value must have one length and batch"),
        ((q, k[:, :1], v[:, :1]), "query and key must have one batch"),
    ):
        with pytest.raises(ValueError, match=words):
            made(*given)
    with pytest.raises(TypeError, match="is_causal must be a bool"):
        made(q, k, v, is_causal=1)
    with pytest.raises(TypeError, match=r"layout\(64, 96\) must be a Layout, got int"):
        BlockSparseMultiheadAttention(SIZE, HEADS, lambda *_: 3, dtype=DOUBLE)(q, k, v)
