"""The ``weight`` of a layer that stores none and computes it when it is read.

A write to such a tensor would have no effect, as the layer never reads it. So it refuses writes:
those of ``torch.nn.init``, those through ``.data``, views and ``out=``, and those by which adapters
are merged. What is computed of it is a tensor like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch._C import DisableTorchFunctionSubclass, _disabled_torch_function_impl
from torch.compiler import is_compiling
from torch.utils._python_dispatch import _disable_current_modes, is_in_torch_dispatch_mode

# Methods that write their tensor, besides those whose names end with one "_".
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_BITWISE = ("and", "or", "xor", "lshift", "rshift")
_OPERATORS = frozenset(("__setitem__", *(f"__i{name}__" for name in (*_ARITHMETIC, *_BITWISE))))
_HARMLESS = frozenset(("detach_", "requires_grad_", "rename_", "share_memory_"))  # write no values
_SETTERS = tuple(getattr(torch.Tensor, name) for name in ("data", "real", "imag"))
_VIEWS = [getattr(torch.Tensor, n).__get__ for n in ("data", "T", "mT", "H", "mH", "real", "imag")]
# Methods that make, print or save a tensor get one of torch's own class.
_AS_PLAIN = ("__deepcopy__", "__reduce_ex__", "__repr__", "numpy", "__array__")


class ComputedWeight(torch.Tensor):
    """A weight as it was when it was computed. Reading it, computing with it and gradients through
    it are as of any tensor; writing it raises RuntimeError, until it is made an ``nn.Parameter`` of
    its own."""

    layer, advice = "layer", "Write its parameters"  # in the message
    _is_param = False  # as nn.Parameter says of what it makes of tensors of a class
    _is_hf_initialized = True  # for transformers, which else draws weights of a model's parts anew

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        if is_compiling():  # what Dynamo does not follow, so that this operation runs outside of a
            # graph: those of AOTAutograd cannot be run with such an input (torch 2.13)
            return _disabled_torch_function_impl(func, types, args, kwargs)
        name = getattr(func, "__name__", "").partition(".")[0]  # of an overload "mul_.Tensor"
        for target in _written(func, name, args, kwargs):
            if _refuses(target):
                target._refuse(f"{func.__self__.__name__} =" if name == "__set__" else name)
        if name in _AS_PLAIN:
            return _as_plain(name, *args, **kwargs)
        if is_in_torch_dispatch_mode():  # modes know torch's classes alone
            args, kwargs = _mapped(_plain, args), _mapped(_plain, kwargs)
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if name == "__get__" and func not in _VIEWS:
                return result
            return _mapped(_Marked([*args, *kwargs.values()]), result)

    def _refuse(self, name: str) -> NoReturn:
        raise RuntimeError(
            f"{name} would write the weight of a {self.layer}, which is computed at each "
            f"access: nobody would see it. {self.advice}; or take weight.clone() to write a copy"
        )


class ChainWeight(ComputedWeight):
    """The weight of :class:`kernlib.nn.KSLinear`."""

    layer = "KSLinear"
    advice = (
        "Write the parameters in layer.factors; to merge something into the matrix, put "
        "layer.to_linear() in the layer's place"
    )


class KroneckerWeight(ComputedWeight):
    """The weight of :class:`kernlib.nn.KroneckerLinear`."""

    layer = "KroneckerLinear"
    advice = (
        "Write the parameters in layer.factors; to merge something into the matrix, put "
        "layer.to_linear() in the layer's place"
    )


class CompressedWeight(ComputedWeight):
    """The weight of :class:`kernlib.nn.SparseLinear`."""

    layer = "SparseLinear"
    advice = (
        "Make another layer of what is to be the weight, by SparseLinear.from_linear or "
        "SparseLinear.from_matrix"
    )


def computed(weight: torch.Tensor, kind: type[ComputedWeight]) -> torch.Tensor:
    """``weight`` as a tensor that refuses writes. It stays as it is in compiled calls and under a
    dispatch mode, which do not know the class, and if it is no plain tensor, such as a fake one."""
    if is_compiling() or type(weight) is not torch.Tensor or is_in_torch_dispatch_mode():
        return weight
    return weight.as_subclass(kind)


class ComputesWeight:
    """For a layer with such a ``weight``: replacing it is refused too."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "weight":
            raise AttributeError(
                f"weight of a {type(self).__name__} is computed at each access and cannot be set: "
                "set the parameters or the matrix that it is made of, or swap the layer"
            )
        super().__setattr__(name, value)


class _Marked:
    """Makes a result that shares the memory of a computed weight refuse writes as well."""

    def __init__(self, args: list):
        self.sources = [t for t in _flat(args) if _refuses(t)]

    def __call__(self, t: object) -> object:
        if type(t) is not torch.Tensor:
            return t
        memory = _memory(t)
        for source in self.sources:
            if memory is not None and memory == _memory(source):
                return t.as_subclass(type(source))
        return t


def _memory(t: torch.Tensor) -> int | None:
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # of tensors inside transforms
        return None


def _written(func: Callable, name: str, args: tuple, kwargs: dict) -> list:
    """The arguments that a function of torch writes."""
    out = kwargs.get("out")
    targets = [] if out is None else _flat(out)
    setter = name == "__set__" and getattr(func, "__self__", None) in _SETTERS
    in_place = name.endswith("_") and not name.endswith("__") and name not in _HARMLESS
    if setter or in_place or name in _OPERATORS or kwargs.get("inplace") is True:
        first = args[:1] or [kwargs.get(key) for key in ("input", "self", "tensor")]
        targets = [*targets, *_flat(first)]
    return targets


def _flat(value: Any) -> list:
    if isinstance(value, (tuple, list)):
        return [leaf for part in value for leaf in _flat(part)]
    return [value]


def _mapped(function: Callable, value: Any) -> Any:
    """``function`` of all values in nested tuples, lists and dictionaries."""
    if isinstance(value, dict):
        return {key: _mapped(function, item) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_mapped(function, item) for item in value)
    return function(value)


def _refuses(t: object) -> bool:
    return isinstance(t, ComputedWeight) and not t._is_param


def _plain(t: object) -> object:
    """The tensor itself, of torch's own class, with the same history."""
    if not isinstance(t, ComputedWeight):
        return t
    with _disable_current_modes(), DisableTorchFunctionSubclass():
        return t.as_subclass(torch.Tensor)


def _as_plain(name: str, t: ComputedWeight, *more: Any, **named: Any) -> Any:
    """The result of a method for the same tensor of torch's own class: a leaf, or a parameter, if
    ``t`` is one. Arrays that share its memory cannot be written."""
    with DisableTorchFunctionSubclass():
        plain = _plain(t)
        if t._is_param:
            plain = torch.nn.Parameter(plain.detach(), t.requires_grad)
        elif t.is_leaf:
            plain = plain.detach().requires_grad_(t.requires_grad)
    result = getattr(plain, name)(*more, **named)
    if name == "__deepcopy__":  # whose memo has its id, which no other object may get
        more[0].setdefault(id(more[0]), []).append(plain)
    elif name in ("numpy", "__array__") and not t._is_param:
        result.setflags(write=False)
    return result
