"""Names of kernels, as profilers show them."""

from __future__ import annotations

import re

from kernlib.descriptors.epilogues import Epilogue
from kernlib.jit.spec import KernelSpec


def named(spec: KernelSpec, *words: object, epilogue: tuple[Epilogue, ...] = ()) -> KernelSpec:
    """The spec with a longer entry name, such as
    ``kernlib_sparse_slices_u4_float16_8x2_bias_gelu``. The spec's entry has named family and kernel
    so far; ``words`` add dtype, tile and whatever else tells variants apart. Device code keeps the
    short name, which a ``#define`` replaces."""
    epilogues = (type(part).__name__ for part in epilogue)
    said = re.findall(r"[a-z0-9]+", " ".join([*map(str, words), *epilogues]).lower())
    name = "_".join(["kernlib", spec.entry, *said])
    return spec._replace(entry=name, source=f"#define {spec.entry} {name}\n{spec.source}")
