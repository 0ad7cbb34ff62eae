"""Options that several commands take, and the types of their values."""

from __future__ import annotations

import click

from kernlib import settings

_WORDS = {"true": True, "false": False}


class Arch(click.ParamType):
    """A target that kernels can be compiled for."""

    name = "arch"

    def convert(self, value, param, ctx) -> str:
        from kernlib.jit import targets

        try:
            return targets.check_arch(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


class Size(click.ParamType):
    """A number of bytes, with K, M or G."""

    name = "size"

    def convert(self, value, param, ctx) -> int:
        found = settings.parse_size(str(value))
        if found is None:
            self.fail(f"{value!r} is no size; bytes do, or K, M or G of them: 100M.", param, ctx)
        return found


class Shape(click.ParamType):
    """The sizes of one tensor."""

    name = "shape"

    def convert(self, value, param, ctx) -> tuple[int, ...]:
        if isinstance(value, tuple):  # click converts what it has converted
            return value
        parts = str(value).split("x")
        if not all(part.isascii() and part.isdecimal() for part in parts):
            self.fail(f"{value!r} is no shape; sizes with x between do: 1000x64.", param, ctx)
        return tuple(int(part) for part in parts)


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


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask.")


def arch_option(purpose: str):
    """``--arch``, once for each target."""
    return click.option("--arch", "archs", type=Arch(), multiple=True, metavar="ARCH", help=purpose)


def days_option(purpose: str):
    """``--unused``, a number of days."""
    kind = click.IntRange(min=0)
    return click.option("--unused", "days", type=kind, metavar="DAYS", help=purpose)
