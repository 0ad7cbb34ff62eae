"""The two processes that tests of this folder share."""

from __future__ import annotations

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool():
    """Over NCCL, and gloo beside it."""
    processes = Pool(2, "cpu:gloo,cuda:nccl")
    yield processes
    processes.close()
