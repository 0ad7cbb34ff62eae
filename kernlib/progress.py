"""Progress bars on stderr, for work that takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

Value = TypeVar("Value")


def wanted(progress: bool | None) -> bool:
    """Whether to show progress: as told, and for None if stderr is a terminal. Raises TypeError."""
    check(progress)
    if progress is None:
        return sys.stderr is not None and sys.stderr.isatty()
    return progress


def check(progress: bool | None) -> None:
    """Raises TypeError for what is neither a bool nor None."""
    if progress is not None and type(progress) is not bool:
        raise TypeError(f"progress must be True, False or None, got {progress!r}")


class Silent:
    """Progress that nobody watches."""

    def count(self, what: str, work: Callable[[], Value]) -> Value:
        """The value of ``work()``, which is shown as begun, and as done unless it raises. Any
        thread may call this."""
        return work()


class Bar(Silent):
    """A row of a rich display: title, bar, count, times, and what was begun last."""

    def __init__(self, display, title: str, total: int):
        self._display = display
        self._task = display.add_task(title, total=total, what="")

    def count(self, what: str, work: Callable[[], Value]) -> Value:
        self._display.update(self._task, what=what)
        value = work()
        self._display.advance(self._task)
        return value


@contextmanager
def shown(progress: bool | None, title: str, total: int) -> Iterator[Silent]:
    """A bar for ``total`` pieces of work. With ``progress=True`` it stays on the screen, else it is
    removed when the work ends. If stderr is no terminal, only the final state is written."""
    if not total or not wanted(progress):
        yield Silent()
        return
    from rich import progress as rich  # 20 ms that only those who watch pay
    from rich.console import Console
    from rich.table import Column

    what = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(20),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[what]}", markup=False, table_column=what),
    )
    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, transient=not progress, expand=True) as display:
        yield Bar(display, title, total)


@contextmanager
def busy(what: str) -> Iterator[None]:
    """A line of text while work lasts whose pieces cannot be counted; on a terminal only."""
    if not wanted(None):
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield
