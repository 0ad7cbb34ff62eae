"""Values in the place of an argument, by the argument's kind. Some of them are valid: what they
should give, the entry's reference says."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from torch.nn.attention.bias import causal_upper_left

import kernlib as kl


def nothing(*_, **__):
    """Takes anything, and gives nothing."""


class Anything:
    """Made of anything."""

    def __init__(self, *_, **__):
        pass


class AnyModule(torch.nn.Module):
    """Called with anything, it gives nothing."""

    def forward(self, *_, **__):
        return None


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


class Sharded(torch.Tensor):
    """A subclass with a dispatcher of its own, which knows no operator of kernlib, as DTensor's."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner):
        self.inner = inner

    def __repr__(self):
        return "Sharded(...)"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"Operator {function} does not have a sharding strategy")


def nested(t):
    return torch.nested.nested_tensor([t, t])


def jagged(t):
    return torch.nested.nested_tensor([t.reshape(-1), t.reshape(-1)], layout=torch.jagged)


def quantized(t):
    return torch.quantize_per_tensor(t.detach().float().cpu(), 0.1, 0, torch.qint8)


def strided(t):
    """The same values, with gaps between."""
    wide = t.new_zeros(*t.shape, 2)
    wide[..., 0] = t.detach()
    return wide[..., 0]


def misaligned(t):
    memory = t.new_empty(t.numel() + 1)[1:].view(t.shape)
    return memory.copy_(t.detach())


def scrambled(t):
    """Any bits at all in the place of its integers."""
    if t.is_floating_point() or t.is_complex() or not t.numel():
        return t
    return torch.randint(-(2**31), 2**31 - 1, t.shape, device=t.device).to(t.dtype)


def filled(value):
    return lambda t: torch.full_like(t, value) if t.is_floating_point() else t


def one(value):
    def made(t):
        t = t.detach().clone()
        if t.numel() and t.is_floating_point():
            t.view(-1)[0] = value
        return t

    return made


def huge(t):
    return torch.empty((1 << 30,) * max(1, t.dim() - 1) + (1,) * (t.dim() > 1), device="meta",
                       dtype=t.dtype)  # fmt: skip


