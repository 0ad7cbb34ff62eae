"""Layouts: all of a compressed matrix but its tensors, as one text; and formats by their names."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.runtime.dtypes import KERNEL_TYPES

if TYPE_CHECKING:
    from kernlib.families.sparse.formats.slices import SlicesFormat

VERSION = 2  # of what SparseMatrix.state() returns
DTYPES = {name: dtype for dtype, name in KERNEL_TYPES.items()}


def format_of(format: str) -> ModuleType | SlicesFormat:
    """A format by its name: TENSORS, encode, decode, nbytes, check. Raises ValueError for one that
    is not known."""
    return formats().format_of(format)


@lru_cache(maxsize=1)
def formats() -> ModuleType:
    """The module of all formats, imported when it is first asked for."""
    return import_module("kernlib.families.sparse.formats.registry")


def layout_text(format: str, shape: tuple[int, int], dtype: torch.dtype, facts: Mapping) -> str:
    """The text of ``SparseMatrix.layout``, such as ``bitmap 64x256 float16 largest=528``."""
    known = [f"{name}={int(value)}" for name, value in sorted(facts.items())]
    return " ".join([format, f"{int(shape[0])}x{int(shape[1])}", KERNEL_TYPES[dtype], *known])


def parse_layout(layout: str) -> tuple[str, tuple[int, int], torch.dtype, Mapping[str, int]]:
    """Format, shape, dtype and facts of a layout."""
    return _parse(layout) if is_dynamo_compiling() else _parsed(layout)


def _parse(layout: str) -> tuple[str, tuple[int, int], torch.dtype, Mapping[str, int]]:
    format, size, dtype, *facts = layout.split(" ")
    rows, cols = size.split("x")
    pairs = (fact.split("=") for fact in facts)
    known = MappingProxyType({name: int(value) for name, value in pairs})
    return format, (int(rows), int(cols)), DTYPES[dtype], known


_parsed = lru_cache(maxsize=4096)(_parse)  # Dynamo warns of a cache


def untransformed():
    """A context outside of transforms of torch.func. These wrap each tensor that is made inside,
    and kernels take no wrapped tensors."""
    active = torch._C._are_functorch_transforms_active()
    return torch._C._DisableFuncTorch() if active else nullcontext()
