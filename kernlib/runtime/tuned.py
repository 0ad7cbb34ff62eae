"""Which of several kernels a plan takes: the one that tuning has kept, or, while tuning lists and
times them, the one on trial."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kernlib.jit import tuning
from kernlib.lowering.kernel import Choice
from kernlib.runtime.devices import Model


class Trial:
    """Plans made for tuning. Without a ``choice`` they note what there is to choose: the bytes
    under which the fastest is kept, and the candidates."""

    def __init__(self, choice: Choice | None):
        self.choice = choice
        self.signature, self.candidates = b"", []


_current: ContextVar[Trial | None] = ContextVar("kernlib_trial", default=None)


@contextmanager
def trying(trial: Trial) -> Iterator[Trial]:
    """Plans in this block, in this thread, are made for tuning."""
    token = _current.set(trial)
    try:
        yield trial
    finally:
        _current.reset(token)


def is_trial() -> bool:
    """Whether plans are made for tuning."""
    return _current.get() is not None


def choice(
    family: str, model: Model, signature: bytes, candidates: Callable[[], list[Choice]]
) -> Choice | None:
    """The stored choice for a problem of a family on a model of GPU, None for none. During a trial,
    the choice that is tried."""
    trial = _current.get()
    if trial is None:
        return tuning.choice(family, model, signature)
    if trial.choice is None:
        trial.signature, trial.candidates = signature, candidates()
    return trial.choice
