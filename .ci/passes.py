"""When each leg of .ci/full passed last, kept in full.json beside this file.

python .ci/passes.py list LEG ... | passed LEG | note LEG SECONDS
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent / "full.json"


def read() -> dict[str, dict]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def git(*arguments: str) -> subprocess.CompletedProcess:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=FILE.parent, capture_output=True, text=True)


def passed(leg: str) -> bool:
    """Whether the leg has passed with this tree, but for the notes themselves."""
    note = read().get(leg)
    if note is None:
        return False
    return git("diff", "--quiet", note["commit"], "--", ":/", ":!/.ci/full.json").returncode == 0


def note(leg: str, seconds: int) -> None:
    commit = git("rev-parse", "HEAD").stdout.strip()
    today = datetime.date.today().isoformat()
    notes = {**read(), leg: {"date": today, "commit": commit, "minutes": round(seconds / 60, 1)}}
    FILE.write_text(json.dumps(notes, indent=1, sort_keys=True) + "\n")


def line(leg: str) -> str:
    last = read().get(leg)
    if last is None:
        return f"{leg:8} never"
    return f"{leg:8} {last['date']} {last['commit'][:12]} {last['minutes']:5.1f} min"


def main(command: str, *arguments: str) -> int:
    if command == "list":
        print("\n".join(map(line, arguments)))
    elif command == "note":
        note(arguments[0], int(arguments[1]))
    else:
        return int(not passed(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
