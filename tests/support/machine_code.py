"""Machine code of the goldens' kernels, without names, before and after a change of their text.

    python -m tests.support.machine_code note FILE [--family F] [--kernel WORD] [--count N]
    python -m tests.support.machine_code compare FILE

``note`` compiles up to N kernels of each header for sm_90a and writes their digests by case and
place; ``compare`` compiles the kernels of the same cases and places, and says what differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

from kernlib.jit import compiler
from kernlib.jit.spec import KernelSpec
from tests.architecture import golden_blocks, golden_cases, golden_kronecker
from tests.support.compiled_kernels import EXECUTABLE

ARCH = "sm_90a"
COUNT = 6


def kernels() -> Iterator[tuple[str, KernelSpec]]:
    """Every kernel of the goldens once, and a name that a change of its text leaves alone: what
    people read of it, which says its variant."""
    seen = set()
    every = chain(golden_cases.cases(), golden_blocks.specs(), golden_kronecker.specs())
    for case, call in every:
        for spec in call():
            name = f"{spec.entry} | {spec.description} | {spec.threads} {spec.shared_bytes}"
            name += f" | {case}" * (spec.family == "pairwise")
            if name not in seen:
                seen.add(name)
                yield name, spec


def header(spec: KernelSpec) -> str:
    """The last file that a source includes."""
    return re.findall(r'#include "(.*)"', spec.source)[-1]


def digest(spec: KernelSpec) -> str:
    """Of instructions, registers and memory; an error's text of what does not compile."""
    try:
        entry = compiler.compile_spec(spec, ARCH)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:400]}"
    parts = [entry.meta[name] for name in ("registers", "spill_bytes", "shared_bytes")]
    code = hashlib.sha256()
    for section in executable(entry.cubin):
        code.update(section)
    return " ".join([code.hexdigest()[:24], *map(str, parts), str(spec.threads)])


def executable(cubin: bytes) -> list[bytes]:
    """The sections of an ELF file that hold instructions."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count = struct.unpack_from("<2H", cubin, 0x3A)
    held = []
    for at in range(sections, sections + size * count, size):
        flags, offset, length = struct.unpack_from("<Q8xQQ", cubin, at + 8)
        if flags & EXECUTABLE:
            held.append(cubin[offset : offset + length])
    return held


def note(path: Path, family: str, kernel: str, count: int) -> None:
    groups = defaultdict(list)
    for name, spec in kernels():
        if family in ("", spec.family) and kernel in header(spec):
            order = hashlib.sha256(name.encode()).hexdigest()
            groups[header(spec)].append((order, name, spec))
    chosen = {name: spec for group in groups.values() for _, name, spec in sorted(group)[:count]}
    path.write_text(json.dumps(digests(chosen), indent=1))
    print(f"{len(chosen)} kernels of {len(groups)} headers")


def compare(path: Path) -> int:
    before = json.loads(path.read_text())
    now = digests({name: spec for name, spec in kernels() if name in before})
    wrong = [name for name in before if now.get(name) != before[name]]
    for name in wrong:
        print(f"{name}\n  before {before[name]}\n  now    {now.get(name, 'not among them')}")
    print(f"{len(before) - len(wrong)} of {len(before)} kernels are the same machine code")
    return int(bool(wrong))


def digests(specs: dict[str, KernelSpec]) -> dict[str, str]:
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return dict(zip(specs, pool.map(digest, specs.values()), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("note", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--family", default="")
    parser.add_argument("--kernel", default="", help="a part of its header's path")
    parser.add_argument("--count", type=int, default=COUNT)
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.file)
    note(options.file, options.family, options.kernel, options.count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
