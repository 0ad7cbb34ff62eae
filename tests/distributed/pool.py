"""Processes of one group, started once, in each of which a test runs a function of its own.

``Pool(3).run(function, *arguments)`` calls ``function(*arguments)`` in three processes over gloo,
and returns what each returned, or the exception that it raised, by rank.
"""

from __future__ import annotations

import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ANSWER_S = 120  # after which a process is taken for stuck


class Pool:
    """``size`` processes, which start at the first run, and anew where one has been stuck."""

    def __init__(self, size: int, backend: str = "gloo"):
        self.size, self.backend = size, backend
        self.processes: list = []

    def run(self, function, *arguments) -> list:
        """What every process returned or raised. A process that ends, or does not answer, is None
        in its place, and the pool is started anew at the next run."""
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, arguments))
        results, has_all = [], True
        for pipe in self.pipes:
            try:
                results.append(pipe.recv() if pipe.poll(ANSWER_S) else None)
            except EOFError:
                results.append(None)
            has_all = has_all and results[-1] is not None
        if not has_all:
            self.close()
        return [None if result is None else result[0] for result in results]

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory(prefix="kernlib-ranks-")
        store = str(Path(self.folder.name) / "store")
        self.pipes = []
        for rank in range(self.size):
            pipe, other = context.Pipe()
            arguments = rank, self.size, self.backend, store, other
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            other.close()
            self.pipes.append(pipe)
            self.processes.append(process)


def _serve(rank: int, size: int, backend: str, store: str, pipe) -> None:
    torch.set_num_threads(1)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        try:
            result = function(*arguments)
        except Exception as error:
            result = error
        try:
            pipe.send((result,))
        except Exception as error:  # what cannot be pickled
            pipe.send((RuntimeError(f"{type(result).__name__}: {result} ({error})"),))
