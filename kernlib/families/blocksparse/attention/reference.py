"""Attention over stored blocks in PyTorch, differentiable as often as is asked for, and its
gradient, in the memory of a piece's logits.

On the CPU the layout is read, and rows meet only the keys of their blocks. Elsewhere it is not
read: rows meet all keys, some rows at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.descriptors.score.bounds import structure
from kernlib.descriptors.score.expression import Trees
from kernlib.families.blocksparse.attention import dropout
from kernlib.families.blocksparse.attention.arguments import (
    NAMES,
    OPEN,
    Options,
    Sizes,
    dtypes_of,
    sizes_of,
)
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.pieces import (
    Piece,
    arranged,
    pieces,
    restored,
    stored,
)
from kernlib.families.blocksparse.layout import Layout
from kernlib.families.blocksparse.softmax.reference import scaled
from kernlib.runtime import expressions
from kernlib.runtime.arguments import no_autocast
from kernlib.runtime.dtypes import accumulator

LOWEST = -torch.inf


class Case(NamedTuple):
    """A call, its tensors with the dimensions of pieces: ``tensors`` are q, k, v and the captured
    ones by name, features behind."""

    descriptor: BlockSparseAttention
    layout: Layout
    sizes: Sizes
    options: Options
    tensors: dict[str, torch.Tensor]
    trees: Trees

    @classmethod
    def of(cls, descriptor, operands: tuple, options: Options, captured: dict) -> Case:
        layout, q, k, v = operands
        sizes = sizes_of(operands)
        heads = sizes.kv_heads, sizes.group
        tensors = {
            "q": q.reshape(sizes.batch, *heads, sizes.queries, 1, sizes.features),
            "k": k[:, :, None, None],
            "v": v[:, :, None, None],
        }
        axes = dict(descriptor.captured)
        tensors |= {name: arranged(captured[name], axes[name], sizes) for name in descriptor.names}
        trees = descriptor.expression.trees(dtypes_of(descriptor, captured))
        return cls(descriptor, layout, sizes, options, tensors, trees)

    @property
    def is_empty(self) -> bool:
        """Whether there is no query, or none has a key."""
        return 0 in (self.sizes.keys, self.sizes.queries, self.sizes.batch, self.sizes.heads)

    def pieces(self) -> list[list[Piece]]:
        left, right = self.options.window if self.descriptor.window else (OPEN, OPEN)
        right = min(right, 0) if self.descriptor.causal else right
        if self.trees.mask is not None:
            mask = structure(self.trees.mask)
            left = left if mask.left is None else min(left, mask.left)
            right = right if mask.right is None else min(right, mask.right)
        return pieces(self.layout, self.sizes, left, right)

    def lse_type(self) -> torch.dtype:
        return accumulator(self.tensors["q"].dtype)


def attention(descriptor, operands: tuple, options: Options, captured: dict) -> tuple:
    """``out`` in q's dtype and ``lse`` in that of sums."""
    case = Case.of(descriptor, operands, options, captured)
    q, lse = operands[1], case.lse_type()
    if case.is_empty:
        empty = torch.where(torch.zeros((), dtype=torch.bool, device=q.device), q.sum(), 0.0)
        out = empty.expand(case.sizes.out).contiguous()
        return out, q.new_full(case.sizes.out[:3], LOWEST, dtype=lse)
    places, wide = _places(case), lse
    groups = []
    for group in case.pieces():
        parts = []
        for piece in group:
            views = {name: piece.of(t) for name, t in case.tensors.items()}
            out, logs = _part(case, piece, places, views, wide)
            parts.append((out.to(q.dtype), logs))
        groups.append([torch.cat(outputs, 3) for outputs in zip(*parts, strict=True)])
    out, logs = (_joined(case, list(outputs)) for outputs in zip(*groups, strict=True))
    return out.contiguous(), logs.squeeze(-1).contiguous()


def _joined(case: Case, parts: list[torch.Tensor]) -> torch.Tensor:
    """The parts of each head of the layout as (batch, heads, rows, features)."""
    parts = [t.reshape(t.shape[0], t.shape[1] * t.shape[2], *t.shape[3:]) for t in parts]
    joined = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return joined.reshape(case.sizes.batch, case.sizes.heads, *joined.shape[2:])


