"""Tokens that a language model generates with compressed weights, beside the same weights dense."""

from __future__ import annotations

import copy

import pytest
import torch

from kernlib.nn import sparsify
from kernlib.sparse import magnitude

TOKENS, VOCABULARY, DEVICE = 64, 1000, "cuda"
PRUNED = r"self_attn|mlp"
BOUND = 3e-3  # relative error of float16's logits, where dense weights reach it


def llama() -> torch.nn.Module:
    """A llama whose next token follows from the last one by a margin, which its layers move: its
    head reads the embedding of the token before."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=4, num_key_value_heads=4, **sizes
    )
    model = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    embedding = model.model.embed_tokens.weight.normal_(0, 0.3)
    order = torch.randperm(VOCABULARY)
    model.lm_head.weight[order] = embedding / 8
    model.generation_config.eos_token_id = None
    return model.to(DEVICE, torch.float16)


def generated(model: torch.nn.Module, prompt: torch.Tensor, **options):
    """Tokens, and the logits from which they were chosen."""
    model.generation_config.pad_token_id = 0
    with torch.no_grad():
        output = model.generate(
            prompt,
            max_new_tokens=TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    return output.sequences, torch.stack(output.logits).double()


@pytest.mark.parametrize("density", (0.1, 0.5))
def test_the_same_tokens_as_dense(density, seed):
    """In a prompt of one token, whose product is of one vector, and of 40, for which weights are
    laid out."""
    dense = llama()
    for name, layer in dense.named_modules():
        if isinstance(layer, torch.nn.Linear) and "proj" in name:
            magnitude(layer.weight, density, inplace=True)
    compressed = copy.deepcopy(dense)
    layers = sparsify(compressed, match=PRUNED)
    assert len(layers) == 4 * 7 and layers["model.layers.0.mlp.gate_proj"].joint is not None
    wide = copy.deepcopy(dense).float()
    for length in (1, 40):
        prompt = torch.randint(0, VOCABULARY, (1, length), device=DEVICE)
        tokens, logits = generated(compressed, prompt)
        wanted, of_dense = generated(dense, prompt)
        exact = wide(wanted[:, :-1]).logits[0, length - 1 :].double()
        best = exact.topk(2, -1).values
        largest = (logits[:, 0] - exact).abs().amax(-1)
        assert bool((best[:, 0] - best[:, 1] > 4 * largest).all()), "no margin"
        assert torch.equal(tokens, wanted)
        error = float((logits[:, 0] - exact).norm() / exact.norm())
        by_dense = float((of_dense[:, 0] - exact).norm() / exact.norm())
        assert error <= min(max(BOUND, 1.05 * by_dense), 2 * by_dense), (error, by_dense)
