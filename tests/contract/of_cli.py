"""Command lines: each ends with exit code 0, 1 or 2, and says why if it is not 0."""

from __future__ import annotations

import random

from click.testing import CliRunner

from kernlib.cli import main

NUMBERS = ("0", "1", "-1", "1.5", "99999999999999999999", "x", "")
FOLDERS = ("nosuch", ".", "a file", "a\nname", "é", "", "new/deeper", "x" * 300, "bad\udcff")
ARCHS = ("sm_90a", "sm_80", "80", "8.0", "native", "SM_80", "sm_1", "")
# Of each command its arguments' values, and those of its options; None where one takes none.
COMMANDS = {
    ("cache", "list"): ((), {"--arch": ARCHS, "--family": ("pairwise", "x", "", "é"),
                             "--unused": NUMBERS, "--json": None}),
    ("cache", "show"): (("", "00", "zz", "g" * 100, "é", "-"),
                        {"--cubin": FOLDERS, "--force": None, "--json": None}),
    ("cache", "verify"): ((), {"--repair": None, "--json": None}),
    ("cache", "export"): (FOLDERS, {"--arch": ARCHS, "--force": None, "--json": None}),
    ("cache", "import"): (FOLDERS, {"--json": None}),
    ("cache", "clear"): ((), {"--tuning": None, "--yes": None, "--json": None}),
    ("cache", "prune"): ((), {"--unused": NUMBERS, "--yes": None, "--json": None,
                              "--to": ("1M", "-1", "1Q", "", "1e9", "é", "9" * 400)}),
    ("cache", "info"): ((), {"--json": None}),
    ("cache",): (("nosuch", "List", ""), {}),
    ("compile",): (
        ("laplace_l1", "gaussian", "nosuch", "KroneckerSparse(a=2, b=3, c=4, d=1)", "Bias(",
         "Gaussian", "os:getcwd", "os:nosuch", "a.b:c", ":", "kernlib:gaussian",
         "kernlib:nn", "json:dumps", "", "é", "x" * 5000),
        {"--arch": ARCHS, "--dtype": ("float16", "float99", "int8", ""), "--json": None,
         "--shape": ("10x3", "8x3", "bias=8", "=8", "x=", "0x0", "x", "3", "-1x2",
                     "9999999999999x9", "1x2x3x4", "é"),
         "--argument": ("bandwidth=2.0", "bandwidth=0", "bandwidth=nan", "p=2", "out=1", "x",
                        "=", "bandwidth=x", "descriptor=1", "accumulate=true", "debug=true"),
         "--workers": NUMBERS},
    ),
    ("doctor",): (("nosuch",), {"--distributed": None, "--json": None, "--nosuch": None}),
    ("nosuch",): ((), {"--json": None}),
}  # fmt: skip


def line(seed: int, index: int) -> list[str]:
    """A command line, decided by the seed and its index."""
    made = random.Random(f"{seed} cli {index}")
    command = made.choice([*COMMANDS])
    arguments, options = COMMANDS[command]
    words = [*command]
    for _ in range(made.choice([0, 1, 1, 1, 2]) if arguments else made.choice([0, 0, 0, 1])):
        words.append(made.choice(arguments or ("superfluous",)))
    for name in made.sample([*options], made.randrange(min(3, len(options)) + 1)):
        words += [name] if options[name] is None else [name, made.choice(options[name])]
    return words


def fault(words: list[str]) -> str:
    """What is wrong with the outcome of a command line."""
    found = CliRunner().invoke(main, words, input="n\n")
    error = found.exception
    if error is not None and not isinstance(error, SystemExit):
        return f"{words}: {type(error).__name__}: {str(error)[:160]}"
    if found.exit_code not in (0, 1, 2) or "Traceback" in found.output:
        return f"{words}: exit code {found.exit_code}: {found.output[-300:]}"
    if found.exit_code and not found.output.strip():
        return f"{words}: exit code {found.exit_code} without a word"
    return ""
