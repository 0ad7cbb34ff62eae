"""Attention within documents that are packed into one row.

Texts of many lengths are trained on in one long row, without padding, and no token may look into
another text: key j counts for query i where `document_i = document_j` and `j <= i`. With
`kl.blocksparse.attention` that condition is an expression, the numbers of the documents are tensors
that it reads, and the layout leaves out all blocks in which it holds nowhere. The plain ways are
torch's attention with a mask of all pairs, or a batch of documents padded to the longest.

**Your own data.** Put the document of each token, in ascending order, in the place of `document`,
and your q, k and v (batch, heads, tokens, features). If each step packs other documents, make the
layout once with a `capacity`, the most blocks that it may store, and call `layout.update_(mask)`,
which does not wait for the device. The condition may say more, such as `and row - col < 512`.
"""

from functools import partial

import torch
from harness import BLUE, GREY, ORANGE, figure, finish, milliseconds, parse, relative_error
from torch.nn.functional import one_hot, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from kernlib import blocksparse

MASK = "query_document == key_document and col <= row"
AXES = {"query_document": "row", "key_document": "col"}


def packing(args) -> torch.Tensor:
    """The document of each token: of very different lengths, as those of texts are."""
    parts = torch.randn(args.documents).exp()
    ends = (args.tokens * parts.cumsum(0) / parts.sum()).round().long()
    document = torch.searchsorted(ends[:-1], torch.arange(args.tokens), right=True)
    return document.unique(return_inverse=True)[1].to(args.device)  # without empty ones


def layout_of(document: torch.Tensor, block: int) -> blocksparse.Layout:
    """The blocks in which some query meets a key of its document that is not behind it."""
    first, last = document.view(-1, block)[:, 0], document.view(-1, block)[:, -1]
    shared = (first[:, None] <= last) & (first <= last[:, None])
    return blocksparse.Layout(shared.tril(), block)


def main() -> None:
    sizes = {"tokens": (2048, 32768), "documents": (12, 48), "heads": (4, 8), "features": (32, 64)}
    args = parse(__doc__, sizes)
    on_gpu = args.device.type == "cuda"
    document, block = packing(args), 64 if on_gpu else 32
    lengths = document.bincount().tolist()
    layout = layout_of(document, block)
    shape, dtype = (3, args.heads, args.tokens, args.features), torch.float32
    qkv = torch.randn(shape, device=args.device, dtype=torch.float16 if on_gpu else dtype)
    qkv.requires_grad_()

    def by_kernlib(qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv[:, None]
        return blocksparse.attention(q, k, v, layout, mask=MASK, axes=AXES,
                                     query_document=document, key_document=document)[0]  # fmt: skip

    def by_mask(qkv: torch.Tensor) -> torch.Tensor:
        mask = (document[:, None] == document).tril()
        return scaled_dot_product_attention(*qkv[:, None], attn_mask=mask)[0]

    def by_padding(qkv: torch.Tensor) -> torch.Tensor:
        apart = qkv.permute(2, 0, 1, 3).split(lengths)  # (tokens, 3, heads, features) of each
        q, k, v = pad_sequence(apart, batch_first=True).permute(2, 0, 3, 1, 4)
        y = scaled_dot_product_attention(q, k, v, is_causal=True)
        return torch.cat([part[:, :n] for part, n in zip(y, lengths, strict=True)], 1)

    def one_by_one(qkv: torch.Tensor) -> torch.Tensor:
        parts = [scaled_dot_product_attention(*part[:, None], is_causal=True)[0]
                 for part in qkv.split(lengths, 2)]  # fmt: skip
        return torch.cat(parts, 1)

    def step(way, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = way(qkv)
        weights = torch.linspace(-1, 1, y.shape[1], device=y.device, dtype=y.dtype)[:, None]
        return y.detach(), *torch.autograd.grad((weights * y).sum(), qkv)

    ways = {"kernlib, packed": by_kernlib, "torch, masked": by_mask, "torch, padded": by_padding}
    times = {name: milliseconds(partial(step, way, qkv), args.device, repeats=3)
             for name, way in ways.items()}  # fmt: skip
    exact = step(one_by_one, qkv.detach().double().requires_grad_())
    error = max(map(relative_error, step(by_kernlib, qkv), exact))

    def draw():
        page, (pairs, bars) = figure(2)
        of_blocks = document.view(-1, block)
        parts = one_hot(of_blocks, len(lengths)).float().mean(1)  # of a block in each document
        shade = layout.mask().view(layout.grid) * (0.35 + 0.65 * parts @ parts.T)
        pairs.imshow(shade.cpu(), cmap="Blues", vmin=0, vmax=1,
                     extent=(0, args.tokens, args.tokens, 0), interpolation="nearest",
                     rasterized=True)  # fmt: skip
        pairs.set(title=f"stored blocks of {block} x {block}", xlabel="key", ylabel="query")
        counts = {
            "pairs that count": sum(n * (n + 1) // 2 for n in lengths),
            "stored blocks": layout.nnz * block**2,
            "padded, causal": len(lengths) * max(lengths) ** 2 // 2,
            "mask of all pairs": args.tokens**2,
        }
        percent = [100 * count / args.tokens**2 for count in counts.values()]
        drawn = bars.barh(list(counts), percent, color=(GREY, BLUE, ORANGE, ORANGE))
        bars.bar_label(drawn, fmt=" %.0f %%")
        bars.invert_yaxis()
        bars.margins(x=0.2)
        bars.set(title="logits that are computed", xlabel="% of all pairs")
        return page

    finish(args, times, error, 1e-2 if on_gpu else 1e-5, draw)


if __name__ == "__main__":
    main()
