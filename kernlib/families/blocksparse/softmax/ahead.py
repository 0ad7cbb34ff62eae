"""What is done with block-sparse softmax before anybody calls it: which kernels it uses, and its
plans with those loaded."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch

from kernlib.canonical import encode
from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.lowering import softmax as lowering
from kernlib.families.blocksparse.lowering.softmax import Options
from kernlib.families.blocksparse.softmax import arguments, plans
from kernlib.families.blocksparse.softmax.descriptor import BlockSparseSoftmax
from kernlib.families.blocksparse.softmax.primitive import SOFTMAX, calls
from kernlib.jit.spec import KernelSpec
from kernlib.runtime.arguments import refuse_out_of_recorded
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import load
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import REFERENCE
from kernlib.runtime.products import requires_gradient


class Request(NamedTuple):
    """A call, in the order of :mod:`.primitive`."""

    descriptor: BlockSparseSoftmax
    operands: tuple
    out: torch.Tensor | None
    scale: float | torch.Tensor
    parameters: dict

    @classmethod
    def of(cls, descriptor, operands: tuple, given: dict) -> Request:
        """As autocast would have it. Raises TypeError for an argument that is not known."""
        rest = dict(given)
        out, scale = rest.pop("out", None), rest.pop("scale", 1.0)
        for name in rest:
            if name not in arguments.NAMES:
                known = ", ".join(("out", "scale", *arguments.NAMES))
                raise TypeError(
                    f"{name} is no argument of {descriptor.describe()}; it takes {known}"
                )
        arguments.check_kinds(descriptor, operands)
        parameters = arguments.given(*(rest.get(name) for name in arguments.NAMES))
        return cls(
            descriptor, operands, out, scale, arguments.autocast(operands, parameters)
        ).readable()

    def readable(self) -> Request:
        """With tensors that a kernel may read."""
        found = SOFTMAX.materialised(*self)
        return self if found is None else Request(*found)

    def recorded(self) -> bool:
        """Whether a gradient would be recorded."""
        values = self.parameters.values()
        _, x = self.operands
        return torch.is_grad_enabled() and requires_gradient(values, x, self.out, self.scale)

    def check(self) -> arguments.Call:
        """Raises what a call raises."""
        if self.recorded():
            refuse_out_of_recorded(self.out)
        return SOFTMAX.check(*self)

    def specs(self) -> list[KernelSpec]:
        """The kernels of the call and, with a gradient recorded, of that: of a contiguous one."""
        layout, x = self.operands
        found, *_ = plans.problem_of(self.descriptor, layout, x, self.out, self.parameters)
        made = lowering.lower(found).specs
        if self.recorded():
            y = torch.empty(x.shape, dtype=x.dtype, device="meta")
            made += lowering.lower(plans.gradient_of(layout, y, y)[0]).specs
        return made


def prepare(descriptor: BlockSparseSoftmax, *operands, **given) -> None:
    """Build the plan of a call, compiling and loading its kernel, and load that of the gradient
    that would be recorded; see :func:`kernlib.prepare`."""
    request = Request.of(descriptor, operands, given)
    call = request.check()
    if call.device.type == "meta":
        raise UnsupportedError("tensors on meta are on no GPU to prepare: see kernlib.compile")
    if SOFTMAX.way(call, *request) == REFERENCE:
        return
    if calls.find(*request) is None:
        calls.make(call, *request)
    if call.count:
        for spec in request.specs()[1:]:
            load(spec, operands[1].get_device())


def prepared(descriptor: BlockSparseSoftmax, *operands, **given) -> bool:
    """Whether the plan of a call is there, so that it needs nothing but its launch, or torch
    computes it. One whose gradient would be recorded is never: its kernel is looked for each
    time."""
    request = Request.of(descriptor, operands, given)
    call = request.check()
    if SOFTMAX.way(call, *request) == REFERENCE:
        return True
    return not request.recorded() and calls.find(*request) is not None


def specs(
    descriptor: BlockSparseSoftmax,
    arch: str,
    tensors: tuple,
    given: dict,
    device: int | None = None,
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``layout.to("meta")`` and ``meta`` ones will do)
    uses, the same on every GPU, with that of the gradient that would be recorded."""
    request = Request.of(descriptor, tensors, given)
    call = request.check()
    layout, _ = request.operands
    if call.dtype not in KERNEL_TYPES or not call.count or not lowering.takes(layout.sizes):
        return []
    return request.specs()


def variants(
    descriptor: BlockSparseSoftmax, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and x of ``dtypes``, masks being bools
    or not, and for its gradients; none for float64. Raises KeyError for other dtypes."""
    names = tuple(KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64)
    modes = descriptor.key_padding_mask, descriptor.attn_mask
    kinds = [(None,) if mode is None else (mode, "bool") for mode in modes]
    options = [Options(descriptor.causal, descriptor.rpe, *each) for each in product(*kinds)]
    return list(lowering.variants(options, names))


def candidates(descriptor: BlockSparseSoftmax, *operands, **given) -> Candidates:
    """The one kernel of a call, none for an empty result; see :func:`kernlib.tune`.

    Raises what a call raises, and UnsupportedError for what torch computes.
    """
    request = Request.of(descriptor, operands, given)
    call = request.check()
    layout, x = request.operands
    if call.device.type != "cuda" or SOFTMAX.way(call, *request) == REFERENCE:
        raise UnsupportedError(
            "kernels are timed on the GPU that will run them, and torch computes this softmax of "
            f"{call.dtype} on {call.device}; move layout and x to a CUDA device"
        )
    if not call.count:
        return Candidates(x.get_device(), b"", [])
    problem, *_ = plans.problem_of(descriptor, layout, x, request.out, request.parameters)
    scratch = request._replace(out=torch.empty_like(x))

    def ready():
        calls.execute(*scratch)
        return lambda: calls.execute(*scratch)

    signature = encode((descriptor.family, problem))
    only = Candidate({"kind": "softmax"}, lowering.lower(problem).specs[0], ready)
    return Candidates(x.get_device(), signature, [only])
