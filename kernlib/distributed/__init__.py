"""Calls over several GPUs and hosts, by the processes of a ``torch.distributed`` group.

Each process holds a part of the rows of every tensor and gets its rows of the result. torchrun
starts the processes, and NCCL moves what they need of each other; tensors of a CPU go by gloo.
"""

from kernlib.distributed.attention import attention
from kernlib.distributed.communicator import Communicator
from kernlib.distributed.kronecker import kron_columns, kron_matmul
from kernlib.distributed.reductions import (
    kernel_logsumexp,
    kernel_matmul,
    kernel_min,
    kernel_sum,
    kernel_topk,
)
from kernlib.distributed.rows import Replica, replicate
from kernlib.distributed.sequence import sequence_shards

__all__ = [
    "Communicator",
    "Replica",
    "attention",
    "kernel_logsumexp",
    "kernel_matmul",
    "kernel_min",
    "kernel_sum",
    "kernel_topk",
    "kron_columns",
    "kron_matmul",
    "replicate",
    "sequence_shards",
]
