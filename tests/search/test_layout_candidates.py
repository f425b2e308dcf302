"""Layout candidates: each kind's bound is below the table of the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.errors import LayoutError
from planner.language.templates import Transformer, build_transformer
from profiles import load_profile
from search import SearchRequest, find_plan
from search.candidates import Candidates
from search.stages.worth_trying import worth_trying
from tests.captures import capture_module
from tests.search.machine import Machine

MACHINE = Machine()


@pytest.fixture(scope="module")
def candidates(llama):
    return Candidates.of(llama, MACHINE, SearchRequest(num_devices=8, global_batch=8))


def block_seconds(table) -> float:
    return float((table.forward_s + table.backward_s).sum())


@pytest.mark.parametrize("tp", [2, 4])
def test_a_closer_look_only_raises_the_bound(candidates, tp):
    optimistic = candidates.layouts.at(tp, 1).optimistic
    (fastest,) = candidates.layouts.at(tp, 1).fastest
    every = candidates.layouts.at(tp, 1).every
    assert 0 < optimistic.least_s <= fastest.least_s * (1 + 1e-9)
    for layout in every:
        assert fastest.least_s <= layout.least_s * (1 + 1e-9)
        assert layout.least_s <= block_seconds(layout.table) * (1 + 1e-9)
    assert optimistic.table.key == fastest.table.key


def test_tables_are_named_by_what_they_are_of(candidates):
    tables = [layout.table for tp in (1, 2, 4) for layout in candidates.layouts.at(tp, 1).every]
    tables += [layout.table for layout in candidates.layouts.at(2, 2).every]
    assert len({table.key for table in tables}) == len(tables)
    again = Candidates.of(candidates.graph, MACHINE, SearchRequest(num_devices=8, global_batch=8))
    assert (
        again.layouts.at(2, 1).fastest[0].table.key
        == candidates.layouts.at(2, 1).fastest[0].table.key
    )


def test_a_table_that_is_slower_must_hold_clearly_less(candidates):
    tables = [layout.table for layout in candidates.layouts.at(4, 1).every]
    kept = worth_trying([*tables, *tables])
    assert [block_seconds(table) for table in kept] == sorted(map(block_seconds, kept))
    assert len({table.key for table in kept}) == len(kept)


def test_layouts_are_priced_with_and_without_weight_gradients_beside_collectives(llama):
    """Each by its own blocks, where the search chooses and something hides."""
    candidates = Candidates.of(
        llama, MACHINE, SearchRequest(num_devices=8, global_batch=8, overlap="auto")
    )
    found = candidates.layouts.at(4, 1).every
    alone = {layout.table.layouts: layout.least_s for layout in found if not layout.table.beside}
    beside = {layout.table.layouts: layout.least_s for layout in found if layout.table.beside}
    assert beside
    assert all(seconds < alone[layouts] for layouts, seconds in beside.items())
    assert all(layout.least_s == block_seconds(layout.table) for layout in found)
    assert not any(layout.table.beside for layout in candidates.layouts.at(1, 1).every)
    with pytest.raises(LayoutError, match="whose stages would each choose; drop one of them"):
        SearchRequest(num_devices=8, global_batch=8, overlap="auto", meshes="own")


def test_gathers_go_in_pieces_where_that_takes_less():
    """Of a decoder as wide as Llama-3-70B, over links that take as long as products."""
    decoder = Transformer(
        layers=2, hidden=8192, heads=64, kv_heads=8, ffn_hidden=28672, vocab=32000, seq_len=8192
    )  # fmt: skip
    graph, a100 = build_transformer(decoder), load_profile("a100-pcie-80gb")
    request = SearchRequest(num_devices=8, global_batch=8, tp=4, overlap="auto")
    found = Candidates.of(graph, a100, request).layouts.at(4, 1).every
    in_pieces = [each for each in found if each.table.pieces > 1]
    assert in_pieces
    for each in in_pieces:
        assert block_seconds(each.table) < block_seconds(replace(each.table, pieces=1))
        assert each.least_s == block_seconds(each.table)
    plan = find_plan(graph, a100, request).plan
    assert plan is not None
    assert plan.gather_pieces > 1
    alone = find_plan(graph, a100, replace(request, overlap="none")).plan
    assert alone is not None
    assert alone.gather_pieces == 1
    assert plan.estimate["step_s"] < alone.estimate["step_s"]


class SharesAcrossKinds(nn.Module):
    """Four light layers and a heavy last one, all of which add one shared vector."""

    def __init__(self):
        super().__init__()
        self.shared = nn.Parameter(torch.randn(64))
        self.layers = nn.ModuleList(Light(self.shared) for _ in range(4))
        self.last = Heavy(self.shared)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.last(x).square().mean()


class Light(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.mix = shared, nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.tanh(self.mix(x)) * self.shared


class Heavy(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.shared, self.up, self.down = shared, nn.Linear(64, 4096), nn.Linear(4096, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))) * self.shared


def test_kinds_that_share_a_weight_each_count_as_often_as_they_are_there():
    """X1: a bound that counts the heavy block four times would prune what is fastest."""
    graph = capture_module(SharesAcrossKinds(), torch.randn(2, 8, 64), torch.randn(3, 8, 64))
    request = SearchRequest(num_devices=2, global_batch=8)
    layouts = Candidates.of(graph, MACHINE, request).layouts
    assert len({block.class_index for block in graph.blocks}) < len(graph.blocks)
    (fastest,) = layouts.at(2, 4).fastest
    assert layouts.at(2, 4).optimistic.least_s <= fastest.least_s * (1 + 1e-9)
    assert fastest.least_s + fastest.accumulate_s <= block_seconds(fastest.table) * (1 + 1e-9)
    # It is close to it as well: nothing is left out.
    assert fastest.least_s > 0.8 * block_seconds(fastest.table)
