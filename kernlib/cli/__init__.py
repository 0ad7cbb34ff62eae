"""The ``kernlib`` command. What a command needs is imported when it runs, so that help is quick."""

from __future__ import annotations

import click

import kernlib
from kernlib.cli.cache import cache
from kernlib.cli.demo import demo
from kernlib.cli.doctor import doctor


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kernlib.__version__, prog_name="kernlib")
def main() -> None:
    """CUDA kernels from descriptors: compiled once, kept in a cache, launched on torch tensors."""


main.add_command(demo)
main.add_command(doctor)
main.add_command(cache)
