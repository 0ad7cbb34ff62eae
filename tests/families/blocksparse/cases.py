"""Operands of block-sparse products, these products by their formula in float64, and kernels that
compute on the host what a problem says."""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Iterator

import torch

from kernlib.families.blocksparse import operation, plans, reference
from kernlib.families.blocksparse.functions import dds, dsd, sdd
from kernlib.families.blocksparse.layout import NAMES, Layout
from kernlib.families.blocksparse.lowering import choose
from kernlib.families.blocksparse.lowering.problem import Sdd
from kernlib.jit import tuning
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered, Step
from kernlib.runtime import autograd, devices, driver, expressions, products
from tests.support import fakes
from tests.support.fakes import OnGpu, Torch, at

MODES = ("sdd", "dsd", "dds")
FUNCTIONS = {"sdd": sdd, "dsd": dsd, "dds": dds}
TURNS = tuple(itertools.product((False, True), repeat=2))  # of a and of b
GATES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Masks and blocks, and how many slots hold none: rows, columns and heads without blocks too.
LAYOUTS = {
    "plain": ([[1, 0, 1], [0, 1, 0]], 16, 0),
    "wide": ([[1, 0, 1], [0, 1, 0]], (16, 32), 1),
    "tall": ([[0, 1], [1, 1], [0, 0]], (32, 16), 2),
    "all": ([[1, 1], [1, 1]], 16, 0),
    "none": ([[0, 0], [0, 0], [0, 0]], 16, 0),
    "none of 2": ([[0, 0], [0, 0]], 16, 2),
    "heads": ([[[1, 0, 1], [0, 0, 0]], [[0, 0, 0], [1, 1, 0]]], 16, 1),
    "a head without": ([[[0, 0]], [[1, 1]], [[0, 0]]], (16, 32), 0),
    "one head": ([[[0, 1], [1, 0]]], 16, 0),
}


def layout_of(name: str) -> Layout:
    mask, block, spare = LAYOUTS[name]
    mask = torch.tensor(mask)
    return Layout(mask, block, int(mask.sum()) + spare)


def heads_of(layout: Layout) -> tuple[int, ...]:
    return () if layout.heads is None else (layout.heads,)


def places(layout: Layout) -> list[tuple[int, int, int]]:
    """Head, row and column of each stored block."""
    with torch._C._DisableFuncTorch():  # whose tensors of torch 2.8 have no list
        mask = layout_on_host(layout).mask()
        return [*map(tuple, (mask if mask.dim() == 3 else mask[None]).nonzero().tolist())]


def matrix(layout: Layout, values: torch.Tensor) -> torch.Tensor:
    """The matrices of values, block by block."""
    rows, cols = layout.block
    lead = values.shape[:-3]
    made = values.new_zeros(*lead, layout.heads or 1, *layout.shape)
    for slot, (head, r, c) in enumerate(places(layout)):
        block = values[..., slot, :, :]
        made[..., head, r * rows : (r + 1) * rows, c * cols : (c + 1) * cols] = block
    return made.squeeze(-3) if layout.heads is None else made


def blocks(layout: Layout, dense: torch.Tensor) -> torch.Tensor:
    """The values of matrices, block by block, 0 in other slots."""
    rows, cols = layout.block
    if layout.heads is None:
        dense = dense.unsqueeze(-3)
    made = dense.new_zeros(*dense.shape[:-3], layout.capacity, rows, cols)
    for slot, (head, r, c) in enumerate(places(layout)):
        part = dense[..., head, r * rows : (r + 1) * rows, c * cols : (c + 1) * cols]
        made[..., slot, :, :] = part
    return made


def formula(mode: str, layout: Layout, a, b, turned=(False, False)) -> torch.Tensor:
    """The product in float64."""
    a, b = a.double(), b.double()
    a = matrix(layout, a) if mode == "dsd" else a
    b = matrix(layout, b) if mode == "dds" else b
    y = (a.mT if turned[0] else a) @ (b.mT if turned[1] else b)
    if mode != "sdd":
        return y
    ends = (*heads_of(layout), *layout.shape)
    return blocks(layout, y.expand(*y.shape[: y.dim() - len(ends)], *ends))


def run(mode: str, layout: Layout, a, b, turned=(False, False), **arguments) -> torch.Tensor:
    """The product by its function."""
    given = (a, b, layout)
    return FUNCTIONS[mode](*given, transpose_a=turned[0], transpose_b=turned[1], **arguments)


