"""What the examples of this folder share: arguments, times, and what a page shows of a run.

Each example is a script: ``python examples/gallery/kernel_pca.py [--device cuda] [--plot out.svg]
[--json out.json]``, with an option for each of its sizes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Sizes = dict[str, tuple[int, int]]  # of the options: the default on a CPU and that on a GPU
REPEATS = 5
BLUE, ORANGE, GREY = "#3b6ea5", "#d9822b", "#8a8a8a"  # of kernlib, of the plain way, of the rest


def parse(document: str | None, sizes: Sizes) -> argparse.Namespace:
    """The arguments of an example, whose docstring is ``document``; ``device`` is a torch.device.
    Random numbers begin at ``--seed``."""
    parser = argparse.ArgumentParser(description=(document or "").splitlines()[0])
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=default)
    parser.add_argument("--plot", type=Path, help="draw the picture here, with matplotlib")
    parser.add_argument("--json", type=Path, help="write times and the error here")
    parser.add_argument("--seed", type=int, default=0)
    for name, defaults in sizes.items():
        said = "default {} on a CPU, {} on a GPU".format(*defaults)
        parser.add_argument(f"--{name}", type=int, help=said)
    args = parser.parse_args()
    for name, (on_cpu, on_gpu) in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, on_gpu if args.device == "cuda" else on_cpu)
    args.sizes = {name: getattr(args, name) for name in sizes}
    args.device = torch.device(args.device)
    torch.manual_seed(args.seed)
    return args


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """The median time of a call, after one that compiles and loads what it needs."""
    call()
    times = []
    for _ in range(repeats):
        _wait(device)
        begun = time.perf_counter()
        call()
        _wait(device)
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times)


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """``|y - reference| / |reference|``, in float64."""
    reference = reference.double()
    return ((y.double() - reference).norm() / reference.norm()).item()


def figure(columns: int = 1, width: float = 4.5, height: float = 3.4):
    """A figure of matplotlib and its axes, a list."""
    from matplotlib.figure import Figure

    page = Figure(figsize=(width * columns, height), layout="constrained")
    axes = page.subplots(1, columns, squeeze=False)[0]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return page, list(axes)


def finish(
    args: argparse.Namespace,
    times: dict[str, float],
    error: float,
    bound: float,
    draw: Callable[[], Any],
    measure: str = "relative error",
) -> None:
    """Print the ``times`` in ms by the names of ways, kernlib's first; draw and write what was
    asked for. Raises SystemExit if the ``error`` is above ``bound``."""
    ours, *_ = times.values()
    for way, ms in times.items():
        beside = "" if ms is ours else f"  {ms / ours:.2f} x"
        print(f"{way:24s} {ms:10.3f} ms{beside}")
    print(f"{args.device.type:5s} {measure} {error:.1e}")
    if args.device.type == "cpu":
        print("On a CPU torch computes everything: these times say nothing of the kernels.")
    if args.plot is not None:
        draw().savefig(args.plot, metadata={"Date": None} if args.plot.suffix == ".svg" else None)
    if args.json is not None:
        result = {"sizes": args.sizes, "ms": times, measure: error}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if not error <= bound:
        raise SystemExit(f"the {measure} is above {bound:g}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
