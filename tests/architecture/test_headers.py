"""Every header can be read by itself: behind what is generated for its kernel, and before anything
else of kernel_sources."""

from __future__ import annotations

from functools import cache

import pytest

from kernlib.jit import compiler, sources
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import config, kernel
from tests.architecture.package import PACKAGE, ROOT
from tests.support import machine_code

PACKAGES = [
    ".".join(path.relative_to(ROOT).parts)
    for path in sorted(PACKAGE.glob("families/*/kernels/**/"))
    if (path / "__init__.py").is_file()
]
HEADERS = {one.header for package in PACKAGES for one in kernel.classes(package)}
ALONE = 'extern "C" __global__ void alone() {}\n'


@cache
def samples() -> dict[str, str]:
    """Of each header that kernels end with, what is generated in front of it for one of them."""
    held: dict[str, str] = {}
    for _, spec in machine_code.kernels():
        header = machine_code.header(spec)
        if header not in held and header in HEADERS:
            held[header] = spec.source.rsplit("#include", 1)[0]
    return held


def test_classes_name_headers_that_there_are():
    assert not [name for name in HEADERS if not (sources.root() / name).is_file()]


@pytest.mark.slow
def test_headers_are_read_alone():
    """Of headers that several kernels include, behind the text of each."""
    wrong = []
    for main, text in samples().items():
        for name in sources.closure(f'#include "{main}"'):
            if name == main:
                continue
            is_plain = name.startswith("common/") and "Config::" not in sources.read(name)
            source = f'{"" if is_plain else text}#include "{name}"\n{ALONE}'
            try:
                compiler.compile_spec(KernelSpec("test", source, "alone", 32), "sm_90a")
            except Exception as error:
                wrong.append(f"{name}, of {main}: {str(error)[:600]}")
    assert not wrong, "\n".join(wrong)


def test_a_header_says_which_fact_its_kernel_lacks():
    facts = dict.fromkeys(config.facts_read("blocksparse/decode/decode.cuh"), 1)
    del facts["WARPS"]
    with pytest.raises(config.KernlibError, match=r"decode.cuh reads Config::WARPS, which"):
        config.of_header("blocksparse/decode/decode.cuh", facts)
