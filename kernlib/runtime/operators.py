"""Operators of ``torch.library``, for what records calls and runs them later: torch.compile,
torch.export, make_fx, fake tensors. All operators of kernlib are registered here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import zip_longest
from types import TracebackType

import torch
from torch._C import _are_functorch_transforms_active, _is_tracing
from torch.autograd import forward_ad
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
)

from kernlib import sharding
from kernlib.descriptors.base import Descriptor


class _Library(torch.library.Library):
    """Operators, of which none lets a forward-mode derivative pass by: torch records gradients of
    an operator alone, and would take 0 for such a one without a word."""

    def impl(self, op_name, fn, dispatch_key="", **options):
        if dispatch_key == "Autograd":
            fn = _seen_by_torch(op_name, fn)
        return super().impl(op_name, fn, dispatch_key, **options)


_library = _Library("kernlib", "FRAGMENT")
_forward: dict[str, Callable] = {}  # what torch differentiates, or exports, in its place
_exported: dict[str, Callable] = {}  # further ones that exports take
_TAGS = (torch.Tag.pt2_compliant_tag,)


def register(
    name: str,
    schema: str,
    compute: Callable,
    fake: Callable,
    *,
    recorded: Callable | None = None,
    save: Callable | None = None,
    backward: Callable | None = None,
    vmap: Callable | None = None,
    forward: Callable | None = None,
) -> torch._ops.OpOverload:
    """Register ``kernlib::name`` and return it.

    ``compute`` and ``fake`` take its arguments. Its gradient is defined in one of two ways.
    ``save`` and ``backward`` are ``setup_context`` and ``backward`` of
    torch.library.register_autograd. Or ``recorded`` runs in the operator's place and returns a
    result that torch can differentiate, or None where there is nothing to record. ``vmap`` is that
    of torch.library.register_vmap. ``forward`` answers where an argument has a forward-mode
    derivative, with a result that torch can differentiate; without it that is refused.
    """
    if forward is not None:
        _forward[name] = forward
    _library.define(name + schema, tags=_TAGS)
    _library.impl(name, compute, "CompositeExplicitAutograd")
    operator = getattr(torch.ops.kernlib, name).default
    torch.library.register_fake(f"kernlib::{name}", fake, lib=_library)
    if recorded is not None:
        _library.impl(name, _seen_by_autograd(operator, recorded), "Autograd", with_keyset=True)
    if backward is not None:
        torch.library.register_autograd(
            f"kernlib::{name}", backward, setup_context=save, lib=_library
        )
    if vmap is not None:
        torch.library.register_vmap(f"kernlib::{name}", vmap, lib=_library)
    family = ".".join(fake.__module__.split(".")[:3])
    _register_flops(operator, family)
    sharding.follow(operator, family, _library)
    return operator


def _register_flops(operator: torch._ops.OpOverload, family: str) -> None:
    """Have FlopCounterMode count an operator by the formula in ``rules`` of its family, whose
    ``FORMULAS`` are functions of the result and the operator's arguments by name."""
    from torch.utils import flop_counter  # 8 ms that only who records calls pays

    names = [argument.name for argument in operator._schema.arguments]

    def count(*values, out_val=None, **named) -> int:
        formula = import_module(f"{family}.rules").FORMULAS.get(operator._opname)
        named |= dict(zip(names, values, strict=False))
        return 0 if formula is None else formula(out_val, **named)

    packet = operator._overloadpacket
    flop_counter.register_flop_formula(packet, get_raw=True)(count)
    # A counter copies what it knows when it is made.
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry[packet] = count


def _seen_by_autograd(operator: torch._ops.OpOverload, recorded: Callable) -> Callable:
    """The function that autograd runs in the place of an operator."""
    lists = [
        place
        for place, argument in enumerate(operator._schema.arguments)
        if isinstance(argument.type, torch.ListType)
    ]

    def autograd(keyset, *arguments):
        if torch.is_grad_enabled():
            result = recorded(*arguments)
            if result is not None:
                return result
        given = [*arguments]
        for place in lists:  # AOTInductor hands over None for an empty one
            given[place] = given[place] or []
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *given)

    return autograd


