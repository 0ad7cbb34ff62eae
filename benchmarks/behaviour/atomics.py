"""Atomic additions on sm_90a: which sums repeat, in which order the lanes of a warp are added, and
how many additions a second there are."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from benchmarks.behaviour.compiled import KINDS, TYPES, Kernel, bits_of, number_of
from benchmarks.behaviour.page import Table

TITLE = "atomic additions"
# Of each operation the text of asm, where %0 is the address and %1 the value.
ADDITIONS = {
    "red.global f32": "red.global.add.f32 [%0], %1;",
    "atom.global f32": "{.reg .b32 t; atom.global.add.f32 t, [%0], %1;}",
    "red.global.v4 f32": "red.global.add.v4.f32 [%0], {%1, %1, %1, %1};",
    "red.global f64": "red.global.add.f64 [%0], %1;",
    "red.global f16x2": "red.global.add.noftz.f16x2 [%0], %1;",
    "red.global bf16x2": "red.global.add.noftz.bf16x2 [%0], %1;",
    "atom.shared f32": "red.shared.add.f32 [%0], %1;",
    "atom.shared f64": "red.shared.add.f64 [%0], %1;",
    "atom.shared f16x2": "{.reg .b32 t; atom.shared.add.noftz.f16x2 t, [%0], %1;}",
    "atom.cluster f32": "{.reg .b32 t; atom.shared::cluster.add.f32 t, [%0], %1;}",
}
INTEGERS = {
    "red.global s32": "red.global.add.s32 [%0], %1;",
    "atom.shared s32": "red.shared.add.s32 [%0], %1;",
    "atom.cluster s32": "{.reg .b32 t; atom.shared::cluster.add.s32 t, [%0], %1;}",
}
ALL = ADDITIONS | INTEGERS
SAME, BY_WARP, BY_THREAD, BY_SECTOR = range(4)  # places of what a thread adds to
BLOCKS = 132 * 8


def _kind(name: str) -> str:
    return name.split()[-1]


def _bytes(name: str) -> int:
    return {"f64": 8}.get(_kind(name), 4) * (4 if ".v4" in name else 1)


@cache
def _kernel(name: str) -> Kernel:
    """Each thread adds its value ``loops`` times to the place that ``place`` says. Cells in shared
    memory begin with a word of ``out``, and end there."""
    word, size = TYPES[KINDS[_kind(name)][0]], _bytes(name)
    value = KINDS[_kind(name)][0]
    shared, cluster = ".shared" in name or ".cluster" in name, ".cluster" in name
    address = "u64 address = u64(out) + u64(at) * SIZE;"
    before = after = ""
    if shared:
        before = f"""
    __shared__ alignas(16) {word} cells[1024];
    for (int i = threadIdx.x; i < 1024; i += blockDim.x) cells[i] = 0;
    if (threadIdx.x == 0) cells[0] = reinterpret_cast<{word}*>(out)[blockIdx.x];
    WAIT"""
        after = f"""
    WAIT
    if (threadIdx.x == 0) reinterpret_cast<{word}*>(out)[blockIdx.x] = cells[0];"""
        address = "u32 address = shared_address(cells) + u32(at) * SIZE;"
    if cluster:  # of two CTAs: both add to the cells of the first
        address += ' asm("mapa.shared::cluster.u32 %0, %0, 0;" : "+r"(address));'
    wait = "__syncthreads();"
    if cluster:
        wait = (
            'asm volatile("barrier.cluster.arrive.aligned;" ::: "memory"); '
            'asm volatile("barrier.cluster.wait.aligned;" ::: "memory");'
        )
    source = f"""
