"""transformers loads models with compressed layers onto a GPU."""

from __future__ import annotations

import copy
import gc
import os

import pytest
import torch

from kernlib.nn import sparsify
from kernlib.nn.sparse_holding import PACKED

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

SIZES = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": False,
    "pad_token_id": 0,
}  # fmt: skip
TOKENS = torch.arange(3, 19)[None]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A pruned model in float16, with dense layers, and the folder of the compressed one."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).half().eval()
    for name, parameter in model.named_parameters():
        if "proj" in name:
            keep = torch.rand(parameter.shape, device="cpu", dtype=torch.float32) < 0.4
            parameter.data.mul_(keep)
    folder = tmp_path_factory.mktemp("saved")
    compressed = copy.deepcopy(model)
    sparsify(compressed, match="proj", format="bitmap")
    compressed.save_pretrained(folder)
    return model, folder


def loaded(folder, **options):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)


def logits(model):
    with torch.no_grad():
        return model(TOKENS.cuda()).logits.float().cpu()


@pytest.mark.parametrize("device_map", ["cuda", "auto", {"": 0}])
def test_results_are_those_of_dense_layers(saved, device_map):
    dense, folder = saved
    model, dense = loaded(folder, device_map=device_map), copy.deepcopy(dense).cuda()
    assert all(x.joint.matrix.device.type == "cuda" for x in model.modules() if hasattr(x, "joint"))
    wanted = logits(dense)
    torch.testing.assert_close(logits(model), wanted, rtol=0, atol=0.02 * wanted.abs().max().item())
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    first, second = (
        m.generate(TOKENS.cuda(), output_scores=True, **options) for m in (model, dense)
    )
    same = first.sequences == second.sequences
    if not same.all():  # only where two tokens score as good as the same
        place = int(same[0].int().argmin())
        best = second.scores[place - TOKENS.shape[1]][0].float().topk(2).values
        assert best[0] - best[1] < 0.02 * best[0].abs()


def requested(kind: str) -> int:
    """Bytes of tensors, without what the allocator adds to a block that it does not split."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{kind}"]


def test_loading_takes_the_compressed_bytes_and_a_layer(saved):
    _, folder = saved
    loaded(folder, device_map="cuda")  # whatever a first call of libraries keeps
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    model = loaded(folder, device_map="cuda")
    stored = os.path.getsize(folder / "model.safetensors")
    layer = 2 * SIZES["intermediate_size"] * SIZES["hidden_size"] * 2  # gate and up are fused
    peak = requested("peak") - before
    assert peak <= 1.02 * stored + 1.6 * layer  # which is dense, and then compressed too
    gc.collect()
    assert requested("current") - before <= 1.02 * stored
    del model


def test_a_layer_off_the_gpu_is_there_in_calls_alone(saved, tmp_path):
    _, folder = saved
    device_map = {"model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0,
                  "model.layers.0": 0, "model.layers.1": "cpu", "model.layers.2": "disk",
                  "model.layers.3": 0}  # fmt: skip
    model = loaded(folder, device_map=device_map, offload_folder=tmp_path)
    whole = loaded(folder, device_map="cuda")
    wanted = logits(whole)
    for _ in range(2):
        before = torch.cuda.memory_allocated()
        torch.testing.assert_close(logits(model), wanted, rtol=0, atol=2e-3)
        gc.collect()
        assert torch.cuda.memory_allocated() - before < 1e6
    for name, layer in model.named_modules():
        if PACKED in layer._buffers and (".1." in name or ".2." in name):
            assert layer.nbytes == 0 and layer._buffers[PACKED].is_meta
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(loaded(tmp_path / "again", device_map="cuda")), wanted)


def test_a_model_moves_to_the_gpu_and_back(saved):
    _, folder = saved
    model = loaded(folder)
    wanted = logits(loaded(folder, device_map="cuda"))
    torch.testing.assert_close(logits(model.cuda()), wanted, rtol=0, atol=2e-3)
    model.cpu()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
