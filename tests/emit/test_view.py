"""What emitters ask of a plan: sizes, cuts, placements."""

from dataclasses import replace

import pytest

from planner.emit import PlanView
from planner.emit.transformer_graph import Sizes, sizes_of
from planner.errors import PlanError
from planner.plan.defaults import default_plan
from planner.templates import Experts, Transformer, build_transformer
from tests.emit.views import changed, view_of


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
