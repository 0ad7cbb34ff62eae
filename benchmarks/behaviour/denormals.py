"""Subnormal numbers in instructions of sm_90a: which are read as zero, and which results are
flushed to zero."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import add, mul, truediv
from typing import NamedTuple

import torch

from benchmarks.behaviour.atomics import ADDITIONS, add_once
from benchmarks.behaviour.compiled import (
    Instruction,
    Kernel,
    Product,
    bits_of,
    dot_products,
    evaluate,
    number_of,
)
from benchmarks.behaviour.page import Table

TITLE = "subnormal numbers"
COLUMNS = ("instruction", "subnormal operand", "subnormal result")


class Case(NamedTuple):
    """An instruction, the kinds of its result and operands, its formula, operands of which the
    first is subnormal, and normal operands whose result is subnormal."""

    name: str
    kinds: str
    formula: Callable
    reads: tuple = ()
    makes: tuple = ()

    @property
    def instruction(self) -> Instruction:
        result, *operands = self.kinds.split()
        places = ", ".join(f"%{i}" for i in range(len(operands) + 1))
        text = f"{self.name} {places};" if "%" not in self.name else self.name
        return Instruction(text, result, tuple(operands))


def _reciprocal(x: float) -> float:
    return 1 / x if x else math.inf


def _root(x: float) -> float:
    return 1 / math.sqrt(x) if x else math.inf


def _logarithm(x: float) -> float:
    return math.log2(x) if x else -math.inf


def _multiply_add(x: float, y: float, z: float) -> float:
    return x * y + z


def _same(x: float) -> float:
    return x


TINY, LEAST = 2.0**-127, 2.0**-126  # of float32 and bfloat16
FLOATS = (
    Case("ex2.approx.f32", "f32 f32", math.exp2, (), (-130.0,)),
    Case("lg2.approx.f32", "f32 f32", _logarithm, (TINY,)),
    Case("rcp.approx.f32", "f32 f32", _reciprocal, (TINY,), (1.5 * 2.0**126,)),
    Case("rsqrt.approx.f32", "f32 f32", _root, (TINY,)),
    Case("sqrt.approx.f32", "f32 f32", math.sqrt, (TINY,)),
    Case("sin.approx.f32", "f32 f32", math.sin, (TINY,)),
    Case("div.full.f32", "f32 f32 f32", truediv, (TINY, 0.25), (LEAST, 2.0)),
    Case("add.f32", "f32 f32 f32", add, (TINY, LEAST), (1.5 * LEAST, -LEAST)),
    Case("mul.f32", "f32 f32 f32", mul, (TINY, 8.0), (LEAST, 0.5)),
    Case("fma.rn.f32", "f32 f32 f32 f32", _multiply_add, (TINY, 8.0, 0.0), (LEAST, 0.5, 0.0)),
    Case("max.f32", "f32 f32 f32", max, (TINY, -1.0)),
    Case("cvt.rn.f16.f32", "f16 f32", _same, (), (2.0**-20,)),
    Case("cvt.f32.f16", "f32 f16", _same, (2.0**-20,)),
)
PLAIN = (
    Case("tanh.approx.f32", "f32 f32", math.tanh, (TINY,)),
    Case("cvt.rn.bf16.f32", "bf16 f32", _same, (TINY,)),
    Case("cvt.f32.bf16", "f32 bf16", _same, (TINY,)),
    Case("cvt.rna.tf32.f32", "tf32 f32", _same, (TINY,)),
    Case("cvt.f64.f32", "f64 f32", _same, (TINY,)),
    Case("cvt.rn.f32.f64", "f32 f64", _same, (), (TINY,)),
    Case("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;", "e4m3x2 f32", _same, (), (2.0**-8,)),
    Case("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %1;", "e5m2x2 f32", _same, (), (2.0**-15,)),
    Case("cvt.rn.f16x2.e4m3x2", "f16x2 e4m3x2", _same, (2.0**-8,)),
    Case("cvt.rn.f16x2.e5m2x2", "f16x2 e5m2x2", _same, (2.0**-15,)),
    Case("fma.rn.f64", "f64 f64 f64 f64", _multiply_add, (2.0**-1030, 1e3, 0.0), ()),
    Case("rcp.approx.ftz.f64", "f64 f64", _reciprocal, (2.0**-1023,), (2.0**1023,)),
    Case("rsqrt.approx.ftz.f64", "f64 f64", _root, (2.0**-1030,)),
)


def _halves(kind: str, tiny: float, ftz: str) -> list[Case]:
    """Cases of two numbers in a word."""
    least = {"f16x2": 2.0**-14}.get(kind, LEAST)
    one, two, three = (" ".join([kind] * n) for n in (2, 3, 4))
    makes = (least, 0.25, 0.0)
    return [
        Case(f"ex2.approx{ftz}.{kind}", one, math.exp2, (), (math.log2(tiny),)),
        Case(f"tanh.approx.{kind}", one, math.tanh, (tiny,)),
        Case(f"add.{kind}", two, add, (tiny, least), (1.5 * least, -least)),
        Case(f"mul.{kind}", two, mul, (tiny, 8.0), makes[:2]),
        Case(f"fma.rn.{kind}", three, _multiply_add, (tiny, 8.0, 0.0), makes),
        Case(f"max.{kind}", two, max, (tiny, -1.0)),
    ]


def _outcome(got: float, exact: float, zero: float | None) -> str:
    """What became of a number that ``exact`` comes of, and ``zero`` if it counts as 0."""
    if got == exact:
        return "exact"
    if math.isclose(got, exact, rel_tol=2.0**-6):
        return f"right, error {abs(got / exact - 1):.0e}"
    if zero is None and got == 0:
        return f"**flushed to 0** for {exact:.3g}"
    if zero is not None and (got == zero or math.isclose(got, zero, rel_tol=2.0**-6)):
        return f"**read as 0**: {got:.3g} for {exact:.3g}"
    return f"**{got:.3g}** for {exact:.3g}"


def _of_instructions() -> Table:
    flushing = [
        it._replace(name=it.name.replace(".rn", ".rn.ftz", 1))
        if ".rn." in it.name
        else it._replace(name=it.name.replace(".f32", ".ftz.f32", 1))
        for it in FLOATS
    ]
    cases = [*FLOATS, *flushing, *PLAIN]
    cases += _halves("f16x2", 2.0**-16, "") + _halves("bf16x2", TINY, ".ftz")
    cases.append(Case("fma.rn.ftz.f16x2", "f16x2 f16x2 f16x2 f16x2", _multiply_add,
                      (2.0**-16, 8.0, 0.0), (2.0**-14, 0.25, 0.0)))  # fmt: skip
    uses = [(case, it) for case in cases for it in (case.reads, case.makes) if it]
    calls = [
        (
            case.instruction,
            [bits_of(x, k) for x, k in zip(numbers, case.instruction.operands, strict=True)],
        )
        for case, numbers in uses
    ]
    cells = {}
    for (case, numbers), word in zip(uses, evaluate(calls), strict=True):
        got, exact = number_of(word, case.instruction.result), case.formula(*numbers)
        zero = case.formula(0.0, *numbers[1:]) if numbers is case.reads else None
        cells[case, numbers] = _outcome(got, exact, zero)
    rows = [
        (f"`{case.name}`", *(cells.get((case, it), "-") for it in (case.reads, case.makes)))
        for case in cases
    ]
    return Table(
        "Instructions",
        (
            "The guess: without .ftz an instruction keeps subnormal numbers, with it none. "
            "Seen: so it is for arithmetic, and for the approximations too but sin.approx, "
            "which reads them as 0 in either form. tanh.approx, which has no .ftz, keeps "
            "them. cvt.ftz between float32 and float16 leaves subnormal float16 alone: .ftz "
            "speaks of float32. A cell says what became of one subnormal operand or result. "
            "What follows: .ftz saves instructions in rcp, rsqrt, sqrt, lg2 and ex2, and its "
            "price is an infinity for 1 / x and 1 / sqrt(x) of a subnormal x, not a lost "
            "digit."
        ),
        COLUMNS,
        rows,
    )


# Of tensor cores: a subnormal number of the operands' type, and its kind of accumulator's least.
SMALL = {"f16": 2.0**-20, "bf16": 2.0**-130, "tf32": 2.0**-130, "e4m3": 2.0**-8, "e5m2": 2.0**-15}
PRODUCTS = [
    *(Product("mma", kind, "f32", 16) for kind in ("f16", "bf16")),
    Product("mma", "f16", "f16", 16),
    Product("mma", "tf32", "f32", 8),
    *(Product("mma", kind, "f32", 32) for kind in ("e4m3", "e5m2")),
    Product("mma", "f64", "f64", 4),
    *(Product("wgmma", kind, "f32", 16) for kind in ("f16", "bf16")),
    Product("wgmma", "f16", "f16", 16),
    Product("wgmma", "tf32", "f32", 8),
    *(Product("wgmma", kind, "f32", 32) for kind in ("e4m3", "e5m2")),
]


def _of_products() -> Table:
    rows = []
    probes, exacts = [], []
    for it in PRODUCTS:
        small = SMALL.get(it.operand, 2.0**-1030)
        half = it.accumulator == "f16"
        start = {"f16": 2.0**-20, "f32": 2.0**-130}.get(it.accumulator, 2.0**-1030)
        # The smallest normal factors whose product is a subnormal sum, where there are any.
        a, b = {"f16": (2.0**-10, 2.0**-10), "bf16": (2.0**-65, 2.0**-65)}.get(
            it.operand, (2.0**-65, 2.0**-65)
        )
        if it.operand == "f64":
            a, b = 2.0**-515, 2.0**-515
        makes = half or it.operand in ("bf16", "tf32", "f64")
        for first, second, c in (
            (small, 2.0**3, 0.0),
            (0.0, 0.0, start),
            (a if makes else 0.0, b if makes else 0.0, 0.0),
        ):
            probes.append((it, [first], [second], c))
            exacts.append(first * second + c if first or c else None)
    words = dot_products(probes)
    for i, it in enumerate(PRODUCTS):
        cells = []
        for word, exact in list(zip(words, exacts, strict=True))[3 * i : 3 * i + 3]:
            got = number_of(word, it.accumulator)
            cells.append("-" if exact is None else _outcome(got, exact, None))
        rows.append((it.name, *cells))
    columns = ("instruction", "operand", "accumulator that comes in", "sum of normal factors")
    return Table(
        "Tensor cores",
        (
            "The guess: tensor cores flush subnormal bfloat16, TF32 and float32 numbers, as "
            "fast hardware does. Seen: none does. Subnormal operands, accumulators that come "
            "in and sums are exact, in mma.sync and in wgmma, in every type that has been "
            "tried. What follows: numbers need no scaling to stay clear of subnormal ones, "
            "and integers may be multiplied as subnormal bit patterns. A result that loses "
            "them lost them before or behind the product."
        ),
        columns,
        rows,
    )


# What a thread computes of x, in float, and the same in double.
FUNCTIONS = {
    "ex2.approx.ftz.f32": ("ex2.approx.ftz.f32 %0, %1;", "exp2(z)"),
    "lg2.approx.ftz.f32": ("lg2.approx.ftz.f32 %0, %1;", "log2(z)"),
    "rcp.approx.ftz.f32": ("rcp.approx.ftz.f32 %0, %1;", "1.0 / z"),
    "rsqrt.approx.ftz.f32": ("rsqrt.approx.ftz.f32 %0, %1;", "1.0 / sqrt(z)"),
    "sqrt.approx.ftz.f32": ("sqrt.approx.ftz.f32 %0, %1;", "sqrt(z)"),
    "sin.approx.f32": ("sin.approx.f32 %0, %1;", "sin(z)"),
    "tanh.approx.f32": ("tanh.approx.f32 %0, %1;", "tanh(z)"),
    "fast_tanh() of kernlib": ("", "tanh(z)"),
}
RANGES = (
    ("ex2.approx.ftz.f32", -126.0, -(2.0**-30)),
    ("ex2.approx.ftz.f32", 2.0**-30, 1.0),
    ("ex2.approx.ftz.f32", 1.0, 127.99),
    ("lg2.approx.ftz.f32", 2.0**-126, 0.5),
    ("lg2.approx.ftz.f32", 0.5, 0.99),
    ("lg2.approx.ftz.f32", 0.99, 1.01),
    ("lg2.approx.ftz.f32", 1.01, 2.0),
    ("lg2.approx.ftz.f32", 2.0, 2.0**127),
    ("rcp.approx.ftz.f32", 1.0, 2.0),
    ("rsqrt.approx.ftz.f32", 1.0, 4.0),
    ("sqrt.approx.ftz.f32", 1.0, 4.0),
    ("sin.approx.f32", 2.0**-24, 1.5),
    ("sin.approx.f32", 1.5, 6.3),
    ("sin.approx.f32", 6.3, 1e3),
    ("sin.approx.f32", 1e3, 1e5),
    ("tanh.approx.f32", 2.0**-60, 2.0**-12),
    ("tanh.approx.f32", 2.0**-12, 0.5),
    ("tanh.approx.f32", 0.5, 16.0),
    ("fast_tanh() of kernlib", 2.0**-60, 2.0**-12),
    ("fast_tanh() of kernlib", 2.0**-12, 0.5),
    ("fast_tanh() of kernlib", 0.5, 16.0),
)


def _errors_source(name: str) -> str:
    text, exact = FUNCTIONS[name]
    call = f'asm("{text}" : "=f"(y) : "f"(x));' if text else "y = fast_tanh(x);"
    return f"""
