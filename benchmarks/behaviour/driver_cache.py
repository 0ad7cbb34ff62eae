"""Loading of code by the driver: its own cache of compiled PTX, lazy loading, memory, errors."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.behaviour.clocks import SOURCE
from benchmarks.behaviour.page import Table
from benchmarks.behaviour.texts.driver_cache import TEXTS
from benchmarks.common.device_code import cell, compiled

TITLE = "loading of code by the driver"

CHILD = "benchmarks.behaviour.children.loading"
MANY = 256


def source(count: int, terms: int = 24) -> str:
    """Kernels k0, k1 .. of about a KB each, all of them different."""
    lines = []
    for i in range(count):
        body = f"float x = out[threadIdx.x] + {i}; "
        body += "".join(f"x = x * (x + {j + 3}.5f) + {i + j}; " for j in range(terms))
        head = f'extern "C" __global__ void k{i}(float* out, int n)'
        lines.append(f"{head} {{ {body} out[threadIdx.x] = x * n; }}")
    return "\n".join(lines)


def child(role: str, *files: object, **environment: str) -> list[list[object]]:
    """The lines that a child printed, and how it ended if not well."""
    command = [sys.executable, "-m", CHILD, role, *map(str, files)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_CACHE")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=env | environment,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode:
        error = (done.stderr.strip().splitlines() or [""])[-1]
        answers.append([f"the process ended by {done.returncode}", error[:120]])
    return answers


def content(folder: Path) -> str:
    """Files of a folder, and their bytes."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    return f"{len(files)} files, {sum(p.stat().st_size for p in files) >> 10} KiB"


def milliseconds(values: list[object]) -> list[str]:
    return [f"{v:.2f}" if isinstance(v, float) else str(v) for v in values]


def filled(rows: list[list[object]], width: int) -> list[list[object]]:
    return [[*row, *[""] * (width - len(row))][:width] for row in rows]


def cache(folder: Path) -> Table:
    """PTX beside cubins, in processes one behind the other."""
    one, many = folder / "one.ptx", folder / "many.ptx"
    cubins = folder / "one.cubin", folder / "many.cubin"
    place = {"CUDA_CACHE_PATH": str(folder / "cache")}
    runs = [
        ("cubin, 1 kernel", cubins[0], place),
        (f"cubin, {MANY} kernels", cubins[1], place),
        ("PTX, 1 kernel, first process", one, place),
        ("PTX, 1 kernel, second process", one, place),
        ("the same with a comment more", folder / "comment.ptx", place),
        (f"PTX, {MANY} kernels, first process", many, place),
        (f"PTX, {MANY} kernels, second process", many, place),
        ("the same, CUDA_CACHE_DISABLE=1", many, place | {"CUDA_CACHE_DISABLE": "1"}),
        ("the same, CUDA_CACHE_MAXSIZE=100000", many, place | {"CUDA_CACHE_MAXSIZE": "100000"}),
        ("the same, once more without it", many, place),
        ("PTX, 1 kernel, folder that cannot be made", one, {"CUDA_CACHE_PATH": "/proc/none"}),
    ]
    rows = []
    for title, file, environment in runs:
        for answer in child("load", file, **environment):
            values = milliseconds(answer[1:6])
            rows.append([title, file.stat().st_size >> 10, *values, content(folder / "cache")])
    columns = ["what", "KiB of the file", "load, ms", "function, ms", "first launch, ms"]
    columns += ["second launch, ms", "load again, ms", "the driver's cache afterwards"]
    return Table("The driver's cache", TEXTS["cache"], columns, filled(rows, len(columns)))


def lazy(folder: Path) -> Table:
    """Lazy and eager loading by the number of kernels."""
    rows = []
    files = [folder / f"{name}.cubin" for name in ("empty", "one", "some", "many")]
    for mode in ("LAZY", "EAGER"):
        for file, answer in zip(
            files, child("load", *files, CUDA_MODULE_LOADING=mode), strict=False
        ):
            name = f"{file.stem}, {file.stat().st_size >> 10} KiB"
            rows.append([mode, name, *milliseconds(answer[1:])])
    columns = ["loading", "cubin", "load, ms", "function, ms", "first launch, ms"]
    columns += ["second launch, ms", "load again, ms", "KiB of the device, loaded"]
    columns += ["KiB, launched"]
    return Table("Lazy and eager loading", TEXTS["lazy"], columns, filled(rows, len(columns)))


