"""Captured code priced for runtimes with modules of their own: as their templates, within 2%."""

from dataclasses import replace

import pytest

from costmodel.estimate import cost_cache, estimate
from costmodel.execution import find_execution
from costmodel.execution.own_modules import causal_inputs, causal_masks, with_own_modules
from planner.graph import ModelGraph, Program
from planner.ops.record import packet_of
from planner.plan.defaults import default_plan
from planner.templates import Transformer, build_transformer
from profiles import load_profile
from tests.captures import capture_wide_llama

LLAMA = Transformer(
    layers=2, hidden=4096, heads=32, kv_heads=8, ffn_hidden=14336, vocab=32000, seq_len=2048
)
GPT2 = Transformer(
    layers=2, hidden=4096, heads=32, kv_heads=32, ffn_hidden=16384, vocab=50257, seq_len=2048,
    gated=False, norm="layer", positions="learned", bias=True, tied=True,
)  # fmt: skip


def as_huggingface(model: Transformer) -> ModelGraph:
    """What a capture yields (`tests/templates` holds it to that)."""
    return build_transformer(replace(model, code="huggingface"))


def estimates(execution: str, *graphs: ModelGraph, **sizes: int):
    machine, runtime = load_profile("h100-sxm5-80gb"), find_execution(execution)
    for graph in graphs:
        plan = default_plan(graph, num_microbatches=4, **sizes)
        plan = plan.model_copy(update={"precision": "bf16"})
        yield estimate(graph, machine, plan, execution=runtime)


@pytest.mark.parametrize("sizes", [{"dp": 8, "zero_stage": 3}, {"dp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("execution", ["megatron-core", "torchtitan", "nanotron"])
def test_a_capture_costs_what_its_template_does(execution, model, sizes):
    graphs = as_huggingface(model), build_transformer(model)
    captured, template = estimates(execution, *graphs, **sizes)
    assert captured.step_s == pytest.approx(template.step_s, rel=0.02)
    assert captured.peak_bytes == pytest.approx(template.peak_bytes, rel=0.04)
    assert captured.flop == pytest.approx(template.flop, rel=0.01)


@pytest.mark.slow
def test_a_capture_of_hugging_face_s_own_code_does():
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
    captured = capture_wide_llama(2048, intermediate_size=14336, vocab_size=32000, **sizes)
    assert causal_masks(captured)
    mine, template = estimates("megatron-core", captured, build_transformer(LLAMA), dp=4)
    assert mine.step_s == pytest.approx(template.step_s, rel=0.02)


def test_ours_runs_what_was_captured():
    """Its programs are the graph's own, and its price is that of the masks too."""
    graph = as_huggingface(LLAMA)
    costs = cost_cache(graph, load_profile("h100-sxm5-80gb"), 8)
    assert costs.local(1, 1) == graph.classes[1].bind(1)
    assert costs.given(1) == {"cos", "sin", "mask"}
    others = cost_cache(
        graph, load_profile("h100-sxm5-80gb"), 8, execution=find_execution("nanotron")
    )
    assert others.given(1) == {"cos", "sin"}


def rewritten(graph: ModelGraph, class_index: int) -> tuple[Program, Program]:
    """A class's program, and as runtimes with modules of their own run it."""
    program = graph.classes[class_index].bind(1)
    causal = causal_inputs(graph, causal_masks(graph))[class_index]
    return program, with_own_modules(program, causal)


def packets(program: Program) -> list[str]:
    return [packet_of(op.target) for op in program.ops]


def test_what_is_recognised_is_one_op():
    """Norms, the mask, repeated heads and the logits' cast; tensors that stay keep their names."""
    program, own = rewritten(as_huggingface(LLAMA), 1)
    assert packets(own).count("rms_norm") == packets(program).count("rsqrt") == 2
    assert not {"rsqrt", "mean", "expand", "to"} & set(packets(own))
    attention = next(op for op in own.ops if "attention" in op.target)
    assert "in3" not in attention.inputs
    assert attention.args[5] is True
    assert dict(attention.kwargs)["enable_gqa"] is True
    assert own.outputs == program.outputs
    _, head = rewritten(as_huggingface(LLAMA), 2)
    loss = next(op for op in head.ops if "cross_entropy" in op.target)
    assert head.tensor[loss.inputs[0]].dtype == "bfloat16"
    _, layer = rewritten(as_huggingface(GPT2), 1)
    assert "gelu" in packets(layer)
    assert "tanh" not in packets(layer)


def changed(graph: ModelGraph, name: str, **fields) -> ModelGraph:
    """The graph with one op of its preamble changed."""
    ops = tuple(replace(op, **fields) if op.name == name else op for op in graph.preamble.ops)
    return replace(graph, preamble=replace(graph.preamble, ops=ops))


def test_what_is_not_recognised_stays():
    """A mask that is not causal, a norm of another dim, heads that are used elsewhere too."""
    graph = as_huggingface(LLAMA)
    compared = next(op for op in graph.preamble.ops if op.name == "le")
    assert causal_masks(graph) == {"mask"}
    assert not causal_masks(changed(graph, "le", target="aten.ge.Tensor"))
    assert not causal_masks(changed(graph, "le", args=compared.args[::-1]))
    turned = changed(graph, "le", args=compared.args[::-1], target="aten.ge.Tensor")
    assert causal_masks(turned) == {"mask"}
    assert not causal_masks(changed(graph, "add", args=(graph.preamble.ops[1].args[0], 1)))
    program = graph.classes[1].bind(1)
    masked = with_own_modules(program)
    assert "in3" in next(op for op in masked.ops if "attention" in op.target).inputs
    ops = tuple(
        replace(op, args=(op.args[0], (1,), True)) if op.name == "mean" else op
        for op in program.ops
    )
    other = with_own_modules(replace(program, ops=ops))
    assert packets(other).count("rms_norm") == 1
    assert packets(other).count("rsqrt") == 1
