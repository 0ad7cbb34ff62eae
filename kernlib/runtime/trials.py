"""Launches of a product whose result is not used: for tuning alone."""

from __future__ import annotations

from collections.abc import Callable

from kernlib.descriptors.epilogues import Product
from kernlib.runtime.arguments import parameters_of
from kernlib.runtime.products import ProductPlan, summands_of


def trial(
    plan: ProductPlan, descriptor: Product, operands: tuple, parameters: dict, scratch: Callable
) -> Callable[[], None]:
    """Launch the kernels of a product into the output and the workspace that ``scratch()`` returns,
    and return a function that launches them again."""
    vectors, numbers, converted = parameters_of(plan, descriptor, parameters)
    beside = summands_of(plan, parameters)
    addresses, kept = plan.place(operands)
    out, workspace = scratch()
    pointers = [t.data_ptr() for t in (out, *vectors, *beside)]
    plan.launch([*addresses, *pointers], numbers, workspace)

    def again(_held=(operands, out, vectors, beside, converted, kept, workspace)) -> None:
        for step, *_ in plan.steps:
            step.repeat()

    return again
