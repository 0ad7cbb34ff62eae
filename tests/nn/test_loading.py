"""Layers filled by loaders that know the names of a module: each loader's mechanism in a few lines,
and the real one where its package is installed."""

from __future__ import annotations

import copy
import io
import os
import pickle
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.multiprocessing import ProcessRaisedException, spawn

from kernlib.nn import (
    KroneckerLinear,
    SparseLinear,
    block_sparsify,
    replace_linear,
    sparsify,
)
from tests.nn.layer_writes import KINDS, empty, former_state, inputs, layer
from tests.support.dynamo_messages import said

each_kind = pytest.mark.parametrize("kind", KINDS)
LIMIT = timedelta(minutes=5)  # of a collective whose other process is gone


TARGETS = {
    "other": lambda kind: layer(kind, seed=3),
    "empty": empty,
    "meta": lambda kind: empty(kind, "meta"),
    "from meta": lambda kind: empty(kind, "meta").to_empty(device="cpu"),
}


# The loaders.


def by_buffer(module: nn.Module, state: dict) -> None:
    """As accelerate's ``set_module_tensor_to_device``."""
    for name, value in state.items():
        is_buffer = name in module._buffers
        if not is_buffer and name not in dict(module.named_parameters()):
            raise ValueError(f"{module} does not have a parameter or a buffer named {name}.")
        old = getattr(module, name)
        if old.shape != value.shape:
            raise ValueError(f"Trying to set a tensor of shape {value.shape} in {name}")
        value = value.to(old.dtype).clone()
        if is_buffer:
            module._buffers[name] = value
        else:
            setattr(module, name, nn.Parameter(value, old.requires_grad))


def by_attribute(module: nn.Module, state: dict) -> None:
    """As transformers' ``from_pretrained``, which makes up what no file has."""
    missing = {*module.state_dict()}
    for name, value in state.items():
        reference = getattr(module, name)
        if value.shape != reference.shape:
            raise ValueError(f"mismatched {name}: {value.shape}, {reference.shape}")
        value = value.to(reference.dtype).clone()
        if name not in module._buffers:
            value = nn.Parameter(value, value.is_floating_point())
        setattr(module, name, value)
        missing.remove(name)
    assert not missing
    for name in module._non_persistent_buffers_set:
        setattr(module, name, torch.empty_like(getattr(module, name), device="cpu").fill_(7))


def by_sizes(module: nn.Module, state: dict) -> None:
    """As ``torch.distributed.checkpoint``: into the tensors of the module's state."""
    mine = module.state_dict()
    for name, value in mine.items():
        if state[name].size() != value.size():
            raise ValueError(f"Size mismatch between saved {state[name].size()} and current")
        value.detach().copy_(state[name])
    module.load_state_dict(mine)


