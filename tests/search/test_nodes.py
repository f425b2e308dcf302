"""What every node of a search keeps to, seen on whole searches of a small model."""

from __future__ import annotations

from collections import Counter

import pytest

from search import SearchRequest
from search.branch_and_bound import EvaluatedPlan
from search.candidates import Candidates
from search.meshes.interleaved_mixes import InterleavedMixNode
from search.meshes.mix_node import MixNode
from search.meshes.roots import MixesNode, meshes_node
from search.nodes.configurations import ConfigurationNode, ShapeNode
from search.nodes.partitions import FirstStagesNode, PartitionedNode, PartitionsNode
from search.nodes.sizes import DegreesNode, SizesNode, push_degrees
from search.report.runners_up import MOST_RUNNERS_UP, find_runners_up, why_slower
from search.search_state import SearchState
from tests.captures import capture_tiny
from tests.search.machine import Machine

MACHINE = Machine(
    context_bytes=0.0, devices_per_node=4, flop_per_s=1e9, bytes_per_s=1e9, alpha_s=1e-5
)
KINDS = (
    DegreesNode,
    SizesNode,
    ShapeNode,
    ConfigurationNode,
    PartitionedNode,
    PartitionsNode,
    FirstStagesNode,
    MixesNode,
    MixNode,
    InterleavedMixNode,
)


def searched(request: SearchRequest, limit_bytes: float = float("inf")) -> SearchState:
    candidates = Candidates.of(capture_tiny("mlp"), MACHINE, request)
    shapes = candidates.shapes(request)
    search = SearchState(
        candidates=candidates,
        request=request,
        memory_limit_bytes=limit_bytes,
        limits={"": limit_bytes},
    )
    push_degrees(search, shapes)
    search.run()
    if request.meshes == "own":
        search.push(meshes_node(shapes))
        search.run()
    return search


def refinements(monkeypatch, request, **settings):
    """Run a search; return it with every (node, what it was refined to)."""
    seen = []

    def recorded(refine):
        def wrapped(node, search):
            for child in refine(node, search):
                seen.append((node, child))
                yield child

        return wrapped

    for kind in KINDS:
        monkeypatch.setattr(kind, "refine", recorded(kind.refine))
    return searched(request, **settings), seen


@pytest.mark.parametrize("meshes", ["same", "own"])
def test_no_node_is_faster_than_the_node_it_came_from(monkeypatch, meshes):
    request = SearchRequest(num_devices=4, global_batch=8, offload="none", meshes=meshes)
    search, seen = refinements(monkeypatch, request)
    kinds = Counter(type(node) for node, _ in seen)
    assert {DegreesNode, SizesNode, ShapeNode, ConfigurationNode, PartitionedNode} <= set(kinds)
    for node, child in seen:
        least = child.step_s if isinstance(child, EvaluatedPlan) else child.bound
        assert least >= node.bound * (1 - 1e-9), (type(node), type(child))
    assert search.best is not None
    assert search.lower_bound_s <= search.best_s


@pytest.mark.parametrize("meshes", ["same", "own"])
@pytest.mark.parametrize("factor", [1.0, 0.6])
def test_every_configuration_ends_once(meshes, factor):
    """Evaluated, pruned by a named rule, or unexplored, also where much does not fit."""
    request = SearchRequest(num_devices=4, global_batch=8, offload="none", meshes=meshes)
    free = searched(request)
    assert free.best is not None
    search = searched(request, limit_bytes=factor * free.best.estimate.peak_bytes)
    ended = search.num_evaluated + search.num_unexplored + search.pruned.total()
    assert search.num_considered == ended
    assert len(search.pruned) > 1
    assert search.best is None or search.best_s >= free.best_s
    for done in search.evaluated:
        assert done.estimate.peak_bytes <= search.memory_limit_bytes


def test_the_certificate_says_what_the_search_counted():
    request = SearchRequest(num_devices=4, global_batch=8, offload="none")
    search = searched(request)
    assert search.best is not None
    proof = search.certificate(search.best)
    assert (proof.best_s, proof.lower_bound_s) == (search.best_s, search.lower_bound_s)
    assert (proof.considered, proof.evaluated) == (search.num_considered, search.num_evaluated)
    assert dict(proof.pruned) == dict(search.pruned)
    assert dict(proof.proved_by)["stage boundaries"].startswith("chain dynamic programming")


def test_runners_up_are_slower_of_other_degrees_and_say_why():
    request = SearchRequest(num_devices=4, global_batch=8, offload="none")
    search = searched(request)
    assert search.best is not None
    found = find_runners_up(search, search.best)
    assert 0 < len(found) <= MOST_RUNNERS_UP
    steps = [runner_up.step_s for runner_up in found]
    assert steps == sorted(steps)
    assert min(steps) >= search.best_s
    degrees = [tuple(runner_up.label.partition(",")[0]) for runner_up in found]
    assert len(set(degrees)) == len(degrees)
    assert why_slower(search.best.estimate, search.best.estimate).startswith("0.0% slower")


def test_runners_up_that_do_not_fit_are_cut_again(monkeypatch):
    """Each a second time, when it fits: the answer is made of the same configurations."""
    search = searched(SearchRequest(num_devices=4, global_batch=8, offload="none"))
    assert search.best is not None
    usual = {runner_up.label for runner_up in find_runners_up(search, search.best)}
    tried: list[str] = []

    def fits(_: SearchState, done: EvaluatedPlan) -> bool:
        tried.append(done.configuration.label)
        return tried.count(tried[-1]) > 1

    monkeypatch.setattr(SearchState, "fits", fits)
    found = {runner_up.label for runner_up in find_runners_up(search, search.best)}
    assert found
    assert found <= usual
    assert len(tried) > len(set(tried))
