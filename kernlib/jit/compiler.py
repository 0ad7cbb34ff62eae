"""Source text to cubin, with NVRTC through cuda.core. Needs neither a GPU nor a driver."""

from __future__ import annotations

import io
import re
import time

from kernlib.errors import CompileError
from kernlib.jit import sources, toolchain
from kernlib.jit.entry import Entry
from kernlib.jit.spec import KernelSpec

_FUNCTION = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SHARED = re.compile(r"(\d+) bytes smem")

# Errors of NVRTC that are about the source, and texts by which ptxas reports a lack of memory.
_VERDICTS = ("NVRTC_ERROR_COMPILATION", "NVRTC_ERROR_INVALID_OPTION")
_SHORTAGE = ("Memory allocation failure", "out of memory", "Out of memory")


class NoVerdict(CompileError):
    """NVRTC failed for a reason that may pass, such as a lack of memory. It is not remembered."""

    passing = True


def compile_spec(spec: KernelSpec, arch: str) -> Entry:
    """Compile for ``arch``, and return the cubin with a report of its resources.

    Raises CompileError, which shows the lines in question, for bad source; UnsupportedError when
    cuda.core or NVRTC is not installed. Releases the GIL while NVRTC works.
    """
    start = time.perf_counter()
    log = io.StringIO()
    cubin = run_nvrtc(spec, arch, log)
    milliseconds = (time.perf_counter() - start) * 1e3
    meta = {
        "family": spec.family,
        "arch": arch,
        "description": spec.description,
        "nvrtc": toolchain.nvrtc_version(),
        "compile_ms": f"{milliseconds:.0f}",
        "created": f"{time.time():.0f}",
        **_resources(log.getvalue(), spec),
    }
    return Entry(spec.entry, cubin, meta)


def run_nvrtc(spec: KernelSpec, arch: str, log: io.StringIO) -> bytes:
    """The cubin of a specification. What NVRTC and ptxas print goes to ``log``. Raises what
    :func:`compile_spec` raises."""
    core = toolchain.cuda_core()
    name = f"kernlib_{spec.family}.cu"
    headers = toolchain.header_directory() if sources.system_includes(spec.source) else None
    try:
        # no_source_include: no header is looked for in the working directory.
        # no_cache: NVRTC's own cache would answer without the report of resources; kernlib's cache
        # comes before it anyway.
        options = core.ProgramOptions(
            name=name,
            arch=arch,
            std=toolchain.STANDARD,
            include_path=headers,
            no_source_include=True,
            ptxas_options=["-v", *spec.options],
            no_cache=toolchain.nvrtc_caches() or None,
        )
        program = core.Program(sources.assemble(spec.source, name), "c++", options)
        cubin = bytes(program.compile("cubin", logs=log).code)
        toolchain.confirm_nvrtc()
    except Exception as error:
        raise _explain(error, spec, arch) from error
    if not cubin:  # as of a virtual architecture, without an error
        raise CompileError(f"NVRTC made no code of {_source_of(spec, arch)}", log.getvalue(), "")
    return cubin


def _explain(error: Exception, spec: KernelSpec, arch: str) -> Exception:
    text = str(error).replace("\0", "").rstrip()
    if type(error).__name__ != "NVRTCError":
        absent = isinstance(error, (ImportError, OSError, RuntimeError))  # of the library's loading
        return toolchain.not_loaded(error) if absent else error
    if "invalid value for --gpu-architecture" in text:
        advice = f"NVRTC {toolchain.nvrtc_version()} does not know {arch}; install a newer one"
        return CompileError(advice, text, "")
    what = _source_of(spec, arch)
    if not any(verdict in text for verdict in _VERDICTS) or any(it in text for it in _SHORTAGE):
        return NoVerdict(f"NVRTC failed on {what}; the next call tries again", text, "")
    return CompileError(f"NVRTC refused {what}", text, spec.source)


def _source_of(spec: KernelSpec, arch: str) -> str:
    return f"the source of {spec.description or spec.entry} for {arch}"


def _resources(log: str, spec: KernelSpec) -> dict[str, str]:
    function, registers = _FUNCTION.search(log), _REGISTERS.search(log)
    shared = _STATIC_SHARED.search(log)
    return {
        "registers": registers[1] if registers else "?",
        "spill_bytes": str(int(function[2]) + int(function[3])) if function else "?",
        "shared_bytes": str(spec.shared_bytes + (int(shared[1]) if shared else 0)),
    }
