"""Small batches on Hopper, which portable kernels take: those ask for no packed weight."""

import pytest

from kernlib.families.kronecker_sparse.lowering import choose as lowering
from tests.families.kronecker_sparse.lowering.cases import (
    KINDS,
    batch_last,
    problem,
    weight_gradient,
)
from tests.support.kernels import stem

ARCH = "sm_90a"
HALF, TF32, FP32 = ("float16", "fp32"), ("float32", "tf32"), ("float32", "fp32")
# Microseconds on an H200 by the kind for large batches and by `portable`: pattern, batch last,
# rows, numbers.
MEASURED = {
    ((6, 64, 64, 1), False, 64, HALF): (3.8, 3.6),
    ((1, 768, 192, 2), False, 64, HALF): (9.0, 8.6),
    ((1, 768, 192, 2), False, 1024, HALF): (9.7, 12.3),
    ((4, 192, 48, 16), False, 16, HALF): (9.2, 8.1),
    ((4, 192, 48, 16), False, 64, HALF): (9.3, 14.8),
    ((1, 256, 256, 16), False, 64, HALF): (14.6, 20.9),
    ((4, 128, 128, 4), False, 64, HALF): (9.2, 7.1),
    ((1, 512, 512, 4), False, 64, HALF): (15.8, 19.0),
    ((1, 64, 64, 64), False, 8, HALF): (9.9, 7.6),
    ((4, 192, 48, 16), True, 64, HALF): (8.4, 6.5),
    ((4, 192, 48, 16), True, 256, HALF): (9.6, 13.4),
    ((1, 256, 256, 16), True, 64, HALF): (11.3, 13.0),
    ((1, 512, 512, 4), True, 8, HALF): (12.0, 15.8),
    ((1, 768, 192, 2), False, 128, FP32): (16.5, 10.9),
    ((1, 256, 256, 16), False, 16, FP32): (29.3, 16.6),
    ((4, 192, 48, 16), False, 128, FP32): (14.6, 30.1),
    ((1, 512, 512, 4), False, 128, FP32): (38.7, 25.1),
    ((1, 512, 512, 4), False, 1024, FP32): (40.7, 64.8),
    ((4, 192, 48, 16), True, 128, FP32): (11.2, 10.8),
    ((4, 192, 48, 16), True, 256, FP32): (14.3, 16.6),
    ((1, 512, 512, 4), True, 128, TF32): (21.1, 14.6),
    ((1, 64, 64, 64), False, 64, TF32): (16.0, 14.2),
    ((1, 64, 64, 64), False, 256, TF32): (16.5, 32.4),
    ((1, 48, 48, 2), False, 128, TF32): (6.9, 4.0),
}


def factor(pattern, last, rows, numbers):
    (blocks, columns, depth, lanes), (dtype, precision) = pattern, numbers
    sizes = {"blocks": blocks, "columns": columns, "depth": depth, "lanes": lanes, "rows": rows}
    return (batch_last if last else problem)(dtype=dtype, precision=precision, **sizes)


@pytest.mark.parametrize("case", MEASURED, ids=str)
def test_batches_go_where_they_were_measured_to_be_faster(case):
    given, (large, small) = factor(*case), MEASURED[case]
    kind = lowering.candidates(given, ARCH)[0]["kind"]
    if small > 1.02 * large:
        assert kind != "portable"
    if large > 1.15 * small:
        assert kind == "portable"


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_every_kind_stays_for_tuning_to_find(dtype, precision):
    given = factor((2, 40, 24, 4), False, 8, (dtype, precision))
    kinds = [choice["kind"] for choice in lowering.candidates(given, ARCH)]
    assert kinds[0] == "portable" and {"interleaved", "portable"} <= set(kinds)
    assert stem(lowering.lower((), given, ARCH, 132).steps[-1].spec) != "kronecker_sparse_pack"


@pytest.mark.parametrize(("dtype", "precision"), KINDS)
def test_a_long_depth_is_not_small(dtype, precision):
    """Portable kernels sum it in parts, by two launches; gradients of weights are such."""
    options = {"dtype": dtype, "precision": precision}
    for last in (False, True):
        for batch in (1024, 8192, 25088):
            given = weight_gradient(1, 128, 512, 4, batch=batch, last=last, **options)
            assert not lowering.is_small(given)
    assert not lowering.is_small(problem(lanes=4, rows=8, depth=1024, **options))
