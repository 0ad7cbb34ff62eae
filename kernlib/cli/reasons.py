"""Why lowering chooses a kernel, in a sentence for each file of ``kernel_sources`` in a kernel; the
other candidates of a call; and times that lowering estimates."""

from __future__ import annotations

import re
from collections import Counter

# Files of ``kernel_sources`` without ``.cuh``. What one kernel says of others holds untuned.
REASONS = {
    # Pairwise.
    "pairwise/direct/direct": "differences or products of coordinates, by tiles of 128 or 64 "
    "points, on every GPU: chosen where `few` and `split` do not take a call or are estimated to "
    "be slower; behind `split` it computes what lies too close together for that, else ends at "
    "once",
    "pairwise/few/few": "warps along the features of few pairs: chosen where it is estimated to "
    "end before the tiles of `direct` that the busiest multiprocessor would walk, and before "
    "`split`",
    "pairwise/split/centre": "the centre of the points, which `split` subtracts so that words of "
    "16 bits are accurate",
    "pairwise/split/pack": "both operands as words of 16 bits for `split`",
    "pairwise/split/split": "squared distances or dot products by tensor cores of sm_90a: chosen "
    "for 16 features or more, where four launches and packing are estimated to take less than "
    "`direct`",
    "pairwise/double/double": "float64 sums in tiles: by tensor cores of squares and dot products "
    "of enough features",
    # Kronecker-sparse.
    "kronecker_sparse/portable/portable": "mma.sync for any strides and on every GPU: chosen for "
    "few rows, where strides or sizes are no whole 16 bytes, where it is estimated to be fastest "
    "(batch first, d > 1), and on all GPUs but sm_90a",
    "kronecker_sparse/portable/pack": "the weight in an order whose depth lies side by side, where "
    "many tiles of `portable` read it",
    "kronecker_sparse/hopper/hopper": "TMA and wgmma of sm_90a, batch last or d = 1, where strides "
    "are whole 16 bytes and rows are enough to pay for packing the weight; of few long rows, and "
    "of gradients of a weight, the sums are split and added up by a launch behind it",
    "kronecker_sparse/hopper/pack": "the weight in the order that kernels of wgmma read, anew for "
    "each call",
    "kronecker_sparse/interleaved/interleaved": "batch first with d > 1 and whole 16 bytes: "
    "neighbouring features of several l move together; chosen where a model of times says that it "
    "is faster than `portable` and than going by way of batch last",
    "kronecker_sparse/transpose": "x turned to batch last, or the result back: the product between "
    "them is `hopper`'s, chosen where a model of times says that this is fastest",
    "kronecker_sparse/split_k_sum": "parts of long sums that blocks have left, added up in one "
    "order",
    "kronecker_sparse/fused_chain/fused_chain": "two factors in one launch, where what lies "
    "between them fits shared memory and rows are enough for half of the multiprocessors",
    "kronecker_sparse/hidden": "the first factor's result again, for gradients of a chain",
    "kronecker_sparse/deinterleave": "an operand with each l by itself, for gradients of a weight",
    "kronecker_sparse/interleaved_gradient/interleaved_gradient": "gradients of a weight, batch "
    "first with 2 to 8 l of half types, of an operand that is read as it lies",
    "kronecker_sparse/cast": "float32 tensors as half types, or back, for master weights",
    # Kronecker products.
    "kronecker_product/hopper/hopper": "wgmma of sm_90a for square factors of a power of two: "
    "chosen where it reads memory once, or where no block keeps a whole row",
    "kronecker_product/hopper/slabs": "the passes of `hopper` in one launch, by slabs that stay in "
    "the L2 cache",
    "kronecker_product/halves/halves": "half types, or float32 at fp32 as pairs of float16, of "
    "sizes that are multiples of 8: chosen ahead of `modes` where a block keeps a whole row",
    "kronecker_product/halves/slabs": "the same for rows that no block keeps: runs of factors in "
    "one launch, by slabs that stay in the L2 cache",
    "kronecker_product/hopper/largest": "the largest number of each row, by which float16 is "
    "scaled between launches",
    "kronecker_product/modes/modes": "any sizes, dtypes and GPUs: a launch for each run of "
    "factors, chosen where no other kernel takes the factors, and with few rows ahead of `slabs`",
    "kronecker_product/modes/slabs": "all runs of `modes` in one launch: chosen where what a run "
    "hands on would not stay in the L2 cache, or where that is estimated to be faster",
    "kronecker_product/modes/clear": "the counters of `slabs` set to 0",
    "kronecker_product/gradients/gradients": "gradients by all factors and by x",
    "kronecker_product/gradients/sum": "what blocks have summed of gradients, in one order",
    # Compressed matrices.
    "sparse/bitmap/bitmap": "the matrix's format decides: `bitmap`, of up to 8 vectors, or 32 "
    "where there is no wgmma of sm_90a",
    "sparse/bitmap/many": "the same format, 9 to 1024 vectors, by wgmma of sm_90a",
    "sparse/pack": "vectors of x as wgmma reads them",
    "sparse/macko/macko": "the matrix's format decides: `macko`, of up to 16 vectors",
    "sparse/macko/sum": "parts of rows of `macko`, added up in one order",
    "sparse/slices/slices": "the matrix's format decides: `u8`, `u4` or `u2`, by panels of columns",
    "sparse/slices/parts": "the same formats where one panel has all columns and vectors or slices "
    "are few, or rows are cut into parts",
    "sparse/slices/reduce": "panels of `slices`, added up in one order",
    "sparse/sum": "parts of sums that blocks have left, added up in one order",
    # Block-sparse matrices.
    "blocksparse/decode/decode": "up to 16 columns of half types, the depth side by side in both "
    "operands: the first choice for what it takes",
    "blocksparse/hopper/hopper": "wgmma of sm_90a, half types, blocks of 64 and 128: chosen where "
    "columns and tiles are estimated to be enough to beat `portable`",
    "blocksparse/hopper_words/hopper_words": "wgmma of sm_90a, float32 at fp32, blocks of 64 and "
    "128: chosen where three launches are estimated to take less than `portable`",
    "blocksparse/hopper_words/pack": "operands of `hopper_words` as pairs of float16 words",
    "blocksparse/narrow/narrow": "wgmma of sm_90a, half types, blocks of 16 and 32: chosen as "
    "`hopper` is",
    "blocksparse/portable/portable": "mma.sync for any strides and on every GPU: chosen for what "
    "no kernel before it takes or speeds up",
    "blocksparse/parts/parts": "parts of sums that several blocks share, added up in one order",
    "blocksparse/order/order": "the order of tiles by falling length of their lines, at each call",
    "blocksparse/stationary/stationary": "blocks of a dense product of depth 128 at most, sm_90a, "
    "half types: chosen where panels hold enough blocks",
    "blocksparse/tiles/tiles": "whole tiles of a dense product, sm_90a, half types: chosen where "
    "the layout has room for many blocks",
    "blocksparse/sampled_hopper/sampled_hopper": "blocks of 64 and 128 of a dense product, sm_90a, "
    "half types: chosen where tiles are estimated to be enough to beat `sampled`",
    "blocksparse/sampled/sampled": "blocks of a dense product by mma.sync on every GPU: chosen for "
    "what no kernel before it takes or speeds up",
    "blocksparse/scaled/scaled": "wgmma of float8, sm_90a, blocks of 128 x 128",
    "blocksparse/softmax/softmax": "the one kernel of a softmax over stored blocks; warps a row by "
    "the layout's capacity",
    "blocksparse/softmax/gradient": "the one kernel of its gradient",
    "blocksparse/attention/hopper/hopper": "wgmma of sm_90a, half types, values as wide as keys, "
    "whole 16 bytes: chosen ahead of `portable`",
    "blocksparse/attention/gradient/hopper/hopper": "gradients of what `hopper` takes",
    "blocksparse/attention/portable/portable": "mma.sync on every GPU, half types: chosen for what "
    "`hopper` does not take",
    "blocksparse/attention/gradient/portable/portable": "gradients of attention by mma.sync, on "
    "every GPU",
    "blocksparse/attention/gradient/deltas/deltas": "sums of out * grad of each row, which "
    "gradients read",
}


