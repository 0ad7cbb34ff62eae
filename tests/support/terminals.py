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


def left(drawn: str) -> list[str]:
    """The lines that stay on the screen, without colours, when progress has been erased."""
    return [_visible(line) for line in drawn.split("\r\n")]


def _visible(line: str) -> str:
    last = re.split(r"\x1b\[2K|\r", line)[-1]
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", last)
