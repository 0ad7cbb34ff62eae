"""States with any bytes at all on a GPU: what raises does so before anything reads by them, and the
CUDA context lives on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from kernlib import sparse
from kernlib.compat import macko
from kernlib.families.sparse.layout import format_of
from kernlib.sparse import SparseMatrix, compress
from tests.families.sparse.cases import QUANTISED
from tests.families.sparse.tampering import DTYPES, FORMATS, consume, refusals, states, tampered
from tests.gpu.watched import capture

few = settings(max_examples=60, suppress_health_check=list(HealthCheck))
halves = states().map(lambda case: (case[0], torch.float16, *case[2:]))  # fewer kernels to build


def lives() -> bool:
    """Whether the context still works, after all that has been launched."""
    torch.cuda.synchronize()
    return float(torch.ones(100, device="cuda").sum()) == 100


@few
@given(halves)
def test_a_state_with_any_bytes_is_refused_or_a_matrix(case):
    on_cpu = refusals(*tampered(case))
    for one, other in zip(refusals(*tampered(case, "cuda")), on_cpu, strict=True):
        assert type(one) is type(other), f"{one} on the GPU, {other} on the CPU"
        if isinstance(one, Exception):
            assert any(name in str(one) for name in (*format_of(case[3]).TENSORS, "the fact"))
        else:
            consume(one)
    assert lives()


@few
@given(states())
def test_a_tuple_with_any_bytes_is_refused_or_a_matrix(case):
    header, tensors = tampered((case[0], torch.float16, case[2], "macko", *case[4:]), "cuda")
    compressed = *(tensors[name] for name in ("values", "deltas", "row_ptr")), *header["shape"]
    x = torch.ones(1, header["shape"][1], dtype=torch.float16, device="cuda")
    for call in (
        lambda c: macko.multiply(c, x),
        macko.decompress,
        lambda c: macko.move_to_device(c, "cuda"),
    ):
        try:
            call(compressed)
        except ValueError as error:
            assert "row_ptr must rise" in str(error) or "deltas must lead" in str(error)
    assert lives()


@few
@given(states())
def test_what_undoes_codes_stays_within_tensors_of_any_bytes(case):
    """Unchecked: as where somebody has written to a matrix that was loaded."""
    header, tensors = tampered(case, "cuda")
    dtype = getattr(torch, header["dtype"])
    w = SparseMatrix(header["format"], tuple(header["shape"]), dtype, tensors, header["facts"])
    assert w.to_dense().shape == w.shape and lives()


def test_a_graph_that_captures_a_tuple_unseen(seed):
    dense = torch.randn(300, 500, device="cuda").half()
    dense *= torch.rand(300, 500, device="cuda") < 0.4
    compressed, x = macko.compress(dense), torch.randn(500, device="cuda").half()
    unseen = *(t.clone() for t in compressed[:3]), 300, 500
    broken = compressed[0], compressed[1], compressed[2].clone().mul_(1000), 300, 500
    wanted = macko.multiply(compressed, x)
    torch.mv(dense, x)  # cuBLAS made ready
    macko.decompress(compressed)
    with capture() as graph:
        ys = [macko.multiply(given, x) for given in (compressed, unseen, broken)]
    for _ in range(2):
        graph.replay()
    assert torch.equal(ys[0], wanted)
    assert torch.allclose(ys[1], wanted, rtol=2e-3, atol=2e-3) and lives()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_states_of_the_gpu_pass(format, dtype, seed):
    dense = torch.randn(1000, 3001, device="cuda").to(dtype)
    dense *= torch.rand(1000, 3001, device="cuda") < 0.3
    w = compress(dense, format)
    header, tensors = w.state()
    again = SparseMatrix.from_state(header, tensors)
    assert torch.equal(again.to_dense(), w.to_dense())
    assert format in QUANTISED or torch.equal(again.to_dense(), dense)
    if "rows" in tensors:
        old = {**tensors, "rows": tensors["rows"].view(torch.int16)}
        assert torch.equal(SparseMatrix.from_state({**header, "version": 1}, old).to_dense(), dense)


def test_csr_of_any_indices(seed):
    crow, values = torch.tensor([0, 2, 3], device="cuda"), torch.ones(3, device="cuda")
    for col in ([0, 4, 1], [0, 2**40, -1], [2, 2, 0]):
        with pytest.raises(ValueError, match="col must"):
            sparse.from_csr(crow, torch.tensor(col, device="cuda"), values, (2, 4))
    with pytest.raises(ValueError, match="crow must rise"):
        sparse.from_csr(crow * 100, torch.tensor([0, 1, 2], device="cuda"), values, (2, 4))
    assert lives()


@pytest.mark.few(0)
def test_macko_float32_past_2_to_30_columns(seed):
    """Bytes of x past 4 GiB."""
    columns, places = 2**30 + 1000, (0, 5, 2**29, 2**30 - 1, 2**30, 2**30 + 5, 2**30 + 999)
    dense = torch.zeros(2, columns, device="cuda")
    for number, place in enumerate(places):
        dense[number % 2, place] = number + 1
    x = torch.randn(columns, device="cuda")
    parts = [list(places[row::2]) for row in (0, 1)]
    wanted = torch.stack([(x[part] * dense[row, part]).sum() for row, part in enumerate(parts)])
    w = compress(dense, "macko")
    assert torch.equal(w.to_dense(), dense)
    del dense
    assert torch.allclose(sparse.matmul(w, x), wanted, rtol=1e-5)
