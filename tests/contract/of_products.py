"""Kronecker-sparse factors and compressed matrices: their products, codecs and layers."""

from __future__ import annotations

import torch
from torch import nn

import kernlib as kl
from kernlib import sparse
from kernlib.compat import macko
from kernlib.families.kronecker_sparse import reference
from kernlib.nn import compat
from tests.contract import plain
from tests.contract.cases import Context, Entry
from tests.families.sparse.cases import FORMATS

PATTERN = (2, 3, 4, 5)  # 40 features to 30
KINDS = {
    "descriptor": "descriptor", "debug": "flag", "scale": "number", "format": "text",
    "columns": "int", "density": "number", "per": "text", "inplace": "flag", "shape": "any",
    "epilogue": "epilogue", "activation": "epilogue", "patterns": "any", "weights": "any",
    "use_bias": "flag", "algo": "text", "dtype": "dtype", "bs_last": "flag", "device": "device",
    "precision": "text", "model": "any", "module": "any", "match": "text",
    "approximate": "flag", "linear": "any", "w": "any", "facts": "any", "version": "int",
    "nnz": "int", "rows": "int", "cols": "int", "pattern": "any", "a": "int", "b": "int",
    "c": "int", "d": "int", "in_features": "int", "out_features": "int", "bias_flag": "flag",
    "dim": "int", "matrix": "any", "name": "text", "init": "text",
}  # fmt: skip
NAMES = (
    "x", "w", "weight", "weights", "bias", "input", "descriptor", "factors", "patterns", "shape",
    "format", "tensors", "header", "values", "bitmap", "offsets", "compressed", "operands",
    "row_ptr", "deltas", "columns", "dense", "M", "V", "a", "b", "bandwidth", "epilogue",
    "activation", "state", "factor", "algo", "epilogues", "parameter", "rows", "specs", "pattern",
    "vsize", "dtype", "init",
)  # fmt: skip


def bias_of(c: Context, features: int, dtype) -> dict:
    return {"bias": c.randn(features, dtype=dtype)} if c.random.random() < 0.5 else {}


# Factors.


def factor(c: Context) -> dict:
    dtype = c.float_type()
    biased = c.random.random() < 0.5
    descriptor = kl.KroneckerSparse(*PATTERN, epilogue=(kl.Bias(),) if biased else ())
    lead = c.random.choice([(), (3,), (2, 3)])
    given = {"descriptor": descriptor, "x": c.randn(*lead, 40, dtype=dtype),
             "weight": c.randn(*PATTERN, dtype=dtype)}  # fmt: skip
    if biased:
        given["bias"] = c.randn(30, dtype=dtype)
    if c.random.random() < 0.5:
        given["out"] = torch.zeros(*lead, 30, dtype=dtype, device=c.device)
    return given


def wanted_factor(descriptor, x, weight, bias=None, out=None, **values):
    if type(descriptor) is kl.KroneckerSparseChain and len(descriptor.factors) == 1:
        (descriptor,) = descriptor.factors
    if type(descriptor) is not kl.KroneckerSparse or values:
        raise TypeError("no factor")
    plain.same_kind(x, weight, bias)
    if tuple(weight.shape) != descriptor.pattern:
        raise ValueError("weight")
    y = plain.wide(x) @ reference.dense(descriptor.pattern, plain.wide(weight)).mT
    if (bias is not None) != bool(descriptor.epilogue):
        raise ValueError("bias")
    if bias is not None:
        if bias.dim() != 1:
            raise ValueError("bias")
        y = y + plain.wide(bias)
    return plain_out(y, x, out)


def plain_out(y, x, out):
    if out is not None and (tuple(out.shape) != tuple(y.shape) or out.dtype != x.dtype):
        raise ValueError("out")
    return y


def chain(c: Context) -> dict:
    second = (1, 4, 6, 5)
    made = kl.KroneckerSparseChain((kl.KroneckerSparse(*PATTERN), kl.KroneckerSparse(*second)))
    dtype = c.float_type()
    given = {"descriptor": made, "x": c.randn(3, 40, dtype=dtype)}
    given |= {"weight": c.randn(*PATTERN, dtype=dtype), "second": c.randn(*second, dtype=dtype)}
    if c.random.random() < 0.5:
        given["out"] = torch.zeros(3, 20, dtype=dtype, device=c.device)
    return given


def wanted_chain(descriptor, x, weight, second, out=None):
    if type(descriptor) is not kl.KroneckerSparseChain or len(descriptor.factors) != 2:
        raise TypeError("no chain")
    first, last = descriptor.factors
    y = wanted_factor(first, x, weight)
    return plain_out(y @ reference.dense(last.pattern, plain.wide(second)).mT, x, out)


