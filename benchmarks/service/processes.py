"""Fresh processes, in which first calls are measured."""

from __future__ import annotations

import compileall
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240


def child(code: str, cache_dir: str, **variables: str) -> dict:
    """Run code in a fresh interpreter and read the JSON of its last line."""
    # Byte-compiled, as pip leaves it: compiling 20 modules would add 20 ms to a first call.
    compileall.compile_dir(ROOT / "kernlib", quiet=1)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("KERNLIB_")}
    own = {"KERNLIB_CACHE_DIR": cache_dir, "CUDA_CACHE_DISABLE": "1", **variables}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **own, "PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    if done.returncode != 0:
        raise RuntimeError(f"a fresh process failed: {done.stderr.strip()[-600:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])
