"""Formulas in several processes: refused in words."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import kernlib as kl


def test_processes_share_no_formula(pool):
    pool.run(_refused)


def _refused():
    kernel, x = kl.gaussian() + kl.cauchy(), torch.ones(6, 2)
    with pytest.raises(TypeError, match=r"must be a Pairwise kernel .* got Formula"):
        kl.distributed.kernel_sum(kernel, x, x, bandwidth_1=1.0, bandwidth_2=1.0)
    spread = distribute_tensor(x, init_device_mesh("cpu", (3,)), [Shard(0)])
    with pytest.raises(TypeError, match="a is a DTensor, which this call does not take"):
        kl.kernel_sum(kernel, spread, spread, bandwidth_1=1.0, bandwidth_2=1.0)
