"""Products with Kronecker products, by a descriptor and by their factors."""

from __future__ import annotations

from functools import reduce

import torch

import kernlib as kl
from tests.contract import plain
from tests.contract.cases import Context, Entry

SHAPES = ((2, 3), (4, 5))  # 8 features to 15, on the left 15 to 8
KINDS = {
    "descriptor": "descriptor", "side": "text", "precision": "text", "alpha": "number",
    "beta": "number", "scale": "number", "debug": "flag", "shapes": "any", "transposed": "flag",
    "epilogue": "epilogue", "factors": "any", "in_sizes": "any", "out_sizes": "any",
    "use_bias": "flag", "device": "device", "dtype": "dtype", "activation": "epilogue",
}  # fmt: skip
NAMES = (
    "x", "y", "out", "factors", "factor1", "factor2",
    "alpha", "beta", "side", "shapes", "transposed", "precision",
    "bias", "scale", "descriptor", "epilogue", "dimensions", "tensors", "weight", "weights",
    "input", "in_sizes", "out_sizes", "dtype", "device", "activation", "epilogues",
)  # fmt: skip


def operands(c: Context, side: str, dtype) -> dict:
    """x with a batch or as a vector, and two factors, one of which may be a batch."""
    wide, lead = 8 if side == "right" else 15, c.random.choice([(), (), (3,), (2, 3)])
    tail = c.random.choice([(4, wide) if side == "right" else (wide, 4), (wide,)])
    x = c.randn(*(lead if len(tail) == 2 else ()), *tail, dtype=dtype)
    batch = c.random.choice([(), (), (3,)])
    return {
        "x": x,
        "first": c.randn(*batch, 2, 3, dtype=dtype),
        "second": c.randn(4, 5, dtype=dtype),
    }


def kron(factors) -> torch.Tensor:
    def two(a, b):
        made = torch.einsum("...ij,...kl->...ikjl", a, b)
        return made.flatten(-4, -3).flatten(-2, -1)

    return reduce(two, factors)


def formula(x, factors, side: str) -> torch.Tensor:
    """In float64, of what are matrices with values and of one kind."""
    plain.same_kind(x, *factors)
    x, factors = plain.wide(x), [plain.wide(f) for f in factors]
    if any(f.dim() < 2 or 0 in f.shape[-2:] for f in factors):
        raise ValueError("factors")
    matrix = kron(factors)
    if (
        x.dim() == 0
        or x.shape[-1 if side == "right" or x.dim() == 1 else -2]
        != (matrix.shape[-2 if side == "right" else -1])
    ):
        raise ValueError("x")
    return x @ matrix if side == "right" else matrix @ x


def written(y, x, out):
    if out is None:
        return y
    if tuple(out.shape) != tuple(y.shape) or (out.dtype, out.device) != (x.dtype, x.device):
        raise ValueError("out")
    return y


def out_of(c: Context, given: dict, y: torch.Tensor) -> None:
    if c.random.random() < 0.4:
        given["out"] = torch.zeros(y.shape, dtype=given["x"].dtype, device=c.device)


# By a descriptor.


def described(c: Context) -> dict:
    side = c.random.choice(["right", "left"])
    epilogue = c.random.choice([(), (), (kl.Bias(),), (kl.Scale(),)])
    made = kl.KroneckerProduct(SHAPES, side=side, epilogue=epilogue)
    dtype = c.float_type()
    given = {"descriptor": made} | operands(c, side, dtype)
    if "bias" in made.parameters:
        given["bias"] = c.randn(made.out_features, dtype=dtype)
    if "scale" in made.parameters:
        given["scale"] = c.random.choice([0.5, 2, torch.tensor(1.5)])
    out_of(c, given, formula(given["x"], (given["first"], given["second"]), side))
    return given