def shapes(mode: str, layout: Layout, turned=(False, False), size: int = 5, heads=None):
    """Of a and b, whose dimension that the layout does not say has a size. ``heads``, of the dense
    operands, are the layout's if they are not given."""
    rows, cols = layout.shape
    if mode != "sdd" and turned["sd".index(mode[1])]:  # the sparse operand is a or b
        rows, cols = cols, rows
    inner = heads_of(layout) if heads is None or layout.heads is None else (heads,)
    stored = layout.capacity, *layout.block
    a = {"sdd": (rows, size), "dsd": None, "dds": (size, rows)}[mode]
    b = {"sdd": (size, cols), "dsd": (cols, size), "dds": None}[mode]
    pairs = zip((a, b), turned, strict=True)
    return tuple(
        stored if ends is None else (*inner, *(ends[::-1] if turn else ends))
        for ends, turn in pairs
    )


def randn(*shape: int, dtype=torch.float64, grad: bool = False) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def operands(
    mode, layout, turned=(False, False), size=5, leads=((), ()), heads=None, **options
) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b, with dimensions in front."""
    ends = shapes(mode, layout, turned, size, heads)
    return tuple(randn(*lead, *end, **options) for lead, end in zip(leads, ends, strict=True))


def assert_near(found: torch.Tensor, wanted: torch.Tensor, gate: float | None = None) -> None:
    """Within the gate of its type, as a whole."""
    gate = GATES[found.dtype] if gate is None else gate
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    error = torch.linalg.vector_norm(found.double() - wanted)
    assert error <= gate * torch.linalg.vector_norm(wanted), error


def memories(t: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same values in other memory."""
    last_first = tuple(reversed(range(t.dim())))
    yield "turned", t.mT.contiguous().mT
    yield "backwards", t.permute(last_first).contiguous().permute(last_first)
    wide = t.new_zeros([2 * n + 1 for n in t.shape])
    yield "strided", wide[tuple(slice(1, None, 2) for _ in t.shape)].copy_(t)
    yield "unaligned", t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)
    padded = t.new_zeros((*t.shape[:-1], t.shape[-1] + 3))
    yield "lines apart", padded[..., 1:-2].copy_(t)


# GPUs that exist only by name.


class Simulated:
    """A lowering of one launch, whose kernel reads and writes by addresses and strides alone."""

    def __init__(self):
        self.problems, self.requests = [], []

    def lower(self, epilogue, problem, *_) -> Lowered:
        made = "sdd" if isinstance(problem, Sdd) else "spmm"
        names = (*NAMES, *(("a", "b") if made == "sdd" else ("values", "dense")), "out")
        names += tuple(f"vector{i}" for i in range(sum(len(e.vectors) for e in epilogue)))
        names += tuple(f"summand{i}" for i in range(len(problem.summands)))
        scalars = sum(len(e.parameters) - len(e.vectors) - len(e.summands) for e in epilogue)
        text = f"{made} {len(self.problems)}"
        self.problems.append(problem)
        self.requests.append((epilogue, names, scalars))
        spec = KernelSpec("blocksparse", text, made, 32, description=text)
        return Lowered((Step(spec, (1, 1), b"", tuple((name, 0) for name in names), scalars),))

    def launch(self, what: str, block: int) -> None:
        """Of a kernel, given the address of its parameter block."""
        index = int(what.split()[1])
        epilogue, names, scalars = self.requests[index]
        problem = self.problems[index]
        form = f"<{len(names)}Q{'dQ' * scalars}"
        found = struct.unpack(form, ctypes.string_at(block, struct.calcsize(form)))
        addresses = dict(zip(names, found, strict=False))
        pairs = iter(found[len(names) :])
        numbers = [_number(*pair) for pair in zip(pairs, pairs, strict=True)]
        (_sdd if isinstance(problem, Sdd) else _spmm)(epilogue, problem, addresses, numbers)


def _number(value: float, address: int) -> float:
    return at(address, (), (), torch.float32).item() if address else value


def _slots(problem, addresses) -> list[tuple[int, int, int, int]]:
    """Slot, head, row and column of each stored block, as the kernels read them."""
    blocks = problem.blocks
    rows, cols = (
        at(addresses[name], (1,), (blocks.capacity,), torch.int32).tolist()
        for name in ("rows", "cols")
    )
    pairs = enumerate(zip(rows, cols, strict=True))
    return [(s, *divmod(line, blocks.grid_rows), c) for s, (line, c) in pairs if line >= 0]


def _view(problem, name: str, view, sizes: tuple, addresses: dict) -> torch.Tensor:
    assert addresses[name] % 16 == view.alignment % 16
    return at(addresses[name], view[:4], sizes, TYPES[problem.dtype])


def _end(epilogue, v, summands, vectors, numbers, axis) -> torch.Tensor:
    """The epilogue of sums."""
    summands, vectors, numbers = iter(summands), iter(vectors), iter(numbers)
    values = {}
    for part in epilogue:
        for name in part.parameters:
            source = vectors if name in part.vectors else numbers
            values[name] = next(summands if name in dict(part.summands) else source)
    return expressions.apply(epilogue, v, values, axis=axis)


