"""Sums and what is made of sums by torch on a GPU: which bits they have, and their error by N."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import kernlib as kl
from benchmarks.behaviour.page import Table
from benchmarks.behaviour.texts.reductions import TEXTS
from benchmarks.common.device_code import cell

TITLE = "sums of torch"

F = torch.nn.functional
ROWS, MANY = 4096, 100_000_000
BATCHES = (1, 2, 7, 31, 64, 128, 500, 1000, 2048)
CANCELLING = "1, -0.999 in turn"
WIDTHS = (100, 1000, 3000, 20000)


def targets(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device) % x.shape[1]


# Functions of rows: one result, or a row of them, for each.
FUNCTIONS: dict[str, Callable] = {
    "sum": lambda x: x.sum(1),
    "mean": lambda x: x.mean(1),
    "amax": lambda x: x.amax(1),
    "prod of 1 + x / 1000": lambda x: (1 + x / 1000).prod(1),
    "norm": lambda x: x.norm(dim=1),
    "linalg.vector_norm, 1": lambda x: torch.linalg.vector_norm(x, 1, dim=1),
    "var": lambda x: x.var(1),
    "std_mean": lambda x: torch.stack(torch.std_mean(x, 1), 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "softmax": lambda x: x.softmax(1),
    "log_softmax": lambda x: x.log_softmax(1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:]),
    "normalize": lambda x: F.normalize(x, dim=1),
    "cross_entropy": lambda x: F.cross_entropy(x, targets(x), reduction="none"),
    "cosine_similarity to row 0": lambda x: F.cosine_similarity(x, x[:1], dim=1),
    "cdist to 5 points": lambda x: torch.cdist(x, x[:1].expand(5, -1).contiguous()),
    "kernlib.cdist to 5 points": lambda x: kl.cdist(x, x[:1].expand(5, -1).contiguous()),
    "kernlib.kernel_sum, gaussian": lambda x: kl.kernel_sum(
        kl.gaussian(), x, x[:1].expand(5, -1).contiguous(), bandwidth=50.0
    ),
}


def columns_first(x: torch.Tensor) -> torch.Tensor:
    return x.T.contiguous().T


def padded(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], x.shape[1] + 1)[:, : x.shape[1]].copy_(x)


def offset(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)


def invariance() -> Table:
    """Whether a row's bits depend on what is computed with it and on the layout."""
    rows = []
    for name, call in FUNCTIONS.items():
        for dtype in (torch.float32, torch.bfloat16):

            def one(call: Callable = call, dtype: torch.dtype = dtype) -> list[str]:
                cells: list[list[str]] = [[], [], [], [], [], []]
                for width in WIDTHS:
                    torch.manual_seed(0)
                    x = torch.randn(ROWS, width, device="cuda", dtype=dtype)
                    expected = call(x)

                    def note(at: int, same: bool, what: object) -> None:
                        if not same:
                            cells[at].append(str(what))

                    note(0, all(torch.equal(call(x), expected) for _ in range(4)), width)
                    note(1, torch.equal(call(x[:1])[0], expected[0]), width)
                    others = [n for n in BATCHES if not torch.equal(call(x[:n])[0], expected[0])]
                    note(2, len(others) == 0, f"{width}: {others}")
                    for at, change in ((3, columns_first), (4, padded), (5, offset)):
                        note(at, torch.equal(call(change(x)), expected), width)
                return [", ".join(c) or "same" for c in cells]

            cells = cell(one)
            label = str(dtype).removeprefix("torch.")
            rows.append([name, label, *(cells if isinstance(cells, list) else [cells] + [""] * 5)])
    columns = ["function of rows", "dtype", "again", "one row alone", "of fewer rows"]
    columns += ["stored by columns", "rows padded by 1", "offset by 1"]
    return Table("Bits of a row", TEXTS["invariance"], columns, rows)


