"""Layers that hold indices: whatever torch does to parameters and buffers, a layer computes with
the indices that it has, or says that it cannot."""

from __future__ import annotations

import copy
import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from kernlib.nn import BlockSparseConv2d, BlockSparseLinear, SparseLinear
from tests.nn.layer_writes import AVERAGES, KINDS, faults, former_state, inputs, layer

each_kind = pytest.mark.parametrize("kind", KINDS)
blocks = pytest.mark.parametrize("kind", ["linear", "conv"])
AVERAGED = "(averaged with th|weight of this BlockSparse)"


def test_random_writes_are_refused_or_leave_the_result_right():
    failures = faults(24, "cpu")
    assert not failures, "\n".join(failures)


@each_kind
def test_no_index_is_a_parameter_or_a_buffer(kind):
    module = layer(kind)
    former = former_state(module)
    names = [n for n in former if n.startswith("layout_") or n.startswith("weight_")]
    assert names and all(torch.equal(getattr(module, name), former[name]) for name in names)
    assert not {*names} & {n for n, _ in [*module.named_buffers(), *module.named_parameters()]}
    assert all(t.dtype == torch.float32 for t in module.buffers() if t.numel())


@pytest.mark.few(100)
@pytest.mark.parametrize("by", AVERAGES)
@each_kind
def test_averages_of_buffers_leave_indices_as_they_are(kind, by):
    module, x = layer(kind), inputs(kind)
    average, sums = AveragedModel(module, use_buffers=True, **AVERAGES[by]), []
    for _ in range(3):
        with torch.no_grad():
            module.bias.add_(1)
        average.update_parameters(module)
    with torch.no_grad():
        dense = module.to_dense()
        assert torch.equal(average.module.to_dense(), dense) or kind in ("linear", "conv")
        sums = average(x) - module(x)
    assert torch.allclose(sums, sums[:1, :1].expand_as(sums), atol=1e-4)  # the bias alone
    other = layer(kind)
    other.load_state_dict(average.module.state_dict())
    assert torch.equal(other(x), average(x))


@each_kind
@pytest.mark.parametrize("grad", [False, True])
def test_averages_over_other_indices_are_refused(kind, grad):
    module, other, x = layer(kind), layer(kind, seed=3), inputs(kind)
    average = AveragedModel(module, use_buffers=True, avg_fn=lambda a, b, n: 0.9 * a + 0.1 * b)
    average.update_parameters(module)
    average.update_parameters(other)
    for call in (lambda: average(x), average.module.state_dict):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=AVERAGED):
            call()
    average.module.load_state_dict(other.state_dict())
    assert torch.equal(average(x), other(x))


@blocks
def test_a_copy_follows_blocks_that_change(kind):
    module, x = layer(kind), inputs(kind)
    average = AveragedModel(module, use_buffers=True, avg_fn=lambda a, b, n: 0.5 * a + 0.5 * b)
    average.update_parameters(module)
    module.drop_(2)
    average.module.update_(module.layout.mask())
    average.update_parameters(module)
    assert torch.allclose(average(x), module(x))
    kept = AveragedModel(module, use_buffers=False)  # which copies buffers instead
    module.drop_(1)
    kept.module.weight.data.copy_(module.remap(kept.module.weight.detach()))
    kept.update_parameters(module)
    assert torch.equal(kept.module.layout.mask(), module.layout.mask())
    assert torch.equal(kept(x), module(x))


@blocks
def test_buffers_of_another_layer_bring_its_blocks(kind):
    module, other, x = layer(kind), layer(kind, seed=3), inputs(kind)
    with torch.no_grad():
        for mine, given in zip(module.buffers(), other.buffers(), strict=True):
            mine.copy_(given)
        module.load_state_dict(dict(other.named_parameters()), strict=False)
    assert torch.equal(module(x), other(x)) and torch.equal(
        module.layout.mask(), other.layout.mask()
    )


@blocks
def test_states_that_are_averaged_in_place_leave_indices_as_they_are(kind):
    module, x = layer(kind), inputs(kind)
    with torch.no_grad():
        for mine, given in zip(
            module.state_dict().values(), module.state_dict().values(), strict=True
        ):
            mine.copy_(mine * 0.9 + given * 0.1)
    assert torch.allclose(module(x), layer(kind)(x), atol=1e-5)


