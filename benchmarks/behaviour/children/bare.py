"""A process with the driver alone, without torch: ``python -m benchmarks.behaviour.children.bare
CUBIN``. Reads commands, one a line, and answers each by a line of JSON."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable

from cuda.bindings import driver

MIB = 1 << 20


def check(result: tuple) -> object:
    """The value of a call of the driver. Raises RuntimeError by the name of its error."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(status.name)
    return values[0] if len(values) == 1 else tuple(values)


def context() -> float:
    """Make the primary context of the first device current, and answer the seconds it took."""
    begin = time.perf_counter()
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    check(driver.cuCtxSetCurrent(check(driver.cuDevicePrimaryCtxRetain(device))))
    return time.perf_counter() - begin


def free() -> int:
    """Bytes of the device that no process holds."""
    return check(driver.cuMemGetInfo())[0]


def function(path: str, name: str) -> object:
    """A kernel of a file."""
    with open(path, "rb") as file:
        library = check(driver.cuLibraryLoadData(file.read(), [], [], 0, [], [], 0))
    kernel = check(driver.cuLibraryGetKernel(library, name.encode()))
    return check(driver.cuKernelGetFunction(kernel))


def launch(kernel: object, stream: object = 0, ns: int | None = None) -> None:
    """One block of one thread."""
    arguments = 0 if ns is None else ((ns,), (ctypes.c_longlong,))
    check(driver.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))


class Commands:
    """What this process can be told."""

    def __init__(self, path: str) -> None:
        self.context_s = context()
        self.spinning, self.empty = function(path, "spin"), function(path, "empty")
        self.streams = [check(driver.cuStreamCreate(1)) for _ in range(2)]
        self.memory = check(driver.cuMemAlloc(64 * MIB))
        self.pinned = check(driver.cuMemAllocHost(MIB))
        self.pageable = bytes(MIB)
        self.latency(3)

    def spin(self, ns: int, count: int) -> float:
        """Seconds of so many kernels that do nothing for so long."""
        begin = time.perf_counter()
        for _ in range(count):
            launch(self.spinning, self.streams[0], ns)
        check(driver.cuStreamSynchronize(self.streams[0]))
        return time.perf_counter() - begin

    def latency(self, count: int, only: int = -1) -> dict[str, list[float]]:
        """Microseconds of short calls, or of the one of that number, sorted, on a stream of their
        own."""
        stream = self.streams[1]

        def waited(act: Callable[[], object]) -> Callable[[], object]:
            def call() -> None:
                act()
                check(driver.cuStreamSynchronize(stream))

            return call

        calls: dict[str, Callable[[], object]] = {
            "an empty kernel, waited for": waited(lambda: launch(self.empty, stream)),
            "a kernel of 1 ms, waited for": waited(lambda: launch(self.spinning, stream, 1000000)),
            "synchronize of a stream without work": waited(lambda: None),
            "cuMemAlloc and cuMemFree of 1 MiB": lambda: check(
                driver.cuMemFree(check(driver.cuMemAlloc(MIB)))
            ),
            "1 MiB from pinned memory, waited for": waited(
                lambda: check(driver.cuMemcpyHtoDAsync(self.memory, self.pinned, MIB, stream))
            ),
            "1 MiB from pageable memory": lambda: check(
                driver.cuMemcpyHtoD(self.memory, self.pageable, MIB)
            ),
            "1 MiB within the device, waited for": waited(
                lambda: check(
                    driver.cuMemcpyDtoDAsync(self.memory, int(self.memory) + MIB, MIB, stream)
                )
            ),
            "a fill of 1 MiB, waited for": waited(
                lambda: check(driver.cuMemsetD8Async(self.memory, 0, MIB, stream))
            ),
        }
        names = list(calls) if only < 0 else [list(calls)[only]]
        return {name: self.timed(calls[name], count) for name in names}

    @staticmethod
    def timed(call: Callable[[], object], count: int) -> list[float]:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return sorted(times)

    def beside(self, ns: int, total: int, count: int, only: int) -> dict[str, list[float]]:
        """The same while another stream of this process spins."""
        for _ in range(total):
            launch(self.spinning, self.streams[0], ns)
        answer = self.latency(count, only)
        check(driver.cuStreamSynchronize(self.streams[0]))
        return answer


def main() -> None:
    before = time.perf_counter()
    commands = Commands(sys.argv[1])
    ready = {"context_s": commands.context_s, "ready_s": time.perf_counter() - before}
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        name, *numbers = line.split()
        try:
            answer = getattr(commands, name)(*map(int, numbers))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
