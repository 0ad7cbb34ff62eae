"""The formats of compressed matrices by name, and which of them is fastest for a matrix.

Each format is a module, or an object of :mod:`kernlib.families.sparse.formats.slices`, with FORMAT,
TENSORS, ``encode``, ``decode``, ``nbytes`` and ``check``, and of a matrix by its entries
``encode_entries`` and ``measure_entries``. One that can say its bytes without a synchronisation has
``measure(dense, counts)`` too, ``counts`` being the bitmap format's ``chunk_counts``.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from itertools import product
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from kernlib.descriptors.base import shown
from kernlib.families.sparse.formats.encoding import check_columns, counted, matrix
from kernlib.families.sparse.lowering.codes import SLICES
from kernlib.families.sparse.lowering.problem import Scope
from kernlib.families.sparse.lowering.quantised import QUANTISED, VALUES
from kernlib.lowering.arithmetic import ceil_div
from kernlib.runtime.dtypes import KERNEL_TYPES

if TYPE_CHECKING:
    from kernlib.families.sparse.formats.entries import Entries
    from kernlib.families.sparse.formats.quantised import QuantisedFormat
    from kernlib.families.sparse.formats.slices import SlicesFormat
    from kernlib.jit.spec import KernelSpec

FORMATS = ("bitmap", *SLICES, "macko", "dense")  # which hold values as they are: "auto" takes one
ALL = (*FORMATS, *QUANTISED)


def format_of(name: str) -> ModuleType | SlicesFormat | QuantisedFormat:
    """The format of a name. Raises ValueError, listing the formats, for one that is not known."""
    if not isinstance(name, str) or name not in ALL:
        names = ", ".join(map(repr, ALL))
        raise ValueError(f"format must be one of {names}, got {shown(name)}")
    if name in SLICES:
        return import_module("kernlib.families.sparse.formats.slices").FORMATS[name]
    if name in QUANTISED:
        return import_module("kernlib.families.sparse.formats.quantised").FORMATS[name]
    return import_module(f"kernlib.families.sparse.formats.{name}")


def encode(
    format: str, source: torch.Tensor | Entries, columns: int
) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """Tensors and facts in a format of a dense matrix, or of one by its entries, for products with
    so many vectors. Raises as the format does."""
    form = format_of(format)
    function = form.encode if isinstance(source, torch.Tensor) else form.encode_entries
    return function(source, columns=columns) if format in SLICES else function(source)


def check_format(format: str) -> None:
    """Raises ValueError, listing the formats, for what is neither one nor "auto"."""
    if not isinstance(format, str) or format not in ("auto", *ALL):
        names = ", ".join(map(repr, ALL))
        raise ValueError(f"format must be 'auto' or one of {names}, got {shown(format)}")


def with_values(format: str, values: str | None) -> str:
    """The format, or "auto", that ``format`` and ``values`` name together: without ``values`` the
    format itself. Raises ValueError for what is neither, and for two that exclude each other."""
    if values is None:
        return format
    check_format(format)
    if not isinstance(values, str) or values not in VALUES:
        names = ", ".join(map(repr, VALUES))
        raise ValueError(f"values must be None or one of {names}, got {shown(values)}")
    name = VALUES[values].format
    if format not in ("auto", "bitmap", name):
        raise ValueError(
            f"values={values!r} are for the format 'bitmap' alone, got format={format!r}: pass "
            f"format='auto', or values=None to keep the values of {format!r} as they are"
        )
    return name


def auto(dense: torch.Tensor, columns: int = 1) -> str:
    """The format in which a product of a matrix (R, C) with so many vectors should be fastest: of
    those that can hold it, by the exact bytes of each over the rates of ``rates``; "dense" for more
    vectors than these know. Synchronises. Raises as ``encode`` does for what is no matrix, and
    ValueError for columns that are no positive int."""
    check_columns(columns)
    dense = matrix(dense)
    if columns > _rates().MOST_COLUMNS:
        return "dense"
    return _fastest_of(dense, *measured(dense), columns)


def auto_entries(entries: Entries, columns: int = 1) -> str:
    """:func:`auto` of a matrix by its entries."""
    check_columns(columns)
    if columns > _rates().MOST_COLUMNS:
        return "dense"
    measured = {name: format_of(name).measure_entries(entries) for name in FORMATS}
    sizes = {name: size for name, size in measured.items() if size is not None}
    density = entries.nnz / max(1, entries.shape[0] * entries.shape[1])
    return _fastest_of(entries, sizes, density, columns)


def _rates() -> ModuleType:
    """The measured rates, which "auto" alone loads."""
    return import_module("kernlib.families.sparse.lowering.rates")


def _fastest_of(
    matrix: torch.Tensor | Entries, sizes: dict[str, int], density: float, columns: int
) -> str:
    if matrix.dtype == torch.float32:
        sizes.pop("bitmap", None)  # whose kernels take half types only
    arch = _rates().DEFAULT
    if matrix.device.type == "cuda":
        from kernlib.runtime.devices import arch_of  # CPU tensors do not load it

        arch = arch_of(matrix.device.index)
    return fastest(sizes, density, tuple(matrix.shape), matrix.dtype.itemsize, arch, columns)


def fastest(
    sizes: dict[str, int],
    density: float,
    shape: tuple[int, int],
    itemsize: int,
    arch: str,
    columns: int,
) -> str:
    """The format of least time, of equal ones that of the fewest bytes. ``sizes`` are the bytes of
    a matrix in each format; ``columns`` are the vectors, MOST_COLUMNS of ``rates`` at most."""
    from kernlib.families.sparse.formats.tiling import tiling_of  # loaded with its formats

    row, (width, parts) = shape[1] * itemsize, tiling_of(shape, itemsize, columns)
    width = ceil_div(width, parts)

    def cost(name: str) -> tuple[float, int]:
        request = name, arch, density, sizes[name], columns
        return _rates().microseconds(*request, row, itemsize, width), sizes[name]

    return min(sizes, key=cost)


def measured(dense: torch.Tensor) -> tuple[dict[str, int], float]:
    """Bytes of a matrix in each format that can hold it, and its density."""
    formats = {name: format_of(name) for name in FORMATS}
    if dense.device.type == "cpu":
        return _measured_on_host(dense)
    build_counting(dense.dtype, dense.get_device())
    counts = counted(formats["bitmap"].chunk_counts(dense))
    quick = {n: f.measure(dense, counts) for n, f in formats.items() if n not in SLICES}
    quick |= {name: formats[name].measure(dense) for name in SLICES}
    entries = counts.sum(dtype=torch.int64)
    sizes = {name: int(size) for name, size in quick.items()}
    possible = {name: sizes[name] for name in FORMATS if sizes[name] >= 0}
    return possible, int(entries) / max(1, dense.numel())


def _measured_on_host(dense: torch.Tensor) -> tuple[dict[str, int], float]:
    """:func:`measured` of a matrix whose codes and entries are counted in one pass."""
    from kernlib.families.sparse.formats import bitmap_cpu, macko, tiling
    from kernlib.families.sparse.formats.slices_dense import ENTRIES, MACKO, Steps, counts

    shape, itemsize = tuple(dense.shape), dense.element_size()
    widths = {tiling.tiling_of(shape, itemsize).width, tiling.panel_width(*shape, itemsize)}
    steps = {name: Steps.of(format_of(name).code) for name in SLICES}
    pads = MACKO, max(1, shape[1])
    chunks = ENTRIES, bitmap_cpu.COLUMNS
    codes = counts(dense, [pads, chunks, *product(steps.values(), widths)])
    entries = bitmap_cpu.chunks_of_panels(codes[chunks])
    sizes = {
        "bitmap": int(format_of("bitmap").measure(dense, entries)),
        **{
            name: format_of(name).measure(dense, {w: codes[step, w] for w in widths})
            for name, step in steps.items()
        },
        "macko": macko.bytes_of(int(codes[pads].sum()), shape, itemsize),
        "dense": dense.numel() * itemsize,
    }
    possible = {name: size for name, size in sizes.items() if size >= 0}
    return possible, int(entries.sum(dtype=torch.int64)) / max(1, dense.numel())


@lru_cache(maxsize=64)
def build_counting(dtype: torch.dtype, device: int) -> None:
    """Compile the kernels that count a matrix's entries for each format side by side, and meanwhile
    those that may write the fastest format."""
    from kernlib.families.sparse.lowering import choose
    from kernlib.runtime import early  # CPU tensors do not load it
    from kernlib.runtime.devices import build

    def specs(does: str) -> list[KernelSpec]:
        scopes = [Scope(name, (KERNEL_TYPES[dtype],), "") for name in FORMATS]
        pairs = ((codec, scope) for scope in scopes for codec in choose.codecs(scope.format))
        return [codec.specs((), scope, "")[0] for codec, scope in pairs if codec.does == does]

    writing = specs("write")

    def write(like: torch.Tensor) -> None:
        build(writing, like.get_device())

    like = torch.empty(0, dtype=dtype, device=torch.device("cuda", device))
    early.first(build, specs("count"), device, again=(write, like))
