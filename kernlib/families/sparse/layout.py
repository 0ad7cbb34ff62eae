"""Layouts: all of a compressed matrix but its tensors, as one text; and formats by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def form_text(layout: str) -> str:
    """What of a layout is no number: format, dtype and the names of the facts."""
    format, _, dtype, *facts = layout.split(" ")
    return " ".join([format, dtype, *(fact.split("=")[0] for fact in facts)])


@lru_cache(maxsize=256)
def parse_form(text: str) -> tuple[str, torch.dtype, tuple[str, ...], int] | None:
    """Format, dtype and names of facts of a form, and the number of the matrix's tensors, behind
    which are those that say the numbers; None for a layout."""
    format, dtype, *facts = text.split(" ")
    if dtype not in DTYPES:
        return None
    return format, DTYPES[dtype], tuple(facts), len(format_of(format).TENSORS)


def count_of(text: str) -> int:
    """With how many tensors an operator takes a matrix of a layout or form."""
    form = parse_form(text)
    if form is None:
        return len(format_of(parse_layout(text)[0]).TENSORS)
    return form[3] + 1 + len(form[2])


def sizes_as_tensors(
    shape: tuple[int, int], facts: Mapping[str, int], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Empty tensors whose shapes say those of the matrix and its facts, as torch.compile makes
    symbols of shapes: two more each, since 0 and 1 would be constants."""
    numbers = [(shape[0] + 2, shape[1] + 2)] + [(facts[name] + 2,) for name in sorted(facts)]
    carriers = (torch.empty((*sizes, 0), dtype=torch.uint8, device=device) for sizes in numbers)
    return tuple(carriers)


def shape_of(text: str, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], torch.dtype]:
    """Shape, which may be of symbols, and dtype of a matrix as an operator takes it."""
    form = parse_form(text)
    if form is None:
        return parse_layout(text)[1:3]
    rows, cols, _ = tensors[form[3]].shape
    return (rows - 2, cols - 2), form[1]


def told(text: str, tensors: Sequence[torch.Tensor]) -> tuple[str, Sequence[torch.Tensor]]:
    """The layout and the tensors of a matrix as an operator takes it."""
    form = parse_form(text)
    if form is None:
        return text, tensors
    format, dtype, names, count = form
    shape, facts = shape_of(text, tensors)[0], tensors[count + 1 :]
    numbers = {name: t.shape[0] - 2 for name, t in zip(names, facts, strict=True)}
    return layout_text(format, shape, dtype, numbers), tensors[:count]


def untransformed():
    """A context outside of transforms of torch.func. These wrap each tensor that is made inside,
    and kernels take no wrapped tensors."""
    active = torch._C._are_functorch_transforms_active()
    return torch._C._DisableFuncTorch() if active else nullcontext()