def gradient(
    descriptor, operands: tuple, options: Options, captured: dict, grads: tuple, needs: tuple
) -> list:
    """The gradients of q, k, v and the captured tensors that are needed, None for others, from
    those of out and lse, either of which may be None. They are computed a piece at a time, so that
    no graph of all pieces is kept."""
    case = Case.of(descriptor, operands, options, captured)
    names = [name for name, need in zip(case.tensors, needs, strict=True) if need]
    wide = case.lse_type()
    totals = {}
    for name in names:
        t = case.tensors[name]
        totals[name] = t.new_zeros(t.shape, dtype=accumulator(t.dtype))
    sizes, places = case.sizes, _places(case)
    shape = sizes.batch, sizes.kv_heads, sizes.group, sizes.queries, 1
    arrived = [None if t is None else t.reshape(*shape, *t.shape[3:]) for t in (grads[0], grads[1])]
    for piece in [] if case.is_empty else [p for group in case.pieces() for p in group]:
        views = {name: piece.of(t) for name, t in case.tensors.items()}
        leaves = {n: views[n].to(totals[n].dtype).detach().requires_grad_() for n in names}
        with torch.enable_grad():
            outputs = _part(case, piece, places, views | leaves, wide)
        pairs = []
        for y, grad in zip(outputs, arrived, strict=True):
            if grad is not None and y.requires_grad:
                pairs.append((y, piece.of(grad).reshape(y.shape).to(y.dtype)))
        if not pairs:
            continue
        results, own_grads = zip(*pairs, strict=True)
        part_grads = torch.autograd.grad(results, [*leaves.values()], own_grads, allow_unused=True)
        for name, part in zip(leaves, part_grads, strict=True):
            if part is not None:
                piece.add(totals[name], part)
    return [_returned(case, name, totals.get(name), operands, captured) for name in case.tensors]


def recorded_gradient(
    descriptor, operands: tuple, options: Options, captured: dict, grads: tuple, needs: tuple
) -> list:
    """:func:`gradient` by torch's own record of the attention computed again, differentiable where
    gradients are recorded."""
    layout, *tensors = operands
    again = torch.is_grad_enabled()
    inputs = dict(zip(NAMES, tensors, strict=True)) | captured
    with torch.enable_grad(), no_autocast(tensors[0]):
        leaves = {  # aliases, lest two of the arguments be one tensor, or one be made of another
            name: t.view_as(t) if t.requires_grad and again else t.detach().requires_grad_()
            for (name, t), need in zip(inputs.items(), needs, strict=True)
            if need
        }
        q, k, v, *rest = (leaves.get(name, t) for name, t in inputs.items())
        named = dict(zip(captured, rest, strict=True))
        results = attention(descriptor, (layout, q, k, v), options, named)
    pairs = [
        (y, grad)
        for y, grad in zip(results, grads, strict=True)
        if grad is not None and y.requires_grad
    ]
    by_name = {}
    if pairs:
        recorded, arrived = zip(*pairs, strict=True)
        input_grads = torch.autograd.grad(
            recorded, [*leaves.values()], arrived, create_graph=again, allow_unused=True
        )
        by_name = dict(zip(leaves, input_grads, strict=True))
    answers = []
    for (name, t), need in zip(inputs.items(), needs, strict=True):
        grad = by_name.get(name)
        answers.append(torch.zeros_like(t) if need and grad is None else grad)
    return answers


def _returned(case: Case, name: str, total, operands: tuple, captured: dict):
    """A gradient as its tensor is."""
    if total is None:
        return None
    if name in NAMES:
        tensor = operands[1 + NAMES.index(name)]
        return total.reshape(tensor.shape).to(tensor.dtype)
    axes = dict(case.descriptor.captured)[name]
    tensor = captured[name]
    return restored(total, axes).reshape(tensor.shape).to(tensor.dtype).contiguous()


