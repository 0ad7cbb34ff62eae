"""CUDA text and specifications of products with many columns (product.py)."""

from __future__ import annotations

from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import pack
from kernlib.families.pairwise.lowering import reduce as direct
from kernlib.families.pairwise.lowering.finish import finish_reduced, is_norm
from kernlib.families.pairwise.lowering.problem import inner_codes, scalar_count, short, terms
from kernlib.families.pairwise.lowering.reduce import Problem
from kernlib.families.pairwise.lowering.wide import TILE_N, Variant, exponent_of
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.names import named
from kernlib.lowering.parameters import Parameters
from kernlib.lowering.wgmma import multiply

# What struct ProductLaunch holds behind Parameters, and Parameters behind strides of its numbers.
FIXED, REDUCE_FIXED = "<5q2i", "9q5q4i"
POINTERS = 6  # of ProductLaunch, before those of Parameters
PACK_PARAMETERS = Parameters(5, "<6q3q2i")
PACK_THREADS = 256
FOLD_SIDE = "5q2i"  # a Side of product/fold.cuh
FOLD_POINTS, FOLD_THREADS = 16, 128  # of a block of it


def fold_parameters(descriptor) -> Parameters:
    scalars = scalar_count(descriptor)
    return Parameters(6, f"<{scalars}q{FOLD_SIDE}{FOLD_SIDE}q2i", scalars)


def spec(descriptor: Pairwise, variant: Variant, difference: bool) -> KernelSpec:
    """The KernelSpec of the product."""
    words = [descriptor.describe(), f"columns={variant.width}", variant.dtype]
    words += [f"{variant.sums}={variant.depth}"]
    words += [f"words={variant.copies}x{variant.v_copies} rows={variant.rows}"]
    words += [flag for flag in ("epsilon", "regularized", "behind") if getattr(variant, flag)]
    made = KernelSpec(
        "pairwise",
        source(descriptor, variant, difference),
        "pairwise_product_main",
        128 * (variant.warpgroups + 1),
        variant.shared_bytes,
        description=" ".join(words),
    )
    return named(made, *short(descriptor), *words[1:], epilogue=descriptor.epilogue)


def source(descriptor: Pairwise, variant: Variant, difference: bool) -> str:
    """The generated CUDA text of the product."""
    scalars = scalar_count(descriptor)
    fixed = f"<{scalars}q{REDUCE_FIXED}{FIXED.removeprefix('<')}"
    parameters = Parameters(POINTERS + len(direct.OPERANDS), fixed, scalars)
    operation = "Difference" if descriptor.operator == "difference" else "Dot"
    of_points = "" if variant.features else multiply("float16", TILE_N, False)
    facts, fixed = terms(descriptor, variant), direct.fields(scalars).text()
    head = pack.constants(variant.dtype, difference, parameters.size, fixed, **facts)
    return f"""{head}
#include "pairwise/reduce/math.cuh"

constexpr int WARPGROUPS = {variant.warpgroups};
constexpr int STAGES = {variant.stages};
constexpr int WIDTH = {variant.width};
constexpr int COPIES = {variant.copies};
constexpr int V_COPIES = {variant.v_copies};
constexpr int DEPTH = {variant.depth};
constexpr int SCALARS = {scalars};
constexpr bool REGULARIZED = {str(variant.regularized).lower()};
constexpr bool BEHIND_FOLDED = {str(variant.behind and variant.sums != "folded").lower()};
constexpr int DYNAMIC_BYTES = {variant.shared_bytes};
constexpr int DOUBTFUL = {pack.DOUBTFUL};
#define FEATURES {variant.features}
#define FOLDED {int(variant.sums == "folded")}
#define OPERATION {operation}
#define INNER {inner_codes(descriptor)[variant.inner]}
{"#define NORMS" * is_norm(descriptor, variant)}

{multiply("float16", variant.width, True)}
{of_points}
{finish_reduced(descriptor, variant)}
#include "pairwise/product/product.cuh"
"""


def fold_spec(descriptor: Pairwise, problem: Problem, variant: Variant) -> KernelSpec:
    """The KernelSpec of the packing of points whose products are exponents."""
    parameters = fold_parameters(descriptor)
    source = f"""{pack.constants(variant.dtype, True, parameters.size)}
#include "pairwise/reduce/math.cuh"

constexpr int DEPTH = {variant.depth};
constexpr int SCALARS = {scalar_count(descriptor)};
#define EXPONENT {exponent_of(descriptor, problem)}

{finish_reduced(descriptor, problem)}
#include "pairwise/product/fold.cuh"
"""
    words = [variant.dtype, f"entries={variant.depth}"]
    description = f"pairwise product fold {descriptor.describe()} {' '.join(words)}"
    made = KernelSpec(
        "pairwise", source, "pairwise_product_fold", FOLD_THREADS, description=description
    )
    return named(made, *short(descriptor), *words, epilogue=descriptor.epilogue)


def pack_spec(variant: Variant) -> KernelSpec:
    """The KernelSpec of the packing of v, and of lines of points."""
    fixed = direct.fields(1).text()
    head = pack.constants(variant.dtype, True, PACK_PARAMETERS.size, fixed, SCALARS=1)
    source = f"""{head}
constexpr int WIDTH = {variant.width};
constexpr int V_COPIES = {variant.v_copies};
constexpr int FEATURES = {variant.features};
constexpr int SCALARS = 1;

#include "pairwise/product/pack.cuh"
"""
    words = f"{variant.dtype} columns={variant.width} words={variant.v_copies}"
    words += f" lanes={variant.features}" * (variant.features > 0)
    description = f"pairwise product pack {words}"
    made = KernelSpec(
        "pairwise", source, "pairwise_product_pack", PACK_THREADS, description=description
    )
    return named(made, words)
