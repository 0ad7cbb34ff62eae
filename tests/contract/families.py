"""All entries, and which callables of the package they must cover."""

from __future__ import annotations

import inspect
from importlib import import_module

from tests.contract import (
    cases,
    of_attention,
    of_block_sparse_layers,
    of_blocksparse,
    of_kronecker_product,
    of_linalg,
    of_methods,
    of_pairwise,
    of_products,
    of_scaled,
    of_service,
)

ENTRIES = of_pairwise.ENTRIES | of_products.ENTRIES | of_kronecker_product.ENTRIES
ENTRIES |= of_blocksparse.ENTRIES | of_block_sparse_layers.ENTRIES | of_scaled.ENTRIES
ENTRIES |= of_attention.ENTRIES
ENTRIES |= of_linalg.ENTRIES | of_service.ENTRIES | of_methods.ENTRIES
MODULES = (
    "kernlib", "kernlib.blocksparse", "kernlib.linalg", "kernlib.nn", "kernlib.nn.compat",
    "kernlib.sparse", "kernlib.sparse.prune", "kernlib.compat.kermac", "kernlib.compat.macko",
)  # fmt: skip


def public() -> set[str]:
    """Functions and classes that a user may call, but for exceptions, enums and plain records."""
    found = set()
    for name in MODULES:
        module = import_module(name)
        listed = getattr(module, "__all__", None) or vars(module)
        # dir() of kernlib names compile too, which a star import does not bring.
        for attribute in dir(module) if name == "kernlib" else listed:
            value = getattr(module, attribute)
            if attribute.startswith("_") or not callable(value) or _is_record(value):
                continue
            if hasattr(module, "__all__") or getattr(value, "__module__", "") == name:
                found.add(f"{name}.{attribute}")
    return found


def methods() -> set[str]:
    """Public methods, with arguments, of public classes: those of kernlib's own that are no
    constructor. A method that several classes share is one, of the class that has it first."""
    found = {}
    for name in sorted(public()):
        module, _, attribute = name.rpartition(".")
        value = getattr(import_module(module), attribute)
        for owner in inspect.getmro(value) if inspect.isclass(value) else ():
            if not owner.__module__.startswith("kernlib"):
                continue
            for method, function in vars(owner).items():
                function = getattr(function, "__func__", function)
                if method.startswith("_") or not inspect.isfunction(function):
                    continue
                if len(inspect.signature(function).parameters) > 1:
                    found.setdefault(function.__code__, method)
    return set(found.values()) - OF_TORCH


# Methods that are torch's own, or that only kernlib calls, and those whose arguments another has.
OF_TORCH = {"train", "requires_grad_", "cuda", "from_layout", "keep_for", "from_dense", "tree"}


def covered_methods() -> set[str]:
    """The methods that entries call, which are named behind a space or a point."""
    return {word for name in ENTRIES for word in name.replace(".", " ").split()}


def _is_record(value) -> bool:
    from enum import Enum

    if not inspect.isclass(value):
        return False
    return issubclass(value, (BaseException, Enum, tuple))


def covered() -> set[str]:
    """The callables that entries call. Several entries of one have a word behind its name."""
    return {name.partition(" ")[0] for name in ENTRIES}


# What takes tensors, but what compiles many kernels, or tunes, where that is possible.
ON_GPU = {
    name: entry
    for name, entry in ENTRIES.items()
    if not name.endswith(("compile", "tune", "pre_compile_descriptors"))
    and (name not in of_service.ENTRIES or "kermac" in name or name == "kernlib.prepare")
    and name not in of_methods.ENTRIES
}


def share(name: str, count: int, entries=ENTRIES) -> int:
    """The part of so many cases that an entry gets, by weight, and one at least."""
    total = sum(entry.weight for entry in entries.values())
    return max(1, round(count * entries[name].weight / total))


def faults(name: str, seed: int, count: int, device: str = "cpu") -> list[str]:
    """What went wrong in so many cases of an entry."""
    made = (cases.run(ENTRIES[name], name, seed, index, device) for index in range(count))
    found = [f"{one.shown}: {one.fault}" for one in made if one.fault]
    return [*dict.fromkeys(found)]
