"""Choices of meshes by ranks with several stages: all of them, once each, best first."""

from dataclasses import replace
from itertools import product

import pytest

from search import SearchRequest
from search.candidates import Candidates
from search.meshes.interleaved_mixes import Assignments, EvenMix, even_mixes
from search.meshes.mix import Member, Mix
from tests.captures import capture_tiny
from tests.search.machine import Machine


@pytest.fixture(scope="module")
def mix() -> EvenMix:
    """Two ranks of two stages, each with tp 1 or 2, and with or without recomputation."""
    request = SearchRequest(
        num_devices=4, global_batch=8, pp=2, vpp=2, schedule="interleaved_1f1b", zero=0, cp=1,
        offload="none", forbid=(("recompute", "selective"),),
    )  # fmt: skip
    machine = Machine(context_bytes=0.0, flop_per_s=1e9, bytes_per_s=1e9, alpha_s=1e-5)
    candidates = Candidates.of(capture_tiny("gpt"), machine, request)
    shapes = [shape for shape in candidates.shapes(request) if shape.num_microbatches == 4]
    members = tuple(
        Member(
            configuration=next(shape.configurations()),
            table=candidates.tables(shape.tp, shape.microbatch_size)[0],
        )
        for shape in shapes
    )
    assert {member.tp for member in members} == {1, 2}
    return next(even_mixes(candidates, Mix(members=members), float("inf")))


def listed(mix: EvenMix, ceiling: float) -> list:
    """The cuts in the order in which steps complete them."""
    assignments = Assignments(mix, ceiling)
    assert assignments.fits
    cuts = []
    while assignments.bound < float("inf"):
        bound = assignments.bound
        cut = assignments.advance()
        if cut is not None:
            assert cut.value == bound
            cuts.append(cut)
    return cuts


def test_every_choice_of_meshes_comes_once_in_the_order_of_its_bound(mix):
    cuts = listed(mix, float("inf"))
    kinds = mix.mix.num_recompute_choices
    by_rank = {tuple(mix.mix.indices(cut)[:2]) for cut in cuts}
    assert by_rank == set(product(range(2), repeat=2))
    assert len(cuts) == len(by_rank)
    # Of the recomputations that fit, here all, the first is taken.
    assert all(choice % kinds == 0 for cut in cuts for choice in cut.choices)
    values = [cut.value for cut in cuts]
    assert values == sorted(values)
    assert values[0] >= mix.step_bound(mix.least_s) * (1 - 1e-12)


def test_a_ceiling_leaves_out_what_is_no_faster(mix):
    values = [cut.value for cut in listed(mix, float("inf"))]
    assert [cut.value for cut in listed(mix, values[-1])] == [v for v in values if v < values[-1]]


def test_a_rank_without_a_choice_that_fits_leaves_nothing(mix):
    assert not Assignments(replace(mix, limit_bytes=1.0), float("inf")).fits
