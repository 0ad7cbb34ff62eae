"""Powers whose derivatives are finite at 0.

``|v|^p`` and its root have an infinite first or second derivative at 0 where the exponent is no
whole number and smaller than 1 or 2. Distances of equal points are 0, and there the derivative is
said to be 0, as ``torch.cdist`` has it: never an infinity, and no NaN of 0 times one.
"""

from __future__ import annotations

import torch


def power(x, y):
    """``x ** y`` of tensors or numbers, of which one is a tensor. Where ``x`` is 0 and ``y``
    between 0 and 2, and not 1, the derivatives of every order are 0."""
    if not isinstance(x, torch.Tensor):
        return x**y
    if isinstance(y, torch.Tensor):
        zero = (x == 0) & (y > 0) & (y < 2) & (y != 1)
    elif 0 < y < 2 and y != 1:
        zero = x == 0
    else:
        return x**y
    # Twice: a derivative that one `where` leaves out is multiplied by 0 all the same.
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x) ** y)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """``sqrt(x)``, with derivatives 0 where ``x`` is 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())
