#!/usr/bin/env bash
# pytest 9.2.0 and torch 2.13.0: monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
# ends the test with an error when it is undone, and leaves TF32 permitted for all later tests of the
# process, whose float32 products are then off by 3e-4 on a GPU.
#
# The object computes its attributes by __getattr__ and __setattr__. monkeypatch sees that none of
# them is in its dictionary, notes that there was nothing before, and deletes the attribute to undo;
# there is none to delete. Output seen:
#
#     AttributeError: 'cuBLASModule' object has no attribute 'allow_tf32'
#     allow_tf32 afterwards: True
#
# What does: torch.set_float32_matmul_precision in a fixture that sets it back.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/environment"
"$folder/environment/bin/pip" install --quiet torch==2.13.0 pytest==9.2.0 numpy 2>/dev/null
cat >"$folder/test_leak.py" <<'PYTHON'
import torch


def test_sets(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)


def test_later():
    print("allow_tf32 afterwards:", torch.backends.cuda.matmul.allow_tf32)
PYTHON
cd "$folder"
said=$("$folder/environment/bin/python" -m pytest -s -q -p no:cacheprovider test_leak.py 2>&1 || true)
grep -o "AttributeError: 'cuBLASModule' object has no attribute 'allow_tf32'" <<<"$said" | head -n 1
grep -o "allow_tf32 afterwards: True" <<<"$said"
