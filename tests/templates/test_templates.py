"""Templates are what captures of the same models are, op for op."""

import sys
from collections import Counter
from dataclasses import replace
from math import prod
from subprocess import run

import pytest

from costmodel.estimate import estimate
from planner.errors import PlannerError
from planner.language.graph import ModelGraph, Op
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.lowering import lower
from planner.language.templates import (
    Adapters,
    Encoder,
    Experts,
    Latent,
    Transformer,
    build_transformer,
)
from planner.language.templates.build import template_of
from planner.language.templates.splits import tp_layouts
from profiles import load_profile
from tests.builders import HEADS, HIDDEN, SEQUENCE, VOCABULARY
from tests.captures import capture_module, capture_tiny, capture_wide_llama

TINY = Transformer(
    layers=2,
    hidden=HIDDEN,
    heads=HEADS,
    kv_heads=2,
    ffn_hidden=2 * HIDDEN,
    vocab=VOCABULARY,
    seq_len=SEQUENCE,
    code="huggingface",
    dtype="float32",
)
OF_CAPTURE = {
    "hf-llama": TINY,
    "hf-qwen3": replace(TINY, query_key_norm=True, head_dim=HIDDEN // HEADS),
    "hf-mixtral": replace(
        TINY, epsilon=1e-5, experts=Experts(number=4, per_token=2, width=2 * HIDDEN)
    ),
    "hf-gpt2": replace(
        TINY,
        kv_heads=HEADS,
        ffn_hidden=4 * HIDDEN,
        gated=False,
        norm="layer",
        positions="learned",
        max_positions=2 * SEQUENCE,
        bias=True,
        tied=True,
    ),
}
DEEPSEEK = replace(
    TINY,
    layers=3,
    kv_heads=HEADS,
    head_dim=16,
    latent=Latent(query_rank=24, key_rank=16, rope_dim=8),
    experts=Experts(number=8, per_token=2, width=32, shared=1, groups=2, dense_layers=1),
)
WIDE = Transformer(
    layers=4,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn_hidden=14336,
    vocab=128256,
    seq_len=4096,
)
LATENT = Latent(query_rank=1536, key_rank=512, rope_dim=64)


def without_padding_index(op: Op) -> Op:
    """An embedding's row for padding is trained or not; its work is the same."""
    return replace(op, args=op.args[:2]) if op.target == "aten.embedding.default" else op


def check_same(template: ModelGraph, capture: ModelGraph) -> None:
    """The blocks are the same, and so a plan's price and memory are."""
    assert [b.name for b in template.blocks] == [b.name for b in capture.blocks]
    assert [b.class_index for b in template.blocks] == [b.class_index for b in capture.blocks]
    assert template.num_params() == capture.num_params()
    for mine, other in zip(template.classes, capture.classes, strict=True):
        assert mine.ops == tuple(map(without_padding_index, other.ops))
        assert (mine.inputs, mine.params, mine.outputs) == (
            other.inputs,
            other.params,
            other.outputs,
        )
        differing = {t.name for t in mine.tensors if t != other.tensor[t.name]}
        # Only the names of tied parameters may differ: a capture keeps the first module's.
        assert differing <= set(mine.params[-1:])
    profile = load_profile("h100-sxm5-80gb")
    found = [
        estimate(graph, profile, default_plan(graph, dp=4, zero_stage=1, num_microbatches=2))
        for graph in (template, capture)
    ]
    assert found[0].flop == found[1].flop
    assert found[0].step_s == pytest.approx(found[1].step_s, rel=1e-9)
    assert found[0].peak_bytes == pytest.approx(found[1].peak_bytes, rel=0.01)


@pytest.mark.parametrize("name", OF_CAPTURE)
def test_a_template_is_the_capture_of_the_same_model(name: str) -> None:
    check_same(build_transformer(OF_CAPTURE[name]), capture_tiny(name))


@pytest.mark.slow
def test_latent_attention_and_routed_experts_as_deepseek_v3_has_them() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def batch(size: int) -> dict[str, object]:
        ids = torch.zeros(size, SEQUENCE, dtype=torch.long)
        return {"input_ids": ids, "labels": ids}

    config = transformers.DeepseekV3Config(
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        vocab_size=VOCABULARY,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        n_shared_experts=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    with torch.device("meta"):
        model = transformers.DeepseekV3ForCausalLM(config)
        capture = capture_module(model, batch(2), batch(3), name="deepseek")
    check_same(build_transformer(DEEPSEEK), capture)


@pytest.mark.slow
def test_a_template_of_real_sizes_in_bf16_is_the_capture() -> None:
    capture = capture_wide_llama(
        4096,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    check_same(build_transformer(replace(WIDE, layers=2, code="huggingface")), capture)


def test_a_hundred_layers_are_one_class() -> None:
    deep = build_transformer(replace(WIDE, layers=100))
    assert len(deep.classes) == 3
    assert len(deep.blocks) == 102
    experts = Experts(number=8, per_token=2, width=1024, shared=1, dense_layers=3)
    assert len(build_transformer(replace(WIDE, experts=experts)).classes) == 4


@pytest.mark.parametrize(
    ("model", "params"),
    [
        # Llama 3 8B, and GPT-3 13B with a tied head and positions.
        (replace(WIDE, layers=32), 8_030_261_248),
        (
            Transformer(
                layers=40,
                hidden=5120,
                heads=40,
                kv_heads=40,
                ffn_hidden=4 * 5120,
                vocab=51200,
                seq_len=2048,
                gated=False,
                norm="layer",
                positions="learned",
                bias=True,
                tied=True,
            ),
            # 12 h^2 + 13 h a layer, less the biases after sums over tp; two norms of h at the end.
            40 * (12 * 5120**2 + 13 * 5120 - 2 * 5120) + (51200 + 2048) * 5120 + 2 * 5120,
        ),
    ],
)
def test_parameters_of_written_modules(model: Transformer, params: int) -> None:
    assert build_transformer(model).num_params() == params


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        WIDE,
        replace(WIDE, latent=LATENT, head_dim=128),
        replace(
            WIDE,
            kv_heads=32,
            gated=False,
            norm="layer",
            positions="learned",
            bias=True,
            dropout=True,
            fused_attention=False,
        ),
    ],
    ids=["llama", "latent", "gpt"],
)
def test_the_usual_layout_has_two_sums_a_layer(model: Transformer, sequence_parallel: bool) -> None:
    template = template_of(model)
    local = lower(
        template.graph.classes[1].bind(1),
        tp_layouts(model, sequence_parallel=sequence_parallel)[1],
        axis="tp",
        axis_size=4,
    )
    moved = [op.args[2:4] for op in local.ops if op.target == "planner.redistribute"]
    target = "S(1)" if sequence_parallel else "R"
    assert moved.count(("P", target)) == 2
    params = {n: local.tensor[n].shape for n in local.params}
    whole = template.graph.classes[1].tensor
    cut = [n for n in params if params[n] != whole[n].shape]
    assert len(cut) >= 4  # qkv, proj, fc1 and fc2


def test_adapters_alone_are_trained() -> None:
    """MLPerf's: 44,564,480 parameters of Llama-2-70B's 80 layers."""
    llama = Transformer(
        layers=80,
        hidden=8192,
        heads=64,
        kv_heads=8,
        ffn_hidden=28672,
        vocab=32000,
        seq_len=8192,
        adapters=Adapters(rank=16),
    )
    graph = build_transformer(llama)
    trained = [meta for meta in graph.tensors if meta.kind == "param" and meta.requires_grad]
    assert sum(prod(meta.shape_at(1)) for meta in trained) == 44_564_480
    assert len(trained) == len({meta.fqn for meta in trained}) == 4 * 80
    # Nothing before the first layer is trained, so it is a class of its own.
    assert [block.class_index for block in graph.blocks] == [0, 1, *[2] * 79, 3]
    stream = [graph.classes[i].tensor["in0"].requires_grad for i in (1, 2, 3)]
    assert stream == [False, True, True]
    assert not graph.classes[0].tensor[graph.classes[0].outputs[0]].requires_grad


def test_adapters_gather_what_tp_ranks_share() -> None:
    """Beside a product that gathers its input an adapter gathers the same, then its narrow product;
    beside a product that leaves terms of a sum it sums its own and exchanges columns for positions.
    """
    model = replace(WIDE, adapters=Adapters(rank=16))
    layout = tp_layouts(model, sequence_parallel=True)[2]
    block = build_transformer(model).classes[2].bind(1)
    local = lower(block, layout, axis="tp", axis_size=4)
    moved = Counter(op.args[2:4] for op in local.ops if op.target == "planner.redistribute")
    plain = template_of(WIDE).graph.classes[1].bind(1)
    plain = lower(plain, tp_layouts(WIDE, sequence_parallel=True)[1], axis="tp", axis_size=4)
    moved.subtract(op.args[2:4] for op in plain.ops if op.target == "planner.redistribute")
    assert {way: count for way, count in moved.items() if count} == {
        ("S(1)", "R"): 1,
        ("S(2)", "R"): 1,
        ("P", "R"): 1,
        ("S(2)", "S(1)"): 1,
        ("R", "R"): -2,  # frozen norms' weights have no gradients to sum
    }


@pytest.mark.parametrize("more", [{"code": "huggingface"}, {"latent": LATENT}], ids=str)
def test_adapters_are_of_ordinary_attention(more: dict) -> None:
    with pytest.raises(PlannerError, match="adapters are written for ordinary attention"):
        build_transformer(replace(WIDE, adapters=Adapters(rank=16), **more))


def test_templates_need_no_torch() -> None:
    code = (
        "import sys; from planner.language.templates import Transformer, build_transformer; "
        "build_transformer(Transformer(layers=2, hidden=64, heads=4, kv_heads=4, ffn_hidden=128, "
        "vocab=100, seq_len=8)); assert 'torch' not in sys.modules"
    )
    assert run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_layer_of_a_decoder_attends_to_an_encoder() -> None:
    """Params: an embedding of both, layers of 12 and of 16 h^2, norms; the head is tied."""
    h, ffn = 64, 256
    model = Transformer(
        layers=3, hidden=h, heads=4, kv_heads=4, ffn_hidden=ffn, vocab=512, seq_len=16, bias=False,
        norm="layer", gated=False, tied=True, positions="learned", max_positions=32,
        encoder=Encoder(layers=2, seq_len=32),
    )  # fmt: skip
    graph = build_transformer(model)
    encoder = graph.blocks[3]
    decoders = [block for block in graph.blocks if block.name.startswith("decoder.layers")]
    assert [block.inputs[1] for block in decoders] == [*encoder.outputs] * 3
    params = sum(prod(map(int, t.shape)) for t in graph.tensors if t.kind == "param")
    norms = 2 * h * (2 * 2 + 1 + 3 * 3 + 1)
    assert params == (512 + 32) * h + 2 * 12 * h * h + 3 * 16 * h * h + norms
    causal = {
        op.module: op.args[5]
        for program in graph.classes
        for op in program.ops
        if op.target == "aten.scaled_dot_product_attention.default"
    }
    # (The encoder's own attention comes first, and has the same name as the decoder's.)
    assert causal["self_attention.core_attention"] is True
    assert causal["cross_attention.core_attention"] is False
    assert graph.tensor["decoder_ids"].shape[1] == 16
    assert len(tp_layouts(model, sequence_parallel=True)) == len(graph.classes)


def test_parts_of_other_models_are_of_modules_code() -> None:
    for part in ({"sees_all": True}, {"encoder": Encoder(layers=1, seq_len=8)}):
        with pytest.raises(PlannerError, match="encoder"):
            build_transformer(replace(TINY, **part))
