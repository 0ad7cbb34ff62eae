"""How often torch.compile compiles what is called with 12 layouts, matrices or sizes in turn.

``python -m tests.contract.library.recompiles`` prints the table of docs/concepts/running.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import kernlib as kl
from kernlib import blocksparse, sparse

COUNT = 12
SQUARES = (3, 34, 5, 33, 8, 12, 2, 35, 7, 21, 36, 9)  # blocks: one word of bits a line, or two
Calls = Iterator[tuple[Callable, tuple]]  # functions or modules, and what they are given


def layouts(heads: int | None = None) -> Iterator[blocksparse.Layout]:
    """Of grids and densities that all differ."""
    generator = torch.Generator().manual_seed(7)
    lead = () if heads is None else (heads,)
    for index in range(COUNT):
        grid = 2 + index * 5 % 11, 3 + index * 7 % 40
        mask = torch.rand(*lead, *grid, generator=generator) < 0.2 + 0.06 * index
        mask[..., 0, :2] = True
        yield blocksparse.Layout(mask, 16)


def squares(heads: int | None = None) -> Iterator[blocksparse.Layout]:
    for index, size in enumerate(SQUARES):
        lead = () if heads is None else (heads,)
        mask = torch.ones(*lead, size, size, dtype=torch.bool).tril()
        if index % 3:
            mask &= torch.ones(size, size, dtype=torch.bool).triu(-index)
        yield blocksparse.Layout(mask, 16)


def stored(layout: blocksparse.Layout, *lead: int) -> torch.Tensor:
    return torch.randn(*lead, layout.capacity, *layout.block)


def heads(count: int, layout: blocksparse.Layout, rows: int | None = None) -> list[torch.Tensor]:
    """q, k and v."""
    length = layout.shape[0] if rows is None else rows
    return [torch.randn(count, 2, length, 8) for _ in range(3)]


def sdd() -> Calls:
    for index, layout in enumerate(layouts()):
        rows, cols = layout.shape
        yield blocksparse.sdd, (torch.randn(rows, 2 + index), torch.randn(2 + index, cols), layout)


def numbers_of_heads() -> Calls:
    for index in range(COUNT):
        layout = blocksparse.Layout(torch.ones(2 + index, 2, 3, dtype=torch.bool), 16)
        yield blocksparse.dsd, (stored(layout), torch.randn(2 + index, 48, 5), layout)


def dsd() -> Calls:
    for index, layout in enumerate(layouts(3)):
        yield blocksparse.dsd, (stored(layout), torch.randn(3, layout.shape[1], 5 + index), layout)


def dds(layout: blocksparse.Layout, index: int) -> tuple:
    return torch.randn(5 + index, layout.shape[0]), stored(layout), layout


def recorded(layout: blocksparse.Layout, index: int) -> tuple:
    a, values, _ = dds(layout, index)
    return a.requires_grad_(), values.requires_grad_(), layout


def products(given: Callable) -> Callable[[], Calls]:
    return lambda: (
        (blocksparse.dds, given(layout, index)) for index, layout in enumerate(layouts())
    )


def scaled() -> Calls:
    for index, layout in enumerate(layouts()):
        values, scale_a = blocksparse.quantize(stored(layout))
        b, scale_b = blocksparse.quantize(torch.randn(layout.shape[1], 16 + index), -2)
        yield blocksparse.scaled_dsd, (values, b, layout, scale_a, scale_b)


def softmax() -> Calls:
    return ((blocksparse.softmax, (stored(layout, 3), layout)) for layout in layouts(2))


def attention() -> Calls:
    for index, layout in enumerate(squares()):
        yield blocksparse.attention, (*heads(3 + index % 4, layout), layout)


def scored() -> Calls:
    def run(q, k, v, layout):
        return blocksparse.attention(q, k, v, layout, causal=True, score="v * 0.5")

    for layout in squares(2):
        yield run, (*heads(3, layout, layout.shape[0] - 3), layout)


def made_inside() -> Calls:
    def run(q, k, v, mask):
        layout = blocksparse.Layout(mask, 16, capacity=mask.shape[0] * mask.shape[1])
        return blocksparse.attention(q, k, v, layout)

    return ((run, (*heads(3, layout), layout.mask())) for layout in squares())


def selected() -> Calls:
    def run(q, k, v, scores):
        return blocksparse.attention(q, k, v, blocksparse.top_k(scores, 16, 2))

    for layout in squares():
        yield run, (*heads(3, layout), torch.randn(layout.grid))


def multihead() -> Calls:
    for layout in squares():
        layer = kl.nn.BlockSparseMultiheadAttention(16, 2, layout, batch_first=True)
        x = torch.randn(3, layout.shape[0], 16)
        yield layer, (x, x, x)


def block_sparse_linear() -> Calls:
    for index, layout in enumerate(layouts()):
        rows, cols = layout.shape
        yield kl.nn.BlockSparseLinear(cols, rows, layout), (torch.randn(2 + index, cols),)


def block_densities() -> Calls:
    for index in range(COUNT):
        layer = kl.nn.BlockSparseLinear(128, 192, 16, density=0.05 + 0.08 * index)
        yield layer, (torch.randn(4, 128),)


def convolutions() -> Calls:
    for index in range(COUNT):
        layer = kl.nn.BlockSparseConv2d(32, 48, 3, layout=16, density=0.1 + 0.07 * index)
        yield layer, (torch.randn(2, 32, 6, 6),)


def matrices(format: str) -> Iterator[sparse.SparseMatrix]:
    generator = torch.Generator().manual_seed(8)
    for index in range(COUNT):
        dense = torch.randn(48 + 40 * index, 64 + 16 * (index * 5 % COUNT), generator=generator)
        dense[torch.rand(dense.shape, generator=generator) > 0.05 + 0.03 * index] = 0
        yield sparse.compress(dense, format)


def compressed(format: str) -> Callable[[], Calls]:
    return lambda: (
        (sparse.matmul, (w, torch.randn(2 + index, w.shape[1])))
        for index, w in enumerate(matrices(format))
    )


def sparse_linear() -> Calls:
    for index, w in enumerate(matrices("bitmap")):
        layer = kl.nn.SparseLinear.from_matrix(w, torch.randn(w.shape[0]))
        yield layer, (torch.randn(2 + index, w.shape[1]),)


def densities() -> Calls:
    for index in range(COUNT):
        linear = nn.Linear(64, 96)
        with torch.no_grad():
            linear.weight[torch.rand(96, 64) > 0.05 + 0.07 * index] = 0
        yield kl.nn.SparseLinear.from_linear(linear, format="bitmap"), (torch.randn(4, 64),)


def one_factor(algo: str) -> Callable[[], Calls]:
    def calls() -> Calls:
        for index in range(COUNT):
            pattern = 2 + index % 3, 3 + index % 5, 2 + index % 4, 2 + (index + 1) % 3
            layer = kl.nn.KSLinear([pattern], algo=algo)
            yield layer, (torch.randn(2 + index, layer.in_size),)

    return calls


def two_factors() -> Calls:
    for index in range(COUNT):
        layer = kl.nn.KSLinear([(2, 2 + index, 3, 4), (2, 5, 2 + index, 4)], algo="kernel")
        yield layer, (torch.randn(3, layer.in_size),)


def kronecker_linear() -> Calls:
    for index in range(COUNT):
        layer = kl.nn.KroneckerLinear((2 + index, 3), (4, 2 + index % 5))
        yield layer, (torch.randn(2 + index, 3 * (2 + index)),)


def kron_matmul(gradients: bool = False) -> Calls:
    for index in range(COUNT):
        factors = [torch.randn(2 + index, 4), torch.randn(3, 2 + index % 5)]
        for factor in factors if gradients else ():
            factor.requires_grad_()
        yield kl.kron_matmul, (torch.randn(3 + index, 3 * (2 + index)), factors)


def of_points(run: Callable, more: bool = False) -> Callable[[], Calls]:
    def calls() -> Calls:
        for index in range(COUNT):
            a, b = torch.randn(3 + index, 2 + index % 7), torch.randn(5 + 2 * index, 2 + index % 7)
            yield run, (a, b, torch.randn(len(b), 2 + index % 3)) if more else (a, b)

    return calls


def gaussian(function: Callable) -> Callable:
    return lambda *tensors: function(kl.gaussian(), *tensors, bandwidth=2.0)


def top_k(descriptor, a, b, **parameters):
    return kl.kernel_topk(descriptor, a, b, k=2, **parameters)


CASES: dict[str, Callable[[], Calls]] = {
    "`blocksparse.sdd`": sdd,
    "`blocksparse.dsd`, heads": dsd,
    "`blocksparse.dsd`, 12 numbers of heads": numbers_of_heads,
    "`blocksparse.dds`": products(dds),
    "`blocksparse.dds`, gradients": products(recorded),
    "`blocksparse.scaled_dsd`": scaled,
    "`blocksparse.softmax`": softmax,
    "`blocksparse.attention`": attention,
    "`blocksparse.attention`, heads, score": scored,
    "`blocksparse.attention`, layout made inside": made_inside,
    "`blocksparse.attention`, layout by `top_k` inside": selected,
    "`BlockSparseMultiheadAttention`, 12 layouts": multihead,
    "`BlockSparseLinear`, 12 sizes": block_sparse_linear,
    "`BlockSparseLinear`, 12 densities": block_densities,
    "`BlockSparseConv2d`, 12 densities": convolutions,
    **{f'`sparse.matmul`, "{name}"': compressed(name) for name in ("bitmap", "u8", "u4", "u2")},
    **{f'`sparse.matmul`, "{name}"': compressed(name) for name in ("macko", "dense")},
    "`SparseLinear`, 12 sizes": sparse_linear,
    "`SparseLinear`, 12 densities": densities,
    '`KSLinear(algo="kernel")`': one_factor("kernel"),
    '`KSLinear(algo="einsum")`': one_factor("einsum"),
    '`KSLinear(algo="bmm")`': one_factor("bmm"),
    "`KSLinear`, two factors": two_factors,
    "`KroneckerLinear`": kronecker_linear,
    "`kron_matmul`": kron_matmul,
    "`kron_matmul`, gradients": lambda: kron_matmul(True),
    "`cdist`": of_points(lambda a, b: kl.cdist(a, b, p=3)),
    "`run_kernel(gaussian())`": of_points(gaussian(kl.run_kernel)),
    "`kernel_matmul`": of_points(gaussian(kl.kernel_matmul), True),
    "`kernel_topk`": of_points(gaussian(top_k)),
    "`kernel_logsumexp`": of_points(gaussian(kl.kernel_logsumexp)),
}


def flex() -> Calls:
    """The blocks of ``attention`` as torch's own masks."""

    def run(q, k, v, block_mask):
        return flex_attention(q, k, v, block_mask=block_mask)

    for index, layout in enumerate(squares()):
        mask = layout.mask()[None, None]
        order = mask.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        given = mask.sum(-1, dtype=torch.int32), order
        block_mask = BlockMask.from_kv_blocks(
            *given, BLOCK_SIZE=16, seq_lengths=(layout.shape[0],) * 2
        )
        yield run, (*heads(3 + index % 4, layout), block_mask)


def compiles(calls: Calls, dynamic: bool | None, backend: str = "eager") -> int:
    """How many programs the calls took, each of which gave what an eager one gives."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    options = {"backend": counter, "fullgraph": True, "dynamic": dynamic}
    compiled: dict[int, tuple] = {}  # with what was compiled, whose place no other may take
    for run, given in calls:
        if id(run) not in compiled:
            compiled[id(run)] = run, torch.compile(run, **options)
        found, wanted = compiled[id(run)][1](*given), run(*given)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
    return counter.frame_count


def main() -> None:
    print("| 12 calls of other layouts, matrices and sizes | `dynamic=None` | `dynamic=True` |")
    print("|---|---:|---:|")
    rival = "FlexAttention, the blocks of `blocksparse.attention`"
    for name, calls in {**CASES, rival: flex}.items():
        counts = [compiles(calls(), dynamic) for dynamic in (None, True)]
        print(f"| {name} | {counts[0]} | {counts[1]} |", flush=True)


if __name__ == "__main__":
    main()