def wanted_described(descriptor, x, first, second, out=None, **values):
    if type(descriptor) is not kl.KroneckerProduct or descriptor.shapes != SHAPES:
        raise TypeError("no product of these")
    if tuple(values) != descriptor.parameters:
        raise ValueError("parameters")
    if tuple(first.shape[-2:]) != SHAPES[0] or tuple(second.shape[-2:]) != SHAPES[1]:
        raise ValueError("factors")
    y = formula(x, (first, second), descriptor.side)
    if "bias" in values:
        plain.same_kind(x, values["bias"])
        bias = plain.wide(values["bias"])
        if tuple(bias.shape) != (descriptor.out_features,):
            raise ValueError("bias")
        y = y + (bias[:, None] if descriptor.side == "left" and x.dim() > 1 else bias)
    if "scale" in values:
        y = y * scalar(values["scale"])
    return written(y, x, out)


def scalar(value):
    if isinstance(value, torch.Tensor) and (value.dim() or value.layout != torch.strided):
        raise ValueError("a number has no dimensions")
    return plain.number(value)


# By factors alone.


def called(c: Context) -> dict:
    side, dtype = c.random.choice(["right", "left"]), c.float_type()
    given = operands(c, side, dtype) | {"side": side}
    if c.random.random() < 0.5:
        given["alpha"] = c.random.choice([2.0, -1, torch.tensor(0.5)])
    y = formula(given["x"], (given["first"], given["second"]), side)
    if c.random.random() < 0.5:
        shape = c.random.choice([tuple(y.shape), tuple(y.shape[-1:]), (1,)])
        given["y"] = c.randn(*shape, dtype=dtype)
        given["beta"] = c.random.choice([0.0, 1, 0.5, torch.tensor(2.0)])
    if c.random.random() < 0.2:
        given["precision"] = c.random.choice([None, "fp32"])
    out_of(c, given, y)
    return given


def call(x, first, second, **rest):
    """The factors by name, as errors call them."""
    return kl.kron_matmul(x, [first, second], **rest)


def wanted_called(
    x, first, second, side="right", alpha=1.0, beta=0.0, y=None, precision=None, out=None
):
    if side not in ("right", "left") or not isinstance(side, str):
        raise ValueError("side")
    if precision not in (None, "fp32", "tf32", "bf16"):
        raise ValueError("precision")
    made = formula(x, (first, second), side)
    made = made * scalar(alpha)
    share = scalar(beta)
    if y is None:
        if isinstance(beta, torch.Tensor) or share != 0:
            raise ValueError("y")
        return written(made, x, out)
    plain.same_kind(x, y)
    added = plain.wide(y).expand(made.shape)
    return written(made if share == 0 else made + share * added, x, out)


def of_factors(c: Context) -> dict:
    """The list itself is what may be wrong."""
    return {"x": c.randn(4, 8), "factors": [c.randn(2, 3), c.randn(4, 5)]}


def wanted_of_factors(x, factors):
    if not isinstance(factors, (list, tuple)) or not factors:
        raise TypeError("factors")
    return formula(x, factors, "right")


def descriptor(c: Context) -> dict:
    return {"shapes": SHAPES, "side": "left", "transposed": c.random.random() < 0.5,
            "epilogue": (), "precision": None}  # fmt: skip


def layer(c: Context) -> dict:
    return {"in_sizes": (2, 3), "out_sizes": [3, 5], "use_bias": c.random.random() < 0.5,
            "device": c.device, "dtype": torch.float32, "activation": "relu", "precision": None,
            "x": c.randn(4, 6)}  # fmt: skip


def call_layer(in_sizes, out_sizes, use_bias, device, dtype, *, x, **named):
    return kl.nn.KroneckerLinear(in_sizes, out_sizes, use_bias, device, dtype, **named)(x)


ENTRIES = {
    "kernlib.run_kernel kron": Entry(
        kl.run_kernel, described, 4, KINDS, wanted_described, NAMES, 4
    ),
    "kernlib.kron_matmul": Entry(call, called, 3, KINDS, wanted_called, NAMES, 4),
    "kernlib.kron_matmul factors": Entry(
        kl.kron_matmul, of_factors, 2, KINDS, wanted_of_factors, NAMES, 2
    ),
    "kernlib.nn.KroneckerLinear": Entry(call_layer, layer, 5, KINDS, None, NAMES, 2),
    "kernlib.KroneckerProduct": Entry(kl.KroneckerProduct, descriptor, 1, KINDS, None, NAMES, 2),
}
