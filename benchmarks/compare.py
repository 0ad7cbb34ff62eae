"""What became slower: two result files, or two commits measured in turn on one GPU.

``python -m benchmarks.compare OLD NEW [--family NAME] [--case SUBSTRING] [--quick] [--json FILE]``

OLD and NEW are result files, or commits or folders of checkouts. Commits get worktrees, which are
removed afterwards; then the benchmarks of each family run in processes of their own, old, new, old,
new, on an otherwise idle GPU, and the least of a case's times counts. The exit status is 1 if any
case is worse or missing, 2 if nothing could be compared.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import harness
from benchmarks.common.harness import note, number

ROOT = Path(__file__).resolve().parent.parent
FAMILIES = (
    "pairwise", "kronecker_sparse", "sparse", "kronecker_product", "blocksparse", "programs",
    "service",
)  # fmt: skip
ROUNDS = 2
SHARE, MICROSECONDS = 0.03, 0.5  # what two runs of one commit may differ by; a time must pass both
US = {"us": 1.0, "ms": 1e3, "s": 1e6}

Runner = Callable[[Path, str, Path, Sequence[str]], None]


class Line(NamedTuple):
    """A case beside itself; ``old`` or ``new`` is None where there is no such row."""

    case: str
    unit: str
    old: float | None
    new: float | None

    @property
    def ratio(self) -> float | None:
        """How many times the new is the old; 1 for two zeros."""
        if self.old is None or self.new is None:
            return None
        if self.old == 0:
            return 1.0 if self.new == 0 else float("inf")
        return self.new / self.old

    @property
    def verdict(self) -> str:
        """ "worse", "better", "missing" or "added"; "" within what runs differ by."""
        if self.ratio is None:
            return "missing" if self.new is None else "added"
        apart = abs(self.new - self.old) * US.get(self.unit, float("inf"))
        if apart <= MICROSECONDS:
            return ""
        if self.ratio > 1 + SHARE:
            return "worse"
        return "better" if self.ratio < 1 / (1 + SHARE) else ""


def compare(old: dict, new: dict, wanted: Sequence[str] | None = None) -> list[Line]:
    """Lines of all cases whose names contain one of ``wanted``, in the order of ``old``.

    Raises ValueError for results of different GPUs, and for a case in two units.
    """
    if old["gpu"] != new["gpu"]:
        raise ValueError(f"results of {old['gpu']} and {new['gpu']} cannot be compared")
    before, after = ({row["case"]: row for row in found["rows"]} for found in (old, new))
    lines = []
    for case in dict.fromkeys([*before, *after]):
        if wanted and not any(text in case for text in wanted):
            continue
        first, second = before.get(case), after.get(case)
        units = {row["unit"] for row in (first, second) if row}
        if len(units) > 1:
            raise ValueError(f"{case} is measured in {' and in '.join(sorted(units))}")
        ours = [row and row["ours"] for row in (first, second)]
        lines.append(Line(case, units.pop(), *ours))
    return lines


# Two commits.


def least(results: Sequence[dict]) -> dict:
    """One result of several runs: of each case the row with the least value."""
    rows: dict[str, dict] = {}
    for row in (row for found in results for row in found["rows"]):
        kept = rows.setdefault(row["case"], row)
        rows[row["case"]] = min(kept, row, key=lambda one: one["ours"])
    return {**results[-1], "rows": list(rows.values())}


def run_benchmark(tree: Path, family: str, path: Path, arguments: Sequence[str]) -> None:
    """One family's benchmark, of the code in ``tree``, into a result file."""
    own = {"PYTHONPATH": str(tree), "KERNLIB_CACHE_DIR": str(path.parent / "cache")}
    command = [sys.executable, "-m", f"benchmarks.{family}", "--json", str(path), *arguments]
    subprocess.run(command, cwd=tree, env={**os.environ, **own}, stdout=subprocess.DEVNULL)


