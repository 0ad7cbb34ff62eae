"""What the benchmarks share: the command, the result files and the table.

``python -m benchmarks.<family> --json FILE [--case SUBSTRING] [--quick]``
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

import kernlib
from benchmarks.common.summary import others
from benchmarks.common.timing import CudaTimer, query_gpu, time_call
from kernlib.jit import sources, toolchain

NO_GPU = "none"
UNITS_PER_MS = {"ms": 1.0, "us": 1e3}
PORTABLE = " portable"  # ends the name of a case that is measured with KERNLIB_PORTABLE=1


# Rows and the machine they were measured on.


@dataclass
class Row:
    """One line of a result file, in ``unit``; ``floor`` and ``error`` are None where none is."""

    case: str
    unit: str
    ours: float
    floor: float | None = None
    bound: str = ""
    rivals: dict[str, float] = field(default_factory=dict)
    error: float | None = None
    rival_errors: dict[str, float] = field(default_factory=dict)
    must: float | None = None
    must_error: float | None = None

    def as_json(self) -> dict:
        """Fields of the schema, ``must`` and ``must_error`` only where there is a target."""
        optional = ("must", "must_error")
        kept = {k: v for k, v in asdict(self).items() if k not in optional or v is not None}
        return _rounded(kept)


def _rounded(value):
    """Five digits of every float, more than any two runs share."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


@dataclass(frozen=True)
class Case:
    """A case's exact name and what measures it."""

    name: str
    measure: Callable[[Session], Row]

    def portable(self) -> Case:
        """The same with KERNLIB_PORTABLE=1, under a name of its own and without its target."""
        name = self.name + PORTABLE

        def measure(session: Session) -> Row:
            return replace(self.measure(session), case=name, must=None)

        return Case(name, measure)


@dataclass
class Session:
    """One run of a benchmark: how long to measure, with what, and what was measured so far."""

    quick: bool = False
    timer: object = None
    ours: dict[str, float] = field(default_factory=dict)

    def time(
        self, call: Callable, buffers: tuple, in_graph: bool = False, captured: bool = True
    ) -> float:
        """Milliseconds of a call that has run once already; in a graph also where it is long, and
        never if it cannot be ``captured``."""
        if self.timer is None:
            self.timer = CudaTimer()
        return time_call(self.timer, call, buffers, self.quick, in_graph, captured)


def machine() -> dict[str, str]:
    """GPU, host, driver and versions, as the head of result files and of the GPU record."""
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else NO_GPU,
        "host": f"{cpu()}, {len(os.sched_getaffinity(0))} CPUs",
        "driver": query_gpu("driver_version"),
        "torch": torch.__version__,
        "nvrtc": toolchain.nvrtc_version(),
        "kernlib": kernlib.__version__,
        "date": datetime.date.today().isoformat(),
    }


def cpu() -> str:
    """The name of the CPU, as the system says it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def headers(family: str) -> list[str]:
    """The device code of a family, as generated text includes it."""
    found = (sources.root() / family).rglob("*.cuh")
    return sorted(path.relative_to(sources.root()).as_posix() for path in found)


# Rivals.


def attempt(name: str, case: str, action: Callable):
    """What the action returns, or None with a note on stderr where it fails."""
    try:
        return action()
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        note(f"{case}: {name} is left out ({type(error).__name__}: {first[:160]})")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)


# Result files.


def merge(head: dict, rows: list[dict], old: dict | None, order: Sequence[str] = ()) -> dict:
    """A result file with ``rows`` in place of those of the same cases in ``old``, in ``order``,
    cases measured with KERNLIB_PORTABLE=1 behind all others.

    A kept row that other kernel sources gave keeps their digest as its own ``sources``, and one of
    another host that as its own ``host``. Raises ValueError when ``old`` is of another GPU.
    """
    if old and old["gpu"] != head["gpu"]:
        raise ValueError(f"the file holds results of {old['gpu']}, this is {head['gpu']}")
    merged = {row["case"]: _dated(row, old, head) for row in (old or {}).get("rows", [])}
    merged |= {row["case"]: row for row in rows}
    place = {name: index for index, name in enumerate(order)}

    def behind(row: dict) -> tuple[bool, int]:
        return row["case"].endswith(PORTABLE), place.get(row["case"], len(place))

    ordered = sorted(merged.values(), key=behind)
    return {**head, "rows": ordered}


def _dated(row: dict, old: dict, head: dict) -> dict:
    """A row of ``old`` with what it was measured of and on, where that differs from ``head``."""
    origin = {name: row.get(name, old.get(name)) for name in ("sources", "host")}
    differing = {k: v for k, v in origin.items() if v is not None and v != head.get(k)}
    return {k: v for k, v in row.items() if k not in origin} | differing


def read(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def write(path: Path, results: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, allow_nan=False) + "\n")


# The table.


def verdict(row: Row) -> str:
    """Whether the row meets its target, "" where there is none."""
    if row.must is None and row.must_error is None:
        return ""
    in_time = row.must is None or row.ours <= row.must
    exact = row.must_error is None or (row.error is not None and row.error <= row.must_error)
    wanted = "" if row.must is None else f" <= {number(row.must)}"
    wanted += "" if row.must_error is None else f", error <= {row.must_error:.0e}"
    return ("met" if in_time and exact else "MISSED") + wanted


def speed_up(row: Row) -> float | None:
    """How many times faster than the best rival."""
    found = others(row.rivals)
    return min(found.values()) / row.ours if found else None


def number(value: float | None, digits: int = 3) -> str:
    """Three digits that count, never in powers of ten above one; "" for None."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{places}f}"