def by_names(module: nn.Module, state: dict) -> None:
    """As ``set_model_state_dict(broadcast_from_rank0=True)`` in all processes but the first."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers(recurse=False))}
    names = {n for n in tensors if n not in module._non_persistent_buffers_set}
    on_meta = any(t.is_meta for n, t in tensors.items() if n in names)
    module.load_state_dict({n: state[n].clone() for n in names & {*state}}, assign=on_meta)


def by_assigning(module: nn.Module, state: dict) -> None:
    module.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)


WITHOUT_VALUES = ("empty", "meta", "from meta")
FILLED = {
    by_buffer: WITHOUT_VALUES,
    by_attribute: WITHOUT_VALUES,
    by_sizes: ("empty", "from meta"),
    by_names: tuple(TARGETS),
    by_assigning: tuple(TARGETS),
}


@pytest.mark.few(12)
@pytest.mark.parametrize(("load", "target"), [(k, t) for k, ts in FILLED.items() for t in ts])
@each_kind
def test_layers_are_filled_by_name(kind, load, target):
    wanted, x = layer(kind, seed=5), inputs(kind)
    state, module = wanted.state_dict(), TARGETS[target](kind)
    before = {name: t.clone() for name, t in state.items()}
    load(module, state)
    for use in (
        lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.to("cpu"),
    ):  # fmt: skip
        other = use(copy.copy(module))
        assert torch.equal(other(x), wanted(x)) and torch.equal(other.to_dense(), wanted.to_dense())
    assert all(torch.equal(t, before[n]) for n, t in module.state_dict().items())
    assert all(torch.equal(t, before[n]) for n, t in state.items())
    if kind in ("linear", "conv"):
        assert module.layout.nnz == wanted.layout.nnz
        assert torch.equal(module.drop_(1)(x), copy.deepcopy(wanted).drop_(1)(x))
        nnz = module.layout.nnz
        module.reset_parameters()  # which draws values, and no blocks where they are known
        assert module.layout.nnz == nnz < wanted.layout.nnz


@each_kind
def test_a_layer_that_was_filled_by_attribute_is_compiled_in_its_first_call(kind):
    wanted, x, module = layer(kind, seed=5), inputs(kind), empty(kind, "meta")
    by_attribute(module, wanted.state_dict())
    torch._dynamo.reset()
    assert torch.equal(torch.compile(module, backend="eager", fullgraph=True)(x), wanted(x))


@pytest.mark.parametrize("kind", ["linear", "u4"])
def test_a_layer_that_was_filled_by_buffer_is_called_before_it_is_compiled(kind):
    wanted, x, module = layer(kind, seed=5), inputs(kind), empty(kind, "meta")
    by_buffer(module, wanted.state_dict())
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=said("once before it is compiled")):
        compiled(x)
    module(x)
    torch._dynamo.reset()
    assert torch.equal(compiled(x), wanted(x))


@pytest.mark.parametrize("kind", ["bitmap", "u8", "macko"])
def test_a_matrix_is_filled_in_the_dtype_of_its_layer(kind):
    wanted, module = layer(kind), empty(kind, "meta", torch.bfloat16)
    by_attribute(module, wanted.state_dict())
    assert module.matrix.dtype == module.bias.dtype == torch.bfloat16
    assert torch.equal(module.to_dense(), wanted.to_dense().bfloat16())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["linear", "conv"])
def test_a_mark_is_read_in_every_dtype(kind, dtype):
    wanted, module = layer(kind, seed=5), layer(kind)
    state = wanted.state_dict()
    state["index_mark"] = state["index_mark"].to(dtype)
    module.load_state_dict(state)
    assert torch.equal(module(inputs(kind)), wanted(inputs(kind)))


@each_kind
@pytest.mark.parametrize("load", [by_attribute, by_buffer])
def test_what_is_damaged_is_refused_by_the_next_call(kind, load):
    state, module = layer(kind, seed=5).state_dict(), empty(kind, "meta")
    name = "index_mark" if kind in ("linear", "conv") else "weight_packed"
    state[name] = state[name].clone()
    state[name][3] += 1
    with pytest.raises((RuntimeError, ValueError), match=r"stores no blocks yet|do not begin as"):
        load(module, state)
        module(inputs(kind))


@each_kind
@pytest.mark.parametrize("target", TARGETS)
def test_states_of_version_0_1_load(kind, target):
    wanted, x, module = layer(kind, seed=5), inputs(kind), TARGETS[target](kind)
    module.load_state_dict(former_state(wanted), assign=target == "meta")
    assert torch.equal(module(x), wanted(x))
    assert {*module.state_dict()} == {*wanted.state_dict()}


@each_kind
def test_other_states_are_taken_for_a_call(kind):
    module, other, x = layer(kind), layer(kind, seed=5), inputs(kind)
    mine = module(x)
    state = other.state_dict()
    for _ in range(2):
        assert torch.equal(torch.func.functional_call(module, state, (x,)), other(x))
        assert torch.equal(module(x), mine)


def test_an_empty_layer_is_made_inside_of_modes():
    with FakeTensorMode():
        module = SparseLinear(300, 70)
        assert {*module.state_dict()} == {"bias", "weight_packed"}


def test_an_empty_state_is_saved_as_plain_tensors():
    file = io.BytesIO()
    torch.save(SparseLinear(300, 70).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert type(state["weight_packed"]) is torch.Tensor and not state["weight_packed"].numel()
    assert type(copy.deepcopy(SparseLinear(300, 70))._buffers["weight_packed"].clone()) is (
        torch.Tensor
    )


# Models on meta.


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(96, 64), nn.Linear(64, 96, bias=False)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


SWAPS = {
    "sparsify": lambda model: sparsify(model, density=0.3),
    "block_sparsify": lambda model: block_sparsify(model, 16, density=0.5),
    "block_sparsify per row": lambda model: block_sparsify(model, 16, density=0.5, per="row"),
    "replace_linear": lambda model: replace_linear(
        model, lambda name, cols, rows: [(1, rows, cols, 1)], approximate=True
    ),
    "from_linear": lambda model: [
        setattr(model, name, KroneckerLinear.from_linear(getattr(model, name), *sizes))
        for name, sizes in {"up": ([8, 12], [8, 8]), "down": ([8, 8], [8, 12])}.items()
    ],
}


@pytest.mark.few(100)
@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("load", [by_attribute, by_buffer, by_assigning])
def test_a_swapped_model_is_loaded_without_its_dense_weights(swap, load):
    torch.manual_seed(0)
    wanted, x = Block(), torch.randn(5, 96)
    SWAPS[swap](wanted)
    with torch.device("meta"):
        module = Block().to(torch.float32)
    SWAPS[swap](module)
    assert all(t.is_meta for t in module.parameters())
    for name, part in module.named_children():
        if swap in ("from_linear", "replace_linear"):  # whose factors are modules of their own
            part.load_state_dict(getattr(wanted, name).state_dict(), assign=True)
        else:
            load(part, getattr(wanted, name).state_dict())
    assert torch.equal(module(x), wanted(x))
    assert {n: t.shape for n, t in module.state_dict().items()} == {
        n: t.shape for n, t in wanted.state_dict().items()
    }


@pytest.mark.parametrize("per", ["matrix", "row"])
def test_a_model_that_was_swapped_on_meta_draws_its_blocks(per):
    with torch.device("meta"):
        module = Block()
    block_sparsify(module, 16, density=0.4, per=per)
    module.to_empty(device="cpu")
    for part in module.children():
        part.reset_parameters()
        assert part.layout.nnz == part.layout.capacity > 0 and part.weight.std() > 0
    assert module(torch.randn(3, 96)).isfinite().all()


# The libraries themselves.


def test_transformers_and_accelerate(tmp_path):
    transformers, accelerate = map(pytest.importorskip, ("transformers", "accelerate"))
    plain = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=96,
    )  # fmt: skip

    for swap in (
        lambda model: sparsify(model, match="mlp", density=0.4, format="u4"),
        lambda model: block_sparsify(model, 16, match="mlp", density=0.5),
    ):

        class Swapped(transformers.LlamaForCausalLM):
            def __init__(self, config, swap=swap):
                super().__init__(config)
                swap(self)

        config = copy.deepcopy(plain)  # sparsify writes into it which layers it has swapped
        wanted, tokens = Swapped(config).eval(), torch.arange(10)[None]
        logits, folder = wanted(tokens).logits, str(tmp_path / str(id(swap)))
        wanted.save_pretrained(folder)
        for options in ({}, {"dtype": torch.bfloat16}, {"device_map": "auto"}):
            model, info = Swapped.from_pretrained(folder, output_loading_info=True, **options)
            assert not any(info.values())
            dtype = options.get("dtype", torch.float32)
            close = {"atol": 0.02, "rtol": 0} if options.get("dtype") else {"atol": 0, "rtol": 0}
            assert {p.dtype for p in model.parameters()} == {dtype}
            torch.testing.assert_close(model.eval()(tokens).logits.float(), logits, **close)
        file = f"{folder}/model.safetensors"
        for device_map in ({"": "cpu"}, {"model": "cpu", "lm_head": "cpu"}):
            with accelerate.init_empty_weights():
                model = Swapped(config)
            model = accelerate.load_checkpoint_and_dispatch(model, file, device_map=device_map)
            assert torch.equal(model.eval()(tokens).logits, logits)


@each_kind
def test_safetensors(kind, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    wanted, module, x = layer(kind, seed=5), empty(kind), inputs(kind)
    safetensors.save_model(wanted, str(tmp_path / "file"))
    safetensors.load_model(module, str(tmp_path / "file"))
    assert torch.equal(module(x), wanted(x))


# torch.distributed.


@pytest.mark.parametrize("kind", ["linear", "u4"])
def test_a_checkpoint_is_read_into_an_empty_layer(kind, tmp_path):
    wanted, x = layer(kind, seed=5), inputs(kind)
    dcp.save({"model": wanted.state_dict()}, checkpoint_id=tmp_path, no_dist=True)
    for target in ("empty", "from meta"):
        module = TARGETS[target](kind)
        state = {"model": module.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
        module.load_state_dict(state["model"])
        assert torch.equal(module(x), wanted(x))


def work(rank: int, folder: str) -> None:
    """One of two processes. Where one fails, ``spawn`` ends the other, and says why."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, LIMIT, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for kind in KINDS:
        wanted, x = layer(kind, seed=7), inputs(kind)
        full = nn.Sequential(wanted).state_dict()
        for make in TARGETS.values():
            model = nn.Sequential(make(kind))
            set_model_state_dict(model, {**full} if rank == 0 else {}, options=options)
            assert torch.equal(model(x), wanted(x)), kind
        model = nn.Sequential(empty(kind, "meta"))
        fully_shard(model, mesh=mesh)
        model.to_empty(device="cpu")
        set_model_state_dict(model, {**full} if rank == 0 else {}, options=options)
        torch.testing.assert_close(model(x), wanted(x))
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=f"{folder}/{kind}")
        again = nn.Sequential(empty(kind))
        fully_shard(again, mesh=mesh)
        state = {"model": get_model_state_dict(again)}
        dcp.load(state, checkpoint_id=f"{folder}/{kind}")
        set_model_state_dict(again, state["model"])
        torch.testing.assert_close(again(x), wanted(x))
        model = nn.Sequential(layer(kind, seed=7))
        fully_shard(model, mesh=mesh, mp_policy=half)
        y = model(x)
        y.float().square().sum().backward()
        assert y.dtype == torch.bfloat16 and model[0].bias.grad is not None
        torch.testing.assert_close(y.float(), wanted(x), atol=0.1, rtol=0)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # threads of gloo may still run, and abort a process that ends in order


