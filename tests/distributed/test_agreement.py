"""Processes that do not agree get one error, in all of them, and go on afterwards."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

import kernlib as kl
from kernlib.errors import DistributedError
from tests.distributed.pool import Pool

ODD = 1  # the rank that differs


def rows(count: int, features: int = 3, dtype=torch.float32, columns: int | None = None):
    return torch.ones((count, features if columns is None else columns), dtype=dtype)


def call(change: str):
    """A product in which one rank changes something."""
    changed = dist.get_rank() == ODD
    features = 4 if changed and change == "features" else 3
    dtype = torch.float64 if changed and change == "dtype" else torch.float32
    a, b, v = rows(2, features, dtype), rows(3, features, dtype), rows(3, columns=2, dtype=dtype)
    descriptor, names, task = kl.gaussian(), {"bandwidth": 1.0}, kl.distributed.kernel_matmul
    if changed:
        if change == "descriptor":
            descriptor = kl.laplace_l2()
        if change == "bandwidth":
            names = {"bandwidth": 2.0}
        if change == "name":
            names = {"bandwith": 1.0}
        if change == "shard":
            b = None
        if change == "rows of v":
            v = v[:1]
        if change == "gradient":
            b.requires_grad_()
        if change == "a itself":
            b, v = a, v[:2]
        if change == "ring":
            names["ring"] = True
        if change == "columns":
            v = v[:, :1]
        if change == "tensor":
            a = a.numpy()
        if change == "task":
            return kl.distributed.kernel_sum(descriptor, a, b, **names)
    return task(descriptor, a, b, v, **names)


SAID = {
    "features": "features differs: 3 on rank 0, 4 on rank 1",
    "dtype": "dtype differs: torch.float32 on rank 0, torch.float64 on rank 1",
    "descriptor": "descriptor differs",
    "bandwidth": "bandwidth differs: 1.0 on rank 0, 2.0 on rank 1",
    "name": "bandwith",
    "shard": "b is missing",
    "rows of v": "v must have the rows of b, 3, got 1",
    "gradient": "requires_grad of b differs: False on rank 0, True on rank 1",
    "a itself": "b differs: rows on rank 0, a itself on rank 1",
    "ring": "ring differs: None on rank 0, True on rank 1",
    "columns": "dimensions of v but the rows' differs: (2,) on rank 0, (1,) on rank 1",
    "tensor": "a must be a tensor",
    "task": "rank 1 calls kernel_sum while rank 0 calls kernel_matmul",
}


@pytest.mark.parametrize("change", SAID)
def test_a_difference_is_an_error_in_all(pool, change):
    answers = pool.run(call, change)
    for rank, answer in enumerate(answers):
        assert isinstance(answer, (ValueError, TypeError)), (rank, answer)
        assert SAID[change] in str(answer), (rank, answer)
        if rank != ODD:
            assert "rank 1" in str(answer)


def test_a_call_after_an_error_is_right(pool):
    results = pool.run(call, "nothing")
    for result in results:
        torch.testing.assert_close(result, torch.full((2, 2), 9.0))


def ends(rank: int):
    """Rank ``rank`` ends before the second product."""
    group = kl.distributed.Communicator(timeout=10.0)
    a = rows(4)
    kl.distributed.kernel_sum(kl.gaussian(), a, a, bandwidth=1.0, group=group)
    if dist.get_rank() == rank:
        os._exit(1)
    return kl.distributed.kernel_sum(kl.gaussian(), a, a, bandwidth=1.0, group=group)


def sleeps(seconds: float):
    """The last rank stays away longer than the timeout."""
    group = kl.distributed.Communicator(timeout=1.0)
    a = rows(4)
    kl.distributed.kernel_sum(kl.gaussian(), a, a, bandwidth=1.0, group=group)
    if dist.get_rank() == dist.get_world_size() - 1:
        import time

        time.sleep(seconds)
        return "late"
    return kl.distributed.kernel_sum(kl.gaussian(), a, a, bandwidth=1.0, group=group)


@pytest.mark.parametrize("function, argument", [(ends, 1), (sleeps, 4.0)])
def test_a_rank_that_is_gone_is_an_error(function, argument):
    processes = Pool(2)
    try:
        answers = processes.run(function, argument)
        assert isinstance(answers[0], DistributedError), answers
        assert "does not take part" in str(answers[0])
    finally:
        processes.close()


def alone(task: str):
    """A group of this process alone, and kernlib's own call: gradients too."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    results = []
    for module, names in ((kl.distributed, {"group": groups[dist.get_rank()]}), (kl, {})):
        generator = torch.Generator().manual_seed(1)
        a, b, v = (torch.randn((7, n), generator=generator).requires_grad_() for n in (3, 3, 2))
        tensors = (a, b, v)[: 3 if task == "kernel_matmul" else 2]
        out = getattr(module, task)(kl.gaussian(), *tensors, bandwidth=0.7, **names)
        out = out[0] if isinstance(out, tuple) else out
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in tensors)])
    return all(torch.equal(x, y) for x, y in zip(*results, strict=True))


