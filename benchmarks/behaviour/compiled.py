"""Kernels of these measurements, and what single instructions answer: of PTX on numbers, and of
tensor cores for one element of a product."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch

from kernlib.jit import compiler
from kernlib.jit.spec import KernelSpec
from kernlib.runtime import driver

ARCH = "sm_90a"
HEAD = '#include "common/hopper.cuh"\n'
# Of each kind of operand: the constraint of asm, the words of a 64-bit one, dtype, copies.
KINDS = {
    "f64": ("l", torch.float64, 1),
    "f32": ("r", torch.float32, 1),
    "tf32": ("r", torch.float32, 1),
    "f16": ("h", torch.float16, 1),
    "bf16": ("h", torch.bfloat16, 1),
    "f16x2": ("r", torch.float16, 2),
    "bf16x2": ("r", torch.bfloat16, 2),
    "e4m3x2": ("h", torch.float8_e4m3fn, 2),
    "e5m2x2": ("h", torch.float8_e5m2, 2),
    "s32": ("r", torch.int32, 1),
    "s8": ("h", torch.int8, 1),
    "e4m3": ("h", torch.float8_e4m3fn, 1),
    "e5m2": ("h", torch.float8_e5m2, 1),
}
TYPES = {"h": "u16", "r": "u32", "l": "u64"}
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kernel:
    """A kernel, compiled at once and loaded by its first launch."""

    def __init__(self, source: str, entry: str = "probe", threads: int = 128):
        spec = KernelSpec("behaviour", HEAD + source, entry, threads)
        self.entry, self.cubin = entry, compiler.compile_spec(spec, ARCH).cubin
        self._function = None

    @property
    def function(self):
        """The driver's function."""
        if self._function is None:
            from cuda.bindings import driver as cuda

            torch.cuda.current_stream().synchronize()  # there is a context
            driver.bind_context(torch.cuda.current_device())
            self.library = checked(cuda.cuLibraryLoadData(self.cubin, [], [], 0, [], [], 0))
            kernel = checked(cuda.cuLibraryGetKernel(self.library, self.entry.encode()))
            self._function = checked(cuda.cuKernelGetFunction(kernel))
        return self._function

    def __call__(self, grid: int, threads: int, *arguments, overlaps: bool = False, stream=None):
        """Launch on torch's current stream. Arguments are tensors and numbers of type int32."""
        from cuda.bindings import driver as cuda

        stream = torch.cuda.current_stream().cuda_stream if stream is None else stream
        config = driver.launch_config((grid, 1, 1, threads, 1, 1, 0), stream, overlaps)
        checked(cuda.cuLaunchKernelEx(config, self.function, parameters(arguments), 0))


def parameters(arguments: Sequence) -> tuple:
    """The arguments of a kernel as cuda.bindings takes them."""
    tensors = [isinstance(it, torch.Tensor) for it in arguments]
    values = [
        it.data_ptr() if is_one else it for it, is_one in zip(arguments, tensors, strict=True)
    ]
    return tuple(values), tuple(ctypes.c_void_p if it else ctypes.c_int for it in tensors)


def checked(answer: tuple):
    """What a call of the driver returned. Raises RuntimeError for an error of it."""
    if int(answer[0]):
        raise RuntimeError(str(answer[0]))
    return answer[1] if len(answer) == 2 else answer[1:]


def bits_of(value: float | int, kind: str) -> int:
    """The word that holds a number, in each of its copies."""
    return _bits_of(value, math.copysign(1.0, value), kind)


@cache
def _bits_of(value: float | int, sign: float, kind: str) -> int:
    """``sign`` tells 0 and -0 apart, which are equal as keys."""
    _, dtype, copies = KINDS[kind]
    return repeated(torch.tensor([value], dtype=torch.float64).to(dtype), copies)


def repeated(number: torch.Tensor, copies: int) -> int:
    width = number.element_size()
    word = int(number.view(INTEGERS[width])) & ((1 << 8 * width) - 1)
    return sum(word << 8 * width * i for i in range(copies))


