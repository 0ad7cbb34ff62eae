"""Layouts: all of a compressed matrix but its tensors, as one text; and formats by their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from kernlib.families.sparse.lowering.quantised import QUANTISED
from kernlib.runtime.dtypes import KERNEL_TYPES

if TYPE_CHECKING:
    from kernlib.families.sparse.formats.quantised import QuantisedFormat
    from kernlib.families.sparse.formats.slices import SlicesFormat

# Versions of SparseMatrix.state(), the second for formats whose values have fewer bits.
VERSION, QUANTISED_VERSION = 2, 3
DTYPES = {name: dtype for dtype, name in KERNEL_TYPES.items()}


def format_of(format: str) -> ModuleType | SlicesFormat | QuantisedFormat:
    """A format by its name: TENSORS, encode, decode, nbytes, check. Raises ValueError for one that
    is not known."""
    return formats().format_of(format)


@lru_cache(maxsize=1)
def formats() -> ModuleType:
    """The module of all formats, imported when it is first asked for."""
    return import_module("kernlib.families.sparse.formats.registry")


def version_of(format: str) -> int:
    """The version of the states of a format."""
    return QUANTISED_VERSION if format in QUANTISED else VERSION


def layout_text(format: str, shape: tuple[int, int], dtype: torch.dtype, facts: Mapping) -> str:
    """The text of ``SparseMatrix.layout``, such as ``bitmap 64x256 float16 largest=528``."""
    listed = [f"{name}={int(value)}" for name, value in sorted(facts.items())]
    return " ".join([format, f"{int(shape[0])}x{int(shape[1])}", KERNEL_TYPES[dtype], *listed])


def parse_layout(layout: str) -> tuple[str, tuple[int, int], torch.dtype, Mapping[str, int]]:
    """Format, shape, dtype and facts of a layout."""
    return _parse(layout) if is_dynamo_compiling() else _parsed(layout)


def _parse(layout: str) -> tuple[str, tuple[int, int], torch.dtype, Mapping[str, int]]:
    format, size, dtype, *facts = layout.split(" ")
    rows, cols = size.split("x")
    pairs = (fact.split("=") for fact in facts)
    parsed = MappingProxyType({name: int(value) for name, value in pairs})
    return format, (int(rows), int(cols)), DTYPES[dtype], parsed


_parsed = lru_cache(maxsize=4096)(_parse)  # Dynamo warns of a cache


def split(layout: str, joined: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors of a layout's matrix, in order, that lie in one. Raises ValueError for one that
    has no room for them, and for a format whose tensors do not lie so."""
    format, shape, _, facts = parse_layout(layout)
    codec = format_of(format)
    if not hasattr(codec, "split"):
        raise ValueError(f"a matrix of format {format!r} does not lie in one tensor")
    return codec.split(joined, facts, shape)


TOGETHER = "joined"  # in a form: one tensor holds those of the matrix


def form_text(layout: str, is_joined: bool) -> str:
    """The parts of a layout that are no numbers: format, dtype, the names of the facts, and whether
    one tensor holds those of the matrix."""
    format, _, dtype, *facts = layout.split(" ")
    names = (fact.split("=")[0] for fact in facts)
    return " ".join([format, dtype, *names, *[TOGETHER] * is_joined])


class Form(NamedTuple):
    """What a form says: with how many tensors of the matrix an operator takes it, in front of the
    one that says the numbers."""

    format: str
    dtype: torch.dtype
    facts: tuple[str, ...]
    count: int
    is_joined: bool


@lru_cache(maxsize=256)
def parse_form(text: str) -> Form | None:
    """A form; None for a layout."""
    format, dtype, *words = text.split(" ")
    if dtype not in DTYPES:
        return None
    is_joined = words[-1:] == [TOGETHER]
    count = 1 if is_joined else len(format_of(format).TENSORS)
    facts = words[:-1] if is_joined else words
    return Form(format, DTYPES[dtype], tuple(facts), count, is_joined)


def count_of(text: str) -> int:
    """With how many tensors an operator takes a matrix of a layout or form."""
    form = parse_form(text)
    if form is None:
        return len(format_of(parse_layout(text)[0]).TENSORS)
    return form.count + 1


def sizes_as_tensor(
    shape: tuple[int, int], facts: Mapping[str, int], device: torch.device
) -> torch.Tensor:
    """An empty tensor whose shape says that of the matrix and its facts, as torch.compile makes
    symbols of shapes: two more each, since 0 and 1 would be constants. The first size is 0, and no
    stride is a product of sizes, which torch would not let overflow."""
    numbers = [*shape, *(facts[name] for name in sorted(facts))]
    sizes = 0, *(n + 2 for n in numbers)
    return torch.empty_strided(sizes, [0] * len(sizes), dtype=torch.uint8, device=device)


def shape_of(text: str, tensors: Sequence[torch.Tensor]) -> tuple[tuple[int, int], torch.dtype]:
    """Shape, which may be of symbols, and dtype of a matrix as an operator takes it."""
    form = parse_form(text)
    if form is None:
        return parse_layout(text)[1:3]
    _, rows, cols, *_ = tensors[form.count].shape
    return (rows - 2, cols - 2), form.dtype


def told(text: str, tensors: Sequence[torch.Tensor]) -> tuple[str, Sequence[torch.Tensor]]:
    """The layout and the tensors of a matrix as an operator takes it."""
    form = parse_form(text)
    if form is None:
        return text, tensors
    rows, cols, *numbers = (size - 2 for size in tensors[form.count].shape[1:])
    facts, operands = dict(zip(form.facts, numbers, strict=True)), tensors[: form.count]
    if form.is_joined:
        operands = format_of(form.format).split(operands[0], facts, (rows, cols))
    return layout_text(form.format, (rows, cols), form.dtype, facts), operands


def untransformed():
    """A context outside of transforms of torch.func. These wrap each tensor that is made inside,
    and kernels take no wrapped tensors."""
    active = torch._C._are_functorch_transforms_active()
    return torch._C._DisableFuncTorch() if active else nullcontext()
