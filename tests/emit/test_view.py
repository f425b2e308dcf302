"""What emitters ask of a plan: sizes, cuts, placements."""

from dataclasses import replace

import pytest
import torch

from planner.emit.view import Launch, PlanView
from planner.errors import PlanError
from planner.language.graph import Op, Program, Ref, TensorMeta
from planner.language.lowering.defaults import default_plan
from planner.language.plan.parts import ClassRecompute
from planner.language.stacks.transformer_graph import Sizes, sizes_of, usual_dims
from planner.language.templates import Experts, Transformer, build_transformer
from tests.captures import capture_module
from tests.emit.views import attending, changed, view_of


@pytest.mark.parametrize("code", ["modules", "huggingface"])
@pytest.mark.parametrize("kv_heads", [4, 8])
def test_sizes_are_read_from_the_graph(code, kv_heads):
    model = Transformer(
        layers=3, hidden=64, heads=8, kv_heads=kv_heads, ffn_hidden=96, vocab=512, seq_len=32,
        code=code,
    )  # fmt: skip
    assert sizes_of(build_transformer(model)) == Sizes(
        layers=3, hidden=64, seq_len=32, heads=8, kv_heads=kv_heads, ffn_hidden=96, gated=True,
        vocab=512, tied=False,
    )  # fmt: skip


def test_experts_have_no_ordinary_feed_forward():
    model = Transformer(
        layers=2, hidden=64, heads=8, kv_heads=8, ffn_hidden=96, vocab=512, seq_len=32,
        experts=Experts(number=4, per_token=2, width=96),
    )  # fmt: skip
    assert sizes_of(build_transformer(model)).ffn_hidden == 0


def test_a_cut_inside_a_layer_is_refused():
    view = view_of(vpp=1)
    numbers = list(view.layer_of_block)
    numbers[9] = numbers[8]  # two blocks of one layer, with a cut between them
    object.__setattr__(view, "__dict__", view.__dict__ | {"layer_of_block": tuple(numbers)})
    with pytest.raises(PlanError, match="cuts the model before block 9, inside"):
        _ = view.parts


def test_a_question_about_the_model_needs_it():
    view = PlanView(plan=view_of().plan)
    with pytest.raises(PlanError, match="the cuts of the plan must be read from the model"):
        _ = view.parts


def test_nodes_of_different_numbers_of_ranks_are_refused():
    view = view_of()
    cluster = view.plan.cluster.model_copy(update={"devices_per_node": 6})
    with pytest.raises(PlanError, match="whole nodes are needed"):
        _ = changed(view, cluster=cluster).ranks_per_node


def test_a_model_that_is_no_chain_of_layers_is_refused():
    graph = build_transformer(
        Transformer(layers=1, hidden=64, heads=8, kv_heads=8, ffn_hidden=96, vocab=512, seq_len=32)
    )
    blocks = tuple(replace(block, name=f"part {block.index}") for block in graph.blocks)
    other = replace(graph, blocks=blocks)
    with pytest.raises(PlanError, match="no chain of numbered layers"):
        _ = PlanView(plan=default_plan(other), graph=other).parts


@pytest.mark.parametrize(
    ("per_node", "nodes", "ranks"), [(16, 1, 16), (20, 1, 16), (8, 2, 8), (4, 4, 4)]
)
def test_nodes_are_full_but_for_a_single_one(per_node, nodes, ranks):
    view = view_of()
    cluster = view.plan.cluster.model_copy(update={"devices_per_node": per_node})
    found = changed(view, cluster=cluster)
    assert (found.num_nodes, found.ranks_per_node) == (nodes, ranks)


def test_ranks_are_not_dealt_evenly_over_nodes_that_are_not_full():
    """16 ranks are priced as 10 on a node and 6 on the next; 8 on each would part tp groups of 4
    that the plan has on one node, and of 10 on the first 2 GPUs would stay idle."""
    view = view_of(tp=4, dp=1)
    cluster = view.plan.cluster.model_copy(update={"devices_per_node": 10})
    with pytest.raises(PlanError, match="16 ranks and nodes of 10; whole nodes"):
        _ = changed(view, cluster=cluster).ranks_per_node


@pytest.mark.parametrize(
    ("of_plan", "said", "device"),
    [("NVIDIA H100", "", "cuda"), ("AMD EPYC (CPU)", "", "cpu"), ("gpu", "cpu", "cpu")],
)
def test_the_device_is_the_cluster_s_unless_it_is_said(of_plan, said, device):
    view = view_of(launch=Launch(device=said))
    cluster = view.plan.cluster.model_copy(update={"device": of_plan})
    assert changed(view, cluster=cluster).device == device


