"""The ``kernlib`` command. What a command needs is imported when it runs, so that help is quick."""

from __future__ import annotations

import click

import kernlib
from kernlib.cli.bench import bench
from kernlib.cli.cache import cache
from kernlib.cli.compile import compile_kernels
from kernlib.cli.convert import convert
from kernlib.cli.demo import demo
from kernlib.cli.doctor import doctor
from kernlib.cli.explain import explain
from kernlib.cli.show import show

EXIT_CODES = """\b
Exit codes:
  0  it is done, and nothing is wrong
  1  it could not be done, or something is wrong: one message on stderr
  2  the command line cannot be used: the message names the option
"""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=EXIT_CODES)
@click.version_option(kernlib.__version__, prog_name="kernlib")
def main() -> None:
    """CUDA kernels from descriptors: compiled once, kept in a cache, launched on torch tensors."""


main.add_command(demo)
main.add_command(bench)
main.add_command(doctor)
main.add_command(compile_kernels)
main.add_command(convert)
main.add_command(explain)
main.add_command(show)
main.add_command(cache)
