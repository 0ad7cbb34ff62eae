"""Options that several commands take, and the types of their values."""

from __future__ import annotations

import re

import click

from kernlib import settings

_WORDS = {"true": True, "false": False}


NATIVE = "native"


class Arch(click.ParamType):
    """A target that kernels can be compiled for, in the spellings of nvcc, torch and NVIDIA's
    tables: sm_80, compute_80, 80, 8.0; or ``native``."""

    name = "arch"

    def convert(self, value, param, ctx) -> str:
        from kernlib.jit import targets

        if value == NATIVE or value in targets.SHARED_BYTES:
            return value
        match = re.fullmatch(r"(?:sm_?|compute_?)?(\d+)(?:\.(\d))?(a?)", value.lower())
        digits = match[1] + (match[2] or "") if match else ""
        # 9.0 is a Hopper's capability, and sm_90a what kernlib compiles for it.
        arch = f"sm_{digits}a" if digits == "90" else f"sm_{digits}"
        if match and arch in targets.SHARED_BYTES and match[3] in ("", arch[-1]):
            return arch
        names = ", ".join(targets.SHARED_BYTES)
        self.fail(f"{value!r} is no target; {names} and native are.", param, ctx)


def _expanded(ctx, param, archs: tuple[str, ...]) -> tuple[str, ...]:
    """The targets, each once, with this machine's in place of ``native``. Raises BadParameter."""
    if NATIVE not in archs:
        return tuple(dict.fromkeys(archs))
    from kernlib.cli import machine

    here = machine.archs()
    if not here:
        message = "'native' is this machine's GPU, and there is none that kernels run on."
        raise click.BadParameter(message, ctx, param)
    listed = [here if arch == NATIVE else [arch] for arch in archs]
    return tuple(dict.fromkeys(arch for several in listed for arch in several))


class Size(click.ParamType):
    """A number of bytes, with K, M or G."""

    name = "size"

    def convert(self, value, param, ctx) -> int:
        size = settings.parse_size(str(value))
        if size is None:
            self.fail(f"{value!r} is no size; bytes do, or K, M or G of them: 100M.", param, ctx)
        return size


class Shape(click.ParamType):
    """The sizes of one tensor, after the name of the argument that it is, if it has one. A letter
    stands for a size that :class:`Sizes` gives."""

    name = "shape"

    def convert(self, value, param, ctx) -> tuple[str, tuple[int | str, ...]]:
        if isinstance(value, tuple):  # click converts what it has converted
            return value
        name, equals, text = str(value).rpartition("=")
        parts = text.split("x")
        sizes = all(_is_number(part) or _is_letter(part) for part in parts)
        if not sizes or (equals and not name.isidentifier()):
            advice = "sizes with x between do, such as 1000x64 or bias=384"
            self.fail(f"{value!r} is no shape; {advice}.", param, ctx)
        return name, tuple(int(part) if _is_number(part) else part for part in parts)


class Sizes(click.ParamType):
    """A letter of shapes, and the sizes that it stands for: of a range its ends, the powers of two
    between them, and each of these plus one, as loads of sixteen bytes fit whole fours alone."""

    name = "letter=sizes"

    def convert(self, value, param, ctx) -> tuple[str, tuple[int, ...]]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        low, dots, high = text.partition("..")
        numbers = _is_number(low) and (_is_number(high) if dots else True)
        if not equals or not _is_letter(name) or not numbers:
            advice = "a letter and sizes do, such as M=1000 or M=1000..100000"
            self.fail(f"{value!r} is no size; {advice}.", param, ctx)
        first, last = int(low), int(high or low)
        if first > last:
            self.fail(f"{value!r} is no range; the smaller size is first.", param, ctx)
        powers = (1 << bits for bits in range(first.bit_length(), last.bit_length()))
        sizes = {size + extra for size in (first, *powers) for extra in (0, 1)} | {last}
        return name, tuple(sorted(size for size in sizes if first <= size <= last))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text.isupper()


class Argument(click.ParamType):
    """A named number of a call."""

    name = "name=value"

    def convert(self, value, param, ctx) -> tuple[str, float | int | bool]:
        if isinstance(value, tuple):
            return value
        name, equals, text = str(value).partition("=")
        if not equals or not name.isidentifier():
            self.fail(f"{value!r} is no argument; name=value does: bandwidth=8.0.", param, ctx)
        try:
            return name, _number(text.strip())
        except ValueError:
            message = f"{text!r} of {name} is no number; 8, 0.5, inf, true and false would do."
            self.fail(message, param, ctx)


def _number(text: str) -> float | int | bool:
    """Raises ValueError."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return int(text)
    except ValueError:
        return float(text)


TARGETS = (
    "Target such as sm_80, or native; may be repeated. By default this machine's GPUs, else sm_90a."
)
dtype_option = click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    metavar="DTYPE",
    help="Of the tensors, such as float16; may be repeated. By default float32.",
)
argument_option = click.option(
    "--argument",
    "arguments",
    type=Argument(),
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the call that --shape describes, such as bandwidth=8.0; may be repeated.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def arch_option(purpose: str):
    """``--arch``, once for each target."""
    return click.option(
        "--arch",
        "archs",
        type=Arch(),
        multiple=True,
        metavar="ARCH",
        callback=_expanded,
        help=purpose,
    )


def shape_option(purpose: str):
    """``--shape``, once for each tensor of a call; ``purpose`` follows what it is."""
    return click.option(
        "--shape",
        "shapes",
        type=Shape(),
        multiple=True,
        metavar="SHAPE",
        help="Of one tensor of a call, such as 1000x64, or bias=384 for one with a name; once for "
        f"each: {purpose}",
    )


def days_option(purpose: str):
    """``--unused``, a number of days."""
    kind = click.IntRange(min=0)
    return click.option("--unused", "days", type=kind, metavar="DAYS", help=purpose)
