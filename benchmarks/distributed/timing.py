"""What cases over several GPUs share: their tensors, and how a call of all processes is timed
beside one of the first alone."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.common.harness import Row

SECONDS, MOST = 2.0, 20  # of repetitions of a case, and how many at most


def size() -> int:
    return dist.get_world_size()


def is_first() -> bool:
    return dist.get_rank() == 0


def shared(*shape: int) -> torch.Tensor:
    """Numbers that all processes draw alike, on their own GPUs."""
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda")


def mine(t: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return t.chunk(size(), dim)[dist.get_rank()].contiguous()


def timed(call: Callable[[], object], together: bool, calls: int | None = None) -> float:
    """Milliseconds of the fastest call of some, of the slowest process if all take part."""

    def once() -> float:
        torch.cuda.synchronize()
        if together:
            dist.barrier()
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    if calls is None:
        once()  # loads kernels
        calls = max(1, min(MOST, int(1e3 * SECONDS / once())))
    if together:
        count = torch.tensor(calls, device="cuda")
        dist.all_reduce(count, dist.ReduceOp.MIN)
        calls = int(count)
    times = torch.tensor([once() for _ in range(calls)], device="cuda")
    if together:
        dist.all_reduce(times, dist.ReduceOp.MAX)
    return float(times.min())


def compared(
    name: str, alone: Callable, spread: Callable, error: Callable | None, must: float, **options
) -> Row:
    """A row of a call by one process and by all. ``must`` is how many times as fast all are."""
    one = timed(alone, False, **options) if is_first() else 0.0
    dist.barrier()
    ours = timed(spread, True, **options)
    shared_one = torch.tensor(one, device="cuda")
    dist.broadcast(shared_one, 0)
    one = float(shared_one)
    return Row(
        name, "ms", ours, rivals={"one gpu": one}, error=None if error is None else error(),
        must=one / must if must else None,
    )  # fmt: skip