@pytest.mark.parametrize("kind", ["bitmap", "u8", "u4", "macko"])
def test_a_matrix_that_was_spoilt_is_refused(kind):
    module, x = layer(kind), inputs(kind)
    with torch.no_grad():
        for held in module.matrix.operands:
            held.copy_((held.float() * 0.5).to(held.dtype))
    with pytest.raises(ValueError, match=r"(no matrix of kind|of another matrix)"):
        module(x)


# Layers from meta.


@pytest.mark.parametrize("make", [BlockSparseLinear, BlockSparseConv2d])
def test_a_layer_that_is_drawn_later_is_as_one_that_was_drawn_at_once(make):
    sizes = (256, 128, 16) if make is BlockSparseLinear else (16, 128, 4)
    options = {"density": 0.25} | ({} if make is BlockSparseLinear else {"layout": 16})
    x = torch.randn(9, *((256,) if make is BlockSparseLinear else (16, 6, 6)))
    torch.manual_seed(4)
    wanted = make(*sizes, **options)
    module = make(*sizes, **options, device="meta").to_empty(device="cpu")
    for call in (lambda: module(x), lambda: copy.deepcopy(module)(x), lambda: module.to_dense()):
        with pytest.raises(RuntimeError, match="stores no blocks yet, as it comes from meta"):
            call()
    torch.manual_seed(4)
    module.reset_parameters()
    assert torch.equal(module(x), wanted(x)) and module.layout.nnz == wanted.layout.nnz == 32
    assert module.weight.std() > 0


def test_a_layout_that_was_given_is_not_drawn():
    module = BlockSparseLinear(96, 64, layer("linear").layout, device="meta")
    module.to_empty(device="cpu").reset_parameters()
    with pytest.raises(RuntimeError, match="stores no blocks yet"):
        module(inputs("linear"))
    module.update_([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    assert module.layout.nnz == 6 and module(inputs("linear")).shape == (5, 64)


# Processes that work together.


def work(rank: int, folder: str) -> None:
    """One of two processes, whose layers were drawn apart."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    for kind in ("linear", "conv"):
        model, x = nn.Sequential(layer(kind, seed=rank)), inputs(kind)
        wanted = layer(kind, seed=0)
        model = DistributedDataParallel(model)
        for grad in (True, False, True):
            with torch.set_grad_enabled(grad):
                assert torch.equal(model(x), wanted(x))
        assert torch.equal(model.module[0].layout.mask(), wanted.layout.mask())
    model = DistributedDataParallel(nn.Sequential(layer("bitmap", seed=rank)))
    if rank:
        with pytest.raises(RuntimeError, match="or broadcast from one"):
            model(inputs("bitmap"))
    else:
        model(inputs("bitmap"))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may still run, and abort a process that ends in order


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo here")
def test_data_parallel_layers_have_the_blocks_of_the_first_process(tmp_path):
    spawn(work, (str(tmp_path),), nprocs=2)


def without_memory(*_, **__):
    raise torch.OutOfMemoryError("out of memory, as a test has it")


@pytest.mark.parametrize("task", ["fill", "save"])
@pytest.mark.parametrize("kind", ["block-sparse", "sparse"])
def test_memory_that_runs_out_is_not_taken_for_a_layer_without_indices(kind, task, monkeypatch):
    if kind == "sparse":
        full = SparseLinear.from_linear(nn.Linear(32, 48), density=0.3, format="u8")
        empty = SparseLinear(32, 48)
    else:
        full, empty = (BlockSparseLinear(32, 48, 16, density=d, capacity=6) for d in (0.3, 0.6))
    name = "weight_packed" if kind == "sparse" else "index_mark"
    tensor = full.state_dict()[name]
    if task == "save":
        empty._buffers[name] = tensor  # as functional_call does
    monkeypatch.setattr(torch, "arange", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        empty.state_dict() if task == "save" else setattr(empty, name, tensor)
