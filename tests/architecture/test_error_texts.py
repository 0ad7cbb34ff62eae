"""What errors of bad calls say, as it was: texts that users search for. A change that moves code
changes none of them; one that means to writes the file anew:

    python -m tests.architecture.test_error_texts
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import nullcontext
from difflib import unified_diff
from itertools import chain, product
from pathlib import Path

import pytest

from kernlib import settings
from tests.architecture.golden_gradients import Recorded
from tests.contract import cases, families
from tests.contract.library.operations import OPERATIONS

TEXTS = Path(__file__).resolve().parent / "error_texts.txt"
ANEW = "python -m tests.architecture.test_error_texts"
SEED, COUNT = 0, 300  # of calls by the contract's entries
# What NumPy writes of its numbers, and torch knows of devices, depends on their versions.
VARIES = re.compile(r"numpy|device: ")
ADDRESS = re.compile(r"0x[0-9a-f]+")


def text_of(error: Exception) -> str | None:
    """What kernlib says, None of what torch or Python does."""
    if not cases.raised_by_kernlib(error):
        return None
    text = ADDRESS.sub("0x...", f"{type(error).__name__}: {error}")
    return text.replace("\n", "\n    ")


def of_contract() -> Iterator[tuple[str, str]]:
    """Bad calls of every public function and method: those of tests/contract. Of equal texts one
    alone."""
    calls: dict[str, str] = {}
    for name, entry in families.ENTRIES.items():
        for index in range(families.share(name, COUNT)):
            outcome = cases.run(entry, name, SEED, index)
            text = None if outcome.error is None else text_of(outcome.error)
            if text is not None and not VARIES.search(outcome.shown):
                calls.setdefault(text, outcome.shown)
    for text, call in calls.items():
        yield call, text


def of_operators() -> Iterator[tuple[str, str]]:
    """Wrong calls of each operation, and where that differs what its operator says, or what is said
    with a gradient."""
    for operation in OPERATIONS:
        for name, wrong in operation.wrong.items():
            first = None
            for way, recording in product(WAYS, (False, True) if wrong.recorded else (False,)):
                try:
                    with WAYS[way]():
                        wrong.run(*operation.typical.leaves(recording))
                    text = "no error"
                except Exception as error:
                    text = text_of(error) or f"{type(error).__name__} of torch"
                if text != first:
                    yield f"{operation.name}, {name}{way}{', recorded' * recording}", text
                first = first or text


WAYS = {"": nullcontext, ", by its operator": lambda: Recorded([])}


def texts() -> str:
    calls = chain(of_contract(), of_operators())
    return "".join(f"{call}\n    {text}\n" for call, text in calls)


def assert_cached(monkeypatch) -> None:
    """A call that would compile raises at once."""
    monkeypatch.setenv("KERNLIB_ASSERT_CACHED", "1")
    settings.reset()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_errors_say_what_they_said(monkeypatch):
    assert_cached(monkeypatch)
    before, now = TEXTS.read_text(), texts()
    changes = unified_diff(before.splitlines(), now.splitlines(), "before", "now", lineterm="")
    assert before == now, "\n".join([*changes, f"if they are meant to differ: {ANEW}"])


def main() -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert_cached(monkeypatch)
        TEXTS.write_text(texts())


if __name__ == "__main__":
    main()
