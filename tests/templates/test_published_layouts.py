"""N15: Captured Llama-3-8B and 70B, GPT-3 and Mixtral under published layouts: priced as their
rows.
"""

from dataclasses import replace

import pytest

from benchmarks.published.layouts.captured_rows import captured_model, price_both
from costmodel.table.rows.rows import run_of
from planner.language.templates import build_transformer
from tests.captures import capture_wide
from tests.templates.test_templates import check_same

H100 = {"stack": "megatron-core", "gpu": "H100-SXM", "dtype": "bf16"}
TITAN = {
    "stack": "torchtitan",
    "gpu": "A100-SXM",
    "seq_len": "8192",
    "gpus": "64",
    "dp": "64",
    "tp": "1",
    "pp": "1",
    "global_batch": "64",
    "micro_batch": "1",
    "zero_stage": "3",
    "dtype": "bf16",
}
ROWS = {
    # torchtitan docs/performance.md, and dgxc-benchmarking v24.11: Llama-3-8B.
    "8b-zero3": {
        **TITAN, "model": "Llama3-8B", "recompute": "selective",
    },
    "8b-cp": {
        **H100, "model": "Llama3-8B", "seq_len": "8192", "gpus": "8", "global_batch": "128",
        "micro_batch": "1", "dp": "4", "cp": "2", "tp": "1", "pp": "1",
    },
    "70b-zero3": {
        **TITAN, "model": "Llama3-70B", "recompute": "full",
    },
    "70b-pipeline": {
        **H100, "model": "Llama3-70B", "seq_len": "8192", "gpus": "64", "global_batch": "128",
        "micro_batch": "1", "dp": "2", "tp": "4", "pp": "8", "vpp": "5",
    },
    "70b-pipeline-8-bits": {
        **H100, "model": "Llama3-70B", "seq_len": "8192", "gpus": "64", "global_batch": "128",
        "micro_batch": "1", "dp": "2", "tp": "4", "pp": "8", "vpp": "5", "dtype": "fp8",
    },
    "gpt3": {
        **H100, "model": "GPT3-175B", "layers": "96", "hidden": "12288", "heads": "96",
        "vocab": "51200", "seq_len": "2048", "gpus": "128", "global_batch": "256",
        "micro_batch": "1", "dp": "4", "tp": "4", "pp": "8", "vpp": "12",
    },
    "mixtral": {
        **H100, "model": "Mixtral-8x22B", "seq_len": "4096", "gpus": "128", "global_batch": "256",
        "micro_batch": "1", "dp": "8", "tp": "2", "pp": "8", "vpp": "7", "ep": "8",
        "notes": "etp 1; force-balanced",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_captured_model_under_a_published_layout_has_the_price_of_its_row(name: str) -> None:
    """The library's products and norms are written otherwise than the trainer's: within 2%. With
    experts the placements were found for rows that stay where they are: within 3%.
    """
    found = price_both(*run_of(ROWS[name]))
    assert abs(found.difference) < (0.03 if found.run.ep > 1 else 0.02)
    assert found.captured.flop == pytest.approx(found.row.flop, rel=0.02)


FAMILIES = {
    "8b-zero3": "LlamaForCausalLM",
    "70b-zero3": "LlamaForCausalLM",
    "gpt3": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_library_s_template_is_its_capture_at_the_published_width(name: str) -> None:
    """Two layers of it, op for op; the others are the same."""
    run, _, _ = run_of(ROWS[name])
    model = replace(captured_model(run), layers=2)
    if name == "gpt3":
        sizes = {
            "n_embd": model.hidden,
            "n_head": model.heads,
            "vocab_size": model.vocab,
            "n_layer": model.layers,
            "n_positions": model.seq_len,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
        }
        check_same(build_transformer(model), capture_wide(FAMILIES[name], model.seq_len, **sizes))
        return
    sizes = {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "vocab_size": model.vocab,
        "num_hidden_layers": model.layers,
        "max_position_embeddings": model.seq_len,
    }
    if model.experts:
        model = replace(model, epsilon=1e-5)
        sizes |= {
            "intermediate_size": model.experts.width,
            "num_local_experts": model.experts.number,
            "num_experts_per_tok": model.experts.per_token,
        }
    capture = capture_wide(FAMILIES[name], model.seq_len, **sizes)
    check_same(build_transformer(model), capture)
