"""``python -m kernlib``: the command line, where its script is not on the path."""

from kernlib.cli import main

if __name__ == "__main__":
    main(prog_name="kernlib")
