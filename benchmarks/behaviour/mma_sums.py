"""How tensor cores of sm_90a add: how many bits they keep, what they drop, and in which order."""

from __future__ import annotations

import math
import random
from functools import cache

import torch

from benchmarks.behaviour.compiled import Product, bits_of, dot_products, number_of
from benchmarks.behaviour.page import Table

TITLE = "sums of tensor cores"
LOWEST = {"f16": 44, "bf16": 60, "tf32": 60, "e4m3": 17, "e5m2": 30, "f64": 60}
TF32 = 0xFFFFE000  # the bits of a float that count
PRODUCTS = [
    Product("mma", "f16", "f32", 8),
    Product("mma", "f16", "f32", 16),
    Product("mma", "bf16", "f32", 16),
    Product("mma", "tf32", "f32", 4),
    Product("mma", "tf32", "f32", 8),
    Product("mma", "e4m3", "f32", 32),
    Product("mma", "e5m2", "f32", 32),
    Product("mma", "f64", "f64", 4),
    Product("wgmma", "f16", "f32", 16),
    Product("wgmma", "bf16", "f32", 16),
    Product("wgmma", "tf32", "f32", 8),
    Product("wgmma", "e4m3", "f32", 32),
    Product("wgmma", "e5m2", "f32", 32),
]


def _factors(exponent: int) -> tuple[float, float]:
    """Two powers of two with the product 2^-exponent."""
    half = exponent // 2
    return 2.0**-half, 2.0 ** (half - exponent)


def _probe(it: Product, terms: dict[int, tuple[float, int]], start: float):
    """A sum of terms m 2^-e by place, on top of ``start``."""
    row, column = [0.0] * it.depth, [0.0] * it.depth
    for place, (mantissa, exponent) in terms.items():
        x, y = _factors(exponent)
        row[place], column[place] = mantissa * x, y
    return (it, row, column, start)


def _values(probes: list) -> list[float]:
    return [
        number_of(w, probe[0].accumulator)
        for w, probe in zip(dot_products(probes), probes, strict=True)
    ]


def _bits() -> Table:
    """Cancelled sums: 1 - 1 + 2^-e, whose terms are aligned with 1."""
    ways = {
        "1 and -1 products": lambda it, e: _probe(it, {0: (1, 0), 1: (-1, 0), 2: (1, e)}, 0.0),
        "the same, small term last": lambda it, e: _probe(
            it, {0: (1, 0), 1: (-1, 0), it.depth - 1: (1, e)}, 0.0
        ),
        "1 in C, -1 a product": lambda it, e: _probe(it, {1: (-1, 0), it.depth - 1: (1, e)}, 1.0),
        "2^-e in C": lambda it, e: _probe(it, {0: (1, 0), it.depth - 1: (-1, 0)}, 2.0**-e),
    }
    rows = []
    for it in PRODUCTS:
        lowest = LOWEST[it.operand]
        probes = [way(it, e) for way in ways.values() for e in range(1, lowest + 1)]
        values = _values(probes)
        cells = []
        for i in range(len(ways)):
            seen = values[lowest * i : lowest * (i + 1)]
            right = [e for e, value in enumerate(seen, 1) if value == 2.0**-e]
            last = max(right, default=0)
            cells.append(f"2^-{last}" if last < lowest else f"2^-{last} and on")
        rows.append((it.name, *cells))
    return Table(
        "The last term that 1 - 1 + 2^-e has",
        (
            "The guess: products are added in float32, or exactly. Seen: an instruction "
            "aligns all its products and the accumulator with the largest of them, and drops "
            "what is below 2^-25 of it (a power of two), wherever in k it stands. wgmma of "
            "float8 drops below 2^-13. mma.sync of float8 is compiled to two float16 "
            "instructions, and an addition of the accumulator behind them, which rounds to "
            "nearest; float64 is added term by term. A bound 'and on' is where the table "
            "ends. What follows: terms that cancel leave an error of 2^-25 of the largest, "
            "and with float8 of 2^-13, so scales are to make the terms of one instruction "
            "alike."
        ),
        ("instruction", *ways),
        rows,
    )