def _spmm(epilogue, problem, addresses, numbers) -> None:
    of = problem.blocks
    depth = of.grid_rows * of.rows if problem.transposed else of.grid_cols * of.cols
    stored = problem.batch, of.capacity, of.rows, of.cols
    lines = problem.batch, of.heads, problem.lines, problem.columns
    values = _view(problem, "values", problem.values, stored, addresses)
    size = (problem.batch, of.heads, depth, problem.columns)
    dense = _view(problem, "dense", problem.dense, size, addresses)
    sums = torch.zeros(lines, dtype=torch.float64)
    for slot, head, r, c in _slots(problem, addresses):
        block = values[:, slot].double()
        to, meets = slice(r * of.rows, (r + 1) * of.rows), slice(c * of.cols, (c + 1) * of.cols)
        if problem.transposed:
            to, meets, block = meets, to, block.mT
        sums[:, head, to] += block @ dense[:, head, meets].double()
    beside = [
        _view(problem, f"summand{i}", view, lines, addresses).double()
        for i, view in enumerate(problem.summands)
    ]
    vectors = [
        at(addresses[name], (1,), (problem.lines,), TYPES[problem.dtype]).double()
        for name in addresses
        if name.startswith("vector")
    ]
    made = _end(epilogue, sums, beside, vectors, numbers, -2)
    _view(problem, "out", problem.out, lines, addresses).copy_(made)


def _sdd(epilogue, problem, addresses, numbers) -> None:
    of = problem.blocks
    left = problem.batch, of.heads, of.grid_rows * of.rows, problem.depth
    right = problem.batch, of.heads, problem.depth, of.grid_cols * of.cols
    a = _view(problem, "a", problem.a, left, addresses)
    b = _view(problem, "b", problem.b, right, addresses)
    stored = problem.batch, of.capacity, of.rows, of.cols
    beside = [
        _view(problem, f"summand{i}", view, stored, addresses).double()
        for i, view in enumerate(problem.summands)
    ]
    sums, slots = torch.zeros(stored, dtype=torch.float64), _slots(problem, addresses)
    for slot, head, r, c in slots:
        rows, cols = slice(r * of.rows, (r + 1) * of.rows), slice(c * of.cols, (c + 1) * of.cols)
        sums[:, slot] = a[:, head, rows].double() @ b[:, head, :, cols].double()
    made = _end(epilogue, sums, beside, (), numbers, -1)
    made[:, len(slots) :] = 0
    _view(problem, "out", problem.values, stored, addresses).copy_(made)


def gpu(*shape: int, dtype=torch.float32, kind: type = OnGpu) -> torch.Tensor:
    """Quarters, of which sums are exact, on a GPU."""
    return (torch.randint(-8, 9, shape).double() / 4).to(dtype).as_subclass(kind)


def host(t: torch.Tensor) -> torch.Tensor:
    """A tensor of a GPU as what it is."""
    return t if type(t) is torch.Tensor else t.as_subclass(torch.Tensor)


def layout_on_gpu(layout: Layout, kind: type = OnGpu) -> Layout:
    """A copy of a layout of the CPU."""
    return Layout.from_layout(layout.text, [t.clone().as_subclass(kind) for t in layout.tensors])


def layout_on_host(layout: Layout) -> Layout:
    """A layout of a GPU as what it is."""
    return Layout.from_layout(layout.text, [*map(host, layout.tensors)])


class Expressions:
    """Epilogues of the reference's, which would put numbers on the GPU."""

    def apply(self, epilogue, y, parameters, axis=-1):
        plain = {k: host(v) if isinstance(v, torch.Tensor) else v for k, v in parameters.items()}
        found = expressions.apply(epilogue, host(y), plain, axis=axis)
        return found if type(y) is torch.Tensor else found.as_subclass(type(y))


def install(monkeypatch) -> fakes.Gpus:
    """Put GPUs and lowering in place; ``lowering`` of what is returned notes the problems."""
    made = fakes.install(monkeypatch)
    made.lowering = simulated = Simulated()
    monkeypatch.setattr(choose, "lower", simulated.lower, raising=False)
    monkeypatch.setattr(tuning, "choice", lambda *_: None)

    def launched(config, function, arguments, extra):
        answer = made.launch(config, function, arguments, extra)
        block = ctypes.c_void_p.from_address(arguments).value
        simulated.launch(made.launches[-1].what, block)
        return answer

    monkeypatch.setattr(driver, "launch_kernel_ex", lambda: launched)
    monkeypatch.setattr(devices, "raw_empty", None)
    for module in (reference, autograd):
        monkeypatch.setattr(module, "expressions", Expressions())
    for module in (operation, products, plans, devices):
        monkeypatch.setattr(module, "torch", Torch())
    return made
