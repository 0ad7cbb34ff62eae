"""The Kronecker-sparse op for whoever records calls and runs them later: torch.compile,
torch.export, make_fx, fake tensors. Eager calls pass by."""

from __future__ import annotations

import torch

from kernlib.descriptors.text import from_text
from kernlib.families.kronecker_sparse import checks, operators
from kernlib.families.kronecker_sparse.descriptor import KroneckerSparse, KroneckerSparseChain
from kernlib.runtime.arguments import (
    autocast,
    check_names,
    check_out,
    check_parameters,
    for_operator,
    refuse_out_of_recorded,
)
from kernlib.runtime.tensors import check_dense


def run(
    descriptor: KroneckerSparse | KroneckerSparseChain,
    x: torch.Tensor,
    weight: torch.Tensor,
    *more: torch.Tensor,
    out: torch.Tensor | None = None,
    debug: bool = False,
    **parameters,
) -> torch.Tensor:
    """:func:`kernlib.families.kronecker_sparse.operation.run` by way of the operators.

    What is wrong with shapes, dtypes and devices is raised here; what is wrong with values when the
    operator runs.
    """
    if out is not None and torch.is_grad_enabled():
        for tensor in (x, weight, *more, out, *parameters.values()):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                refuse_out_of_recorded(out)
    names = " ".join(parameters)
    y = _call(descriptor.text, names, debug, x, weight, *more, *parameters.values())
    if out is None:
        return y
    check_out(out, x, y.shape)
    return out.copy_(y)


# Dynamo puts the call into its graph as it is, for AOTAutograd to trace what it does: descriptors
# field by field would make symbols of their sizes, and it could not read the text.
@torch.compiler.allow_in_graph
def _call(text: str, names: str, debug: bool, *tensors) -> torch.Tensor:
    descriptor, listed = from_text(text), names.split()
    operands = tensors[: len(tensors) - len(listed)]
    parameters = dict(zip(listed, tensors[len(operands) :], strict=True))
    check_names(descriptor, parameters)
    checks.check_weights(descriptor, operands[1:])
    x = operands[0]
    for factor, weight in zip(descriptor.factors, operands[1:], strict=True):
        own = {name: parameters[name] for name in factor.parameters}
        x = _factor(factor, x, weight, own, debug)
    return x


def _factor(descriptor: KroneckerSparse, x, weight, parameters: dict, debug: bool) -> torch.Tensor:
    check_dense(("x", "weight"), x=x, weight=weight)
    (x, weight), parameters = autocast((x, weight), parameters)
    checks.check_operands(descriptor.pattern, descriptor.batch_last, x, weight)
    check_parameters(descriptor, descriptor.out_features, parameters, x, False, checks.TYPES)
    return operators.whole(x, weight, descriptor.text, *for_operator(parameters, x.device), debug)