def _dropped() -> Table:
    """What becomes of bits beyond the last, and of the end's rounding."""
    cases = {
        "1 - 1 + 1.75 2^-25": ({0: (1, 0), 1: (-1, 0), 2: (1.75, 25)}, 0.0),
        "1 - 1 - 1.75 2^-25": ({0: (1, 0), 1: (-1, 0), 2: (-1.75, 25)}, 0.0),
        "1 + 1.5 2^-24": ({0: (1, 0), 1: (1.5, 24)}, 0.0),
        "-1 - 1.5 2^-24": ({0: (-1, 0), 1: (-1.5, 24)}, 0.0),
        "C = 1, + 1.5 2^-24": ({1: (1.5, 24)}, 1.0),
        "C = 1, + 2^-24 + 2^-24": ({1: (1, 24), 2: (1, 24)}, 1.0),
        "C = 1, + 4 terms 2^-25": ({i: (1, 25) for i in range(4)}, 1.0),
        "C = 1, + 8 terms 1.75 2^-26": ({i: (1.75, 26) for i in range(8)}, 1.0),
        "C = 2^24, + 1 + 1": ({1: (1, 0), 2: (1, 0)}, 2.0**24),
        "C = 2^24, + 1": ({1: (1, 0)}, 2.0**24),
        "C = 2^24, + 1.75": ({1: (1.75, 0)}, 2.0**24),
        "C = 1 + 2^-20, + 0": ({}, 1 + 2.0**-20),
        "C = 1 + 2^-20, + 1": ({0: (1, 0)}, 1 + 2.0**-20),
        "C = 1, + 1.75 2^-14": ({0: (1.75, 14)}, 1.0),
        "C = 1, - 1.75 2^-14": ({0: (-1.75, 14)}, 1.0),
    }
    rows = []
    for it in PRODUCTS:
        if it.operand == "f64":
            continue
        lowest = min(LOWEST[it.operand], 26 if it.operand != "e4m3" else 16)
        fits = {
            name: (terms, start)
            for name, (terms, start) in cases.items()
            if all(place < it.depth and e <= lowest for place, (_, e) in terms.items())
        }
        values = iter(_values([_probe(it, *case) for case in fits.values()]))
        cells = []
        for name in cases:
            value = next(values) if name in fits else None
            cells.append("-" if value is None else _difference(value))
        rows.append((it.name, *cells))
    return Table(
        "What is dropped",
        (
            "The guess: the sum is rounded to nearest once, at the end. Seen: nothing is "
            "rounded, in the alignment or at the end, of either sign (but mma.sync of float8 "
            "adds its accumulator by a scalar instruction); two bits beyond float32 are there "
            "until the end, so 2^-24 counts twice and not once. Of 8 terms that are each "
            "below the last bit nothing is left. wgmma of float8 truncates the accumulator as "
            "well: adding 0 to 1 + 2^-20 gives 1. What follows: a float32 accumulator of "
            "float8 products has 14 bits as soon as the next instruction has read it. What "
            "must have more is added outside, in registers."
        ),
        ("instruction", *cases),
        rows,
    )


def _difference(value: float) -> str:
    """A number beside the power of two that it is nearest to."""
    for base in (2.0**24, 2.0, 1.0, -1.0, 0.0):
        rest = value - base
        if abs(rest) < 2.0**-10 or (base > 2 and abs(rest) < 100):
            if rest == 0:
                return "2^24" if base > 2 else f"{base:g}"
            mantissa, exponent = math.frexp(abs(rest))
            sign = "-" if rest < 0 else "+"
            size = f"{2 * mantissa:g} 2^{exponent - 1}"
            shown = "2^24" if base > 2 else f"{base:g}"
            return f"{shown} {sign} {size}" if base else f"{sign}{size}"
    return f"{value:g}"


def _order() -> Table:
    """The same terms in other places of k."""
    rows = []
    generator = random.Random(1)
    orders = 500
    for it in PRODUCTS:
        spread = 6 if it.operand in ("e4m3", "e5m2") else 12
        if it.operand == "f64":
            spread = 40
        terms = [
            (
                _random(generator, it)
                * generator.choice((-1, 1))
                * 2.0 ** -generator.randrange(spread),
                _random(generator, it) * 2.0 ** -generator.randrange(spread),
            )
            for _ in range(it.depth)
        ]
        start = generator.uniform(-2, 2)
        probes = []
        for _ in range(orders):
            generator.shuffle(terms)
            probes.append((it, [x for x, _ in terms], [y for _, y in terms], start))
        within = len(set(dot_products(probes)))
        small = LOWEST[it.operand] if it.operand in ("e4m3", "f64") else 30
        places = range(2, it.depth)
        values = _values([_probe(it, {0: (1, 0), 1: (-1, 0), i: (1, small)}, 0.0) for i in places])
        stays = [str(i) for i, value in zip(places, values, strict=True) if value]
        rows.append((it.name, f"{within} of {orders}", ", ".join(stays) or "none"))
    columns = ("instruction", "different results", "places of k whose small term stays")
    return Table(
        "Order within k",
        (
            "500 orders of the same terms, with all bits that operands have. The guess: the "
            "order matters, as terms are added in a tree. Seen: it does not, in any type: one "
            "sum per instruction has no order. In mma.sync of float8 small terms of the "
            "second of its two float16 instructions stay (pairs 2, 3, 6, 7 ...: it is not the "
            "upper half of k). Float64 is added from the first place of k to the last; its "
            "500 orders here add up exactly. What follows: k may be permuted within an "
            "instruction of up to 32 bytes without a change of a bit, for instance to load "
            "fragments in one piece."
        ),
        columns,
        rows,
    )


