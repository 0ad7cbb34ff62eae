"""Kronecker products whose columns, or rows, are spread over processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import kernlib as kl

FACTORS = {
    "three": ((4, 3), (2, 5), (3, 2)),
    "small first": ((2, 3), (2, 2), (5, 4)),
    "one": ((7, 4),),
    "fewer than processes": ((2, 2),),
}


def product(name: str, sharded: str, result: str | None, rows: int):
    """Result and gradients, by all processes and by this one alone."""
    generator = torch.Generator().manual_seed(5)
    sizes = FACTORS[name]
    factors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in sizes]
    count = torch.Size([f.shape[0] for f in factors]).numel()
    x = torch.randn((rows, count), generator=generator, dtype=torch.float64)
    at, size = dist.get_rank(), dist.get_world_size()
    along = sharded == "columns"
    uneven = [rows - rows // 2, rows // 2, 0]
    parts, ends = kl.distributed.kron_columns(factors, size) if along else (uneven, uneven)
    part = x.split(parts, int(along))[at].clone()
    if along and result == "rows":
        ends = [len(some) for some in x.chunk(size)]
        ends += [0] * (size - len(ends))
    along_result = int(along and result != "rows")
    others = [f.clone() for f in factors]
    for t in (x, part, *factors, *others):
        t.requires_grad_()
    out = kl.distributed.kron_matmul(part, factors, sharded=sharded, result=result)
    wanted = kl.kron_matmul(x, others)
    weights = torch.linspace(-1, 1, wanted.numel(), dtype=torch.float64).view(wanted.shape)
    (out * weights.split(ends, along_result)[at]).sum().backward()
    (wanted * weights).sum().backward()
    pairs = [
        (out, wanted.split(ends, along_result)[at]),
        (part.grad, x.grad.split(parts, int(along))[at]),
    ]
    pairs += [(f.grad, g.grad) for f, g in zip(factors, others, strict=True)]
    return max(float((p - q).abs().max()) if p.numel() else 0.0 for p, q in pairs)


@pytest.mark.few(6)
@pytest.mark.parametrize("rows", [5, 1])
@pytest.mark.parametrize(
    "sharded, result", [("columns", None), ("columns", "rows"), ("rows", None), ("rows", "rows")]
)
@pytest.mark.parametrize("name", FACTORS)
def test_parts_are_those_of_one_process(pool, name, sharded, result, rows):
    for answer in pool.run(product, name, sharded, result, rows):
        if isinstance(answer, Exception):
            raise answer
        assert answer < 1e-10


def on_a_grid(rows: int, columns: int):
    """Result of processes that have a part of the rows and of the columns each, and the part of it
    in that of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (rows, columns), mesh_dim_names=("m", "k"))
    m, k = mesh.get_coordinate()
    generator = torch.Generator().manual_seed(5)
    factors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in FACTORS["three"]]
    x = torch.randn((6, 24), generator=generator, dtype=torch.float64)
    parts, ends = kl.distributed.kron_columns(factors, columns)
    part = x.chunk(rows)[m].split(parts, 1)[k]
    wanted = kl.kron_matmul(x, factors).chunk(rows)[m].split(ends, 1)[k]
    return kl.kron_matmul(part, factors, alpha=1.0, group=mesh["k"]), wanted


@pytest.mark.parametrize("rows, columns", [(1, 3), (3, 1)])
def test_a_grid_has_a_group_for_each_row_of_it(pool, rows, columns):
    for answer in pool.run(on_a_grid, rows, columns):
        if isinstance(answer, Exception):
            raise answer
        torch.testing.assert_close(*answer)


X = torch.ones((2, 4))
REFUSED = {
    "alpha": {"alpha": 2.0},
    "alpha, beta, y": {"alpha": torch.tensor(1.0), "beta": 0.5, "y": X},
    "side": {"side": "left"},
    "out, debug": {"out": X, "debug": True},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("names", REFUSED)
def test_what_does_not_go_with_a_group_is_named(names):
    with pytest.raises(ValueError, match=rf"^{names} cannot go with a group"):
        kl.kron_matmul(X, [torch.eye(4)], group=object(), **REFUSED[names])


def test_rows_or_columns_need_a_group():
    with pytest.raises(ValueError, match=r"^sharded .* got 'rows' and no group: pass group="):
        kl.kron_matmul(X, [torch.eye(4)], sharded="rows")


def of_columns_from_rows():
    factors = [torch.ones(3, 2), torch.ones(2, 2)]
    return kl.distributed.kron_matmul(torch.ones(2, 6), factors, sharded="rows", result="columns")


def test_rows_give_no_columns(pool):
    for answer in pool.run(of_columns_from_rows):
        assert isinstance(answer, ValueError) and "result must be" in str(answer), answer


def of_factors(*values: float):
    value = values[dist.get_rank()]
    return kl.distributed.kron_matmul(torch.ones(2, (2, 2, 0)[dist.get_rank()]),
                                      [torch.full((4, 4), value)])  # fmt: skip


def test_numbers_of_factors_are_compared_by_their_bits(pool):
    for answer in pool.run(of_factors, -1.0, -2.0, -2.0):
        assert isinstance(answer, ValueError) and "factors[0] differs" in str(answer), answer
    for answer in pool.run(of_factors, *[float("nan")] * 3):
        assert isinstance(answer, torch.Tensor) and bool(answer.isnan().all()), answer
