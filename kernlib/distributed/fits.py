"""Fits of rows that are spread over processes, as :func:`kernlib.linalg.falkon` needs them."""

from __future__ import annotations

from collections.abc import Callable

from kernlib.descriptors.base import render
from kernlib.distributed.checkpoints import Checkpoint
from kernlib.distributed.communicator import as_communicator
from kernlib.distributed.rows import rows_texts, said


def agreed(group, checked: Callable, checkpoint: str | None):
    """What ``checked`` returns in this process, whose errors all processes see, with the rows of
    all of them; the processes, and their checkpoint, None without a folder."""
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
    fit = fits[0]._replace(count=sum(count for (count,) in rows))
    return fit, communicator, None if checkpoint is None else Checkpoint(checkpoint, communicator)
