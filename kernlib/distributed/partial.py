"""What processes exchange for an attention: queries, keys and values before, and parts of results
behind, with gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from kernlib.distributed.communicator import Processes

_ALIGNED = 16  # bytes, at which each tensor begins in what is exchanged


class Spread(torch.autograd.Function):
    """q, k and v of the parts of a :class:`kernlib.distributed.sequence.Plan`: near, border and
    served, three each, of no positions where there is no such part."""

    @staticmethod
    def forward(ctx, communicator, plan, *tensors):
        ctx.request = communicator, plan, [t.shape for t in tensors]
        ctx.like = tensors[0].new_empty(0)
        ctx.set_materialize_grads(False)
        q, k, v = tensors
        sent, counts = _ways(plan)
        parts = [[t.index_select(2, rows) for rows in sent[at]] for at, t in enumerate(tensors)]
        shapes = [[_resized(t, n) for n in counts[at]] for at, t in enumerate(tensors)]
        if plan.has_exchange:
            parts = _trade(communicator, parts, shapes)
        else:
            parts = [[t[:, :, :0]] for t in tensors]
        served, *border = (torch.cat(each, 2) for each in parts)
        near = (t.view_as(t) for t in tensors)
        outs = (
            *near, q.index_select(2, plan.border_rows), *border,
            served, k.view_as(k), v.view_as(v),
        )  # fmt: skip
        needs = zip(outs, 3 * ctx.needs_input_grad[2:], strict=True)
        ctx.mark_non_differentiable(*(t for t, need in needs if not need))
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        communicator, plan, shapes = ctx.request
        places = [place for place in range(3) if ctx.needs_input_grad[2 + place]]
        texts = {f"gradient of {'qkv'[place]}": str(ctx.like.dtype) for place in places}
        communicator.agree("gradients", lambda: texts)
        near, border, served = grads[:3], grads[3:6], grads[6:]
        # Nothing else has these tensors, so that they may be written.
        sums = [
            ctx.like.new_zeros(shape) if grad is None else grad
            for grad, shape in zip(near, shapes, strict=True)
        ]
        if border[0] is not None:
            sums[0].index_add_(2, plan.border_rows, border[0])
        for at in (1, 2):
            if served[at] is not None:
                sums[at] += served[at]
        if plan.has_exchange:
            # Gradients go back as the tensors came.
            sent, counts = _ways(plan)
            back = [served[0], *border[1:]]
            back = [
                ctx.like.new_zeros(_resized(shape, sum(count))) if grad is None else grad
                for grad, shape, count in zip(back, shapes, counts, strict=True)
            ]
            parts = _trade(
                communicator,
                [back[at].split(counts[at], 2) for at in places],
                [[_resized(shapes[at], len(rows)) for rows in sent[at]] for at in places],
            )
            for at, each in zip(places, parts, strict=True):
                for rows, part in zip(sent[at], each, strict=True):
                    sums[at].index_add_(2, rows, part)
        return None, None, *(sums[at] if at in places else None for at in range(3))


class Merge(torch.autograd.Function):
    """The results of this process's rows: of its columns, of the border, and what others serve.

    With parts p, ``lse = log sum_p exp(lse_p)`` and ``out = sum_p exp(lse_p - lse) out_p``. Rows of
    one part alone stay as they are.
    """

    @staticmethod
    def forward(ctx, communicator, plan, near, near_lse, border, border_lse, served, served_lse):
        ctx.request = communicator, plan
        ctx.set_materialize_grads(False)
        rows, places = plan.merged_rows, []
        parts = [(near.index_select(2, rows), near_lse.index_select(2, rows))]
        if border is not None:
            places.append(plan.merged_border)
            parts.append((border, border_lse))
        if plan.has_partial:
            if served is None:
                served, served_lse = near[:, :, :0], near_lse[:, :, :0]
            received = _trade(
                communicator,
                [t.split(plan.received_rows, 2) for t in (served, served_lse)],
                [[_resized(t, len(of)) for of in plan.sent_rows] for t in (near, near_lse)],
            )
            places += plan.merged_sent
            parts += zip(*received, strict=True)
        total = parts[0][1].clone()
        for place, (_, lse) in zip(places, parts[1:], strict=True):
            total.index_copy_(2, place, torch.logaddexp(total.index_select(2, place), lse))
        places.insert(0, torch.arange(len(rows), dtype=rows.dtype, device=rows.device))
        merged = torch.zeros_like(parts[0][0], dtype=total.dtype)
        for place, (out, lse) in zip(places, parts, strict=True):
            merged.index_add_(2, place, _weights(lse, total, place) * out)
        out, lse = near.clone(), near_lse.clone()
        out.index_copy_(2, rows, merged.to(out.dtype))
        lse.index_copy_(2, rows, total)
        ctx.shapes = near.shape, near_lse.shape
        ctx.places = places
        ctx.save_for_backward(merged, total, *(t for part in parts for t in part))
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, grad_lse):
        communicator, plan = ctx.request
        merged, total, *parts = ctx.saved_tensors
        like = parts[0].new_zeros, total.new_zeros
        near = [
            zeros(shape) if each is None else each.clone()
            for each, zeros, shape in zip((grad, grad_lse), like, ctx.shapes, strict=True)
        ]
        of_out, of_lse = (t.index_select(2, plan.merged_rows) for t in near)
        of_out = of_out.to(total.dtype)
        grads = []  # of parts
        for place, out, lse in zip(ctx.places, parts[::2], parts[1::2], strict=True):
            above = of_out.index_select(2, place)
            apart = out - merged.index_select(2, place)
            inner = (above * apart).sum(-1) + of_lse.index_select(2, place)
            weights = _weights(lse, total, place)
            grads.append(((weights * above).to(out.dtype), weights[..., 0] * inner))
        for to, part in zip(near, grads[0], strict=True):
            to.index_copy_(2, plan.merged_rows, part)
        grads = grads[1:]
        border = grads.pop(0) if plan.border is not None else (None, None)
        served = None, None
        if plan.has_partial:
            received = _trade(
                communicator,
                list(zip(*grads, strict=True)),
                [[_resized(shape, n) for n in plan.received_rows] for shape in ctx.shapes],
            )
            if plan.served is not None:
                served = [torch.cat(each, 2) for each in received]
        return None, None, *near, *border, *served


def _ways(plan) -> tuple[tuple[list[torch.Tensor], ...], tuple[list[int], ...]]:
    """Of q, k and v by rank: places of what is sent, and counts of what is received."""
    return (
        (plan.sent_rows, plan.sent_cols, plan.sent_cols),
        (plan.received_rows, plan.received_cols, plan.received_cols),
    )


def _resized(like: torch.Tensor | torch.Size, count: int) -> tuple[int, ...]:
    """A shape of so many positions."""
    shape = like if isinstance(like, torch.Size) else like.shape
    return (*shape[:2], count, *shape[3:])


def _weights(lse: torch.Tensor, total: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Of a part of rows' sums, (..., 1): 0 for rows without columns."""
    weights = (lse - total.index_select(2, place)).exp()
    return torch.where(lse == -torch.inf, 0.0, weights)[..., None]


