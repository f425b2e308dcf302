"""Mixtures of experts of the library are told, and compute bit by bit what they did."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.builders import telling_first
from tests.capture.routing.dealing import captured, check_bits, sorts_left, told_ops
from tests.model_matrix import model_matrix

pytest.importorskip("transformers")

_DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-moe": (
        "Qwen2MoeForCausalLM",
        {"num_experts": 4, "shared_expert_intermediate_size": 32},
    ),
    "glm4-moe": (
        "Glm4MoeForCausalLM",
        {"n_routed_experts": 4, "head_dim": 8, "first_k_dense_replace": 1, "n_group": 1}
        | {"topk_group": 1},
    ),
    "granite-moe": ("GraniteMoeForCausalLM", {"num_local_experts": 4}),
    "jamba": (
        "JambaForCausalLM",
        {"num_experts": 4, "expert_layer_period": 1, "expert_layer_offset": 0}
        | {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    ),
}
MATRIX = (
    "hf-mixtral", "hf-qwen3-moe", "hf-olmoe", "hf-deepseek-v2", "hf-deepseek-v3", "hf-phimoe",
    "hf-gpt-oss",
)  # fmt: skip
BIASED = {"hf-gpt-oss"}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name not in OTHERS:
        return model_matrix()[name].build().train()
    import transformers

    transformers.logging.set_verbosity_error()
    family, settings = OTHERS[name]
    made = getattr(transformers, family)
    module: nn.Module = made(made.config_class(**_DECODER | settings)).train()
    return module


def text(name: str, size: int) -> dict[str, Tensor]:
    if name in OTHERS:
        ids = torch.randint(0, 64, (size, 12), generator=torch.Generator().manual_seed(size))
        return {"input_ids": ids, "labels": ids}
    batch: dict[str, Tensor] = model_matrix()[name].batch(size)
    return batch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", telling_first([*MATRIX, *OTHERS], {"hf-mixtral", "hf-gpt-oss"}))
def test_a_family_is_told_with_the_bits_it_had(name, dtype):
    module = build(name).to(dtype)
    make_batch = partial(text, name)
    graph = captured(module, make_batch)
    found = told_ops(graph)
    assert found["sort"] == found["unsort"] > 0
    assert found["bias"] == (2 * found["sort"] if name in BIASED else 0)
    assert sorts_left(graph) == 0
    check_bits(module, graph, make_batch)
