"""A lowering of Kronecker-sparse calls for GPUs that exist only by name: its kernels compute on the
host what a problem says, through nothing but addresses and strides."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace

import torch

from kernlib.families.kronecker_sparse import operation, plans
from kernlib.families.kronecker_sparse.lowering import choose as lowering
from kernlib.jit import tuning
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.steps import Lowered, Step
from kernlib.runtime import ahead, devices, driver, expressions, products
from tests.support import fakes
from tests.support.fakes import OnGpu, Torch, at

TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Simulated:
    """A lowering: one launch sums into scratch, another applies the epilogue; each choice has a
    kernel of its own."""

    OFFSET = 16  # of the sums in the scratch

    def __init__(self):
        self.problems, self.kernels = [], {}

    def candidates(self, problem, arch):
        return [{"tile": 64}, {"tile": 32}]

    def variants(self, epilogue, pattern, arch, dtypes, precision):
        return [self.spec("sum", dtype, {"tile": 64}) for dtype in dtypes]

    def spec(self, part, what, choice):
        name = f"{part} {what!r} {choice['tile']}"
        self.kernels[name] = what if part == "end" else ()
        return KernelSpec("kronecker_sparse", name, part, 32, description=name)

    def lower(self, epilogue, problem, arch, multiprocessors, choice=None, torch_may=False):
        tile = {"tile": int((choice or {"tile": 64})["tile"])}
        self.problems.append((epilogue, problem))
        fixed = struct.pack("<q", len(self.problems) - 1)
        total = problem.blocks * problem.lanes * problem.rows * problem.columns
        vectors = [name for part in epilogue for name in part.vectors]
        scalars = sum(len(part.parameters) for part in epilogue) - len(vectors)
        sums, end = self.spec("sum", problem.dtype, tile), self.spec("end", epilogue, tile)
        named = [(f"vector{index}", 0) for index in range(len(vectors))]
        pointers = (("left", 0), ("right", 0), ("workspace", self.OFFSET))
        after = (("out", 0), *named, ("workspace", self.OFFSET))
        steps = (
            Step(sums, (1, 1), fixed, pointers, 0),
            Step(end, (2, 1), fixed, after, scalars),
        )
        return Lowered(steps, self.OFFSET + 8 * total)

    def run(self, what: str, block: int) -> None:
        """One launch, of the parameter block at an address."""
        part, epilogue = what.split(" ")[0], self.kernels[what]
        vectors = sum(len(each.vectors) for each in epilogue)
        scalars = sum(len(each.parameters) for each in epilogue) - vectors
        pointers = 3 if part == "sum" else 2 + vectors
        layout = f"<{pointers}Q{'dQ' * scalars}q"
        found = struct.unpack(layout, ctypes.string_at(block, struct.calcsize(layout)))
        problem = self.problems[found[-1]][1]
        if part == "sum":
            _sum(problem, *found[:3])
        else:
            values = _values(problem, epilogue, found[1 : 1 + vectors], found[2 + vectors : -1])
            _end(problem, epilogue, values, found[0], found[1 + vectors])


def _sums(problem, address):
    """The sums in scratch."""
    shape = (problem.blocks, problem.lanes, problem.rows, problem.columns)
    return at(address, torch.empty(shape).stride(), shape, torch.float64)


def _sum(problem, left, right, scratch):
    batch, dtype = (problem.blocks, problem.lanes), TYPES[problem.dtype]
    x = at(left, problem.left[:4], (*batch, problem.rows, problem.depth), dtype)
    w = at(right, problem.right[:4], (*batch, problem.columns, problem.depth), dtype)
    _sums(problem, scratch).copy_(torch.einsum("ilrq,ilsq->ilrs", x.double(), w.double()))


def _values(problem, epilogue, vectors, numbers) -> dict:
    """The parameters of an epilogue by name, vectors as tensors that broadcast with the sums."""
    vectors, numbers, found = iter(vectors), iter(numbers), {}
    features = problem.blocks * problem.columns * problem.lanes
    for part in epilogue:
        for name in part.parameters:
            if name in part.vectors:
                values = at(next(vectors), (1,), (features,), TYPES[problem.dtype]).double()
                # Their feature is i*b*d + j*d + l.
                values = values.reshape(problem.blocks, problem.columns, problem.lanes)
                found[name] = values.mT[:, :, None, :]
            else:
                number, address = next(numbers), next(numbers)
                found[name] = at(address, (), (), torch.float32).item() if address else number
    return found


def _end(problem, epilogue, values, out, scratch):
    v = _sums(problem, scratch).clone()
    for part in epilogue:
        bare = SimpleNamespace(tree=part.tree, vectors=(), summands=())
        v = expressions.apply((bare,), v, {name: values[name] for name in part.parameters})
    at(out, problem.out[:4], v.shape, TYPES[problem.dtype]).copy_(v.float())


def gpu(*shape, dtype=torch.float32):
    """Quarters, of which sums are exact, on a GPU."""
    made = torch.randint(-8, 9, shape).double() / 4
    return made.to(dtype).as_subclass(OnGpu)


def host(t):
    """A tensor of a GPU as what it is."""
    return t.as_subclass(torch.Tensor)


def install(monkeypatch) -> fakes.Gpus:
    """Put GPUs and lowering in place; ``lowering`` of what is returned notes the problems."""
    made = fakes.install(monkeypatch)
    made.lowering = simulated = Simulated()
    for name in ("candidates", "variants", "lower"):
        monkeypatch.setattr(lowering, name, getattr(simulated, name))
    monkeypatch.setattr(tuning, "choice", lambda *_: None)

    def launched(config, function, arguments, extra):
        answer = made.launch(config, function, arguments, extra)
        block = ctypes.c_void_p.from_address(arguments).value
        simulated.run(made.launches[-1].what, block)
        return answer

    monkeypatch.setattr(driver, "launch_kernel_ex", lambda: launched)
    monkeypatch.setattr(devices, "raw_empty", None)
    for module in (products, ahead, operation, plans, devices):
        monkeypatch.setattr(module, "torch", Torch())
    return made


def install_for_cpu(monkeypatch) -> fakes.Gpus:
    """:func:`install`, by which plain CPU tensors are taken for those of the GPU."""
    gpus = install(monkeypatch)
    gpus.entered[:] = [-1]  # what get_device() says of a CPU tensor
    monkeypatch.setitem(fakes.MODELS, -1, fakes.MODELS[0])
    monkeypatch.setattr(products, "is_on_gpu", lambda device: True)
    return gpus
