"""Kernels that are exponentials of a multiple of a squared distance, whose exponents the words of
points hold (kernels/product.py)."""

from __future__ import annotations

import re

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering.finish import finish_reduced
from kernlib.lowering.arithmetic import round_up

NORMS, MOST_ENTRIES = 6, 208  # entries of norms, and of a point of folded exponents
STEP = 16  # of a wgmma
# What Finish ends with where values are exponentials of a multiple of the sum alone.
EXPONENT = re.compile(r"AccT v = s;\n\s*v = exp2_approximate\(v \* (\w+)\);\n\s*return v;")


def entries(problem) -> int:
    """Of a point of folded exponents, as padded."""
    return round_up(NORMS + 3 * problem.k, STEP)


def is_exponent(descriptor: Pairwise, problem) -> bool:
    """Whether values are 2 to the power of a squared distance times a number of the call, of few
    enough features to fold that into the product."""
    if problem.epsilon or not descriptor.takes_products:
        return False
    if not pack.is_difference(descriptor, problem):
        return False
    if entries(problem) > MOST_ENTRIES:
        return False
    return exponent_of(descriptor, problem) is not None


def exponent_of(descriptor: Pairwise, variant) -> str | None:
    """The member of Finish that multiplies the squared distance, of an epilogue that is no more
    than an exponential of it. ``variant`` has what :func:`finish.finish_reduced` reads."""
    match = EXPONENT.search(finish_reduced(descriptor, variant))
    return match and match[1]