def layer(c: Context) -> dict:
    dtype = c.random.choice((torch.float32, torch.float64))
    given = {"patterns": [PATTERN], "weights": [c.randn(*PATTERN, dtype=dtype)], "use_bias": False,
             "algo": c.random.choice(["auto", "kernel", "einsum", "bmm", "dense", "sparse", "bsr"]),
             "dtype": dtype, "bs_last": False, "device": c.device, "activation": None,
             "precision": None, "init": "ksmm", "x": c.randn(3, 40, dtype=dtype)}  # fmt: skip
    return given


def call_layer(patterns, weights, use_bias, algo, dtype, bs_last, *, x, **named):
    return kl.nn.KSLinear(patterns, weights, use_bias, algo, dtype, bs_last, **named)(x)


def suggested(c: Context) -> dict:
    return {"model": swap(c)["model"], "rows": 64, "dtype": torch.float16, "match": None,
            "count": 2}  # fmt: skip


def swap(c: Context) -> dict:
    model = nn.Sequential(nn.Linear(8, 6, device=c.device), nn.ReLU())
    return {"model": model, "patterns": {(8, 6): [(2, 3, 4, 1)]}, "match": None,
            "approximate": False, "algo": "einsum"}  # fmt: skip


# Compressed matrices.


def pruned(c: Context, rows: int, cols: int, dtype) -> torch.Tensor:
    dense = c.randn(rows, cols, dtype=dtype)
    return torch.where(dense.abs() < 0.6, 0.0, dense).to(dtype)


def half(c: Context) -> torch.dtype:
    return c.random.choice((torch.float16, torch.bfloat16, torch.float32))


def product(c: Context) -> dict:
    dtype = half(c)
    dense = pruned(c, 6, 24, dtype)
    lead = c.random.choice([(), (3,), (2, 3)])
    given = {"w": sparse.compress(dense, c.random.choice(FORMATS)),
             "x": c.randn(*lead, 24, dtype=dtype)} | bias_of(c, 6, dtype)  # fmt: skip
    if c.random.random() < 0.2:
        given |= {"epilogue": (kl.Scale(),), "scale": 0.5}
    if c.random.random() < 0.4:
        given["out"] = torch.zeros(*lead, 6, dtype=dtype, device=c.device)
    return given


def wanted_product(w, x, bias=None, epilogue=(), out=None, **values):
    plain.same_kind(*(t for t in (w.to_dense(), x, bias) if t is not None))
    y = plain.wide(x) @ plain.wide(w.to_dense()).mT
    if bias is not None:
        if bias.dim() != 1:
            raise ValueError("bias")
        y = y + plain.wide(bias)
    if epilogue not in ((), []) or values:
        if tuple(epilogue) != (kl.Scale(),) or set(values) != {"scale"}:
            return None  # of another epilogue
        scale = plain.number(values["scale"])
        y = y * scale
    return plain_out(y, x, out)


def run_sparse(c: Context) -> dict:
    given = product(c)
    for name in ("epilogue", "scale", "bias"):
        given.pop(name, None)
    return {"descriptor": kl.SparseMatmul()} | given


def wanted_sparse(descriptor, w, x, out=None, **values):
    if descriptor != kl.SparseMatmul() or values:
        raise TypeError("no product")
    return wanted_product(w, x, out=out)


def matrix(c: Context) -> dict:
    return {"dense": pruned(c, 6, 24, half(c)), "format": c.random.choice(FORMATS), "columns": 1}


def call_compress(dense, format="auto", columns=1, **rest):
    return sparse.compress(dense, format, columns, **rest).to_dense()


def wanted_dense(dense, format=None, columns=1):
    if dense.dim() != 2:
        raise ValueError("dense")
    return plain.wide(dense if dense.layout == torch.strided else dense.to_dense())


def csr(c: Context) -> dict:
    dense = pruned(c, 6, 24, half(c)).float()
    made = dense.cpu().to_sparse_csr()
    parts = (made.crow_indices(), made.col_indices(), made.values())
    named = dict(zip(("crow", "col", "values"), (t.to(c.device) for t in parts), strict=True))
    return named | {"shape": (6, 24), "format": "auto", "columns": 1}


def call_csr(crow, col, values, shape, format="auto", columns=1, **rest):
    return sparse.from_csr(crow, col, values, shape, format, columns, **rest).to_dense()


def state(c: Context) -> dict:
    dense = pruned(c, 6, 24, torch.float16)
    header, tensors = sparse.compress(dense, c.random.choice(FORMATS)).state()
    return header | {f"tensors.{name}": t for name, t in tensors.items()}