@pytest.mark.parametrize("task", ["kernel_matmul", "kernel_logsumexp", "kernel_topk"])
def test_one_process_computes_the_same_bits(pool, task):
    assert pool.run(alone, task) == [True] * 3


def by_dtensors(b_is_replicated: bool):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(2)
    a, b, v = (torch.randn(size, generator=generator) for size in ((7, 3), (5, 3), (5, 2)))
    placements = [Replicate()] if b_is_replicated else [Shard(0)]
    spread = [distribute_tensor(t, mesh, [Shard(0)]).requires_grad_() for t in (a, b, v)]
    spread[1] = distribute_tensor(b, mesh, placements).requires_grad_()
    out = kl.distributed.kernel_matmul(kl.gaussian(), *spread, bandwidth=1.0)
    out.sum().backward()
    leaves = [t.requires_grad_() for t in (a, b, v)]
    wanted = kl.kernel_matmul(kl.gaussian(), *leaves, bandwidth=1.0)
    wanted.sum().backward()
    pairs = [(out.full_tensor(), wanted)]
    pairs += [(x.grad.full_tensor(), y.grad) for x, y in zip(spread, leaves, strict=True)]
    return [float((x - y).abs().max()) for x, y in pairs], tuple(out.shape)


@pytest.mark.parametrize("b_is_replicated", [False, True])
def test_dtensors_come_and_go(pool, b_is_replicated):
    for answer in pool.run(by_dtensors, b_is_replicated):
        errors, shape = answer
        assert shape == (7, 2) and max(errors) < 1e-5


def with_replicas(ring: bool | None):
    generator = torch.Generator().manual_seed(3)
    rank = dist.get_rank()
    b = torch.randn((9, 3), generator=generator)
    a, part = b[rank::3].clone(), b.split([4, 5, 0])[rank].clone()
    points = kl.distributed.replicate(part)
    assert points.sizes == (4, 5, 0) and torch.equal(points.tensor, b)
    v = torch.arange(9.0)[:, None].split([4, 5, 0])[rank]
    out = kl.distributed.kernel_matmul(kl.gaussian(), a, points, v, bandwidth=1.0, ring=ring)
    wanted = kl.kernel_matmul(kl.gaussian(), a, b, torch.arange(9.0)[:, None], bandwidth=1.0)
    return float((out - wanted).abs().max())


def test_replicas_stand_for_rows(pool):
    assert max(pool.run(with_replicas, None)) < 1e-5


def by_a_ring_of_replicas():
    points = kl.distributed.replicate(rows(2))
    a, v = rows(2), rows(2, columns=1)
    return kl.distributed.kernel_matmul(kl.gaussian(), a, points, v, bandwidth=1.0, ring=True)


def by_a_replica_of_others():
    points = kl.distributed.Replica(rows(4), (2, 2))
    return kl.distributed.kernel_sum(kl.gaussian(), rows(2), points, bandwidth=1.0)


@pytest.mark.parametrize(
    "function, text",
    [(by_a_ring_of_replicas, "is a replica"), (by_a_replica_of_others, "of 2 processes")],
)
def test_replicas_that_do_not_fit_are_refused(pool, function, text):
    for answer in pool.run(function):
        assert isinstance(answer, ValueError) and text in str(answer), answer


def of_itself(ring: bool):
    rank = dist.get_rank()
    x = torch.linspace(0, 1, 24).view(8, 3)
    v = torch.ones(8, 1)
    part, summands = x.split([3, 3, 2])[rank], v.split([3, 3, 2])[rank]
    descriptor = kl.Pairwise(inner=kl.Square(), epilogue=kl.Gaussian(), symmetric=True)
    names = {"bandwidth": 1.0, "regularization": 0.5}
    out = kl.distributed.kernel_matmul(descriptor, part, None, summands, ring=ring, **names)
    wanted = kl.kernel_matmul(descriptor, x, None, v, **names).split([3, 3, 2])[rank]
    return float((out - wanted).abs().max())


@pytest.mark.parametrize("ring", [False, True])
def test_a_symmetric_matrix_needs_no_b(pool, ring):
    assert max(pool.run(of_itself, ring)) < 1e-5
