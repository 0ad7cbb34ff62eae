"""``kernlib compile``: kernels into the cache before anybody calls them."""

from __future__ import annotations

import inspect
import re
import time
from collections import defaultdict
from itertools import product, zip_longest

import click

from kernlib import progress
from kernlib.cli import kernels, lookup, machine, places
from kernlib.cli.options import Argument, Shape, Sizes, arch_option, json_option
from kernlib.cli.output import counted, plain_errors, print_json, print_table, say
from kernlib.records import NamedTuple

COLUMNS = {"arch": "left", **kernels.REPORTS, "from": "left", "description": "left"}
SPARE = ("shared", "spills", "registers", "cubin")  # what a narrow terminal does without
REDUCTIONS = (
    *("kernel_matmul", "kernel_sum", "kernel_logsumexp"),
    *("kernel_min", "kernel_argmin", "kernel_topk"),
)


@click.command("compile")
@click.argument("names", metavar="DESCRIPTOR...", nargs=-1, required=True)
@arch_option(
    "Target such as sm_80, or native; may be repeated. By default this machine's GPUs, else sm_90a."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="DTYPE",
    help="Of the tensors, such as float16; may be repeated. By default float32.",
)
@click.option(
    "--shape",
    "shapes",
    type=Shape(),
    multiple=True,
    metavar="SHAPE",
    help="Of one tensor of a call, such as 1000x64, or bias=384 for one with a name; once for "
    "each: only that call's kernels. A letter is a size that --size gives.",
)
@click.option(
    "--size",
    "sizes",
    type=Sizes(),
    multiple=True,
    metavar="LETTER=SIZE",
    help="What a letter of --shape stands for, such as M=1000, or M=1000..100000 for a range: the "
    "kernels of calls of its ends, of the powers of two between, and of each plus one.",
)
@click.option(
    "--argument",
    "arguments",
    type=Argument(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the call that --shape describes, such as bandwidth=8.0; may be repeated.",
)
@click.option(
    "--reduction",
    type=click.Choice(REDUCTIONS),
    metavar="FUNCTION",
    help="The call that --shape describes is this function of a kernel matrix that is not stored: "
    f"{', '.join(REDUCTIONS)}.",
)
@click.option(
    "--gradient",
    "gradients",
    multiple=True,
    metavar="NAME",
    help="Operand or argument by which the call is differentiated, such as a or bandwidth: with "
    "the kernels of its backward pass; may be repeated.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads that compile. By default one a core.",
)
@json_option
def compile_kernels(
    names, archs, dtypes, shapes, sizes, arguments, reduction, gradients, workers, as_json
) -> None:
    """Compile kernels into the cache, for GPUs that need not be here.

    DESCRIPTOR is one of kernlib's ready-made descriptors, such as laplace_l1; a descriptor as
    text, such as "KroneckerSparse(a=6, b=64, c=64, d=1, epilogue=(Bias(),))"; or
    package.module:name, where name is a descriptor, a list of them, or a function that returns
    either; modules of the working directory are found. With --shape, the kernels that a call with
    such tensors uses; without, every kernel that any call may use, but of kernel matrices none of
    gradients and reductions. What the cache or a bundle has is not compiled again. Progress goes
    to stderr.

    Exits with 1 if a kernel does not compile or cannot be kept on disk.
    """
    call = _call(arguments, shapes, sizes, reduction, gradients)
    with plain_errors():
        # First what needs no torch: a misspelt name should not wait for it.
        descriptors = [found for name in names for found in lookup.descriptors(name)]
        known = _dtypes(dtypes)
        places.disk_layers()
        targets = archs or _archs_here()
        facts = _compile(descriptors, targets, known, call, workers)
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    lost = facts["compiled"] - facts["kept"]
    if lost:
        said = f"{counted(lost, 'kernel')} could not be kept in {facts['path']}"
        raise click.ClickException(f"{said}; `kernlib doctor` says how full it is")


class Call(NamedTuple):
    """The calls that the options describe: of each the sizes of its operands, and for all of them
    the arguments by name, numbers and sizes of tensors; a reduction and names of gradients."""

    operands: list[tuple[tuple[int, ...], ...]]
    arguments: dict
    reduction: str | None
    gradients: tuple[str, ...]


def _call(arguments, shapes, sizes, reduction, gradients) -> Call:
    """Raises UsageError, BadParameter."""
    named: dict = {}
    given = [("--argument", *pair) for pair in arguments]
    given += [("--shape", *pair) for pair in shapes if pair[0]]
    for option, name, value in given:
        if name in named:
            raise _bad(f"{name} is given twice.", option)
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
            raise _bad(f"the sizes of {name}, which has a name, are numbers.", "--shape")
    return Call(_several(operands, sizes), named, reduction, gradients)


def _several(operands: tuple, sizes: tuple) -> list[tuple]:
    """The operands of each call, with sizes in the place of letters. Raises BadParameter."""
    letters = dict.fromkeys(part for shape in operands for part in shape if isinstance(part, str))
    known = dict(sizes)
    if len(known) < len(sizes):
        raise _bad("a letter is given twice.", "--size")
    for letter in letters:
        if letter not in known:
            raise _bad(f"{letter} of --shape has no size: {letter}=1000 would do.", "--size")
    for letter in known:
        if letter not in letters:
            raise _bad(f"{letter} is in no --shape.", "--size")
    made = []
    for chosen in product(*(known[letter] for letter in letters)):
        by_letter = dict(zip(letters, chosen, strict=True))
        made.append(tuple(tuple(by_letter.get(n, n) for n in shape) for shape in operands))
    return made


def _dtypes(names: tuple[str, ...]) -> tuple:
    with progress.busy("loading torch"):
        import torch

    found = tuple(getattr(torch, name, None) for name in names)
    for name, dtype in zip(names, found, strict=True):
        if not isinstance(dtype, torch.dtype):
            raise _bad(f"{name!r} is no dtype of torch; float32 or float16 would do.", "--dtype")
    return found or (torch.float32,)


def _archs_here() -> tuple[str, ...]:
    found = machine.archs()
    if found:
        click.echo(f"Compiling for this machine's {', '.join(found)}.", err=True)
        return tuple(found)
    arch = machine.ARCH_WITHOUT_GPU
    click.echo(f"Compiling for {arch}: no GPU is here to ask, and no --arch is given.", err=True)
    return (arch,)


def _compile(descriptors: list, archs: tuple, dtypes: tuple, call: Call, workers) -> dict:
    """Compile or find them; all that is printed. Raises what kernlib.compile raises for kernels,
    UsageError for what it says of arguments."""
    from kernlib import events

    seen: list = []
    unsubscribe = events.subscribe(seen.append)
    start = time.perf_counter()
    try:
        made = _entries(descriptors, archs, dtypes, call, workers)
    except (TypeError, ValueError) as error:
        raise click.UsageError(_in_options(str(error), descriptors)) from error
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise _bad("the output of such a call is too large for torch.", "--shape") from error
    finally:
        unsubscribe()
    compiled = [event.key for event in seen if event.name == "compile"]
    kept = {event.key for event in seen if event.name == "store"}
    rows = _facts(made, seen)
    return {
        "archs": list(archs),
        "compiled": len(compiled),
        "found": len(rows) - len(compiled),
        "kept": sum(_is_kept(key) for key in kept.intersection(compiled)),
        "seconds": round(time.perf_counter() - start, 3),
        "path": str(places.folder()),
        "kernels": rows,
    }


def _is_kept(key: str) -> bool:
    """Whether a kernel that was put into the store has not been driven out by later ones."""
    from kernlib.jit import service

    return service.layers().store.get(bytes.fromhex(key)) is not None


def _entries(descriptors: list, archs: tuple, dtypes: tuple, call: Call, workers) -> list:
    """The distinct entries that kernlib.compile answers, in order."""
    import kernlib

    own = set(inspect.signature(kernlib.compile).parameters)
    for name in own.intersection(call.arguments):
        raise _bad(f"{name} is no argument of a call.", "--argument")
    common = {"archs": archs, "workers": workers}
    if call.operands == [()]:
        made = kernlib.compile(descriptors, dtypes=dtypes, **common)
        return list({id(entry): entry for entry in made}.values())
    made = []
    # Which operand a gradient is by depends on the descriptor.
    groups = [[each] for each in descriptors] if call.gradients else [descriptors]
    for dtype in dtypes:
        for group in groups:
            tensors, given = _tensors(group[0], call, dtype)
            for descriptor in group:
                _check_operands(descriptor, call)
            if len(tensors) == 1:
                made += kernlib.compile(group, specs=tensors[0], **common, **given)
            else:
                made += _of_range(group, archs, tensors, given, workers)
    return list({id(entry): entry for entry in made}.values())


def _of_range(descriptors: list, archs: tuple, calls: list, given: dict, workers) -> list:
    """The entries of many calls, which take few kernels: so these are listed first."""
    from kernlib.ahead import build_all, specs

    jobs = {
        (spec, arch): None
        for arch in archs
        for descriptor in descriptors
        for tensors in calls
        for spec in specs(descriptor, arch, tensors, given)
    }
    return build_all(list(jobs), workers, None)


def _tensors(descriptor, call: Call, dtype) -> tuple[list[tuple], dict]:
    """The operands of each call, and the arguments of all. Raises BadParameter for a gradient by
    what a call has not."""
    names = _operands_of(descriptor, call)
    given = {name: _given(value, dtype) for name, value in call.arguments.items()}
    for name in call.gradients:
        if name not in names and name not in given:
            listed = ", ".join((*names, *given))
            raise _bad(f"{name!r} is nothing that this call is given: {listed}.", "--gradient")
        if name in given:
            given[name] = _differentiated(given[name], dtype)
    if call.reduction:
        given["reduction"] = call.reduction
    made = [
        tuple(
            _tensor(shape, dtype).requires_grad_(name in call.gradients)
            for name, shape in zip_longest(names[: len(shapes)], shapes)
        )
        for shapes in call.operands
    ]
    return made, given


def _differentiated(value, dtype):
    """An argument as a tensor whose gradient is recorded: of a number that of the arithmetic."""
    import torch

    if not isinstance(value, torch.Tensor):
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        value = _tensor((), wide)
    return value.requires_grad_()


def _given(value, dtype):
    """An argument of a call: a number, or in place of its sizes a tensor."""
    return _tensor(value, dtype) if isinstance(value, tuple) else value


def _operands_of(descriptor, call: Call) -> tuple[str, ...]:
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
        raise _bad(f"torch has no tensor of {text}: that is too large.", "--shape") from error


def _check_operands(descriptor, call: Call) -> None:
    """Raises UsageError for a call of too few tensors, of which what is said in Python helps
    nobody here."""
    takes, given = _operands_of(descriptor, call), len(call.operands[0])
    if given < len(takes):
        who = f"{call.reduction} of {descriptor.describe()}" if call.reduction else ""
        raise click.UsageError(
            f"{takes[given]} is missing: {who or descriptor.describe()} takes {', '.join(takes)}, "
            "and one --shape gives the sizes of each."
        )


def _in_options(text: str, descriptors: list) -> str:
    """What kernlib.compile says of a call, as a sentence; where that advises a call in Python for
    arguments that are missing, with the options that give them."""
    found = re.search(r" needs ([^:]+): (run_kernel\(.*\))$", text)
    if found:
        epilogues = [each for one in descriptors for each in getattr(one, "epilogue", ())]
        tensors = {name for each in epilogues for name in (*each.vectors, *dict(each.summands))}
        names = [name.split()[0] for name in found[1].split(", ")]  # of "p (or inner_p)" the first
        options = [f"--shape {n}=384" if n in tensors else f"--argument {n}=1.0" for n in names]
        text = f"{text[: found.end(1)]}, such as {' '.join(options)}"
    return text if text.endswith((".", "?")) else f"{text}."


def _facts(made: list, seen: list) -> list[dict]:
    """Facts of each entry with its key and where it is from, which the events tell."""
    waiting = defaultdict(list)
    for event in seen:
        if event.name in ("compile", "hit"):
            waiting[event.arch, event.description].append(event)
    rows = []
    for entry in made:
        facts = kernels.facts(entry)
        found = waiting[facts["arch"], facts["description"]]
        event = found.pop(0) if found else None
        rows.append({"key": event and event.key, **facts, "from": _origin(event)})
    return rows


def _origin(event) -> str:
    if event is None:  # found under another description, which no key holds
        return "store"
    return "compiled" if event.name == "compile" else event.fields["where"]


def _print(facts: dict) -> None:
    rows = [
        (row["arch"], *kernels.reports(row), row["from"], row["description"])
        for row in facts["kernels"]
    ]
    if rows:
        print_table(COLUMNS, rows, spare=SPARE)
    else:
        click.echo("Such a call launches no kernel.")
    say(
        f"{facts['compiled']} compiled, {facts['found']} found, in {facts['seconds']:.1f} s; "
        f"kernels are kept in {facts['path']}"
    )


def _bad(message: str, option: str) -> click.BadParameter:
    return click.BadParameter(message, param_hint=option)
