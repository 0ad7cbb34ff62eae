"""Names of kernels in profilers: family, kernel, dtype and tile, one for each variant."""

import re

import pytest
import torch

import kernlib as kl
from kernlib.jit.spec import KernelSpec
from kernlib.lowering.kernel import named
from tests.architecture.golden_cases import compiled
from tests.support.compiled_kernels import compiled as cubin_of

SPEC = KernelSpec("test", 'extern "C" __global__ void test_sum(float* x) { x[0] = 1.0f; }\n',
                  "test_sum", 32)  # fmt: skip
EPILOGUE = (kl.Bias(), kl.Custom("v * s", ("s",)))


def test_a_name_is_an_identifier_of_the_words():
    found = named(SPEC, "float16", "64x32", "p=1.5", epilogue=EPILOGUE)
    assert found.entry == "kernlib_test_sum_float16_64x32_p_1_5_bias_custom"
    assert found.source == f"#define test_sum {found.entry}\n{SPEC.source}"
    assert found.description == SPEC.description and named(SPEC).entry == "kernlib_test_sum"


def test_the_cubin_has_that_name():
    found = named(SPEC, "float32")
    entry = cubin_of(found, "sm_90a").entry
    assert entry.kernel == found.entry and found.entry.encode() in entry.cubin
    assert b".text.test_sum" not in entry.cubin


@pytest.mark.parametrize(
    ("descriptor", "begins"),
    [
        (
            kl.laplace_l1(),
            tuple(f"kernlib_pairwise_{kind}_difference_abs" for kind in ("direct", "few")),
        ),
        (kl.gaussian(), "kernlib_pairwise_"),
        (kl.KroneckerSparse(6, 64, 64, 1, epilogue=EPILOGUE), "kernlib_kronecker_sparse_"),
        (kl.SparseMatmul(epilogue=EPILOGUE), "kernlib_sparse_"),
    ],
    ids=["direct", "products", "Kronecker-sparse", "sparse"],
)
def test_names_tell_the_variants_of_a_target_apart(descriptor, begins):
    specs = compiled(descriptor, dtypes=torch.float16, archs=("sm_90a",))
    names = {}
    for spec in specs:
        assert re.fullmatch(r"[a-z][a-z0-9_]{0,127}", spec.entry)
        assert re.search("float16|16bit", spec.entry)  # the latter serves bfloat16 too
        assert spec.entry.startswith(begins)
        assert names.setdefault(spec.entry, spec.source) == spec.source, spec.description
    assert names
