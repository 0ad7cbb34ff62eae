"""JSON in a tensor of bytes, as extra states of layers hold it."""

from __future__ import annotations

import json

import torch

from kernlib.descriptors import nesting


def parsed(state: torch.Tensor) -> object:
    """The value that is written there. Raises ValueError for what is no short JSON, whatever it
    is: a loader hands over what a file says."""
    try:
        text = bytes(state.flatten()[: nesting.LONGEST + 1].tolist()).decode()
        nesting.check_size(text)
        return json.loads(text)
    except (AttributeError, RuntimeError, TypeError) as error:  # RecursionError is the second
        raise ValueError(str(error)) from None