def print_table(family: str, rows: Sequence[Row], on: str | None = None) -> None:
    """All rows, to stdout, one line each; ``on`` names the machine, None the GPU of this one."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{family}, {on or machine()['gpu']}")
    for column in ("case", "ours", "floor", "bound", "x floor", "rivals", "speed-up", "error", ""):
        table.add_column(column, justify="left" if column in ("case", "bound", "") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    console = Console()
    console.width = max(console.width, 180)  # a pipe has 80 columns, in which nothing fits
    console.print(table)


def _cells(row: Row) -> tuple[str, ...]:
    rivals = (
        f"{name} {number(value)}" + _error_of(row, name) for name, value in row.rivals.items()
    )
    return (
        row.case,
        f"{number(row.ours)} {row.unit}",
        number(row.floor),
        row.bound,
        number(row.ours / row.floor) if row.floor else "",
        "\n".join(rivals),
        number(speed_up(row)),
        f"{row.error:.1e}" if row.error is not None else "",
        verdict(row),
    )


def _error_of(row: Row, rival: str) -> str:
    return f" (error {row.rival_errors[rival]:.1e})" if rival in row.rival_errors else ""


# The command.


def parse(argv: Sequence[str] | None, family: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{family}")
    parser.add_argument("--json", type=Path, help="write results here, over those of the same case")
    parser.add_argument("--case", action="append", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one repetition of everything")
    return parser.parse_args(argv)


def chosen(cases: Sequence[Case], wanted: Sequence[str] | None) -> list[Case]:
    """The cases whose name contains one of ``wanted``; a whole name means that case alone."""
    names = {c.name for c in cases}
    parts = [text for text in wanted or () if text not in names]
    return [c for c in cases if not wanted or c.name in wanted or any(t in c.name for t in parts)]


def main(
    family: str, cases: Sequence[Case], source: str, argv=None, on: dict[str, str] | None = None
) -> int:
    """Measure the chosen cases; each is written as soon as it is known. Returns the exit status.

    ``source`` is generated text that includes the family's kernels, "" for none; ``on`` what is
    measured, in place of :func:`machine`.
    """
    options, on = parse(argv, family), on or machine()
    head = {**on, "sources": sources.digest(source).hex()}
    order = [case.name for case in cases]
    if options.json:
        merge(head, [], read(options.json), order)  # refuse another GPU's file before any work
    session, rows, failed = Session(options.quick), [], 0
    for case in chosen(cases, options.case):
        try:
            row = case.measure(session)
        except Exception:  # the other cases are still worth their time
            note(f"{case.name} failed\n{traceback.format_exc()}")
            failed += 1
            continue
        rows.append(row)
        session.ours[row.case] = row.ours
        if options.json:
            write(options.json, merge(head, [row.as_json()], read(options.json), order))
    print_table(family, rows, on["gpu"])
    return 1 if failed or not rows else 0
