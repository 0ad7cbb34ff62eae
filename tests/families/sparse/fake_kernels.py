"""Kernels of compressed matrices for GPUs that exist only by name: they compute on the host what a
problem says, through nothing but addresses and strides."""

from __future__ import annotations

import ctypes
import struct

import torch

from kernlib.families.sparse import operation, plans, reference
from kernlib.families.sparse.layout import DTYPES
from kernlib.families.sparse.lowering import choose
from kernlib.families.sparse.matrix import SparseMatrix
from kernlib.jit.spec import KernelSpec
from kernlib.lowering import product_source as text
from kernlib.lowering.steps import Lowered, Step
from kernlib.runtime import ahead, autograd, devices, driver, expressions, products
from tests.support import fakes
from tests.support.fakes import OnGpu, Torch, at


class Simulated:
    """A format's lowering: one launch sums into scratch, another applies the epilogue."""

    OFFSET = 16  # of the sums in the scratch

    def __init__(self):
        self.problems, self.kernels, self.matrices, self.laid_out = [], {}, {}, 0

    def takes(self, problem, arch):
        return problem.dtype != "float32" and problem.columns <= 16

    def spec(self, part, what):
        name = f"{part} {what!r}"
        self.kernels[name] = what if part == "end" else ()
        return KernelSpec("sparse", name, part, 32, description=name)

    def choices(self, problem, arch):
        return [{}]

    def specs(self, epilogue, scope, arch):
        return [self.spec("sum", dtype) for dtype in scope.dtypes] + [self.spec("end", epilogue)]

    def launch(self, epilogue, problem, gpu, choice):
        self.problems.append(problem)
        fixed = struct.pack("<q", len(self.problems) - 1)
        first = (("data", 0), ("offsets", 0), ("x", 0), ("workspace", self.OFFSET))
        after = (("workspace", self.OFFSET), ("out", 0), *text.vector_pointers(epilogue))
        scalars = text.scalar_count(epilogue)
        steps = (
            Step(self.spec("sum", problem.dtype), (1, 1), fixed, first, overlaps=problem.frozen),
            Step(self.spec("end", epilogue), (2, 1), fixed, after, scalars),
        )
        return Lowered(steps, self.OFFSET + 8 * problem.rows * problem.columns)

    def run(self, what: str, block: int) -> None:
        """One launch, of the parameter block at an address."""
        part, epilogue = what.split(" ")[0], self.kernels[what]
        vectors, scalars = text.vectors(epilogue), text.scalar_count(epilogue)
        pointers = 4 if part == "sum" else 2 + len(vectors)
        layout = f"<{pointers}Q{'dQ' * scalars}q"
        found = struct.unpack(layout, ctypes.string_at(block, struct.calcsize(layout)))
        problem = self.problems[found[-1]]
        if part == "sum":
            self._sum(problem, *found[:4])
        else:
            values = _values(problem, epilogue, found[2 : 2 + len(vectors)], found[pointers:-1])
            _end(problem, epilogue, values, *found[:2])

    def _sum(self, problem, data, offsets, x, scratch):
        """Reads vectors as kernels do: at whole 16 bytes, and up to a whole multiple of 8."""
        dense, dtype = self.matrices[data], DTYPES[problem.dtype]
        assert dense.shape == (problem.rows, problem.cols) and offsets
        assert x % 16 == 0 and problem.x_stride * dtype.itemsize % 16 == 0
        assert problem.x_padded or problem.cols % 8 == 0
        width = -(-problem.cols // 8) * 8
        given = at(x, (problem.x_stride, 1), (problem.columns, width), dtype).double()
        assert torch.isfinite(given).all()
        sums = given[:, : problem.cols] @ dense.double().t()
        _sums(problem, scratch).copy_(sums)


def _sums(problem, address):
    return at(address, (problem.rows, 1), (problem.columns, problem.rows), torch.float64)


def _values(problem, epilogue, vectors, numbers) -> dict:
    """The parameters of an epilogue by name."""
    vectors, numbers, found = iter(vectors), iter(numbers), {}
    for part in epilogue:
        for name in part.parameters:
            if name in part.vectors:
                dtype = DTYPES[problem.dtype]
                found[name] = at(next(vectors), (1,), (problem.rows,), dtype).double()
            else:
                number, address = next(numbers), next(numbers)
                found[name] = at(address, (), (), torch.float32).item() if address else number
    return found


def _end(problem, epilogue, values, scratch, out):
    v = expressions.apply(epilogue, _sums(problem, scratch).clone(), values)
    target = at(out, problem.out_strides, (problem.columns, problem.rows), DTYPES[problem.dtype])
    target.copy_(v.float())


class Expressions:
    """The reference's, which would put numbers on the GPU."""

    def apply(self, epilogue, y, parameters, axis=-1):
        plain = {k: host(v) if isinstance(v, torch.Tensor) else v for k, v in parameters.items()}
        return expressions.apply(epilogue, host(y), plain, axis=axis).as_subclass(type(y))


def host(t: torch.Tensor) -> torch.Tensor:
    return t.as_subclass(torch.Tensor)


def install(monkeypatch) -> fakes.Gpus:
    """Put GPUs and lowering in place; ``lowering`` of what is returned notes the problems."""
    made = fakes.install(monkeypatch)
    made.lowering = simulated = Simulated()
    monkeypatch.setattr(choose, "kernels", lambda format: (simulated,) * (format != "dense"))

    def launched(config, function, arguments, extra):
        answer = made.launch(config, function, arguments, extra)
        block = ctypes.c_void_p.from_address(arguments).value
        simulated.run(made.launches[-1].what, block)
        return answer

    to_dense = SparseMatrix.to_dense

    def laid_out(self):
        if self.device.type == "meta":
            return to_dense(self)
        simulated.laid_out += 1
        dense = simulated.matrices[self.operands[0].data_ptr()]
        return dense.clone().as_subclass(type(self.operands[0]))

    monkeypatch.setattr(SparseMatrix, "to_dense", laid_out)
    for module in (reference, autograd):
        monkeypatch.setattr(module, "expressions", Expressions())
    monkeypatch.setattr(driver, "launch_kernel_ex", lambda: launched)
    monkeypatch.setattr(devices, "raw_empty", None)
    for module in (products, ahead, operation, plans, devices):
        monkeypatch.setattr(module, "torch", Torch())
    return made


def on_gpu(w: SparseMatrix, gpus, dense: torch.Tensor, kind: type = OnGpu) -> SparseMatrix:
    """A matrix of the CPU as one of a GPU."""
    operands = tuple(t.clone().as_subclass(kind) for t in w.operands)
    gpus.lowering.matrices[operands[0].data_ptr()] = dense
    return SparseMatrix.from_layout(w.layout, operands)
