"""Redistributions between blocks, and what blocks take from where, by hand on a tied toy chain."""

import numpy as np
import pytest

from costmodel import CostCache
from costmodel.links import find_links, find_side_values
from costmodel.time.block.boundary import block_entry, placement_of
from costmodel.time.block.moved import shown_s
from planner.language.layout.axes import Degrees
from planner.language.layout.placement import Replicate, Shard
from planner.language.plan import ClassLayout
from profiles import Group
from search.partition.chain_windows import Window
from search.space.configuration import Configuration
from search.stages.rank_stages import RankCostWindow, RankStages
from search.stages.stage_table import StageTable
from tests.captures import capture_tiny
from tests.search.machine import Machine

MACHINE = Machine(devices_per_node=4)


@pytest.fixture(scope="module")
def graph():
    return capture_tiny("gpt")


def shard_outputs(graph, class_index) -> dict[int, ClassLayout]:
    """A layout that leaves a class's outputs cut along dim 1, all else whole."""
    program = graph.classes[class_index]
    layout = ClassLayout(
        class_index=class_index,
        params=("R",) * len(program.params),
        inputs=("R",) * len(program.inputs),
        outputs=("S(1)",) * len(program.outputs),
        ops=(),
    )
    return {class_index: layout}


def test_a_cut_output_is_gathered_where_it_is_taken_whole(graph):
    """all_gather forward; the gradient's way back takes what the table of collectives says."""
    second = graph.blocks[1]
    name = next(name for name in second.inputs if graph.producer.get(name) == 0)
    layouts = shard_outputs(graph, graph.blocks[0].class_index)
    assert placement_of(graph, name, layouts) == Shard(1)
    assert placement_of(graph, name, {}) == Replicate()
    group = Group(ranks_per_node=2)
    options = {"axis": "tp", "group": group, "microbatch_size": 2}
    there = shown_s(block_entry(graph, 1, layouts, MACHINE, **options).forward)
    num_bytes = graph.tensor[name].bytes_at(2)
    assert there == MACHINE.collective_seconds("all_gather", num_bytes, group).seconds
    entry = block_entry(graph, 1, {}, MACHINE, **options)
    assert (shown_s(entry.forward), shown_s(entry.backward)) == (0.0, 0.0)


def test_equal_blocks_have_equal_links(graph):
    """The layers of a chain take their input from the block before, whatever it is called."""
    links = find_links(graph)
    layers = [
        block.index for block in graph.blocks if graph.blocks[2].class_index == block.class_index
    ]
    assert len({links.signatures[index] for index in layers[1:]}) == 1
    assert links.signatures[0] != links.signatures[layers[1]]


def test_a_value_of_no_batch_input_is_made_once():
    """Fixed values are resident once; the others once a microbatch, and grow with it."""
    graph = capture_tiny("encoder-decoder")
    two, four = (find_side_values(graph, size) for size in (2, 4))
    names = graph.preamble.outputs
    assert two.num_bytes(names, fixed=True) == four.num_bytes(names, fixed=True)
    assert two.num_bytes(names, fixed=False) <= four.num_bytes(names, fixed=False)
    costs = CostCache(graph, MACHINE)
    assert costs.side_values(2) is costs.side_values(2)
    assert costs.side_values(2) == two


def test_a_band_has_an_entry_for_each_run_and_choice(graph):
    """Longer runs take longer; full recomputation adds the forward to the backward."""
    costs = CostCache(graph, MACHINE)
    table = StageTable(costs=costs, layouts=(), degrees=Degrees(), microbatch_size=2)
    configuration = Configuration(
        degrees=Degrees(dp=2), pp=2, vpp=1, microbatch_size=2, num_microbatches=4,
        schedule="1f1b", zero=3, recompute="none|full",
    )  # fmt: skip
    stages = RankStages(table=table, configuration=configuration, is_mixed=True)
    n = table.num_blocks
    band = stages.cost_window(Window.all_runs(n, n))
    assert isinstance(band, RankCostWindow)
    assert band.forward_s.shape == (2, n, n)
    assert (np.diff(band.forward_s[0, :, 0]) > 0).all()
    exposed = band.costs.exposed.forward_s[band.kinds.of]
    again = band.backward_s[1] - band.backward_s[0]
    assert again == pytest.approx(band.forward_s[0] - exposed)
