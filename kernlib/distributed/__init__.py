"""Calls over several GPUs and hosts, by the processes of a ``torch.distributed`` group.

Each process holds a part of the rows of every tensor and gets its rows of the result. torchrun
starts the processes, and NCCL moves what they need of each other; tensors of a CPU go by gloo.

Styles for ``torch.distributed.tensor.parallel`` are loaded when first used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from kernlib.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

__all__ = [
    "ColwiseParallel",
    "Communicator",
    "Replica",
    "RowwiseParallel",
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

_LATE = ("ColwiseParallel", "RowwiseParallel")  # which load torch.distributed.tensor


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise _import_module("kernlib.hints.spelling").UnknownName(__name__, name)
    value = getattr(_import_module("kernlib.distributed.tensor_parallel"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
