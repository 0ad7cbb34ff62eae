"""Compressed matrices on the CPU: what they hold, keep, refuse, and become."""

import copy
import gc
import io
import pickle
import warnings
import weakref

import pytest
import torch

from kernlib import KernlibWarning, sparse
from kernlib.families.sparse import layout, matrix
from kernlib.sparse import SparseMatrix, compress
from tests.families.sparse.cases import DTYPES, FORMATS, made, random, same_bits

every_format = pytest.mark.parametrize("format", FORMATS)
SHAPES = [(1, 1), (1, 300), (300, 1), (16, 256), (37, 513), (0, 5), (5, 0), (0, 0)]


@every_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0, 0.03, 0.5, 0.9])
def test_a_matrix_comes_back_as_it_was(density, dtype, format, seed):
    for shape in SHAPES:
        dense = random(*shape, density, DTYPES[dtype])
        w = compress(dense, format)
        assert w.format == format and w.shape == shape and w.dtype == dense.dtype
        assert w.device == dense.device and same_bits(w.to_dense(), dense)
        assert w.nnz == int(dense.count_nonzero())
        assert w.density == (w.nnz / dense.numel() if dense.numel() else 0)
        assert w.nbytes == sum(t.numel() * t.element_size() for t in w.tensors.values())
        assert w.to_dense().is_contiguous()


