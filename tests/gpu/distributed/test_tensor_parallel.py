"""Layers whose features are dealt out to two GPUs compute what the layer of one does."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_tensor_parallel import LAYERS, furthest



def on_gpus(*arguments) -> float:
    torch.set_default_device("cuda")
    try:
        return furthest(*arguments)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("way", ["rows", "columns"])
@pytest.mark.parametrize("name", LAYERS)
def test_a_part_computes_what_one_gpu_does(pool, name, way):
    if name.endswith("int8") and way == "rows":
        pytest.skip("scales are for more columns than a part has")
    for answer in pool.run(on_gpus, name, None, True, way):
        if isinstance(answer, Exception):
            raise answer
        assert answer <= 5e-5
