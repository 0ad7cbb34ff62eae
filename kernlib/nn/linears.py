"""The places of a model's linear layers, and swaps of them for others and back."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from kernlib.descriptors.base import shown
from kernlib.errors import warn
from kernlib.runtime.tensors import check_dense, stand_ins

Place = tuple[nn.Module, str, str, nn.Module]
Layer = TypeVar("Layer", bound=nn.Module)


def linears(module: nn.Module) -> Iterator[Place]:
    """Every place of a layer that :func:`as_linear` takes: its parent, its name there, its whole
    name, the layer."""
    return (place for place in _places(module) if is_linear(place[3]))


def _places(module: nn.Module) -> Iterator[Place]:
    for prefix, parent in module.named_modules():
        for child, layer in parent._modules.items():
            if layer is not None:
                yield parent, child, f"{prefix}.{child}" if prefix else child, layer


def is_linear(layer: nn.Module) -> bool:
    """Whether a layer is an nn.Linear, parametrized or not, or the same by another name; what
    derives from nn.Linear may be more."""
    kind = type(layer)
    if is_parametrized(layer):
        kind = kind.__mro__[1]
    return kind is nn.Linear or is_conv1d(kind)


def is_conv1d(kind: type) -> bool:
    """Whether a class is transformers' Conv1D, an nn.Linear with its weight transposed."""
    return kind.__name__ == "Conv1D" and kind.__module__.partition(".")[0] == "transformers"


def as_linear(layer: nn.Module) -> nn.Module:
    """The nn.Linear that a layer is: itself, or one of the weight that a parametrization computes,
    as the next call in evaluation would, or of a view of a Conv1D's. The bias is the same parameter
    unless it is computed too."""
    renew(layer)
    kind = type(layer)
    if not is_parametrized(layer) and not is_conv1d(kind):
        return layer
    modes = [(part, part.training) for part in layer.modules()]
    try:
        with torch.no_grad():
            layer.eval()  # in which spectral_norm does not go on
            weight, bias = layer.weight.detach(), layer.bias
    finally:
        for part, training in modes:
            part.training = training
    if is_conv1d(kind) or is_conv1d(kind.__mro__[1]):
        weight = weight.t()
    cols, rows = weight.shape[::-1]
    linear = nn.Linear(cols, rows, bias=False, device="meta", dtype=weight.dtype)
    linear.weight = nn.Parameter(weight, weight_parameter(layer).requires_grad)
    if bias is not None and not isinstance(bias, nn.Parameter):
        bias = nn.Parameter(bias.detach(), _parameter(layer, "bias").requires_grad)
    linear.bias = bias
    return linear.train(layer.training)


def weight_parameter(layer: nn.Module) -> torch.Tensor:
    """The parameter that the weight of a layer is, or is computed of."""
    return _parameter(layer, "weight")


def _parameter(layer: nn.Module, name: str) -> torch.Tensor:
    if is_parametrized(layer, name):
        parametrized = layer.parametrizations[name]
        has_one = hasattr(parametrized, "original")
        return parametrized.original if has_one else parametrized.original0
    return getattr(layer, name)


def class_name(value: object) -> str:
    """The class of a value with its module, which tells layers of one name apart, or the class that
    stands in the place of a value."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")


def has_hooks(layer: nn.Module) -> bool:
    """Whether a layer has hooks of its own, of either pass."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
    )