def _seen_by_torch(name: str, kernel: Callable) -> Callable:
    """What autograd runs in the place of an operator, by ``kernel`` where no argument has a
    forward-mode derivative, and outside of an export to ONNX, which knows operators of torch alone.
    ``name`` may begin with the library's."""
    own = name.rpartition("::")[2]

    def seen(keyset, *arguments, **named):
        if _is_exported_to_onnx():
            return _for_onnx(own, arguments)
        if not _has_tangent(arguments):
            return kernel(keyset, *arguments, **named)
        if own not in _forward:
            raise RuntimeError(
                f"forward mode (torch.func.jvp, jacfwd) is not known of kernlib::{own}, which "
                "compiled and traced calls are; use vjp or jacrev"
            )
        return _forward[own](*arguments)

    return seen


def _is_exported_to_onnx() -> bool:
    """Whether an export to ONNX records this call: under a mode, or by torch.jit.trace, which are
    asked for first, as torch.onnx takes 2 us to answer."""
    if not (is_in_torch_dispatch_mode() or _is_tracing()) or "torch.onnx" not in sys.modules:
        return False
    return torch.onnx.is_in_onnx_export()


def exported_by(operator: torch._ops.OpOverload, function: Callable) -> None:
    """Have exports to ONNX record what ``function`` of an operator's arguments does, by torch's own
    operators; they do so with what answers in forward mode."""
    _exported[operator._opname] = function


def _for_onnx(name: str, arguments: tuple) -> torch.Tensor:
    """An operator's result by torch's own, as an export to ONNX records it. Raises TypeError for an
    operator that is no product of dense or block-sparse matrices, and no softmax of these."""
    function = _forward.get(name) or _exported.get(name)
    if function is None:
        raise TypeError(
            f"kernlib::{name} cannot be exported to ONNX: put what torch computes in its place, "
            "as torch.cdist, or for a SparseLinear an nn.Linear whose weight is its to_dense(). "
            "Kronecker, Kronecker-sparse and block-sparse products can be exported, and softmax"
        )
    return function(*arguments)


def _has_tangent(values) -> bool:
    """Whether one of these, or of lists among them, has a forward-mode derivative."""
    # Compiled code enters a level past forward_ad, and not outside of torch.func.
    if forward_ad._current_level < 0 and not _are_functorch_transforms_active():
        return False
    for value in values:
        if isinstance(value, (list, tuple)):
            found = _has_tangent(value)
        else:
            found = isinstance(value, torch.Tensor) and (
                forward_ad.unpack_dual(value, level=0).tangent is not None
            )
        if found:
            return True
    return False


def in_front(t: torch.Tensor | None, dim: int | None, rank: int) -> torch.Tensor | None:
    """For ``vmap`` of an operator: a tensor whose mapped axis lies in front of ``rank`` others."""
    if dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *(1,) * (1 + rank - t.dim()), *t.shape[1:])


# Tensors with a dispatcher of their own, which says what an operator makes of them.


def refuse_dispatcher(name: str, function: Callable, request: tuple, error: Exception) -> None:
    """Raises TypeError that names the argument and what to pass, where an ``error`` of a call
    ``function(*request)`` of the operator ``name`` was raised by a tensor's own dispatcher; nothing
    where kernlib raised it, or no tensor has one."""
    if _is_ours(error.__traceback__):
        return
    for argument, tensor in _named(function, request):
        kind = type(tensor)
        if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or _is_torchs(kind):
            continue
        said = str(error).partition("\n")[0]
        raise TypeError(
            f"{argument} is a {kind.__name__}, a tensor with a dispatcher of its own, which does "
            f"not take kernlib::{name} ({said}): pass the plain tensor that it holds"
        ) from error


def _is_torchs(kind: type) -> bool:
    """Whether a class is one by which torch itself traces or distributes, whose errors are its
    own."""
    return kind.__module__.startswith(
        ("torch._subclasses", "torch._functorch", "torch.fx", "torch.distributed")
    )


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether the last function of a traceback is one of kernlib."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__", "")).startswith(
        "kernlib."
    )


def _named(function: Callable, request: tuple) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a request, and what the caller calls them."""
    names = [name for name in inspect.signature(function).parameters]
    operands = request[0].operands if isinstance(request[0], Descriptor) else ()
    for name, value in zip(names, request, strict=False):
        if isinstance(value, dict):
            parts = value.items()
        elif isinstance(value, tuple):
            parts = zip_longest(operands[: len(value)], value, fillvalue="an argument")
        else:
            parts = [(name, value)]
        yield from ((key, part) for key, part in parts if isinstance(part, torch.Tensor))
