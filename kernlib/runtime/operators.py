"""Operators of ``torch.library``, for what records calls and runs them later: torch.compile,
torch.export, make_fx, fake tensors. All operators of kernlib are registered here."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import zip_longest
from types import SimpleNamespace, TracebackType

import torch
from torch._C import _are_functorch_transforms_active, _is_tracing
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_in_torch_dispatch_mode,
    is_traceable_wrapper_subclass,
)

from kernlib import events, sharding
from kernlib.descriptors.base import Descriptor
from kernlib.runtime.schema import Saves, Schema


class _Library(torch.library.Library):
    """Operators that refuse forward-mode derivatives: torch records the gradients of an operator
    alone, and would silently take 0 for such a derivative."""

    def impl(self, op_name, fn, dispatch_key="", **options):
        if dispatch_key == "Autograd":
            fn = _seen_by_torch(op_name, fn)
        return super().impl(op_name, fn, dispatch_key, **options)


_library = _Library("kernlib", "FRAGMENT")
_forward: dict[str, Callable] = {}  # what torch differentiates, or exports, in its place
_exported: dict[str, Callable] = {}  # further ones that exports take
_computing: dict[str, Callable] = {}  # the operators themselves, of their fields
_TAGS = (torch.Tag.pt2_compliant_tag,)
_BELOW = torch._C._after_autograd_keyset
# What is left below autograd where nothing records, transforms or stands for a tensor.
_PLAIN = frozenset(
    torch._C.DispatchKeySet(key).raw_repr()
    for key in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)
)


class Operator:
    """An operator of torch.library, called with arguments as the functions of its family have
    them. ``overload`` is torch's own."""

    def __init__(self, overload: torch._ops.OpOverload, schema: Schema):
        self.overload, self.schema = overload, schema

    def __call__(self, *arguments):
        return self.overload(*self.schema.flatten(arguments))


def register(
    name: str,
    schema: Schema,
    results: str,
    compute: Callable,
    fake: Callable,
    *,
    recorded: Callable | None = None,
    batched: Callable | None = None,
    saves: Saves = (),
    outputs: int | None = 0,
    backward: Callable | None = None,
    materialize: bool = True,
    vmap: Callable | None = None,
    forward: Callable | None = None,
    exported: Callable | None = None,
) -> Operator:
    """Register ``kernlib::name``, whose schema is ``schema`` and ``-> results``, and return it.

    All functions take its arguments. ``compute`` is the operator and ``fake`` answers for tensors
    without memory; an argument ``debug`` of True has events of ``compute`` printed. The gradient is
    defined in one of two ways. ``recorded`` runs in the operator's place, where gradients are
    recorded and a tensor requires one, and returns a result that torch can differentiate, or None
    where there is nothing to record. Or ``backward`` takes what :meth:`Schema.saved` returns and
    the gradients of the results, and returns those of the operator's fields by their names. Of the
    call ``saves`` names the arguments that it reads, and ``outputs`` ends the slice of results
    that it reads, from the first; ``materialize`` says whether torch makes zeros of gradients of
    results that are not there.

    ``batched`` answers for tensors that ``is_grads_batched`` made, of which torch takes none in
    operators of lists. ``vmap`` takes torch's information and the axes of the fields by their names
    before the arguments, as that of torch.library.register_vmap does. ``forward`` answers where an
    argument has a forward-mode derivative, with a result that torch can differentiate; without it
    that is refused. Exports to ONNX record what ``forward`` or ``exported`` do, by torch's own
    operators.
    """
    for registry, function in ((_forward, forward), (_exported, exported)):
        if function is not None:
            registry[name] = _over_fields(schema, function)
    computing = _computing[name] = _with_events(schema, compute)
    qualified = f"kernlib::{name}"
    _library.define(f"{name}{schema.text} -> {results}", tags=_TAGS)
    _library.impl(name, computing, "CompositeExplicitAutograd")
    overload = getattr(torch.ops.kernlib, name).default
    torch.library.register_fake(qualified, _over_fields(schema, fake), lib=_library)
    if recorded is not None:
        autograd = _seen_by_autograd(overload, schema, recorded)
        _library.impl(name, autograd, "Autograd", with_keyset=True)
    if batched is not None:
        _library.impl(name, _over_fields(schema, batched), "Batched")
    if backward is not None:

        def setup_context(ctx, inputs, output) -> None:
            ctx.set_materialize_grads(materialize)
            results = output if isinstance(output, (tuple, list)) else (output,)
            schema.save(ctx, inputs, results[:outputs], saves)

        def gradients(ctx, *grads):
            return schema.gradients(ctx, backward(schema.saved(ctx, saves), *grads))

        torch.library.register_autograd(
            qualified, gradients, setup_context=setup_context, lib=_library
        )
    if vmap is not None:

        def mapped(info, dims, *flat):
            schema.refuse_mapped(dims)
            return vmap(info, schema.named(dims), *schema.restore(flat))

        torch.library.register_vmap(qualified, mapped, lib=_library)
    family = ".".join(fake.__module__.split(".")[:3])
    _register_flops(overload, family)
    sharding.follow(overload, family, _library)
    return Operator(overload, schema)


def _over_fields(schema: Schema, function: Callable) -> Callable:
    """A function of an operator's arguments as one of its fields."""
    return lambda *flat: function(*schema.restore(flat))


def _with_events(schema: Schema, compute: Callable) -> Callable:
    """``compute`` of an operator's fields, its events printed where the field ``debug`` is True."""
    restore = schema.restore
    if "debug" not in schema.names:
        return lambda *flat: compute(*restore(flat))
    place = schema.names.index("debug")

    def computing(*flat):
        if not flat[place]:
            return compute(*restore(flat))
        with events.on_stderr():
            return compute(*restore(flat))

    return computing


