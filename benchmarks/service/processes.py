"""Fresh processes, in which first calls are measured.

They find every module byte-compiled, as pip leaves it and as a second process of a user would find
it: to compile 20 modules adds 20 ms and more to a first call. Where the environment has Python
write none, as PYTHONDONTWRITEBYTECODE does, what a process is to run is run once before, unmeasured
and with an empty cache of its own, and all of them keep bytecode in a temporary folder.
"""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240


def child(code: str, cache_dir: str, timeout_s: float = TIMEOUT_S, **variables: str) -> dict:
    """Run code in a fresh interpreter and read the JSON of its last line. Raises RuntimeError when
    it fails."""
    if sys.dont_write_bytecode:
        _warm(code)
    else:
        compileall.compile_dir(ROOT / "kernlib", quiet=1)
    return json.loads(_run(code, cache_dir, variables, timeout_s).splitlines()[-1])


@cache
def _warm(code: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kernlib-bench-") as empty:
        _run(code, empty, {})


@cache
def _bytecode() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="kernlib-bench-")  # until this process ends


def _run(code: str, cache_dir: str, variables: dict[str, str], timeout_s: float = TIMEOUT_S) -> str:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KERNLIB_")}
    if sys.dont_write_bytecode:
        inherited.pop("PYTHONDONTWRITEBYTECODE", None)
        inherited["PYTHONPYCACHEPREFIX"] = _bytecode().name
    own = {"KERNLIB_CACHE_DIR": cache_dir, "CUDA_CACHE_DISABLE": "1", **variables}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **own, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode != 0:
        raise RuntimeError(f"a fresh process failed: {done.stderr.strip()[-600:]}")
    return done.stdout.strip()
