"""What the products of torch, and so of cuBLAS, do at each size: kernels, bits and errors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

import kernlib as kl
from benchmarks.behaviour.page import Table
from benchmarks.behaviour.texts.cublas import TEXTS
from benchmarks.common.device_code import cell
from benchmarks.common.timing import relative_error, sample_rows

TITLE = "products by cuBLAS"

SQUARES = (64, 128, 256, 512, 1023, 1024, 2048, 4096, 4097, 8192)
SHAPES = [
    *((n, n, n) for n in SQUARES),
    *((rows, 4096, 4096) for rows in (1, 8, 16, 64)),
    *((rows, 16384, 4096) for rows in (1, 16, 64)),
    (256, 16384, 256),
]
DTYPES = {
    "float32": torch.float32,
    "TF32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
SPELLED = [(256, 256, 256), (1023, 1023, 1023), (2048, 2048, 2048), (512, 4096, 1024)]
SPELLED += [(1, 4096, 4096), (64, 16384, 4096)]
NAME_WIDTH = 80
MATMUL = torch.backends.cuda.matmul


@contextmanager
def precision(name: str) -> Iterator[None]:
    """The block's float32 products in TF32 if that is the name."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if name == "TF32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def switched(switch: str, value: bool | tuple[bool, bool]) -> Iterator[None]:
    """A switch of torch.backends.cuda.matmul within the block."""
    before = getattr(MATMUL, switch)
    setattr(MATMUL, switch, value)
    try:
        yield
    finally:
        setattr(MATMUL, switch, before)


def reduction(name: str) -> str:
    """The switch of a half type's sums between parts of a product."""
    return f"allow_{'fp16' if name == 'float16' else 'bf16'}_reduced_precision_reduction"


@contextmanager
def workspace(size: str) -> Iterator[None]:
    """cuBLAS's workspaces as CUBLAS_WORKSPACE_CONFIG of that value has them."""
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = size
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch.cuda.synchronize()
        if before is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]
        else:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = before
        torch._C._cuda_clearCublasWorkspaces()


