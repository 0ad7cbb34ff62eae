"""What encoders of dense matrices on the host share: they take some rows at a time, so that
intermediate results stay in a core's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

BLOCK = 1 << 17  # cells of rows that are looked at together
# More wait for each other: on a host of 16 cores 2 were 1.2 times as fast as one, 16 were slower.
THREADS = 2
FEW = 1 << 19  # cells of a matrix for which threads are no faster


def some_rows(rows: int, cols: int, unit: int = 1) -> Iterator[tuple[int, int]]:
    """The first row and the one behind the last of all blocks, whole units of rows each."""
    step = max(1, BLOCK // max(1, unit * cols)) * unit
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def in_threads(function: Callable[..., None], calls: Iterable[tuple], cells: int) -> None:
    """Call a function with each of these arguments, for a matrix of so many cells. numpy lets other
    threads run while it computes. Raises what a call raises."""
    threads = min(THREADS, torch.get_num_threads())
    if threads == 1 or cells < FEW:
        for arguments in calls:
            function(*arguments)
        return
    with ThreadPoolExecutor(threads, "kernlib-encode") as pool:
        for done in [pool.submit(function, *arguments) for arguments in calls]:
            done.result()


def nonzero(held: np.ndarray) -> np.ndarray:
    """Where bits are those of a value other than 0.0 and -0.0."""
    return held << held.dtype.type(1) != 0