def _trade(
    communicator: Processes,
    parts: Sequence[Sequence[torch.Tensor]],
    shapes: Sequence[Sequence[tuple[int, ...]]],
) -> list[list[torch.Tensor]]:
    """Exchange parts of tensors, a list by rank of each tensor, in one call: what comes has
    ``shapes``, in lists alike."""
    dtypes = [each[0].dtype for each in parts]
    pieces, sends, receives = [], [], []
    for mine, theirs in zip(zip(*parts, strict=True), zip(*shapes, strict=True), strict=True):
        sends.append(sum(_padded(t.nbytes) for t in mine))
        receives.append(sum(_padded(_bytes_of(*of)) for of in zip(theirs, dtypes, strict=True)))
        for t in mine:
            pieces.append(t.contiguous().view(-1).view(torch.uint8))
            if t.nbytes % _ALIGNED:
                pieces.append(pieces[0].new_zeros(_padded(t.nbytes) - t.nbytes))
    packed = communicator.exchange(torch.cat(pieces), sends, receives)
    received, at = [[] for _ in dtypes], 0
    for theirs in zip(*shapes, strict=True):
        for to, shape, dtype in zip(received, theirs, dtypes, strict=True):
            size = _bytes_of(shape, dtype)
            to.append(packed[at : at + size].view(dtype).view(shape))
            at += _padded(size)
    return received


def _bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _padded(size: int) -> int:
    return size + -size % _ALIGNED
