"""Tensors in the place of those that a matrix was made of: other facts, other places, none at all
that fit."""

import copy
import io
import pickle

import pytest
import torch
from torch.func import functional_call

from kernlib.errors import CaptureError
from kernlib.families.sparse import fitted as sparse_fitted
from kernlib.families.sparse import tensors as sparse_tensors
from kernlib.families.sparse.fitted import fitted
from kernlib.families.sparse.formats import bitmap
from kernlib.families.sparse.layout import format_of
from kernlib.families.sparse.packed import packed, unpacked
from kernlib.families.sparse.tensors import state_of
from kernlib.nn import SparseLinear, indexed, sparse_holding, sparse_linear, unsized
from kernlib.sparse import SparseMatrix, compress, matmul
from tests.families.sparse import fake_kernels
from tests.families.sparse.cases import FORMATS, QUANTISED, made, random
from tests.support import fakes
from tests.support.fakes import OnGpu

every_format = pytest.mark.parametrize("format", FORMATS)


@pytest.fixture
def gpus(monkeypatch):
    """GPUs by name; what would be looked at on one is on the host."""
    fakes.forget()
    inner = bitmap.check

    def check(tensors, *rest):
        inner({name: fake_kernels.host(t) for name, t in tensors.items()}, *rest)

    monkeypatch.setattr(bitmap, "check", check)
    yield fake_kernels.install(monkeypatch)
    fakes.forget()


@pytest.fixture
def checks(monkeypatch):
    """The formats whose tensors were looked at, in order."""
    found, inner = [], sparse_tensors.measured
    for module in (sparse_fitted, sparse_tensors):
        monkeypatch.setattr(module, "measured", lambda *a: found.append(a[0]) or inner(*a))
    return found


def layer(density=0.2, format="bitmap", rows=70, cols=600):
    dense = random(rows, cols, density)
    return dense, SparseLinear.from_matrix(compress(dense, format))


def buffers(other):
    """The tensors of a layer's matrix, by their names in the layer."""
    return {f"weight_{n}": t.clone() for n, t in other.matrix.tensors.items()}


