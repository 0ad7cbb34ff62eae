"""Descriptors of all kinds of sums that products and sums in float64 are computed of in one kernel,
and their hyperparameters."""

import math

import kernlib as kl

GAUSSIAN = kl.gaussian()
DESCRIPTORS = {
    "gaussian": (GAUSSIAN, {"bandwidth": 3.0}),
    "laplace l1": (kl.laplace_l1(), {"bandwidth": 5.0}),
    "laplace l2": (kl.laplace_l2(), {"bandwidth": 2.0}),
    "matern52": (kl.matern52(), {"bandwidth": 2.0}),
    "rational quadratic": (kl.rational_quadratic(), {"bandwidth": 2.0, "alpha": 1.5}),
    "cauchy": (kl.cauchy(), {"bandwidth": 2.0}),
    "pq": (kl.laplace_pq(), {"bandwidth": 3.0, "p": 1.3, "q": 0.9}),
    "dot": (kl.dot_product(), {}),
    "polynomial": (kl.polynomial(3), {"gamma": 0.3, "offset": 1.0}),
    "norm": (kl.p_distance(), {"p": 2.0}),
    "1.3": (kl.p_distance(), {"p": 1.3}),
    "maximum": (kl.p_distance(), {"p": math.inf}),
    "zero": (kl.p_distance(), {"p": 0.0}),
    "expadd": (kl.exp_power_sum(), {"p": 1, "inner_scale": -0.5}),
    "direct": (kl.squared_distance(direct=True), {}),
    "regularized": (
        GAUSSIAN,
        {"bandwidth": 2.0, "regularization": 0.7, "row_offset": 90, "col_offset": 2},
    ),
    "epsilon": (GAUSSIAN, {"bandwidth": 2.0, "epsilon": 0.02}),
}
ON_LANES = ("laplace l1", "pq", "1.3", "maximum", "zero", "expadd", "direct")  # whatever the width