def check_model(model: object, instead: str) -> None:
    """Raises TypeError for what is no module, and for an nn.Linear itself, which has no place in
    one."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {class_name(model)}")
    if isinstance(model, nn.Linear):
        raise TypeError(f"model is an nn.Linear itself, in no place to be swapped: {instead}")


def checked_match(match):
    """None, a function or a compiled expression. Raises TypeError and ValueError for others."""
    if isinstance(match, type):
        raise TypeError(
            "match must be a regular expression or a function of a layer's name and the layer, "
            f"got the class {match.__name__}: None takes every nn.Linear"
        )
    if match is None or isinstance(match, re.Pattern) or callable(match):
        return match
    if not isinstance(match, str):
        raise TypeError(
            "match must be None, a regular expression, or a function of a layer's name and the "
            f"layer, got {shown(match)}"
        )
    try:
        return re.compile(match)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"match {shown(match)} is no regular expression: {error}") from None


def matches(match, name: str, layer: nn.Module) -> bool:
    """Whether a checked ``match`` takes a layer."""
    if match is None:
        return True
    if isinstance(match, re.Pattern):
        return match.search(name) is not None
    return bool(match(name, layer))


def checked_linear(linear: object, dtypes: tuple[torch.dtype, ...] | None = None) -> nn.Linear:
    """The nn.Linear that :func:`as_linear` makes of one, whose weight is of one of these dtypes, or
    of any. Raises TypeError and ValueError for others, and for a weight without values but on
    meta."""
    linear = plain_linear(linear)
    weight = getattr(linear, "weight", None)
    if nn.parameter.is_lazy(weight):
        raise ValueError("linear is a lazy layer that has not been called: call it once")
    check_dense(("the weight of linear",), **{"the weight of linear": weight})
    refuse_stand_in(weight)
    if dtypes is not None and weight.dtype not in dtypes:
        names = ", ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"the weight of linear must be one of {names}, got {weight.dtype}")
    return linear


def plain_linear(linear: object) -> nn.Linear:
    """The nn.Linear that :func:`as_linear` makes of one, so that what computes its weight runs
    once. Raises TypeError for what is none."""
    if not isinstance(linear, nn.Linear):
        advice = "; dequantize it first" if "quant" in class_name(linear).lower() else ""
        raise TypeError(f"linear must be an nn.Linear, got {class_name(linear)}{advice}")
    return as_linear(linear)


def refuse_stand_in(weight: torch.Tensor) -> None:
    """Raises ValueError for a weight whose memory does not hold its values, as one that torchao has
    quantized."""
    if stand_ins(weight) and not weight.is_meta:
        raise ValueError(
            f"the weight of linear is a {class_name(weight)}, whose memory holds no values: make "
            "it a plain tensor first, as by its dequantize()"
        )


def dense_linear(layer: nn.Module, weight: torch.Tensor) -> nn.Linear:
    """An nn.Linear with copies of a ``weight`` and of the bias of a layer, in its mode."""
    linear = nn.utils.skip_init(
        nn.Linear, weight.shape[1], weight.shape[0], layer.bias is not None,
        device=weight.device, dtype=weight.dtype,
    )  # fmt: skip
    with torch.no_grad():
        linear.weight.copy_(weight)
        if layer.bias is not None:
            linear.bias.copy_(layer.bias)
    return linear.train(layer.training)


def places_of(model: nn.Module, match) -> dict[nn.Module, list[tuple[nn.Module, str, str]]]:
    """The layers that ``match`` takes in one of their places, and all places of each: its parent,
    its name there, its whole name."""
    listed = list(linears(model))
    accepted = {layer for _, _, name, layer in listed if matches(match, name, layer)}
    places: dict[nn.Module, list[tuple[nn.Module, str, str]]] = {}
    for parent, child, name, layer in listed:
        if layer in accepted:
            places.setdefault(layer, []).append((parent, child, name))
    return places


def swap(
    task: str,
    model: nn.Module,
    match,
    kind: type[Layer],
    check: Callable[[nn.Module], object],
    make: Callable[[nn.Module, list[str]], Layer],
) -> dict[str, Layer]:
    """Put layers of a ``kind`` in all places of those that ``match`` takes, and return them by
    their names: ``make(linear, names)`` of the dense layer of each, which is let go before the next
    one. Raises what :func:`check_each` raises, with the model as it was. Warns where nothing is
    swapped, and of what stays."""
    places, rest = places_of(model, match), rest_of(model, match)
    check_each(model, places, check)
    if not places:
        warn_of_nothing(task, model, match)
    new: dict[str, Layer] = {}
    while places:
        layer, where = next(iter(places.items()))
        other = make(as_linear(layer), [name for _, _, name in where])
        for parent, child, name in where:
            setattr(parent, child, other)
            new[name] = other
        del places[layer], layer  # and with it the dense weight
    without_fused_path(model, kind)
    warn_of_rest(task, rest, new)
    return new


def holders_of(model: nn.Module) -> Counter[int]:
    """How many modules hold each parameter, by its id."""
    return Counter(id(p) for part in model.modules() for p in part.parameters(recurse=False))


def check_unshared(holders: Counter[int], name: str, layer: nn.Module) -> None:
    """Raises ValueError for a layer whose weight another module holds too."""
    if holders[id(weight_parameter(layer))] > 1:
        raise ValueError(f"{name} shares its weight with another module; leave it out")


def check_each(model: nn.Module, places: dict, check: Callable[[nn.Module], object]) -> None:
    """Raises what ``check`` raises of the dense layer of one of the ``places``, with its name in
    front, and ValueError for a weight that another module holds too."""
    holders = holders_of(model)
    for layer, where in places.items():
        name = where[0][2]
        try:
            check(as_linear(layer))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{name}: {error}") from error
        check_unshared(holders, name, layer)


def rest_of(module: nn.Module, match) -> list[tuple[str, str]]:
    """Names and classes of layers that one might expect a swap to take, and that it leaves: what
    derives from nn.Linear, and what has features as one, such as quantized layers, where ``match``
    takes them. A function is asked about what derives from nn.Linear alone."""
    asks_of_all = match is None or isinstance(match, re.Pattern)
    return [
        (name, class_name(layer))
        for parent, child, name, layer in _places(module)
        if _is_like_linear(layer)
        and not (isinstance(parent, nn.MultiheadAttention) and child == "out_proj")
        and (asks_of_all or isinstance(layer, nn.Linear))
        and matches(match, name, layer)
    ]


def warn_of_rest(task: str, rest: list[tuple[str, str]], swapped: dict) -> None:
    """Warns of what :func:`rest_of` a model said before ``task`` swapped layers of it."""
    if rest and swapped:
        some = ", ".join(f"{name!r} ({kind})" for name, kind in rest[:3])
        some += ", ..." if len(rest) > 3 else ""
        warn(
            f"{task} leaves {len(rest)} layers as they are, whose class is not nn.Linear itself "
            f"and may do more: {some}. Put an nn.Linear of the same weight in their place first"
        )


def _is_like_linear(layer: nn.Module) -> bool:
    if is_linear(layer) or type(layer).__module__.partition(".")[0] == "kernlib":
        return False
    if isinstance(layer, nn.Linear):
        return True
    sized = hasattr(layer, "in_features") and hasattr(layer, "out_features")
    return sized and not any(map(is_linear, layer.modules()))


def renew(layer: nn.Module) -> None:
    """Compute anew what hooks of torch's pruning, weight_norm and spectral_norm make of parameters,
    as the next call would in evaluation: what a layer holds is of its last call, whatever has been
    loaded, trained, cast or moved since."""
    for hook in layer._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            weight = hook.compute_weight(layer, do_power_iteration=False)
            setattr(layer, hook.name, weight)
        elif isinstance(hook, (BasePruningMethod, WeightNorm)):
            hook(layer, ())


def without_fused_path(model: nn.Module, kind: type[nn.Module]) -> None:
    """Have torch's encoders call layers of a ``kind`` in evaluation too. Without gradients they
    multiply by ``linear1.weight`` and ``linear2.weight`` themselves, as matrices, unless told that
    the activation is another one; and nest padded inputs for that."""
    for part in model.modules():
        if isinstance(part, nn.TransformerEncoderLayer):
            if any(isinstance(layer, kind) for layer in (part.linear1, part.linear2)):
                part.activation_relu_or_gelu = 0
        elif isinstance(part, nn.TransformerEncoder) and any(
            isinstance(layer, kind) for layer in part.modules()
        ):
            part.use_nested_tensor = False


def warn_of_nothing(task: str, module: nn.Module, match: object) -> None:
    """Warns that ``task`` swaps no layer of a model."""
    names = [f"{name!r}" for _, _, name, _ in linears(module)]
    if not names:
        derived = [class_name(m) for m in module.modules() if _is_like_linear(m)]
        which = f", only what is like it: {derived[0]}" if derived else ""
        warn(f"{task} swaps nothing: {type(module).__name__} has no nn.Linear in it{which}")
        return
    some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    note = note_of_derived(module, match)
    warn(
        f"{task} swaps nothing: match={shown(getattr(match, 'pattern', match))} takes none of the "
        f"{len(names)} nn.Linear of {type(module).__name__} ({some}){note}"
    )


def note_of_derived(module: nn.Module, match) -> str:
    """The end of a message that no layer is swapped: it names one that ``match`` takes and whose
    class derives from nn.Linear, such as Falcon's. A subclass that computes x W^T in its own way
    cannot be told from one that computes something else, such as a router of experts."""
    for name, kind in rest_of(module, match):
        if isinstance(module.get_submodule(name), nn.Linear):
            return f"; {name!r} is a {kind}, a subclass of nn.Linear, which may compute more"
    return ""