def measure(
    trees: Sequence[Path], families: Sequence[str], arguments: Sequence[str], runner: Runner,
    work: Path,
) -> tuple[dict, dict]:  # fmt: skip
    """Results of the old and the new tree, measured in turn, all families in one.

    Raises ValueError when a side has no results.
    """
    found: list[list[dict]] = [[], []]
    for family in families:
        for turn in range(ROUNDS):
            for side, tree in enumerate(trees):
                path = work / f"{'new' if side else 'old'}" / f"{family}-{turn}.json"
                path.parent.mkdir(exist_ok=True)
                note(f"{family}, {path.parent.name}, {turn + 1} of {ROUNDS}")
                runner(tree, family, path, arguments)
                result = harness.read(path)
                found[side] += [result] if result else []
    for name, results in zip(("old", "new"), found, strict=True):
        if not results:
            raise ValueError(f"no benchmark of the {name} commit left results: is there a GPU?")
    return least(found[0]), least(found[1])


@contextlib.contextmanager
def checkouts(names: Sequence[str], work: Path) -> Iterator[list[Path]]:
    """Folders as they are, and worktrees of commits, which are removed afterwards.

    Raises ValueError for what is neither.
    """
    trees, made = [], []
    try:
        for index, name in enumerate(names):
            if (Path(name) / "benchmarks").is_dir():
                trees.append(Path(name).resolve())
                continue
            tree = work / f"tree{index}"
            done = _git("worktree", "add", "--detach", str(tree), name)
            if done.returncode:
                raise ValueError(f"{name} is no result file, checkout or commit: {done.stderr}")
            trees.append(tree)
            made.append(tree)
        yield trees
    finally:
        for tree in made:
            _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


# The command.


def print_lines(lines: Sequence[Line], heads: Sequence[dict]) -> None:
    """The table, the worst first among those that are flagged, all to stdout."""
    from rich.console import Console
    from rich.table import Table

    says = (f"{head['kernlib']} of {head['date']}, torch {head['torch']}" for head in heads)
    table = Table(title=f"{heads[0]['gpu']}: {' and '.join(says)}")
    for column in ("case", "old", "new", "ratio", ""):
        table.add_column(column, justify="left" if column in ("case", "") else "right")
    for line in sorted(lines, key=lambda line: -(line.ratio or 0) if line.verdict else 0):
        values = (number(value, 4) + f" {line.unit}" * (value is not None) for value in line[2:])
        style = {"worse": "red", "missing": "red", "better": "green"}.get(line.verdict)
        ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
        table.add_row(line.case, *values, ratio, line.verdict, style=style)
    console = Console()
    console.width = max(console.width, 120)  # a pipe has 80 columns, in which names break
    console.print(table)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare")
    parser.add_argument("old", help="a result file, a commit, or a folder with a checkout")
    parser.add_argument("new", help="the same")
    parser.add_argument("--family", action="append", choices=FAMILIES, help="of commits; all")
    parser.add_argument("--case", action="append", help="only cases whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one repetition of everything")
    parser.add_argument("--json", type=Path, help="of commits: write old.json and new.json here")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, runner: Runner = run_benchmark) -> int:
    """Compare and print. Returns the exit status."""
    options = parse(argv)
    try:
        old, new = _results(options, runner)
        lines = compare(old, new, options.case)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_lines(lines, (old, new))
    verdicts = [line.verdict for line in lines]
    counts = {name: verdicts.count(name) for name in ("worse", "missing", "better", "added")}
    print(f"{len(lines)} cases: " + ", ".join(f"{n} {name}" for name, n in counts.items()))
    if not lines:
        return 2
    return 1 if counts["worse"] or counts["missing"] else 0


def _results(options: argparse.Namespace, runner: Runner) -> tuple[dict, dict]:
    paths = Path(options.old), Path(options.new)
    if all(path.is_file() for path in paths):
        return harness.read(paths[0]), harness.read(paths[1])
    arguments = [part for case in options.case or () for part in ("--case", case)]
    arguments += ["--quick"] if options.quick else []
    with tempfile.TemporaryDirectory(prefix="kernlib-compare-") as folder:
        work = Path(folder)
        with checkouts((options.old, options.new), work) as trees:
            old, new = measure(trees, options.family or FAMILIES, arguments, runner, work)
    if options.json:
        harness.write(options.json / "old.json", old)
        harness.write(options.json / "new.json", new)
    return old, new


if __name__ == "__main__":
    sys.exit(main())
