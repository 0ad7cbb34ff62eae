"""The Kronecker-sparse op: products with factors of support ``I_a ⊗ 1_{b×c} ⊗ I_d``, as they are
called."""

from __future__ import annotations

import torch

from kernlib.families.kronecker_sparse import checks
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain
from kernlib.families.kronecker_sparse.product import PRODUCT, calls
from kernlib.runtime.arguments import check_names
from kernlib.runtime.products import front_door
from kernlib.runtime.tensors import refuse_any_overlap


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
