"""Descriptors, what prepares their kernels, events, settings, and the predecessor's names."""

from __future__ import annotations

import tempfile

import torch

import kernlib as kl
from kernlib import events, settings
from kernlib.compat import kermac
from tests.contract import of_linalg, of_pairwise, plain
from tests.contract.cases import Context, Entry

KINDS = of_pairwise.OPTIONS | of_linalg.KINDS | {
    "archs": "text", "specs": "tensor", "dtypes": "dtype", "workers": "int", "progress": "flag",
    "operator": "text", "inner": "epilogue", "outer": "epilogue", "epilogue": "epilogue",
    "precision": "text", "symmetric": "flag", "direct": "flag", "parameter": "text",
    "expression": "text", "parameters": "any", "approximate": "text", "degree": "int",
    "nu": "number", "negative_slope": "number", "factors": "any", "batch_last": "flag",
    "descriptors": "descriptor", "kernel_descriptor": "any", "skip_epilogue": "flag",
    "try_to_align": "flag", "fill_mode": "any", "device": "device", "listener": "function",
    "inner_operator": "any", "inner_power": "any", "outer_power": "any", "kernel_type": "any",
    "regularization_offset_x": "int", "regularization_offset_y": "int", "text": "text",
    "name": "text", "key": "text", "arch": "text", "description": "text", "event": "any",
    "cache_bytes": "int", "lock_timeout": "number", "assert_cached": "flag", "cache_dir": "any",
    "variable": "text", "default": "text", "meaning": "text", "replace": "flag",
}  # fmt: skip
NUMERIC = KINDS | {"a": "int", "b": "int", "c": "int", "d": "int"}
TENSOR_NAMES = (
    "inner_p",
    "arch",
    "factors",
    "eigenvalues",
    "epilogues",
    "parameter",
    "specs",
    "dense",
    "stage",
    "function",
    "names",
    "field",
    "fields",
)
NAMES = (*of_pairwise.NAMES, *of_linalg.NAMES, *TENSOR_NAMES, "descriptor", "patterns", "a", "b")


def stages(c: Context) -> dict:
    return {"operator": "difference", "inner": kl.Square(), "outer": kl.Sqrt(),
            "epilogue": c.random.choice([(), kl.Gaussian(), (kl.Laplace(), kl.Scale())]),
            "precision": None, "symmetric": False, "direct": False}  # fmt: skip


def options(*names: str, **more):
    """Arguments of a named kernel."""
    values = {"precision": None, "symmetric": False, "epilogue": ()}
    return lambda c: {name: values[name] for name in names} | dict(more)


def fixed(**values):
    return lambda c: dict(values)


def custom(c: Context) -> dict:
    expression = c.random.choice(["v * tanh(v)", "v * s + 1", "exp(-v / s)"])
    return {"expression": expression, "parameters": ("s",) if "s" in expression[4:] else ()}


def formula(c: Context) -> dict:
    expression = c.random.choice(["s * sum(x)", "where(s > row, sum(x * x, 0, 2), 1)"])
    return {"expression": expression, "axes": {"s": "row", "x": ("col", "feature")}}


def ahead(c: Context) -> dict:
    x, y = (torch.empty(n, 3, device="meta") for n in (70, 60))
    return {"descriptors": kl.gaussian(), "archs": ("sm_90a",), "specs": (x, y), "workers": 1,
            "progress": False, "debug": False, "bandwidth": 2.0}  # fmt: skip


def call_ahead(descriptors, **rest):
    """Nothing may compile here, so what is right ends in that."""
    try:
        return kl.compile(descriptors, **rest)
    except kl.NotCachedError:
        return None


def prepared(c: Context) -> dict:
    return {"descriptors": kl.gaussian(), **of_pairwise.points(c, "a", "b"), "workers": None,
            "progress": False, "debug": False, "bandwidth": 2.0}  # fmt: skip


def recorded(c: Context) -> dict:
    return {"archs": ("sm_90a",), "replace": False, "workers": 1, "progress": False}