def call_state(**parts):
    """Of a header's entries and, named ``tensors.<name>``, the tensors."""
    if "nosuch" in parts:
        raise TypeError("no unexpected keyword argument 'nosuch'")
    tensors = {k.removeprefix("tensors."): v for k, v in parts.items() if k.startswith("tensors.")}
    header = {k: v for k, v in parts.items() if not k.startswith("tensors.")}
    w = sparse.SparseMatrix.from_state(header, tensors)
    w.transpose()
    return sparse.matmul(w, w.to_dense()[:1].clone())


def pruning(c: Context) -> dict:
    return {"weight": c.randn(6, 24, dtype=c.float_type()), "density": 0.5,
            "per": c.random.choice(["matrix", "row"]), "inplace": False}  # fmt: skip


def mask(c: Context) -> dict:
    return {"weight": c.randn(6, 24, dtype=c.float_type()), "n": 2, "m": 4}


def expected_mask(weight, n=2, m=4) -> torch.Tensor:
    keys = weight.double().abs().nan_to_num(nan=float("inf"), posinf=1e308).unflatten(-1, (-1, m))
    order = keys.argsort(dim=-1, descending=True, stable=True)[..., :n]
    return torch.zeros_like(keys).scatter_(-1, order, 1).flatten(-2).bool()


def pruned_model(c: Context) -> dict:
    return {"model": nn.Sequential(linear(c)), "density": 0.5, "pattern": None, "match": None,
            "per": c.random.choice(["model", "matrix", "row"])}  # fmt: skip


CALIBRATED = {"batches": "any", "progress": "flag", "block_size": "int", "dampening": "number"}


def calibrated(c: Context) -> dict:
    return {"model": nn.Sequential(linear(c)), "batches": [c.randn(30, 24)], "density": 0.5,
            "pattern": None, "match": None, "progress": False}  # fmt: skip


def compensated(c: Context) -> dict:
    return calibrated(c) | {"block_size": 8, "dampening": 0.01}


def linear(c: Context) -> nn.Linear:
    made = nn.Linear(24, 6, device=c.device)
    with torch.no_grad():
        made.weight.copy_(pruned(c, 6, 24, torch.float32))
    return made


def from_linear(c: Context) -> dict:
    return {"linear": linear(c), "format": c.random.choice(FORMATS), "density": None,
            "per": "matrix", "activation": None, "columns": 1, "x": c.randn(3, 24)}  # fmt: skip


def call_from_linear(linear, format, density, per, activation, columns, x, **rest):
    made = kl.nn.SparseLinear.from_linear(
        linear,
        format=format,
        density=density,
        per=per,
        activation=activation,
        columns=columns,
        **rest,
    )
    return made(x)


def empty_layer(c: Context) -> dict:
    return {"in_features": 24, "out_features": 6, "bias": True, "activation": None,
            "dtype": torch.float32, "device": c.device}  # fmt: skip


def sparsified(c: Context) -> dict:
    return {"model": nn.Sequential(linear(c)), "match": None, "density": 0.5, "format": "auto",
            "per": "matrix", "columns": 1}  # fmt: skip


def macko_tuple(c: Context) -> dict:
    made = macko.compress(pruned(c, 6, 24, torch.float16))
    return dict(zip(("values", "deltas", "row_ptr", "rows", "cols"), made, strict=True))


def macko_product(c: Context) -> dict:
    return macko_tuple(c) | {"V": c.randn(24, dtype=torch.float16)}


def call_macko(values, deltas, row_ptr, rows, cols, V, **rest):
    return macko.multiply((values, deltas, row_ptr, rows, cols), V, **rest)


def move(c: Context) -> dict:
    return {"compressed": macko.compress(pruned(c, 6, 24, torch.float16)), "device": c.device}


# KSMM's functions.


def generated(c: Context) -> dict:
    return {"a": 2, "b": 3, "c": 4, "d": 5, "algo": "kernel", "weights": c.randn(*PATTERN),
            "dtype": torch.float32, "device": c.device}  # fmt: skip


def stored(algo: str, name: str):
    def arguments(c: Context) -> dict:
        made = compat.generate_factor(*PATTERN, algo, c.randn(*PATTERN), device=c.device)
        return {name: made, "pattern": PATTERN}

    return arguments


def layers(c: Context) -> dict:
    return {"in_features": 4, "out_features": 3, "bias": True, "device": c.device,
            "dtype": torch.float32, "weights": c.randn(3, 4)}  # fmt: skip


def last(c: Context) -> dict:
    given = layers(c)
    weights = given.pop("weights")
    return given | {"version": "einsum", "weights": weights}


