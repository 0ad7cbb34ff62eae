"""CUDA text of what follows a pairwise sum: the struct ``Finish``, outer stage and epilogue. That
of reductions is in the arithmetic of values that are summed as soon as they are there
(``kernel_sources/common/approximate.cuh``)."""

from __future__ import annotations

from kernlib.descriptors.expression import Node, Number, Operation
from kernlib.families.pairwise import stages
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.lowering.config import Fact
from kernlib.lowering.epilogue_source import EpilogueSource, function_struct

# In the order of the enum of scalars.cuh.
COMMON_SCALARS = ("inner_p", "outer_p", "epsilon", "regularization", "inner_scale")
# Kinds of exponent with code of their own: of a root the inner one, of an outer Power its own.
ROOT_CODE = {
    0.0: "s",
    0.5: "s * s",
    1.0: "s",
    2.0: "{root}(s)",
    4.0: "{root}({root}(s))",
    float("inf"): "s",
}
EXACT_SUMS = (0.0, 1.0, float("inf"))  # exponents whose sums are as good as their norms
EXPONENT_CODE = {0.5: "{root}(s)", 1.0: "s", 2.0: "s * s"}


def finish(
    descriptor: Pairwise,
    variant,
    root: str = "sqrt",
    source: type[EpilogueSource] = EpilogueSource,
    epsilon: bool = True,
) -> str:
    """The struct. ``variant`` has ``inner``, ``outer`` and ``root``; ``root`` is the function that
    takes square roots, ``source`` makes the text of epilogues, ``epsilon`` is whether values below
    one count as 0."""
    text, members = outer(descriptor, variant, root)
    steps = [f"AccT v = {text};"]
    if variant.root and variant.inner in ("any", "device"):  # of unit.cuh
        steps.append("v *= unit;")
    if is_norm(descriptor, variant):  # what mend.cuh has computed anew
        steps.append("if (s < AccT(0)) v = -s;")
    elif descriptor.categories and "_root(" in text:
        steps.append("if (s < AccT(0)) v = power(s, exponent);")  # of negative tables
    if descriptor.epilogue:
        epilogue = source(descriptor.epilogue, str(len(COMMON_SCALARS)))
        if epsilon:
            members = [*members, ("epsilon", f"read({COMMON_SCALARS.index('epsilon')})")]
            steps.append("if (absolute(v) < epsilon) v = AccT(0);")
        members = [*members, *epilogue.members]
        steps += [f"v = {step};" for step in epilogue.steps]
    typed = [("AccT", *member) for member in members]
    return function_struct("Finish", typed, "AccT s, AccT unit = AccT(1)", steps)


def is_norm(descriptor: Pairwise, variant) -> bool:
    """The fact ``BY_NORM``: sums of powers under a root may leave float's range where their root
    does not, and are then computed anew, unless tables add to them."""
    if variant.dtype == "float64" or descriptor.categories:
        return False
    if variant.root:
        return variant.inner not in EXACT_SUMS
    squares = isinstance(descriptor.inner, stages.Square) or variant.inner == 2.0
    return squares and isinstance(descriptor.outer, stages.Sqrt)


def outer(descriptor: Pairwise, variant, root: str = "sqrt") -> tuple[str, list[tuple[str, str]]]:
    """Text of Outer over ``s``, and the members it needs."""
    stage, kind = descriptor.outer, None
    if variant.root:
        kind = ROOT_CODE.get(variant.inner)
    elif isinstance(stage, stages.Power):
        kind = EXPONENT_CODE.get(variant.outer)
    else:
        simple = {stages.Abs: "absolute(s)", stages.Square: "s * s", stages.Sqrt: "{root}(s)"}
        kind = simple.get(type(stage), "s")
    if kind is not None:
        return kind.format(root=root), []
    if not variant.root:
        return "power(s, exponent)", [("exponent", "read(1)")]
    # The reciprocal is rounded, and what it lacks is known to p's own precision.
    exact = "read(0) == AccT(0) || read(0) == infinity(AccT())"
    reciprocal = "AccT(1) / read(0)"
    rest = "multiply_add(-exponent, read(0), AccT(1)) / read(0)"
    text, members = "norm_root(s, exponent, rest)", [("exponent", reciprocal), ("rest", rest)]
    if variant.inner == "device":  # exact where a number is
        text = "any_root(s, exponent, rest)"
        members[0] = ("exponent", f"{exact} ? AccT(1) : {reciprocal}")
    return text, members


