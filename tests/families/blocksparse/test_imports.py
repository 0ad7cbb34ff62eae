"""Layouts of what others have: BSR tensors and block masks of FlexAttention."""

import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from kernlib.families.blocksparse.layout import Layout

pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta state")


def test_bsr_tensors(seed):
    mask = torch.rand(5, 4) < 0.5
    made = Layout(mask, (16, 32))
    dense = made.to_dense(torch.rand(made.capacity, 16, 32) + 1)
    bsr = dense.to_sparse_bsr((16, 32))
    layout, values = Layout.from_bsr(bsr)
    assert torch.equal(layout.mask(), mask)
    assert torch.equal(layout.to_dense(values), dense)
    crow, col = bsr.crow_indices(), bsr.col_indices()
    lines = [torch.arange(begin, end).flip(0) for begin, end in pairwise(crow.tolist())]
    order = torch.cat(lines)
    given = bsr.values()[order].requires_grad_()
    parts = crow, col[order], given
    mixed = torch.sparse_bsr_tensor(*parts, bsr.shape, check_invariants=False)
    layout, values = Layout.from_bsr(mixed)
    assert torch.equal(layout.to_dense(values), dense)
    values.sum().backward()
    parts = crow.int(), col.int(), bsr.values()
    narrow = torch.sparse_bsr_tensor(*parts, bsr.shape, check_invariants=True)
    assert torch.equal(Layout.from_bsr(narrow)[0].mask(), mask)
    empty = torch.zeros(32, 16).to_sparse_bsr((16, 16))
    assert Layout.from_bsr(empty)[0].capacity == 0


def test_what_bsr_tensors_are_refused(seed):
    with pytest.raises(TypeError, match=r"bsr must be a tensor of layout torch\.sparse_bsr"):
        Layout.from_bsr(torch.ones(32, 32))
    with pytest.raises(ValueError, match="make a layout of each matrix of a batch"):
        Layout.from_bsr(torch.ones(2, 32, 32).to_sparse_bsr((16, 16)))
    with pytest.raises(ValueError, match="block must have rows and columns in"):
        Layout.from_bsr(torch.ones(32, 32).to_sparse_bsr((8, 16)))
    twice = torch.sparse_bsr_tensor(
        torch.tensor([0, 2]), torch.tensor([0, 0]), torch.ones(2, 16, 16), (16, 32),
        check_invariants=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match="name each block once, got 1 duplicates"):
        Layout.from_bsr(twice)


def causal(b, h, q, k):
    return q >= k


def per_head(b, h, q, k):
    return (q >= k) & (k >= h * 64)


def per_batch(b, h, q, k):
    return q >= k + b * 64


@pytest.mark.parametrize("heads", [None, 3])
def test_an_update_by_a_block_mask_says_what_of_it_to_give(heads):
    mask = create_block_mask(causal, 1, heads, 256, 320, "cpu", BLOCK_SIZE=(64, 32))
    layout = Layout.from_block_mask(mask)
    wanted = layout.mask()
    given = "[0, 0]" if heads is None else "[0]"
    with pytest.raises(TypeError, match=re.escape(f"block_mask.to_dense(){given} has its blocks")):
        layout.update_(mask)
    dense = mask.to_dense()[0, 0] if heads is None else mask.to_dense()[0]
    assert layout.update_(torch.zeros_like(dense)).update_(dense).mask().equal(wanted)


def test_block_masks():
    mask = create_block_mask(causal, 1, None, 256, 320, "cpu", BLOCK_SIZE=(64, 32))
    layout = Layout.from_block_mask(mask)
    assert (layout.block, layout.grid, layout.heads) == ((64, 32), (4, 10), None)
    row, col = torch.arange(4)[:, None] * 64 + 63, torch.arange(10)[None] * 32
    assert torch.equal(layout.mask(), col <= row)
    assert mask.full_kv_num_blocks is not None
    mask = create_block_mask(per_head, 3, 2, 256, 256, "cpu", BLOCK_SIZE=64)
    layout = Layout.from_block_mask(mask, capacity=30)
    assert layout.heads == 2 and layout.capacity == 30
    assert torch.equal(layout.mask()[0], torch.ones(4, 4).tril().bool())
    assert not layout.mask()[1, :, 0].any()
    narrow = SimpleNamespace(
        kv_num_blocks=torch.ones(1, 1, 4, dtype=torch.int32),
        kv_indices=torch.arange(4, dtype=torch.int32).view(1, 1, 4, 1),
        full_kv_num_blocks=None, full_kv_indices=None, BLOCK_SIZE=(128, 128),
        seq_lengths=(512, 640),
    )  # fmt: skip
    assert torch.equal(Layout.from_block_mask(narrow).mask(), torch.eye(4, 5).bool())
    narrow.kv_indices.add_(2)
    with pytest.raises(ValueError, match="block_mask must list columns below 5, as its seq_leng"):
        Layout.from_block_mask(narrow)
    mask = create_block_mask(per_batch, 2, None, 128, 128, "cpu", BLOCK_SIZE=64)
    with pytest.raises(ValueError, match=r"the same for all of its batch of 2, .*to_dense\(\)"):
        Layout.from_block_mask(mask)
    each = torch.stack([Layout.from_block_mask(mask[i : i + 1]).mask() for i in range(2)])
    heads = mask.to_dense().expand(2, 3, 2, 2).flatten(0, 1)  # as the message has it
    assert torch.equal(Layout(heads, 64).mask(), each.repeat_interleave(3, 0))
    with pytest.raises(TypeError, match=r"got BlockMask; Layout\.from_block_mask\(block_mask\) is"):
        Layout(mask, 64)
    with pytest.raises(TypeError, match=r"block_mask must be a torch\.nn\.attention"):
        Layout.from_block_mask(torch.ones(2, 2))
    with pytest.raises(ValueError, match="block must have rows and columns in"):
        Layout.from_block_mask(create_block_mask(causal, 1, None, 512, 512, "cpu", BLOCK_SIZE=256))
