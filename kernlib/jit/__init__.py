"""A kernel specification becomes a loaded kernel: source -> cubin -> store -> load. No tensors."""

import sys

if sys.platform == "win32":
    from kernlib.errors import UnsupportedError

    raise UnsupportedError("kernlib runs on Linux; Windows lacks the file locks (flock) it needs")