def shapes() -> Table:
    """One sum of all numbers, written in several ways."""
    x = torch.rand(10_000_000, device="cuda")
    square = x.view(2500, 4000)
    ways: dict[str, Callable] = {
        "x.view(1, -1).sum(1)": lambda: x.view(1, -1).sum(1)[0],
        "x.view(2500, 4000).sum()": lambda: square.sum(),
        "x.view(2500, 4000).sum((0, 1))": lambda: square.sum((0, 1)),
        "x.view(2500, 4000).T.sum()": lambda: square.T.sum(),
        "x.view(2500, 4000).sum(0).sum()": lambda: square.sum(0).sum(),
        "x.view(2500, 4000).sum(1).sum()": lambda: square.sum(1).sum(),
        "stack([x, x]).sum(1)[0]": lambda: torch.stack([x, x]).sum(1)[0],
        "x.mean() * N": lambda: x.mean() * x.numel(),
        "x.sum(dtype=torch.float64).float()": lambda: x.sum(dtype=torch.float64).float(),
        "x.nansum()": x.nansum,
        "x.cumsum(0)[-1]": lambda: x.cumsum(0)[-1],
        "x @ ones": lambda: x @ torch.ones_like(x),
        "x.norm(1)": lambda: x.norm(1),
        "x.flip(0).sum()": lambda: x.flip(0).sum(),
        "x[1:].sum() + x[0]": lambda: x[1:].sum() + x[0],
    }
    total, exact = x.sum(), x.double().sum().item()
    rows = [["x.sum()", "", f"{abs(total.item() - exact) / exact:.1e}"]]
    for name, call in ways.items():

        def one(call: Callable = call) -> list[str]:
            value = call()
            runs = {call().item() for _ in range(4)}
            same = "same" if torch.equal(value, total) else "others"
            same += "" if len(runs) == 1 else f", {len(runs)} results of 4 runs"
            return [same, f"{abs(value.item() - exact) / exact:.1e}"]

        cells = cell(one)
        rows.append([name, *(cells if isinstance(cells, list) else [cells, ""])])
    columns = ["sum of 10 million numbers of [0, 1)", "bits of x.sum()", "error"]
    return Table("One sum, several ways", TEXTS["shapes"], columns, rows)


