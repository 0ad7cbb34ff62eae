"""compute-sanitizer over small odd calls."""

import pytest

from kernlib import settings
from tests.gpu import sanitizer
from tests.gpu.families.blocksparse.cases import TYPES


@sanitizer.needed
@pytest.mark.parametrize("numbers", TYPES)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.few(0)
def test_no_bad_access_and_no_race(tool, numbers, monkeypatch, tmp_path_factory):
    """All of them keep kernels in one place, beside those of the workers."""
    folder = tmp_path_factory.getbasetemp().parent / "sanitized"
    monkeypatch.setenv("KERNLIB_CACHE_DIR", str(folder))
    kinds = {"portable", "sampled", "parts", "softmax", "layout"}
    if numbers != "fp32":
        kinds |= {"decode"}
    if not settings.current().portable:
        if numbers != "fp32":
            kinds |= {"hopper", "narrow", "stationary", "tiles"}
        else:
            kinds |= {"hopper_words", "pack"}
        if numbers == "fp16":
            kinds |= {"scaled"}
    module = "tests.gpu.families.blocksparse.sanitized"
    assert sanitizer.launched(tool, module, f"{numbers}-{tool}") >= kinds