def _places(case: Case) -> dict[str, torch.Tensor]:
    """Indices of batch, head, row and column, and the stored blocks, with the dimensions of
    pieces."""
    sizes, device = case.sizes, case.tensors["q"].device
    batch, heads, rows, cols = (
        torch.arange(n, dtype=torch.int64, device=device)
        for n in (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
    )
    return {
        "batch": batch[:, None, None, None, None],
        "head": heads.reshape(1, sizes.kv_heads, sizes.group, 1, 1),
        "row": rows[None, None, None, :, None],
        "col": cols[None, None, None, None],
        "stored": stored(case.layout, sizes),
    }


def _part(case: Case, piece: Piece, places: dict, own: dict, wide: torch.dtype) -> tuple:
    """A piece's ``out`` (b, key heads, query heads, rows, features) and ``lse`` (..., rows, 1)."""
    indices = {name: piece.of(places[name]) for name in ("batch", "head", "row", "col")}
    q, k, v = (own[name].to(wide) for name in ("q", "k", "v"))
    captured = {name: own[name] for name in case.descriptor.names}
    mask = _kept(case, piece, places, indices, captured)
    # Rows and columns of no pair are 0 here: 0 times the NaN of a padded row would be NaN.
    q = torch.where(mask.any(4, keepdim=True)[..., None], q, 0.0)
    is_read = mask.any(3, keepdim=True).any(2, keepdim=True)[..., None]
    k, v = torch.where(is_read, k, 0.0), torch.where(is_read, v, 0.0)
    logits = scaled(_times(q.squeeze(4), k.squeeze(3).squeeze(2).mT), case.options.scale)
    if case.trees.score is not None:
        logits = torch.where(mask, logits, 0.0)  # for its derivative where a key is left out
        logits = expressions.score(case.trees.score, logits, indices | captured)
    logits = torch.where(mask, logits, LOWEST)
    most = logits.detach().amax(-1, keepdim=True)
    most = torch.where(most == LOWEST, 0.0, most)
    powers = torch.exp(logits - most)
    sums = powers.sum(-1, keepdim=True)
    is_alone = sums == 0.0
    sums = torch.where(is_alone, 1.0, sums)
    weights = _dropped(case, indices, powers)
    out = torch.where(is_alone, 0.0, _times(weights, v.squeeze(3).squeeze(2)) / sums)
    return out, torch.where(is_alone, LOWEST, most + torch.log(sums))


def _times(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Matrices of (b, key heads, query heads, rows, n) times those of (b, key heads, n, m)."""
    batch, heads, group, rows, depth = x.shape
    product = x.reshape(batch, heads, group * rows, depth) @ y
    return product.reshape(batch, heads, group, rows, y.shape[-1])


def _kept(case: Case, piece: Piece, places: dict, indices: dict, captured: dict):
    """The logits that stay, as bools that broadcast to those of a piece."""
    descriptor, options = case.descriptor, case.options
    row, col = indices["row"], indices["col"]
    height, width = case.layout.block
    # Slices of rows and columns are the pieces' own: blocks have fewer.
    stored = piece._replace(rows=slice(None), cols=None).of(places["stored"])
    stored = stored.index_select(3, torch.div(row.flatten(), height, rounding_mode="floor"))
    mask = stored.index_select(4, torch.div(col.flatten(), width, rounding_mode="floor"))
    if descriptor.causal:
        mask = mask & (col <= row)
    if descriptor.window:
        left, right = options.window
        mask = mask & (col >= row - left) & (col <= row + right)
    for lengths, place in ((options.q_lengths, row), (options.kv_lengths, col)):
        if lengths is not None:
            mask = mask & (place < piece.of(lengths[:, None, None, None, None]))
    if case.trees.mask is not None:
        values = indices | {name: t.detach() for name, t in captured.items()}
        mask = mask & expressions.mask(case.trees.mask, values, case.lse_type())
    return mask


def _dropped(case: Case, indices: dict, weights: torch.Tensor) -> torch.Tensor:
    """Weights that a dropout leaves."""
    options = case.options
    if not case.descriptor.dropout:
        return weights
    line = indices["batch"] * case.sizes.heads + indices["head"]
    p = options.dropout_p
    mask = dropout.kept(options.seed, p, line, indices["row"], indices["col"])
    return torch.where(mask, weights * dropout.share(p), 0.0)
