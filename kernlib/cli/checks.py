"""What `kernlib doctor` checks: Python packages, GPUs, the compiler, settings; and of the cache the
store, its disk, and the bundles behind it. Its table of all checks is at the end."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kernlib.cli import kernels, machine, places
from kernlib.cli.output import counted, size
from kernlib.errors import INSTALL
from kernlib.settings import CACHE_ADVICE

DRIVER_VERSION = Path("/proc/driver/nvidia/version")
INSTALL_CUDA_12 = 'pip install ".[cu12]" in the checkout of kernlib'
OLDEST_DRIVER = {"12": 525, "13": 580}  # that runs programs of this CUDA major
REPAIR = "`kernlib cache verify --repair` moves it aside; its kernels are compiled again"
PROBE = """#include "common/types.cuh"
extern "C" __global__ void probe(float *x) { x[threadIdx.x] += 1.0f; }
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line. ``advice`` says what to do about a line that is not ok; only a ``needed`` one makes
    the command fail. ``details`` are for programs."""

    label: str
    text: str
    advice: str = ""
    needed: bool = False
    details: dict = field(default_factory=dict)

    @property
    def mark(self) -> str:
        return ("FAIL" if self.needed else "note") if self.advice else "ok"

    def facts(self) -> dict:
        """The line as JSON."""
        texts = {"label": self.label, "text": self.text, "advice": self.advice}
        return {"status": self.mark.lower(), **texts, "details": self.details}


def kernlib() -> list[Finding]:
    import kernlib
    from kernlib.jit import sources

    python = platform.python_version()
    text = f"{kernlib.__version__}, Python {python}, sources in {sources.root()}"
    details = {"version": kernlib.__version__, "python": python, "sources": str(sources.root())}
    return [Finding("kernlib", text, details=details)]


def torch() -> list[Finding]:
    import torch

    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    if torch.version.hip:
        build = f"built for ROCm {torch.version.hip}"
    advice = ""
    if DRIVER_VERSION.exists() and not torch.version.cuda:
        advice = (
            "this machine has an NVIDIA driver: to use its GPU, install a CUDA build of torch, as "
            "pytorch.org/get-started says"
        )
    details = {"version": str(torch.__version__), "cuda": torch.version.cuda}
    return [Finding("torch", f"{torch.__version__}, {build}", advice, details=details)]


def gpus() -> list[Finding]:
    seen = machine.gpus()
    if not seen:
        text = "none that torch can use; CPU tensors are computed in PyTorch, kernels can be built"
        return [Finding("GPU", text, _unseen())]
    return [_gpu(gpu) for gpu in seen]


def _unseen() -> str:
    """What to do where NVIDIA's driver is here, and torch, built for CUDA, sees no GPU; "" where
    there is no driver, and where the line of torch or of the driver says what is wrong."""
    import torch

    if not DRIVER_VERSION.exists() or not torch.version.cuda or _too_old(torch.version.cuda):
        return ""
    if (hidden := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return f"CUDA_VISIBLE_DEVICES={hidden} says which GPUs torch may see: unset it"
    return "NVIDIA's driver is here: nvidia-smi lists the GPUs that it sees, or says what is wrong"


def _gpu(gpu: machine.Gpu) -> Finding:
    text = f"{gpu.name}, kernels are compiled for {gpu.arch}" if gpu.arch else gpu.name
    details = {"name": gpu.name, "arch": gpu.arch}
    return Finding(f"GPU {gpu.index}", text, gpu.problem, details=details)


def driver() -> list[Finding]:
    """The driver's version, and whether it can load what the installed NVRTC makes; nothing where
    no driver is needed."""
    import torch

    if torch.version.hip:
        return []
    if not torch.cuda.is_available():
        return _too_old(torch.version.cuda or "")
    from cuda.bindings import driver

    from kernlib.jit import toolchain

    number = int(driver.cuDriverGetVersion()[1])
    version, cuda = _driver_text(), f"{number // 1000}.{number % 1000 // 10}"
    text = f"{version or 'driver'}, for CUDA {cuda}"
    details = {"version": version or None, "cuda": cuda}
    made_for = toolchain.nvrtc_version().partition(".")[0]
    if made_for.isdecimal() and int(made_for) > number // 1000:
        advice = f"kernels of NVRTC {made_for} do not load there: update it, or {INSTALL_CUDA_12}"
        return [Finding("driver", text, advice, needed=True, details=details)]
    return [Finding("driver", text, details=details)]


def _too_old(cuda: str) -> list[Finding]:
    """The driver, where it is older than torch's CUDA, which then says no more than that it finds
    no GPU."""
    version, major = _driver_text(), cuda.partition(".")[0]
    oldest = OLDEST_DRIVER.get(major, 0)
    if not version or int(version.partition(".")[0]) >= oldest:
        return []
    instead = f", or {INSTALL_CUDA_12}" if major != "12" else ""
    text = f"{version}, for which torch of CUDA {cuda} is too new: it finds no GPU"
    advice = f"update it to {oldest} or newer{instead}"
    return [Finding("driver", text, advice, details={"version": version, "cuda": None})]


def _driver_text() -> str:
    text = DRIVER_VERSION.read_text() if DRIVER_VERSION.exists() else ""
    number = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return number[0] if number else ""


def wheels() -> list[Finding]:
    from kernlib.jit import toolchain

    findings = [_wheel("cuda.core", "cuda-core"), _wheel("bindings", "cuda-bindings"), _nvmath()]
    nvrtc = toolchain.nvrtc_version()
    if nvrtc == toolchain.UNKNOWN_VERSION:
        return [*findings, Finding("NVRTC", "not installed", INSTALL, needed=True)]
    return [*findings, Finding("NVRTC", nvrtc, details={"version": nvrtc})]


def _wheel(label: str, name: str) -> Finding:
    from importlib import metadata  # 20 ms that help need not wait for

    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        return Finding(label, f"{name} is not installed", INSTALL, needed=True)
    return Finding(label, f"{name} {version}", details={"version": version})


def _nvmath() -> Finding:
    """The wheel by which solvers call cuSOLVER. Kernels and CPU tensors need none."""
    finding = _wheel("nvmath", "nvmath-python")
    if finding.advice:
        return Finding("nvmath", f"{finding.text}; kernlib.linalg has torch in place of cuSOLVER")
    return finding


def headers() -> list[Finding]:
    from kernlib.errors import UnsupportedError
    from kernlib.jit import toolchain

    try:
        folder = toolchain.header_directory()
    except UnsupportedError:
        return [Finding("headers", "no CUDA headers from pip; no kernel of today needs them")]
    if not (Path(folder) / "cuda_fp16.h").exists():
        text = f"{folder} lacks cuda_fp16.h"
        return [Finding("headers", f"{text}; no kernel of today needs it")]
    return [Finding("headers", folder, details={"path": folder})]


def compiles() -> list[Finding]:
    """A real compile that includes our headers, for each target of this machine."""
    first, *rest = machine.archs() or [machine.ARCH_WITHOUT_GPU]
    return [_compile(first, ", with loading the compiler"), *map(_compile, rest)]


def _compile(arch: str, remark: str = "") -> Finding:
    from kernlib.errors import CompileError, UnsupportedError
    from kernlib.jit import compiler, toolchain
    from kernlib.jit.spec import KernelSpec

    spec = KernelSpec("doctor", PROBE, "probe", 32, description="the probe of kernlib doctor")
    try:
        kernel = compiler.compile_spec(spec, arch)
    except UnsupportedError as error:
        absent = toolchain.absent()
        text = f"not possible without {absent}" if absent else "not possible"
        return Finding("compile", text, INSTALL if absent else str(error), needed=True)
    except CompileError as error:
        advice = "reinstall kernlib and its compiler: " + INSTALL
        return Finding("compile", str(error), advice, needed=True)
    milliseconds = int(kernel.meta["compile_ms"])
    text = f"{milliseconds} ms for {arch}{remark}"
    return Finding("compile", text, details={"arch": arch, "ms": milliseconds})


def settings() -> list[Finding]:
    from kernlib import settings

    try:
        settings.Settings.read()
    except ValueError as error:
        advice = "unset the variable, or give it such a value"
        return [Finding("settings", str(error), advice, needed=True)]
    unread = map(_unread, settings.unread(os.environ))
    return [*map(_setting, settings.VARIABLES), *unread]


def _unread(name: str) -> Finding:
    from kernlib import settings
    from kernlib.hints import spelling

    names = [variable.name for variable in settings.VARIABLES]
    text = f"{name} is set, and kernlib reads no such variable{spelling.argument(name, names)}"
    advice = f"unset {name}; those that kernlib reads are {', '.join(names)}"
    return Finding("settings", text, advice, details={"name": name, "value": os.environ[name]})


def _setting(variable) -> Finding:
    value = os.environ.get(variable.name) or None
    text = f"{variable.name}={value}" if value else f"{variable.name} is {variable.default}"
    return Finding("settings", text, details={"name": variable.name, "value": value})


# The cache.


def store() -> list[Finding]:
    """The store, what happened to it, and room on its disk."""
    folder = _folder()
    if folder is None:
        return []  # said under settings
    before = places.before_opening(folder)
    if before.pages:  # opening it might end this process by a signal
        text = f"the store in {folder} is damaged: {before.pages[0]}"
        return [Finding("cache", text, REPAIR, needed=True), *_aside(folder)]
    layers, messages = places.opened()
    if layers.kind == "memory":
        advice = _lowered(CACHE_ADVICE)
        return [Finding("cache", places.why_in_memory(messages), advice, needed=True)]
    facts = layers.store.info()
    findings = [_contents(folder, facts), *_died(before.died), *_damaged(layers.store)]
    return [*findings, *_aside(folder), _room(folder, facts)]


def _folder() -> Path | None:
    try:
        return places.folder()
    except ValueError:
        return None


def _lowered(text: str) -> str:
    return text[0].lower() + text[1:]


def _contents(folder: Path, facts: dict) -> Finding:
    used = f"{size(facts['bytes_used'])} of {size(facts['budget'])}"
    counts = f"{counted(facts['entries'], 'kernel')}, {counted(facts['tuning'], 'tuning result')}"
    return Finding("cache", f"{facts['kind']}, {folder}, {counts}, {used}", details=facts)


def _died(died: list[float]) -> list[Finding]:
    if not died:
        return []
    text = (
        f"{counted(len(died), 'process')} died with it open, the last of those since "
        f"{kernels.moment(died[-1])}; its pages are read now and whole"
    )
    return [Finding("cache", text, details={"died": died})]


def _damaged(store) -> list[Finding]:
    contents = places.contents(store.items())
    if not contents.damaged:
        return []
    of = f"of {contents.kernels + len(contents.damaged)}"
    text = f"{counted(len(contents.damaged), 'damaged entry')} {of}, missing when they are wanted"
    advice = "`kernlib cache verify --repair` drops them"
    details = {"damaged": [key.hex() for key in contents.damaged]}
    return [Finding("cache", text, advice, details=details)]


def _aside(folder: Path) -> list[Finding]:
    """The damaged stores beside it."""
    return [
        Finding(
            "cache",
            f"a damaged store was moved aside: {old['path']}, {size(old['bytes'])}",
            f"nothing reads it: rm -r {old['path']}, or let `kernlib cache prune` remove it",
            details=old,
        )
        for old in places.aside_facts(folder)
    ]


def _room(folder: Path, facts: dict) -> Finding:
    """Whether the disk has what the store may still take."""
    free = shutil.disk_usage(folder).free
    growth = max(0, facts["budget"] - facts["bytes_used"])
    text = f"{size(free)} left on its disk"
    details = {"free": free, "may_grow": growth}
    if free >= growth:
        return Finding("disk", text, details=details)
    advice = f"the cache may still grow by {size(growth)}: make room, or lower KERNLIB_CACHE_BYTES"
    return Finding("disk", text, advice, details=details)


def bundles() -> list[Finding]:
    """What each bundle holds, above all for this machine."""
    folder = _folder()
    if folder is None:
        return []
    layers = None if places.before_opening(folder).pages else places.opened()[0]
    here = machine.archs()
    return [_bundle(mounted, here) for mounted in places.mounted(layers)]


def _bundle(mounted: places.Mounted, here: list[str]) -> Finding:
    if mounted.bundle is None:
        text = f"{mounted.folder} is passed over: {mounted.reason}"
        advice = "mend it, or take the folder out of KERNLIB_CACHE_DIR"
        return Finding("bundle", text, advice, details={"path": str(mounted.folder), "archs": {}})
    contents = places.contents(mounted.bundle.items())
    listed = f": {places.per_arch(contents.archs)}" if contents.archs else ""
    text = f"{mounted.folder}, {counted(contents.kernels, 'kernel')}{listed}"
    details = {"path": str(mounted.folder), "archs": dict(sorted(contents.archs.items()))}
    details["damaged"] = len(contents.damaged)
    return Finding("bundle", text, _bundle_advice(contents, here), details=details)


def _bundle_advice(contents: places.Contents, here: list[str]) -> str:
    from kernlib.jit import toolchain

    major = toolchain.cuda_major()
    if contents.damaged:
        return f"{counted(len(contents.damaged), 'entry')} damaged: have it exported again"
    if not contents.kernels:
        return "it is empty: take it out of KERNLIB_CACHE_DIR, or have it exported again"
    if major != toolchain.UNKNOWN_VERSION and not contents.majors[major]:
        return f"nothing in it is for CUDA {major}, so it is never found: have one made with that"
    if here and not any(contents.archs[arch] for arch in here):
        options = " ".join(f"--arch {arch}" for arch in here)
        return f"nothing in it is for this machine's GPU: compile it with {options}, export again"
    return ""


# All of them.

CHECKS: tuple[tuple[str, Callable[[], list[Finding]]], ...] = (
    ("kernlib", kernlib),
    ("torch", torch),
    ("driver", driver),
    ("GPU", gpus),
    ("wheels", wheels),
    ("headers", headers),
    ("compile", compiles),
    ("settings", settings),
    ("cache", store),
    ("bundle", bundles),
)


def checked(label: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """What one of CHECKS finds."""
    try:
        return check()
    except Exception as error:  # a check that breaks is a finding, and the others still run
        advice = "fix what this message names, then run kernlib doctor again"
        return [Finding(label, f"{type(error).__name__}: {error}", advice, needed=True)]


def advised(findings: list[Finding]) -> list[str]:
    """What findings advise, each once; what keeps kernels from being compiled or kept is first."""
    steps = []
    for mark in ("FAIL", "note"):
        labels: dict[str, list[str]] = {}  # of findings that one advice serves
        for finding in findings:
            if finding.mark == mark:
                labels.setdefault(finding.advice, []).append(finding.label)
        steps += [f"{', '.join(dict.fromkeys(of))}: {advice}" for advice, of in labels.items()]
    return steps
