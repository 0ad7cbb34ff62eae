"""Hopper's kernels of products with blocks of 64 and 128, and of 16 and 32, on the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import kernlib as kl
from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.families.blocksparse.lowering import hopper
from kernlib.families.blocksparse.lowering.problem import Sdd, Spmm
from kernlib.lowering.steps import Lowered
from tests.families.blocksparse import by_kernel
from tests.families.blocksparse.by_kernel import HALVES
from tests.families.blocksparse.emulated import GATES, Case, error, layout_of, spmm_problem, strided
from tests.families.blocksparse.products import Operands, SampledOperands, launch
from tests.support.compiled_kernels import compiled
from tests.support.emulation.emulator import Emulator
from tests.support.speeds import slow_but

ARCH, WIDTHS = hopper.ARCH, hopper.WIDTHS
WIDE, NARROW = by_kernel.kernel_of("hopper"), by_kernel.kernel_of("narrow")
SAMPLED = by_kernel.kernel_of("hopper", "sdd")
COUNT = 5  # multiprocessors, so that a block has several tiles
EPILOGUES = {
    "none": (),
    "gelu": (kl.Bias(), kl.Gelu()),
    "relu": (kl.Bias(), kl.Relu()),
    "add": (kl.Add(),),
    "gate": (kl.Gate(),),
}


def kernel_of(case: Case):
    return NARROW if case.block[0] < 64 else WIDE


def product_of(
    emulator: Emulator,
    case: Case,
    orders=("rows", "rows"),
    epilogue: str = "none",
    width: int | None = None,
):
    """The result of a case by its kernel, with tiles of so many columns, and in float64."""
    made, kernel = Operands(case, *orders), kernel_of(case)
    choice = {"columns": width} if width else None

    def lower(problem: Spmm) -> Lowered:
        return by_kernel.lower(kernel, EPILOGUES[epilogue], problem, ARCH, COUNT, choice)

    wanted = made.wanted()
    y = strided(tuple(made.out.shape), "rows", case.dtype)
    if epilogue == "relu":
        bias = torch.randn(wanted.shape[-2]).to(case.dtype)
        wanted = (wanted + bias.double()[:, None]).relu()
        return made.launched(emulator, lower, vector0=bias), wanted
    if epilogue == "add":
        return made.launched(emulator, lower, (0.5,), summand0=y), wanted + y.double() / 2
    if epilogue == "gate":
        wanted = wanted * torch.nn.functional.silu(y.double())
        return made.launched(emulator, lower, summand0=y), wanted
    return made.launched(emulator, lower), wanted


CASES = {
    "64": Case("float16", (64, 64), (3, 35), 0.2, 2, 2, 72),
    "64 transposed": Case("bfloat16", (64, 64), (3, 2), 0.5, 1, 1, 264, True),
    "128": Case("float16", (128, 128), (2, 3), 0.5, 1, 2, 8),
    "128 x 64": Case("float16", (128, 64), (2, 5), 0.4, 2, 1, 40, True),
    "16": Case("float16", (16, 16), (9, 40), 0.3, 2, 2, 72),
    "16 transposed": Case("bfloat16", (16, 16), (40, 9), 0.3, 1, 1, 264, True),
    "32": Case("float16", (32, 32), (5, 7), 0.4, 2, 1, 40),
    "32 transposed": Case("float16", (32, 32), (3, 3), 0.5, 1, 2, 8, True),
}
ORDERS = [("rows", "rows"), ("columns", "rows"), ("rows", "columns"), ("columns", "columns")]


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("64", "16"), CASES))
@pytest.mark.parametrize("orders", slow_but(ORDERS[:1], ORDERS))
def test_products(name, orders, emulator, seed):
    found, wanted = product_of(emulator, CASES[name], orders)
    assert error(found, wanted) <= GATES[CASES[name].numbers]


WIDTH_CASES = {
    "64": Case("float16", (64, 64), (7, 35), 0.1, 2, 2, 72),
    "64 transposed": Case("bfloat16", (64, 64), (3, 2), 0.5, 1, 1, 328, True),
    "128": Case("float16", (128, 128), (2, 3), 0.5, 1, 1, 136),
    "128 x 64": Case("float16", (128, 64), (2, 5), 0.4, 2, 1, 8, True),
    "none": Case("float16", (64, 64), (5, 2), 0.0, 1, 1, 200),
}


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("orders", [ORDERS[0], ORDERS[3]])
@pytest.mark.parametrize("name", WIDTH_CASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_tiles_of_each_width(width, name, orders, emulator, seed):
    """Also those of more columns than a problem has, of few more, and without steps."""
    case = WIDTH_CASES[name]
    found, wanted = product_of(emulator, case, orders, width=width)
    assert error(found, wanted) <= GATES[case.numbers]


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("epilogue", ["relu", "add", "gate"])
@pytest.mark.parametrize(
    "name, width", [("64", None), ("16 transposed", None), *(("64 transposed", n) for n in WIDTHS)]
)
def test_epilogues(name, width, epilogue, emulator, seed):
    found, wanted = product_of(emulator, CASES[name], ORDERS[2], epilogue, width)
    assert error(found, wanted) <= 2 * GATES[CASES[name].numbers]


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("block, width", [(64, 256), (64, 64), (32, None)])
def test_lines_that_take_turns(block, width, emulator, seed):
    """Whose steps are the other warpgroup's for longer than the ring is: a stage is given back."""
    case = Case("float16", (block, block), (2, 40), 1.0, columns=8)
    choice = {"columns": width} if width else {}
    for period in (1, 3, 9, 20):
        turn = torch.arange(40) // period % 2 == 0
        made = Operands(case, layout=Layout(torch.stack((turn, ~turn))[None], block))
        found = made.launched(
            emulator,
            lambda problem: by_kernel.lower(kernel_of(case), (), problem, ARCH, COUNT, choice),
        )
        assert error(found, made.wanted()) <= 1e-3