def outer_kinds(descriptor: Pairwise) -> list[tuple[float | str, bool]]:
    """Kinds of the outer exponent, and whether it follows from the inner one."""
    if isinstance(descriptor.outer, stages.Root):
        return [("any", True)]
    if not isinstance(descriptor.outer, stages.Power):
        return [("any", False)]
    powers = [(kind, False) for kind in ("any", *EXPONENT_CODE)]
    return powers + [("any", True)] * isinstance(descriptor.inner, stages.Power)


class ReductionSource(EpilogueSource):
    """:class:`EpilogueSource` with ``exp(v * constant)`` as ``2^(v * constant')``, in one
    multiplication and one special-function instruction, and every division by a constant as one
    multiplication."""

    def _quotient(self, left: Node, right: Node) -> Operation:
        return Operation("*", (left, Operation("reciprocal", (right,))))

    def _operation(self, node: Operation) -> str:
        if node.operator != "exp":
            return super()._operation(node)
        rest, factors, negative = factors_of(node.operands[0], self._is_constant)
        product = Number(-1.0 if negative else 1.0)
        for factor in factors:
            product = Operation("*", (product, factor)) if product != Number(1.0) else factor
        text = self._render(rest)
        return f"exp2_approximate({text} * {self._member(f'for_exp2({self._render(product)})')})"


def lists(entries: int, waiting: int, count: int, largest: bool) -> dict[str, Fact]:
    """Facts of kernels that keep lists (``kernel_sources/pairwise/topk/topk.cuh``): entries in
    order and those that wait, of ``count`` lists of a block."""
    return {"KEPT": entries, "WAITING": waiting, "LISTS": count, "LARGEST": largest}


def factors_of(node: Node, is_constant) -> tuple[Node, list[Node], bool]:
    """A tree as ``rest * factors``, the factors constant, and whether it is negated."""
    factors: list[Node] = []
    negative = False
    while isinstance(node, Operation) and node.operator in ("neg", "*", "/"):
        if node.operator == "neg":
            negative, node = not negative, node.operands[0]
            continue
        left, right = node.operands
        if is_constant(right):
            divides = node.operator == "/"
            factors.append(Operation("reciprocal", (right,)) if divides else right)
            node = left
        elif node.operator == "*" and is_constant(left):
            factors.append(left)
            node = right
        else:
            break
    return node, factors, negative


def finish_reduced(
    descriptor: Pairwise, variant, source: type[ReductionSource] = ReductionSource
) -> str:
    """The struct in the arithmetic of reductions. ``variant`` has ``epsilon`` too: whether values
    below one count as 0."""
    if variant.dtype == "float64":
        return finish_double(descriptor, variant)
    text = finish(descriptor, variant, source=source, epsilon=variant.epsilon)
    return f"namespace approximate {{\n{text}}}\nusing approximate::Finish;\n"


def finish_double(descriptor: Pairwise, variant) -> str:
    """The same of reductions in float64, by the exponential of ``common/double_exponential.cuh``
    and the powers of ``double/power.cuh``, of which :func:`takes_powers` says whether there are
    any."""
    return f"""#include "pairwise/double/power.cuh"
namespace branchless {{
{finish(descriptor, variant, epsilon=variant.epsilon)}}}
using branchless::Finish;
"""


def takes_powers(descriptor: Pairwise, variant) -> bool:
    """Whether a logarithm is taken of sums or of what becomes of them, for a power."""
    text = finish(descriptor, variant)
    return "power(" in text or "_root(" in text
