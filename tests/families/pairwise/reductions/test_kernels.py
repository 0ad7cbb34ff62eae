"""What a reduction's kernels are given, and what becomes of their partial results: launches are
carried out here in PyTorch, from the addresses and bytes of the parameter block."""

import ctypes
import struct
from types import SimpleNamespace

import pytest
import torch

import kernlib as kl
from kernlib.families.pairwise.lowering import reduce as lowering
from kernlib.families.pairwise.lowering.direct import scalar_count
from kernlib.families.pairwise.plans import numbers_of
from kernlib.families.pairwise.reductions import arguments as checks
from kernlib.families.pairwise.reductions import kernels
from kernlib.runtime.plan import forget_plans
from tests.support.kernels import only

GAUSSIAN = kl.gaussian()
TYPES = {torch.float32: ctypes.c_float, torch.int64: ctypes.c_int64}


def view(address, size, strides, dtype=torch.float32):
    """The tensor at an address."""
    count = 1 + sum((n - 1) * s for n, s in zip(size, strides, strict=True))
    memory = (TYPES[dtype] * count).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(size, strides)


class Launch:
    """A plan whose kernel is PyTorch: it reduces ``matrix``, (L, M, N)."""

    matrix = None
    made = ()

    def __init__(self, lowered, operands, device):
        step = only(lowered)
        assert [name for name, _ in step.pointers] == list(operands)
        values = struct.unpack(f"<{step.scalars}q9q5q4i", step.fixed)[step.scalars :]
        self.views, self.sizes, self.counts = values[:9], values[9:14], values[14:]
        self.spec, self.grid = step.spec, step.grid
        Launch.made.append(self)

    def launch(self, pointers, numbers):
        assert len(numbers) % 2 == 0
        m, n, batch, _, per_split = self.sizes
        _, row_blocks, columns, width = self.counts
        splits = self.grid[0] // row_blocks
        size = (splits, batch, m)
        strides = (batch * m * width, m * width, width)
        out = view(pointers[3], (*size, max(1, columns)), (*strides, 1))
        for split in range(splits):
            part = slice(split * per_split, min(n, (split + 1) * per_split))
            assert part.stop > part.start
            block = Launch.matrix[..., part]
            if columns:
                v = view(pointers[2], (batch, n, columns), self.views[6:])
                out[split] = block @ v[:, part]
            elif pointers[4]:
                out[split, ..., 0], places = block.min(-1)
                where = view(pointers[4], size, (batch * m, m, 1), torch.int64)
                where[split] = places + part.start
            else:
                logs = "LogSumExp" in self.spec.source
                out[split, ..., 0] = block.logsumexp(-1) if logs else block.sum(-1)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """Launches that took place, of a GPU of 4 multiprocessors that computes all it can."""

    def takes(reduction, request, shape):
        width = min(shape.columns, lowering.WIDTHS[-1])
        problem = kernels.problem_of(reduction, request, shape, width)
        return reduction != "topk" and lowering.fits(problem, "sm_90a")

    monkeypatch.setattr(kernels, "takes", takes)
    monkeypatch.setattr(kernels, "by_columns", lambda *call: False)  # of several launches
    monkeypatch.setattr(kernels, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(kernels, "model", lambda device: SimpleNamespace(multiprocessors=4))
    monkeypatch.setattr(kernels, "load_lowered", Launch)
    monkeypatch.setattr(kernels, "build", lambda specs, device: None)
    forget_plans()
    monkeypatch.setattr(Launch, "made", [])
    yield Launch.made
    forget_plans()


def by_kernels(reduction, request):
    """Values (L, M, C) of a reduction, summed over splits."""
    shape = checks.shape_of(request)
    made = kernels.plan(reduction, request, shape)
    values = torch.full((made.splits, shape.batch, shape.m, shape.columns), torch.nan)
    pointers = (*(t.data_ptr() for t in request[1:4]), values.data_ptr(), 0)
    slots, _ = numbers_of(made, request.a, request.hyperparameters)
    kernels.start(made, pointers, slots)
    return values.sum(0)


def points(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + shape[-2]))


def matrix(a, b, batch=1, **values):
    made = kl.run_kernel(GAUSSIAN, a, b, **values)
    Launch.matrix = made.expand(batch, -1, -1) if made.dim() == 3 else made[None]
    return made


