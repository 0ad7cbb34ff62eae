"""`python -m benchmarks.behaviour [NAME ...] [--out FOLDER]`: measure, and write the pages."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from pathlib import Path

from benchmarks.behaviour.page import FOLDER, write

NAMES = sorted({path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__"})
NAMES = [name for name in NAMES if name not in ("__main__", "compiled", "page")]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.behaviour", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(NAMES):
        parser.error(f"no such module: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    failures = 0
    for name in options.names or NAMES:
        module = import_module(f"benchmarks.behaviour.{name}")
        try:
            print(write(name, module.TITLE, module.measure(), options.out))
        except Exception as error:  # the others are measured all the same
            failures += 1
            print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
