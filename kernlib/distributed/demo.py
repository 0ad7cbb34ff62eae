"""``torchrun --nproc-per-node N -m kernlib.distributed.demo``: products over the processes, beside
one of them alone."""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist

import kernlib as kl
from kernlib.distributed.communicator import as_communicator

POINTS = {"cpu": 4000, "cuda": 200_000}
FEATURES, BANDWIDTH = 3, 1.0
REPEATS = 3
BOUND = 1e-5  # of the relative difference to the result of one process


def main() -> None:
    """Print, in the first process, how long each takes and how far results are apart. Exits with 1
    where one is wrong."""
    device = _device()
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    communicator = as_communicator(None)
    rank, ranks = communicator.rank, communicator.size
    generator = torch.Generator("cpu").manual_seed(0)
    count = POINTS[device.type]
    size = count, FEATURES + 1
    drawn = torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(device)
    x, v = drawn[:, :FEATURES].contiguous(), drawn[:, FEATURES:].contiguous()
    mine = slice(rank * count // ranks, (rank + 1) * count // ranks)
    names = {"bandwidth": BANDWIDTH}

    def spread(ring: bool) -> torch.Tensor:
        parts = x[mine], x[mine], v[mine]
        return kl.distributed.kernel_matmul(
            kl.gaussian(), *parts, group=communicator, ring=ring, **names
        )

    ways = {
        "one process": lambda: kl.kernel_matmul(kl.gaussian(), x, x, v, **names),
        "all processes": lambda: spread(False),
        "all processes, in a ring": lambda: spread(True),
    }
    reference = ways["one process"]()[mine].double()
    worst = 0.0
    if rank == 0:
        print(f"kernel_matmul of {count} x {count} points, {ranks} processes on {device.type}")
    for name, way in ways.items():
        out = way()
        milliseconds = _milliseconds(way, device)
        if name != "one process":
            squares = torch.stack([(out - reference).square().sum(), reference.square().sum()])
            above, below = communicator.total(squares).tolist()
            worst = max(worst, (above / below) ** 0.5)
        if rank == 0:
            print(f"  {name:26s} {milliseconds:10.2f} ms")
    if rank == 0:
        print(f"  largest relative difference {worst:.1e}")
    dist.destroy_process_group()
    if not worst <= BOUND:
        sys.exit(1)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def _milliseconds(way, device: torch.device) -> float:
    """Of the fastest of some calls, in the slowest process."""
    best = float("inf")
    for _ in range(REPEATS):
        dist.barrier()
        begin = time.perf_counter()
        way()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, 1e3 * (time.perf_counter() - begin))
    slowest = torch.tensor(best, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    main()
