"""compute-sanitizer over small odd calls."""

import pytest

from kernlib import settings
from tests.gpu import sanitizer
from tests.gpu.families.kronecker_product.cases import SIDES, TYPES

KINDS = {
    "fp32": ("slabs", "pairs", "pair_slabs"),
    "fp64": ("slabs",),
    "fp16": ("halves", "half_slabs"),
    "bf16": ("halves", "half_slabs"),
}


@sanitizer.needed
@pytest.mark.parametrize("numbers", TYPES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.few(0)
def test_no_bad_access_and_no_race(tool, side, numbers, monkeypatch, tmp_path_factory):
    """All of them keep kernels in one place, beside those of the workers: most of the time goes
    into compiling some seventy for each."""
    folder = tmp_path_factory.getbasetemp().parent / "sanitized"
    monkeypatch.setenv("KERNLIB_CACHE_DIR", str(folder))
    module = "tests.gpu.families.kronecker_product.sanitized"
    kinds = {"modes", "clear", "gradients", "sum", *KINDS[numbers]}
    if numbers != "fp64" and not settings.current().portable:
        kinds |= {"hopper"} if side == "left" else {"hopper", "hopper_slabs"}
        kinds |= {"largest"} if numbers == "fp16" else set()
    assert sanitizer.launched(tool, module, f"{side}-{numbers}") >= kinds
