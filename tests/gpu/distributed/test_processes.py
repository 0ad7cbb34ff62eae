"""Two processes compute what one does."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import kernlib as kl
from kernlib.errors import DistributedError
from tests.distributed.pool import Pool
from tests.gpu.distributed import BACKEND, needs_two

RING = pytest.param(True, marks=needs_two)
TASKS = ("kernel_matmul", "kernel_sum", "kernel_logsumexp", "kernel_min", "kernel_topk")
SIZES = {"even": ((300, 300), (256, 256)), "uneven": ((417, 0), (1, 511))}


def drawn(*shapes):
    generator = torch.Generator("cuda").manual_seed(9)
    return [torch.randn(shape, generator=generator, device="cuda") for shape in shapes]


def mine(t, sizes):
    return t.split(list(sizes))[dist.get_rank()].clone()


def error_of(x: torch.Tensor, y: torch.Tensor) -> float:
    """Over all processes' rows, so that few rows of a process do not count for themselves."""
    squares = torch.stack([(x.double() - y.double()).square().sum(), y.double().square().sum()])
    dist.all_reduce(squares)
    return float((squares[0] / squares[1].clamp_min(1e-300)).sqrt())


def reduced(task: str, rows: str, ring: bool, features: int):
    of_a, of_b = SIZES[rows]
    a, b, v = drawn((sum(of_a), features), (sum(of_b), features), (sum(of_b), 2))
    takes_gradient = not (ring and task in ("kernel_min", "kernel_topk"))
    parts, alone = [mine(a, of_a), mine(b, of_b), mine(v, of_b)], [a, b, v]
    count = 3 if task == "kernel_matmul" else 2
    if takes_gradient:
        for t in (*parts, *alone):
            t.requires_grad_()
    more = {"k": 5} if task == "kernel_topk" else {}
    results = []
    for module, tensors, names in (
        (kl.distributed, parts, {"ring": ring}),
        (kl, alone, {}),
    ):
        out = getattr(module, task)(
            kl.gaussian(), *tensors[:count], bandwidth=features**0.5, **more, **names
        )
        results.append(out if isinstance(out, tuple) else (out,))
    errors = [error_of(x.detach(), mine(y.detach(), of_a)) for x, y in zip(*results, strict=True)]
    if takes_gradient:
        weights = drawn(results[1][0].shape)[0]
        (results[0][0] * mine(weights, of_a)).sum().backward()
        (results[1][0] * weights).sum().backward()
        for part, t, sizes in zip(parts, alone, (of_a, of_b, of_b), strict=True):
            if t.grad is not None:
                errors.append(error_of(part.grad, mine(t.grad, sizes)))
    return errors


@pytest.mark.parametrize("features", [3, 40])
@pytest.mark.parametrize("ring", [False, RING])
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("task", TASKS)
def test_rows_are_those_of_one_process(pool, task, rows, ring, features):
    for answer in pool.run(reduced, task, rows, ring, features):
        if isinstance(answer, Exception):
            raise answer
        assert max(answer) < 2e-5, answer


def with_itself(features: int, of_bandwidth: bool):
    """Gradients of points with themselves, by points, v and, where that is asked for, bandwidth."""
    sizes, results = (417, 95), []
    for module in (kl.distributed, kl):
        part = mine if module is kl.distributed else lambda t, sizes: t.clone()
        x, v, weights = (part(t, sizes) for t in drawn((512, features), (512, 2), (512, 2)))
        width = torch.tensor(features**0.5, device="cuda", requires_grad=of_bandwidth)
        leaves = [x.requires_grad_(), v.requires_grad_(), *([width] if of_bandwidth else [])]
        out = module.kernel_matmul(kl.gaussian(), x, x, v, bandwidth=width)
        results.append(torch.autograd.grad((out * weights).sum(), leaves))
    fitted = [mine(t, sizes) if t.dim() else t for t in results[1]]
    return [error_of(x, y) for x, y in zip(results[0], fitted, strict=True)]


@pytest.mark.parametrize("features", [3, 40])
@pytest.mark.parametrize("of_bandwidth", [False, True])
def test_gradients_of_points_with_themselves(pool, features, of_bandwidth):
    for answer in pool.run(with_itself, features, of_bandwidth):
        if isinstance(answer, Exception):
            raise answer
        assert max(answer) < 5e-5, answer


