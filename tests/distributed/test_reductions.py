"""Reductions over processes are those of one process that holds all rows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import kernlib as kl

ROWS = {
    "uneven": ((5, 0, 8), (3, 7, 0)),
    "even": ((4, 4, 4), (5, 5, 5)),
    "one": ((1, 0, 0), (0, 0, 2)),
}
FEATURES = 3


def tensors(counts, seed: int = 0, columns: int = 2, dtype=torch.float64):
    """All rows of a, b and v, drawn alike in every process."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((sum(counts[0]), FEATURES), (sum(counts[1]), FEATURES), (sum(counts[1]), columns))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def mine(t: torch.Tensor, sizes) -> torch.Tensor:
    """The rows of this process."""
    return t.split(list(sizes))[dist.get_rank()].clone()


def reduced(task: str, rows: str, ring: bool, gradient: bool):
    """A reduction and its gradients, by all processes and by this one alone: pairs of tensors."""
    counts = ROWS[rows]
    a, b, v = tensors(counts)
    parts = [mine(a, counts[0]), mine(b, counts[1]), mine(v, counts[1])]
    bandwidth, other = (torch.tensor(1.3, dtype=torch.float64) for _ in range(2))
    if gradient:
        leaves = [*parts, bandwidth, a, b, v, other]
        for t in leaves:
            t.requires_grad_()
    more = {"k": 2} if task == "kernel_topk" else {}
    of_v = 3 if task == "kernel_matmul" else 2
    call = getattr(kl.distributed, task)
    result = call(kl.gaussian(), *parts[:of_v], ring=ring, bandwidth=bandwidth, **more)
    wanted = getattr(kl, task)(kl.gaussian(), *(a, b, v)[:of_v], bandwidth=other, **more)
    results, alone = ((x if isinstance(x, tuple) else (x,)) for x in (result, wanted))
    pairs = [(x, mine(y, counts[0])) for x, y in zip(results, alone, strict=True)]
    if gradient:
        weights = torch.linspace(-1, 1, alone[0].numel(), dtype=torch.float64).view(alone[0].shape)
        (results[0] * mine(weights, counts[0])).sum().backward()
        (alone[0] * weights).sum().backward()
        sizes = counts[0], counts[1], counts[1]
        for part, t, size in zip(parts, (a, b, v), sizes, strict=True):
            if t.grad is not None:
                pairs.append((part.grad, mine(t.grad, size)))
        pairs.append((bandwidth.grad, other.grad))
    return [(x.detach(), y.detach()) for x, y in pairs]


def compare(answers) -> None:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        for x, y in answer:
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


TASKS = ("kernel_matmul", "kernel_sum", "kernel_logsumexp", "kernel_min", "kernel_topk")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("task", TASKS)
def test_rows_are_those_of_one_process(pool, task, ring, rows):
    gradient = not (ring and task in ("kernel_min", "kernel_topk"))
    compare(pool.run(reduced, task, rows, ring, gradient))


def with_itself(task: str, of_v: bool, regularized: bool, dims: int):
    """Value, gradients and gradients of gradients of a matrix of points with themselves."""
    sizes = 5, 1, 3
    x, _, v = tensors((sizes, sizes))
    v = v[:, 0] if dims == 1 else v
    names = {"regularization": torch.tensor(0.3, dtype=torch.float64)} if regularized else {}
    pairs, grads = [], []
    for module, one in ((kl.distributed, True), (kl, False)):
        points, summands = (mine(t, sizes) if one else t.clone() for t in (x, v))
        width = torch.tensor(0.9, dtype=torch.float64)
        hyper = [width, *(value.clone() for value in names.values())]
        leaves = [points, *hyper, *([summands] if of_v else [])]
        for t in leaves:
            t.requires_grad_()
        others = {"bandwidth": hyper[0], **dict(zip(names, hyper[1:], strict=True))}
        parts = (points, points, summands)[: 3 if task == "kernel_matmul" else 2]
        out = getattr(module, task)(kl.gaussian(), *parts, **others)
        weights = torch.linspace(-1, 1, out.shape[1:].numel() * len(x), dtype=torch.float64)
        weights = weights.view(len(x), *out.shape[1:])
        weights = mine(weights, sizes) if one else weights
        used = leaves if task == "kernel_matmul" else [t for t in leaves if t is not summands]
        first = torch.autograd.grad((out * weights).sum(), used, create_graph=True)
        second = torch.autograd.grad(first[0].square().sum(), used, allow_unused=True)
        grads.append([out, *first, *second])
    for mine_of, all_of in zip(*grads, strict=True):
        assert (mine_of is None) == (all_of is None)
        if all_of is None:
            continue
        is_rows = all_of.dim() > 0
        pairs.append((mine_of.detach(), (mine(all_of, sizes) if is_rows else all_of).detach()))
    return pairs


@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("regularized", [False, True])
@pytest.mark.parametrize(
    "task, of_v", [("kernel_matmul", True), ("kernel_matmul", False), ("kernel_sum", False)]
)
def test_points_with_themselves(pool, task, of_v, regularized, dims):
    compare(pool.run(with_itself, task, of_v, regularized, dims))
