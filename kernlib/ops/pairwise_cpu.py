"""The pairwise op on CPU tensors: the same checks, then the reference."""

from __future__ import annotations

import torch

from kernlib.ops import pairwise_checks as checks
from kernlib.ops.hyperparameters import accumulator, host_value
from kernlib.reference.pairwise import pairwise


def run(descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters) -> torch.Tensor:
    """What :func:`kernlib.ops.pairwise.run` documents, computed in PyTorch."""
    call = checks.check_call(
        descriptor, a, b, out, accumulate, row_offset, col_offset, hyperparameters
    )
    fresh = out is None
    out = torch.empty(call.out_shape, dtype=call.out_dtype) if fresh else out
    second = a if b is None else b
    if torch.is_grad_enabled():
        checks.refuse_gradients(a, second, out, hyperparameters)
    tensors = (a, second, out)
    spans = tuple(checks.span(t) for t in tensors)
    if not fresh and checks.ranges_meet(tuple(t.data_ptr() for t in tensors), spans):
        checks.refuse_overlap(a, second, out)
    result = compute(descriptor, a, second, call, row_offset - col_offset, hyperparameters)
    result = result.view(out.shape)
    out.copy_(out.to(result.dtype) + result if accumulate else result)
    return out


def compute(descriptor, a, b, call, diagonal: int, hyperparameters: dict) -> torch.Tensor:
    """The (L, M, N) result in the arithmetic's dtype, for checked arguments."""
    wide = accumulator(a.dtype)
    first, second = (
        (x if x.dim() == 3 else x[None]).expand(call.batch, -1, -1).to(wide) for x in (a, b)
    )
    values = dict(hyperparameters)
    for name in set(values) & {"p", "inner_p"}:
        _check_exponent_tensor(name, values[name])
    inner = values.pop("p", values.pop("inner_p", None))
    arguments = {name: values.pop(name) for name in ("epsilon", "regularization") if name in values}
    return pairwise(
        descriptor,
        first,
        second,
        inner_p=inner,
        outer_p=values.pop("outer_p", None),
        root=checks.follows_inner(descriptor, hyperparameters),
        diagonal=diagonal,
        parameters=values,
        **arguments,
    )


def _check_exponent_tensor(name: str, value) -> None:
    if host_value(name, value) is None and not bool((value >= 0).all()):
        raise ValueError(f"{name} must be 0 or greater everywhere, got {value}")