def _register_flops(operator: torch._ops.OpOverload, family: str) -> None:
    """Have FlopCounterMode count an operator by the formula in ``rules`` of its family, whose
    ``FORMULAS`` are functions of the result and the operator's arguments by name."""
    from torch.utils import flop_counter  # 8 ms, for recorded calls alone

    names = [argument.name for argument in operator._schema.arguments]

    def count(*values, out_val=None, **named) -> int:
        formula = sharding.rules_of(family, "FORMULAS").get(operator._opname)
        named |= dict(zip(names, values, strict=False))
        return 0 if formula is None else formula(out_val, **named)

    packet = operator._overloadpacket
    flop_counter.register_flop_formula(packet, get_raw=True)(count)
    # A counter copies what it knows when it is made.
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry[packet] = count


def _seen_by_autograd(
    operator: torch._ops.OpOverload, schema: Schema, recorded: Callable
) -> Callable:
    """The function that autograd runs in the place of an operator."""

    def autograd(keyset, *flat):
        flat = schema.filled(flat)
        if torch.is_grad_enabled() and _requires_gradient(flat):
            result = recorded(*schema.restore(flat))
            if result is not None:
                return result
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *flat)

    return autograd


def _requires_gradient(values: Iterable) -> bool:
    """Whether one of these, or a member of a list among them, is a tensor that requires a
    gradient."""
    return any(
        _requires_gradient(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, torch.Tensor) and value.requires_grad
        for value in values
    )


def _seen_by_torch(name: str, kernel: Callable) -> Callable:
    """What autograd runs in the place of an operator, by ``kernel`` where no argument has a
    forward-mode derivative, and outside of an export to ONNX, which knows operators of torch alone.
    ``name`` may begin with the library's."""
    opname = name.rpartition("::")[2]
    computing = _computing[opname]

    def seen(keyset, *arguments, **named):
        if (
            (keyset & _BELOW).raw_repr() in _PLAIN
            and not torch.is_grad_enabled()
            and not (named or _is_tracing() or forward_ad._current_level >= 0)
        ):
            # As compiled code calls it. To go on by the dispatcher would take twice as long.
            return computing(*arguments)
        if _is_exported_to_onnx():
            return _for_onnx(opname, arguments)
        if not _has_tangent(arguments):
            return kernel(keyset, *arguments, **named)
        if opname not in _forward:
            raise RuntimeError(
                f"forward mode (torch.func.jvp, jacfwd) is not known of kernlib::{opname}, which "
                "compiled and traced calls are; use vjp or jacrev"
            )
        return _forward[opname](*arguments)

    return seen


def _is_exported_to_onnx() -> bool:
    """Whether an export to ONNX records this call: under a mode, or by torch.jit.trace, which are
    asked for first, as torch.onnx takes 2 us to answer."""
    if not (is_in_torch_dispatch_mode() or _is_tracing()) or "torch.onnx" not in sys.modules:
        return False
    return torch.onnx.is_in_onnx_export()


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
    """Whether one of these, or a member of a list among them, has a forward-mode derivative."""
    # Compiled code enters a level past forward_ad, and not outside of torch.func.
    if forward_ad._current_level < 0 and not _are_functorch_transforms_active():
        return False
    for value in values:
        if isinstance(value, (list, tuple)):
            has_one = _has_tangent(value)
        else:
            has_one = isinstance(value, torch.Tensor) and (
                forward_ad.unpack_dual(value, level=0).tangent is not None
            )
        if has_one:
            return True
    return False


def takes_lists(*values: object) -> bool:
    """Whether operators of lists of tensors, and without rules for shardings, can be called here
    with the tensors among these."""
    return not _are_functorch_transforms_active() and not any(
        is_legacy_batchedtensor(t) or is_traceable_wrapper_subclass(t)
        for t in values
        if isinstance(t, torch.Tensor)
    )


def is_one_step(grad: torch.Tensor) -> bool:
    """Whether one operator of lists computes all gradients of a call. That holds unless their own
    gradients are recorded, for which each is an operator of its own."""
    return not torch.is_grad_enabled() and takes_lists(grad)


def in_front(t: torch.Tensor | None, dim: int | None, rank: int) -> torch.Tensor | None:
    """For ``vmap`` of an operator: a tensor whose mapped axis lies in front of ``rank`` others."""
    if dim is None:
        return t
    t = t.movedim(dim, 0)
    return t.reshape(t.shape[0], *(1,) * (1 + rank - t.dim()), *t.shape[1:])


def one_by_one(operator: Operator, info, dims: SimpleNamespace, arguments: Sequence):
    """For ``vmap`` of an operator: as many calls as there are, their results stacked."""
    fields = [*zip(operator.schema.flatten(arguments), vars(dims).values(), strict=True)]
    calls = range(info.batch_size)
    results = [operator.overload(*(_at(t, dim, index) for t, dim in fields)) for index in calls]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    stacked = [torch.stack(parts) for parts in zip(*results, strict=True)]
    return type(results[0])(stacked), type(results[0])([0] * len(stacked))


def _at(value, dim, index: int):
    """The part of a mapped argument for one of several calls."""
    if isinstance(value, (list, tuple)) and isinstance(dim, (list, tuple)):
        return [_at(t, d, index) for t, d in zip(value, dim, strict=True)]
    return value if dim is None else value.select(dim, index)


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
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"{argument} is a {kind.__name__}, a tensor with a dispatcher of its own, which does "
            f"not take kernlib::{name} ({reason}): pass the plain tensor that it holds"
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
