"""Calls as the options of a command describe them, of tensors without data: for all commands that
name kernels by the calls that use them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product, zip_longest
from typing import NamedTuple

import click

from kernlib import progress
from kernlib.cli import machine


class Call(NamedTuple):
    """The calls that the options describe: of each the sizes of its operands, and for all of them
    the arguments by name, numbers and sizes of tensors; a reduction and names of gradients."""

    operands: list[tuple[tuple[int, ...], ...]]
    arguments: dict
    reduction: str | None
    gradients: tuple[str, ...]


def described(arguments, shapes, sizes, reduction, gradients) -> Call:
    """Raises UsageError, BadParameter."""
    named: dict = {}
    options = [("--argument", *pair) for pair in arguments]
    options += [("--shape", *pair) for pair in shapes if pair[0]]
    for option, name, value in options:
        if name in named:
            raise bad(f"{name} is given twice.", option)
        named[name] = value
    operands = tuple(shape for name, shape in shapes if not name)
    for option, value in (
        ("--argument", named), ("--reduction", reduction), ("--gradient", gradients),
        ("--size", sizes),
    ):  # fmt: skip
        if value and not operands:
            raise click.UsageError(f"{option} is about one call: give its --shape too.")
    for name, value in named.items():
        if isinstance(value, tuple) and not all(isinstance(size, int) for size in value):
            raise bad(f"the sizes of {name}, which has a name, are numbers.", "--shape")
    return Call(_several(operands, sizes), named, reduction, gradients)


def one_described(arguments, shapes) -> Call:
    """:func:`described` for one call, for commands without ranges of sizes."""
    for part in (part for _, shape in shapes for part in shape):
        if isinstance(part, str):
            raise bad(f"{part} stands for no size here; numbers do, such as 1000x64.", "--shape")
    return described(arguments, shapes, (), None, ())


def has_shapes(call: Call) -> bool:
    """Whether there is a call, else all calls are meant."""
    return call.operands != [()]


def _several(operands: tuple, sizes: tuple) -> list[tuple]:
    """The operands of each call, with sizes in the place of letters. Raises BadParameter."""
    letters = dict.fromkeys(part for shape in operands for part in shape if isinstance(part, str))
    ranges = dict(sizes)
    if len(ranges) < len(sizes):
        raise bad("a letter is given twice.", "--size")
    for letter in letters:
        if letter not in ranges:
            raise bad(f"{letter} of --shape has no size: {letter}=1000 would do.", "--size")
    for letter in ranges:
        if letter not in letters:
            raise bad(f"{letter} is in no --shape.", "--size")
    calls = []
    for chosen in product(*(ranges[letter] for letter in letters)):
        by_letter = dict(zip(letters, chosen, strict=True))
        calls.append(tuple(tuple(by_letter.get(n, n) for n in shape) for shape in operands))
    return calls


def dtypes_of(names: tuple[str, ...]) -> tuple:
    with progress.busy("loading torch"):
        import torch

    dtypes = tuple(getattr(torch, name, None) for name in names)
    for name, dtype in zip(names, dtypes, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise bad(f"{name!r} is no dtype of torch; float32 or float16 would do.", "--dtype")
    return dtypes or (torch.float32,)


def archs_here(doing: str) -> tuple[str, ...]:
    archs = machine.archs()
    if archs:
        click.echo(f"{doing} for this machine's {', '.join(archs)}.", err=True)
        return tuple(archs)
    arch = machine.ARCH_WITHOUT_GPU
    click.echo(f"{doing} for {arch}: no GPU is here to ask, and no --arch is given.", err=True)
    return (arch,)


def tensors_of(descriptor, call: Call, dtype) -> tuple[list[tuple], dict]:
    """The operands of each call, and the arguments of all. Raises BadParameter for a gradient by
    what a call has not."""
    names = operands_of(descriptor, call)
    arguments = {name: _argument(value, dtype) for name, value in call.arguments.items()}
    for name in call.gradients:
        if name not in names and name not in arguments:
            listed = ", ".join((*names, *arguments))
            raise bad(f"{name!r} is nothing that this call is given: {listed}.", "--gradient")
        if name in arguments:
            arguments[name] = _differentiated(arguments[name], dtype)
    if call.reduction:
        arguments["reduction"] = call.reduction
    operands = [
        tuple(
            _tensor(shape, dtype).requires_grad_(name in call.gradients)
            for name, shape in zip_longest(names[: len(shapes)], shapes)
        )
        for shapes in call.operands
    ]
    return operands, arguments


def _differentiated(value, dtype):
    """An argument as a tensor whose gradient is recorded; a number gets the arithmetic's dtype."""
    import torch

    if not isinstance(value, torch.Tensor):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        value = _tensor((), wide)
    return value.requires_grad_()