def numbers(kind: str, n: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(n)
    if kind == "ones":
        return torch.ones(n, device="cuda", dtype=dtype)
    if kind == "0.1":
        return torch.full((n,), 0.1, device="cuda", dtype=dtype)
    if kind == "uniform":
        return torch.rand(n, device="cuda", dtype=dtype)
    if kind == "1000 + normal":
        return torch.randn(n, device="cuda").add_(1000).to(dtype)
    return (
        torch.ones(n, device="cuda", dtype=dtype)
        .view(-1, 2)
        .mul_(torch.tensor([1.0, -0.999], device="cuda", dtype=dtype))
        .flatten()
    )


def by_kernlib(x: torch.Tensor) -> torch.Tensor:
    """The sum as that of a row of dot products with one feature."""
    one = torch.ones(1, 1, device="cuda", dtype=x.dtype)
    return kl.kernel_sum(kl.dot_product(), one, x.view(-1, 1))[0]


def relative(value: torch.Tensor, exact: float) -> str:
    number = value.double().item()
    if not math.isfinite(number):
        return str(number)
    return f"{(number - exact) / abs(exact):+.1e}"


def errors() -> Table:
    """Relative errors of sums of up to 1e8 numbers."""
    rows = []
    for kind in ("ones", "0.1", "uniform", "1000 + normal", CANCELLING):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for n in (10_000, 1_000_000, MANY):
                if dtype != torch.float32 and n == 1_000_000:
                    continue
                if dtype == torch.bfloat16 and kind == CANCELLING:
                    continue  # -0.999 is -1 there, and the sum 0

                def one(kind: str = kind, dtype: torch.dtype = dtype, n: int = n) -> list[str]:
                    x = numbers(kind, n, dtype)
                    wide = x.double()
                    exact, mean = wide.sum().item(), wide.mean().item()
                    deviation, norm = wide.std().item(), wide.norm().item()
                    del wide
                    spread = cell(lambda: relative(x.std(), deviation)) if deviation else ""
                    return [
                        relative(x.sum(), exact),
                        cell(lambda: relative(by_kernlib(x), exact)),
                        relative(x.mean(), mean),
                        relative(x.norm(), norm),
                        spread,
                    ]

                cells = cell(one)
                label = str(dtype).removeprefix("torch.")
                rows.append(
                    [kind, label, f"{n:,}", *(cells if isinstance(cells, list) else [cells])]
                )
    columns = ["numbers", "dtype", "N", "sum", "kernlib.kernel_sum", "mean", "norm", "std"]
    rows = [[*r, *[""] * (len(columns) - len(r))] for r in rows]
    return Table("Errors by N", TEXTS["errors"], columns, rows)


def corners() -> Table:
    """Single values of large reductions and of the ends of a range."""

    def full(value: float, n: int = MANY, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((n,), value, device="cuda", dtype=dtype)

    half, short = torch.float16, torch.bfloat16
    calls: dict[str, tuple[Callable, str]] = {
        "logsumexp of 1e8 zeros": (lambda: full(0).logsumexp(0), f"{math.log(MANY):.7f}"),
        "the same, float16": (lambda: full(0, dtype=half).logsumexp(0), "18.42"),
        "softmax of 1e8 zeros, its float64 sum": (
            lambda: full(0).softmax(0).sum(dtype=torch.float64),
            "1",
        ),
        "softmax of 100000 zeros, float16, sum": (
            lambda: full(0, 100_000, half).softmax(0).sum(dtype=torch.float64),
            "1",
        ),
        "softmax of 300 zeros, bfloat16, sum": (
            lambda: full(0, 300, short).softmax(0).sum(dtype=torch.float64),
            "1",
        ),
        "norm of 1e20, 1e20": (lambda: full(1e20, 2).norm(), "1.414e20"),
        "norm of 1e-30, 1e-30": (lambda: full(1e-30, 2).norm(), "1.414e-30"),
        "linalg.norm of 1e20, 1e20": (lambda: torch.linalg.norm(full(1e20, 2)), "1.414e20"),
        "hypot(1e20, 1e20)": (lambda: torch.hypot(full(1e20, 1), full(1e20, 1)), "1.414e20"),
        "norm of 300, 300 in float16": (lambda: full(300, 2, half).norm(), "424.3"),
        "norm, p = 3, of 1e15, 1e15": (lambda: full(1e15, 2).norm(3), "1.26e15"),
        "normalize of 1e-20, 1e-20": (lambda: F.normalize(full(1e-20, 2), dim=0)[0], "0.7071"),
        "cosine_similarity of 1e-20 with itself": (
            lambda: F.cosine_similarity(full(1e-20, 2), full(1e-20, 2), dim=0),
            "1",
        ),
        "mean of 1e8 ones, float16": (lambda: full(1, dtype=half).mean(), "1"),
        "mean of 1e38, 4 times": (lambda: full(1e38, 4).mean(), "1e38"),
        "mean of 60000, 4 times, float16": (lambda: full(6e4, 4, half).mean(), "60000"),
        "var of 1e8 times 0.1": (lambda: full(0.1).var(), "0"),
        "std of 1e8 times 1.1": (lambda: full(1.1).std(), "0"),
        "prod of 1e8 times 1.0000001": (
            lambda: full(1 + 2**-23).prod(),
            f"{math.exp(MANY * math.log1p(2**-23)):.1f}",
        ),
        "sum of 2.2e9 int8 ones in one tensor": (
            lambda: torch.ones(2_200_000_000, device="cuda", dtype=torch.int8).sum(),
            "2200000000",
        ),
        "sum of 100 int8 of 100": (lambda: full(100, 100, torch.int8).sum(), "10000"),
        "sum(dtype=int8) of 100 int8 of 100": (
            lambda: full(100, 100, torch.int8).sum(dtype=torch.int8),
            "16, wrapped",
        ),
        "layer_norm of 1e20, -1e20": (
            lambda: F.layer_norm(torch.tensor([1e20, -1e20], device="cuda"), (2,))[0],
            "1",
        ),
        "median of 1e8: quantile(0.5)": (lambda: full(1).quantile(0.5), "1"),
        "argmax of 3e9 int8": (
            lambda: last_one(3_000_000_000).argmax(),
            "2999999999",
        ),
        "histc of 1e8 in one bin": (lambda: full(1).histc(1, 0, 2)[0], "100000000"),
        "bincount, weights 1 of 1e8": (
            lambda: torch.bincount(full(0, dtype=torch.int64), full(1))[0],
            "100000000",
        ),
    }
    rows = []
    for name, (call, right) in calls.items():
        torch.cuda.empty_cache()
        rows.append([name, right, cell(lambda call=call: f"{call().double().item():.9g}")])
    return Table("Corners", TEXTS["corners"], ["what", "right", "torch"], rows)


def last_one(n: int) -> torch.Tensor:
    x = torch.zeros(n, device="cuda", dtype=torch.int8)
    x[-1] = 1
    return x


def measure() -> list[Table]:
    tables = []
    for part in (invariance, shapes, errors, corners):
        answer = cell(part)
        failed = Table(part.__name__, str(answer), ["failed"], [])
        tables.append(answer if isinstance(answer, Table) else failed)
    return tables
