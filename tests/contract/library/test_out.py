"""``out`` is written in place in compiled calls, and refused where a gradient is recorded."""

import re
from functools import partial

import pytest
import torch

from tests.contract.library.calls import EXACT, close, compiled
from tests.contract.library.operations import every

pytestmark = pytest.mark.few(by="operation")

LAYOUTS = {
    "row": lambda filled, shape: filled(shape),
    "column": lambda filled, shape: filled(shape[::-1]).permute(*range(len(shape))[::-1]),
    "part": lambda filled, shape: filled([n + 3 for n in shape])[
        tuple(slice(1, n + 1) for n in shape)
    ],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@every(lambda one: one.outs)
def test_out_is_written_in_place_and_returned(operation, case, layout):
    given = operation.outs[case]
    filled = partial(torch.full, fill_value=2.0, dtype=given.dtype)
    out, wanted = (LAYOUTS[layout](filled, given.shape) for _ in range(2))
    memory, expected = (t if t._base is None else t._base for t in (out, wanted))
    version = out._version
    found = compiled(lambda *tensors, out: given.run(*tensors, out=out))(*given.operands, out=out)
    assert given.run(*given.operands, out=wanted) is wanted
    assert found.data_ptr() == out.data_ptr() and found.stride() == out.stride()
    close(memory, expected, EXACT)
    assert out._version > version


@every(lambda one: [name for name, given in one.outs.items() if given.names])
def test_what_requires_a_gradient_is_refused_through_out(operation, case):
    given = operation.outs[case]
    run = compiled(lambda out, *tensors: given.run(*tensors, out=out))
    for place, name in zip(given.places, given.names, strict=True):
        tensors = [*map(torch.clone, given.operands), torch.zeros(given.shape, dtype=given.dtype)]
        tensors[place].requires_grad_()
        *operands, out = tensors
        with pytest.raises(RuntimeError, match=given.refusal.format(name=re.escape(name))):
            run(out, *operands)
        with torch.no_grad():
            found = run(out, *operands)
            wanted = given.run(*operands, out=torch.zeros(given.shape, dtype=given.dtype))
        close(found.detach(), wanted, EXACT)
