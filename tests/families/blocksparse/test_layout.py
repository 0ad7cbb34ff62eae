"""Layouts: contents against the mask they are made of, in place and on a GPU that exists only by
name, whose kernels the host runs; values as matrices and back; and every error."""

import copy
import re

import pytest
import torch

from kernlib.errors import CaptureError
from kernlib.families.blocksparse import builders
from kernlib.families.blocksparse.contents import device, writing
from kernlib.families.blocksparse.layout import NAMES, Layout, parse_layout
from tests.support import fakes
from tests.support.emulation import gpus as emulated
from tests.support.emulation.emulator import kernels_of
from tests.support.emulation.gpus import gpu
from tests.support.fakes import OnSecondGpu

SHAPES = ((33, 65), (3, 5, 7), (2, 40, 33), (1, 1), (0, 4), (2, 3, 0), (1, 70, 2))
MASK = ((1, 0, 1), (0, 0, 1))


def drawn(shape, density=0.3):
    return torch.rand(shape) < density


def check_tensors(layout: Layout, mask: torch.Tensor) -> None:
    """Every tensor by its definition, an entry at a time."""
    heads, (height, width) = layout.heads or 1, layout.grid
    tensors = dict(zip(NAMES, layout.tensors, strict=True))
    for tensor in layout.tensors:
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert tensor.data_ptr() % 16 == 0 and tensor.device == layout.device
    tensors = {name: t.as_subclass(torch.Tensor) for name, t in tensors.items()}
    places = mask.view(heads, height, width).nonzero().tolist()
    slots = {tuple(place): slot for slot, place in enumerate(places)}
    free = layout.capacity - len(places)
    assert tensors["counts"].tolist() == [len(places), 0, 0, 0]
    assert tensors["rows"].tolist() == [h * height + r for h, r, _ in places] + [-1] * free
    assert tensors["cols"].tolist() == [c for _, _, c in places] + [-1] * free
    bits, ranks, turned = (tensors[name].tolist() for name in NAMES[:3])
    for h in range(heads):
        for r in range(height):
            for c in range(width):
                word, below = bits[h * height + r][c // 32], (1 << c % 32) - 1
                is_stored = (h, r, c) in slots
                assert (word >> c % 32 & 1) == is_stored
                assert (turned[h * width + c][r // 32] >> r % 32 & 1) == is_stored
                slot = ranks[h * height + r][c // 32] + (word & below).bit_count()
                assert not is_stored or slot == slots[h, r, c]


@pytest.mark.parametrize("shape", SHAPES)
def test_tensors_are_those_of_the_mask(shape, seed):
    mask = drawn(shape)
    check_tensors(Layout(mask, 16), mask)
    check_tensors(Layout(mask.int(), 16, capacity=int(mask.sum()) + 5), mask)


def test_what_a_layout_says():
    layout = Layout([MASK] * 4, (64, 32), capacity=20)
    assert (layout.block, layout.grid, layout.heads) == ((64, 32), (2, 3), 4)
    assert (layout.shape, layout.capacity, layout.nnz) == ((128, 96), 20, 12)
    assert layout.density == 0.5 and layout.device == torch.device("cpu")
    assert layout.text == "64x32 blocks, 2x3 grid, 4 heads, capacity 20"
    assert parse_layout(layout.text) == ((64, 32), (2, 3), 4, 20)
    assert repr(layout) == f"Layout({layout.text}, device='cpu')"
    assert layout.nbytes == 4 * (8 + 8 + 12 + 20 + 20 + 4)
    assert layout.key == (layout.text, layout.device) and hash(layout.key)
    assert layout.addresses == [t.data_ptr() for t in layout.tensors]
    assert layout.sizes == (64, 32, 2, 3, 4, 20)
    assert torch.equal(layout.mask(), torch.tensor([MASK] * 4, dtype=torch.bool))
    one = Layout(MASK, 16)
    assert one.text == "16x16 blocks, 2x3 grid, no heads, capacity 3"
    assert parse_layout(one.text)[2] is None and one.heads is None
    assert Layout([[]], 16).density == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_values_become_matrices_and_blocks_again(shape, seed):
    mask = drawn(shape)
    layout = Layout(mask, (16, 32), capacity=int(mask.sum()) + 3)
    values = torch.rand(2, layout.capacity, 16, 32) + 1  # none of them 0
    values[:, layout.nnz :] = float("nan")  # which nothing reads
    dense = layout.to_dense(values)
    assert dense.shape == (2, *mask.shape[:-2], *layout.shape)
    elements = mask.repeat_interleave(16, -2).repeat_interleave(32, -1)
    assert torch.equal(dense[0] != 0, elements)
    assert not dense.isnan().any()
    blocks = layout.to_blocks(dense + 0 * ~elements)
    assert torch.equal(blocks[:, : layout.nnz], values[:, : layout.nnz])
    assert not blocks[:, layout.nnz :].any()
    assert torch.equal(layout.to_dense(values[0]), dense[0])


def test_values_and_matrices_have_gradients(seed):
    mask = drawn((2, 3, 2), 0.5)
    layout = Layout(mask, 16, capacity=int(mask.sum()) + 2)
    values = torch.randn(layout.capacity, 16, 16, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(2, 48, 32, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad((layout.to_dense(values) * weights).sum(), values)
    assert torch.equal(gradient, layout.to_blocks(weights.detach()))
    (gradient,) = torch.autograd.grad((layout.to_blocks(weights) * values).sum(), weights)
    assert torch.equal(gradient, layout.to_dense(values.detach()))
    one = torch.randn(1, 48, 32, requires_grad=True)
    layout.to_blocks(one).sum().backward()  # one matrix for all heads
    counted = mask.sum(0, keepdim=True).repeat_interleave(16, 1).repeat_interleave(16, 2)
    assert torch.equal(one.grad, counted.float())
    found = torch.vmap(layout.to_dense)(torch.stack((values, 2 * values)))
    assert torch.equal(found[1], 2 * layout.to_dense(values))
    none = torch.randn(1, 0, 32, requires_grad=True)  # of a grid without rows too
    Layout(mask[:, :0], 16, capacity=2).to_blocks(none).sum().backward()
    assert none.grad.shape == none.shape


@pytest.mark.parametrize("shape", SHAPES)
def test_lines_and_the_transpose(shape, seed):
    mask = drawn(shape)
    layout = Layout(mask, (16, 32), capacity=int(mask.sum()) + 4)
    lines = mask.flatten(0, -2).sum(1).cumsum(0).tolist()
    assert layout.row_starts.tolist() == [0, *lines]
    columns = mask.mT.flatten(0, -2).sum(1).cumsum(0).tolist()
    assert layout.col_starts.tolist() == [0, *columns]
    turned = layout.transpose()
    check_tensors(turned, mask.mT.contiguous())
    assert turned.block == (32, 16) and turned.capacity == layout.capacity
    values = torch.randn(layout.capacity, 16, 32)
    found = turned.to_dense(values[layout.col_order.long()].mT)
    assert torch.equal(found, layout.to_dense(values).mT)
    assert sorted(layout.col_order.tolist()) == [*range(layout.capacity)]
    starts = (layout.row_starts, layout.col_starts, layout.col_order)
    assert all(t.dtype == torch.int32 for t in starts)


def test_updates_are_in_place_and_counted(seed):
    layout = Layout(drawn((2, 5, 40)), 16, capacity=200)
    tensors, addresses = layout.tensors, layout.addresses
    versions = [t._version for t in tensors]
    other = drawn((2, 5, 40), 0.4)
    assert layout.update_(other) is layout
    check_tensors(layout, other)
    assert layout.tensors is tensors and addresses == [t.data_ptr() for t in tensors]
    assert all(t._version > n for t, n in zip(tensors, versions, strict=True))
    layout.update_(other.int().tolist())
    with pytest.raises(ValueError, match="mask has 400 blocks, more than the layout's capacity"):
        layout.update_(torch.ones(2, 5, 40, dtype=torch.bool))
    check_tensors(layout, other)
    layout.check()


def test_updates_by_indices(seed):
    mask = drawn((3, 7, 9))
    heads, rows, cols = mask.nonzero()[torch.randperm(int(mask.sum()))].unbind(1)
    layout = Layout(torch.zeros(3, 7, 9, dtype=torch.int), 16, capacity=150)
    layout.update_indices_(rows, cols.int(), heads)
    check_tensors(layout, mask)
    layout.update_indices_([], [], [])
    check_tensors(layout, torch.zeros_like(mask))
    made = Layout.from_indices(rows.tolist(), cols, (7, 9), 16, heads, n_heads=3)
    check_tensors(made, mask)
    assert made.capacity == len(rows)
    made = Layout.from_indices([1, 0], [2, 2], (2, 3), (16, 32))
    assert made.heads is None and made.mask().int().tolist() == [[0, 0, 1], [0, 0, 1]]


def test_places():
    layout = Layout(MASK, 16)
    assert layout.to("cpu") is layout and layout.cpu() is layout
    away = layout.to("meta")
    assert away.text == layout.text and away.device.type == "meta"
    assert [t.shape for t in away.tensors] == [t.shape for t in layout.tensors]
    assert all(t.is_meta for t in away.tensors)
    values = torch.empty(5, 3, 16, 16, device="meta")
    assert away.to_dense(values).shape == (5, 32, 48)
    assert away.to_blocks(torch.empty(32, 48, device="meta")).shape == (3, 16, 16)
    assert away.transpose().grid == (3, 2) and away.mask().shape == (2, 3)
    assert away.update_(torch.ones(2, 3, dtype=torch.bool)) is away
    made = Layout(torch.empty(4, 6, dtype=torch.bool, device="meta"), 16, capacity=9)
    assert made.device.type == "meta" and made.tensors[3].shape == (9,)
    assert Layout(MASK, 16, device="meta").capacity == 3
    with pytest.raises(ValueError, match="capacity must be given where mask has no values"):
        Layout(torch.empty(4, 6, dtype=torch.bool, device="meta"), 16)
    with pytest.raises(ValueError, match="no contents here to count"):
        _ = away.nnz
    with pytest.raises(ValueError, match="a layout on meta has no contents to copy"):
        away.cpu()


def test_a_layout_that_is_made_on_meta_has_its_blocks_elsewhere():
    for make in (
        lambda: Layout(MASK, 16, capacity=5),
        lambda: Layout([MASK, MASK], 16),
        lambda: Layout.from_indices([1, 0], [2, 2], (2, 3), 16),
        lambda: builders.random(64, 96, 16, 0.4, heads=2, seed=3),
        lambda: builders.fixed(64, 16, 32),
    ):
        wanted = make()
        with torch.device("meta"):
            layout = make()
        assert layout.device.type == "meta"
        for one in (layout, copy.copy(layout), copy.deepcopy(layout)):
            there = one.to("cpu")
            assert there.text == wanted.text and torch.equal(there.mask(), wanted.mask())
        layout.update_(torch.zeros(wanted.mask().shape, dtype=torch.bool))
        with pytest.raises(ValueError, match="no contents to copy"):
            layout.to("cpu")


def test_inference_mode_makes_layouts_that_can_be_written():
    with torch.inference_mode():
        layout = Layout(MASK, 16)
    layout.update_(torch.tensor(MASK).flip(0))
    assert layout.mask().int().tolist() == [[0, 0, 1], [1, 0, 1]]
    with torch.inference_mode():
        layout.update_(MASK)
    assert layout.mask().int().tolist() == [list(row) for row in MASK]


BAD = {
    "no mask": ((None, 16), {}, TypeError, "mask must be a tensor"),
    "a float mask": ((torch.ones(2, 2), 16), {}, TypeError, "mask must hold bools or ints"),
    "one dimension": ((torch.ones(2, dtype=int), 16), {}, ValueError, "mask must have shape"),
    "no heads": ((torch.ones(0, 2, 2, dtype=int), 16), {}, ValueError, "at least one head"),
    "a sparse mask": ((torch.ones(2, 2, dtype=int).to_sparse(), 16), {}, TypeError, "be a dense"),
    "a block of 24": ((MASK, 24), {}, ValueError, "block must have rows and columns in 16, 32"),
    "a block of True": ((MASK, True), {}, TypeError, "block must be an int or two"),
    "too little room": ((MASK, 16, 2), {}, ValueError, "mask has 3 blocks, more than"),
    "negative room": ((MASK, 16, -1), {}, ValueError, "capacity must be 0 to"),
    "no device": ((MASK, 16), {"device": "here"}, ValueError, "device must be one of torch's"),
    "a dtype": ((MASK, 16), {"device": torch.float16}, TypeError, "device must be a torch.device"),
    "another device": ((MASK, 16), {"device": "xla"}, ValueError, "device must be a CPU, a CUDA"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case):
    given, named, error, said = BAD[case]
    with pytest.raises(error, match=re.escape(said)):
        Layout(*given, **named)


def test_more_places_than_an_int_counts_are_refused():
    mask = torch.zeros(1, dtype=torch.bool).expand(2**16, 2**15)
    with pytest.raises(ValueError, match="at most 2147483647 places for blocks"):
        Layout(mask, 16, capacity=4)
    with pytest.raises(ValueError, match="at most 2147483647 places for blocks"):
        Layout.from_indices([0], [0], (2**16, 2**16), 16)


BAD_INDICES = {
    "a row behind": (([2], [0]), {}, ValueError, "rows must be 0 to 1, got 2"),
    "a negative column": (([0], [-1]), {}, ValueError, "cols must be 0 to 2, got -1"),
    "a head behind": (([0], [0], [4]), {}, ValueError, "heads must be 0 to 3, got 4"),
    "twice": (([0, 1, 0], [0, 0, 0]), {}, ValueError, "name each block once, got 1 duplicates"),
    "lengths": (([0, 1], [0]), {}, ValueError, "cols must have one index for each block"),
    "floats": (([0.0], [0]), {}, TypeError, "rows must hold ints"),
    "two dimensions": (([[0]], [[0]]), {}, ValueError, "rows must have one index for each block"),
    "too many": (([0, 1], [0, 0]), {"capacity": 1}, ValueError, "more than the layout's capacity"),
}


@pytest.mark.parametrize("case", BAD_INDICES)
def test_what_indices_are_refused(case):
    given, named, error, said = BAD_INDICES[case]
    heads = {"n_heads": 4} if len(given) == 3 else {}
    with pytest.raises(error, match=re.escape(said)):
        Layout.from_indices(*given[:2], (2, 3), 16, *given[2:], **heads, **named)
    if not named:
        layout = Layout(torch.zeros((4,) * len(heads) + (2, 3), dtype=torch.bool), 16, 9)
        with pytest.raises(error, match=re.escape(said)):
            layout.update_indices_(*given)


def test_what_else_is_refused():
    layout = Layout(MASK, 16)
    with pytest.raises(ValueError, match=r"mask must have the layout's shape \(2, 3\)"):
        layout.update_(torch.ones(1, 2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="this has no heads"):
        layout.update_indices_([0], [0], [0])
    with pytest.raises(ValueError, match="heads and n_heads must be given together, got no heads"):
        Layout.from_indices([0], [0], (2, 3), 16, n_heads=2)
    with pytest.raises(TypeError, match="grid must be two ints"):
        Layout.from_indices([0], [0], 3, 16)
    with pytest.raises(ValueError, match=r"values must have shape \(..., 3, 16, 16\)"):
        layout.to_dense(torch.ones(4, 16, 16))
    with pytest.raises(ValueError, match=r"dense must have shape \(..., 32, 48\)"):
        layout.to_blocks(torch.ones(48, 32))
    with pytest.raises(ValueError, match="values is on meta and the layout on cpu"):
        layout.to_dense(torch.ones(3, 16, 16, device="meta"))
    with pytest.raises(ValueError, match="mask is on cuda:1 and the layout on cpu"):
        layout.update_(torch.ones(2, 3, dtype=torch.bool).as_subclass(OnSecondGpu))
    with pytest.raises(AttributeError, match="capacity cannot be set"):
        layout.capacity = 4
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del layout.block
    with pytest.raises(RuntimeError, match=r"mask is inside a transform of torch\.func"):
        torch.vmap(lambda m: Layout(m, 16, 3).to_dense(torch.ones(3, 16, 16)))(
            torch.ones(2, 2, 3, dtype=torch.bool)
        )


@pytest.fixture
def gpus(monkeypatch, tmp_path_factory):
    """GPUs whose kernels the host runs."""
    fakes.forget()
    yield emulated.install(monkeypatch, kernels_of(tmp_path_factory), writing, device)
    fakes.forget()


@pytest.mark.emulated
def test_masks_of_a_gpu(gpus, seed):
    mask = drawn((2, 33, 65))
    layout = Layout(gpu(mask), 16, capacity=int(mask.sum()) + 9)
    assert layout.device == torch.device("cuda", 0) and len(gpus.launches) == 4
    check_tensors(layout, mask)
    versions, other = [t._version for t in layout.tensors], drawn((2, 33, 65), 0.2)
    layout.update_(gpu(other.int()))
    check_tensors(layout, other)
    assert all(t._version > n for t, n in zip(layout.tensors, versions, strict=True))
    assert len(gpus.loads) == 4
    layout.update_(other.mT.contiguous().mT)  # of the host
    check_tensors(layout, other)
    assert len(gpus.launches) == 8


@pytest.mark.emulated
def test_what_a_gpu_drops_is_counted(gpus):
    layout = Layout(gpu(torch.ones(3, 40, dtype=torch.bool)), 16, capacity=50)
    assert layout.nnz == 50
    said = r"blocks were dropped \(70 for want of capacity\), 50 are stored"
    with pytest.raises(ValueError, match=said):
        layout.check()
    tensors = [t.as_subclass(torch.Tensor) for t in layout.tensors]
    kept = Layout.from_layout(layout.text, tensors).mask()
    assert kept.flatten().tolist() == [True] * 50 + [False] * 70
    layout.update_(gpu(torch.eye(40, dtype=torch.bool)[:3]))
    layout.check()
    rows, cols = (gpu(torch.tensor(part)) for part in ([0, 5, 1, 0], [39, 0, 1, 39]))
    layout.update_indices_(rows, cols)
    assert layout.tensors[5].tolist() == [2, 0, 1, 1]
    with pytest.raises(ValueError, match="1 as duplicates, 1 as out of range"):
        layout.check()


@pytest.mark.few(1)
@pytest.mark.emulated
def test_indices_of_a_gpu(gpus, seed):
    mask = drawn((3, 7, 40))
    heads, rows, cols = (gpu(part.contiguous()) for part in mask.nonzero().unbind(1))
    made = Layout.from_indices(rows, cols.int(), (7, 40), 16, heads, n_heads=3)
    check_tensors(made, mask)
    made.update_indices_(rows[:0], cols[:0], heads[:0])
    check_tensors(made, torch.zeros_like(mask))


@pytest.mark.emulated
def test_what_waits_is_refused_while_a_graph_is_captured(gpus):
    mask = gpu(torch.tensor(MASK, dtype=torch.bool))
    layout = Layout(mask, 16)
    gpus.capturing = True
    for call in (
        lambda: layout.nnz,
        layout.check,
        layout.state,
        lambda: Layout(mask, 16),
        lambda: layout.update_(torch.ones(2, 3, dtype=torch.bool)),
    ):
        with pytest.raises(CaptureError, match="waits for the device"):
            call()
