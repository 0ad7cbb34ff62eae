"""Records of what is particular to an operation in this suite.

A family's ``library_cases.py`` has a tuple ``OPERATIONS`` of ``Operation``. What it holds is read
and never written: each test takes operands anew by ``leaves``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same ones of a shape and a seed."""
    generator = torch.Generator().manual_seed(seed + 100 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator)


def tuple_of(found) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


class Near(NamedTuple):
    """How far results may be off, rtol and atol: those without a gradient, with one, gradients."""

    plain: tuple[float, float] = (0.0, 0.0)
    recorded: tuple[float, float] = (1e-5, 1e-6)
    slopes: tuple[float, float] = (1e-5, 1e-6)


class Call(NamedTuple):
    """A function of tensors, these, and the places of those that may require a gradient."""

    run: Callable
    operands: tuple[torch.Tensor, ...] = ()
    places: tuple[int, ...] = ()
    near: Near | None = None  # where it is not the operation's

    def leaves(self, recording: bool = False) -> list[torch.Tensor]:
        """The operands with their strides, which none of the caller's tensors sees."""
        fresh = [t.detach() for t in self.operands]
        for place in self.places if recording else ():
            fresh[place].requires_grad_()
        return fresh


class Sizes(NamedTuple):
    """A function, and operands of several sizes for one program: tensors, and what has one size."""

    run: Callable
    operands: tuple[tuple, ...]
    places: tuple[int, ...] = ()


class Changes(NamedTuple):
    """A function, arguments of each call in turn, and how many programs they may take."""

    run: Callable
    arguments: tuple[tuple, ...]
    programs: int | None = None


class Descriptors(NamedTuple):
    """A function of a descriptor and of tensors, and several of these."""

    run: Callable
    given: tuple[tuple, ...]


class Out(NamedTuple):
    """A function of operands and a keyword ``out``, the shape of that, and what is said where one
    of the operands, or out behind them, requires a gradient: its name stands for ``{name}``. Some
    cases have no names, as each place is a program.

    ``copied``: of fake tensors, out takes a copy, which torch without CUDA refuses to those of a
    GPU. ``fake=False``: an operand that is none of these cannot be fake.
    """

    run: Callable
    operands: tuple[torch.Tensor, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    names: tuple[str, ...] = ()
    refusal: str = ""
    copied: bool = True
    fake: bool = True

    @property
    def places(self) -> tuple[int, ...]:
        """Of those with a name, the last of which is out."""
        return (*range(len(self.names) - 1), len(self.operands))


class Wrong(NamedTuple):
    """A function of the typical call's operands that raises, and what it says.

    ``recorded``: also where a gradient is recorded, and nothing else is wrong then.
    """

    run: Callable
    message: str
    recorded: bool = True


class Exported(NamedTuple):
    """A module, its input of so many rows, and operators of its program. ``trains``: it has
    parameters."""

    module: Callable[[], torch.nn.Module]
    example: Callable[[int], torch.Tensor]
    operators: tuple[str, ...]
    rows: tuple[int, ...]  # the first is what it is exported with
    trains: bool = True


class Graph(NamedTuple):
    """Operators that make_fx sees: of a call, of one with a gradient, and with its backward."""

    call: Call
    operators: tuple[str, ...]
    recorded: tuple[str, ...] = ()
    backward: tuple[str, ...] = ()


class Transform(NamedTuple):
    """A call inside of vmap and grad of torch.func. None, or what is said where one is refused, in
    eager calls and in compiled ones. ``mapped``: places of what is mapped over."""

    call: Call
    mapped: tuple[int, ...]
    vmap: str | None
    compiled_vmap: str | None
    grad: str | None
    compiled_grad: str | None


class Check(NamedTuple):
    """An operator with arguments for opcheck, and the places of what may require a gradient: a
    tensor, or a list of them."""

    operator: str
    arguments: tuple
    places: tuple[int, ...] = ()


class Numeric(NamedTuple):
    """A function of tensors whose gradients are those of differences, once and twice."""

    run: Callable
    tensors: tuple[torch.Tensor, ...]
    options: tuple[tuple[str, float], ...] = ()
    twice: bool = True


class Quiet(NamedTuple):
    """Code of eager calls, for a process of its own, and modules that it must not load."""

    code: str
    absent: tuple[str, ...]


class Autocast(NamedTuple):
    """A call, and the dtype that it gives under autocast to bfloat16."""

    call: Call
    dtype: torch.dtype
    near: tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation. ``broken`` names promises that it breaks, with the reason: those are expected
    to fail, and a test that passes says that the entry can go."""

    name: str
    operator: str  # that a call without a gradient is
    typical: Call  # what most promises are proven with
    text: str  # of the descriptor, as the graph of a typical call shows it
    dynamo_sees: bool  # the operator, and not a function that calls it
    near: Near
    calls: dict[str, Call]
    inductor: tuple[str, ...]  # names of calls that it is tried with
    breaking: Call  # makes an expression inside, which Dynamo does not trace
    changes: dict[str, Changes]
    descriptors: Descriptors
    sizes: dict[str, Sizes]
    autocast: Autocast
    wrong: dict[str, Wrong]
    nonsense: dict[str, Callable]  # of the typical operands: no descriptor, or no number
    outs: dict[str, Out]
    exported: dict[str, Exported]
    fakes: dict[str, Call]
    wrong_fakes: dict[str, tuple[Call, str]]
    graphs: dict[str, Graph]
    transforms: dict[str, Transform]
    checks: dict[str, Check]
    numeric: dict[str, Numeric]
    quiet: Quiet
    strides: bool = True  # of gradients are those of eager calls'
    broken: dict[str, str] = field(default_factory=dict)
