"""The kernels of the GPU tests, compiled on a machine without a GPU.

Nine tenths of what GPU tests take is NVRTC. So a run of the suite "gpu" notes which specifications
its tests ask for, in ``gpu_kernels.json.xz`` beside the record: text, most of which stays true
while headers change. Where there is no GPU, ::

    python -m tests.support.gpu_kernels FOLDER

compiles them into a bundle, with the NVRTC that is installed, and packs it as ``FOLDER.tar.xz``;
those that a bundle in FOLDER holds already are not compiled again. NVRTC must be of the version
that the GPU's machine has. There, ``KERNLIB_GPU_KERNELS=FOLDER`` has the tests find them; what has
changed since is compiled, and the run says how many kernels it hit.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

from kernlib.errors import CompileError
from kernlib.jit import bundle, compiler, layers, toolchain
from kernlib.jit.entry import Entry, unpack
from kernlib.jit.spec import KernelSpec

BUNDLE = "KERNLIB_GPU_KERNELS"
NAME = "gpu_kernels.json.xz"
COMMITTED = Path(__file__).resolve().parent.parent / NAME
MOST_BYTES = 25 << 20  # of the packed bundle
Kernel = tuple[str, KernelSpec]  # a target and a specification


def read(path: Path = COMMITTED) -> dict[str, list[Kernel]]:
    """What the tests of each entry of the record ask for, nothing where no run has noted it."""
    if not path.exists():
        return {}
    held = json.loads(lzma.decompress(path.read_bytes()))
    return {
        entry: [(arch, KernelSpec(*spec[:5], tuple(spec[5]), spec[6])) for arch, *spec in rows]
        for entry, rows in held.items()
    }


def write(kernels: dict[str, Iterable[Kernel]], path: Path) -> None:
    """Note what tests ask for, beside what those of other entries do."""
    rows = {
        name: sorted([arch, *spec] for arch, spec in set(requested))
        for name, requested in {**read(path), **kernels}.items()
    }
    path.write_bytes(lzma.compress(json.dumps(rows).encode()))


class Watch:
    """Notes what one process asks for, by entry, and how much of that it found in the bundle."""

    def __init__(self) -> None:
        self.kernels: dict[str, set[Kernel]] = {}
        self.events: Counter[str] = Counter()
        self.entry: str | None = None  # of the test that runs

    def start(self) -> None:
        """Note and count from here on. Nobody listens to events for it: calls take the way that
        users' calls take."""
        from kernlib.jit import service

        request_of, emit = service.request_of, layers.Request.emit

        def noted(spec: KernelSpec, arch: str):
            if self.entry is not None:
                self.kernels.setdefault(self.entry, set()).add((arch, spec))
            return request_of(spec, arch)

        def counted(request: layers.Request, name: str, **fields: object) -> None:
            if name == "compile" or fields.get("where") == "bundle":
                self.events[name] += 1
            emit(request, name, **fields)

        service.request_of, layers.Request.emit = noted, counted

    def state(self) -> str:
        """As text, which another process can :meth:`merge`."""
        kernels = {k: [[arch, *spec] for arch, spec in rows] for k, rows in self.kernels.items()}
        return json.dumps({"kernels": kernels, "events": self.events})

    def merge(self, state: str) -> None:
        held = json.loads(state)
        self.events.update(held["events"])
        for entry, rows in held["kernels"].items():
            specs = ((arch, KernelSpec(*s[:5], tuple(s[5]), s[6])) for arch, *s in rows)
            self.kernels.setdefault(entry, set()).update(specs)

    def __str__(self) -> str:
        return f"{self.events['hit']} from the bundle, {self.events['compile']} compiled"


def _key(kernel: Kernel) -> bytes:
    arch, spec = kernel
    return layers.request_of(spec, arch).portable


def _compiled(kernel: Kernel) -> Entry | None:
    """None for a source that its headers no longer take."""
    arch, spec = kernel
    with suppress(CompileError):
        return compiler.compile_spec(spec, arch)
    return None


def _held(folder: Path) -> dict[bytes, Entry]:
    """What a bundle that is there holds."""
    if not (folder / bundle.FILE).exists():
        return {}
    opened = bundle.open_bundle(folder)
    try:
        return {key: unpack(key, value) for key, value in opened.items()}
    finally:
        opened.close()


def build(folder: Path, most_bytes: int = MOST_BYTES) -> str:
    """Compile what is noted and not in the folder's bundle yet, as far as it fits, into a bundle;
    what was done, in words."""
    kernels = {_key(kernel): kernel for rows in read().values() for kernel in rows}
    begun, entries, room = time.monotonic(), {}, most_bytes
    for key, entry in _held(folder).items():
        if key in kernels:
            entries[key] = entry
            room -= len(zlib.compress(entry.cubin))
    missing = sorted(kernels.keys() - entries.keys(), key=kernels.get)
    compiled = outdated = 0
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        work = pool.map(_compiled, map(kernels.get, missing), chunksize=8)
        for key, entry in zip(missing, work, strict=True):
            if entry is None:
                outdated += 1
                continue
            room -= len(zlib.compress(entry.cubin))
            if room < 0:
                pool.shutdown(cancel_futures=True)
                break
            entries[key] = entry
            compiled += 1
    bundle.write(folder, entries)
    archive = Path(shutil.make_archive(str(folder), "xztar", folder.parent, folder.name))
    return (
        f"{len(entries)} of {len(kernels)} kernels, {compiled} of them compiled and {outdated} "
        f"outdated, by NVRTC {toolchain.nvrtc_version()} in {time.monotonic() - begun:.0f} s: "
        f"{archive}, {archive.stat().st_size / 2**20:.1f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    if not read():
        sys.exit(f"{COMMITTED} is missing: a run of the GPU tests writes it")
    print(build(chosen.folder.resolve()))


if __name__ == "__main__":
    main()
