"""Parameters and model flop that follow from a row's sizes: those that authors state."""

from dataclasses import replace

import pytest

from costmodel.table.rows.model_counts import ModelCounts
from costmodel.table.rows.run_row import parse_row
from planner.language.templates import Latent, Transformer
from tests.costmodel.table.rows_of_runs import MIXTRAL

GPT3 = Transformer(
    layers=96, hidden=12288, heads=96, kv_heads=96, ffn_hidden=4 * 12288, gated=False,
    vocab=51200, seq_len=2048,
)  # fmt: skip


def test_model_flop_is_megatrons():
    """72 B s l h^2 (1 + s/6h + V/12lh), Narayanan et al. 2021 without recompute."""
    s, h, n = GPT3.seq_len, GPT3.hidden, GPT3.layers
    expected = 72 * s * n * h * h * (1 + s / (6 * h) + GPT3.vocab / (12 * n * h))
    assert ModelCounts(GPT3).model_flop() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "whole", "used"),
    [("DeepSeek-V3", 671, 37), ("DeepSeek-V2", 236, 21), ("DeepSeek-V2-Lite", 15.7, 2.4),
     ("Kimi-K2", 1026, 32)],
)  # fmt: skip
def test_latent_attention_has_the_parameters_it_is_known_for(name, whole, used):
    """Billions of parameters, and of those that one token is multiplied with: the authors'."""
    sizes = parse_row({"model": name, "gpu": "H100", "tp": "1", "pp": "1", "dp": "64"}).sizes
    counts = ModelCounts(sizes)
    ends = 2 * counts.embedding_params
    assert (counts.num_params + counts.embedding_params) / 1e9 == pytest.approx(whole, rel=0.06)
    assert (sizes.layers * counts.used_params + ends) / 1e9 == pytest.approx(used, rel=0.13)


def test_latent_attention_multiplies_its_own_matrices():
    """Down, up and out; keys are as much wider than values as positions take."""
    latent = Latent(query_rank=1536, key_rank=512, rope_dim=64)
    counts = ModelCounts(replace(GPT3, latent=latent))
    assert counts.attention_matrices == [
        (1536 + 512 + 64, 12288), (96 * (128 + 64), 1536), (2 * 12288, 512), (12288, 12288)
    ]  # fmt: skip
    assert counts.score_width == 96 * (192 + 128) / 2


def test_a_token_uses_few_of_the_experts():
    """Mixtral-8x7B: 46.7e9 parameters, 12.9e9 of them used by a token (its paper, section 2)."""
    sizes = parse_row(MIXTRAL).sizes
    counts = ModelCounts(sizes)
    assert counts.num_params == pytest.approx(46.7e9, rel=0.01)
    used = sizes.layers * counts.used_params + counts.embedding_params
    assert used == pytest.approx(12.9e9, rel=0.02)


def test_flop_of_deepseek_v3_are_those_that_megatron_prints():
    """Megatron-Bridge's tables of 25.11 print TFLOP/s and tokens/s: 961e12 / 3848 a token without a
    token predicted ahead, 557e12 / 2139 with one."""
    row = {"model": "DeepSeek-V3", "gpu": "GB300", "seq_len": "4096", "gpus": "256", "ep": "32",
           "pp": "2", "dp": "128"}  # fmt: skip
    for ahead, printed in (("0", 961e12 / 3848), ("1", 557e12 / 2139)):
        sizes = parse_row({**row, "mtp_layers": ahead}).sizes
        assert ModelCounts(sizes).model_flop(causal=True) / 4096 == pytest.approx(
            printed, rel=0.003
        )
