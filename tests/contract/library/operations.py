"""All operations, found by folder, and parameters of tests over their cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module

import pytest

from tests.contract.library.cases import Operation
from tests.support.paths import ROOT

MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "tests" / "families").rglob("library_cases.py")
)
OPERATIONS: tuple[Operation, ...] = tuple(
    operation for name in MODULES for operation in import_module(name).OPERATIONS
)


def parameters(of: Callable[[Operation], Iterable], promise: str = "", mark=None) -> list:
    """(operation, case) of each case. Those of an operation that breaks the promise are expected to
    fail: the promise is named alone, or with a case behind it."""
    return [
        pytest.param(one, case, id=f"{one.name}-{case}", marks=marks(one, case, promise, mark))
        for one in OPERATIONS
        for case in of(one)
    ]


def recordings(
    of: Callable[[Operation], Mapping], records: str = "places", sweep: bool = True
) -> pytest.MarkDecorator:
    """Every case, and where its field ``records`` is not empty, with and without a record of
    gradients. As a ``sweep`` the calls without, of what records them, are slow."""
    made = [
        pytest.param(
            *(one, name, recording),
            id=f"{one.name}-{name}-{recording}",
            marks=[pytest.mark.slow] if sweep and getattr(case, records) and not recording else [],
        )
        for one in OPERATIONS
        for name, case in of(one).items()
        for recording in ((False, True) if getattr(case, records) else (False,))
    ]
    return pytest.mark.parametrize(("operation", "case", "recording"), made)


def each(promise: str = "") -> pytest.MarkDecorator:
    """Every operation."""
    made = [pytest.param(one, id=one.name, marks=marks(one, "", promise)) for one in OPERATIONS]
    return pytest.mark.parametrize("operation", made)


def every(of: Callable[[Operation], Iterable], promise: str = "") -> pytest.MarkDecorator:
    """Every case of every operation."""
    return pytest.mark.parametrize(("operation", "case"), parameters(of, promise))


def marks(one: Operation, case: str, promise: str, mark=None) -> list:
    """Of a case, or of an operation for an empty one."""
    why = one.broken.get(promise) or one.broken.get(f"{promise} {case}")
    broken = [pytest.mark.xfail(strict=True, reason=why)] if why else []
    return [*broken, *([mark] if mark else [])]
