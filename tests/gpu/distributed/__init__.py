"""Two processes that share tensors of GPUs.

With two GPUs each process has one, and data goes over NCCL. With one GPU both have it, and data
goes over gloo, which leaves out what passes memory of a GPU from one process to the next.
"""

from __future__ import annotations

import pytest
import torch

HAS_TWO = torch.cuda.device_count() > 1
BACKEND = "cpu:gloo,cuda:nccl" if HAS_TWO else "cpu:gloo,cuda:gloo"
needs_two = pytest.mark.skipif(not HAS_TWO, reason="needs two GPUs")
