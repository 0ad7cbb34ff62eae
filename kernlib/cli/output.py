"""What the commands print with: tables that survive a pipe, JSON, sizes, errors in one message."""

from __future__ import annotations

import errno
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import click

PIPE_WIDTH = 1000  # of tables that no terminal shows: a row stays one line, for grep
FOLDED_WIDTH = 28  # narrower than this, folding the last column makes towers
GAP = 2  # between two columns
SENTENCE_WIDTH = 100  # of sentences on wider terminals, for the eye


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is, as COLUMNS says or else the terminal; None for a
    pipe or a file."""
    shown = sys.stdout is not None and sys.stdout.isatty()  # None where it is closed
    return shutil.get_terminal_size().columns if shown else None


def print_table(
    columns: dict[str, str],
    rows: list[tuple],
    title: str | None = None,
    spare: tuple[str, ...] = (),
) -> None:
    """Print rows under ``columns``, which maps each heading to "left" or "right".

    The last column is folded between words into what a terminal has left. Where that is too
    little, columns of ``spare`` go, the first of them first, and stderr says which; where that is
    too little as well, a row stays one line.
    """
    from rich.console import Console

    width = terminal_width() or PIPE_WIDTH
    cells = [tuple(plain(cell) for cell in row) for row in rows]
    needed = _needed(columns, cells)
    last, left_out = list(columns)[-1], 0
    narrow = needed | {last: min(FOLDED_WIDTH, needed[last])}
    while left_out < len(spare) and _total(narrow, spare[:left_out]) > width:
        left_out += 1
    gone = spare[:left_out]
    room = width - _total(narrow, gone) + narrow[last]
    needed[last] = needed[last] if room < narrow[last] else min(room, needed[last])
    console = Console(width=_total(needed, gone), markup=False, highlight=False)
    console.print(_table(columns, cells, title, needed, gone))
    if gone:
        names = ", ".join(name for name in columns if name in gone)
        say(f"A wider terminal, a pipe and --json show {names} too.", err=True)


def _needed(columns: dict[str, str], cells: list[tuple]) -> dict[str, int]:
    """The width of each column in which nothing is folded."""
    from rich.cells import cell_len

    listed = zip(columns, *cells, strict=True)
    return {texts[0]: max(map(cell_len, texts)) for texts in listed}


def _total(widths: dict[str, int], gone: tuple[str, ...]) -> int:
    shown = [width for name, width in widths.items() if name not in gone]
    return sum(shown) + GAP * (len(shown) - 1)


def _table(columns: dict[str, str], cells: list[tuple], title, widths: dict, gone: tuple):
    from rich import box
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, GAP - 1, 0, 0),  # the box itself has a blank between two columns
    )
    for name in columns:
        if name not in gone:
            table.add_column(name, justify=columns[name], width=widths[name], overflow="fold")
    is_shown = [name not in gone for name in columns]
    for row in cells:
        table.add_row(*(cell for cell, keep in zip(row, is_shown, strict=True) if keep))
    return table


def say(text: str, err: bool = False, start: str = "", hang: str = "") -> None:
    """Print sentences, folded between words where a terminal shows them: the first line begins
    with ``start``, the others with ``hang``."""
    width = terminal_width()
    for line in text.splitlines() or [""]:
        if width is not None:
            line = textwrap.fill(
                line,
                min(width, SENTENCE_WIDTH),
                initial_indent=start,
                subsequent_indent=hang,
                replace_whitespace=False,
                break_long_words=False,
                break_on_hyphens=False,
            )
        click.echo(line if width is not None else start + line, err=err)
        start = hang


def print_finding(mark: str, label: str, text: str) -> None:
    """A line of `kernlib doctor`."""
    start = f"{mark:4s}  {label:10s}  "
    say(text, start=start, hang=" " * len(start))


def print_steps(steps: list[str]) -> None:
    """The last lines of `kernlib doctor`, with numbers."""
    click.echo("\nWhat to do next:")
    for number, step in enumerate(steps, 1):
        start = f"  {number}. "
        say(step, start=start, hang=" " * len(start))


def plain(value: object) -> str:
    """The text of a value on one line, with escapes for control characters: entries of a bundle may
    hold any text."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(facts: object) -> None:
    """The one thing that a command with --json writes to stdout."""
    click.echo(json.dumps(facts, indent=2))


def size(count: int) -> str:
    """Bytes for people: ``812 B``, ``61.4 KB``, ``512.0 MB``, ``1.5 GB``."""
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KB", "MB", "GB"):
        amount /= 1024
        if amount < 1024 or unit == "GB":
            break
    return f"{amount:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """``1 kernel``, ``2 kernels``; ``1 entry``, ``2 entries``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1]}ies" if noun.endswith("y") else f"{number} {noun}s"


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn what kernlib and the disk raise, and a setting that cannot be used, into one message and
    exit 1."""
    from kernlib import settings
    from kernlib.errors import KernlibError

    try:
        settings.current()
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    try:
        yield
    except KernlibError as error:
        raise click.ClickException(str(error)) from error
    except OSError as error:
        if error.errno == errno.EPIPE:
            raise  # click ends quietly when the reader has closed
        raise click.ClickException(_reason(error)) from error


def _reason(error: OSError) -> str:
    if error.strerror is None or error.filename is None:
        return str(error)
    return f"{error.filename}: {error.strerror}"
