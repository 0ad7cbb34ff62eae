"""Block-sparse attention of a sequence whose positions are spread over processes: context
parallelism."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernlib.debug import eager_only
from kernlib.descriptors.base import check_flag
from kernlib.distributed import sequence
from kernlib.distributed.communicator import Processes, as_communicator
from kernlib.distributed.partial import Merge, Spread
from kernlib.distributed.rows import autocast_of, replicated, rows_key, rows_texts, said, value_key
from kernlib.distributed.sequence import Part, Rule, Weights
from kernlib.families.blocksparse.attention.arguments import (
    MOST_SEED,
    OPEN,
    Options,
    Sizes,
    autocast,
    check_lengths,
    checked_seed,
    checked_window,
)
from kernlib.families.blocksparse.attention.descriptor import BY_DIMENSIONS
from kernlib.families.blocksparse.attention.functions import attention as local_attention
from kernlib.families.blocksparse.checks import check_layout
from kernlib.families.blocksparse.layout import Layout
from kernlib.runtime.tensors import check_dense

if TYPE_CHECKING:
    from kernlib.distributed.communicator import Group

_POSITION = re.compile(r"\b(row|col)\b")  # in a score or mask
# Captured tensors of positions in the sequence, and of lengths.
_ROW, _COL, _QUERIES, _KEYS = "sequence_row", "sequence_col", "sequence_queries", "sequence_keys"
_AXES = {_ROW: ("row",), _COL: ("col",), _QUERIES: ("batch",), _KEYS: ("batch",)}


class Call(NamedTuple):
    """What a call says beside q, k, v and the layout."""

    rule: Rule
    window: object
    score: str | None
    mask: str | None
    q_lengths: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    axes: dict
    captured: dict[str, torch.Tensor]
    scale: float | torch.Tensor | None
    dropout_p: float


@eager_only
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    group: Group = None,
    balanced: bool = False,
    scale: float | torch.Tensor | None = None,
    causal: bool = False,
    window: int | tuple[int | None, int | None] | None = None,
    score: str | None = None,
    mask: str | None = None,
    q_lengths: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | torch.Tensor | None = None,
    return_lse: bool = False,
    axes: dict[str, str | tuple[str, ...]] | None = None,
    **captured: torch.Tensor,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """This process's positions of ``softmax(score(scale * q k^T)) v`` over the stored blocks of a
    ``layout``, for sequences that are spread over processes.

    - ``q`` (B, H, Lq_r, E), ``k`` (B, HK, Lk_r, E), ``v`` (B, HK, Lk_r, EV): the positions of this
      process, those of :func:`sequence_shards`; the result is (B, H, Lq_r, EV). Together they are
      as many as the layout has: a shorter sequence is filled up, and has lengths.
    - ``layout``: of the full sequence (Lq, Lk), the same in all processes.
    - ``group``: as that of :func:`kernlib.distributed.kernel_matmul`.
    - ``balanced``: a piece of the head and one of the tail for each process, for causal attention;
      as that of :func:`sequence_shards`.
    - ``scale``, ``causal``, ``window``, ``score``, ``mask``, ``q_lengths``, ``kv_lengths``,
      ``dropout_p``, ``seed``, ``return_lse``, ``axes`` and ``captured`` tensors: as those of
      :func:`kernlib.blocksparse.attention`, of the full sequence, and the same in all processes.
      Positions count from its first. What a ``seed`` drops depends on the number of processes.

    What the layout needs is exchanged once: keys and values of the columns that another process's
    rows see, or, for rows that see most columns, their queries, whose partial results come back.
    Parts are merged by their log-sum-exps. Differentiable by q, k, v, and by captured tensors,
    whose gradients are the sums of all processes'; not twice.

    Raises what that raises, and ValueError and TypeError, in all processes, for other positions
    than those of :func:`sequence_shards` and for what differs between processes. Partial results
    are those of Ring Attention (Liu et al., 2023), of which only the blocks of a layout are sent.

    Example:
        >>> layout = kl.blocksparse.sliding_window(65536, 128, (1023, 0))  # doctest: +SKIP
        >>> y = kl.distributed.attention(q, k, v, layout, window=(1023, 0))  # doctest: +SKIP
    """
    communicator = as_communicator(group)
    names = {
        "scale": scale, "causal": causal, "window": window, "score": score, "mask": mask,
        "q_lengths": q_lengths, "kv_lengths": kv_lengths, "dropout_p": dropout_p, "seed": seed,
        "return_lse": return_lse, "axes": axes, **captured,
    }  # fmt: skip

    def texts() -> dict[str, str]:
        return _texts(communicator, q, k, v, layout, balanced, names)

    def key() -> tuple:
        return _key(q, k, v, layout, balanced, names)

    communicator.agree("attention", texts, key=key)
    if communicator.size == 1:
        return local_attention(q, k, v, layout, **names)
    _, q, k, v = autocast((layout, q, k, v))
    captured = {name: replicated(t, communicator) for name, t in captured.items()}
    left, right = checked_window(window)
    call = Call(
        Rule(causal, left, right), window, score, mask, q_lengths, kv_lengths, axes or {}, captured,
        scale, dropout_p,
    )  # fmt: skip
    result = q.shape[1] * (q.element_size() * v.shape[3] + 4)  # with a log-sum-exp
    weights = Weights(
        q.shape[1] * q.shape[3] * q.element_size() + result,
        (k.shape[3] + v.shape[3]) * k.shape[1] * k.element_size(),
    )
    rank, size = communicator.rank, communicator.size
    plan = sequence.plan_of(layout, rank, size, balanced, call.rule, weights)
    if dropout_p:
        seed = checked_seed(q, seed)
    tensors = Spread.apply(communicator, plan, q, k, v)
    has_lse = return_lse or plan.has_partial or plan.border is not None
    results = []
    for place, part in enumerate((plan.near, plan.border, plan.served)):
        if part is None:
            results += [None, None]
            continue
        options = _options(call, part)
        if dropout_p:  # another in each part of each process
            options |= {"seed": (seed + 3 * rank + place) % MOST_SEED}
        operands = tensors[3 * place : 3 * place + 3]
        out = local_attention(*operands, part.layout, return_lse=has_lse, **options)
        results += out if has_lse else (out, None)
    out, lse = results[:2]
    if plan.has_partial or plan.border is not None:
        out, lse = Merge.apply(communicator, plan, *results)
    return (out, lse) if return_lse else out


def _options(call: Call, part: Part) -> dict:
    """The arguments of an attention of a part, whose rows and columns have other numbers than in
    the sequence: what depends on these reads them from captured tensors."""
    rule = call.rule
    options = {"scale": call.scale, "dropout_p": call.dropout_p, "axes": dict(call.axes)}
    conditions = [f"({_at_positions(call.mask)})"] if call.mask else []
    if rule.causal and part.is_cut:
        if part.is_alike:
            options["causal"] = True
        else:
            conditions.append(f"{_COL} <= {_ROW}")
    if call.window is not None and part.is_cut:
        if part.is_alike and part.is_stretch:
            options["window"] = call.window
        else:
            conditions.append(f"{_ROW} - {rule.left} <= {_COL} <= {_ROW} + {rule.right}")
    for lengths, name, place in (
        (call.q_lengths, _QUERIES, _ROW), (call.kv_lengths, _KEYS, _COL),
    ):  # fmt: skip
        if lengths is not None:
            options[name] = lengths
            conditions.append(f"{place} < {name}")
    for name, t in call.captured.items():
        options[name] = _of_part(t, _axes_of(name, t, call.axes), part)
    options |= {"score": _at_positions(call.score), "mask": " and ".join(conditions) or None}
    words = re.findall(r"\w+", f"{options['score']} {options['mask']}")
    for name, positions in ((_ROW, part.rows), (_COL, part.cols)):
        if name in words:
            options[name] = positions
    options["axes"] |= {name: axes for name, axes in _AXES.items() if name in options}
    return options


def _at_positions(text: str | None) -> str | None:
    """A score or mask that reads positions of the sequence."""
    if text is None:
        return None
    return _POSITION.sub(lambda match: _ROW if match[0] == "row" else _COL, text)


def _axes_of(name: str, t: torch.Tensor, axes: dict) -> tuple[str, ...]:
    named = axes.get(name, BY_DIMENSIONS.get(t.dim(), ()))
    return (named,) if isinstance(named, str) else tuple(named)


def _of_part(t: torch.Tensor, axes: tuple[str, ...], part: Part) -> torch.Tensor:
    """A captured tensor at the rows and columns of a part."""
    for dim, axis in enumerate(axes):
        positions = {"row": part.rows, "col": part.cols}.get(axis)
        if positions is not None and t.shape[dim] != 1:
            t = t.index_select(dim, positions)
    return t


def _texts(communicator: Processes, q, k, v, layout, balanced, names: dict) -> dict[str, str]:
    """What all processes must agree on. Raises what an attention of no batch raises."""
    check_layout(layout)
    check_flag("balanced", balanced)
    tensors = {"q": q, "k": k, "v": v}
    check_dense(tuple(tensors), **tensors)
    for name in _AXES:
        if name in names:
            raise ValueError(f"{name} names positions or lengths here: rename the captured tensor")
    if "out" in names:
        raise TypeError("out is no argument over processes: parts of the result are merged")
    texts = {"layout": layout.text, "balanced": str(balanced)}
    full = []
    for name, t in tensors.items():
        communicator.check_device(name, t)
        if t.dim() != 4:
            raise ValueError(
                f"{name} must be (batch, heads, positions, features), got {tuple(t.shape)}"
            )
        dim = int(name != "q")
        counts = sequence.counts_of(layout, communicator.size, dim, balanced)
        if t.shape[2] != counts[communicator.rank]:
            raise ValueError(
                f"{name} must have {counts[communicator.rank]} positions in this process, of "
                f"{counts} by rank (kernlib.distributed.sequence_shards), got {t.shape[2]}"
            )
        texts |= rows_texts(name, t.movedim(2, 0))
        full.append(t.new_empty((0, t.shape[1], layout.shape[dim], t.shape[3])))
    texts |= {"contents of layout": sequence.digest_of(layout), "autocast": autocast_of(q)}
    _check_lengths(q, k, layout, names)
    for name, value in names.items():
        if name != "seed" or not isinstance(value, torch.Tensor):
            texts[name] = said(value)
    several = q.shape[0] * q.shape[1]
    if layout.heads == several != q.shape[1]:  # which no batch has
        layout = Layout(layout.mask()[: q.shape[1]], layout.block, device=layout.device)
    with torch.no_grad():
        local_attention(*full, layout, **_without_batch(names))
    return texts


def _check_lengths(q, k, layout: Layout, names: dict) -> None:
    """Raises TypeError and ValueError."""
    lengths = {name: names[name] for name in ("q_lengths", "kv_lengths")}
    check_dense((), **lengths)
    for name, t in lengths.items():
        if t is not None and tuple(t.shape) != q.shape[:1]:
            raise ValueError(f"{name} must have shape ({q.shape[0]},), got {tuple(t.shape)}")
    options = Options(1.0, (OPEN, OPEN), *lengths.values(), 0.0, 0, False)
    group = q.shape[1] // max(1, k.shape[1])
    check_lengths(options, Sizes(q.shape[0], k.shape[1], group, *layout.shape, q.shape[3], 0))


def _key(q, k, v, layout, balanced, names: dict) -> tuple:
    """What checks and texts depend on. Raises TypeError or AttributeError for what is not plain."""
    parts = [layout.key, sequence.digest_of(layout), repr(balanced), autocast_of(q)]
    parts += [(t.shape[:1], rows_key(t)) for t in (q, k, v)]
    for name, value in names.items():
        if isinstance(value, torch.Tensor):
            parts.append((name, value.shape, value_key(value)))
        else:
            parts.append((name, repr(value)))
    return tuple(parts)


def _without_batch(names: dict) -> dict:
    """Arguments of an attention of no batch, which draws no seed."""
    axes = names["axes"] if isinstance(names["axes"], dict) else {}
    rest = {}
    for name, value in names.items():
        is_length = name in ("q_lengths", "kv_lengths")
        if isinstance(value, torch.Tensor) and value.dim():
            of = ("batch",) if is_length else _axes_of(name, value, axes)
            for dim, axis in enumerate(of[: value.dim()]):
                if axis == "batch" and (is_length or value.shape[dim] != 1):
                    value = value.narrow(dim, 0, 0)
        rest[name] = value
    if rest["seed"] is None and rest["dropout_p"] != 0.0:
        rest["seed"] = 0
    return rest
