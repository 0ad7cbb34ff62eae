"""Shared by the tests of the service: kernels, and a compiler that only counts."""

import threading
from collections import Counter

from kernlib.jit import layers, service
from kernlib.jit.entry import Entry
from kernlib.jit.spec import KernelSpec
from tests.support.limits import LIMIT_S

SPEC = KernelSpec("test", '#include "common/math.cuh"\n', "entry", 32, 0, (), "a kernel of tests")
ARCH = "sm_90a"


def spec(number):
    return SPEC._replace(source=f"{SPEC.source}// {number}\n")


def made_of(wanted, arch):
    meta = {"registers": "1", "spill_bytes": "0", "shared_bytes": "0", "compile_ms": "1"}
    meta["portable"] = layers.request_of(wanted, arch).portable.hex()
    return Entry(wanted.entry, f"{arch} {wanted.source}".encode(), meta)


class Compiler:
    """Counts compiles by source; waits, or fails, if told to."""

    def __init__(self):
        self.counts = Counter()
        self.error = None
        self.gates = {}

    def __call__(self, wanted, arch):
        self.counts[wanted.source, arch] += 1
        if wanted.source in self.gates:
            assert self.gates[wanted.source].wait(LIMIT_S)
        if self.error is not None:
            raise type(self.error)(*self.error.args)
        return made_of(wanted, arch)


def loading(monkeypatch, refusals=0, error="CUDA_ERROR_INVALID_IMAGE"):
    """Kernels are loaded without a driver, but for the first ones; the list of what was given."""
    loads = []

    def load(built, asked, device):
        loads.append(built)
        if len(loads) <= refusals:
            raise RuntimeError(f"CUDA driver: {error}")
        return service.Kernel(asked.spec, asked.key.hex(), asked.arch, device)

    monkeypatch.setattr(service, "load", load)
    return loads


def in_threads(count, work):
    """Results of ``work(i)`` in threads that start together; exceptions are results too."""
    start, results = threading.Barrier(count), [None] * count

    def run(index):
        start.wait(LIMIT_S)
        try:
            results[index] = work(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads)
    return results