#include "blocksparse/attention/tanh.cuh"
extern "C" __global__ void probe(u64* worst, int first, int last) {{
    double most[3] = {{}};
    int stride = gridDim.x * blockDim.x;
    for (i64 i = i64(first) + blockIdx.x * blockDim.x + threadIdx.x; i <= last; i += stride) {{
        float x = __int_as_float(int(i)), y;
        {call}
        double z = x, right = {exact}, error = fabs(double(y) - right);
        double ulp = exp2(double(max(ilogb(right) - 23, -149)));
        most[0] = fmax(most[0], error / ulp);
        if (right != 0.0) most[1] = fmax(most[1], error / fabs(right));
        most[2] = fmax(most[2], error);
    }}
    for (int i = 0; i < 3; ++i) atomicMax(worst + i, u64(__double_as_longlong(most[i])));
}}
"""


def _errors() -> Table:
    """The largest errors of all floats of a range."""
    with ThreadPoolExecutor(8) as pool:
        kernels = dict(
            zip(FUNCTIONS, pool.map(Kernel, map(_errors_source, FUNCTIONS)), strict=True)
        )
    rows = []
    for name, low, high in RANGES:
        ends = [bits_of(x, "f32") for x in ((low, high) if low > 0 else (high, low))]
        worst = torch.zeros(3, dtype=torch.float64, device="cuda")
        kernels[name](132 * 8, 256, worst, *(end - (end >> 31 << 32) for end in ends))
        ulps, relative, absolute = worst.tolist()
        row = (f"{low:.3g} to {high:.3g}", f"{ulps:.3g}", f"{relative:.1e}", f"{absolute:.1e}")
        rows.append((f"`{name}`", *row))
    columns = ("function", "operands", "ulp", "relative error", "absolute error")
    return Table(
        "Largest errors of the approximations",
        (
            "Over all floats between the ends, against float64. The guess: tanh.approx has an "
            "error of 2^-11, as the PTX manual says, and an approximation loses the same "
            "number of digits everywhere. Seen: tanh.approx is right to 1.1e-5, 45 times "
            "better. lg2.approx near 1 and sin.approx near multiples of pi have no digit "
            "left, while their absolute errors stay small; sin.approx and fast_tanh() are 0 "
            "for the smallest arguments. What follows: errors of logarithms must be bounded "
            "absolutely. fast_tanh(), which kernlib makes of an exponential and a reciprocal, "
            "has an absolute error of 1.4e-7, but of small arguments fewer digits than "
            "tanh.approx, which has all of them below 2^-12."
        ),
        columns,
        rows,
    )


def _atomics() -> Table:
    rows = []
    for name in ADDITIONS:
        tiny, least = {"f64": (2.0**-1030, 2.0**-1022), "f16x2": (2.0**-20, 2.0**-14)}.get(
            name.split()[-1], (2.0**-130, 2.0**-126)
        )
        pairs = ((tiny, 0.0), (0.0, tiny), (-least, 1.5 * least))
        cells = (_outcome(add_once(name, *pair), sum(pair), None) for pair in pairs)
        rows.append((name, *cells))
    columns = ("operation", "subnormal to 0", "0 to a subnormal", "normal ones, subnormal sum")
    return Table(
        "Atomic additions",
        (
            "The guess: an addition in memory is the addition of a thread. Seen: float32 "
            "additions in global memory flush subnormal operands, what lies in memory, and "
            "sums. Those in shared memory, a loop of compare and swap, keep them, and so do "
            "float64, float16 and bfloat16 everywhere. What follows: index_add and "
            "scatter_add of torch lose float32 numbers below 2^-126 on a GPU, and a sum of 0 "
            "to a subnormal in memory makes it 0. A bfloat16 sum keeps what a float32 sum of "
            "the same magnitude loses."
        ),
        columns,
        rows,
    )


TABLES = (_of_instructions, _of_products, _atomics, _errors)


def measure() -> list[Table]:
    """The tables of the page."""
    return [table() for table in TABLES]
