"""How often torch.compile compiles what is called with 12 layouts, patterns and sizes in turn.

``python -m tests.contract.library.recompiles`` prints the table that docs/guides/torch_compile.md
holds, with FlexAttention beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import kernlib as kl
from kernlib import blocksparse, sparse

COUNT = 12
MOST = 2  # the first call makes constants of sizes that the second one makes symbols of
Values = torch.Tensor
Calls = Iterator[tuple[Callable, tuple]]  # functions or modules, and what they are given


def layouts(heads: int | None = None) -> Iterator[blocksparse.Layout]:
    """Grids on both sides of 32 columns, which take one word and two of a line's bits, of several
    densities."""
    generator = torch.Generator().manual_seed(7)
    for index in range(COUNT):
        rows, cols = 2 + index * 5 % 11, 3 + index * 7 % 40
        lead = () if heads is None else (heads,)
        density = 0.2 + 0.06 * index
        mask = torch.rand(*lead, rows, cols, generator=generator) < density
        mask[..., 0, :2] = True
        yield blocksparse.Layout(mask, 16)


def squares(heads: int | None = None) -> Iterator[blocksparse.Layout]:
    for index, size in enumerate((3, 40, 5, 33, 8, 12, 2, 36, 7, 21, 50, 9)):
        lead = () if heads is None else (heads,)
        mask = torch.ones(*lead, size, size, dtype=torch.bool).tril()
        if index % 3:
            mask &= torch.ones(size, size, dtype=torch.bool).triu(-index)
        yield blocksparse.Layout(mask, 16)


def stored(layout: blocksparse.Layout, lead: tuple = ()) -> Values:
    return torch.randn(*lead, layout.capacity, *layout.block)


def sdd() -> Calls:
    for index, layout in enumerate(layouts()):
        rows, cols = layout.shape
        a, b = torch.randn(rows, 2 + index), torch.randn(2 + index, cols)
        yield blocksparse.sdd, (a, b, layout)


def sdd_heads() -> Calls:
    for index, layout in enumerate(layouts(3)):
        rows, cols = layout.shape
        a, b = torch.randn(3, rows, 2 + index), torch.randn(3, 2 + index, cols)
        yield blocksparse.sdd, (a, b, layout)


def number_of_heads() -> Calls:
    for index, _ in enumerate(range(COUNT)):
        layout = blocksparse.Layout(torch.ones(2 + index, 2, 3, dtype=torch.bool), 16)
        yield blocksparse.dsd, (stored(layout), torch.randn(2 + index, 48, 5), layout)


def dsd() -> Calls:
    for index, layout in enumerate(layouts()):
        yield blocksparse.dsd, (stored(layout), torch.randn(layout.shape[1], 5 + index), layout)


def dds() -> Calls:
    for index, layout in enumerate(layouts()):
        yield blocksparse.dds, (torch.randn(5 + index, layout.shape[0]), stored(layout), layout)


def recorded_dds() -> Calls:
    for index, layout in enumerate(layouts()):
        a = torch.randn(5 + index, layout.shape[0], requires_grad=True)
        yield blocksparse.dds, (a, stored(layout).requires_grad_(), layout)


def softmax() -> Calls:
    for layout in layouts(2):
        yield blocksparse.softmax, (stored(layout, (3,)), layout)


def attention() -> Calls:
    for index, layout in enumerate(squares()):
        q, k, v = (torch.randn(3 + index % 4, 2, layout.shape[0], 8) for _ in range(3))
        yield blocksparse.attention, (q, k, v, layout)


def attention_of_heads() -> Calls:
    def causal(q, k, v, layout):
        return blocksparse.attention(q, k, v, layout, causal=True, score="v * 0.5")

    for layout in squares(2):
        q, k, v = (torch.randn(3, 2, layout.shape[0] - 3, 8) for _ in range(3))
        yield causal, (q, k, v, layout)


def made_inside() -> Calls:
    def run(q, k, v, mask):
        layout = blocksparse.Layout(mask, 16, capacity=mask.shape[0] * mask.shape[1])
        return blocksparse.attention(q, k, v, layout)

    for layout in squares():
        q, k, v = (torch.randn(3, 2, layout.shape[0], 8) for _ in range(3))
        yield run, (q, k, v, layout.mask())


def scaled() -> Calls:
    for layout in layouts():
        cols = layout.shape[1]
        values, scales = blocksparse.quantize(stored(layout))
        b, scale_b = blocksparse.quantize(torch.randn(cols, 7))
        yield blocksparse.scaled_dsd, (values, b, scales, scale_b, layout)


def sparse_matrices(format: str) -> Iterator[sparse.SparseMatrix]:
    generator = torch.Generator().manual_seed(8)
    for index in range(COUNT):
        dense = torch.randn(48 + 40 * index, 64 + 16 * (index * 5 % COUNT), generator=generator)
        dense[torch.rand(dense.shape, generator=generator) > 0.05 + 0.03 * index] = 0
        yield sparse.compress(dense, format)


def sparse_matmul(format: str) -> Callable[[], Calls]:
    def calls() -> Calls:
        for index, w in enumerate(sparse_matrices(format)):
            yield sparse.matmul, (w, torch.randn(2 + index, w.shape[1]))

    return calls


def sparse_linear() -> Calls:
    for index, w in enumerate(sparse_matrices("bitmap")):
        layer = kl.nn.SparseLinear.from_matrix(w, torch.randn(w.shape[0]))
        yield layer, (torch.randn(2 + index, w.shape[1]),)


def block_sparse_linear() -> Calls:
    for index, layout in enumerate(layouts()):
        rows, cols = layout.shape
        yield kl.nn.BlockSparseLinear(cols, rows, layout), (torch.randn(2 + index, cols),)


def densities() -> Calls:
    for index in range(COUNT):
        layer = kl.nn.BlockSparseLinear(128, 192, 16, density=0.05 + 0.08 * index)
        yield layer, (torch.randn(4, 128),)


def sparse_densities() -> Calls:
    for index in range(COUNT):
        linear = nn.Linear(64, 96)
        with torch.no_grad():
            linear.weight[torch.rand(96, 64) > 0.05 + 0.07 * index] = 0
        yield kl.nn.SparseLinear.from_linear(linear, format="bitmap"), (torch.randn(4, 64),)


def ks_linear(algo: str) -> Callable[[], Calls]:
    def calls() -> Calls:
        for index in range(COUNT):
            pattern = 2 + index % 3, 3 + index % 5, 2 + index % 4, 2 + (index + 1) % 3
            layer = kl.nn.KSLinear([pattern], algo=algo)
            yield layer, (torch.randn(2 + index, layer.in_size),)

    return calls


def ks_chain() -> Calls:
    for index in range(COUNT):
        b = 2 + index
        layer = kl.nn.KSLinear([(2, b, 3, 4), (2, 5, b, 4)])
        yield layer, (torch.randn(3, layer.in_size),)


def kronecker_linear() -> Calls:
    for index in range(COUNT):
        layer = kl.nn.KroneckerLinear((2 + index, 3), (4, 2 + index % 5))
        yield layer, (torch.randn(2 + index, 3 * (2 + index)),)


def kron_matmul() -> Calls:
    for index in range(COUNT):
        factors = [torch.randn(2 + index, 4), torch.randn(3, 2 + index % 5)]
        yield kl.kron_matmul, (torch.randn(3 + index, 3 * (2 + index)), factors)


def points(index: int) -> tuple[Values, Values]:
    return torch.randn(3 + index, 2 + index % 7), torch.randn(5 + 2 * index, 2 + index % 7)


def pairwise(run: Callable) -> Callable[[], Calls]:
    def calls() -> Calls:
        for index in range(COUNT):
            yield run, points(index)

    return calls


def reduction(run: Callable) -> Callable[[], Calls]:
    def calls() -> Calls:
        for index in range(COUNT):
            a, b = points(index)
            yield run, (a, b, torch.randn(len(b), 2 + index % 3))

    return calls


def solver(run: Callable, **more) -> Callable[[], Calls]:
    def calls() -> Calls:
        for index in range(COUNT):
            a = torch.randn(2 + index, 2 + index)
            yield run, (a @ a.T + torch.eye(2 + index), torch.randn(2 + index, 3))

    return calls


def gaussian(a, b):
    return kl.run_kernel(kl.gaussian(), a, b, bandwidth=2.0)


CASES: dict[str, Callable[[], Calls]] = {
    "blocksparse.sdd": sdd,
    "blocksparse.sdd, heads": sdd_heads,
    "blocksparse.dsd": dsd,
    "blocksparse.dsd, numbers of heads": number_of_heads,
    "blocksparse.dds": dds,
    "blocksparse.dds, gradients": recorded_dds,
    "blocksparse.softmax": softmax,
    "blocksparse.attention": attention,
    "blocksparse.attention, heads, score": attention_of_heads,
    "blocksparse.attention, layout made inside": made_inside,
    "BlockSparseLinear, 12 sizes": block_sparse_linear,
    "BlockSparseLinear, 12 densities": densities,
    "sparse.matmul, bitmap": sparse_matmul("bitmap"),
    "sparse.matmul, u8": sparse_matmul("u8"),
    "sparse.matmul, u4": sparse_matmul("u4"),
    "sparse.matmul, u2": sparse_matmul("u2"),
    "sparse.matmul, macko": sparse_matmul("macko"),
    "sparse.matmul, dense": sparse_matmul("dense"),
    "SparseLinear, 12 sizes": sparse_linear,
    "SparseLinear, 12 densities": sparse_densities,
    "KSLinear, kernel": ks_linear("kernel"),
    "KSLinear, einsum": ks_linear("einsum"),
    "KSLinear, two factors": ks_chain,
    "KroneckerLinear": kronecker_linear,
    "kron_matmul": kron_matmul,
    "cdist": pairwise(lambda a, b: kl.cdist(a, b, p=3)),
    "gaussian": pairwise(gaussian),
    "kernel_matmul": reduction(
        lambda a, b, v: kl.kernel_matmul(kl.gaussian(), a, b, v, bandwidth=2.0)
    ),
    "kernel_topk": pairwise(lambda a, b: kl.kernel_topk(kl.gaussian(), a, b, k=2, bandwidth=2.0)),
    "kernel_logsumexp": pairwise(
        lambda a, b: kl.kernel_logsumexp(kl.gaussian(), a, b, bandwidth=2.0)
    ),
}


def compiles(calls: Calls, dynamic: bool | None, check: bool = True) -> int:
    """How many programs they took, each with the result of the eager call."""
    torch._dynamo.reset()
    counter = CompileCounter()
    options = {"backend": counter, "fullgraph": True, "dynamic": dynamic}
    functions: dict = {}
    for run, given in calls:
        key = run if not isinstance(run, nn.Module) else id(run)
        if key not in functions:
            functions[key] = run, torch.compile(run, **options)
        found, wanted = functions[key][1](*given), run(*given)
        if check:
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    return counter.frame_count


def flex_attention() -> Calls:
    """The blocks of ``attention`` as masks of torch's own."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    for index, layout in enumerate(squares()):
        mask = layout.mask()[None, None]
        counts = mask.sum(-1, dtype=torch.int32)
        order = mask.int().argsort(dim=-1, descending=True, stable=True).to(torch.int32)
        shape = (layout.shape[0],) * 2
        block_mask = BlockMask.from_kv_blocks(counts, order, BLOCK_SIZE=16, seq_lengths=shape)
        q, k, v = (torch.randn(3 + index % 4, 2, layout.shape[0], 8) for _ in range(3))
        yield lambda q, k, v, m: flex_attention(q, k, v, block_mask=m), (q, k, v, block_mask)


def main() -> None:
    import sys

    print("| operation or layer | dynamic=None | dynamic=True |")
    print("|---|---:|---:|")
    for name, calls in CASES.items():
        if len(sys.argv) > 1 and not any(w in name for w in sys.argv[1:]):
            continue
        counts = []
        for dynamic in (None, True):
            try:
                counts.append(str(compiles(calls(), dynamic)))
            except Exception as error:
                counts.append(
                    type(error).__name__
                    + str(error)[: 1000 if len(sys.argv) > 1 else 60].replace("\n", " ")
                )
        print(f"| {name} | {counts[0]} | {counts[1]} |", flush=True)


if __name__ == "__main__":
    main()
