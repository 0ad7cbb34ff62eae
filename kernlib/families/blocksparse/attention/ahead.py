"""What is done with block-sparse attention before anybody calls it: which kernels it uses, and its
plans with those loaded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import NamedTuple

import torch

from kernlib.errors import UnsupportedError
from kernlib.families.blocksparse.attention import arguments, plans
from kernlib.families.blocksparse.attention.arguments import Options
from kernlib.families.blocksparse.attention.descriptor import BlockSparseAttention
from kernlib.families.blocksparse.attention.primitive import ATTENTION, calls
from kernlib.families.blocksparse.lowering.attention import choose
from kernlib.families.blocksparse.lowering.attention.score_source import CAPTURED
from kernlib.jit import targets
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.choice import Choice
from kernlib.lowering.steps import Lowered
from kernlib.runtime.arguments import refuse_out_of_recorded
from kernlib.runtime.candidates import Candidate, Candidates
from kernlib.runtime.devices import arch_of, load, model
from kernlib.runtime.dtypes import KERNEL_TYPES
from kernlib.runtime.operation import REFERENCE
from kernlib.runtime.products import requires_gradient


class Request(NamedTuple):
    """A call, in the order of :mod:`.primitive`."""

    descriptor: BlockSparseAttention
    operands: tuple
    out: torch.Tensor | None
    options: Options
    captured: dict

    @classmethod
    def of(cls, descriptor, operands: tuple, given: dict) -> Request:
        """As autocast would have it. Raises TypeError for an argument that is not known."""
        rest = dict(given)
        out = rest.pop("out", None)
        numbers = {name: rest.pop(name) for name in arguments.NUMBERS if name in rest}
        for name in rest:
            if name not in descriptor.names:
                arguments.refuse_name(descriptor, name)
        arguments.check_kinds(descriptor, operands)
        options = arguments.options_of(descriptor, operands, **numbers)
        request = cls(descriptor, arguments.autocast(operands), out, options, rest)
        found = ATTENTION.materialised(*request)  # with tensors that a kernel may read
        return request if found is None else cls(*found)

    def recorded(self) -> bool:
        """Whether a gradient would be recorded."""
        values = self.captured.values()
        return torch.is_grad_enabled() and requires_gradient(
            values, *self.operands[1:], self.out, *self.options.tensors
        )

    def check(self) -> arguments.Call:
        """Raises what a call raises."""
        if self.recorded():
            refuse_out_of_recorded(self.out)
        return ATTENTION.check(*self)

    def specs(self, arch: str, multiprocessors: int, device: int | None) -> list[KernelSpec]:
        """The kernels of the call, as it is tuned on a device if one is given, and with a gradient
        recorded those of that: of a contiguous one."""
        problem, *_ = plans.problem_of(*self)
        found = (
            choose.lower(problem, arch, multiprocessors) if device is None
            else plans.lower(problem, device)
        ).specs  # fmt: skip
        if self.recorded():
            sizes, q = arguments.sizes_of(self.operands), self.operands[1]
            y = torch.empty(sizes.out, dtype=q.dtype, device="meta")
            tensors = (*self.operands[1:], *(self.captured[n] for n in self.descriptor.names))
            needs = tuple(t.requires_grad for t in tensors)
            rest = self.options, self.captured, (y, None), needs
            gradient, _ = plans.gradient_of(self.descriptor, self.operands, y, *rest)
            found += choose.lower_gradient(gradient, arch, multiprocessors).specs
        return list(dict.fromkeys(found))


def prepare(descriptor: BlockSparseAttention, *operands, **given) -> None:
    """Build the plan of a call, compiling and loading its kernels, and load those of the gradient
    that would be recorded; see :func:`kernlib.prepare`."""
    request = Request.of(descriptor, operands, given)
    call = request.check()
    if call.device.type == "meta":
        raise UnsupportedError("tensors on meta are on no GPU to prepare: see kernlib.compile")
    if ATTENTION.way(call, *request) == REFERENCE:
        return
    if calls.find(*request) is None:
        calls.make(call, *request)
    index = call.device.index
    if call.count:
        for spec in request.specs(arch_of(index), model(index).multiprocessors, index):
            load(spec, index)


def prepared(descriptor: BlockSparseAttention, *operands, **given) -> bool:
    """Whether the plan of a call is there, so that it needs nothing but its launch, or torch
    computes it. One whose gradient would be recorded is never: its kernels are looked for each
    time."""
    request = Request.of(descriptor, operands, given)
    call = request.check()
    if ATTENTION.way(call, *request) == REFERENCE:
        return True
    return not request.recorded() and calls.find(*request) is not None


def specs(
    descriptor: BlockSparseAttention,
    arch: str,
    tensors: tuple,
    given: dict,
    device: int | None = None,
) -> list[KernelSpec]:
    """The kernels that a call with these tensors (``layout.to("meta")`` and ``meta`` ones will do)
    uses on the GPUs of an arch, or on ``device`` alone, if it is given, with those of the gradient
    that would be recorded."""
    request = Request.of(descriptor, tensors, given)
    call = request.check()
    problem = plans.problem_of(*request)
    if problem is None or not call.count or not choose.takes(problem[0], arch):
        return []
    fewest, most = targets.MULTIPROCESSORS[arch]
    if device is not None:
        fewest = most = model(device).multiprocessors
    found = (request.specs(arch, count, device) for count in range(fewest, most + 1))
    return list(dict.fromkeys(spec for made in found for spec in made))


def variants(
    descriptor: BlockSparseAttention, arch: str, dtypes: tuple[torch.dtype, ...]
) -> list[KernelSpec]:
    """Every kernel that lowering can choose for a descriptor and tensors of ``dtypes``, of the
    usual widths and captured ones of one dtype, and for gradients by q, k and v; none for float32
    and float64. Raises KeyError for other dtypes."""
    names = [KERNEL_TYPES[dtype] for dtype in dtypes if dtype != torch.float64]
    names = tuple(name for name in names if name != "float32")
    kinds = CAPTURED if descriptor.names else ("",)
    across = [name for name, axes in descriptor.captured if "col" in axes]
    found: dict[KernelSpec, None] = {}
    for kind, by, packed in product(kinds, ((), ("v",)), [()] + [across] * bool(across)):
        try:
            score = plans.score_of(descriptor, (kind,) * len(descriptor.names), by, packed)
        except ValueError:  # of a dtype that the expressions have no use for
            continue
        found.update(dict.fromkeys(choose.variants(score, names, arch)))
    return list(found)


def candidates(descriptor: BlockSparseAttention, *operands, **given) -> Candidates:
    """The kernels that could compute a call, none for an empty result; see :func:`kernlib.tune`.

    Raises what a call raises, and UnsupportedError for what torch computes.
    """
    request = Request.of(descriptor, operands, given)
    call = request.check()
    q = request.operands[1]
    if call.device.type != "cuda" or ATTENTION.way(call, *request) == REFERENCE:
        raise UnsupportedError(
            "kernels are timed on the GPU that will run them, and torch computes this attention of "
            f"{call.dtype} on {call.device}; move layout, q, k and v to a CUDA device"
        )
    index = q.get_device()
    if not call.count:
        return Candidates(index, b"", [])
    problem, *_ = plans.problem_of(*request)
    scratch = request._replace(out=q.new_empty(call.shape))
    arch, count = arch_of(index), model(index).multiprocessors

    def candidate(choice: Choice) -> Candidate:
        lowered = choose.lower(problem, arch, count, choice)
        main = max(lowered.specs, key=lambda spec: spec.shared_bytes)
        return Candidate(choice, main, partial(_ready, call, scratch, lowered))

    made = [candidate(choice) for choice in choose.candidates(problem, arch)]
    return Candidates(index, plans.signature(problem), made)


def _ready(call: arguments.Call, scratch: Request, lowered: Lowered) -> Callable[[], object]:
    """Launch the kernels of a call, and return what launches them again."""
    plan = plans.plan(call, *scratch, lowered)
    ATTENTION.launch(plan, *scratch)
    return partial(ATTENTION.launch, plan, *scratch)