def on_gpu(w):
    """A layer of a matrix that calls itself one of a GPU, where none can be made."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (sparse_linear, sparse_holding, unsized, indexed):
            patch.setattr(module, "torch", fakes.Torch())
        return SparseLinear.from_matrix(w)


# functional_call.


@every_format
def test_the_buffers_of_another_matrix_have_facts_of_their_own(format, checks, seed):
    (_, mine), (dense, other), x = layer(0.2, format), layer(0.7, format), torch.randn(3, 600)
    given = buffers(other)
    for _ in range(3):
        y = functional_call(mine, given, (x,))
        torch.testing.assert_close(y, x @ dense.t(), rtol=1e-4, atol=1e-4)
    assert len(checks) == 1  # and known from then on
    assert fitted(mine.matrix.layout, list(given.values())).facts == other.matrix.facts
    assert mine.matrix.facts != other.matrix.facts or format in ("u8", "u4", "u2", "dense")


def test_kernels_are_those_of_the_facts(gpus, seed):
    """Shared memory is divided by the largest chunk, of which copies take as much as there is."""
    found = []
    for density in (0.1, 0.9):
        dense, w = made(40, 600, density=density, dtype=torch.float16)
        found.append((dense, fake_kernels.on_gpu(w, gpus, dense)))
    mine, (dense, other) = on_gpu(found[0][1]), found[1]
    given = {f"weight_{name}": t for name, t in other.tensors.items()}
    gpus.lowering.matrices[given["weight_data"].data_ptr()] = dense
    functional_call(mine, given, (torch.randn(2, 600).half().as_subclass(OnGpu),))
    assert gpus.lowering.problems[-1].fact("largest") == other.facts["largest"]
    assert other.facts["largest"] > mine.matrix.facts["largest"]


def test_writes_to_other_buffers_are_checked_again(checks, seed):
    (_, mine), (_, other), x = layer(), layer(0.7), torch.randn(3, 600)
    given = buffers(other)
    functional_call(mine, given, (x,))
    given["weight_data"].add_(0)
    functional_call(mine, given, (x,))
    assert len(checks) == 2
    given["weight_offsets"][3] = 2**30
    with pytest.raises(ValueError, match=r"no matrix of kind 'bitmap 70x600 float32': offsets"):
        functional_call(mine, given, (x,))


def test_views_of_a_flat_buffer_are_read_from_a_copy(gpus, seed, monkeypatch):
    dense, w = made(40, 600, dtype=torch.float16)
    mine, taken = on_gpu(fake_kernels.on_gpu(w, gpus, dense)), []
    monkeypatch.setattr(sparse_linear, "run_kernel", lambda _, w, x: taken.append(w))
    for shift in (1, 2, 7, 16):
        given = {}
        for name, t in w.tensors.items():
            flat = torch.zeros(t.numel() + shift, dtype=t.dtype)
            given[f"weight_{name}"] = flat[shift:].copy_(t).as_subclass(OnGpu)
        for _ in range(2):
            functional_call(mine, given, (torch.ones(2, 600).half().as_subclass(OnGpu),))
            found = taken.pop().operands
            assert all(t.data_ptr() % 16 == 0 for t in found)
            assert all(map(torch.equal, found, w.operands))


WRONG = {
    "size": (lambda t: {"weight_data": t["weight_data"][:-16]}, ValueError, "data must have"),
    "dtype": (lambda t: {"weight_offsets": t["weight_offsets"].long()}, ValueError, "offsets must"),
    "shape": (lambda t: {"weight_offsets": t["weight_offsets"][:-1]}, ValueError, "offsets must"),
    "device": (lambda t: {"weight_data": t["weight_data"].to("meta")}, ValueError, "one device"),
    "none": (lambda t: {"weight_data": None}, TypeError, "weight_data must be a tensor"),
    "sparse": (lambda t: {"weight_data": t["weight_data"].to_sparse()}, TypeError, "dense tensor"),
    "numbers": (lambda t: {"weight_offsets": torch.ones(())}, ValueError, "no matrix of kind"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_such_matrix_is_refused(case, seed):
    (_, mine), (_, other) = layer(), layer(0.7)
    change, kind, message = WRONG[case]
    given = {**buffers(other), **change(buffers(other))}
    with pytest.raises(kind, match=message):
        functional_call(mine, given, (torch.ones(2, 600),))


def test_the_matrix_is_a_constant_to_torch_func(seed):
    (_, mine), (dense, other), x = layer(), layer(0.7, "bitmap"), torch.randn(3, 600)

    def loss(x, given):
        return functional_call(mine, given, (x,)).sum()

    found = torch.func.grad(loss)(x, buffers(other))
    torch.testing.assert_close(found, dense.sum(0).expand(3, 600), rtol=1e-4, atol=1e-4)
    (found,) = torch.func.jacrev(lambda x: (loss(x, buffers(other)),))(x)
    torch.testing.assert_close(found, dense.sum(0).expand(3, 600), rtol=1e-4, atol=1e-4)
    stacked = {name: torch.stack([t, t]) for name, t in buffers(mine).items()}
    with pytest.raises(RuntimeError, match="maps the input of a SparseLinear, not its weight_data"):
        torch.vmap(lambda given: functional_call(mine, given, (x,)))(stacked)


# Programs that were recorded.


@every_format
def test_a_compiled_layer_checks_no_tensor_of_its_own(format, checks, seed):
    torch._dynamo.reset()
    dense, mine = layer(0.3, format)
    mine.matrix.transpose()
    call = torch.compile(mine, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 600, requires_grad=True)
    for _ in range(2):
        (found,) = torch.autograd.grad(call(x).sum(), x)
        torch.testing.assert_close(found, dense.sum(0).expand(3, 600), rtol=1e-4, atol=1e-4)
    mine.matrix.operands[0].add_(0)
    call(x)
    assert not checks
    torch._dynamo.reset()


def test_a_compiled_call_checks_what_it_is_given(checks, seed):
    torch._dynamo.reset()
    _, mine = layer(0.2)
    call = torch.compile(lambda given, x: functional_call(mine, given, (x,)), backend="aot_eager")
    x = torch.randn(3, 600)
    for density in (0.4, 0.7):
        dense, other = layer(density)
        given = buffers(other)
        for _ in range(2):
            torch.testing.assert_close(call(given, x), x @ dense.t(), rtol=1e-4, atol=1e-4)
    assert len(checks) == 2
    given["weight_offsets"] = given["weight_offsets"].clone()
    given["weight_offsets"][3] = 2**30
    with pytest.raises(ValueError, match="no matrix of kind"):
        call(given, x)
    torch._dynamo.reset()


def test_a_capture_takes_only_what_was_checked(gpus, seed):
    dense, w = made(40, 600, dtype=torch.float16)
    w = fake_kernels.on_gpu(w, gpus, dense)
    w.operands[0].__class__.is_cuda = property(lambda self: True)
    try:
        tensors = tuple(t.clone().as_subclass(OnGpu) for t in w.operands)
        gpus.capturing = True
        with pytest.raises(CaptureError, match="make the same call once before the capture"):
            fitted(w.layout, tensors)
        gpus.capturing = False
        fitted(w.layout, tensors)
        gpus.capturing = True
        assert fitted(w.layout, tensors).layout == w.layout
    finally:
        del w.operands[0].__class__.is_cuda


# Marks.


@every_format
def test_a_program_finds_the_matrix_of_its_tensors(format, checks, seed):
    dense, w = made(40, 70, format)
    others = [copy.deepcopy(w), w.to("meta"), SparseMatrix.from_state(*w.state()), w.transpose()]
    for other in (w, *others):
        assert fitted(other.layout, [*other.operands]) is other
    taken = fitted(w.layout, [*others[0].operands])
    assert taken is others[0] and taken is not w
    for alias in (torch.Tensor.detach, copy.copy, torch.Tensor.view_as):
        same = [t.view_as(t) if alias is torch.Tensor.view_as else alias(t) for t in w.operands]
        assert fitted(w.layout, same).to_dense().equal(dense)
        assert state_of(fitted(w.layout, same)) == state_of(w) and not checks
    layout, operands = w.layout, w.operands
    del w
    found = fitted(layout, operands)  # which knows by their marks that they fit
    assert torch.equal(found.to_dense(), dense) and not checks


@every_format
def test_which_tensors_are_known(format, checks, seed):
    dense, w = made(40, 70, format)
    whole = [w, copy.deepcopy(w), w.to("meta"), SparseMatrix.from_state(*w.state())]
    for other in whole:
        assert fitted(w.layout, other.operands).operands == other.operands
    assert not checks
    if len(w.operands) > 1:
        mixed = (w.operands[0], *whole[1].operands[1:])
        assert torch.equal(fitted(w.layout, mixed).to_dense(), dense) and len(checks) == 1
    with torch.inference_mode():
        given = tuple(t.clone() for t in w.operands)
    del checks[:]
    for _ in range(2):  # whose writes are not counted, so that each call looks at them
        assert torch.equal(fitted(w.layout, given).to_dense(), dense)
    assert len(checks) == 2


# Tensors that were moved.


def test_tensors_that_were_moved_are_looked_at(gpus, checks, seed):
    dense, w = made(40, 600, dtype=torch.float16)
    w, x = fake_kernels.on_gpu(w, gpus, dense), torch.randn(2, 600).half().as_subclass(OnGpu)
    matmul(w, x)
    assert not checks
    data = w.operands[0]
    data.data = data.clone()
    gpus.lowering.matrices[data.data_ptr()] = dense
    for _ in range(2):
        matmul(w, x)
    assert len(checks) == 1
    data.data = torch.cat((data[:1], data))[1:].as_subclass(OnGpu)
    for many in (x, torch.randn(20, 600).half().as_subclass(OnGpu)):
        with pytest.raises(ValueError, match=r"w\.tensors\['data'\] must be contiguous and begin"):
            matmul(w, many)
    other = compress(random(40, 600, 0.9, torch.float16), "bitmap")
    for to, given in zip(w.operands, other.operands, strict=True):
        to.data = given.clone().as_subclass(OnGpu)
    with pytest.raises(ValueError, match=r"those of another matrix: \{'largest': \d+\} for"):
        matmul(w, x)


def test_formats_measure_all_their_facts(seed):
    for format in FORMATS:
        dense, w = made(40, 600, format)
        found = sparse_tensors.measured(format, w.tensors)
        assert {**w.facts, **found} == w.facts
        format_of(format).check(w.tensors, w.facts, w.shape, dense.dtype)


def test_a_compiled_gradient_follows_writes(seed):
    """By the transpose, which is that of what the matrix was: the dense matrix then."""
    torch._dynamo.reset()
    kept = torch.rand(50, 300) < 0.3
    dense = torch.where(kept, torch.randn(50, 300), torch.zeros(()))
    w = compress(dense, "u4")
    w.transpose()
    call = torch.compile(lambda x: matmul(w, x), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 300, requires_grad=True)
    for times in (1, 2, 4):
        (grad,) = torch.autograd.grad(call(x).sum(), x)
        torch.testing.assert_close(grad, times * dense.sum(0).expand(4, 300))
        for to, t in zip(w.operands, compress(2 * times * dense, "u4").operands, strict=True):
            to.copy_(t)
    torch._dynamo.reset()


@pytest.mark.parametrize("format", ["u8", "u4", "u2"])
def test_what_is_saved_is_as_large_as_the_matrix(format, seed):
    """Though its tensors lie in one, of which each is a view."""
    kept = torch.rand(256, 1024) < 0.3
    w = compress(torch.where(kept, torch.randn(256, 1024), torch.zeros(())), format)
    layer = SparseLinear.from_matrix(w)
    for value in (w, w.state(), layer, layer.state_dict()):
        for save in (torch.save, lambda value, file: file.write(pickle.dumps(value))):
            file = io.BytesIO()
            save(value, file)
            assert file.tell() < w.nbytes + 8000
    file.seek(0)
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(again.to_dense(), w.to_dense())


@pytest.mark.parametrize("format", ["u8", "u4", "u2"])
def test_a_damaged_pickle_of_a_matrix_is_refused(format):
    restore, (header, joined) = compress(torch.eye(40, 3000), format).__reduce__()
    assert torch.equal(restore(header, joined).to_dense(), torch.eye(40, 3000))
    for facts in ({}, {"width": 0}, {"width": 3008, "parts": 33}, {"width": 16, "parts": 1}):
        with pytest.raises(ValueError):
            restore({**header, "facts": facts}, joined)
    for other in (joined[:-16], joined[:40], joined.float(), joined[None]):
        with pytest.raises(ValueError):
            restore(header, other)
    with pytest.raises(ValueError, match="does not lie in one tensor"):
        restore({**header, "format": "bitmap", "facts": {"largest": 16}}, joined)


@pytest.mark.parametrize("format", [*FORMATS, *QUANTISED])
def test_a_matrix_in_packed_bytes_is_saved_as_large_as_it_is(format, seed):
    """Though its tensors are views of these in several dtypes."""
    other = unpacked(packed(compress(random(64, 512, 0.3), format)))
    for w in (other, other.transpose()):
        files = io.BytesIO(), io.BytesIO()
        torch.save(w, files[0])
        torch.save(w.state(), files[1])
        assert max(file.tell() for file in files) < w.nbytes + 8000
        for file in files:
            file.seek(0)
        again = [
            torch.load(files[0], weights_only=True),
            SparseMatrix.from_state(*torch.load(files[1], weights_only=True)),
            pickle.loads(pickle.dumps(w)),
            copy.deepcopy(w),
        ]
        for other in again:
            assert other.layout == w.layout and other.nnz == w.nnz
            assert torch.equal(other.to_dense(), w.to_dense())
            assert not {t.data_ptr() for t in other.operands} & {t.data_ptr() for t in w.operands}


def test_damaged_places_in_a_pickle_of_a_matrix_are_refused():
    w = unpacked(packed(compress(torch.eye(40, 300), "bitmap")))
    restore, (header, (data, places)) = w.__reduce__()
    assert torch.equal(restore(header, (data, places)).to_dense(), torch.eye(40, 300))
    first, (dtype, shape, start) = places
    for place in (
        (dtype, shape, start + 1), (dtype, shape, start + 4), (dtype, shape, -64),
        (dtype, shape, 10**30), (dtype, (10**30,), start), (dtype, (-1,), start),
        (torch.float64, shape, start), (torch.int16, shape, start), (None, shape, start),
        (dtype, None, start), (dtype, shape), None,
    ):  # fmt: skip
        with pytest.raises(ValueError):
            restore(header, (data, (first, place)))
    for memory in (
        (data.float(), places), (data[None], places), (data[:40], places), (None, places),
        (data.to("meta"), places), (data, places[:1]), (data, None), (data,), (),
    ):  # fmt: skip
        with pytest.raises(ValueError):
            restore(header, memory)