def file_of(spec) -> str:
    """The file that a kernel is made of, the last that its generated text includes."""
    files = re.findall(r'#include "([^"]+/[^"]+)\.cuh"', spec.source)
    return files[-1] if files else f"{spec.family}/{spec.entry}"


def name_of(spec) -> str:
    """Its file without the family: ``split`` of ``pairwise/split/split``, ``split/pack``."""
    *folders, stem = file_of(spec).split("/")[1:]
    return stem if folders[-1:] in ([], [stem]) else f"{folders[-1]}/{stem}"


def reasons(specs) -> dict[str, str]:
    """A sentence for each kernel that is told apart by its name."""
    return {name_of(spec): REASONS.get(file_of(spec), "by rule") for spec in specs}


def alternatives(descriptor, arch: str, tensors: tuple, arguments: dict) -> dict[str, int]:
    """How many variants of each kind of kernel tuning could try for a call; empty where there is
    nothing to choose, and for chains, which are tuned a factor at a time."""
    from kernlib import ahead
    from kernlib.runtime import tuned

    if descriptor.package == "chain":
        return {}
    with tuned.trying(tuned.Trial(None)) as trial:
        ahead.specs(descriptor, arch, tensors, arguments)
    return dict(Counter(str(choice.get("kind", "direct")) for choice in trial.candidates))


