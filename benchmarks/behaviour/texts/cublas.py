"""Texts of the page on cuBLAS."""

COLUMNS = """
Columns: the kernel by torch's profiler and what ran beside it; whether the bits of `a @ b` come
again in one more call, in a row of `a` alone, in the upper half of the rows, with `a` one element
behind an aligned address, with 8 elements between two rows, with `b` stored by columns; and the
relative error (Frobenius norm) against float64.
"""

TEXTS = {
    "float32": """
The guess: one family of SIMT kernels, split-K for long sums alone, an error like that of kernlib's
split products. Seen: split-K already at 256 and 512, none at 1024 to 4096, and some kernel for
every shape, so nearly every row changes its bits with the number of rows. The error of cuBLAS grows
with the size to 1.6e-6, as it adds all terms in one order; kernlib's `dot_product` stays at 3.3e-7,
because its sums move to other registers every 64 features. What follows: a float32 product by
cuBLAS is no reference for another one to 1e-6. Compare with float64.
""",
    "TF32": """
The guess: an error of 3e-4 at all sizes. Seen: so it is, but for a single row: that is a product
with a vector, which cuBLAS computes in float32 (gemv), with an error of 3e-7. So the same layer is
a thousand times more accurate for one row than for eight, and every row differs from itself alone.
From 1024 on kernels are of Hopper, below and at odd sizes of Ampere. What follows: an accuracy
measured with one row says nothing of a batch. kernlib's `precision="tf32"` promises 2^-10 of the
sum of the absolute terms, whatever the rows.
""",
    "float16": """
The guess: Hopper's kernels (nvjet) at all even sizes, and reduced precision that matters for split
sums. Seen: nvjet for all even sizes, a single row too, mostly with the bits of other row counts. At
1023 and 4097 the kernel is one of Turing (cutlass_75, align1).
`allow_fp16_reduced_precision_reduction` changes 4097 alone, though K = 16384 is split too: nvjet
adds its parts in float32. An address one element further takes another kernel and up to 42 % of the
bits with it. `allow_fp16_accumulation` costs 16 times the error at 8192. What follows: pad sizes to
multiples of 8, and expect other bits from views.
""",
    "bfloat16": """
The guess: `allow_bf16_reduced_precision_reduction` changes the split sums of K = 16384, and nothing
else. Seen: the other way round. It changes 1023 and 4097 alone, where an old kernel (cutlass_75,
align1) rounds between the parts of a sum: an error of 2.4e-3 in place of 1.7e-3. At K = 16384 the
bits are the same with the switch off. What follows: in even sizes the switch costs nothing and
gains nothing on this GPU; in odd ones turn it off. kernlib's own kernels round half types once and
read no such switch; its sparse products of many vectors go to cuBLAS, and follow it.
""",
    "batches": """
Letters are results: the same letter, the same bits, of row 0 of n rows times 4096 x 4096. The
guess: three or four results in every dtype, with split-K or without it. Seen: float32 has 10
results, float16 3, bfloat16 2. With `preferred_blas_library("cublaslt")` and split-K forbidden,
`allow_fp16_reduced_precision_reduction = (False, False)`, both half types have one, from 1 row to
4096. What follows: that is the setting under which a batch does not change its members. kernlib's
`dot_product` has two results: up to 16 rows lanes share a pair's features, above tiles do not.
""",
    "spellings": """
Sizes at which other ways to write `a @ b` give other bits. The guess: views of one product agree, a
bias of zeros and a small workspace change nothing. Seen: `mm`, `bmm` of one, `addmm`, `einsum` and
`linear` agree, in graphs and other streams too. A bias of zeros, a second batch, cuBLASLt and a
workspace of 128 KiB (`:16:8`) change the bits wherever sums are split. Forbidding split-K for a
half type raises at the first product unless cuBLASLt is preferred, and the error names fp16 for
bf16 too. What follows: `CUBLAS_WORKSPACE_CONFIG=:4096:8`, which deterministic algorithms want,
leaves results as they are; `:16:8` does not.
""",
}
TEXTS = {name: text.strip() for name, text in TEXTS.items()}
TEXTS["float32"] += "\n" + COLUMNS.rstrip()
