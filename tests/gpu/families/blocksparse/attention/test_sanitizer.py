"""compute-sanitizer over small odd calls of attention."""

import pytest
import torch

from kernlib.families.blocksparse.kernels.attention import hopper
from kernlib.runtime.devices import arch_of
from tests.gpu import sanitizer
from tests.gpu.families.blocksparse.attention.sanitized import BY_WGMMA, PORTABLE, SHARES


@sanitizer.needed
@pytest.mark.parametrize("share", range(SHARES))
@pytest.mark.parametrize("part", [*PORTABLE, *BY_WGMMA])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.few(0)
def test_no_bad_access_and_no_race(tool, part, share, monkeypatch, tmp_path_factory):
    if part in BY_WGMMA and arch_of(torch.cuda.current_device()) != hopper.ARCH:
        pytest.skip("this GPU has no wgmma")
    folder = tmp_path_factory.getbasetemp().parent / "sanitized-attention"
    monkeypatch.setenv("KERNLIB_CACHE_DIR", str(folder))
    module = "tests.gpu.families.blocksparse.attention.sanitized"
    found = sanitizer.launched(tool, module, f"{part}/{share}/{tool}", timeout_s=600)
    kinds = {"attention"} if part in BY_WGMMA else {"attention", "portable"}
    assert found >= (kinds if part.startswith("attention") else kinds | {"gradient", "deltas"})
