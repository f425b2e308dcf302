"""D19, N9, B10: sequences cut over cp in each way compute in fp64 what one process computes.

Attention of some queries, whose keys and values are gathered or go round a ring, and of some heads
(all-to-all); what blocks hand on in one piece a rank, in several (striped) and in mirrored ones
(zig-zag); causal, in both directions, with windows and with documents; key heads fewer than ranks;
beside tp.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from planner.capture import capture_source
from planner.errors import LayoutError
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.layout.axes import find_axis, lowered_axes
from planner.language.layout.placement import Shard
from planner.language.lowering.attention_cut import AttentionBy, attention_kinds, over_ring
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.lowering import lower
from planner.language.lowering.propagate import propagate_on
from planner.language.plan import ClassLayout, Plan
from planner.runtime.proofs.verify import compare_with_one_process
from tests.captures import capture_tiny
from tests.model_matrix import model_matrix
from tests.runtime.test_verify_matrix import source_of
from tests.spawn import run_ranks


class Way(NamedTuple):
    """What a rank has of attention, and pieces of each sequence."""

    attention: AttentionBy
    pieces: int = 1
    mirrored: bool = False

    @property
    def border(self) -> str:
        """How blocks hand on sequences."""
        return str(Shard(1, self.pieces, self.mirrored))


WAYS = (
    Way("queries"),
    Way("queries", 2),
    Way("queries", 2, mirrored=True),
    Way("queries", 4),
    Way("heads"),
    Way("heads", 2),
    Way("heads", 2, mirrored=True),
    Way("ring"),
    Way("ring", 2),
    Way("ring", 2, mirrored=True),
    Way("ring", 4),
    Way("ring", 4, mirrored=True),
)


HALVES = tuple(way for way in WAYS if way.pieces == 2)
ENDS = tuple(way for way in WAYS if way.mirrored)


def cut_so(graph: ModelGraph, way: Way, **choices: Any) -> Plan:
    """Return the default plan with sequences cut in a way."""
    plan = default_plan(graph, microbatch_size=2, **choices)
    programs = [program.bind(2) for program in graph.classes]
    layouts: list[ClassLayout] = []
    for axis in (axis for axis in lowered_axes() if plan.degrees[axis.name] > 1):
        size = plan.degrees[axis.name]
        found = [layout for layout in plan.layouts if layout.axis == axis.name]
        if axis.cuts_sequences:
            found = propagate_on(
                graph, axis, size=size, microbatch_size=2, programs=programs,
                attention=way.attention, segments=way.pieces, mirrored=way.mirrored,
            )  # fmt: skip
            assert attention_kinds(graph, found) == {"heads" if axis.by_heads else way.attention}
            borders = {place for layout in found for place in layout.outputs if place != "R"}
            assert borders == {"S(1)" if axis.by_heads else way.border}
        by_class = {layout.class_index: layout for layout in found}
        programs = [
            lower(
                program, by_class.get(index), axis=axis.name, axis_size=size,
                sum_later=axis.whole_params,
            )
            for index, program in enumerate(programs)
        ]  # fmt: skip
        layouts += found
    return plan.model_copy(update={"layouts": tuple(layouts)})


def compare(name: str, captured: Any, ways: tuple[Way, ...], choices: dict) -> dict[Way, str]:
    """On each rank: train in each way; rank 0 returns what is too far apart."""
    graph, apart = from_json(captured), {}
    for way in ways:
        plan = cut_so(graph, way, **choices)
        report = compare_with_one_process(plan, source_of(name), steps=2, graph=graph)
        if report is not None and not report.passed:
            apart[way] = str(report)
    return apart


def check(
    name: str, num_ranks: int, ways: tuple[Way, ...], *, backend: str = "gloo", **choices: Any
) -> None:
    if model_matrix()[name].needs_transformers:
        pytest.importorskip("transformers")
    captured = to_json(capture_source(source_of(name)))
    apart = run_ranks(compare, num_ranks, name, captured, ways, choices, backend=backend)[0]
    assert not apart, f"apart by more than rounding: {apart}"


def test_causal_attention():
    check("gpt", 2, WAYS, cp=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "hf-llama",
        "hf-bert",
        "hf-mistral",
        "hf-llama-packed",
        "hf-mistral-packed",
        "hf-llama-padded",
    ],
)
def test_masks_and_key_heads(name):
    check(name, 2, WAYS, cp=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "hf-llama", "hf-mistral", "hf-llama-packed"])
@pytest.mark.parametrize(
    ("ways", "choices"),
    [
        (WAYS[:7], {"cp": 4}),
        (WAYS[7:], {"cp": 4}),
        (WAYS[:7], {"cp": 2, "tp": 2}),
        (WAYS[7:], {"cp": 2, "tp": 2}),
        (HALVES, {"cp": 2, "pp": 2, "zero_stage": 1, "recompute": "full"}),
    ],
    ids=["cp4", "cp4 ring", "tp2", "tp2 ring", "pp2"],
)
def test_four_ranks_and_beside_tp(name, ways, choices):
    """Four ranks share the two heads of keys of all models but the first."""
    check(name, 4, ways, **choices)


def two_levels(ways: tuple[Way, ...]) -> tuple[Way, ...]:
    """Ways of the outer axis, whose ranks have some heads of what those of the inner one have."""
    return tuple(way for way in ways if way.attention != "heads")


def test_two_levels():
    """Heads are exchanged on the inner axis; keys are gathered, or go round, on the outer one."""
    check("gpt", 4, (Way("queries", 2, mirrored=True), Way("ring")), cp=2, hp=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "hf-llama", "hf-mistral", "hf-llama-packed", "hf-bert"])
@pytest.mark.parametrize(
    ("ways", "choices"),
    [
        (two_levels(WAYS), {}),
        (two_levels(ENDS), {"zero_stage": 3, "recompute": "full"}),
        (two_levels(ENDS), {"tp": 2}),
        (two_levels(ENDS), {"pp": 2}),
    ],
    ids=["every way", "zero", "tp2", "pp2"],
)
def test_ways_on_two_levels(name, ways, choices):
    """All masks; and half as many heads of keys as of queries, two."""
    ranks = 4 * choices.get("tp", 1) * choices.get("pp", 1)
    check(name, ranks, ways, cp=2, hp=2, **choices)


@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"recompute": "selective"},
        {"zero_stage": 3},
        {"zero_stage": 1, "num_microbatches": 2, "backend": "staged"},
    ],
    ids=str,
)
def test_rings_beside_zero_and_recomputation(choices):
    """B14: and over a backend that holds ranks to NCCL's rules, as messages overlap."""
    ways = (Way("ring", 2), Way("ring", 2, mirrored=True))
    check("hf-llama-packed", 2, ways, cp=2, **choices)


