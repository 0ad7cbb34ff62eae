"""Products with Kronecker products, as they are called."""

from __future__ import annotations

import torch

from kernlib.families.kronecker_product import checks
from kernlib.families.kronecker_product.descriptor import KroneckerProduct
from kernlib.families.kronecker_product.product import PRODUCT, calls
from kernlib.runtime.products import front_door


def _recorded(*request) -> torch.Tensor:
    from kernlib.families.kronecker_product import gradients  # which other calls do without

    return gradients.recorded(*request)


_run_matrix = front_door(PRODUCT, calls, _recorded)


def run(descriptor: KroneckerProduct, *operands, out=None, **parameters) -> torch.Tensor:
    """A call of :func:`kernlib.run_kernel`. An x of one dimension counts as one row, or column."""
    try:
        is_vector = operands[0].dim() == 1
    except (IndexError, AttributeError, TypeError, ValueError):  # the checks say that it is none
        is_vector = False
    if not is_vector:
        return _run_matrix(descriptor, *operands, out=out, **parameters)
    operands, written, parameters = checks.as_matrix(descriptor, operands, out, parameters)
    y = _run_matrix(descriptor, *operands, out=written, **parameters)
    return y.squeeze(-3 - descriptor.axis) if out is None else out


RUNS = {KroneckerProduct: run}
