"""States of layouts: what is saved comes back, and nothing that was damaged does."""

import copy
import io
import json
import pickle

import pytest
import torch

from kernlib.families.blocksparse.layout import NAMES, Layout, parse_layout
from kernlib.families.blocksparse.saved import checksum


@pytest.fixture
def layout(seed):
    return Layout(torch.rand(3, 33, 40) < 0.2, (16, 32), capacity=1000)


def same(found: Layout, right: Layout) -> None:
    assert found.text == right.text and found.device == right.device
    for one, other in zip(found.tensors, right.tensors, strict=True):
        assert torch.equal(one, other) and one.dtype == torch.int32
        assert one.numel() == 0 or one.data_ptr() != other.data_ptr()


def resealed(header, tensors):
    """With the checksum that the state has now."""
    block, grid = ("x".join(map(str, header[name])) for name in ("block", "grid"))
    heads = "no heads" if header["heads"] is None else f"{header['heads']} heads"
    text = f"{block} blocks, {grid} grid, {heads}, capacity {header['capacity']}"
    assert parse_layout(text)[3] == header["capacity"]
    return {**header, "checksum": checksum(text, tensors)}, tensors


def test_states_come_back(layout):
    header, tensors = layout.state()
    assert [*tensors] == [*NAMES] and header["version"] == 1
    header = json.loads(json.dumps(header))
    found = Layout.from_state(header, tensors)
    same(found, layout)
    found.update_(~found.mask() & (torch.rand(3, 33, 40) < 0.2))
    assert torch.equal(tensors["rows"], layout.tensors[3])
    layout.update_(torch.zeros(3, 33, 40, dtype=torch.bool))
    assert Layout.from_state(header, tensors).nnz > 0  # a state is a copy


@pytest.mark.parametrize("shape", [(0, 4), (2, 3, 0), (1, 1)])
def test_small_ones_come_back(shape):
    layout = Layout(torch.ones(shape, dtype=torch.bool), 16, capacity=5)
    same(Layout.from_state(*layout.state()), layout)


@pytest.mark.parametrize("way", ["pickle", "torch", "deepcopy"])
def test_copies(way, layout):
    if way == "pickle":
        found = pickle.loads(pickle.dumps(layout))
    elif way == "torch":
        file = io.BytesIO()
        torch.save({"state": layout.state(), "layout": layout}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        same(Layout.from_state(*loaded["state"]), layout)
        found = loaded["layout"]
    else:
        found = copy.deepcopy([layout, layout])
        assert found[0] is found[1]
        found = found[0]
    same(found, layout)


def test_what_was_dropped_is_saved(layout):
    layout.tensors[5][1:] = torch.tensor([4, 2, 1])
    found = Layout.from_state(*layout.state())
    assert found.tensors[5].tolist()[1:] == [4, 2, 1]
    with pytest.raises(ValueError, match="4 for want of capacity, 2 as duplicates, 1 as out"):
        found.check()


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_found(name, layout, seed):
    header, tensors = layout.state()
    at = int(torch.randint(tensors[name].numel(), ()))
    tensors[name].view(-1)[at] ^= 1 << 7
    with pytest.raises(ValueError, match="checksum"):
        Layout.from_state(header, tensors)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1, 1, 12345])
def test_whatever_the_bytes_nothing_is_read_by_them(name, value, layout, seed):
    """Though a checksum says that they are right."""
    header, tensors = layout.state()
    flat, before = tensors[name].view(-1), tensors[name].clone()
    flat[int(torch.randint(flat.numel() if name != "counts" else 1, ()))] = value
    if torch.equal(before, tensors[name]):
        return
    said = "counts must begin" if name in ("counts", "row_bits") else f"{name} is not that"
    if name == "row_bits":
        said = f"{said}|is not that of"
    with pytest.raises(ValueError, match=said):
        Layout.from_state(*resealed(header, tensors))


def test_bits_behind_a_line_are_found():
    header, tensors = Layout(torch.ones(2, 33, dtype=torch.bool), 16).state()
    tensors["row_bits"][1, 1] |= 1 << 5
    with pytest.raises(ValueError, match="row_bits is not that"):
        Layout.from_state(*resealed(header, tensors))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"version": 2}, ValueError, "version 2, this kernlib reads version 1"),
        ({"block": [16, 48]}, ValueError, "block must be two of 16, 32, 64, 128"),
        ({"grid": [33, -40]}, ValueError, "grid must be an int from 0"),
        ({"grid": [33, "40"]}, ValueError, "grid must be an int from 0"),
        ({"grid": [2**16, 2**16]}, ValueError, "at most 2147483647 places"),
        ({"grid": [2**31 - 1, 0]}, ValueError, "at most 2147483647 places"),
        ({"grid": [40, 33]}, ValueError, "row_bits must have shape"),
        ({"heads": 0}, ValueError, "heads must be an int from 1"),
        ({"heads": None}, ValueError, "row_bits must have shape"),
        ({"capacity": 999}, ValueError, "rows must have shape"),
        ({"checksum": 0}, ValueError, "checksum of the header is not"),
        ({"block": [32, 16]}, ValueError, "checksum of the header is not"),
    ],
)
def test_headers_that_are_refused(change, error, said, layout):
    header, tensors = layout.state()
    with pytest.raises(error, match=said):
        Layout.from_state({**header, **change}, tensors)


def test_headers_that_lack_something(layout):
    header, tensors = layout.state()
    for name in header:
        with pytest.raises(ValueError, match=f"header of a Layout lacks {name}"):
            Layout.from_state({k: v for k, v in header.items() if k != name}, tensors)
    with pytest.raises(TypeError, match="header must be a dict"):
        Layout.from_state([1], tensors)
    with pytest.raises(TypeError, match="tensors must be a dict"):
        Layout.from_state(header, layout.tensors)


def cut(t):
    t = t.clone()
    t.untyped_storage().resize_(4)
    return t


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda t: t.long(), ValueError, "rows must have dtype torch.int32"),
        (lambda t: t[:-1], ValueError, r"rows must have shape \(1000,\)"),
        (lambda t: t.to("meta"), ValueError, "rows is on meta and row_bits on cpu"),
        (lambda t: t[:1].expand(1000), ValueError, "rows must have memory for each"),
        (cut, ValueError, "rows has no memory"),
        (lambda t: t.to_sparse(), TypeError, "rows must be a dense tensor"),
    ],
)
def test_tensors_that_are_refused(change, error, said, layout):
    header, tensors = layout.state()
    with pytest.raises(error, match=said):
        Layout.from_state(header, {**tensors, "rows": change(tensors["rows"])})


def test_tensors_that_lack_something(layout):
    header, tensors = layout.state()
    with pytest.raises(ValueError, match="a layout has the tensors row_bits"):
        Layout.from_state(header, {**tensors, "more": tensors["rows"]})
    with pytest.raises(ValueError, match="no values here to look at"):
        Layout.from_state(header, {name: t.to("meta") for name, t in tensors.items()})
    with pytest.raises(ValueError, match="no contents here to save"):
        layout.to("meta").state()
