"""A pairwise call as it was made, and the problem that lowering sees in it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernlib.canonical import encode
from kernlib.errors import UnsupportedError
from kernlib.families.pairwise import checks
from kernlib.families.pairwise.descriptor import Pairwise
from kernlib.families.pairwise.lowering import problem as lowering
from kernlib.families.pairwise.lowering.problem import Layout
from kernlib.runtime.dtypes import DTYPE_NAMES, accumulator
from kernlib.runtime.rehearsal import on_gpu
from kernlib.runtime.tensors import materialised


class Request(NamedTuple):
    """A call's arguments, in the order of :func:`kernlib.families.pairwise.checks.check_call`."""

    descriptor: Pairwise
    a: torch.Tensor
    b: torch.Tensor | None
    out: torch.Tensor | None
    accumulate: bool
    row_offset: int
    col_offset: int
    hyperparameters: dict

    def readable(self) -> Request:
        """The request with inputs that a kernel can read: lazy negations and zero tensors are
        copied. Raises TypeError for what is no dense tensor."""
        checks.check_tensors(self.a, self.b, self.out)
        b = self.b if self.b is None else materialised(self.b)
        return self._replace(a=materialised(self.a), b=b)

    @property
    def second(self) -> torch.Tensor:
        return self.a if self.b is None else self.b

    def target(self, call: checks.Call) -> torch.Tensor:
        """The output as far as sizes and strides go."""
        if self.out is not None:
            return self.out
        return torch.empty(call.out_shape, dtype=call.out_dtype, device="meta")

    def device(self) -> int:
        """Index of the GPU that computes it. Raises UnsupportedError for other devices."""
        if not on_gpu(self.a.device):
            raise UnsupportedError(
                f"kernlib computes on CUDA and CPU tensors, a is on {self.a.device}; move it to "
                "one of them"
            )
        return self.a.get_device()


def is_empty(call: checks.Call) -> bool:
    """Whether its output has no elements, so that nothing is launched."""
    return call.m * call.n * call.batch == 0


def problem_of(request: Request, call: checks.Call) -> tuple[lowering.Problem, tuple[int, ...]]:
    """A checked call as lowering sees it, and the strides of its hyperparameters."""
    descriptor, hyperparameters = request.descriptor, request.hyperparameters
    tensors = (request.a, request.second, request.target(call))
    problem = lowering.Problem(
        call.m,
        call.n,
        call.k,
        call.batch,
        *(layout_of(t, call.batch) for t in tensors),
        DTYPE_NAMES[call.dtype],
        DTYPE_NAMES[call.out_dtype],
        request.row_offset - request.col_offset,
        bool(request.accumulate),
        *checks.exponents(descriptor, hyperparameters),
        checks.follows_inner(descriptor, hyperparameters),
    )
    return problem, scalar_strides(descriptor, hyperparameters, call)


def tuning_signature(descriptor: Pairwise, problem: lowering.Problem) -> bytes:
    """What calls must share for one kernel to be fastest: all but the diagonal's place."""
    return encode((descriptor.canonical(), problem._replace(diagonal=0)))


def layout_of(t: torch.Tensor, batch: int) -> Layout:
    """Strides and address for lowering. The stride of a dimension of one entry is 0, so that it
    does not limit the alignment."""
    rows, columns = (s if n > 1 else 0 for s, n in zip(t.stride()[-2:], t.shape[-2:], strict=True))
    if t.shape[-1] == 1:
        columns = 1 if rows != 1 else columns
    step = t.stride(0) if t.dim() == 3 and t.shape[0] == batch and batch > 1 else 0
    address = t.storage_offset() * t.element_size() if t.is_meta else t.data_ptr()
    return Layout(step, rows, columns, address & 15)


def scalar_strides(descriptor, hyperparameters, like) -> tuple[int, ...]:
    """The strides of the hyperparameters, in the order of a plan's numbers, for a call on tensors
    ``like`` one."""
    slots = checks.slots(descriptor)
    strides = [0] * lowering.scalar_count(descriptor)
    for name, value in hyperparameters.items():
        if isinstance(value, torch.Tensor):
            strides[slots[name] // 2] = scalar_stride(value, like)
    return tuple(strides)


def scalar_stride(value, like) -> int:
    """A hyperparameter's stride over the batch of a call, 0 for one value of all entries."""
    if not isinstance(value, torch.Tensor) or value.dim() != 1 or value.shape[0] == 1:
        return 0
    # One that must be copied to the device or converted arrives contiguous.
    same = value.device == like.device and value.dtype == accumulator(like.dtype)
    return value.stride(0) if same else 1
