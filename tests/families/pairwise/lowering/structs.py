"""The parameter struct of a CUDA source of the family as ctypes has it, which lays out as a C
compiler does."""

from __future__ import annotations

import ctypes
import re

from kernlib.jit import sources


class Scalar(ctypes.Structure):
    _fields_ = [("value", ctypes.c_double), ("device", ctypes.c_uint64)]


KINDS = {
    "i64": ctypes.c_int64, "int": ctypes.c_int32, "double": ctypes.c_double,
    "View": ctypes.c_int64 * 3, "Scalar": Scalar,
}  # fmt: skip


def parameters_type(
    name: str, scalars: int = 0, struct: str = "Parameters"
) -> type[ctypes.Structure]:
    """The ``struct`` of a file of kernel_sources/pairwise, for so many hyperparameters."""
    text = (sources.root() / "pairwise" / name).read_text()
    body = re.search(rf"struct {struct} \{{(.*?)\n\}};", text, re.S)[1]
    fields = []
    for line in re.sub(r"//.*", "", body).split(";"):
        if not line.strip():
            continue
        kind, declared = re.fullmatch(r"\s*((?:const )?\w+\*?)\s+(.*)", line.strip()).groups()
        base = ctypes.c_uint64 if "*" in kind else KINDS[kind]
        for each in declared.split(","):
            field, array = re.fullmatch(r"\s*(\w+)(\[SCALARS\])?", each).groups()
            fields.append((field, base * scalars if array else base))
    return type(struct, (ctypes.Structure,), {"_fields_": fields})
