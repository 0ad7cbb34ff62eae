"""What derivatives are where a formula has two sides that are equal, in every family."""

from __future__ import annotations

import kernlib as kl

CHOSEN = {  # the derivative by v at 0
    "abs(v)": 0.0,
    "max(v, 0)": 0.0, "max(0, v)": 0.0, "max(v, -0.0)": 0.0, "max(-v, 0)": 0.0,
    "min(v, 0)": 1.0, "min(0, v)": 1.0,
    "max(v + 1, 1)": 1.0, "max(1, v + 1)": 1.0, "max(v - 1, -1)": 1.0, "max(-1, v - 1)": 1.0,
    "min(v + 1, 1)": 1.0, "min(v - 1, -1)": 1.0, "max(v + pi / 2, pi / 2)": 1.0,
    "max(v, 2 * v)": 1.5, "min(v, 2 * v)": 1.5, "max(v, v)": 1.0, "max(v, abs(v))": 0.5,
    "min(max(v + 1, 0), 1)": 1.0, "max(min(v, 6), 0)": 0.0,
}  # fmt: skip
BY_PARAMETER = {  # by v and by w, at 0 and 0
    "max(v, w)": (0.5, 0.5), "min(v, w)": (0.5, 0.5), "max(w, 2 * v)": (1.0, 0.5),
    "max(w, 0) + v": (1.0, 0.0), "min(w, 0) + v": (1.0, 1.0), "max(v + w, 0)": (0.0, 0.0),
}  # fmt: skip
ACTIVATIONS = {  # first and second derivative at 0
    kl.Relu(): (0.0, 0.0),
    kl.LeakyRelu(0.02): (0.02, 0.0),
    kl.LeakyRelu(3.0): (3.0, 0.0),
    kl.Sigmoid(): (0.25, 0.0),
    kl.Silu(): (0.5, 0.5),
    kl.Tanh(): (1.0, 0.0),
    kl.Gelu(): (0.5, 0.7978845608028654),
    kl.Gelu("tanh"): (0.5, 0.7978845608028654),
}
