"""Captured code priced for runtimes with modules of their own: as their templates, within 2%."""

from dataclasses import replace

import pytest

from costmodel.estimate import cost_cache, estimate
from costmodel.execution import find_execution
from costmodel.execution.own_modules import with_own_modules
from planner.language.graph import ModelGraph, Program
from planner.language.lowering.defaults import default_plan
from planner.language.ops.record import packet_of
from planner.language.templates import Experts, Latent, Transformer, build_transformer
from profiles import load_profile
from tests.captures import capture_wide

LLAMA = Transformer(
    layers=2, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, vocab=32000, seq_len=2048
)
GPT2 = Transformer(
    layers=2, hidden=4096, heads=32, kv_heads=32, ffn_hidden=16384, vocab=50257, seq_len=2048,
    gated=False, norm="layer", positions="learned", bias=True, tied=True,
)  # fmt: skip

MIXTRAL = replace(LLAMA, epsilon=1e-5, experts=Experts(number=8, per_token=2, width=14336))
DEEPSEEK = replace(
    LLAMA, layers=4, kv_heads=32, head_dim=128,
    latent=Latent(query_rank=1536, key_rank=512, rope_dim=64),
    experts=Experts(number=32, per_token=4, width=2048, shared=1, groups=8, dense_layers=3),
)  # fmt: skip
MODELS = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen3": replace(LLAMA, query_key_norm=True, head_dim=128),
    "mixtral": MIXTRAL,
    "deepseek": DEEPSEEK,
}


def as_huggingface(model: Transformer) -> ModelGraph:
    """What a capture yields (`tests/templates` holds it to that)."""
    return build_transformer(replace(model, code="huggingface"))


def estimates(execution: str, *graphs: ModelGraph, **sizes: int):
    machine, runtime = load_profile("h100-sxm5-80gb"), find_execution(execution)
    for graph in graphs:
        plan = default_plan(graph, num_microbatches=4, **sizes)
        plan = plan.model_copy(update={"precision": "bf16"})
        yield estimate(graph, machine, plan, execution=runtime)


def compared(execution: str, model: Transformer, **sizes: int):
    """The estimates of a capture and its template, with as many flop."""
    graphs = as_huggingface(model), build_transformer(model)
    captured, template = estimates(execution, *graphs, **sizes)
    assert captured.flop == pytest.approx(template.flop, rel=0.01)
    return captured, template


@pytest.mark.parametrize("sizes", [{"dp": 8, "zero_stage": 3}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("execution", ["megatron-core", "torchtitan", "nanotron"])
def test_a_capture_costs_what_its_template_does(execution, model, sizes):
    captured, template = compared(execution, MODELS[model], **sizes)
    assert captured.step_s == pytest.approx(template.step_s, rel=0.02)
    # Experts' weights, which a capture transposes, have gradients of their own as they arrive.
    rel = 0.1 if MODELS[model].experts else 0.04
    assert captured.peak_bytes == pytest.approx(template.peak_bytes, rel=rel)


@pytest.mark.parametrize("axis", ["tp", "cp"])
@pytest.mark.parametrize("execution", ["megatron-core", "nanotron"])
def test_heads_that_ranks_share_are_repeated_no_more(execution, axis):
    """Where a rank has some of the heads, and where keys of all positions are gathered first, or
    go round a ring."""
    captured, template = compared(execution, LLAMA, dp=2, **{axis: 2})
    assert captured.step_s == pytest.approx(template.step_s, rel=0.02)


DECODER = {
    "num_hidden_layers": 2, "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
GPT3 = replace(GPT2, hidden=12288, heads=96, kv_heads=96, ffn_hidden=49152)
OWN_CODE = {
    "LlamaForCausalLM": (LLAMA, DECODER),
    "Qwen3ForCausalLM": (MODELS["qwen3"], DECODER | {"head_dim": 128}),
    "MixtralForCausalLM": (MIXTRAL, DECODER | {"num_local_experts": 8}),
    "GPT2LMHeadModel": (
        GPT3,
        {"n_layer": 2, "n_embd": 12288, "n_head": 96, "n_positions": 2048, "vocab_size": 50257},
    ),
}
"""Two layers of each: layers are alike. GPT-3's are 175B's."""


@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("family", OWN_CODE)
def test_a_capture_of_hugging_face_s_own_code_does(family, use_cache):
    """Without a cache the library also looks for packed sequences in the positions. N9."""
    template, sizes = OWN_CODE[family]
    captured = capture_wide(family, template.seq_len, use_cache=use_cache, **sizes)
    layer = captured.classes[captured.blocks[1].class_index]
    (attention,) = (op for op in layer.ops if "attention" in op.target)
    assert attention.args[3:6] == (None, 0.0, True)
    for execution in ("megatron-core", "torchtitan", "nanotron"):
        mine, theirs = estimates(execution, captured, build_transformer(template), dp=4)
        assert mine.step_s == pytest.approx(theirs.step_s, rel=0.02)


def test_ours_runs_what_was_captured():
    """Its programs are the graph's own."""
    graph = as_huggingface(LLAMA)
    costs = cost_cache(graph, load_profile("h100-sxm5-80gb"), 8)
    assert costs.local(1, 1) == graph.classes[1].bind(1)


def rewritten(graph: ModelGraph, class_index: int) -> tuple[Program, Program]:
    """A class's program, and as runtimes with modules of their own run it."""
    program = graph.classes[class_index].bind(1)
    return program, with_own_modules(program)


def packets(program: Program) -> list[str]:
    return [packet_of(op.target) for op in program.ops]


def test_what_is_recognised_is_one_op():
    """Norms, repeated heads and the logits' cast; tensors that stay keep their names."""
    program, own = rewritten(as_huggingface(LLAMA), 1)
    assert packets(own).count("rms_norm") == packets(program).count("rsqrt") == 2
    assert not {"rsqrt", "mean", "expand", "to"} & set(packets(own))
    attention = next(op for op in own.ops if "attention" in op.target)
    assert attention.args[5] is True
    assert dict(attention.kwargs)["enable_gqa"] is True
    assert own.outputs == program.outputs
    _, head = rewritten(as_huggingface(LLAMA), 2)
    loss = next(op for op in head.ops if "cross_entropy" in op.target)
    assert head.tensor[loss.inputs[0]].dtype == "bfloat16"
    _, layer = rewritten(as_huggingface(GPT2), 1)
    assert "gelu" in packets(layer)
    assert "tanh" not in packets(layer)


def test_what_is_not_recognised_stays():
    """A norm of another dim."""
    program = as_huggingface(LLAMA).classes[1].bind(1)
    ops = tuple(
        replace(op, args=(op.args[0], (1,), True)) if op.name == "mean" else op
        for op in program.ops
    )
    other = with_own_modules(replace(program, ops=ops))
    assert packets(other).count("rms_norm") == 1
    assert packets(other).count("rsqrt") == 1