with_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch has no gloo here")


@pytest.mark.slow
@with_gloo
def test_two_processes_load_shard_and_save(tmp_path):
    spawn(work, (str(tmp_path),), nprocs=2)


def work_apart(rank: int, folder: str) -> None:
    """One of two processes, of which the second cannot load what the first sends."""
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, LIMIT, rank=rank, world_size=2)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    full = nn.Sequential(layer("u4")).state_dict() if rank == 0 else {}
    model = nn.Sequential(SparseLinear(300, 70 + rank))
    set_model_state_dict(model, full, options=options)
    dist.barrier()


@pytest.mark.slow
@with_gloo
def test_a_process_that_cannot_load_ends_the_other_with_its_error(tmp_path):
    with pytest.raises(ProcessRaisedException, match=r"shape \(70, 300\), that of the layer has"):
        spawn(work_apart, (str(tmp_path),), nprocs=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_a_half_input_of_a_float32_layer_is_computed_in_float32(dtype, bias):
    torch.manual_seed(0)
    module = SparseLinear.from_linear(nn.Linear(300, 70, bias), density=0.3)
    x = inputs("bitmap").to(dtype).requires_grad_()
    y = module(x)
    assert y.dtype == dtype and torch.equal(y, module(x.float()).to(dtype))
    y.sum().backward()
    assert x.grad.dtype == dtype
    with pytest.raises((TypeError, ValueError), match="dtype"):
        module.bfloat16()(x.float())
