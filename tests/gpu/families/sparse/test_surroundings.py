"""Compressed matrices on a GPU amid what a caller has set: torch's defaults, autocast, a process
group of NCCL."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kernlib import sparse
from kernlib.compat import macko
from kernlib.nn import SparseLinear
from kernlib.sparse import SparseMatrix, compress
from tests.families.sparse.cases import FORMATS
from tests.support.paths import ROOT

SURROUNDINGS = {
    "meta": lambda: torch.device("meta"),
    "cpu": lambda: torch.device("cpu"),
    "autocast": lambda: torch.autocast("cuda", torch.bfloat16),
}


def pruned(rows: int, cols: int) -> torch.Tensor:
    dense = torch.randn(rows, cols, device="cuda").half()
    return dense * (torch.rand(rows, cols, device="cuda") < 0.4)


@pytest.mark.parametrize("where", SURROUNDINGS)
@pytest.mark.parametrize("format", [*FORMATS, "auto"])
def test_a_matrix_follows_its_dense_one(where, format, seed):
    dense, x = pruned(70, 300), torch.ones(3, 300, dtype=torch.float16, device="cuda")
    wanted = sparse.matmul(compress(dense, format), x)
    csr = dense.to_sparse_csr()
    with SURROUNDINGS[where]():
        w = SparseMatrix.from_state(*compress(dense, format).state())
        assert torch.equal(w.to_dense(), dense) and torch.equal(w.transpose().to_dense(), dense.t())
        assert torch.equal(w.convert("u4").to_dense(), dense)
        found = sparse.matmul(w, x)
        again = sparse.from_csr(csr.crow_indices(), csr.col_indices(), csr.values(), (70, 300))
        assert torch.equal(again.to_dense(), dense)
    assert found.is_cuda and found.dtype == torch.float16 and torch.equal(found, wanted)


@pytest.mark.parametrize("where", SURROUNDINGS)
def test_macko_s_names(where, seed):
    dense, x = pruned(70, 300), torch.randn(2, 300, device="cuda").half()
    wanted = macko.multiply(macko.compress(dense), x[1])
    with SURROUNDINGS[where]():
        compressed = macko.compress(dense)
        assert torch.equal(macko.decompress(compressed), dense)
        for given in (x[1], x[1:], x[None, 1:]):
            assert torch.equal(macko.multiply(compressed, given), wanted)
        layer = torch.vmap(lambda v: macko.multiply(compressed, v), in_dims=-2, out_dims=-2)
        assert torch.equal(layer(x[None])[1], wanted)


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch has no NCCL here")
def test_nccl_sends_every_buffer(tmp_path):
    """In a process of its own, whose group of one may not hang the others."""
    call = [sys.executable, "-m", __name__, f"file://{tmp_path}/meeting"]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr


def send(meeting: str) -> None:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", meeting, rank=0, world_size=1, device_id=device)
    for format in FORMATS:
        linear = nn.Linear(300, 70, device=device)
        layer = SparseLinear.from_linear(linear, format=format, density=0.3)
        wanted = layer.to_dense()
        model = DistributedDataParallel(nn.Sequential(layer, nn.Linear(70, 3, device=device)))
        model(torch.randn(5, 300, device=device)).sum().backward()
        assert torch.equal(layer.to_dense(), wanted)
    dist.destroy_process_group()
    print("done")


if __name__ == "__main__":
    send(sys.argv[1])
