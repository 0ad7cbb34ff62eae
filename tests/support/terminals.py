"""Terminals for child processes, which draw on them what they would not write to a pipe."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios


def terminal(columns: int) -> tuple[int, int]:
    """Two descriptors: what is drawn is read from the first, and the child has the second."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return primary, secondary


def drained(primary: int) -> str:
    """All that is drawn until nobody has the terminal any more. A child waits for who reads, so
    that this comes before waiting for the child."""
    drawn = b""
    try:
        while part := os.read(primary, 1 << 16):
            drawn += part
    except OSError:  # how a terminal says that nobody writes any more
        pass
    finally:
        os.close(primary)
    return drawn.decode()


_TOKEN = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|(\r)|(\n)|([^\x1b\r\n]+)")


def left(drawn: str) -> list[str]:
    """The lines that stay on an endless screen, without colours, when progress has erased its own.
    Knows what rich sends: line ends, a line up, a line erased."""
    lines, row, column = [""], 0, 0
    for number, command, begin, down, text in _TOKEN.findall(drawn):
        if text:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
        elif down:
            row += 1
            lines += [""] * (row == len(lines))
        elif begin:
            column = 0
        elif command == "A":
            row = max(0, row - int(number or 1))
        elif command == "K":
            lines[row] = ""
    return [line.rstrip() for line in lines]