VIEWS = {
    "turned": lambda t: t.t().contiguous().t(),
    "every other column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "every other row": lambda t: t.repeat_interleave(2, 0)[::2],
    "a part": lambda t: torch.nn.functional.pad(t, (3, 5, 1, 2))[1:-2, 3:-5],
    "recorded": lambda t: t.clone().requires_grad_(),
    "a parameter": torch.nn.Parameter,
    "negated": lambda t: torch.complex(t, -t).conj().imag,
    "csr": lambda t: t.to_sparse_csr(),
    "coo": lambda t: t.to_sparse_coo(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@every_format
@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_and_layouts(view, format, seed):
    dense = random(21, 70)
    given = VIEWS[view](dense)
    w = compress(given, format)
    assert torch.equal(w.to_dense(), dense) and not w.to_dense().requires_grad
    assert not any(t.requires_grad for t in w.tensors.values())


@every_format
def test_an_expanded_row(format, seed):
    dense = random(1, 70).expand(40, 70)
    assert torch.equal(compress(dense, format).to_dense(), dense)


WRONG = {
    "a list": (lambda: compress([[1.0]]), TypeError, "dense must be a tensor"),
    "one dimension": (lambda: compress(torch.ones(3), "bitmap"), ValueError, "must be a matrix"),
    "three dimensions": (lambda: compress(torch.ones(3, 1, 2)), ValueError, r"shape \(3, 1, 2\)"),
    "float64": (lambda: compress(torch.ones(3, 2).double()), ValueError, "float64"),
    "int8": (lambda: compress(torch.ones(3, 2).char()), ValueError, "int8"),
    "format": (lambda: compress(torch.ones(3, 2), "csr"), ValueError, "must be 'auto' or one of"),
    "meta": (
        lambda: compress(torch.ones(3, 2, device="meta"), "bitmap"),
        ValueError,
        "on a CPU",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case):
    call, kind, message = WRONG[case]
    with pytest.raises(kind, match=message):
        call()


def test_a_matrix_moves_to_devices_alone():
    w = compress(torch.eye(40).half())
    assert w.to("cpu") is w and w.to(torch.device("cpu")) is w
    for given in (torch.float32, None, torch.zeros(2), True):
        with pytest.raises(TypeError, match=r"device must be a torch\.device, str or int, got"):
            w.to(given)
    with pytest.raises(ValueError, match="device must be one of torch's, got 'nosuch'"):
        w.to("nosuch")


@every_format
def test_a_dense_matrix_is_plain_inside_transforms(format, seed):
    dense = random(40, 300, 0.4, torch.float16)
    w, found = compress(dense, format), []

    def call(x):
        found.append(w.to_dense())
        return x.sum()

    torch.func.grad(call)(torch.ones(2))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(found[0])
    assert torch.equal(found[0], dense)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_auto_takes_few_bytes(dtype, seed):
    # Of a small matrix the fixed times of the formats decide.
    for density, wanted in [
        (0, FORMATS),
        (0.05, ("u8", "u4")),
        (0.6, ("bitmap", "u4", "u2")),
        (1, ("dense",)),
    ]:
        dense = random(1024, 2048, density, dtype)
        w = compress(dense)
        assert torch.equal(w.to_dense(), dense) and w.format in wanted


def test_a_matrix_that_nobody_has_pruned_warns_once(seed):
    dense = random(64, 96, 1.0, torch.float16)
    with pytest.warns(KernlibWarning, match=r"compress leaves the matrix \(64, 96\)") as found:
        w = compress(dense)
    assert w.format == "dense" and len(found) == 1 and found[0].filename == __file__
    told = str(found[0].message)
    assert "magnitude(dense, density=0.5)" in told and "category=kernlib.KernlibWarning)" in told


def test_what_is_pruned_or_said_to_be_dense_warns_of_nothing(seed):
    dense, half = random(64, 96, 1.0, torch.float16), random(64, 96, 0.5, torch.float16)
    with warnings.catch_warnings():
        warnings.simplefilter("error", KernlibWarning)
        for format in FORMATS:
            compress(dense, format).transpose()
            compress(half, format)
        assert compress(half).format == "dense"  # as that is fastest with such rows
        whole = random(64, 128, 0.5, torch.float16)
        assert compress(whole).format != "dense"
        assert compress(whole, columns=4).format == "dense"
        assert compress(dense, "u2").convert("auto").format == "dense"
        compress(torch.zeros(0, 5))
        csr = dense.to_sparse_csr()
        sparse.from_csr(csr.crow_indices(), csr.col_indices(), csr.values(), (64, 96))


# Nothing of it changes.


def test_it_does_not_change(seed):
    _, w = made(9, 30)
    for name in ("format", "shape", "layout", "anything", *SparseMatrix.__slots__):
        with pytest.raises(AttributeError, match="does not change"):
            setattr(w, name, 1)
        with pytest.raises(AttributeError, match="does not change"):
            delattr(w, name)
    with pytest.raises(TypeError):
        w.tensors["data"] = None
    with pytest.raises(TypeError):
        w.facts["largest"] = 1


# Copies and places.


@every_format
def test_copies_and_pickles(format, seed):
    dense, w = made(20, 70, format, dtype=torch.float16)
    w.transpose()
    buffer = io.BytesIO()
    torch.save(w, buffer)
    buffer.seek(0)
    for other in (
        copy.deepcopy(w),
        pickle.loads(pickle.dumps(w)),
        torch.load(buffer, weights_only=True),
    ):
        assert same_bits(other.to_dense(), dense) and other.nnz == w.nnz
        assert other.layout == w.layout and other.known_transpose() is None
        mine = {t.data_ptr() for t in w.tensors.values()}
        assert not mine & {t.data_ptr() for t in other.tensors.values() if t.numel()}
    assert copy.copy(w) is w
    memo = copy.deepcopy([w, w])
    assert memo[0] is memo[1]


def test_a_state_is_plain_and_loads_safely(seed, tmp_path):
    dense, w = made(20, 300, dtype=torch.bfloat16)
    header, tensors = w.state()
    torch.save({"header": header, **tensors}, tmp_path / "w.pt")
    loaded = torch.load(tmp_path / "w.pt", weights_only=True)
    again = SparseMatrix.from_state(loaded.pop("header"), loaded)
    assert same_bits(again.to_dense(), dense)
    assert (again.nnz, again.format, again.version) == (w.nnz, "bitmap", layout.VERSION)
    assert again.tensors["data"].data_ptr() == loaded["data"].data_ptr()


def test_tensors_inside_a_larger_one_are_aligned(seed):
    """As those of a file that is mapped are."""
    dense, w = made(20, 300)
    header, tensors = w.state()
    moved = {}
    for name, tensor in tensors.items():
        whole = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
        moved[name] = whole[1:].copy_(tensor)
    again = SparseMatrix.from_state(header, moved)
    assert torch.equal(again.to_dense(), dense)
    assert all(t.data_ptr() % 16 == 0 for t in again.tensors.values())


HEADERS = {
    "version": ({"version": 3}, "header is of version 3, this kernlib reads versions 1 and 2"),
    "a list for a format": ({"format": ["csr"]}, "format must be one of"),
    "a list for a dtype": ({"dtype": ["float16"]}, "dtype must be one of"),
    "a size past all memory": ({"shape": [2**40, 2**40]}, "shape must be that of at most"),
    "an endless size": ({"shape": [10**30, 0], "nnz": 0}, "shape must be that of at most"),
    "a fact too many": (
        {"facts": {"largest": 4, "a b": 1}},
        "has the facts largest, got 'a b' too",
    ),
    "a negative size": ({"shape": [20, -1]}, "shape must hold ints of at least 0"),
    "another shape": ({"shape": [50, 300], "nnz": 3}, "offsets"),
    "a fact": ({"facts": {"largest": "4"}}, "facts must hold ints"),
    "nnz": ({"nnz": 6001}, r"nnz must be at most 20 \* 300"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_wrong_header_is_refused(case, seed):
    header, tensors = made(20, 300)[1].state()
    changes, message = HEADERS[case]
    with pytest.raises(ValueError, match=message):
        SparseMatrix.from_state(header | changes, tensors)


def test_a_header_that_lacks_something_is_refused(seed):
    header, tensors = made(20, 300)[1].state()
    for name in header:
        with pytest.raises(ValueError, match=f"lacks {name}"):
            SparseMatrix.from_state({k: v for k, v in header.items() if k != name}, tensors)


@pytest.mark.parametrize("given", [(None, {}), ({}, None), ([], {})], ids=str)
def test_what_is_no_state_is_refused(given, seed):
    header, _ = made(20, 300)[1].state()
    name = "header" if given[1] is not None else "tensors"
    with pytest.raises(TypeError, match=f"{name} must be a dict, .* got"):
        SparseMatrix.from_state(given[0] if name == "header" else header, given[1])


def freed(tensor):
    """As modules that are sharded leave theirs."""
    made = tensor.clone()
    made.untyped_storage().resize_(0)
    return made


TENSORS = {
    "a name that is no text": (lambda t: {1: t["data"]}, ValueError, "data, offsets, got 1"),
    "nested": (
        lambda t: {**t, "data": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])},
        TypeError,
        "data must be a dense tensor, got a nested one",
    ),
    "expanded": (
        lambda t: {**t, "data": torch.zeros(1, dtype=torch.uint8).expand(2**44)},
        ValueError,
        r"data must have memory .* strides \(0,\)",
    ),
    "freed": (
        lambda t: {**t, "data": freed(t["data"])},
        ValueError,
        "data has no memory: its storage",
    ),
    "meta": (lambda t: {k: v.to("meta") for k, v in t.items()}, ValueError, "on meta, without val"),
    "none": (lambda t: {}, ValueError, "data, offsets"),
    "another name": (lambda t: {**t, "extra": t["data"]}, ValueError, "data, offsets"),
    "dtype": (lambda t: {**t, "offsets": t["offsets"].long()}, ValueError, "offsets must have dty"),
    "size": (lambda t: {**t, "data": t["data"][:-16]}, ValueError, "data must have"),
    "device": (lambda t: {**t, "data": t["data"].to("meta")}, ValueError, "on one device"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("case", TENSORS)
def test_wrong_tensors_are_refused(case, seed):
    header, tensors = made(20, 300)[1].state()
    change, kind, message = TENSORS[case]
    with pytest.raises(kind, match=message):
        SparseMatrix.from_state(header, change(tensors))


def test_to(seed):
    dense, w = made(20, 300)
    assert w.to("cpu") is w and w.cpu() is w
    away = w.to("meta")
    assert away.device.type == "meta" and away.shape == w.shape and away.nbytes == w.nbytes
    assert away.to_dense().shape == dense.shape and away.to_dense().is_meta


def test_values_of_a_lazy_view_are_laid_out(seed):
    dense, w = made(20, 70, "dense")
    header, tensors = w.state()
    values = torch._neg_view(-tensors["values"])
    assert same_bits(SparseMatrix.from_state(header, {"values": values}).to_dense(), dense)
    none = torch._efficientzerotensor((20, 70))
    again = SparseMatrix.from_state(header, {"values": none})
    assert again.tensors["values"].data_ptr() and not again.to_dense().any()


# The transpose.


def test_a_transpose_outlives_its_matrix_and_keeps_it_not(seed):
    dense, w = made(21, 70)
    turned, gone = w.transpose(), weakref.ref(w)
    del w
    gc.collect()
    assert gone() is None
    assert torch.equal(turned.transpose().to_dense(), dense)


def test_a_transpose_is_there_before_other_streams_find_it(seed, monkeypatch):
    _, w = made(21, 70)
    found = []
    monkeypatch.setattr(matrix, "settle", lambda w: found.append(w.known_transpose()))
    assert w.transpose() is w.transpose() and found == [None]