@pytest.mark.emulated
@pytest.mark.slow
def test_a_depth_beyond_an_int(emulator, seed):
    """Of which the first and the last block are stored; columns of the dense operand are the same
    one, of whose memory only what is written is ever there. A layout would take 5 GB to make."""
    last = 2**31 // 32
    case = Case("float16", (32, 32), (1, last + 1), 0.0, columns=8)
    bits = torch.zeros(last // 32 + 1, dtype=torch.int32)
    bits[0] = bits[-1] = 1
    tensors = (bits, (bits.cumsum(0) - bits).int(), *[bits] * (len(NAMES) - 2))
    layout = SimpleNamespace(block=case.block, grid=case.grid, heads=1, capacity=2, tensors=tensors)
    values = torch.randn(1, 2, 32, 32).half()
    column = torch.empty(32 * (last + 1), dtype=torch.float16)
    column[:32], column[-32:] = torch.randn(32).half(), torch.randn(32).half()
    dense, out = column.expand(1, 1, 8, -1).mT, torch.zeros(1, 1, 32, 8).half()
    problem = spmm_problem(case, layout, values, dense, out)
    lowered = by_kernel.lower(NARROW, (), problem, ARCH, COUNT)
    launch(emulator, lowered, layout, values=values, dense=dense, out=out)
    ends = torch.stack((column[:32], column[-32:])).double()
    wanted = (values[0].double() @ ends[..., None]).sum(0)
    assert error(out[0, 0], wanted.expand(-1, 8)) <= GATES[case.numbers]


SDD = {
    "64": Case("float16", (64, 64), (3, 5), 0.5, 2, 2, 72),
    "128": Case("bfloat16", (128, 128), (2, 3), 0.6, 1, 1, 40),
    "64 x 128": Case("float16", (64, 128), (3, 3), 0.5, 2, 1, 64),
    "128 x 64": Case("float16", (128, 64), (2, 3), 0.5, 1, 2, 8),
}


@pytest.mark.few(1)
@pytest.mark.emulated
@pytest.mark.parametrize("name", slow_but(("64",), SDD))
@pytest.mark.parametrize("orders", slow_but(ORDERS[:1], ORDERS))
def test_sampled_products(name, orders, emulator, seed):
    found, wanted = sampled_product_of(emulator, SDD[name], orders)
    assert error(found, wanted) <= GATES[SDD[name].numbers]


def sampled_product_of(
    emulator: Emulator, case: Case, orders=("rows", "rows"), slots: int | None = None, added=False
):
    """The blocks of a case by the kernel, with tiles of so many slots, and in float64."""
    made, choice = SampledOperands(case, *orders), {"slots": slots} if slots else None
    wanted, epilogue, beside = made.wanted(), (), {}
    if added:  # in place, so that what is read and written twice would show
        made.out.copy_(torch.randn(made.out.shape))
        wanted[:, : made.layout.nnz] += made.out[:, : made.layout.nnz].double() / 2
        epilogue, beside = (kl.Add(),), {"summand0": made.out}

    def lower(problem: Sdd) -> Lowered:
        return by_kernel.lower(SAMPLED, epilogue, problem, ARCH, COUNT, choice)

    return made.launched(emulator, lower, (0.5,), **beside), wanted


SLOTS = [(name, slots) for name in SDD for slots in (4, 2, 1) if slots < 4 or name == "64"]


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("orders", [ORDERS[0], ORDERS[3]])
@pytest.mark.parametrize("name, slots", SLOTS)
def test_tiles_of_so_many_slots(name, slots, orders, emulator, seed):
    found, wanted = sampled_product_of(emulator, SDD[name], orders, slots)
    assert error(found, wanted) <= GATES[SDD[name].numbers]


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("name, slots", SLOTS)
def test_a_sampled_product_is_added_to(name, slots, emulator, seed):
    found, wanted = sampled_product_of(emulator, SDD[name], slots=slots, added=True)
    assert error(found, wanted) <= 2 * GATES[SDD[name].numbers]


def kernels(specs: list) -> list:
    """Without those of the order of tiles."""
    return [spec for spec in specs if spec.threads == hopper.THREADS]


def first_of(specs: list) -> list:
    return [pytest.param(s, marks=[pytest.mark.slow] * bool(i)) for i, s in enumerate(specs)]


WIDE_SPECS = [
    spec
    for epilogue in EPILOGUES.values()
    for block in ((64, 64), (128, 128), (64, 128))
    for spec in kernels(by_kernel.variants(WIDE, epilogue, block, HALVES, ARCH))
]
NARROW_SPECS = [
    spec
    for epilogue in EPILOGUES.values()
    for block in ((16, 16), (32, 32))
    for spec in kernels(by_kernel.variants(NARROW, epilogue, block, HALVES, ARCH))
]
SAMPLED_SPECS = [
    spec
    for epilogue in ((), (kl.Gelu(),), (kl.Add(),))
    for block in ((64, 64), (128, 128), (64, 128), (128, 64))
    for spec in by_kernel.variants(SAMPLED, epilogue, block, HALVES, ARCH)
]


@pytest.mark.parametrize(
    "spec",
    [*first_of(WIDE_SPECS[::5]), *first_of(NARROW_SPECS[::5]), *first_of(SAMPLED_SPECS[::5])],
    ids=lambda spec: spec.entry,
)
def test_kernels_compile(spec):
    """Without spills in the loop over steps. Behind it, where 32 numbers to add are on their way at
    once, NVRTC 13.0 to 13.5 store at most 8 bytes and read them again."""
    made = compiled(spec, ARCH)
    assert made.spilled <= (32 if spec.entry.endswith("_add") else 0)
    assert not made.serialized
    assert made.shared <= 227 * 1024


def test_what_hopper_does_not_take(seed):
    case = CASES["64"]
    layout = layout_of(case)
    values = torch.randn(2, layout.capacity, 64, 64).half()
    dense, out = torch.randn(2, 2, 35 * 64, 72).half(), torch.zeros(2, 2, 3 * 64, 72).half()
    problem = spmm_problem(case, layout, values, dense, out)
    assert WIDE.takes(problem, ARCH) and not WIDE.takes(problem, "sm_90")
    assert not WIDE.takes(problem._replace(dtype="float32"), ARCH)
    assert not WIDE.takes(problem._replace(columns=0), ARCH)
    assert not WIDE.takes(problem._replace(dense=problem.dense._replace(alignment=2)), ARCH)
    assert not WIDE.takes(problem._replace(dense=problem.dense._replace(line=73)), ARCH)
    assert not WIDE.takes(problem._replace(values=problem.values._replace(column=2)), ARCH)
    odd = problem._replace(columns=71, out=problem.out._replace(line=80))
    assert not WIDE.takes(odd, ARCH)  # whose last 16 bytes of a line would be overwritten
    assert not NARROW.takes(problem, ARCH)