def memory(folder: Path) -> Table:
    """Memory of the device through loads and unloads."""
    rows = []
    for mode in ("LAZY", "EAGER"):
        answers = child("memory", folder / "many.cubin", MANY, CUDA_MODULE_LOADING=mode)
        rows += [[mode, *milliseconds(answer)] for answer in answers]
    columns = ["loading", "state", "KiB more in use", "ms of the last step"]
    return Table("Memory of loaded code", TEXTS["memory"], columns, filled(rows, 4))


def errors(folder: Path) -> Table:
    """What is refused, with what error, at which step."""
    text = source(1)
    files: dict[str, bytes] = {}
    for arch in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_120"):
        files[f"cubin {arch}"] = compiled(text, arch)
    for arch in ("80", "90", "90a", "100", "100f", "120"):
        code = cell(lambda arch=arch: compiled(text, f"compute_{arch}", "ptx"))
        if isinstance(code, bytes):
            files[f"PTX compute_{arch}"] = code + b"\0"
    good, ptx = files["cubin sm_90a"], files["PTX compute_80"]
    files["PTX without a zero byte at its end"] = ptx.rstrip(b"\0")
    files["PTX of a newer version"] = ptx.replace(b".version 9.", b".version 19.")
    files["PTX with a line of nonsense"] = ptx.replace(b".reg", b".rge", 1)
    files["LTO-IR sm_90a"] = compiled(text, "sm_90a", "ltoir")
    files["text"] = b"no code at all, but more than some bytes of text\0"
    files["zeros"] = bytes(4096)
    files["cubin, one byte of its code changed"] = changed(good)
    files["cubin, k0 renamed to q0"] = good.replace(b"k0", b"q0")
    files["cubin, half of it"] = good[: len(good) // 2] + bytes(len(good) // 2)
    rows = []
    paths = []
    for name, code in files.items():
        paths.append(folder / "refused" / name)
        paths[-1].parent.mkdir(exist_ok=True)
        paths[-1].write_bytes(code)
    while paths:
        answers = child("refused", *paths)
        done = [a for a in answers if a[0] in files]
        rows += answers
        paths = paths[len(done) + 1 :] if len(done) < len(paths) else []
    columns = ["file", "cuLibraryLoadData, function and launch", "cuModuleLoadData"]
    return Table("What is refused", TEXTS["errors"], columns, filled(rows, 3))


def changed(cubin: bytes) -> bytes:
    """A constant of the code changed, far from all headers."""
    at = cubin.find(struct.pack("<f", 9.5))
    return cubin[:at] + struct.pack("<f", 9.75) + cubin[at + 4 :] if at > 0 else cubin


def attributes(folder: Path) -> Table:
    rows = child("attributes", folder / "one.cubin")
    columns = ["shared memory permitted", "by the CUkernel", "by its CUfunction"]
    columns += ["by that of the same file loaded again"]
    return Table("Attributes of a kernel", TEXTS["attributes"], columns, filled(rows, 4))


def unloading(folder: Path) -> Table:
    rows = []
    for mode in ("LAZY", "EAGER"):
        files = folder / "spin.cubin", folder / "some.cubin"
        answers = child("unload", *files, CUDA_MODULE_LOADING=mode)
        rows += [[mode, *milliseconds(answer)] for answer in answers]
    columns = ["loading", "call while a kernel of 50 ms runs", "ms", "ms until the device is idle"]
    return Table("Loading beside a running kernel", TEXTS["unloading"], columns, filled(rows, 4))


def measure() -> list[Table]:
    tables = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text, many = source(1), source(MANY)
        files = {
            "empty.cubin": compiled('extern "C" __global__ void k0(float* out, int n) {}'),
            "one.cubin": compiled(text),
            "some.cubin": compiled(source(16)),
            "many.cubin": compiled(many),
            "spin.cubin": compiled(SOURCE),
            "one.ptx": compiled(text, "compute_90", "ptx") + b"\0",
            "many.ptx": compiled(many, "compute_90", "ptx") + b"\0",
        }
        files["comment.ptx"] = b"// one line more\n" + files["one.ptx"]
        for file, code in files.items():
            (folder / file).write_bytes(code)
        (folder / "cache").mkdir()
        for part in (cache, lazy, memory, attributes, unloading, errors):
            answer = cell(lambda part=part: part(folder))
            failed = Table(part.__name__, str(answer), ["failed"], [])
            tables.append(answer if isinstance(answer, Table) else failed)
    return tables
