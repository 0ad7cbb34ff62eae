"""Payloads and signs of NaN, and signs of zeros, through instructions of sm_90a and through torch's
operations on CUDA tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from benchmarks.behaviour.atomics import ADDITIONS, add_once_bits
from benchmarks.behaviour.compiled import (
    INTEGERS,
    Instruction,
    Product,
    Word,
    bits_of,
    dot_products,
    evaluate,
)
from benchmarks.behaviour.page import Table

TITLE = "NaN and signed zeros"
# A quiet NaN with a payload, a signalling one, and a quiet one whose sign is set, by kind.
QUIET = {"f32": 0x7FC01234, "f64": 0x7FF8000000001234, "f16": 0x7E12, "bf16": 0x7FC5}
SIGNALLING = {"f32": 0x7F812345, "f64": 0x7FF0000000012345, "f16": 0x7D23, "bf16": 0x7F85}
NEGATIVE = {"f32": 0xFFC04321, "f64": 0xFFF8000000004321, "f16": 0xFE21, "bf16": 0xFFC3}
ARITHMETIC = ("add.{}", "mul.{}", "fma.rn.{}", "max.{}", "max.NaN.{}", "neg.{}", "abs.{}")


def _nans(kind: str) -> list[int]:
    """The three NaNs, in both halves of a word if there are two."""
    base, copies = kind.removesuffix("x2"), 2 if kind.endswith("x2") else 1
    width = {"f16": 16, "bf16": 16}.get(base, 0)
    return [
        sum(it[base] << width * i for i in range(copies)) for it in (QUIET, SIGNALLING, NEGATIVE)
    ]


def _shown(word: int, kind: str) -> str:
    """Of two numbers the lower one."""
    digits = {"f64": 16, "f32": 8, "tf32": 8}.get(kind, 2 if kind[0] == "e" else 4)
    return f"{word & (1 << 4 * digits) - 1:0{digits}x}"


def _operands(name: str) -> int:
    return {"neg": 1, "abs": 1, "fma": 3}.get(name.split(".")[0], 2)


def _arithmetic() -> Table:
    """One NaN as the first operand, and beside another NaN."""
    names = [
        (name.format(kind), kind)
        for kind in ("f32", "f64", "f16x2", "bf16x2")
        for name in ARITHMETIC
        if not (kind == "f64" and ".NaN" in name)
    ]
    calls = []
    for name, kind in names:
        count = _operands(name)
        instruction = Instruction(
            f"{name} " + ", ".join(f"%{i}" for i in range(count + 1)) + ";", kind, (kind,) * count
        )
        nans, one = _nans(kind), bits_of(1.0, kind)
        calls += [(instruction, [nan, one, one][:count]) for nan in nans]
        calls.append((instruction, [nans[0], nans[2], one][:count]))
        calls.append((instruction, [nans[2], nans[0], one][:count]))
    words = evaluate(calls)
    rows = []
    for i, (name, kind) in enumerate(names):
        cells = [_shown(word, kind) for word in words[5 * i : 5 * i + 5]]
        if _operands(name) == 1:
            cells[3:] = ["-", "-"]
        rows.append((f"`{name}`", *cells))
    columns = ("instruction", "quiet", "signalling", "negative", "quiet, negative", "reverse")
    shown = ", ".join(
        f"{kind} {' '.join(_shown(word, kind) for word in _nans(kind))}" for kind in QUIET
    )
    text = (
        "The guess: the payload and the sign of a NaN pass through arithmetic, as IEEE 754 "
        "recommends. Seen: float32, float16 and bfloat16 make every NaN 7fffffff or 7fff, neg "
        "and abs included. Float64 keeps it, makes it quiet, and of two takes the second; neg "
        "and abs leave its sign. max of a number and a NaN is the number, if .NaN is not "
        "there. What follows: no code may put information into float32 NaN, and copysign or "
        "bits, not neg, turn their sign. "
        f"The three NaNs are, in hexadecimal: {shown}."
    )
    return Table("Arithmetic", text, columns, rows)


CONVERSIONS = (
    ("cvt.f64.f32", "f64", "f32"),
    ("cvt.rn.f32.f64", "f32", "f64"),
    ("cvt.rn.f16.f32", "f16", "f32"),
    ("cvt.rn.bf16.f32", "bf16", "f32"),
    ("cvt.rna.tf32.f32", "tf32", "f32"),
    ("cvt.f32.f16", "f32", "f16"),
    ("cvt.f32.bf16", "f32", "bf16"),
    ("cvt.f64.f16", "f64", "f16"),
    ("cvt.rn.f16x2.f32 %0, %1, %1;", "f16x2", "f32"),
    ("cvt.rn.bf16x2.f32 %0, %1, %1;", "bf16x2", "f32"),
    ("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;", "e4m3x2", "f32"),
    ("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %1;", "e5m2x2", "f32"),
    ("cvt.rni.s32.f32", "s32", "f32"),
    ("cvt.rni.s64.f32", "f64", "f32"),
    ("cvt.rni.s32.f64", "s32", "f64"),
)


def _conversions() -> Table:
    calls = []
    for name, result, kind in CONVERSIONS:
        text = name if "%" in name else f"{name} %0, %1;"
        calls += [(Instruction(text, result, (kind,)), [nan]) for nan in _nans(kind)]
    for name, kind, nans in (
        ("cvt.rn.f16x2.e4m3x2", "e4m3x2", (0x7F7F, 0xFFFF, 0x7F7F)),
        ("cvt.rn.f16x2.e5m2x2", "e5m2x2", (0x7E7E, 0x7D7D, 0xFDFD)),
    ):
        calls += [(Instruction(f"{name} %0, %1;", "f16x2", (kind,)), [nan]) for nan in nans]
    rounded = Instruction("cvt.rna.tf32.f32 %0, %1;", "tf32", ("f32",))
    calls += [(rounded, [nan]) for nan in (0x7F800001, 0x7F801000, 0x7FFFFFFF)]
    words = evaluate(calls)
    rows = []
    for i in range(0, len(calls), 3):
        it = calls[i][0]
        kinds = "s32" if it.result == "s32" else it.result
        cells = (
            f"{_shown(call[1][0], it.operands[0])} to "
            f"{word:08x}" if kinds == "s32" else f"{_shown(call[1][0], it.operands[0])} to "
            f"{_shown(word, kinds)}"
            for call, word in zip(calls[i : i + 3], words[i : i + 3], strict=True)
        )  # fmt: skip
        rows.append((f"`{it.text.split(' ')[0]}`", *cells))
    columns = ("instruction", "first", "second", "third")
    return Table(
        "Conversions of NaN",
        (
            "The guess: a wider type keeps a payload, a narrower one has its canonical NaN. "
            "Seen: float16 to float32 makes 7fffffff, though bfloat16 to float32 and all that "
            "comes from or goes to float64 keep sign and upper payload. cvt.rna.tf32 "
            "truncates a NaN: 7f800001 becomes 7f800000, an infinity. Integers of NaN are 0 "
            "in 32 bits from float32, and the least number in 64 bits and from float64. What "
            "follows: a NaN whose bits are all among the lower 13 is lost before TF32 "
            "products, unless a number is compared with itself first."
        ),
        columns,
        rows,
    )


INVALID = (
    ("fma.rn.f32, 0 inf + 1", "fma.rn.f32", "f32", (0.0, math.inf, 1.0)),
    ("add.f32, inf - inf", "add.f32", "f32", (math.inf, -math.inf)),
    ("add.f64, inf - inf", "add.f64", "f64", (math.inf, -math.inf)),
    ("add.f16x2, inf - inf", "add.f16x2", "f16x2", (math.inf, -math.inf)),
    ("add.bf16x2, inf - inf", "add.bf16x2", "bf16x2", (math.inf, -math.inf)),
    ("sqrt.rn.f32 of -1", "sqrt.rn.f32", "f32", (-1.0,)),
    ("sqrt.approx.ftz.f32 of -1", "sqrt.approx.ftz.f32", "f32", (-1.0,)),
    ("sqrt.approx.ftz.f32 of -0", "sqrt.approx.ftz.f32", "f32", (-0.0,)),
    ("sqrt.approx.ftz.f32 of -2^-130", "sqrt.approx.ftz.f32", "f32", (-(2.0**-130),)),
    ("rsqrt.approx.ftz.f32 of -0", "rsqrt.approx.ftz.f32", "f32", (-0.0,)),
    ("lg2.approx.ftz.f32 of -0", "lg2.approx.ftz.f32", "f32", (-0.0,)),
    ("rcp.approx.ftz.f32 of -2^-130", "rcp.approx.ftz.f32", "f32", (-(2.0**-130),)),
    ("tanh.approx.f32 of -0", "tanh.approx.f32", "f32", (-0.0,)),
    ("sin.approx.f32 of inf", "sin.approx.f32", "f32", (math.inf,)),
    ("ex2.approx.ftz.f32 of -inf", "ex2.approx.ftz.f32", "f32", (-math.inf,)),
    ("max.f32 of +0, -0", "max.f32", "f32", (0.0, -0.0)),
    ("max.f32 of -0, +0", "max.f32", "f32", (-0.0, 0.0)),
    ("min.f32 of +0, -0", "min.f32", "f32", (0.0, -0.0)),
    ("min.f32 of -0, +0", "min.f32", "f32", (-0.0, 0.0)),
    ("max.f64 of +0, -0", "max.f64", "f64", (0.0, -0.0)),
    ("max.f64 of -0, +0", "max.f64", "f64", (-0.0, 0.0)),
    ("max.f16x2 of -0, +0", "max.f16x2", "f16x2", (-0.0, 0.0)),
    ("min.bf16x2 of +0, -0", "min.bf16x2", "bf16x2", (0.0, -0.0)),
    ("max.xorsign.abs.f32 of -2, +1", "max.xorsign.abs.f32", "f32", (-2.0, 1.0)),
    ("min.xorsign.abs.f32 of -0, +1", "min.xorsign.abs.f32", "f32", (-0.0, 1.0)),
    ("add.f32, -0 + -0", "add.f32", "f32", (-0.0, -0.0)),
    ("add.f32, +0 + -0", "add.f32", "f32", (0.0, -0.0)),
    ("fma.rn.f32, -0 * 1 + -0", "fma.rn.f32", "f32", (-0.0, 1.0, -0.0)),
    ("fma.rn.ftz.f32, -2^-130 * 1 + -0", "fma.rn.ftz.f32", "f32", (-(2.0**-130), 1.0, -0.0)),
)


def _zeros() -> Table:
    calls = []
    for _, name, kind, operands in INVALID:
        places = ", ".join(f"%{i}" for i in range(len(operands) + 1))
        instruction = Instruction(f"{name} {places};", kind, (kind,) * len(operands))
        calls.append((instruction, [bits_of(x, kind) for x in operands]))
    words = evaluate(calls)
    rows = [(case[0], _shown(word, case[2])) for case, word in zip(INVALID, words, strict=True)]
    return Table(
        "Invalid operations and zeros",
        (
            "The guess: NaN that an operation makes has its sign clear, as 7fffffff has. "
            "Seen: float64 makes fff8000000000000, with the sign set as on x86, all others "
            "7fffffff or 7fff. min and max order -0 before 0, in either order of their "
            "operands. sqrt of -0 and of what .ftz makes -0 is -0, rsqrt of -0 is -inf. What "
            "follows: what sorts or compares float64 bits must look for NaN first, since inf "
            "- inf is below every number by its sign."
        ),
        ("operation", "bits"),
        rows,
    )


def _tensor_cores() -> Table:
    rows, probes = [], []
    products = [
        Product("mma", "f16", "f32", 16),
        Product("mma", "bf16", "f32", 16),
        Product("mma", "tf32", "f32", 8),
        Product("mma", "f16", "f16", 16),
        Product("mma", "f64", "f64", 4),
        Product("wgmma", "f16", "f32", 16),
        Product("wgmma", "f16", "f16", 16),
        Product("wgmma", "e4m3", "f32", 32),
    ]
    for it in products:
        nan = Word({"tf32": QUIET["f32"], "e4m3": 0xFF}.get(it.operand) or NEGATIVE[it.operand])
        into = Word(NEGATIVE[it.accumulator])
        big = math.inf if it.operand != "e4m3" else Word(0x7F)
        probes += [
            (it, [nan], [1.0], 0.0),
            (it, [0.0], [1.0], into),
            (it, [big, big], [1.0, -1.0], 0.0),
            (it, [big], [0.0], 0.0),
            (it, [-0.0] * it.depth, [1.0] * it.depth, -0.0),
            (it, [1.0, -1.0], [1.0, 1.0], -0.0),
        ]
    low = Product("mma", "tf32", "f32", 8), Product("wgmma", "tf32", "f32", 8)
    probes += [(it, [Word(0x7F800001)], [1.0], 0.0) for it in low]
    words = dot_products(probes)
    notes = ", ".join(f"{it.name}: {word:08x}" for it, word in zip(low, words[-2:], strict=True))
    for i, it in enumerate(products):
        rows.append((it.name, *(_shown(w, it.accumulator) for w in words[6 * i : 6 * i + 6])))
    columns = (
        *("instruction", "NaN times 1", "NaN in C", "inf - inf", "inf times 0"),
        *("C and all products -0", "1 - 1 + C, C -0"),
    )
    text = (
        "The guess: tensor cores treat NaN as scalar instructions do. Seen: yes, but for "
        "zeros: -0 times 1, added to -0 everywhere, is 0, except in float64. And TF32 "
        "operands are the upper 19 bits of what is there: a NaN of which nothing shows in "
        "these counts as infinity. What follows: a product with an identity matrix loses the "
        "sign of zeros, and float32 bits that come from outside are looked at before they are "
        "used as TF32. NaN in C and in A are negative ones with a payload; for e4m3 NaN "
        "stands for infinity. "
        f"A float32 NaN of 7f800001 times 1 is, by {notes}."
    )
    return Table("Tensor cores", text, columns, rows)


def _bits(values: list[int], dtype: torch.dtype) -> torch.Tensor:
    width = torch.empty(0, dtype=dtype).element_size()
    top = 1 << 8 * width
    signed = [value - top if value >= top // 2 else value for value in values]
    return torch.tensor(signed, dtype=INTEGERS[width], device="cuda").view(dtype)


def _hex(x: torch.Tensor) -> str:
    width = x.element_size()
    mask = (1 << 8 * width) - 1
    return " ".join(f"{word & mask:0{2 * width}x}" for word in x.view(INTEGERS[width]).tolist())


def _torch() -> Table:
    nans = [_bits(_nans(kind), dtype) for kind, dtype in (
        ("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16))]  # fmt: skip
    x, half, brain = nans
    plus, minus = _bits([0, 1 << 31], torch.float32)[:1], _bits([1 << 31], torch.float32)
    zeros = _bits([1 << 31, 0, 1 << 31, 0], torch.float32)
    order = _bits([0x7FC00000, 0x3F800000, 0xFFC00000, 0xBF800000], torch.float32)
    cases: dict[str, Callable] = {
        "x.clone()": lambda: x.clone(),
        "x + 0": lambda: x + 0,
        "x * 1": lambda: x * 1,
        "-x": lambda: -x,
        "x.abs()": lambda: x.abs(),
        "x.half()": lambda: x.half(),
        "x.half().float()": lambda: x.half().float(),
        "x.bfloat16()": lambda: x.bfloat16(),
        "x.cpu().bfloat16()": lambda: x.cpu().bfloat16(),
        "x.cpu().half()": lambda: x.cpu().half(),
        "x.to(float8_e4m3fn)": lambda: x.to(torch.float8_e4m3fn),
        "x.to(float8_e5m2)": lambda: x.to(torch.float8_e5m2),
        "x.double()": lambda: x.double(),
        "half NaNs.float()": lambda: half.float(),
        "half NaNs.cpu().float()": lambda: half.cpu().float(),
        "bfloat16 NaNs.float()": lambda: brain.float(),
        "bfloat16 NaNs + 0": lambda: brain + 0,
        "half NaNs + 0": lambda: half + 0,
        "torch.maximum(NaNs, 1)": lambda: torch.maximum(x, torch.ones_like(x)),
        "torch.fmax(+0, -0) and (-0, +0)": lambda: torch.cat(
            [torch.fmax(plus, minus), torch.fmax(minus, plus)]
        ),
        "torch.maximum(+0, -0) and (-0, +0)": lambda: torch.cat(
            [torch.maximum(plus, minus), torch.maximum(minus, plus)]
        ),
        "torch.maximum(+0, -0) and (-0, +0) on the CPU": lambda: torch.cat(
            [torch.maximum(plus.cpu(), minus.cpu()), torch.maximum(minus.cpu(), plus.cpu())]
        ),
        "torch.clamp(-0, min=0)": lambda: torch.clamp(minus, min=0.0),
        "torch.relu(-0)": lambda: torch.relu(minus),
        "torch.relu(NaNs)": lambda: torch.relu(x),
        "torch.sum of two -0": lambda: minus.expand(2).sum(0, keepdim=True),
        "torch.sum of two -0 on the CPU": lambda: minus.cpu().expand(2).sum(0, keepdim=True),
        "torch.amax of -0 0 -0 0": lambda: zeros.amax(0, keepdim=True),
        "torch.sort of -0 0 -0 0": lambda: zeros.sort().values,
        "torch.sort of NaN 1 -NaN -1": lambda: order.sort().values,
        "torch.topk 2 of NaN 1 -NaN -1": lambda: order.topk(2).values,
        "torch.matmul of -0 by 1": lambda: minus.view(1, 1) @ torch.ones(1, 1, device="cuda"),
        "torch.sort(stable=True) of -0 0 -0 0": lambda: zeros.sort(stable=True).values,
        "x.to(int32)": lambda: x.to(torch.int32),
        "x.to(int64)": lambda: x.to(torch.int64),
        "x.cpu().to(int32)": lambda: x.cpu().to(torch.int32),
        "x.to(uint8)": lambda: x.to(torch.uint8),
    }
    rows = []
    for name, call in cases.items():
        try:
            shown = _hex(call().reshape(-1))
        except Exception as error:  # a dtype or operation that this version lacks
            shown = type(error).__name__
        rows.append((f"`{name}`", shown))
    lengths = {
        "torch.unique of three equal NaNs, entries": x.new_full((3,), math.nan).unique().numel(),
        "torch.unique of -0 and 0, entries": zeros[:2].unique().numel(),
    }
    rows += [(f"`{name}`", length) for name, length in lengths.items()]
    return Table(
        "torch",
        (
            "x holds the three float32 NaNs from above. The guess: CPU and GPU give the same bits "
            "of a NaN, and the same of integers. Seen: x + 0 and -x rewrite a NaN on the GPU; "
            "maximum and relu copy it. NaN to int32 is 0 on the GPU and -2^31 on the CPU, to "
            "int64 -2^63. maximum of zeros goes by sign on the GPU, by the order of its operands "
            "on the CPU. sort() of four numbers reorders equal ones. What follows: equality of "
            "bits across devices is to be tested with NaN replaced, and a mask for NaN comes "
            "before a cast to integers."
        ),
        ("operation", "bits"),
        rows,
    )


def _orders() -> Table:
    """Whether indices of equal values ascend."""
    rows = []
    for size in (4, 100, 3000, 100_000, 3_000_000):
        x = torch.arange(size, device="cuda").remainder(2).float()

        def ascend(indices: torch.Tensor, x=x) -> str:
            values = x[indices]
            equal = values[1:] == values[:-1]
            return "yes" if bool((indices[1:] > indices[:-1])[equal].all()) else "no"

        k = min(size, 1000)
        cells = (x.sort().indices, x.argsort(descending=True), x.topk(k).indices)
        rows.append((size, *map(ascend, cells), ascend(x.sort(stable=True).indices)))
    columns = ("numbers", "sort", "argsort, descending", "topk", "sort(stable=True)")
    return Table(
        "Whether equal numbers stay in order",
        (
            "Of 0 and 1 in turn, by the indices that come with them. The guess: sort() is "
            "stable in practice, as radix sorts are. Seen: so it is from 100 numbers on, and "
            "not for 4. topk gives the first of equal ones here, but for 4. What follows: a "
            "test with many numbers proves nothing; where ties count, stable=True."
        ),
        columns,
        rows,
    )


def _atomics() -> Table:
    rows = []
    for name in ADDITIONS:
        if ".cluster" in name:  # a second CTA takes part
            continue
        kind = name.split()[-1].removesuffix("x2")
        width = {"f64": 64, "f32": 32}.get(kind, 16)
        zero = 1 << (width - 1)
        cells = [
            f"{add_once_bits(name, NEGATIVE[kind], 0):0{width // 4}x}",
            f"{add_once_bits(name, 0, NEGATIVE[kind]):0{width // 4}x}",
            f"{add_once_bits(name, zero, zero):0{width // 4}x}",
        ]
        rows.append((name, *cells))
    columns = ("operation", "negative NaN added to 0", "0 added to negative NaN", "-0 added to -0")
    return Table(
        "Atomic additions",
        (
            "The guess: an addition to -0 in memory may give 0. Seen: signs of zeros and the "
            "payloads of NaN are those of an addition in registers, in each type, so -0 "
            "stays. What follows: nothing that a reproducible sum must care for but its "
            "order."
        ),
        columns,
        rows,
    )


TABLES = (_arithmetic, _conversions, _zeros, _tensor_cores, _atomics, _torch, _orders)


def measure() -> list[Table]:
    """The tables of the page."""
    return [table() for table in TABLES]
