"""Powers whose derivatives are finite at 0.

``|v|^p`` and its root have an infinite first or second derivative at 0 where the exponent is no
whole number and smaller than 1 or 2. Distances of equal points are 0, and there the derivative is
said to be 0, as ``torch.cdist`` has it: never an infinity, and no NaN of 0 times one.
"""

from __future__ import annotations

import torch


def power(x, y):
    """``x ** y`` of tensors or numbers, of which one is a tensor. Where ``x`` is 0 and ``y``
    between 0 and 2, and not 1, the derivatives of every order are 0. So are those that name ``y``
    where ``x`` is 0, whatever it is from 0 on: they are powers of x times some of its logarithm,
    which go to 0, but for that by ``x`` and a ``y`` of 1, which is infinite."""
    if not isinstance(x, torch.Tensor):
        return x**y if x else power(torch.zeros_like(y), y)
    if isinstance(y, torch.Tensor):
        zero = (x == 0) & (y > 0) & (y < 2) & (y != 1)
        if y.requires_grad:
            return _by_exponents(x, y, zero)
    elif 0 < y < 2 and y != 1:
        zero = x == 0
    else:
        return x**y
    # Twice: a derivative that one `where` leaves out is multiplied by 0 all the same.
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x) ** y)


def _by_exponents(x: torch.Tensor, y: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """:func:`power` with derivatives by y, whose logarithm never sees a 0. Where ``zero`` is true
    there are none."""
    at_zero = (x == 0) & (y >= 0)
    smooth = torch.where(at_zero & ~zero, x, 1.0) ** y.detach()
    result = torch.where(at_zero, smooth, torch.where(at_zero, 1.0, x) ** y)
    return torch.where(zero, 0.0, result)


def square_root(x: torch.Tensor) -> torch.Tensor:
    """``sqrt(x)``, with derivatives 0 where ``x`` is 0."""
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).sqrt())
