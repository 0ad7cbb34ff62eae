"""Kernel ridge regression of rows in a file, by the Falkon solver, on one GPU or on many.

    python examples/falkon.py [--rows 10000000] [--centres 20000]
    torchrun --nproc-per-node 2 examples/falkon.py [--folder /scratch/rows]

The rows are made here, as waves in a few features with noise, and lie in .npy files, of which each
process maps its own. They never are on a GPU together: chunks of them go there while the products
of the last chunk are computed. Centres are some of the rows. Runs on the process's CUDA GPU, or on
the CPU when there is none, with 4000 rows and 200 centres.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy
import torch
import torch.distributed as dist

import kernlib as kl

FEATURES, CHUNK = 4, 1 << 20
BANDWIDTH, NOISE = 1.5, 0.1
SIZES = {"cpu": (4_000, 200), "cuda": (10_000_000, 20_000)}  # rows and centres
ACCURACY = 0.9  # R^2 of points without noise
TOLERANCE = 5e-3  # of the residual of the preconditioned system, far below the noise
ON_CPU = "On a CPU torch computes everything: these times say nothing of the kernels."


def waves(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x[:, 0] * 2) + torch.cos(x[:, 1] + x[:, 2]) * x[:, 3]


def make(folder: Path, rows: int, rank: int) -> tuple[numpy.memmap, numpy.memmap]:
    """The rows of this process, in files."""
    shapes = {"x": (rows, FEATURES), "y": (rows,)}
    files = {
        name: numpy.lib.format.open_memmap(
            folder / f"{name}{rank}.npy", "w+", numpy.float32, shape=shape
        )
        for name, shape in shapes.items()
    }
    generator = torch.Generator().manual_seed(1 + rank)
    for at in range(0, rows, CHUNK):
        x = torch.randn((min(CHUNK, rows - at), FEATURES), generator=generator)
        files["x"][at : at + len(x)] = x.numpy()
        noise = NOISE * torch.randn(len(x), generator=generator)
        files["y"][at : at + len(x)] = (waves(x) + noise).numpy()
    return files["x"], files["y"]


def centres_of(count: int, device: torch.device) -> torch.Tensor:
    """The same in all processes."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn((count, FEATURES), generator=generator).to(device)


def start() -> tuple[int, int, torch.device]:
    """The rank of this process, how many there are, and its device."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    return rank, size, device


def main() -> None:
    rank, size, device = start()
    options = parse(device.type)
    share = options.rows // size + (rank < options.rows % size)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        x, y = make(Path(folder), share, rank)
        centres = centres_of(options.centres, device)
        begin = time.perf_counter()
        fit = kl.linalg.falkon(
            kl.gaussian(), x, y, centres,
            regularization=options.regularization, tol=TOLERANCE, max_iter=options.passes,
            group=kl.distributed.Communicator() if size > 1 else None,
            progress=None, bandwidth=BANDWIDTH,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
    points = centres_of(options.centres + 1000, device)[-1000:]
    names = {"bandwidth": BANDWIDTH}
    values = kl.kernel_matmul(kl.gaussian(), points, centres, fit.coefficients, **names)
    targets = waves(points)
    r2 = 1 - float((values - targets).square().mean() / targets.var(correction=0))
    if rank == 0:
        print(
            f"falkon {options.rows} rows, {options.centres} centres, {size} processes  "
            f"{device.type:5s} relative error {float(fit.residual):.1e}"
        )
        print(f"{fit.iterations} iterations in {seconds:.1f} s, R^2 {r2:.4f}")
        if device.type == "cpu":
            print(ON_CPU)
    if size > 1:
        dist.destroy_process_group()
    if not r2 >= ACCURACY:
        raise SystemExit(f"R^2 is below {ACCURACY}")


def parse(device: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    rows, centres = SIZES[device]
    parser.add_argument("--rows", type=int, default=rows, help="of all processes")
    parser.add_argument("--centres", type=int, default=centres)
    parser.add_argument("--passes", type=int, default=30, help="most passes over the rows")
    parser.add_argument("--regularization", type=float, default=1e-4)
    parser.add_argument("--folder", type=Path, help="where the files of rows lie meanwhile")
    options = parser.parse_args()
    for name in ("rows", "centres"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be 1 or more, got {getattr(options, name)}")
    return options


if __name__ == "__main__":
    main()
