"""Compressed layers in processes that work together: every buffer can be sent."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel

from kernlib.nn import SparseLinear
from kernlib.sparse import magnitude
from tests.families.sparse.cases import FORMATS

# What NCCL and gloo send both: https://docs.nvidia.com/deeplearning/nccl, ncclDataType_t.
SENT = {torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32}


def layer(format: str) -> SparseLinear:
    torch.manual_seed(0)
    linear = nn.Linear(300, 70)
    magnitude(linear.weight.detach(), 0.3, inplace=True)
    return SparseLinear.from_linear(linear, format=format)


def work(rank: int, folder: str) -> None:
    """One of two processes: default settings, whose constructor sends parameters and buffers from
    the first, and each forward the buffers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    for format in FORMATS:
        model = nn.Sequential(layer(format), nn.Linear(70, 3))
        wanted = model[0].to_dense().clone()
        with torch.no_grad():
            model[0].bias += rank
        model = DistributedDataParallel(model)
        for step in range(2):
            x = torch.randn(5, 300, generator=torch.Generator().manual_seed(rank + step))
            model(x).square().sum().backward()
        gradient = model.module[0].bias.grad.clone()
        dist.all_reduce(gradient)
        assert torch.allclose(gradient, 2 * model.module[0].bias.grad)
        assert torch.equal(model.module[0].to_dense(), wanted)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may still run, and abort a process that ends in order


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo here")
def test_data_parallel_modules_take_every_format(tmp_path):
    spawn(work, (str(tmp_path),), nprocs=2)


@pytest.mark.parametrize("format", FORMATS)
def test_buffers_have_dtypes_that_collectives_send(format):
    made = layer(format)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert {buffer.dtype for buffer in made.to(dtype).buffers()} <= SENT