def operands(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    rows, terms, columns = shape
    torch.manual_seed(rows + terms + columns)
    a = torch.randn(rows, terms, device="cuda", dtype=dtype)
    return a, torch.randn(terms, columns, device="cuda", dtype=dtype)


def bits(result: torch.Tensor, expected: torch.Tensor) -> str:
    """Whether two results have the same bits, else how many numbers differ."""
    share = (result != expected).double().mean().item()
    return "same" if share == 0 else f"{share:.0%} differ" if share >= 0.01 else "some differ"


def offset(x: torch.Tensor) -> torch.Tensor:
    """The same numbers one element behind an aligned address."""
    storage = x.new_empty(x.numel() + 1)
    return storage[1:].view_as(x).copy_(x)


def padded(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with 8 elements between two rows."""
    return x.new_empty(x.shape[0], x.shape[1] + 8)[:, : x.shape[1]].copy_(x)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, stored by columns."""
    return x.T.contiguous().T


def kernel_names(name: str) -> dict[tuple, list[str]]:
    """Kernels of each product, by a profile in which a kernel that sleeps stands before each."""
    pairs = {shape: operands(shape, DTYPES[name]) for shape in SHAPES}
    for a, b in pairs.values():
        a @ b
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for a, b in pairs.values():
            torch.cuda._sleep(1000)
            a @ b
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    groups: list[list[str]] = []
    for event in sorted(kernels, key=lambda e: e.time_range.start):
        if "spin" in event.name:
            groups.append([])
        elif groups:
            groups[-1].append(event.name)
    return dict(zip(pairs, groups, strict=True))


def shortened(names: list[str]) -> tuple[str, str]:
    """The kernel of a product, and what runs beside it."""
    short = []
    for name in names:
        inner = re.search(r"cutlass_\w+|gemv\w*|gemm\w*_kernel|dot_kernel|\w+educe\w*", name)
        outer = inner is not None and ("<" in name or "::" in name)
        text = inner[0] if outer else name.removeprefix("void ")
        for word in ("f32f32_", "_stage3", "__5x_cublas", "_execute_kernel", "_execute"):
            text = text.replace(word, "")
        short.append("split_k_kernel" if text.endswith("split_k_kernel") else text)
    main = next(
        (n for n in short if "educe" not in n and "split_k" not in n and "Mem" not in n), "?"
    )
    return main[:NAME_WIDTH], ", ".join(n for n in short if n != main) or "none"


def row(name: str, shape: tuple[int, int, int], kernels: list[str]) -> list[object]:
    dtype = DTYPES[name]
    a, b = operands(shape, dtype)
    at, half = shape[0] // 2, shape[0] // 2
    expected = a @ b
    cells: list[object] = [" x ".join(map(str, shape)), *shortened(kernels)]
    cells.append(cell(lambda: bits(a @ b, expected)))
    if half:
        cells.append(cell(lambda: bits(a[at : at + 1] @ b, expected[at : at + 1])))
        cells.append(cell(lambda: bits(a[:half] @ b, expected[:half])))
    else:
        cells += ["", ""]
    cells.append(cell(lambda: bits(offset(a) @ b, expected)))
    cells.append(cell(lambda: bits(padded(a) @ padded(b), expected)))
    cells.append(cell(lambda: bits(a @ transposed(b), expected)))
    rows = sample_rows(shape[0])
    exact = a[rows].double() @ b.double()
    cells.append(cell(lambda: f"{relative_error(expected[rows], exact):.1e}"))
    if name == "float32":
        points = b.T.contiguous()
        result = cell(lambda: kl.run_kernel(kl.dot_product(), a, points))
        cells.append(cell(lambda: f"{relative_error(result[rows], exact):.1e}"))
    if name in ("float16", "bfloat16"):

        def exactly() -> str:
            with switched(reduction(name), False):
                result = a @ b
            return f"{bits(result, expected)}, {relative_error(result[rows], exact):.1e}"

        def unsplit() -> str:
            result = without_split(a, b)
            return f"{bits(result, expected)}, {relative_error(result[rows], exact):.1e}"

        cells += [cell(exactly), cell(unsplit)]
    if name == "float16":

        def narrow() -> str:
            with switched("allow_fp16_accumulation", True):
                result = a @ b
            return f"{relative_error(result[rows], exact):.1e}"

        cells.append(cell(narrow))
    return cells


def sizes(name: str) -> Table:
    """The table of one dtype."""
    columns = ["rows x terms x columns", "kernel", "beside it", "again", "one row", "half of rows"]
    columns += ["offset by 1", "rows padded by 8", "B by columns", "error"]
    columns += {
        "float32": ["error of kernlib"],
        "float16": ["no reduced precision", "cublaslt without split-K", "error, float16 sums"],
        "bfloat16": ["no reduced precision", "cublaslt without split-K"],
    }.get(name, [])
    with precision(name):
        names = cell(lambda: kernel_names(name))
        by_shape = names if isinstance(names, dict) else {shape: [str(names)] for shape in SHAPES}
        rows = [
            got
            if isinstance(got := cell(lambda s=s: row(name, s, by_shape[s])), list)
            else [s, got]
            for s in SHAPES
        ]
    width = len(columns)
    return Table(name, TEXTS[name], columns, [[*r, *[""] * (width - len(r))] for r in rows])


def letters(results: list[torch.Tensor]) -> list[str]:
    """A letter for each result, the same for the same bits, in the order of the alphabet."""
    groups: list[torch.Tensor] = []
    answer = []
    for result in results:
        at = next((i for i, g in enumerate(groups) if torch.equal(g, result)), len(groups))
        if at == len(groups):
            groups.append(result)
        answer.append(chr(ord("A") + at))
    return answer


def batches() -> Table:
    """The bits of the first row by the number of rows."""
    rows = []

    def add(name: str, dtype: torch.dtype, call: Callable) -> None:
        a, b = operands((max(ROWS), 4096, 4096), dtype)
        rows.append([name, *letters([call(a[:n], b)[0].clone() for n in ROWS])])

    for name, dtype in DTYPES.items():
        with precision(name):
            cell(lambda name=name, dtype=dtype: add(name, dtype, torch.mm))
    for name in ("float16", "bfloat16"):
        cell(lambda name=name: add(f"{name}, cublaslt", DTYPES[name], with_library))
        title = f"{name}, cublaslt without split-K"
        cell(lambda name=name, title=title: add(title, DTYPES[name], without_split))
    by_points: dict[int, torch.Tensor] = {}

    def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        points = by_points.setdefault(id(b), b.T.contiguous())
        return kl.run_kernel(kl.dot_product(), a, points)

    for name in ("float32", "float16"):
        cell(lambda name=name: add(f"kernlib, {name}", DTYPES[name], dot))
    return Table("The first row, by the number of rows", TEXTS["batches"], ["", *ROWS], rows)


def in_graph(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = a @ b
    graph.replay()
    torch.cuda.synchronize()
    return result.clone()


def in_stream(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        result = a @ b
    torch.cuda.synchronize()
    return result


def with_library(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        return a @ b
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def unsplit(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with switched(reduction(str(a.dtype).removeprefix("torch.")), (False, False)):
        return a @ b


def without_split(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with switched(reduction(str(a.dtype).removeprefix("torch.")), (False, False)):
        return with_library(a, b)


def with_workspace(size: str) -> Callable:
    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with workspace(size):
            return a @ b

    return call


def linear(a: torch.Tensor, w: torch.Tensor, biased: bool = False) -> torch.Tensor:
    bias = w.new_zeros(len(w)) if biased else None
    return torch.nn.functional.linear(a, w, bias)


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, x])


SPELLINGS: dict[str, Callable] = {
    "bmm of one": lambda a, b: torch.bmm(a[None], b[None])[0],
    "bmm of two, the first": lambda a, b: torch.bmm(twice(a), twice(b))[0],
    "two batches of rows @ matrix": lambda a, b: (twice(a) @ b)[0],
    "addmm, beta=0": lambda a, b: torch.addmm(b.new_zeros(()), a, b, beta=0),
    "addmm of zeros": lambda a, b: torch.addmm(b.new_zeros(a.shape[0], b.shape[1]), a, b),
    "linear": lambda a, b: linear(a, b.T),
    "linear, bias of zeros": lambda a, b: linear(a, b.T, True),
    "linear, weight stored as nn.Linear": lambda a, b: linear(a, b.T.contiguous()),
    "einsum": lambda a, b: torch.einsum("ij,jk->ik", a, b),
    "(B^T A^T)^T": lambda a, b: (b.T @ a.T).T,
    "a vector, for one row": lambda a, b: (a[0] @ b)[None] if len(a) == 1 else a @ b,
    "in a CUDA graph": in_graph,
    "in another stream": in_stream,
    "preferred_blas_library of cublaslt": with_library,
    "reduced precision of a half type set to (False, False)": unsplit,
    "the same, and cublaslt": without_split,
    "workspace :4096:8": with_workspace(":4096:8"),
    "workspace :16:8": with_workspace(":16:8"),
}


def spellings() -> Table:
    """Where other ways to write a product give the bits of ``a @ b``."""
    rows = []
    for title, call in SPELLINGS.items():
        cells = [title]
        for name, dtype in DTYPES.items():
            with precision(name):

                def agreeing(dtype: torch.dtype = dtype, call: Callable = call) -> str:
                    others = []
                    for shape in SPELLED:
                        a, b = operands(shape, dtype)
                        expected = a @ b
                        if not torch.equal(call(a, b), expected):
                            others.append(" x ".join(map(str, shape)))
                    return "same" if not others else "other bits: " + ", ".join(others)

                cells.append(cell(agreeing))
        rows.append(cells)
    return Table("Ways to write it", TEXTS["spellings"], ["", *DTYPES], rows)


def measure() -> list[Table]:
    tables = [sizes(name) for name in DTYPES]
    return [*tables, batches(), spellings()]
