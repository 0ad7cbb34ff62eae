"""Operators of ``torch.library``, for what records calls and runs them later: torch.compile,
torch.export, make_fx, fake tensors. All operators of kernlib are registered here."""

from __future__ import annotations

from collections.abc import Callable

import torch

_library = torch.library.Library("kernlib", "FRAGMENT")
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
) -> torch._ops.OpOverload:
    """Register ``kernlib::name`` and return it.

    ``compute`` and ``fake`` take its arguments. Its gradient is defined in one of two ways.
    ``save`` and ``backward`` are ``setup_context`` and ``backward`` of
    torch.library.register_autograd. Or ``recorded`` runs in the operator's place and returns a
    result that torch can differentiate, or None where there is nothing to record. ``vmap`` is that
    of torch.library.register_vmap.
    """
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
    return operator


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
