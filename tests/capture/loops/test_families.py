"""Experts of the library that loop ("eager") are told, and compute what they did in fp64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from planner.language.graph.module_keys import OPAQUE_MODULE
from planner.language.ops.families.entries.routing import SORT_ROWS
from tests.builders import telling_first
from tests.capture.loops.looping import apart, captured
from tests.capture.routing.test_families import _DECODER, text

pytest.importorskip("transformers")

_SMALL_HEADS = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"num_experts": 4, "head_dim": 8}),
    "gpt-oss": ("GptOssForCausalLM", {"num_local_experts": 4, "head_dim": 8}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        _SMALL_HEADS
        | {"n_routed_experts": 4, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
        | {"qk_nope_head_dim": 4, "num_key_value_heads": 4},
    ),
    "dbrx": (
        "DbrxForCausalLM",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}
        | {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}}
        | {
            "ffn_config": {"ffn_hidden_size": 24, "hidden_size": 32}
            | {"moe_num_experts": 4, "moe_top_k": 2}
        },
    ),
}


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return loss


def build(name: str) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    family, settings = FAMILIES[name]
    made = getattr(transformers, family)
    model = made(made.config_class(**_DECODER | settings)).train().double()
    model.set_experts_implementation("eager")
    return WithLoss(model)


@pytest.mark.parametrize("name", telling_first(FAMILIES, {"mixtral", "gpt-oss"}))
def test_an_eager_family_is_told(name):
    module = build(name)
    make_batch = partial(text, "qwen2-moe")
    graph = captured(module, make_batch)
    found = [op.target for program in graph.classes for op in program.ops]
    assert SORT_ROWS in found
    assert OPAQUE_MODULE not in found
    assert apart(graph, module, make_batch(5)) < 1e-12
