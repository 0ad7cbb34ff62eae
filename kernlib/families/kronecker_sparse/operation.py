"""The Kronecker-sparse op: products with factors of support ``I_a ⊗ 1_{b×c} ⊗ I_d``, as they are
called."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernlib.families.kronecker_sparse import checks, plans
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain
from kernlib.families.kronecker_sparse.product import PRODUCT, calls
from kernlib.runtime.arguments import check_names
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.products import front_door
from kernlib.runtime.tensors import check_dense, refuse_any_overlap

if TYPE_CHECKING:
    from kernlib.jit.spec import KernelSpec
    from kernlib.runtime.ahead import Planned


def _recorded(*request) -> torch.Tensor:
    from kernlib.families.kronecker_sparse import gradients  # which other calls do without

    return gradients.recorded(*request)


_run_factor = front_door(PRODUCT, calls, _recorded)


def run_chain(chain: KroneckerSparseChain, *operands, out=None, **parameters) -> torch.Tensor:
    """The factors one after the other: x and a weight for each."""
    checks.check_kinds(chain, operands)
    x, *weights = operands
    check_names(chain, parameters)
    last = len(weights) - 1
    if out is not None:  # whose own factor sees neither x nor what belongs to the others
        named = {f"weights[{index}]": weight for index, weight in enumerate(weights)}
        refuse_any_overlap(out, x=x, **named, **parameters)
    for index, (factor, weight) in enumerate(zip(chain.factors, weights, strict=True)):
        own = {name: parameters[name] for name in factor.parameters}
        x = _run_factor(factor, x, weight, out=out if index == last else None, **own)
    return x


RUNS = {KroneckerSparse: _run_factor, KroneckerSparseChain: run_chain}


# Calls before anybody makes them.


def planned(
    descriptor: KroneckerSparse | KroneckerSparseChain, tensors: tuple, arguments: dict
) -> list[Planned]:
    """What of a call has a plan: the product of each factor. Raises TypeError for tensors that are
    too few or too many."""
    from kernlib.families.kronecker_sparse.gradients import parts
    from kernlib.runtime.ahead import planned_product

    parameters = dict(arguments)
    out = parameters.pop("out", None)
    checks.check_kinds(descriptor, tensors)
    check_names(descriptor, parameters)
    x, products = tensors[0], []
    for factor, weight in zip(descriptor.factors, tensors[1:], strict=True):
        if products:
            call = PRODUCT.check(*products[-1].request)
            x = x.new_empty(call.out_shape, dtype=call.dtype)
            x.requires_grad_(products[-1].recorded)
        check_dense(("x", "weight"), x=x, weight=weight)
        values = {name: parameters[name] for name in factor.parameters}
        values |= {"out": out} if len(products) + 2 == len(tensors) else {}
        products.append(planned_product(PRODUCT, calls, parts, factor, (x, weight), values))
    return products


def variants(
    descriptor: KroneckerSparse | KroneckerSparseChain, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor, its gradient included, and inputs of
    ``dtypes``; none for float64, which torch computes. Raises KeyError for other dtypes."""
    from kernlib.families.kronecker_sparse.lowering import choose

    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    specs: dict[KernelSpec, None] = {}
    for factor in descriptor.factors:
        permitted = factor.precision and plans.kernel_precision(factor.precision)
        shape = factor.epilogue, factor.pattern, factor.batch_last
        specs |= dict.fromkeys(choose.variants(*shape, arch, names, permitted))
    return list(specs)
