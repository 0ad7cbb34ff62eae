"""What a type checker sees of kernlib.compat: the names that its ``__getattr__`` loads."""

from kernlib.compat import kermac as kermac
from kernlib.compat import macko as macko