#define SIZE {size}
extern "C" __global__ void {"__cluster_dims__(2, 1, 1)" if cluster else ""}
__launch_bounds__(1024) probe(const {word}* values, char* out, int place, int loops) {{
    int id = {"threadIdx.x" if shared else "blockIdx.x * blockDim.x + threadIdx.x"};
    {word} value = values[(blockIdx.x * blockDim.x + threadIdx.x) % 4096];
    int at = place == 0 ? 0 : place == 1 ? id / 32 : place == 2 ? id : id * (32 / SIZE);
    {before.replace("WAIT", wait)}
    {address}
    for (int i = 0; i < loops; ++i) {{
        asm volatile("{ALL[name]}" :: "{"r" if shared else "l"}"(address), "{value}"(value)
                     : "memory");
    }}
    {after.replace("WAIT", wait)}
}}
"""
    return Kernel(source, threads=1024)


def add_once_bits(name: str, value: int, start: int) -> int:
    """The word behind one addition of one number, of the lower half where there are two."""
    size = _bytes(name) // (4 if ".v4" in name else 1)
    dtype = torch.int64 if size == 8 else torch.int32
    pair = torch.tensor([value, start], dtype=torch.uint64).view(torch.int64)
    pair = pair.to(dtype).cuda() if size == 8 else pair.view(torch.int32)[::2].cuda()
    values = pair[:1].repeat(4096)
    out = torch.zeros(16, dtype=dtype, device="cuda")
    out[0] = pair[1]
    grid = 2 if ".cluster" in name else 1
    if grid == 2:  # the second CTA adds nothing
        values[1:] = 0
    _kernel(name)(grid, 1, values, out, SAME, 1)
    bits = {"f64": 64, "f32": 32}.get(_kind(name), 16)
    return int(out[0]) & (1 << bits) - 1


def add_once(name: str, value: float, start: float) -> float:
    """The sum that one addition leaves."""
    kind = _kind(name)
    return number_of(add_once_bits(name, bits_of(value, kind), bits_of(start, kind)), kind)


def _values(name: str) -> torch.Tensor:
    _, dtype, copies = KINDS[_kind(name)]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4096, generator=generator, dtype=torch.float64)
    values *= torch.exp2(torch.randint(-4, 5, (4096,), generator=generator).double())
    return values.to(dtype).repeat_interleave(copies).cuda()


def _sums(name: str, grid: int, threads: int, runs: int) -> list[float]:
    """What is in the first place after each of some runs."""
    dtype = KINDS[_kind(name)][1]
    values = _values(name)
    out = torch.zeros(runs, max(64, 2 * grid), dtype=dtype, device="cuda")
    for row in out:
        _kernel(name)(grid, threads, values, row, SAME, 1)
    return out[:, 0].double().tolist()


def _repeats() -> Table:
    shapes = {
        "a warp": (1, 32),
        "2 warps of a block": (1, 64),
        "a block of 1024": (1, 1024),
        "132 blocks of a thread": (132, 1),
        "132 blocks of 256": (132, 256),
    }
    runs, rows = 200, []
    for name in ADDITIONS:
        if ".cluster" in name:
            continue
        cells = [
            "-" if ".shared" in name and grid > 1 else len(set(_sums(name, grid, threads, runs)))
            for grid, threads in shapes.values()
        ]
        rows.append((name, *cells))
    return Table(
        f"Different results of {runs} runs",
        (
            "The guess: any two warps race, so that only one warp repeats. Seen: one warp "
            "repeats always, 2 warps of a block have one or two results, and a block of 32 "
            "warps has dozens, in global and in shared memory. Adding from one block saves no "
            "reproducibility. What follows: sums that must repeat are added in a fixed order, "
            "through partial sums, and one atomic addition for each address at most."
        ),
        ("operation", *shapes),
        rows,
    )


def _orders() -> Table:
    """Which order gives the sum of a warp."""
    rows = []
    for name in ADDITIONS:
        if ".cluster" in name:
            continue
        dtype, copies = KINDS[_kind(name)][1:]
        terms = _values(name)[: 32 * copies : copies].cpu()
        seen = _sums(name, 1, 32, 20)
        exact = terms.double().sum().to(dtype)
        orders = {
            "ascending lanes": _chain(terms),
            "descending lanes": _chain(terms.flip(0)),
            "even lanes, then odd ones": _chain(torch.cat([terms[::2], terms[1::2]])),
            "halves, quarters ...": _tree(terms, False),
            "neighbours, pairs of them ...": _tree(terms, True),
            "rounded once": exact,
        }
        names = [order for order, value in orders.items() if {float(value)} == set(seen)]
        rows.append((name, len(set(seen)), ", ".join(names) or "another"))
    columns = ("operation", "results of 20 runs", "order")
    return Table(
        "Order of the lanes of a warp",
        (
            "The guess: the lanes of one instruction meet in a tree, or in any order. Seen: "
            "they are added one after the other from lane 0 on, each sum rounded, in global "
            "memory and in shared memory alike. (Where two orders are named, both give the "
            "same number. atom whose result nobody uses is compiled to red; in shared memory "
            "float types are loops of compare and swap.) What follows: a warp that adds to "
            "one address takes as long as 32 additions, and a sum in registers by shuffles is "
            "both faster and closer."
        ),
        columns,
        rows,
    )


def _chain(terms: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=terms.dtype)
    for term in terms:
        total = total + term
    return total


def _tree(terms: torch.Tensor, neighbours: bool) -> torch.Tensor:
    while terms.numel() > 1:
        half = terms.numel() // 2
        terms = terms[::2] + terms[1::2] if neighbours else terms[:half] + terms[half:]
    return terms[0]


def _rates() -> Table:
    """Additions a second, where every SM has 8 blocks of 256 threads."""
    rows = []
    for name in ALL:
        shared = ".shared" in name or ".cluster" in name
        cells = []
        for place in (SAME, BY_WARP, BY_THREAD, BY_SECTOR):
            if shared and place == BY_SECTOR:
                cells.append("-")
                continue
            values = torch.zeros(4096 * 2, dtype=torch.float32, device="cuda")
            out = torch.zeros(BLOCKS * 256 * 8 + 64, dtype=torch.float32, device="cuda")
            call = functools.partial(_kernel(name), BLOCKS, 256, values, out, place)
            loops = 4
            while (seconds := _seconds(functools.partial(call, loops))) < 1e-3:
                loops *= 4
            count = BLOCKS * 256 * loops * (4 if ".v4" in name else 1)
            count *= 2 if "x2" in name else 1
            cells.append(f"{count / seconds / 1e9:.3g}")
        rows.append((name, *cells))
    columns = (
        *("operation", "one address (shared: of a block)", "one of each warp"),
        *("consecutive ones", "one a sector of 32 bytes"),
    )
    return Table(
        "G additions a second",
        (
            "Of 1056 blocks of 256 threads. The guess: shared memory is faster than L2 "
            "wherever many add to one address, and float32 costs what int32 costs. Seen: L2 "
            "adds 0.57 G float operands a second to one address, of 4, 8 or 16 bytes, one in "
            "3 clocks, and integers 1.4 G. In shared memory int32 is three times as fast as "
            "float32. An operand of four numbers (v4) takes as long as one of a single "
            "number, but where consecutive ones fill the lines already. Shared memory of a "
            "cluster, where half of the additions come from the other CTA, adds a tenth of "
            "what a CTA's own does, and less than L2 to consecutive addresses. What follows: "
            "vectors of four where a thread has four neighbours to add, and no atomics in "
            "another CTA's memory."
        ),
        columns,
        rows,
    )


def _seconds(call) -> float:
    call()
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 2e3)
    return min(times)


TABLES = (_repeats, _orders, _rates)


def measure() -> list[Table]:
    """The tables of the page."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_kernel, ALL))
    return [table() for table in TABLES]