@pytest.mark.parametrize("columns", [1, 3, 16, 17, 40])
@pytest.mark.parametrize("k", [3, 20])
def test_products_of_any_number_of_columns(columns, k, launches):
    a, b, v = points(30, k), points(3000, k, seed=1), points(3000, 2 * columns, seed=2)[:, ::2]
    wanted = matrix(a, b, bandwidth=4.0) @ v
    if columns > lowering.WIDTHS[-1]:  # which calls give to blocks, beyond 16 features
        request = checks.request_of(GAUSSIAN, a, b, v, 0, 0, {"bandwidth": 4.0})
        found = by_kernels("matmul", request)[0]
    else:
        found = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=4.0)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert len(launches) == -(-columns // 16)
    assert launches[0].grid[0] > 1


BATCHES = [
    ((3, 30, 5), (400, 5), (400, 2)),
    ((3, 30, 5), (3, 400, 5), (3, 400, 2)),
    ((30, 5), (400, 5), (3, 400, 2)),
    ((30, 5), (3, 400, 5), (1, 400, 2)),
]


@pytest.mark.parametrize(("a", "b", "v"), BATCHES, ids=str)
def test_batches(a, b, v, launches):
    a, b, v = points(*a), points(*b, seed=1), points(*v, seed=2)
    wanted = matrix(a, b, batch=3, bandwidth=2.0) @ v
    found = kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=2.0)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert launches[0].grid[1] == (3 if a.dim() == 3 or b.dim() == 3 else 1)


@pytest.mark.parametrize("k", [3, 20])
def test_other_reductions(k, launches):
    a, b = points(30, k), points(3000, k, seed=1)
    made = matrix(a, b, bandwidth=4.0)
    close = torch.testing.assert_close
    close(kl.kernel_sum(GAUSSIAN, a, b, bandwidth=4.0), made.sum(1))
    close(kl.kernel_logsumexp(GAUSSIAN, a, b, bandwidth=4.0), made.logsumexp(1))
    low, places = kl.kernel_min(GAUSSIAN, a, b, bandwidth=4.0)
    close(low, made.amin(1))
    assert torch.equal(places, made.argmin(1))
    assert len(launches) == 3


def test_partial_minima_keep_nan_and_the_lowest_place(launches):
    a, b = points(3, 2), points(3000, 2, seed=1)
    made = matrix(a, b, bandwidth=1.0)
    made[0], made[1, 2500], made[1, 700] = 0.5, torch.nan, torch.nan
    low, places = kl.kernel_min(GAUSSIAN, a, b, bandwidth=1.0)
    assert low[1].isnan() and places[:2].tolist() == [0, 700]


def test_a_plan_is_made_once(launches):
    a, b, v = points(30, 3), points(300, 3), points(300, 2)
    matrix(a, b, bandwidth=1.0)
    for bandwidth in (1.0, 2.0, torch.tensor(3.0), torch.tensor(4.0)):
        kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=bandwidth)
    assert len(launches) == 2  # numbers of the host, numbers on the device
    kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=1.0, regularization=0.1)
    assert len(launches) == 3


def test_numbers_are_checked_though_the_plan_is_there():
    a, b, v = points(30, 3), points(300, 3), points(300, 2)
    matrix(a, b, bandwidth=1.0)
    kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=1.0)
    with pytest.raises(ValueError, match="bandwidth must be greater than 0"):
        kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=-1.0)


def test_a_descriptors_numbers_fill_the_block(launches):
    a, b, v = points(30, 3), points(300, 3), points(300, 2)
    matrix(a, b, bandwidth=1.0)
    seen = []
    launch = Launch.launch
    Launch.launch = lambda self, pointers, numbers: (
        seen.append((pointers, list(numbers))), launch(self, pointers, numbers)
    )  # fmt: skip
    try:
        kl.kernel_matmul(GAUSSIAN, a, b, v, bandwidth=1.5, regularization=0.25)
    finally:
        Launch.launch = launch
    pointers, numbers = seen[0]
    assert pointers[:3] == (a.data_ptr(), b.data_ptr(), v.data_ptr())
    assert len(numbers) == 2 * scalar_count(GAUSSIAN)
    assert numbers[6] == 0.25 and numbers[2 * scalar_count(GAUSSIAN) - 2] == 1.5
