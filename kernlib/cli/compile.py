"""``kernlib compile``: kernels into the cache before anybody calls them."""

from __future__ import annotations

import inspect
import re
import time
from collections import defaultdict

import click

from kernlib import progress
from kernlib.cli import kernels, lookup, machine, places
from kernlib.cli.options import Argument, Shape, arch_option, json_option
from kernlib.cli.output import counted, plain_errors, print_json, print_table, say

COLUMNS = {"arch": "left", **kernels.REPORTS, "from": "left", "description": "left"}
SPARE = ("shared", "spills", "registers", "cubin")  # what a narrow terminal does without


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
    "each: only that call's kernels.",
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
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Threads that compile. By default one a core.",
)
@json_option
def compile_kernels(names, archs, dtypes, shapes, arguments, workers, as_json) -> None:
    """Compile kernels into the cache, for GPUs that need not be here.

    DESCRIPTOR is one of kernlib's ready-made descriptors, such as laplace_l1; a descriptor as
    text, such as "KroneckerSparse(a=6, b=64, c=64, d=1, epilogue=(Bias(),))"; or
    package.module:name, where name is a descriptor, a list of them, or a function that returns
    either; modules of the working directory are found. With --shape, the kernels that a call with
    such tensors uses; without, every kernel that any call may use. What the cache or a bundle has
    is not compiled again. Progress goes to stderr.

    Exits with 1 if a kernel does not compile or cannot be kept on disk.
    """
    operands, call = _call(arguments, shapes)
    with plain_errors():
        # First what needs no torch: a misspelt name should not wait for it.
        descriptors = [found for name in names for found in lookup.descriptors(name)]
        options = {"dtypes": _dtypes(dtypes), "shapes": operands, "call": call, "workers": workers}
        places.disk_layers()
        targets = archs or _archs_here()
        facts = _compile(descriptors, targets, **options)
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    lost = facts["compiled"] - facts["kept"]
    if lost:
        said = f"{counted(lost, 'kernel')} could not be kept in {facts['path']}"
        raise click.ClickException(f"{said}; `kernlib doctor` says how full it is")


def _call(arguments: tuple, shapes: tuple) -> tuple[tuple, dict]:
    """The sizes of the operands, and the call's arguments by name: numbers, and sizes of tensors.
    Raises UsageError, BadParameter."""
    call: dict = {}
    named = [("--argument", *pair) for pair in arguments]
    named += [("--shape", *pair) for pair in shapes if pair[0]]
    for option, name, value in named:
        if name in call:
            raise _bad(f"{name} is given twice.", option)
        call[name] = value
    operands = tuple(sizes for name, sizes in shapes if not name)
    if call and not operands:
        raise click.UsageError("--argument is about one call: give its --shape too.")
    return operands, call


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


def _compile(descriptors: list, archs: tuple, dtypes, shapes, call, workers) -> dict:
    """Compile or find them; all that is printed. Raises what kernlib.compile raises for kernels,
    UsageError for what it says of arguments."""
    from kernlib import events

    seen: list = []
    unsubscribe = events.subscribe(seen.append)
    start = time.perf_counter()
    try:
        made = _entries(descriptors, archs, dtypes, shapes, call, workers)
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


def _entries(descriptors: list, archs: tuple, dtypes, shapes, call: dict, workers) -> list:
    """The distinct entries that kernlib.compile answers, in order."""
    import kernlib

    own = set(inspect.signature(kernlib.compile).parameters)
    for name in own.intersection(call):
        raise _bad(f"{name} is no argument of a call.", "--argument")
    common = {"archs": archs, "workers": workers}
    if not shapes:
        made = kernlib.compile(descriptors, dtypes=dtypes, **common)
        return list({id(entry): entry for entry in made}.values())
    made = []
    for dtype in dtypes:
        tensors = tuple(_tensor(shape, dtype) for shape in shapes)
        for descriptor in descriptors:
            _check_operands(descriptor, len(tensors))
        given = {name: _given(value, dtype) for name, value in call.items()}
        made += kernlib.compile(descriptors, specs=tensors, **common, **given)
    return list({id(entry): entry for entry in made}.values())


def _given(value, dtype):
    """An argument of a call: a number, or in place of its sizes a tensor."""
    return _tensor(value, dtype) if isinstance(value, tuple) else value


def _tensor(shape: tuple[int, ...], dtype):
    """A tensor without data. Raises BadParameter."""
    import torch

    try:
        return torch.empty(shape, dtype=dtype, device="meta")
    except (RuntimeError, TypeError, ValueError) as error:  # whose text holds frames of C++
        text = "x".join(map(str, shape))
        raise _bad(f"torch has no tensor of {text}: that is too large.", "--shape") from error


def _check_operands(descriptor, given: int) -> None:
    """Raises UsageError for a call of too few tensors, of which what is said in Python helps
    nobody here."""
    takes = descriptor.operands
    if given < len(takes):
        raise click.UsageError(
            f"{takes[given]} is missing: {descriptor.describe()} takes {', '.join(takes)}, and one "
            "--shape gives the sizes of each."
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