# Same values, laid out otherwise, or of a kind that should make no difference.
SAME = {
    "strided": strided,
    "misaligned": misaligned,
    "transposed memory": lambda t: t.detach().mT.contiguous().mT if t.dim() > 1 else t,
    "negated view": lambda t: torch._neg_view(-t.detach()),
    "subclass": lambda t: t.detach().as_subclass(Plain),
    "parameter": lambda t: torch.nn.Parameter(t.detach(), requires_grad=False),
    "a batch of 1": lambda t: t[None],
}
TENSORS = SAME | {
    "float64": lambda t: t.double(),
    "float32": lambda t: t.float(),
    "float16": lambda t: t.half(),
    "int64": lambda t: t.long(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "float8": lambda t: t.to(torch.float8_e4m3fn),
    "meta": lambda t: t.to("meta"),
    "huge": huge,
    "sparse": lambda t: t.detach().to_sparse(),
    "csr": lambda t: t.detach().to_sparse_csr() if t.dim() == 2 else t.detach().to_sparse(),
    "nested": nested,
    "jagged": jagged,
    "quantized": quantized,
    "CausalBias": lambda t: causal_upper_left(*(1, 1, *t.shape)[-2:]),
    "mkldnn": lambda t: t.detach().float().cpu().to_mkldnn(),
    "no rows": lambda t: t[:0],
    "no columns": lambda t: t[..., :0],
    "a row less": lambda t: t[1:] if t.dim() else t,
    "a column less": lambda t: t[..., 1:] if t.dim() else t,
    "a number": lambda t: t.reshape(-1)[0] if t.numel() else t,
    "flat": lambda t: t.reshape(-1),
    "a batch of 3": lambda t: t.detach().expand(3, *t.shape),
    "five dimensions": lambda t: t.reshape((1,) * (5 - t.dim()) + tuple(t.shape)),
    "expanded": lambda t: t.detach()[:1].expand(t.shape) if t.dim() else t,
    "zero tensor": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype, device=t.device),
    "NaN": one(math.nan),
    "infinite": one(math.inf),
    "all NaN": filled(math.nan),
    "zeros": filled(0.0),
    "large": filled(1e4),
    "requires a gradient": lambda t: (
        t.detach().clone().requires_grad_() if t.is_floating_point() else t
    ),
    "inference": lambda t: torch.inference_mode()(torch.clone)(t.detach()),
    "scrambled": scrambled,
    "sharded": lambda t: Sharded(t.detach()),
    "bsr": lambda t: t.detach().to_sparse_bsr((1, 1)),
    "an array": lambda t: t.detach().float().cpu().numpy(),
    "an array of texts": lambda t: np.full(tuple(t.shape), "x"),
    "a tuple of it": lambda t: (t,),
    "a list of None": lambda t: [None] * len(t),
    "its class": type,
    "its shape": lambda t: t.shape,
    "empty": lambda t: t.new_empty(0),
    "a list": lambda t: t.detach().float().cpu().tolist(),
    "uninitialized": lambda t: torch.nn.parameter.UninitializedParameter(),
}
ANYTHING = {
    "None": None,
    "text": "x",
    "empty text": "",
    "bytes": b"x",
    "int": 3,
    "object": object(),
    "type": Anything,
    "empty list": [],
    "dict": {"a": 1},
    "list of None": [None],
    "nested lists": [[[]]],
    "array": np.ones(3),
    "array of objects": np.array([None]),
    "many digits": 10**5000,
    "generator": (each for each in ()),
    "exception": ValueError("x"),
    "set": {1},
    "function": nothing,
    "module": AnyModule(),
    "descriptor": kl.gaussian(),
    "ellipsis": ...,
    "slice": slice(1),
    "dtype": torch.float32,
    "nan": math.nan,
}
FLAGS = {
    "True": True, "False": False, "no": "no", "0": 0, "1": 1, "0.0": 0.0,
    "tensor": torch.tensor(True), "numpy": np.bool_(True), "tuple": (),
}  # fmt: skip
NUMBERS = {
    "0": 0, "-1": -1, "1": 1, "2": 2.0, "1.5": 1.5, "3": 3, "nan": math.nan, "inf": math.inf,
    "-inf": -math.inf, "huge": 10**400, "large": 1e300, "small": 1e-300, "fraction": Fraction(3, 2),
    "huge fraction": Fraction(10**400, 3), "decimal": Decimal("1.5"), "complex": 1j, "bool": True,
    "numpy": np.float32(1.5), "numpy int": np.int64(2), "numpy array": np.ones(1),
    "numpy scalar": np.array(1.5), "numpy text": np.array("1.5"), "numpy bool": np.array(True),
    "tensor": torch.tensor(1.5), "tensor (1,)": torch.tensor([1.5]), "tensor 3": torch.ones(3),
    "int tensor": torch.tensor(2), "bool tensor": torch.tensor(True),
    "tensor (1, 1)": torch.full((1, 1), 1.5),
    "matrix": torch.ones(2, 2), "no numbers": torch.ones(0), "nan tensor": torch.tensor(math.nan),
    "inf tensor": torch.tensor(math.inf), "negative tensor": torch.tensor([-1.0]),
    "complex tensor": torch.tensor(1j), "sparse tensor": torch.ones(1).to_sparse(),
    "meta tensor": torch.ones((), device="meta"),
    "float8 tensor": torch.ones(1).to(torch.float8_e4m3fn),
    "wide tensor": torch.tensor(1.5, dtype=torch.float64),
    "strided tensor": torch.ones(4)[::4],
    "tensor with a gradient": torch.tensor(1.5, requires_grad=True),
}  # fmt: skip
INTS = {
    "0": 0, "1": 1, "2": 2, "-1": -1, "1.0": 1.0, "1.5": 1.5, "bool": True, "2**31": 2**31,
    "2**62": 2**62, "2**63": 2**63, "-2**63": -(2**63), "huge": 10**30, "numpy": np.int64(1),
    "numpy scalar": np.array(2), "numpy array": np.array([1]), "numpy float": np.float64(1),
    "many digits": 10**5000,
    "tensor": torch.tensor(1), "nan": math.nan, "text": "1", "fraction": Fraction(1),
}  # fmt: skip
TEXTS = {
    "another": "nosuch", "upper": "AUTO", "not ascii": "é\x00", "long": "x" * 10_000,
    "pattern": "(", "number": 3, "tuple": ("auto",), "bytes": b"auto", "list": [],
}  # fmt: skip
DESCRIPTORS = {
    "a class": kl.Gaussian,
    "an epilogue": kl.Gaussian(),
    "a function": kl.gaussian,
    "its name": "gaussian",
    "pairwise": kl.gaussian(),
    "a distance": kl.l2_distance(),
    "p": kl.p_distance(),
    "symmetric": kl.gaussian(symmetric=True),
    "factor": kl.KroneckerSparse(2, 3, 3, 2),
    "chain": kl.KroneckerSparseChain((kl.KroneckerSparse(2, 3, 3, 2),)),
    "sparse": kl.SparseMatmul(),
    "a list": [kl.gaussian()],
}
DEVICES = {
    "cpu": "cpu", "unknown": "nosuch", "far": "cuda:99", "negative": -1, "number": 99, "float": 1.5,
    "meta": "meta", "xla": "xla",
}  # fmt: skip
DTYPES = {
    "float16": torch.float16, "float64": torch.float64, "int8": torch.int8, "bool": torch.bool,
    "complex": torch.complex64, "float8": torch.float8_e4m3fn, "text": "float32",
    "numpy": np.float32, "python": float, "tuple": (torch.float32, torch.float16),
}  # fmt: skip
FUNCTIONS = {
    "nothing": nothing, "number": lambda *a: 3, "shape": lambda *a: torch.ones(1),
    "double": lambda v, *a: v.double() if hasattr(v, "double") else v, "no function": 3,
    "text": "x", "list": [nothing],
}  # fmt: skip
EPILOGUES = {
    "relu": kl.Relu(), "class": kl.Relu, "name": "relu", "module": torch.nn.ReLU(),
    "bias": kl.Bias(), "kernel": kl.Gaussian(), "tuple": (kl.Gelu(), kl.Scale()),
    "list": [kl.Gelu()],
    "twice": (kl.Scale(), kl.Scale()), "nested": ((kl.Gelu(),),), "stage": kl.Abs(),
}  # fmt: skip
OF_KIND = {
    "flag": FLAGS,
    "number": NUMBERS,
    "int": INTS,
    "text": TEXTS,
    "descriptor": DESCRIPTORS,
    "device": DEVICES,
    "dtype": DTYPES,
    "function": FUNCTIONS,
    "epilogue": EPILOGUES,
    "any": {},
}


def placed(value, device):
    """A value of a table where the case runs, in memory of its own."""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta:
        made = value.detach().clone()
        return made.requires_grad_() if value.requires_grad else made
    return value


def instead(kind: str, value, random) -> tuple[str, object]:
    """What stands in a value's place, and what it is called."""
    by_tensor = isinstance(value, torch.Tensor) and (kind == "tensor" or random.random() < 0.5)
    if by_tensor and random.random() < 0.85:
        name = random.choice([*TENSORS])
        try:
            return name, TENSORS[name](value)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
            return "None", None  # what cannot be made of this tensor
    if random.random() < 0.06:
        return "its class", type(value)
    table = OF_KIND.get(kind) or ANYTHING
    if table is not ANYTHING and kind != "function" and random.random() < 0.2:
        table = ANYTHING
    name = random.choice([*table])
    return name, placed(table[name], None)
