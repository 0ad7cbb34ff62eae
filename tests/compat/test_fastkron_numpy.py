"""FastKron's functions of numpy arrays: forms of arrays, and the values of those of tensors."""

from __future__ import annotations

import subprocess
import sys
import warnings
from functools import reduce

import numpy as np
import pytest
import torch

from kernlib.compat.fastkron import fastkronnumpy
from tests.compat.fastkron_cases import (
    BATCHES,
    ROWS,
    P,
    close,
    each_side,
    factors,
    operand,
    random,
    wanted,
)


def numpy_call(side, x, fs, *rest, **options) -> np.ndarray:
    if side == "mkm":
        return fastkronnumpy.gemkm(x, fs, *rest, **options)
    return fastkronnumpy.gekmm(fs, x, *rest, **options)


def as_numpy(side, batch=(), batch_of_factors=(), dtype=np.float64):
    """x and factors, as arrays and as the tensors of the same numbers."""
    x, fs = operand(side, batch=batch), factors(side, batch=batch_of_factors)
    return x.numpy().astype(dtype), [f.numpy().astype(dtype) for f in fs], x, fs


@each_side
@pytest.mark.parametrize("batches", BATCHES, ids=str)
def test_values_with_batches_that_broadcast(side, batches):
    x, fs, *tensors = as_numpy(side, *batches)
    found = numpy_call(side, x, fs)
    assert type(found) is np.ndarray and found.dtype == np.float64
    close(torch.from_numpy(found), wanted(side, *tensors))
    y = random(1, found.shape[-1])
    found = numpy_call(side, x, fs, 3.0, np.float32(0.5), y.numpy())
    close(torch.from_numpy(found), wanted(side, *tensors, 3.0, 0.5, y))


@each_side
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_dtypes_and_matrices_by_numpy_itself(side, dtype):
    x, fs, *_ = as_numpy(side, dtype=dtype)
    dense = reduce(np.kron, [f.astype(np.float64) for f in fs])
    expected = x.astype(np.float64) @ dense if side == "mkm" else dense @ x.astype(np.float64)
    found = numpy_call(side, x, fs)
    assert found.dtype == dtype
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < {np.float16: 1e-3, np.float32: 1e-6, np.float64: 1e-13}[dtype]


def offset_by_a_byte(array):
    """The same numbers where no element is aligned."""
    held = np.empty(array.nbytes + 1, dtype=np.uint8)
    made = held[1:].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


FORMS = {
    "fortran": np.asfortranarray,
    "reversed": lambda a: np.ascontiguousarray(a[::-1, ::-1])[::-1, ::-1],
    "strided": lambda a: np.repeat(a, 2, axis=-1)[..., ::2],
    "big-endian": lambda a: a.astype(">f8"),
    "unaligned": offset_by_a_byte,
    "field": lambda a: a.astype([("v", "f8"), ("w", "f4")])["v"],
    "memmap": lambda a: a.view(np.memmap),
}


@each_side
@pytest.mark.parametrize("form", FORMS)
def test_arrays_in_any_form(side, form):
    x, fs, *_ = as_numpy(side)
    y = numpy_call(side, x, fs)
    made = FORMS[form]
    found = numpy_call(side, made(x), [made(f) for f in fs], 2.0, 0.5, made(y))
    np.testing.assert_allclose(found, 2.5 * y, rtol=1e-12)


@each_side
def test_read_only_arrays_are_read_without_a_warning_or_a_copy(side):
    x, fs, *_ = as_numpy(side)
    for array in (x, *fs):
        array.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = numpy_call(side, x, fs)
        wide = numpy_call(side, np.broadcast_to(x, (3, *x.shape)), fs)
    np.testing.assert_array_equal(wide, np.broadcast_to(plain, wide.shape))
    assert wide.shape == (3, *plain.shape)
    assert plain.flags.writeable


@each_side
def test_vectors_empty_arrays_and_unread_y(side):
    x, fs, *_ = as_numpy(side)
    vector = x[0] if side == "mkm" else x[:, 0]
    assert numpy_call(side, vector, fs).shape == (12,)
    lone = [f.ravel()[:p].copy() for f, p in zip(fs, P, strict=True)]
    assert numpy_call(side, x, lone).shape == (ROWS,)
    empty = x[:0] if side == "mkm" else x[:, :0]
    assert numpy_call(side, empty, fs).size == 0
    y = np.full(12, np.nan)
    assert np.isfinite(numpy_call(side, vector, fs, 2.0, 0.0, y)).all()