def any_layer(c: Context) -> dict:
    return {"patterns": [(1, 3, 4, 1)], "algo": c.random.choice(["nn_linear", "einsum"]),
            "dtype": torch.float32, "bs_last": False, "bias": False, "weights": None,
            "device": c.device}  # fmt: skip


def product_of_storage(c: Context) -> dict:
    return {"x": c.randn(3, 40), "w_kron": compat.generate_factor(*PATTERN, "bmm", device=c.device),
            "pattern": PATTERN}  # fmt: skip


def product_of_storage_last(c: Context) -> dict:
    return product_of_storage(c) | {"x": c.randn(40, 3)}


def stored_anyhow(c: Context) -> dict:
    algo = c.random.choice(["kernel", "bmm", "einsum", "dense", "sparse", "bsr"])
    return stored(algo, "factor")(c) | {"algo": algo}


def entry(name, call, arguments, positional=9, wanted=None, weight=1, kinds=None):
    return name, Entry(call, arguments, positional, KINDS | (kinds or {}), wanted, NAMES, weight)


BIAS = {"bias": "flag"}
LAYERS = BIAS | {"version": "text", "weights": "tensor"}


def of_ksmm(name: str, arguments, kinds=None):
    return entry(f"kernlib.nn.compat.{name}", getattr(compat, name), arguments, 9, None, 1, kinds)


ENTRIES = dict(
    (
        entry("kernlib.run_kernel factor", kl.run_kernel, factor, 3, wanted_factor, 4),
        entry("kernlib.run_kernel chain", kl.run_kernel, chain, 4, wanted_chain, 2),
        entry("kernlib.run_kernel sparse", kl.run_kernel, run_sparse, 3, wanted_sparse, 3),
        entry("kernlib.nn.KSLinear", call_layer, layer, 6, None, 4),
        entry("kernlib.nn.replace_linear", kl.nn.replace_linear, swap, 2, None, 2),
        entry("kernlib.nn.suggest_chains", kl.nn.suggest_chains, suggested, 3, None, 1),
        of_ksmm("generate_factor", generated, {"weights": "tensor"}),
        of_ksmm("to_abcd", stored_anyhow),
        of_ksmm("from_abcd_to_dense", lambda c: {"factor": c.randn(*PATTERN)}),
        of_ksmm("from_kernel_format_to_dense", stored("kernel", "factor")),
        of_ksmm("from_bmm_format_to_dense", stored("bmm", "factor")),
        of_ksmm("bmm_bs_first", product_of_storage),
        of_ksmm("bmm_bs_last", product_of_storage_last),
        of_ksmm("LinearBsl", last, LAYERS),
        of_ksmm("UnfusedLinear", layers, LAYERS),
        of_ksmm("get_linear_layer", any_layer, BIAS),
        entry("kernlib.nn.SparseLinear", kl.nn.SparseLinear, empty_layer, 6, None, 1, BIAS),
        entry("kernlib.nn.SparseLinear.from_linear", call_from_linear, from_linear, 7, None, 3),
        entry("kernlib.nn.sparsify", kl.nn.sparsify, sparsified, 1, None, 2),
        entry("kernlib.sparse.matmul", sparse.matmul, product, 2, wanted_product, 4),
        entry("kernlib.sparse.compress", call_compress, matrix, 3, wanted_dense, 3),
        entry("kernlib.sparse.from_csr", call_csr, csr, 6, None, 3),
        entry("kernlib.sparse.SparseMatrix", call_state, state, 0, None, 5),
        entry("kernlib.sparse.magnitude", sparse.magnitude, pruning, 4, None, 2),
        entry("kernlib.sparse.prune.n_m", sparse.prune.n_m, mask, 3, expected_mask, 2,
              {"n": "int", "m": "int"}),
        entry("kernlib.sparse.prune.magnitude", sparse.prune.magnitude, pruned_model, 1, None, 2),
        entry("kernlib.sparse.prune.wanda", sparse.prune.wanda, calibrated, 2, None, 1,
              CALIBRATED),
        entry("kernlib.sparse.prune.sparsegpt", sparse.prune.sparsegpt, compensated, 2, None, 1,
              CALIBRATED),
        entry("kernlib.compat.macko.compress", macko.compress,
              lambda c: {"M": pruned(c, 6, 24, torch.float16)}, 1, None, 1),
        entry("kernlib.compat.macko.decompress",
              lambda *parts, **rest: macko.decompress((*parts, *rest.values())), macko_tuple, 5,
              None, 3),
        entry("kernlib.compat.macko.multiply", call_macko, macko_product, 6, None, 3),
        entry("kernlib.compat.macko.move_to_device", macko.move_to_device, move, 2, None, 1,
              {"compressed": "any"}),
    )
)  # fmt: skip
