"""The two processes that tests of this folder share."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool
from tests.gpu.distributed import BACKEND


@pytest.fixture(scope="session")
def pool():
    """Over gloo for what a call is about; data goes by NCCL where each has a GPU."""
    processes = Pool(2, BACKEND)
    yield processes
    processes.close()