def _argument(value, dtype):
    """An argument of a call: a number, or in place of its sizes a tensor."""
    return _tensor(value, dtype) if isinstance(value, tuple) else value


def operands_of(descriptor, call: Call) -> tuple[str, ...]:
    """The names of what a call takes by place."""
    if call.reduction and descriptor.family == "pairwise":
        from kernlib.families.pairwise.operation import operands_of

        return operands_of(descriptor, call.reduction)
    return descriptor.operands


def _tensor(shape: tuple[int, ...], dtype):
    """A tensor without data. Raises BadParameter."""
    import torch

    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError, ValueError) as error:  # whose text holds frames of C++
        text = "x".join(map(str, shape))
        raise bad(f"torch has no tensor of {text}: that is too large.", "--shape") from error


def check_operands(descriptor, call: Call) -> None:
    """Raises UsageError for a call of too few tensors: the message of the call in Python would not
    help here."""
    takes, count = operands_of(descriptor, call), len(call.operands[0])
    if count < len(takes):
        who = f"{call.reduction} of {descriptor.describe()}" if call.reduction else ""
        raise click.UsageError(
            f"{takes[count]} is missing: {who or descriptor.describe()} takes {', '.join(takes)}, "
            "and one --shape gives the sizes of each."
        )


def specs_of(descriptor, arch: str, dtypes: tuple, call: Call) -> list:
    """The kernels of one call in each dtype, or without shapes all that any call may use. Raises
    what kernlib.compile raises."""
    from kernlib import ahead

    if not has_shapes(call):
        try:
            return ahead.variants(descriptor, arch, dtypes)
        except KeyError as error:
            raise TypeError(f"dtypes: {descriptor.family} has no kernels for {error}") from None
    specs: dict = {}
    for dtype in dtypes:
        (tensors,), arguments = tensors_of(descriptor, call, dtype)
        check_operands(descriptor, call)
        specs |= dict.fromkeys(ahead.specs(descriptor, arch, tensors, arguments))
    return list(specs)


def in_options(text: str, descriptors: list) -> str:
    """What kernlib.compile says of a call, as a sentence; where that advises a call in Python for
    arguments that are missing, with the options that give them."""
    match = re.search(r" needs ([^:]+): (run_kernel\(.*\))$", text)
    if match:
        epilogues = [part for d in descriptors for part in getattr(d, "epilogue", ())]
        tensors = {name for part in epilogues for name in (*part.vectors, *dict(part.summands))}
        names = [name.split()[0] for name in match[1].split(", ")]  # of "p (or inner_p)" the first
        options = [f"--shape {n}=384" if n in tensors else f"--argument {n}=1.0" for n in names]
        text = f"{text[: match.end(1)]}, such as {' '.join(options)}"
    return text if text.endswith((".", "?")) else f"{text}."


@contextmanager
def plain_refusals(descriptors: list) -> Iterator[None]:
    """Turn what kernlib says of a call's arguments into UsageErrors that speak of options."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise click.UsageError(in_options(str(error), descriptors)) from error
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise bad("the output of such a call is too large for torch.", "--shape") from error


def bad(message: str, option: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint=option)
