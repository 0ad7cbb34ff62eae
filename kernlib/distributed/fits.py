"""Fits of rows that are spread over processes, as :func:`kernlib.linalg.falkon` needs them."""

from __future__ import annotations

from collections.abc import Callable

from kernlib.descriptors.base import render
from kernlib.distributed.checkpoints import Checkpoint
from kernlib.distributed.communicator import as_communicator
from kernlib.distributed.rows import rows_texts, said


class Ranks:
    """The processes of a fit: how many rows they have together, sums over them, and a folder."""

    def __init__(self, communicator, count: int, checkpoint: str | None):
        state = Checkpoint(checkpoint, communicator)
        self.count, self.is_first = count, communicator.rank == 0
        self.total, self.load, self.save = communicator.total, state.load, state.save


def agreed(group, checked: Callable, checkpoint: str | None):
    """What ``checked`` returns in this process, whose errors all processes see, and the ranks."""
    communicator, fits = as_communicator(group), []

    def texts() -> dict[str, str]:
        fit = checked()
        fits.append(fit)
        communicator.check_device("centres", fit.centres)
        sums = fit.centres.double().sum(0)
        return {
            "descriptor": render(fit.descriptor),
            "checkpoint": str(checkpoint),
            "columns of y": str(fit.y.shape[1]),
            "regularization, tol, max_iter": str(fit[4:7]),
            **rows_texts("centres", fit.centres),
            "rows of centres": str(len(fit.centres)),
            "sums of centres": said(sums.cpu()),
            **{name: said(value) for name, value in sorted(fit.hyperparameters.items())},
        }

    rows = communicator.agree("falkon", texts, lambda: (len(fits[0].x),))
    return fits[0], Ranks(communicator, sum(count for (count,) in rows), checkpoint)
