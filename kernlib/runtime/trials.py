"""Launches of a product whose result nobody reads: for tuning alone."""

from __future__ import annotations

from collections.abc import Callable

from kernlib.descriptors.epilogues import Product
from kernlib.runtime.arguments import parameters_of
from kernlib.runtime.products import ProductPlan


def trial(
    plan: ProductPlan, descriptor: Product, operands: tuple, parameters: dict, scratch: Callable
) -> Callable[[], None]:
    """Launch the kernels of a product into what ``scratch()`` gives, an output and the workspace,
    and return what launches them again."""
    vectors, numbers, converted = parameters_of(plan, descriptor, parameters)
    beside = [
        parameters[name] if shape is None else parameters[name].expand(shape).contiguous()
        for name, shape in plan.summands
    ]
    addresses, kept = plan.place(operands)
    out, workspace = scratch()
    pointers = [t.data_ptr() for t in (out, *vectors, *beside)]
    plan.launch([*addresses, *pointers], numbers, workspace)

    def again(_held=(operands, out, vectors, beside, converted, kept, workspace)) -> None:
        for step, *_ in plan.steps:
            step.repeat()

    return again