def repeated(ring: bool):
    a, b, v = drawn((1000, 3), (900, 3), (900, 4))
    bits = []
    for _ in range(3):
        parts = [mine(t, (len(t) // 2, len(t) - len(t) // 2)).requires_grad_() for t in (a, b, v)]
        out = kl.distributed.kernel_matmul(kl.gaussian(), *parts, bandwidth=1.0, ring=ring)
        out.square().sum().backward()
        bits.append([out.detach(), *(t.grad for t in parts)])
    return all(torch.equal(x, y) for other in bits[1:] for x, y in zip(bits[0], other, strict=True))


@pytest.mark.parametrize("ring", [False, RING])
def test_bits_repeat(pool, ring):
    assert pool.run(repeated, ring) == [True, True]


def kron(sharded: str, dtype):
    x, *factors = drawn((37, 24 * 10), (24, 20), (10, 12))
    x, factors = x.to(dtype), [f.to(dtype) for f in factors]
    along = int(sharded == "columns")
    parts, ends = kl.distributed.kron_columns(factors, 2) if along else ([30, 7], [30, 7])
    part = x.split(parts, along)[dist.get_rank()].clone().requires_grad_()
    leaves = [f.clone().requires_grad_() for f in factors]
    out = kl.distributed.kron_matmul(part, leaves, sharded=sharded)
    x, wide = x.double().requires_grad_(), [f.double().requires_grad_() for f in factors]
    exact = kl.kron_matmul(x, wide)
    weights = drawn(exact.shape)[0].to(dtype)
    (out * weights.split(ends, along)[dist.get_rank()]).sum().backward()
    (exact * weights).sum().backward()
    errors = [error_of(out.detach(), exact.split(ends, along)[dist.get_rank()].detach())]
    errors.append(error_of(part.grad, x.grad.split(parts, along)[dist.get_rank()]))
    return errors + [error_of(f.grad, g.grad) for f, g in zip(leaves, wide, strict=True)]


@pytest.mark.parametrize("sharded", ["columns", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kronecker_products(pool, sharded, dtype):
    for answer in pool.run(kron, sharded, dtype):
        if isinstance(answer, Exception):
            raise answer
        assert max(answer) < (1e-5 if dtype is torch.float32 else 1e-2), answer


def solved(rank: int):
    x, y = drawn((4001, 3), (4001, 2))
    sizes = 3000, 1001
    result = kl.linalg.solve_kernel(
        kl.gaussian(), mine(x, sizes), mine(y, sizes), regularization=1.0, bandwidth=1.0,
        tol=1e-4, rank=rank, group=kl.distributed.Communicator(),
    )  # fmt: skip
    w = torch.zeros_like(y)
    first = sum(sizes[: dist.get_rank()])
    w[first : first + len(result.x)] = result.x
    dist.all_reduce(w)
    wide = kl.kernel_matmul(kl.gaussian(), x.double(), x.double(), w.double(), bandwidth=1.0)
    residual = (y.double() - wide - w.double()).norm(dim=0) / y.double().norm(dim=0)
    return float(residual.max()), float(result.residual.max()), result.iterations


@pytest.mark.parametrize("rank", [0, 300])
def test_systems(pool, rank):
    for answer in pool.run(solved, rank):
        if isinstance(answer, Exception):
            raise answer
        residual, said, iterations = answer
        assert residual <= 1.05e-4 and said <= 1e-4 and iterations < 300


def fitted():
    (x,) = drawn((8000, 3))
    y, sizes = (2 * x).sin().sum(1), (7001, 999)
    centres = x[::40].clone()
    part, targets = mine(x, sizes).cpu().pin_memory(), mine(y, sizes).cpu()
    options = {"regularization": 1e-5, "tol": 1e-5, "max_iter": 60, "bandwidth": 1.5}
    group = kl.distributed.Communicator()
    spread = kl.linalg.falkon(kl.gaussian(), part, targets, centres, group=group, **options)
    alone = kl.linalg.falkon(kl.gaussian(), x, y, centres, **options)
    values = [
        kl.kernel_matmul(kl.gaussian(), x, centres, fit.coefficients, bandwidth=1.5)
        for fit in (spread, alone)
    ]
    return error_of(*values)


def test_falkon(pool):
    for answer in pool.run(fitted):
        if isinstance(answer, Exception):
            raise answer
        assert answer < 2e-3


def layers(name: str, sharded: bool):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def layer():
        torch.manual_seed(1)
        if name == "KSLinear":
            return kl.nn.KSLinear([(2, 32, 32, 1), (1, 64, 64, 1)], device="cuda")
        if name == "KroneckerLinear":
            return kl.nn.KroneckerLinear((8, 8), (8, 8), device="cuda")
        return kl.nn.BlockSparseLinear(64, 64, 32, density=0.75, device="cuda")

    batch = drawn((2, 48, 64))[0]
    model = layer()
    if sharded:
        model = fully_shard(model, mesh=init_device_mesh("cuda", (2,)))
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
    model(batch[dist.get_rank()]).square().mean().backward()
    grads = [p.grad.full_tensor() if sharded else p.grad for p in model.parameters()]
    alone = layer()
    (sum(alone(x).square().mean() for x in batch) / 2).backward()
    return [error_of(x, p.grad) for x, p in zip(grads, alone.parameters(), strict=True)]


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=needs_two)])
@pytest.mark.parametrize("name", ["KSLinear", "KroneckerLinear", "BlockSparseLinear"])
def test_layers(pool, name, sharded):
    for answer in pool.run(layers, name, sharded):
        if isinstance(answer, Exception):
            raise answer
        assert max(answer) < 1e-5, answer


def ends():
    group = kl.distributed.Communicator(timeout=20.0)
    (a,) = drawn((100, 3))
    kl.distributed.kernel_sum(kl.gaussian(), a, a, bandwidth=1.0, group=group)
    if dist.get_rank() == 1:
        os._exit(1)
    return kl.distributed.kernel_sum(kl.gaussian(), a, a, bandwidth=1.0, group=group)


def test_a_rank_that_is_gone_is_an_error():
    processes = Pool(2, BACKEND)
    try:
        assert isinstance(processes.run(ends)[0], DistributedError)
    finally:
        processes.close()


def compiled(folder: str):
    """How many kernels this process compiled for its first calls, by a cache that both share."""
    from kernlib import events, settings

    compiles = []
    with settings.override(cache_dir=(Path(folder),)):
        end = events.subscribe(lambda event: compiles.append(event.name == "compile"))
        a, b, v = drawn((300, 7), (200, 7), (200, 3))
        kl.distributed.kernel_matmul(kl.laplace_l1(), a, b, v, bandwidth=7.0)
        end()
    return sum(compiles)


def test_one_compile_for_both():
    processes = Pool(2, BACKEND)
    try:
        with tempfile.TemporaryDirectory() as folder:
            answers = processes.run(compiled, folder)
            again = processes.run(compiled, folder)
        for answer in (*answers, *again):
            if isinstance(answer, Exception):
                raise answer
        assert sum(answers) == 1 and sum(again) == 0, (answers, again)
    finally:
        processes.close()
