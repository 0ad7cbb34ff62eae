"""Whole layers whose matrix lies in the one tensor that they were filled with: ``torch.save`` of
them, pickles and copies."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.multiprocessing import spawn

from kernlib.nn import SparseLinear, sparsify
from tests.families.sparse.cases import FORMATS, QUANTISED
from tests.nn.fused.models import LlamaAttention
from tests.nn.fused.models import inputs as states
from tests.nn.layer_writes import DENSITY, inputs

each_format = pytest.mark.parametrize("format", (*FORMATS, *QUANTISED))


def by_assigning(format: str) -> SparseLinear:
    """A layer that was filled as by ``load_state_dict(..., assign=True)``."""
    torch.manual_seed(0)
    dense = nn.Linear(300, 70)
    layer = SparseLinear.from_linear(dense, density=DENSITY.get(format, 0.3), format=format)
    result = SparseLinear(300, 70)
    result.load_state_dict(layer.state_dict(), assign=True)
    return result


def by_attribute(format: str) -> SparseLinear:
    """The same as by transformers' ``from_pretrained``."""
    state, result = by_assigning(format).state_dict(), SparseLinear(300, 70, device="meta")
    result.bias = nn.Parameter(state["bias"])
    result.weight_packed = state["weight_packed"]
    return result


def written(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def loaded(value: object, **options):
    return torch.load(written(value), weights_only=False, **options)


COPIES = {
    "torch.save": loaded,
    "map_location": lambda layer: loaded(layer, map_location="cpu"),
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "deepcopy of a pickle": lambda layer: copy.deepcopy(pickle.loads(pickle.dumps(layer))),
    "torch.save of a copy": lambda layer: loaded(copy.copy(layer)),
}


@each_format
@pytest.mark.parametrize("fill", [by_assigning, by_attribute])
def test_a_filled_layer_is_saved_and_copied(fill, format):
    layer, x = fill(format), inputs(format)
    state = layer.state_dict()
    for name, make in COPIES.items():
        other = make(layer)
        assert torch.equal(other(x), layer(x)) and torch.equal(other.to_dense(), layer.to_dense())
        assert other.matrix.layout == layer.matrix.layout and other.matrix.nnz == layer.matrix.nnz
        assert all(torch.equal(t, state[key]) for key, t in other.state_dict().items())
        pairs = zip(other.matrix.operands, layer.matrix.operands, strict=True)
        shares = {a.data_ptr() == b.data_ptr() for a, b in pairs if a.numel()}
        assert shares == {name == "copy"}
        held = [getattr(other, f"weight_{key}") for key in other.matrix.tensors]
        assert all(a is b for a, b in zip(held, other.matrix.operands, strict=True))


@each_format
def test_bytes_are_saved_once(format):
    layer = by_assigning(format)
    for value in (layer, layer.matrix, layer.matrix.state()):
        assert len(written(value).getvalue()) < layer.nbytes + 8000
        assert len(pickle.dumps(value)) < layer.nbytes + 8000
    other = loaded(layer)
    memories = {t.untyped_storage().data_ptr() for t in other.matrix.operands}
    assert len(memories) == 1


def test_a_filled_layer_is_saved_after_writes():
    """Which the bytes that it was filled with do not describe any more."""
    layer = by_assigning("macko")
    before = layer.to_dense()
    layer.weight_values.mul_(2)
    for make in COPIES.values():
        assert torch.equal(make(layer).to_dense(), 2 * before)


@pytest.mark.parametrize("format", [*FORMATS[:-1], *QUANTISED])
def test_a_written_copy_is_looked_at(format):
    """Where it shares the tensors too, as torch counts the writes to both."""
    layer = by_assigning(format)
    other = copy.copy(layer)
    name = "row_ptr" if format == "macko" else "offsets"
    getattr(layer, f"weight_{name}").view(torch.uint8).fill_(201)
    with pytest.raises(ValueError, match="are no matrix of kind"):
        other(inputs(format))
    with pytest.raises(ValueError, match=name):
        loaded(layer)
    with pytest.raises(ValueError, match=name):
        copy.deepcopy(layer)


@each_format
@pytest.mark.parametrize("place", ["meta", "fake", "inference"])
def test_a_filled_layer_without_values(format, place):
    layer = by_assigning(format)
    if place == "meta":
        for other in (loaded(layer, map_location="meta"), loaded(layer.to("meta"))):
            assert other.matrix.device.type == "meta"
            assert other.matrix.layout == layer.matrix.layout
    elif place == "fake":
        mode = FakeTensorMode()
        with FakeCopyMode(mode):
            other = copy.deepcopy(layer)
        assert all(isinstance(t, FakeTensor) for t in other.matrix.operands)
        assert copy.copy(other).matrix.layout == layer.matrix.layout
    else:
        with torch.inference_mode():
            layer = by_assigning(format)
        for make in COPIES.values():
            assert torch.equal(make(layer).to_dense(), layer.to_dense())


@pytest.mark.parametrize("format", ["bitmap", "u8", "macko", "bitmap-int4"])
def test_a_filled_group_is_saved_and_copied(format):
    torch.manual_seed(0)
    wanted = LlamaAttention(True)
    sparsify(wanted, density=0.4, format=format, fuse=False)
    with torch.device("meta"):
        model = LlamaAttention(True)
    sparsify(model, fuse=True)
    model.load_state_dict(wanted.state_dict(), assign=True)
    x = states(3)
    for make in (loaded, lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy):
        other = make(model)
        assert other.k_proj.joint is other.q_proj.joint is not model.q_proj.joint
        with torch.no_grad():
            torch.testing.assert_close(other(x), wanted(x))
            torch.testing.assert_close(make(other.o_proj)(x), wanted.o_proj(x))


def work(rank: int, layers: list[SparseLinear], file: str) -> None:
    """Of another process, which maps the memory of layers."""
    x = inputs("bitmap")
    torch.save([(layer.to_dense(), layer(x)) for layer in layers], file)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_another_process_maps_the_memory_of_a_layer(shared, tmp_path):
    layers = [by_assigning(format) for format in ("bitmap", "u8", "bitmap-int4")]
    for layer in layers:
        if shared:
            layer.share_memory()
    spawn(work, (layers, str(tmp_path / "results")), nprocs=1)
    for layer, (dense, y) in zip(layers, torch.load(tmp_path / "results"), strict=True):
        assert torch.equal(dense, layer.to_dense())
        # Sums of a product on the CPU have the order that a process's threads and addresses give.
        torch.testing.assert_close(y, layer(inputs("bitmap")))