def is_by_torch(descriptor, tensors: tuple, arguments: dict) -> bool:
    """Whether torch computes a call, or one of its factors, on the GPUs of the current
    rehearsal."""
    from kernlib.run import operation_of
    from kernlib.runtime.operation import REFERENCE

    for planned in operation_of(descriptor).planned(descriptor, tensors, arguments):
        call = planned.operation.check(*planned.request)
        if planned.operation.way(call, *planned.request) == REFERENCE:
            return True
        plan = planned.operation.plan(call, *planned.fused)
        if getattr(plan, "compute", None) is not None:
            return True
    return False


def estimates(descriptor, arch: str, tensors: tuple, arguments: dict) -> dict[str, float]:
    """Microseconds on an H100 that lowering estimates for the kinds of kernel of a call and chooses
    by: of a Kronecker-sparse factor batch first with d > 1, on sm_90a. Empty for other calls, which
    have a rule."""
    if type(descriptor).__name__ != "KroneckerSparse":
        return {}
    from kernlib.families.kronecker_sparse import operation, plans
    from kernlib.families.kronecker_sparse.kernels import interleaved, portable, via_batch_last
    from kernlib.families.kronecker_sparse.lowering import choose, times
    from kernlib.runtime import ahead, devices
    from kernlib.runtime.operation import REFERENCE

    of = {
        "interleaved": interleaved.microseconds,
        "transposed": via_batch_last.microseconds,
        "portable": portable.microseconds,
    }
    with ahead.unseen(), devices.rehearse(arch):
        (planned, *_) = operation.planned(descriptor, tensors, arguments)
        call = planned.operation.check(*planned.request)
        factor, (x, weight), out, _ = planned.fused
        if not call.batch or planned.operation.way(call, *planned.request) == REFERENCE:
            return {}
        problem, *_ = plans.problem_of(factor, call, x, weight, out)
        listed = choose.candidates(problem, arch)
        if not times.knows(problem) or {choice["kind"] for choice in listed} == {"portable"}:
            return {}
        kinds = [(choice["kind"], choice) for choice in listed if choice["kind"] in of]
        estimated = [(kind, of[kind](problem, choice)) for kind, choice in kinds]
    return {kind: min(t for name, t in estimated if name == kind) for kind in dict(estimated)}