def call_recording(**given):
    """Without a GPU a block that is right ends in the words that it used no kernel."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with kl.recording(folder, **given):
                pass
        except RuntimeError as error:
            if "used no kernel" not in str(error):
                raise


def call_tune(descriptor, a, b, **rest):
    """A call that is right ends in the words that there is no GPU."""
    try:
        return kl.tune(descriptor, a, b, **rest)
    except (kl.UnsupportedError, kl.NotCachedError):
        return None


def tuned(c: Context) -> dict:
    given = {"descriptor": kl.gaussian(), **of_pairwise.points(c, "a", "b")}
    return given | {"progress": False, "bandwidth": 2.0}


def emitted(c: Context) -> dict:
    return {"name": "hit", "key": "0" * 64, "arch": "sm_90a", "description": "a kernel"}


def listening(listener, **rest):
    events.subscribe(listener, **rest)()


def overridden(**fields):
    with settings.override(**fields):
        return None


# kermac.


def kermac_kernel(c: Context) -> dict:
    batch = c.random.choice([(), (2,)])
    given = {"kernel_descriptor": kermac.laplace_l1, "a": c.randn(*batch, 5, 3),
             "b": c.randn(*batch, 4, 3)}  # fmt: skip
    given |= {"bandwidth": 2.0, "epsilon": 0.0, "regularization": 0.5}
    given |= {"regularization_offset_x": 1, "regularization_offset_y": 0, "try_to_align": False}
    if c.random.random() < 0.4:
        given["out"] = torch.zeros(*batch, 5, 4, device=c.device)
    return given


def kermac_distance(c: Context) -> dict:
    given = {name: t.float() for name, t in of_pairwise.points(c, "a", "b").items()}
    return given | {"p": 1.5, "skip_epilogue": False, "try_to_align": False, "debug": False}


def wanted_kermac(a, b, out=None, p=2.0, skip_epilogue=False, try_to_align=False, debug=False):
    plain.flag(skip_epilogue, try_to_align, debug)
    if min(a.dim(), b.dim()) < 2 or max(a.dim(), b.dim()) > 3:
        raise ValueError("dimensions")
    found = of_pairwise.wanted_distance(a, b, p, None, not skip_epilogue, out)
    return found if found.dim() == 3 or out is not None else found[None]


def rows(c: Context) -> dict:
    given = of_linalg.system(c)
    given["b"] = c.randn(2, 4, dtype=given["a"].dtype)
    return given


def filled(c: Context) -> dict:
    return rows(c) | {"fill_mode": kermac.FillMode.LOWER, "debug": False}


def single(c: Context) -> dict:
    given = filled(c)
    for name in ("b", "overwrite_b", "debug"):
        given.pop(name, None)
    return given


def stages_of_kermac(c: Context) -> dict:
    return {"inner_operator": kermac.Op.DIFF, "inner_power": kermac.PowerType.ABS,
            "outer_power": kermac.PowerType.NOOP, "kernel_type": kermac.Kernel.NONE}  # fmt: skip


def precompiled(c: Context) -> dict:
    return {"device": "cuda:0", "descriptors": [kermac.l1_norm], "try_to_align": False,
            "debug": False}  # fmt: skip


def call_precompile(device, descriptors, **rest):
    try:
        return kermac.pre_compile_descriptors(device, descriptors, **rest)
    except (kl.UnsupportedError, kl.NotCachedError):
        return None


def entry(name, call, arguments, positional=9, wanted=None, weight=1, kinds=KINDS):
    return name, Entry(call, arguments, positional, kinds, wanted, NAMES, weight)


NAMED = {
    "gaussian": "precision symmetric", "laplace_l1": "precision symmetric",
    "laplace_l2": "precision symmetric", "laplace_pq": "precision symmetric",
    "matern32": "precision symmetric", "matern52": "precision symmetric",
    "cauchy": "precision symmetric", "rational_quadratic": "precision symmetric",
    "l1_distance": "symmetric", "l2_distance": "precision symmetric", "p_distance": "symmetric",
    "squared_distance": "precision symmetric", "power_sum": "symmetric",
    "dot_product": "precision symmetric", "exp_power_sum": "symmetric",
}  # fmt: skip
PLAIN = (
    "Abs", "Add", "Cauchy", "ExpPower", "Gaussian", "Identity", "Laplace", "Power",
    "PowerExponential",
    "PowerLog", "RationalQuadratic", "Relu", "Root", "Sigmoid", "Silu", "Sqrt", "Square", "Tanh",
    "register_operators",
)  # fmt: skip

ENTRIES = dict(
    (
        entry("kernlib.Pairwise", kl.Pairwise, stages, 4, None, 3),
        *(
            entry(f"kernlib.{name}", getattr(kl, name), options(*given.split()), 0)
            for name, given in NAMED.items()
        ),
        entry("kernlib.polynomial", kl.polynomial, options("symmetric", degree=3), 0),
        *(entry(f"kernlib.{name}", getattr(kl, name), fixed(), 0) for name in PLAIN),
        entry("kernlib.Bias", kl.Bias, fixed(parameter="late")),
        entry("kernlib.Scale", kl.Scale, fixed(parameter="gain")),
        entry("kernlib.Gelu", kl.Gelu, fixed(approximate="tanh")),
        entry("kernlib.Gate", kl.Gate, fixed(activation="gelu")),
        entry("kernlib.LeakyRelu", kl.LeakyRelu, fixed(negative_slope=0.1)),
        entry("kernlib.Matern", kl.Matern, fixed(nu=1.5)),
        entry("kernlib.Polynomial", kl.Polynomial, fixed(degree=2)),
        entry("kernlib.Custom", kl.Custom, custom, 2, None, 3),
        entry("kernlib.Formula", kl.Formula, formula, 2, None, 3, KINDS | {"axes": "any"}),
        entry("kernlib.KroneckerSparse", kl.KroneckerSparse,
              fixed(a=2, b=3, c=4, d=5, batch_last=False, epilogue=(), precision=None), 4, None, 2,
              NUMERIC),
        entry("kernlib.KroneckerSparseChain", kl.KroneckerSparseChain,
              lambda c: {"factors": (kl.KroneckerSparse(2, 3, 4, 5),)}),
        entry("kernlib.SparseMatmul", kl.SparseMatmul, fixed(epilogue=(kl.Bias(),))),
        entry("kernlib.compile", call_ahead, ahead, 1, None, 3),
        entry("kernlib.prepare", kl.prepare, prepared, 3, None, 2),
        entry("kernlib.recording", call_recording, recorded, 0, None, 2),
        entry("kernlib.tune", call_tune, tuned, 3, None, 2),
        entry("kernlib.events.subscribe", listening, fixed(listener=print), 1),
        entry("kernlib.compat.kermac.run_kernel", kermac.run_kernel, kermac_kernel, 3, None, 3),
        entry("kernlib.compat.kermac.cdist", kermac.cdist, kermac_distance, 2, wanted_kermac, 3),
        entry("kernlib.compat.kermac.cdist_grad", kermac.cdist_grad,
              lambda c: of_pairwise.pairs(c) | {"p": 1.5, "eps": 1e-8, "debug": False}, 4, None, 2),
        entry("kernlib.compat.kermac.cdist_expadd", kermac.cdist_expadd,
              lambda c: of_pairwise.cdist_expadd(c) | {"try_to_align": False}, 2, None, 2),
        entry("kernlib.compat.kermac.cdist_grad_expadd", kermac.cdist_grad_expadd,
              of_pairwise.cdist_grad_expadd, 4, None, 2),
        entry("kernlib.compat.kermac.ceil_div", kermac.ceil_div, fixed(a=7, b=2), 2, None, 1,
              NUMERIC),
        entry("kernlib.compat.kermac.tensor_stats", kermac.tensor_stats,
              lambda c: {"tensor": c.randn(4, 8)}, 1),
        entry("kernlib.compat.kermac.solve_cholesky", kermac.solve_cholesky, filled, 2, None, 2),
        entry("kernlib.compat.kermac.solve_lu", kermac.solve_lu, rows, 2, None, 2),
        entry("kernlib.compat.kermac.eigh", kermac.eigh, single, 1, None, 1),
        entry("kernlib.compat.kermac.KernelDescriptor", kermac.KernelDescriptor, stages_of_kermac),
        entry("kernlib.compat.kermac.pre_compile_descriptors", call_precompile, precompiled, 2),
        entry("kernlib.compat.kermac.CudaTimer", kermac.CudaTimer, fixed(), 0),
    )
)  # fmt: skip
