"""When a product may read its matrix before the launch before it has ended."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from kernlib.jit import targets
from kernlib.ops import sparse_lowering, sparse_settled
from kernlib.ops.sparse_settled import STREAMS, is_settled, settle, state_of
from kernlib.sparse import compress


@pytest.fixture
def gpu(monkeypatch):
    """Current stream, and whether it is captured."""
    state = SimpleNamespace(stream=7, captured=False)
    monkeypatch.setattr(sparse_settled.launch, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.captured)
    return state


@pytest.fixture
def w():
    return compress(torch.eye(64).half(), "u8")


def called(w) -> bool:
    """A product; whether it read the matrix early."""
    state = state_of(w)
    if is_settled(w, state, 0):
        return True
    settle(w, state, 0)
    return False


def test_the_first_product_of_a_matrix_waits(gpu, w):
    assert [called(w) for _ in range(3)] == [False, True, True]
    assert not called(compress(w.to_dense(), "u8"))  # another one, wherever it lies


def test_a_product_behind_a_write_waits(gpu, w):
    assert not called(w)
    for tensor in w.operands:
        tensor.copy_(tensor.clone())
        assert [called(w) for _ in range(2)] == [False, True]


def test_a_product_behind_a_change_of_memory_waits(gpu, w):
    assert [called(w) for _ in range(2)] == [False, True]
    tensor = w.operands[0]
    version, tensor.data = tensor._version, tensor.clone()
    assert tensor._version == version  # torch does not count that
    assert [called(w) for _ in range(2)] == [False, True]


def test_each_stream_has_a_product_that_waits(gpu, w):
    assert [called(w) for _ in range(2)] == [False, True]
    gpu.stream = 8
    assert [called(w) for _ in range(2)] == [False, True]
    w.operands[0].zero_()
    for gpu.stream in (7, 8):
        assert [called(w) for _ in range(2)] == [False, True]


def test_a_capture_takes_any_stream_and_counts_for_none(gpu, w):
    gpu.captured, gpu.stream = True, 9
    assert [called(w) for _ in range(2)] == [False, False]  # nothing of it has run
    gpu.captured, gpu.stream = False, 7
    assert [called(w) for _ in range(2)] == [False, True]
    gpu.captured, gpu.stream = True, 9
    assert called(w)
    w.operands[0].zero_()  # captured as well
    assert [called(w) for _ in range(2)] == [False, False]
    gpu.captured, gpu.stream = False, 7
    assert [called(w) for _ in range(2)] == [False, True]


def test_tensors_without_a_version_are_never_read_early(gpu):
    with torch.inference_mode():
        made = compress(torch.eye(64).half(), "u8")
    assert state_of(made) is None
    assert [called(made) for _ in range(2)] == [False, False]


def test_few_streams_are_remembered(gpu, w):
    for gpu.stream in range(3 * STREAMS):
        assert not called(w)
        assert 0 < len(w._settled) <= STREAMS


def test_copies_begin_anew(gpu, w):
    called(w)
    for other in (copy.deepcopy(w), pickle.loads(pickle.dumps(w))):
        assert w._settled and not other._settled


def test_formats_that_read_ahead():
    found = {
        arch: {name for name in sparse_lowering.FORMATS if sparse_lowering.reads_ahead(name, arch)}
        for arch in targets.SHARED_BYTES
    }
    assert found["sm_90a"] == {"bitmap", "u8", "u4", "u2"} and not found["sm_80"]
