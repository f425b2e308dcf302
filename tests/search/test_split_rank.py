"""V8: an encoder on the first pipeline ranks, the decoder on the others."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
import torch
from torch import nn

from planner.errors import LayoutError
from planner.language.graph.encoder_decoder import first_decoder_block
from planner.language.lowering.match_model import validate_model
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
        self.reads = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(ENCODER))
        self.writes = nn.ModuleList(Attends() for _ in range(DECODER))

    def forward(self, source, target):
        for layer in self.reads:
            source = torch.relu(layer(source))
        for layer in self.writes:
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
    assert graph.blocks[first].name.startswith("writes")
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


class Chain(nn.Module):
    """Layers named as an encoder and a decoder, which hand each value on to the next alone; or with
    a residual around each pair, which two blocks read.
    """

    def __init__(self, *, residual: bool):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.decoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.residual = residual

    def forward(self, x, target):
        layers = [*self.encoder, *self.decoder]
        for first, second in zip(layers[::2], layers[1::2], strict=True):
            y = second(torch.relu(first(x)))
            x = x + y if self.residual else y
        return (x - target).square().mean()


@pytest.mark.parametrize("residual", [False, True])
def test_names_make_no_border(residual):
    inputs = [(torch.randn(size, WIDTH), torch.randn(size, WIDTH)) for size in (2, 3)]
    graph = capture_module(Chain(residual=residual), *inputs, name="chain")
    assert any("decoder" in block.name for block in graph.blocks)
    assert first_decoder_block(graph) is None


@pytest.mark.parametrize(("kind", "border"), [("T5", 5), ("Bart", 4)])
def test_borders_of_models_that_embed_in_other_places(kind, border):
    """T5 embeds the decoder's tokens in the encoder's last block, Bart in a block of its own."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    if kind == "T5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_heads": 2, "vocab_size": 64}
        depths = {"num_layers": 3, "num_decoder_layers": 2, "decoder_start_token_id": 0}
        config = transformers.T5Config(**sizes, **depths)
    else:
        ends = ("encoder", "decoder")
        sizes = {f"{end}_{name}": 2 for end in ends for name in ("attention_heads", "ffn_dim")}
        depths = {"encoder_layers": 3, "decoder_layers": 2, "max_position_embeddings": 16}
        config = transformers.BartConfig(d_model=16, vocab_size=64, **sizes, **depths)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    ids = [torch.zeros(size, 8, dtype=torch.long) for size in (2, 3)]
    graph = capture_module(model, *({"input_ids": each, "labels": each} for each in ids))
    assert first_decoder_block(graph) == border


def test_a_model_without_an_encoder_is_told():
    chain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    inputs = [(torch.randn(size, WIDTH),) for size in (2, 3)]
    graph = capture_module(chain, *inputs, loss=lambda out, _: out.mean(), name="chain")
    assert first_decoder_block(graph) is None
    with pytest.raises(LayoutError, match="no block of an encoder stands before"):
        find_plan(graph, MACHINE, ask(split_rank=1))
