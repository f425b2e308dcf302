"""M14, D22: the block program finds what experts do by hand in a transformer layer, untold."""

from __future__ import annotations

from collections import Counter

from planner.language.graph import ModelGraph
from planner.language.layout.redistribute import REDISTRIBUTE, op_collectives
from planner.language.lowering.lowering import lower
from planner.language.plan import ClassLayout
from profiles import Group, Lookup
from search import SearchRequest, find_plan
from search.op_layout.layouts import LayoutSolver
from tests.captures import capture_wide_llama
from tests.search.machine import Machine

TP = 8
MACHINE = Machine(context_bytes=0.0, devices_per_node=TP)


class SummingSwitch(Machine):
    """A network that sums on the way: an all-reduce passes once, as an all-gather does."""

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        kind = "all_gather" if kind == "all_reduce" else kind
        return super().collective_seconds(kind, num_bytes, group)


def layer_of(graph: ModelGraph, layouts: tuple[ClassLayout, ...]):
    """Return the layout of the last layer's block and the placements of its weights by module."""
    block = next(b for b in graph.blocks if b.name.endswith("layers.1"))
    layout = next(layout for layout in layouts if layout.class_index == block.class_index)
    names = [graph.tensor[name].fqn.split(".")[-2] for name in block.params]
    return layout, dict(zip(names, layout.params, strict=True))


def collectives_of(graph: ModelGraph, layout: ClassLayout) -> tuple[Counter, Counter]:
    """Count the collectives of a block's activations, forward and backward."""
    local = lower(graph.classes[layout.class_index].bind(1), layout, axis_size=TP)
    counts: tuple[Counter, Counter] = (Counter(), Counter())
    for op in local.ops:
        if op.target == REDISTRIBUTE and local.tensor[op.inputs[0]].kind == "activation":
            for count, kind in zip(counts, op_collectives(op, local.tensor, TP)[0], strict=True):
                count.update([kind] if kind else [])
    return counts


def split(graph: ModelGraph):
    """Return the layout of a layer in the fastest plan on TP devices, and its weights."""
    plan = find_plan(graph, MACHINE, SearchRequest(num_devices=TP, global_batch=8, tp=TP)).plan
    assert plan is not None
    return layer_of(graph, plan.layouts)


def test_a_layer_is_split_as_megatron_splits_it(llama):
    """P2, D19: q, k, v, gate, up by column and o, down by row, with all else on pieces of the
    sequence (Korthikanti et al., Reducing Activation Recomputation, 2022, figure 5)."""
    layout, placements = split(llama)
    by_column = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    assert placements == (
        dict.fromkeys(by_column, "S(0)")
        | dict.fromkeys(("o_proj", "down_proj"), "S(1)")
        | dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "R")
    )
    assert (layout.inputs[0], layout.outputs) == ("S(1)", ("S(1)",))
    assert collectives_of(llama, layout) == ({"all_gather": 2, "reduce_scatter": 2},) * 2


def test_few_keys_travel_where_they_are_smaller_than_the_stream():
    """With 8 key heads of 32, gathered keys and values are half of the residual stream: attention
    is divided by query position, as context parallelism does it (Llama 3, section 3.3.2)."""
    llama = capture_wide_llama(
        2048,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    layout, placements = split(llama)
    alike = ("q_proj", "k_proj", "v_proj", "o_proj")
    assert {placements[name] for name in alike} == {"R"}
    assert (placements["up_proj"], placements["down_proj"]) == ("S(0)", "S(1)")
    assert (layout.inputs[0], layout.outputs) == ("S(1)", ("S(1)",))
    assert collectives_of(llama, layout)[0] == {"all_gather": 3, "reduce_scatter": 1}


def test_where_sums_are_cheap_and_norms_free_sequences_stay_whole(llama):
    """The same weights, but two all-reduces each way: nothing is built in."""
    machine = SummingSwitch(context_bytes=0.0, devices_per_node=TP, bytes_per_s=1e18)
    fastest = LayoutSolver(graph=llama, profile=machine).at(TP, 1).fastest
    layout, placements = layer_of(llama, fastest.by_class)
    assert (placements["q_proj"], placements["o_proj"]) == ("S(0)", "S(1)")
    assert (layout.inputs[0], layout.outputs) == ("R", ("R",))
    assert collectives_of(llama, layout) == ({"all_reduce": 2},) * 2
