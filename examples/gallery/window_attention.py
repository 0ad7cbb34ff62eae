"""Attention by a sliding window, with a bias by distance.

Each of n tokens looks at those that are at most w away, and less at the farther ones (ALiBi): the
logit of tokens i and j in head h is `<q_i, k_j> / sqrt(E) - slope_h |i - j|`. The layout says which
blocks of the matrix of logits are computed, `window` what counts inside of them, and `score` is an
expression, compiled into the kernel with its gradient; the slopes are a tensor that learns. Time
and memory go with n w. The plain way takes torch's attention with the biases as a mask, n² numbers
for each head.

**Your own data.** Put your q, k and v, (batch, heads, tokens, features), in the place of those of
`inputs`, in float16 or bfloat16 on a GPU. Causal attention has `window=(w, 0)`. Any layout takes
the place of `sliding_window`, such as one with some global blocks, and any expression of `v`,
`row`, `col`, `head` and tensors that you name that of `SCORE`.
"""

from collections.abc import Callable
from functools import partial

import torch
from harness import BLUE, ORANGE, figure, finish, milliseconds, parse, relative_error
from torch.nn.functional import avg_pool2d, scaled_dot_product_attention

from kernlib import blocksparse

SCORE = "v - slope * abs(row - col)"
LENGTHS = 4  # that are timed, each twice the one before


def inputs(n: int, args) -> list[torch.Tensor]:
    """q, k, v and the slopes."""
    dtype = torch.float16 if args.device.type == "cuda" else torch.float32
    shape = 1, args.heads, n, args.features
    q, k, v = (torch.randn(shape, device=args.device, dtype=dtype) for _ in range(3))
    slopes = 2.0 ** -torch.arange(1, args.heads + 1, device=args.device)
    return [t.requires_grad_() for t in (q, k, v, slopes)]


def by_kernlib(n: int, args) -> Callable[..., torch.Tensor]:
    block = 64 if args.device.type == "cuda" else 32
    window = args.window, args.window
    layout = blocksparse.sliding_window(n, block, window, device=args.device)

    def attend(q, k, v, slope):
        return blocksparse.attention(
            q, k, v, layout, window=window, score=SCORE, axes={"slope": "head"}, slope=slope
        )

    return attend


def by_torch(n: int, args) -> Callable[..., torch.Tensor]:
    place = torch.arange(n, device=args.device)
    distance = (place[:, None] - place).abs()

    def attend(q, k, v, slope):
        bias = (-slope[:, None, None] * distance).masked_fill(distance > args.window, -torch.inf)
        return scaled_dot_product_attention(q, k, v, bias.to(q.dtype)[None])

    return attend


def step(attend: Callable, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients of all tensors."""
    y = attend(*tensors)
    weights = torch.linspace(-1, 1, y.shape[2], device=y.device, dtype=y.dtype)[:, None]
    return [y.detach(), *torch.autograd.grad((weights * y).sum(), tensors)]


def main() -> None:
    sizes = {"tokens": (2048, 8192), "window": (48, 256), "heads": (4, 8), "features": (32, 64)}
    args = parse(__doc__, sizes)
    lengths = [args.tokens >> power for power in reversed(range(LENGTHS))]
    curves: dict[str, list[float]] = {"kernlib, a window": [], "torch, masked": []}
    for n in lengths:
        tensors = inputs(n, args)
        for curve, way in zip(curves.values(), (by_kernlib, by_torch), strict=True):
            call = partial(step, way(n, args), tensors)
            curve.append(milliseconds(call, args.device, repeats=3))
    n = lengths[0]
    tensors = inputs(n, args)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    results = zip(step(by_kernlib(n, args), tensors), step(by_torch(n, args), exact), strict=True)
    error = max(relative_error(y, reference) for y, reference in results)

    def draw():
        page, (weights, time) = figure(2)
        identity = torch.eye(n, device=args.device, dtype=torch.float64)[None, None]
        matrix = by_torch(n, args)(exact[0], exact[1], identity, exact[3])[:, -1].detach()
        cell = max(1, args.window // 24)  # tokens, over which the picture shows the mean
        cells = avg_pool2d(matrix[:, : 96 * cell, : 96 * cell], cell)[0].sqrt().cpu()
        weights.imshow(cells, cmap="Blues", interpolation="none",
                       extent=(0, cell * len(cells), cell * len(cells), 0))  # fmt: skip
        weights.set(title="last head, root of the weights", xlabel="key", ylabel="query")
        for (name, curve), colour in zip(curves.items(), (BLUE, ORANGE), strict=True):
            time.loglog(lengths, curve, "o-", label=name, color=colour)
        time.set(title=f"forward and backward, {args.device.type}", xlabel="tokens", ylabel="ms")
        time.set_xticks(lengths, [str(n) for n in lengths])
        time.minorticks_off()
        time.legend(frameon=False)
        return page

    times = {name: curve[-1] for name, curve in curves.items()}
    finish(args, times, error, 1e-2 if args.device.type == "cuda" else 1e-5, draw)


if __name__ == "__main__":
    main()
