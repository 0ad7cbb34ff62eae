"""CUDA text that kernels of products begin with: types and epilogue."""

from __future__ import annotations

from kernlib.descriptors.base import render
from kernlib.descriptors.epilogues import Epilogue
from kernlib.lowering.config import Fact
from kernlib.lowering.dtypes import DTYPES
from kernlib.lowering.epilogue_source import EpilogueSource, function_struct
from kernlib.lowering.parameters import Parameters


def vectors(epilogue: tuple[Epilogue, ...]) -> tuple[str, ...]:
    """Names of the parameters with one value for each output feature, in order."""
    return tuple(name for part in epilogue for name in part.vectors)


def vector_pointers(epilogue: tuple[Epilogue, ...]) -> tuple[tuple[str, int], ...]:
    """The pointers of a Step to the vectors, which follow those to its operands."""
    return tuple((f"vector{index}", 0) for index in range(len(vectors(epilogue))))


def summands(epilogue: tuple[Epilogue, ...]) -> tuple[str, ...]:
    """Names of the parameters with one value for each element of the result, in order."""
    return tuple(name for part in epilogue for name, _ in part.summands)


def summand_pointers(epilogue: tuple[Epilogue, ...]) -> tuple[tuple[str, int], ...]:
    """The pointers of a Step to the summands, which follow those to the vectors."""
    return tuple((f"summand{index}", 0) for index in range(len(summands(epilogue))))


def pointers(operands: tuple[str, ...], epilogue: tuple[Epilogue, ...]) -> tuple:
    """The pointers of a Step to operands and to the epilogue's tensors, in the struct's order."""
    first = tuple((name, 0) for name in operands)
    return (*first, *vector_pointers(epilogue), *summand_pointers(epilogue))


def scalar_count(epilogue: tuple[Epilogue, ...]) -> int:
    """How many parameters are single numbers."""
    others = len(vectors(epilogue)) + len(summands(epilogue))
    return sum(len(part.parameters) for part in epilogue) - others


def parameters(
    pointers: int, fixed: str, epilogue: tuple[Epilogue, ...], maps: int = 0
) -> Parameters:
    """The parameter struct of a kernel with an epilogue: behind the addresses of ``pointers``
    operands lie those of the epilogue's vectors and summands, and then its scalars."""
    pointers += len(vectors(epilogue)) + len(summands(epilogue))
    return Parameters(pointers, fixed, scalar_count(epilogue), maps)


def facts(dtype: str, out_dtype: str, epilogue: tuple[Epilogue, ...]) -> dict[str, Fact]:
    """Facts of a kernel of products: storage of operands and vectors, arithmetic, storage of the
    result, and how many parameters of each kind the epilogue has."""
    return {
        "InputT": DTYPES[dtype].cuda,
        "AccT": DTYPES[dtype].sums.cuda,
        "OutputT": DTYPES[out_dtype].cuda,
        "VECTORS": len(vectors(epilogue)),
        "SUMMANDS": len(summands(epilogue)),
        "SCALARS": scalar_count(epilogue),
        "EPILOGUE": bool(epilogue),
    }


def typed_finish(epilogue: tuple[Epilogue, ...], name: str = "Finish") -> str:
    """:func:`finish` behind ``struct Config``, and the types that it names.

    ``Finish(read)`` reads scalars by ``read(k)`` and addresses of vectors by ``read.vector(k)``.
    The finished value of an output feature is then ``finish(v, feature)``. With summands it is
    ``finish(v, feature, given)``, where ``given`` has an element of each summand, in order.
    ``finish.reads(k)`` says whether a summand counts: if not, it is not read and ``given[k]`` is 0.
    """
    types = "using InputT = Config::InputT;\nusing AccT = Config::AccT;\n\n"
    return types + finish(epilogue, name)


def finish(epilogue: tuple[Epilogue, ...], name: str = "Finish") -> str:
    """The struct that applies epilogues, in order, to one value."""
    text = EpilogueSource(epilogue, "0")
    members = [("const InputT*", *each) for each in text.vectors]
    members += [("AccT", *each) for each in text.members]
    steps = [f"v = {step};" for step in text.steps]
    if not text.counts:
        return function_struct(name, members, "AccT v, i64 feature", steps)
    counts = " || ".join(f"(k == {k} && {test})" for k, test in enumerate(text.counts))
    reads = f"""    __device__ __forceinline__ bool reads(int k) const {{
        return {counts};
    }}
"""
    return function_struct(name, members, "AccT v, i64 feature, const AccT* given", steps, reads)


def describe(
    family: str, kind: str, dtype: str, precision: str, words: list[str], epilogue: tuple
) -> str:
    """A kernel in one line for people, without sizes, which are launch arguments."""
    arithmetic = [precision] * (dtype == "float32" and bool(precision))
    parts = [render(part) for part in epilogue]
    return " ".join([family, kind, dtype, *arithmetic, *words, *parts])