def _halves() -> Table:
    """Accumulators of float16, and integers."""
    rows = []
    for unit in ("mma", "wgmma"):
        it = Product(unit, "f16", "f16", 16)
        cases = {
            "60000 + 6000": ([1.0], [6000.0], 60000.0),
            "60000 + 6000 - 6000": ([1.0, 1.0], [6000.0, -6000.0], 60000.0),
            "300 * 300 - 300 * 299": ([300.0, -300.0], [300.0, 299.0], 0.0),
            "1 + 1.5 2^-11": ([1.0, 1.5], [1.0, 2.0**-11], 0.0),
            "1 + 2^-11, a tie": ([1.0, 1.0], [1.0, 2.0**-11], 0.0),
            "1 + 3 2^-11, a tie": ([1.0, 3.0], [1.0, 2.0**-11], 0.0),
            "1 - 1 + 2^-24": ([1.0, -1.0, 2.0**-12], [1.0, 1.0, 2.0**-12], 0.0),
            "1 - 1 + 2^-24, 1 in C": ([-1.0, 2.0**-12], [1.0, 2.0**-12], 1.0),
        }
        for name, value in zip(
            cases, _values([(it, *case) for case in cases.values()]), strict=True
        ):
            rows.append((it.name, name, f"{value:.9g}"))
        it = Product(unit, "s8", "s32", 32)
        wraps = _values([(it, [1], [1], 2147483647), (it, [-128] * 32, [-128] * 32, 0)])
        rows.append((it.name, "2147483647 + 1", f"{wraps[0]:.0f}"))
        rows.append((it.name, "32 products (-128) (-128)", f"{wraps[1]:.0f}"))
        it = Product(unit, "f16", "f32", 16)
        big = 65504.0
        value = _values([(it, [big] * 16, [big] * 16, 3.4e38), (it, [1.0], [1.0], -0.0)])
        rows.append((it.name, "3.4e38 + 16 * 65504^2", f"{value[0]:.9g}"))
    double = Product("mma", "f64", "f64", 4)
    terms = [1.0, 2.0**-53, 2.0**-53, 2.0**-53], [1.0] * 4
    ascending = terms[0][::-1]
    for name, row in (("1 + 3 terms 2^-53, 1 first", terms[0]), ("1 last", ascending)):
        (value,) = _values([(double, row, terms[1], 0.0)])
        rows.append((double.name, name, _ulps(value)))
    return Table(
        "Accumulators",
        (
            "The guess: sums in float16 overflow on the way, and integers saturate. Seen: a "
            "float16 accumulator is rounded once an instruction, to nearest even, where a "
            "float32 one is truncated. What is above 65504 on the way does not matter, at the "
            "end it is infinite. int32 wraps. Float64 rounds each term: three halves of the "
            "last bit are lost behind 1, and count before it. What follows: one instruction "
            "with float16 sums is as good as its result can be; long sums are not."
        ),
        ("instruction", "sum", "answer"),
        rows,
    )


def _ulps(value: float) -> str:
    return f"1 + {(value - 1) * 2.0**52:g} 2^-52"


def _chain() -> Table:
    """The error of long sums of numbers of one sign, against a chain of roundings to nearest."""
    rows = []
    generator = random.Random(2)
    for it in PRODUCTS:
        if it.operand == "f64":
            continue
        total, nearest, exact, cells = 0.0, 0.0, 0.0, []
        for step in range(1, 257):
            row, column = ([_random(generator, it) for _ in range(it.depth)] for _ in range(2))
            part = math.fsum(x * y for x, y in zip(row, column, strict=True))
            (total,) = _values([(it, row, column, total)])
            exact += part
            nearest = _single(nearest + part)
            if step in (4, 32, 256):
                cells.append(f"{total / exact - 1:.1e}")
        rows.append((it.name, *cells, f"{nearest / exact - 1:.1e}"))
    columns = (
        *("instruction", "after 4 instructions", "after 32", "after 256"),
        "256 sums rounded to nearest",
    )
    return Table(
        "Relative errors of sums of positive numbers",
        (
            "Of 256 instructions that add to one accumulator. The guess: errors of a long sum "
            "cancel, and stay near 2^-24. Seen: truncation has one sign, so the sum falls "
            "behind in proportion to its length: by 2.5e-5 after 256 instructions of float16, "
            "a hundred times what rounding to nearest costs, and by 14 % with wgmma of float8 "
            "(1.4 % after 32). Operands of few bits hide it for the first instructions. What "
            "follows: sums of more than some instructions are cut, and the parts added in "
            "float32, for float16 from a depth of hundreds on, for float8 after 128 at the "
            "latest."
        ),
        columns,
        rows,
    )


def _random(generator: random.Random, it: Product) -> float:
    """A number of the operands' kind from 1 to 2."""
    return generator.choice(_numbers(it.operand))


@cache
def _numbers(kind: str) -> list[float]:
    generator, bits = random.Random(kind), TF32 if kind == "tf32" else -1
    words = (bits_of(generator.uniform(1, 2), kind) for _ in range(97))
    return [number_of(word & bits, kind) for word in words]


def _single(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


TABLES = (_bits, _dropped, _order, _halves, _chain)


def measure() -> list[Table]:
    """The tables of the page."""
    return [table() for table in TABLES]
