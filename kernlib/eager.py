"""Calls for which torch.compile leaves its graph. Dynamo imports this while it traces one, since
``torch.compiler.disable`` loads Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(
    reason="solvers of kernlib.linalg, agop, cdist_grad, compress, tune and their like run outside "
    "of a graph: call them outside of the compiled function, or compile it without fullgraph=True"
)
def eagerly(function: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """``function(*values, **named)`` as it is without torch.compile."""
    return function(*values, **named)