def number_of(word: int, kind: str) -> float:
    """The number that a word holds, in its lowest copy."""
    _, dtype, _ = KINDS[kind]
    width = torch.empty(0, dtype=dtype).element_size()
    low = (word & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return torch.frombuffer(bytearray(low), dtype=dtype).to(torch.float64).item()


class Instruction(NamedTuple):
    """One of PTX, as the text of asm with operands %0 (the result), %1, ..., and their kinds."""

    text: str
    result: str
    operands: tuple[str, ...]


def evaluate(calls: Sequence[tuple[Instruction, Sequence[int]]]) -> list[int]:
    """The words that instructions answer for the words of their operands."""
    kernel = Kernel(instructions_source([call for call, _ in calls]))
    table = [[i, *words, *[0] * (3 - len(words))] for i, (_, words) in enumerate(calls)]
    operands = signed(table).cuda()
    result = torch.zeros(len(calls), dtype=torch.int64, device="cuda")
    kernel((len(calls) + 31) // 32, 32, operands, result, len(calls))
    return [word & (1 << 64) - 1 for word in result.tolist()]


def signed(table) -> torch.Tensor:
    """Words of 64 bits as a tensor."""
    return torch.tensor(table, dtype=torch.uint64).view(torch.int64)


def instructions_source(instructions: Sequence[Instruction]) -> str:
    """A kernel whose thread evaluates the instruction that its row names."""
    texts = {it: i for i, it in enumerate(dict.fromkeys(instructions))}
    place = ", ".join(str(texts[it]) for it in instructions)
    cases = "\n".join(_case(it, i) for it, i in texts.items())
    return f"""
__constant__ u16 places[] = {{{place}}};
extern "C" __global__ void probe(const u64* operands, u64* result, int rows) {{
    int row = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= rows) return;
    u64 a = operands[4 * row + 1], b = operands[4 * row + 2], c = operands[4 * row + 3];
    switch (places[operands[4 * row]]) {{
{cases}
    }}
}}
"""


def _case(it: Instruction, number: int) -> str:
    out = KINDS[it.result][0]
    operands = ", ".join(
        f'"{KINDS[kind][0]}"({TYPES[KINDS[kind][0]]}({name}))'
        for kind, name in zip(it.operands, "abc", strict=False)
    )
    text = it.text.replace("\n", "\\n\\t")
    return (
        f"    case {number}: {{ {TYPES[out]} d; "
        f'asm volatile("{{{text}}}" : "={out}"(d) : {operands}); result[row] = d; break; }}'
    )


class Product(NamedTuple):
    """An instruction of tensor cores: its kinds of operands and accumulator, and its depth."""

    unit: str  # "mma" or "wgmma"
    operand: str
    accumulator: str
    depth: int

    @property
    def name(self) -> str:
        if self.operand == "f64" and self.depth == 4:
            return "mma.sync m8n8k4 f64"
        shape = "m16n8k" if self.unit == "mma" else "m64n8k"
        unit = "mma.sync" if self.unit == "mma" else "wgmma"
        return f"{unit} {shape}{self.depth} {self.operand}, sums {self.accumulator}"

    @property
    def words(self) -> int:
        """Of 32 bits, or of f64, in the operands of one element."""
        if self.operand == "f64":
            return self.depth
        return self.depth * torch.empty(0, dtype=KINDS[self.operand][1]).element_size() // 4


class Word(NamedTuple):
    """An operand by its bits."""

    bits: int


def dot_products(probes: Sequence[tuple[Product, list, list, object]]) -> list[int]:
    """For each probe the word of element (0, 0) of C + A B, where A has the one row, B the one
    column and C the one element that the probe names, of numbers or Words, and else zeros."""
    products = list(dict.fromkeys(probe[0] for probe in probes))
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(_kernel, products))
    results = [0] * len(probes)
    for product, kernel in zip(products, kernels, strict=True):
        places = [i for i, probe in enumerate(probes) if probe[0] == product]
        rows = signed([_packed(*probes[i]) for i in places]).cuda()
        result = torch.zeros(len(places), dtype=torch.int64, device="cuda")
        kernel(len(places), 128, rows, result)
        for i, word in zip(places, result.tolist(), strict=True):
            results[i] = word & (1 << 64) - 1
    return results


@cache
def _kernel(product: Product) -> Kernel:
    return Kernel(product_source(product))


def _packed(product: Product, row: list, column: list, start) -> list[int]:
    """8 words of A, 8 of B, and that of C."""
    return [*_words(product, row), *_words(product, column), _word(start, product.accumulator)]


def _words(product: Product, numbers: list) -> list[int]:
    bits = [_word(number, product.operand) for number in numbers]
    bits += [0] * (product.depth - len(bits))
    each = max(1, product.depth // product.words)
    width = 32 // each
    joined = (
        sum(bit << width * i for i, bit in enumerate(bits[at : at + each]))
        for at in range(0, product.depth, each)
    )
    return (list(joined) + [0] * 8)[:8]


def _word(number, kind: str) -> int:
    return number.bits if isinstance(number, Word) else bits_of(number, kind)


def product_source(it: Product) -> str:
    """A kernel whose block computes one probe, on fragments as common/mma.cuh describes them."""
    double, wide = it.operand == "f64", it.words == 8
    few = double and it.depth == 4
    sums = {"f16": 2, "f64": 2 if few else 4}.get(it.accumulator, 4)
    # mma.sync of 16 rows reads two registers of A for each one of B.
    a = [0] if few else ([0, 1, 2, 3] if wide or it.unit == "wgmma" else [0, 1])
    b = [0, 1] if wide else [0]
    kind = "l" if double else "r"
    d_text = ", ".join(f"%{i}" for i in range(sums))
    a_text = ", ".join(f"%{sums + i}" for i in range(len(a)))
    b_text = ", ".join(f"%{sums + len(a) + i}" for i in range(len(b)))
    outs = ", ".join(f'"+{kind}"(d[{i}])' for i in range(sums))
    a_in = ", ".join(f'"{kind}"(a[{i}])' for i in a)
    b_in = ", ".join(f'"{kind}"(b[{i}])' for i in b)
    if it.unit == "mma":
        shape = "m8n8k4" if few else f"m16n8k{it.depth}"
        types = f"{it.accumulator}.{it.operand}.{it.operand}.{it.accumulator}"
        call = (
            f'asm volatile("mma.sync.aligned.{shape}.row.col.{types} {{{d_text}}}, {{{a_text}}}, '
            f'{{{b_text}}}, {{{d_text}}};" : {outs} : {a_in}, {b_in});'
        )
    else:
        flags = ", p" + {"s8": "", "tf32": ", 1, 1"}.get(it.operand, ", 1, 1")
        flags += ", 0" if it.operand in ("f16", "bf16") else ""
        place = f"%{sums + 4}"
        call = (
            "wgmma_fence(); "
            f'asm volatile("{{.reg .pred p; setp.ne.u32 p, 1, 0; wgmma.mma_async.sync.aligned.'
            f"m64n8k{it.depth}.{it.accumulator}.{it.operand}.{it.operand} {{{d_text}}}, "
            f'{{{a_text}}}, {place}{flags};}}" : {outs} : {a_in}, '
            '"l"(core_matrices_descriptor(shared_address(rows), 128, 256)) : "memory"); '
            "wgmma_commit(); wgmma_wait<0>();"
        )
    word = "u64" if double else "u32"
    return f"""
extern "C" __global__ void __launch_bounds__(128) probe(const u64* operands, u64* result) {{
    __shared__ alignas(128) u32 rows[64];
    operands += 17 * blockIdx.x;
    int t = threadIdx.x % 4;
    bool first = threadIdx.x < 4;
    if (threadIdx.x < 64) rows[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x < 8) rows[threadIdx.x / 4 * 32 + t] = u32(operands[8 + threadIdx.x]);
    fence_shared_writes();
    __syncthreads();
    {word} a[4] = {{}}, b[2] = {{}}, d[4] = {{}};
    if (first) {{
        a[0] = {word}(operands[t]), a[2] = {word}(operands[4 + t]);
        b[0] = {word}(operands[8 + t]), b[1] = {word}(operands[12 + t]);
    }}
    if (threadIdx.x == 0) d[0] = {word}(operands[16]);
    {call}
    if (threadIdx.x == 0) result[blockIdx.x] = d[0];
}}
"""