def test_what_cannot_be_cut_so_is_refused():
    graph = capture_tiny("gpt")
    with pytest.raises(LayoutError, match=r"lie S\(1\)x16 on 2 ranks; use fewer pieces"):
        propagate_on(graph, find_axis("cp"), size=2, microbatch_size=1, segments=16)
    crossing = capture_tiny("encoder-decoder")
    with pytest.raises(LayoutError, match=r"attention .* can't run over a ring: it drops weights"):
        propagate_on(crossing, find_axis("cp"), size=2, microbatch_size=2, attention="ring")
    by_heads = propagate_on(graph, find_axis("cp"), size=2, microbatch_size=1, attention="heads")
    layer = next(layout for layout in by_heads if attention_kinds(graph, [layout]))
    with pytest.raises(LayoutError, match=r"attention .* can't run over a ring"):
        over_ring(layer, graph.classes[layer.class_index].bind(1), 2)
    with pytest.raises(LayoutError, match=r"lie S\(1\)z16 on 2 ranks; use fewer pieces"):
        propagate_on(graph, find_axis("cp"), size=2, microbatch_size=1, segments=16, mirrored=True)
    with pytest.raises(LayoutError, match=r"attention.* has no sharding on 8 ranks.*fewer ranks"):
        propagate_on(graph, find_axis("cp"), size=8, microbatch_size=1, attention="heads")
