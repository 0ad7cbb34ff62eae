"""Scores and masks of attention on the device, beside the reference in torch."""

import torch

from kernlib.runtime import devices
from kernlib.runtime.plan import Plan
from tests.families.blocksparse.lowering.attention.evaluated import (
    EVERYTHING,
    MOST,
    NAMED,
    SHAPE,
    check,
    made_of,
    spec_of,
    views_of,
)
from tests.support.scores import captured, expression_of

MASKS = (
    "document == topic", "0 <= row - col < 3 and not wanted", "flag ^ (row % 2 == head)",
    "bias < shift or gain * 2 > slope", "mod(row * col - document, -3) != 0",
)  # fmt: skip


def test_scores_and_masks_are_the_references(seed):
    """With slopes by the logit and by each captured tensor."""
    tensors, v = captured(), torch.randn(SHAPE)
    tensors["shift"] = (tensors["shift"].abs() + 1).clamp(max=2)  # an exponent
    known = [*map(expression_of, NAMED.values()), expression_of(EVERYTHING)]
    known += [expression_of(None, text) for text in MASKS]
    own = {name: x.cuda() for name, x in tensors.items()}
    views = b"".join(views_of(each, own) for each in known)
    records = torch.frombuffer(bytearray(views), dtype=torch.uint8).cuda()
    out = torch.full((len(known), 3 + MOST, *SHAPE), -1.0, device="cuda")
    given = v.cuda()
    device = out.get_device()
    kernel = devices.load(spec_of([made_of(each) for each in known]), device)
    plan = Plan(kernel, device, (1, 1), 3, "", b"")
    plan.launch((records.data_ptr(), given.data_ptr(), out.data_ptr()))
    for expression, found in zip(known, out.cpu(), strict=True):
        check(found, expression, v, tensors)
