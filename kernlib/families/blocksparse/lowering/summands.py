"""Tensors of the result's shape that epilogues add, as the parameters of kernels have them
(kernel_sources/blocksparse/summands.cuh): their strides stand behind what a plan fixes."""

from __future__ import annotations

from kernlib.descriptors.epilogues import Epilogue
from kernlib.families.blocksparse.lowering.problem import Dense, Values
from kernlib.lowering import product_source as text

HEADER = "blocksparse/side.cuh"  # the type of the members


def members(epilogue: tuple[Epilogue, ...]) -> tuple[str, ...]:
    """The members of struct Fixed: none where the epilogue adds no tensor."""
    count = len(text.summands(epilogue))
    return (f"Side sides_of_summands[{count}]",) if count else ()


def values(sides: tuple[Dense | Values, ...]) -> dict[str, tuple[int, ...]]:
    """Their values, for the strides of each tensor."""
    numbers = tuple(number for side in sides for number in side[:4])
    return {"sides_of_summands": numbers} if sides else {}
