"""V8: an encoder on the first pipeline ranks, the decoder on the others."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from planner.errors import LayoutError
from planner.graph.encoder_decoder import first_decoder_block
from planner.plan import validate_model
from search import SearchRequest, find_plan
from tests.captures import capture_module
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=0.0, devices_per_node=4)
ENCODER, DECODER, WIDTH = 5, 4, 16


class Attends(nn.Module):
    """A layer that looks at what the encoder made, too."""

    def __init__(self):
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, seen):
        return torch.relu(self.own(x) + self.other(seen))


class Translator(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ENCODER))
        self.decoder = nn.ModuleList(Attends() for _ in range(DECODER))

    def forward(self, source, target):
        for layer in self.encoder:
            source = torch.relu(layer(source))
        for layer in self.decoder:
            target = layer(target, source)
        return target.square().mean()


def batch(size):
    return {"source": torch.randn(size, 8, WIDTH), "target": torch.randn(size, 8, WIDTH)}


@pytest.fixture(scope="module")
def graph():
    return capture_module(Translator(), batch(2), batch(3), name="translator")


def ask(**choices):
    fixed = {"num_devices": 4, "global_batch": 8, "pp": 4, "microbatch_size": 1}
    return SearchRequest(**{**fixed, "schedule": "1f1b", "recompute": "none", **choices})


def step_s(plan):
    return plan.estimate["step_s"]


def cuts_of(plan):
    return (0, *(stage.last_block + 1 for stage in plan.stages))


@pytest.mark.parametrize("split_rank", [1, 2, 3])
def test_the_best_cut_with_the_decoder_on_later_ranks(graph, split_rank):
    """As brute force over all cuts with a boundary there finds it."""
    first = first_decoder_block(graph)
    assert graph.blocks[first].name.startswith("decoder")
    found = find_plan(graph, MACHINE, ask(split_rank=split_rank)).plan
    assert cuts_of(found)[split_rank] == first
    validate_model(found, graph)
    balances = [
        tuple(b - a for a, b in pairwise((0, *inner, len(graph.blocks))))
        for inner in combinations(range(1, len(graph.blocks)), 3)
        if inner[split_rank - 1] == first
    ]
    every = [find_plan(graph, MACHINE, ask(balance=balance)).plan for balance in balances]
    assert step_s(found) == pytest.approx(min(map(step_s, every)), rel=1e-9)


def test_a_split_costs_something_and_a_recursive_search_keeps_it_too(graph):
    free = find_plan(graph, MACHINE, ask()).plan
    apart = find_plan(graph, MACHINE, ask(split_rank=1)).plan
    assert step_s(free) < step_s(apart)
    quick = find_plan(graph, MACHINE, ask(split_rank=1, solver="recursive")).plan
    assert cuts_of(quick)[1] == first_decoder_block(graph)
    # Where nothing else is fixed there is a pipeline of more ranks than the encoder's.
    wide = find_plan(graph, MACHINE, ask(split_rank=1, pp=None, schedule=None)).plan
    assert wide.pp > 1
    assert wide.vpp == 1
    assert cuts_of(wide)[1] == first_decoder_block(graph)


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"split_rank": 4}, "so use 1 to 3"),
        ({"split_rank": 0}, "so use 1 to 3"),
        ({"split_rank": 1, "vpp": 2, "pp": 2, "schedule": None}, "one stage a rank"),
        ({"split_rank": 1, "meshes": "own"}, "`meshes` same"),
        ({"split_rank": 1, "solver": "ilp"}, "`solver` dp or recursive"),
    ],
)
def test_a_split_that_can_not_be(graph, choices, says):
    with pytest.raises(LayoutError, match=says):
        find_plan(graph, MACHINE, ask(**choices))


def test_a_model_without_an_encoder_is_told():
    chain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    inputs = [(torch.randn(size, WIDTH),) for size in (2, 3)]
    graph = capture_module(chain, *inputs, loss=lambda out, _: out.mean(), name="chain")
    assert first_decoder_block(graph) is None
    with pytest.raises(LayoutError, match="no block of an encoder stands before"):
        find_plan(graph, MACHINE, ask(split_rank=1))
