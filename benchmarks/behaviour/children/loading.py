"""How the driver loads code, in a process of its own: ``python -m
benchmarks.behaviour.children.loading ROLE FILE ...``."""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.behaviour.children.bare import check, context, driver, free, launch

FIRST = b"k0"


def timed(call: Callable[[], object]) -> tuple[object, float]:
    begin = time.perf_counter()
    value = call()
    return value, (time.perf_counter() - begin) * 1e3


def library(code: bytes) -> object:
    return check(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))


def module(code: bytes) -> object:
    return check(driver.cuModuleLoadData(code))


def kernel_of(loaded: object, name: bytes = FIRST) -> object:
    return check(driver.cuKernelGetFunction(check(driver.cuLibraryGetKernel(loaded, name))))


def waited(kernel: object, out: int) -> None:
    arguments = ((int(out), 3), (ctypes.c_void_p, ctypes.c_int))
    check(driver.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, arguments, 0))
    check(driver.cuCtxSynchronize())


def load(paths: list[str]) -> None:
    """Milliseconds of the steps to a first launch, and memory of the device."""
    for path in paths:
        code = Path(path).read_bytes()
        out = check(driver.cuMemAlloc(4096))
        before = free()
        loaded, load_ms = timed(lambda code=code: library(code))
        after_load = free()
        kernel, function_ms = timed(lambda loaded=loaded: kernel_of(loaded))
        _, first_ms = timed(lambda kernel=kernel, out=out: waited(kernel, out))
        _, again_ms = timed(lambda kernel=kernel, out=out: waited(kernel, out))
        memory = [(before - after_load) >> 10, (before - free()) >> 10]
        _, twice_ms = timed(lambda code=code: library(code))
        row = [path, load_ms, function_ms, first_ms, again_ms, twice_ms, *memory]
        print(json.dumps(row), flush=True)


def memory(paths: list[str]) -> None:
    """Free memory through loads and unloads of one file, in KiB that are less free."""
    code = Path(paths[0]).read_bytes()
    out = check(driver.cuMemAlloc(4096))
    start = free()

    def said(what: str, ms: float) -> None:
        print(json.dumps([what, (start - free()) >> 10, ms]), flush=True)

    loaded = []
    for count in (1, 2, 4, 16):
        ms = 0.0
        while len(loaded) < count:
            one, ms = timed(lambda: library(code))
            loaded.append(one)
            kernel_of(one)
        said(f"libraries of the same file: {count}", ms)
    kernels = [kernel_of(one) for one in loaded]
    said("pointers of their functions differ: " + str(len({int(k) for k in kernels})), 0.0)
    _, ms = timed(lambda: [waited(kernel, out) for kernel in kernels])
    said("each of them launched", ms)
    _, ms = timed(lambda: [check(driver.cuLibraryUnload(one)) for one in loaded])
    said("all of them unloaded", ms)
    one, ms = timed(lambda: library(code))
    kernel_of(one)
    said("one loaded again", ms)
    modules, ms = timed(lambda: [module(code) for _ in range(16)])
    said("16 modules by cuModuleLoadData", ms)
    _, ms = timed(lambda: [check(driver.cuModuleUnload(m)) for m in modules])
    said("those unloaded", ms)
    names = [f"k{i}".encode() for i in range(int(paths[1]))]
    _, ms = timed(lambda: [kernel_of(one, name) for name in names])
    said(f"all {len(names)} functions of it", ms)


def refused(paths: list[str]) -> None:
    """What the driver says to each file, at which step."""
    out = check(driver.cuMemAlloc(4096))
    for path in paths:
        code = Path(path).read_bytes()
        answers = []
        for step in (library, module):
            said = ""
            try:
                loaded, ms = timed(lambda step=step, code=code: step(code))
                said = f"loads in {ms:.2f} ms"
                if step is library:
                    kernel = kernel_of(loaded)
                    waited(kernel, out)
                    said += ", runs"
            except RuntimeError as error:
                said += f"{', then ' if said else ''}{error}"
            answers.append(said)
        print(json.dumps([Path(path).name, *answers]), flush=True)


def attributes(paths: list[str]) -> None:
    """Through which handles a permission of shared memory is seen."""
    code = Path(paths[0]).read_bytes()
    one, two = library(code), library(code)
    what = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    device = check(driver.cuDeviceGet(0))
    kernel = check(driver.cuLibraryGetKernel(one, FIRST))
    first, second = kernel_of(one), kernel_of(two)

    def said(step: str) -> None:
        seen = [check(driver.cuKernelGetAttribute(what, kernel, device))]
        seen += [check(driver.cuFuncGetAttribute(what, f)) for f in (first, second)]
        print(json.dumps([step, *seen]), flush=True)

    said("nothing set")
    check(driver.cuFuncSetAttribute(first, what, 100_000))
    said("100000 set on the CUfunction")
    check(driver.cuKernelSetAttribute(what, 120_000, kernel, device))
    said("then 120000 on its CUkernel")
    check(driver.cuFuncSetAttribute(first, what, 0))
    said("then 0 on the CUfunction")
    _, ms = timed(lambda: [driver.cuFuncSetAttribute(first, what, 50_000) for _ in range(1000)])
    print(json.dumps(["us of cuFuncSetAttribute", round(ms, 2), "", ""]), flush=True)
    _, ms = timed(lambda: [driver.cuFuncGetAttribute(what, first) for _ in range(1000)])
    print(json.dumps(["us of cuFuncGetAttribute", round(ms, 2), "", ""]), flush=True)


def unload(paths: list[str]) -> None:
    """How long calls of loading and unloading take while a kernel of 50 ms runs."""
    spin_code, other = (Path(p).read_bytes() for p in paths)

    def said(what: str, call: Callable[[], object], own: bool = False) -> None:
        spinning = library(spin_code)
        kernel = kernel_of(spinning, b"spin")
        launch(kernel, 0, 50_000_000)
        _, ms = timed(lambda: call(spinning if own else None))
        _, rest = timed(lambda: check(driver.cuCtxSynchronize()))
        print(json.dumps([what, ms, rest]), flush=True)

    held = [library(other) for _ in range(3)]
    used = library(other)
    kernel_of(used)
    said("nothing", lambda _: None)
    said("cuLibraryLoadData of another file", lambda _: library(other))
    said("the same and its function", lambda _: kernel_of(library(other)))
    said("the function of a second kernel of a loaded file", lambda _: kernel_of(used, b"k1"))
    said("the function of the first one again", lambda _: kernel_of(used))
    said("cuModuleLoadData of another file", lambda _: module(other))
    said("cuLibraryUnload of one never used", lambda _: check(driver.cuLibraryUnload(held[0])))
    kernel_of(held[1])
    said("cuLibraryUnload of another one", lambda _: check(driver.cuLibraryUnload(held[1])))
    said("cuLibraryUnload of its own", lambda x: check(driver.cuLibraryUnload(x)), own=True)


if __name__ == "__main__":
    context()
    check(driver.cuMemFree(check(driver.cuMemAlloc(1 << 22))))
    roles = {f.__name__: f for f in (load, memory, refused, attributes, unload)}
    roles[sys.argv[1]](sys.argv[2:])
