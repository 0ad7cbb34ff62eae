"""Texts of the page on sums."""

TEXTS = {
    "invariance": """
Row 0 of 4096 rows of 100, 1000, 3000 and 20000 normal numbers: the widths, and numbers of rows, at
which its bits are others. The guess: what is made of sums depends on the rows as `sum` does;
softmax and layer_norm do not. Seen: `sum`, `mean`, `prod`, `var` and `std_mean` of float32 change
with few rows; `norm` and `logsumexp` do not. Strides change nearly all but softmax and norms of
layers; an address one element further changes layer_norm and rms_norm at every width, in bfloat16
too. torch's cdist changes with nearly every number of rows, kernlib's with none here, nor its
`kernel_sum`; other strides change kernlib's cdist, as [accuracy](../../concepts/accuracy.md) says.
""",
    "shapes": """
The guess: `sum(0).sum()`, float64 sums and the mean times N give other bits. Seen: 13 ways give the
same float32 number, the correctly rounded one, since torch's partial sums are long and few; only
`cumsum` (4 results of 4 runs) and a sum that leaves out the first number, so that it is not
aligned, differ. What follows: one equal number does not show equal orders of summation. Compare
many sums of rows, as the table before does.
""",
    "errors": """
Relative errors, kernlib's by `kernel_sum` of dot products with one feature. The guess: ones are
exact up to 1e8, the error of 1e8 times 0.1 below 1e-6, half types right to one rounding. Seen: all
of that. torch's sums of equal numbers are better up to 1e6 (1.5e-8, kernlib's 4.8e-7) and equal at
1e8 (6.1e-7): errors of one sign add up in equal numbers, while random ones average out. Numbers
that cancel show a relative error a thousand times as large in both. What follows: test a sum with a
constant, not with random numbers. kernlib promises 1e-6 of the sum of the absolute terms, and these
stay below.
""",
    "corners": """
The guess: `logsumexp` of 1e8 zeros is right, histc and bincount of floats stop at 2^24,
cosine_similarity of 1e-20 with itself is .02. Seen: float16 logsumexp of 1e8 zeros is infinite,
since the sum of exponentials, too, is a float16; histc and bincount count 1e8 right;
cosine_similarity gives 2e-24, normalize 1e-8, norms of 1e20 and 1e-30 infinity and 0. layer_norm of
1e20 is 0. A float16 softmax of 100000 zeros sums up to 1.0014. What follows: logits of a large
vocabulary need float32 for logsumexp. `kernlib.kernel_logsumexp` sums half types in float32, and
`kernlib.cdist` computes distances again whose squares leave the range.
""",
}
TEXTS = {name: text.strip() for name, text in TEXTS.items()}