@each_side
def test_out(side):
    x, fs, *_ = as_numpy(side)
    plain = numpy_call(side, x, fs)
    for out in (np.empty_like(plain), np.empty_like(plain)[::-1], np.asfortranarray(plain)):
        assert numpy_call(side, x, fs, out=out) is out
        np.testing.assert_array_equal(out, plain)
    y = plain.copy()
    numpy_call(side, x, fs, 2.0, 0.5, y, out=y)
    np.testing.assert_allclose(y, 2.5 * plain, rtol=1e-13)


NUMPY_WRONG = {
    "tensor": (lambda x: {"x": torch.ones(7, 30)}, TypeError, "x must be a numpy array, got Tens"),
    "list": (lambda x: {"x": x.tolist()}, TypeError, "x must be a numpy array, got list"),
    "masked": (lambda x: {"x": np.ma.array(x)}, TypeError, "x must be a numpy array, got Masked"),
    "ints": (lambda x: {"x": x.astype(int)}, TypeError, "x must be float16, .*got int64"),
    "long": (lambda x: {"x": x.astype(np.longdouble)}, TypeError, "x must be float16"),
    "text": (lambda x: {"x": x.astype(str)}, TypeError, "x must be float16"),
    "dtypes": (lambda x: {"x": x.astype(np.float32)}, ValueError, r"fs\[0\] must be torch.float32"),
    "no factors": (lambda x: {"fs": []}, ValueError, "fs must hold at least one factor"),
    "one factor": (lambda x: {"fs": x}, TypeError, "fs must be a list or tuple .*got ndarray"),
    "factor": (lambda x: {"fs": [1.0]}, TypeError, r"fs\[0\] must be a numpy array, got float"),
    "shape": (lambda x: {"x": x[:, :-1]}, ValueError, "x must have shape"),
    "y": (lambda x: {"y": np.ones(5)}, ValueError, "y must broadcast to"),
    "y list": (lambda x: {"y": [1.0]}, TypeError, "y must be a numpy array, got list"),
    "out": (lambda x: {"out": np.ones((7, 11))}, ValueError, r"out must have shape \(7, 12\)"),
    "out kind": (lambda x: {"out": torch.ones(7, 12)}, TypeError, "out must be a numpy array"),
    "out dtype": (lambda x: {"out": np.ones((7, 12), "f4")}, ValueError, "out must be float64"),
    "out overlapping": (
        lambda x: {"out": np.lib.stride_tricks.as_strided(np.ones(12), (7, 12), (0, 8))},
        ValueError,
        "out must have memory for each element",
    ),
    "out read": (
        lambda x: {"out": np.broadcast_to(np.ones(12), (7, 12))},
        ValueError,
        "out must be an array that can be written",
    ),
}


@pytest.mark.parametrize("case", NUMPY_WRONG)
def test_what_is_wrong_is_an_exception_that_names_it(case):
    make, kind, message = NUMPY_WRONG[case]
    x, fs, *_ = as_numpy("mkm")
    with pytest.raises(kind, match=message):
        fastkronnumpy.gemkm(**({"x": x, "fs": fs} | make(x)))


def test_results_are_not_those_of_autocast_or_recorded():
    x, fs, *_ = as_numpy("mkm", dtype=np.float32)
    plain = fastkronnumpy.gemkm(x, fs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        np.testing.assert_array_equal(fastkronnumpy.gemkm(x, fs), plain)
    alpha = torch.ones((), requires_grad=True)
    np.testing.assert_array_equal(fastkronnumpy.gemkm(x, fs, alpha), plain)


@pytest.mark.slow
def test_is_loaded_only_with_its_functions():
    """Neither kernlib nor the functions of torch tensors load those of numpy."""
    code = (
        "import sys, kernlib.compat.fastkron as fk\n"
        "fk.fastkrontorch.gemkm\n"
        "assert 'kernlib.compat.fastkron.fastkronnumpy' not in sys.modules\n"
        "fk.fastkronnumpy.gemkm\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
