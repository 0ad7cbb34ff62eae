"""Formulas of tensors on the host: their kernels' results, and what torch makes of them in
float64."""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch

from kernlib.descriptors.score.kinds import KINDS
from kernlib.families.pairwise.formula import grammar
from kernlib.families.pairwise.formula.lowering import choose
from kernlib.families.pairwise.formula.lowering.problem import Problem
from kernlib.families.pairwise.formula.spec import AXES, Input, Spec, new_spec
from kernlib.lowering.kernel import Gpu
from kernlib.lowering.steps import NUMBER, Lowered
from kernlib.runtime import expressions
from tests.support.emulation.emulator import Emulator

PROCESSORS = 4  # so that few rows and columns are divided among blocks
ROW, COL, FEATURE = AXES
EDGE = 256  # bytes before and behind a result that nothing may write


class Case(NamedTuple):
    """A call. ``tensors`` have a batch, which may be 1, and then the axes; numbers have none."""

    text: str
    tensors: dict[str, tuple[tuple[str, ...], torch.Tensor | float]]
    reduction: str = "sum"
    unit: str | None = None
    ranges: torch.Tensor | None = None
    result: str = "float32"

    def spec(self) -> Spec:
        kinds, featured, inputs, table = [], set(), [], {}
        for name, (axes, value) in self.tensors.items():
            is_tensor = isinstance(value, torch.Tensor)
            kind = KINDS[str(value.dtype).removeprefix("torch.")] if is_tensor else "float"
            table[name] = f"t{len(inputs)}"
            inputs.append(Input(axes, kind, not is_tensor))
            kinds.append((name, kind))
            if FEATURE in axes:
                featured.add(name)

        def tree(text: str):
            parsed = grammar.parse(text, tuple(kinds), frozenset(featured))
            return grammar.renamed(parsed, table)

        unit = None if self.unit is None else tree(f"sum({self.unit})").operands[0]
        return new_spec(
            self.reduction, tree(self.text), tuple(inputs), unit, self.ranges is not None
        )

    def size(self, axis: str, places=None) -> int:
        """That of an axis, of the inputs at some places."""
        every = list(self.tensors.values())
        chosen = every if places is None else [every[place] for place in places]
        return max((t.shape[1 + a.index(axis)] for a, t in chosen if axis in a), default=1)

    @property
    def batch(self) -> int:
        return max((t.shape[0] for axes, t in self.tensors.values() if axes), default=1)

    def problem(self) -> Problem:
        spec = self.spec()
        dtypes, strides = [], []
        for axes, value in self.tensors.values():
            steps = dict.fromkeys(("batch", *AXES), 0)
            if isinstance(value, torch.Tensor) and value.dim():
                names = ("batch", *axes)
                sizes = zip(names, value.stride(), value.shape, strict=True)
                steps |= {name: stride for name, stride, size in sizes if size > 1}
            dtypes.append(str(value.dtype).removeprefix("torch.") if axes else "")
            strides.append(tuple(steps.values()))
        features = 1 if spec.unit is None else self.size(FEATURE, spec.features_of(spec.unit))
        sizes = tuple(self.size(FEATURE, spec.features_of(term)) for term in spec.terms)
        shape = self.batch, self.size(ROW), self.size(COL)
        return Problem(spec, tuple(dtypes), self.result, *shape, features, sizes, tuple(strides))

    def expected(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """In float64, and the indices of minima."""
        spec, shape = self.spec(), (self.batch, self.size(ROW), self.size(COL))
        values = {
            ROW: torch.arange(shape[1]).view(1, -1, 1, 1),
            COL: torch.arange(shape[2]).view(1, 1, -1, 1),
        }
        for index, (axes, value) in enumerate(self.tensors.values()):
            value = torch.as_tensor(value, dtype=None if axes else torch.float64)
            if not axes:
                value = value.reshape(-1)
            for place, axis in enumerate(AXES):
                value = value if axis in axes else value.unsqueeze(1 + place)
            is_float = value.is_floating_point()
            is_bool = value.dtype == torch.bool
            values[f"t{index}"] = value if is_bool else value.double() if is_float else value.long()

        def of(node, features=1):
            like = torch.zeros(*shape, features, dtype=torch.float64)
            return expressions.score(node, like, values)

        for index, term in enumerate(spec.terms):
            size = self.size(FEATURE, spec.features_of(term))
            values[f"#{index}"] = of(term, size).sum(-1, keepdim=True)
        scores = of(spec.score)[..., 0]
        if self.reduction == "matrix":
            return scores, None
        inside = torch.ones(shape, dtype=torch.bool)
        if self.ranges is not None:
            col = torch.arange(shape[2])
            inside = (col >= self.ranges[:, :1]) & (col < self.ranges[:, 1:])
        if self.reduction == "sum":
            scores = torch.where(inside, scores, 0.0)
            if spec.unit is None:
                return scores.sum(-1, keepdim=True), None
            unit = of(spec.unit, self.problem().features)
            return torch.einsum("bmn,bmnf->bmf", scores, unit), None
        if self.reduction == "logsumexp":
            return torch.logsumexp(torch.where(inside, scores, -torch.inf), -1), None
        scores = torch.where(inside, scores, torch.inf)
        if not shape[2]:
            return torch.full(shape[:2], torch.inf).double(), torch.zeros(shape[:2]).long()
        least = scores.amin(-1)
        is_least = (scores == least[..., None]) | scores.isnan()
        is_least &= inside
        return least, is_least.int().argmax(-1)

    def run(self, emulator: Emulator, lowered: Lowered | None = None):
        """Results and indices of its kernels, of poisoned memory, where nothing else is written."""
        problem = self.problem()
        lowered = lowered or choose.lower(problem, Gpu("sm_90a", PROCESSORS))
        shape = (problem.batch, problem.rows)
        tail = {"matrix": (problem.cols,), "sum": (problem.features,)}.get(self.reduction, ())
        out = Room((*shape, *tail), getattr(torch, self.result))
        indices, workspace = Room(shape, torch.int64), Room((lowered.workspace,), torch.uint8)
        rooms = {"out": out, "indices": indices, "workspace": workspace}
        addresses = {name: room.values.data_ptr() for name, room in rooms.items()}
        addresses |= {f"t{i}": t.data_ptr() for i, (a, t) in enumerate(self.tensors.values()) if a}
        if self.ranges is not None:
            addresses["ranges"] = self.ranges.data_ptr()
        numbers = []
        for axes, value in self.tensors.values():
            if not axes:
                is_tensor = isinstance(value, torch.Tensor)
                numbers += [0.0, value.data_ptr()] if is_tensor else [value, 0]
        for step in lowered.steps:
            pointers = [addresses[name] + at for name, at in step.pointers]
            block = struct.pack(f"{len(pointers)}Q", *pointers)
            block += struct.pack("<" + NUMBER * step.scalars, *numbers[: 2 * step.scalars])
            memory = ctypes.create_string_buffer(block + step.fixed)
            emulator.launch(step.spec, step.grid, ctypes.addressof(memory))
        assert all(room.is_whole() for room in rooms.values())
        return out.values, indices.values if problem.has_indices else None

    def check(self, emulator: Emulator, tolerance: float = 0.0) -> torch.Tensor:
        """Compares, by the largest of the exact results."""
        results, indices = self.run(emulator)
        expected, places = self.expected()
        tolerance = tolerance or {"float32": 3e-6, "float64": 1e-13}[self.result]
        assert results.shape == expected.shape
        finite = expected.isfinite()
        scale = expected[finite].abs().max() if finite.any() else 1.0
        torch.testing.assert_close(
            results.double(), expected, rtol=tolerance, atol=float(tolerance * scale),
            equal_nan=True,
        )  # fmt: skip
        if indices is not None:
            assert torch.equal(indices, places)
        again, _ = self.run(emulator)
        assert torch.equal(again.view(torch.uint8), results.view(torch.uint8))
        return results


class Room:
    """Memory for a tensor, full of poison, with edges."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype):
        size = dtype.itemsize
        for each in shape:
            size *= each
        self.bytes = torch.full((size + 3 * EDGE,), 0xFF, dtype=torch.uint8)
        self.first = -self.bytes.data_ptr() % EDGE + EDGE
        self.end = self.first + size
        self.values = self.bytes[self.first : self.end].view(dtype).view(shape)

    def is_whole(self) -> bool:
        edges = self.bytes[: self.first], self.bytes[self.end :]
        return all(bool((edge == 0xFF).all()) for edge in edges)


def normal(seed: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype))


def positive(seed: int, *shape: int, dtype: str = "float32") -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(shape, generator=generator) + 0.5).to(getattr(torch, dtype))


def points(rows: int, cols: int, features: int, dtype: str = "float32", batch: int = 1) -> dict:
    """Tensors of the formulas of tests: points x and y, scales s and t, weights w."""
    return {
        "x": ((ROW, FEATURE), normal(1, batch, rows, features, dtype=dtype)),
        "y": ((COL, FEATURE), normal(2, 1, cols, features, dtype=dtype)),
        "s": ((ROW,), positive(3, batch, rows, dtype=dtype)),
        "t": ((COL,), positive(4, 1, cols, dtype=dtype)),
        "w": ((COL,), normal(5, batch, cols, dtype=dtype)),
    }