def test_parts_of_the_model_are_counted_by_layers():
    """Llama 3 8B on 4 stages: an embedding, 32 layers, a head."""
    parts = view_of(vpp=1).parts
    assert [part.embedding for part in parts] == [True, False, False, False]
    assert [part.head for part in parts] == [False, False, False, True]
    assert [n for part in parts for n in part.layers] == list(range(32))


def test_stages_that_recompute_are_told_by_what_other_systems_have():
    assert set(view_of().recomputed) == {"none"}
    assert set(view_of(recompute="full").recomputed) == {"full"}
    view = view_of(recompute="selective")
    assert set(view.recomputed) == {"core attention"}
    (layer,) = view.layer_classes
    names = tuple(op.name for op in view.graph.classes[layer].ops)
    for ops, kind in ((names, "full"), (names[:1], "other ops")):
        own = (ClassRecompute(class_index=layer, ops=ops),)
        assert set(changed(view, recomputed=own).recomputed) == {kind}


ATTENTION_ON_CP = [
    ("S(2),R,R", "gathered"),
    ("S(1),S(1),S(1)", "heads"),
    ("S(2),S(2),S(2)", "ring"),
    # Heads of queries are dealt, and all heads of keys are everywhere: 2 key heads on 4 ranks.
    ("S(1),R,R", "other"),
    # Every rank computes the attention of the whole sequence.
    ("R,R,R", "other"),
    ("S(0),S(0),S(0)", "other"),
]


@pytest.mark.parametrize(("inputs", "kind"), ATTENTION_ON_CP)
def test_how_sequences_are_split_is_read_from_queries_keys_and_values(inputs, kind):
    view = view_of(cp=2, gpus=32)
    assert view.cp_kind() == "gathered"
    assert attending(view, inputs).cp_kind() == kind


def test_sequences_in_several_pieces_are_not_those_of_other_systems():
    view = view_of(cp=2, gpus=32)
    striped = tuple(
        layout.model_copy(
            update={"outputs": tuple(f"{p}x4" if p == "S(1)" else p for p in outputs)}
        )
        if (outputs := layout.outputs) and layout.axis == "cp"
        else layout
        for layout in view.plan.layouts
    )
    assert changed(view, layouts=striped).cp_kind() == "striped"


def test_a_table_that_is_not_trained_is_split_by_nobody():
    """Positions are looked up in a table that the block takes or computes."""
    table = TensorMeta(name="sines", shape=(8, 4), dtype="float32", kind="input", fqn="")
    ids = replace(table, name="ids", shape=(1, 8), dtype="int64")
    out = replace(table, name="out", shape=(1, 8, 4), kind="activation")
    look_up = Op(
        name="embedding", target="aten.embedding.default", args=(Ref("sines"), Ref("ids")),
        kwargs=(), outputs=("out",), module="",
    )  # fmt: skip
    program = Program(
        name="block", inputs=("sines", "ids"), params=(), outputs=("out",),
        tensors=(table, ids, out), ops=(look_up,),
    )  # fmt: skip
    assert list(usual_dims(program, is_layer=False)) == []
    trained = replace(
        program,
        inputs=("ids",),
        params=("sines",),
        tensors=(replace(table, kind="param"), ids, out),
    )
    assert list(usual_dims(trained, is_layer=False)) == [("sines", 0)]


def test_latent_attention_has_whole_narrow_products_and_its_heads_cut():
    """As Megatron-LM's `multi_latent_attention.py` has them: down "duplicated", up by columns."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    config = transformers.DeepseekV3Config(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=2,
        attn_implementation="sdpa",
    )  # fmt: skip
    ids = [torch.zeros(size, 8, dtype=torch.long) for size in (2, 3)]
    model = transformers.DeepseekV3ForCausalLM(config)
    graph = capture_module(model, *({"input_ids": each, "labels": each} for each in ids))
    program = graph.classes[graph.blocks[1].class_index]
    dims = {program.tensor[n].fqn.split(".")[1]: d for n, d in usual_dims(program, is_layer=True)}
    assert dims == {
        "q_a_proj": None, "q_b_proj": 0, "kv_a_proj_with_mqa": None, "kv_b_proj": 0, "o_proj": 1,
        "gate_proj": 0, "up_proj": 0, "down_proj": 1,
    }  # fmt: skip
