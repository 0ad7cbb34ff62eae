"""compute-sanitizer over small odd calls of attention."""

import pytest

from tests.gpu import sanitizer


@sanitizer.needed
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_no_bad_access_and_no_race(tool, monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp().parent / "sanitized-attention"
    monkeypatch.setenv("KERNLIB_CACHE_DIR", str(folder))
    module = "tests.gpu.families.blocksparse.attention.sanitized"
    found = sanitizer.launched(tool, module, tool, timeout_s=600)
    assert found >= {"attention", "portable", "gradient", "deltas"}
