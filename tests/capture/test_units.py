"""Samples that belong together are found at capture, and parts that keep them whole learn alike."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.capture import capture_source
from planner.errors import CaptureError, ModelError
from planner.language.across import across_samples
from planner.language.graph import SAMPLE, Affine, ModelGraph, Size, Unit, from_json, to_json
from tests.units import (
    NO_UNITS,
    UNITS,
    Body,
    Model,
    batch,
    build,
    chunked,
    compared,
    groups,
    labels_of_pairs,
    source,
)

QUICK = 5
"""Of the units so many are looked for in the quick tests, all in the slow ones."""


BODIES = [
    pytest.param(body, marks=() if number < QUICK else pytest.mark.slow)
    for number, body in enumerate(UNITS)
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_unit_is_found(body: Body):
    """The smallest unit by which no samples meet, with the line that shows it."""
    graph = capture_source(source(body))
    assert graph.unit == UNITS[body]
    assert across_samples(graph) == ()
    assert "tests/units.py:" in graph.unit.shown_by
    assert _shape(graph, "x")[0] == Affine(graph.unit.size)
    # (Parts of a mean over labels count by these, which an engine does: tests/runtime/test_units.)
    by_samples = body is not labels_of_pairs
    assert not by_samples or _gap_of_parts(body, graph.unit) < 1e-12
    if graph.unit.runs > 1:
        assert _gap_of_parts(body, replace(graph.unit, runs=1)) > 1e-3


@pytest.mark.parametrize("body", NO_UNITS, ids=lambda body: body.__name__)
def test_no_unit_is_found(body: Body):
    """Where samples are alone, or all of them meet, each stays one sample."""
    assert capture_source(source(body)).unit == SAMPLE


def test_halves_that_meet_in_whole():
    """Halves need an even number of samples, and yet no pair is apart from the others."""
    graph = capture_source(source(compared))
    assert graph.unit.size == 2
    assert {finding.kind for finding in across_samples(graph)} & {"pairs", "mixed"}


def _shape(graph: ModelGraph, path: str) -> tuple[Size, ...]:
    return next(graph.tensor[n].shape for n in graph.batch_inputs if graph.tensor[n].fqn == path)


def _gap_of_parts(body: Body, unit: Unit) -> float:
    """The largest difference of a gradient: a batch whole, and in two parts of units."""
    whole = build(body).double()
    parts = copy.deepcopy(whole)
    size = 6 * unit.size
    given = batch(size, torch.float64)
    whole(**given).backward()
    places = torch.arange(size).view(unit.runs, 6, unit.size // unit.runs)
    for own in (places[:, :2], places[:, 2:]):
        loss = parts(**{name: t[own.reshape(-1)] for name, t in given.items()})
        (loss * own.numel() / size).backward()
    return max(
        (a.grad - b.grad).abs().max().item()
        for a, b in zip(whole.parameters(), parts.parameters(), strict=True)
        if a.grad is not None
    )


@pytest.mark.parametrize(("body", "sizes"), [(0, [2, 3]), (3, [2, 3])])
def test_a_model_without_signs_of_units_is_captured_once(body: int, sizes: list[int]):
    """Other units are tried where an op takes samples apart, of the size that it says."""
    asked: list[int] = []

    def watched(size: int):
        asked.append(size)
        return batch(size)

    capture_source(source(NO_UNITS[body], watched))
    assert asked == sizes


def test_a_batch_of_whole_units_alone():
    """A batch() that takes no odd number of samples still shows its pairs."""

    def pairs(size: int):
        assert size % 2 == 0, "give an even number"
        return batch(size)

    assert capture_source(source(chunked, pairs)).unit == UNITS[chunked]

    def rounded(size: int):
        return batch(size - size % 4)

    assert capture_source(source(groups, rounded)).unit == UNITS[groups]


def test_what_no_unit_mends_is_told_as_before():
    """The first failure is raised: of the sizes that everyone tries."""

    def branches(x, v, r):
        return v.mean() if v.sum() > 0 else r.mean()

    with pytest.raises(CaptureError, match="depends on a tensor's values"):
        capture_source(source(branches))

    def wrong(x, v, r):
        return (x @ torch.zeros(3)).mean()

    with pytest.raises(CaptureError, match=r"test_units\.py:.*torch.export says RuntimeError"):
        capture_source(source(wrong))

    def no_batch(size: int):
        raise KeyError("data")

    with pytest.raises(ModelError, match=r"the example batch\(2\) failed"):
        capture_source(source(chunked, no_batch))


class _Neighbours(nn.Module):
    """Adds to each sample what its neighbour has, as values tell it."""

    def forward(self, v):
        if bool((v > 1e6).any()):
            return v
        pair = torch.arange(len(v), device=v.device) // 2
        return v + torch.zeros(len(v), device=v.device).index_add(0, pair, v)[pair]


class _PairsOfNeighbours(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.neighbours = Model(lambda x, v, r: v), _Neighbours()

    def forward(self, x, rewards):
        a, b = self.neighbours(self.inner(x, rewards)).chunk(2)
        return (a - b).square().mean()


def test_a_module_that_depends_on_values_is_tried_by_sample():
    """The size of a unit does not tell which samples are neighbours, so it may mix none."""
    graph = capture_source(replace(source(chunked), build=_PairsOfNeighbours))
    assert graph.unit == SAMPLE
    assert "_Neighbours" in {finding.op.rpartition(".")[2] for finding in across_samples(graph)}


class _OncePerPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(lambda x, v, r: v)

    def forward(self, x, margin):
        chosen, rejected = self.inner(x, margin).chunk(2)
        return -nn.functional.logsigmoid(chosen - rejected - margin).mean()


def test_a_label_for_each_pair():
    """A tensor of the batch with one row a unit is in order, beside those in several runs."""

    def pairs(size: int):
        return {"x": batch(size)["x"], "margin": batch(size)["rewards"][: size // 2]}

    given = replace(source(chunked, pairs), build=_OncePerPair)
    graph = capture_source(given)
    assert graph.unit == Unit(size=2, runs=2)
    assert _shape(graph, "margin") == (Affine(1),)
    assert across_samples(graph) == ()


def test_samples_that_are_pairs_with_stacked_halves():
    """A script that counts pairs makes two rows of each: a pair is a sample, in two runs."""

    def pairs(size: int):
        return {"x": batch(2 * size)["x"], "margin": batch(size)["rewards"]}

    graph = capture_source(replace(source(chunked, pairs), build=_OncePerPair))
    assert graph.unit == Unit(size=1, runs=2)
    assert (_shape(graph, "x")[0], _shape(graph, "margin")[0]) == (Affine(2), Affine(1))
    assert across_samples(graph) == ()
    assert graph.unit.told.startswith("each sample has rows in 2 equal parts of the batch, stacked")
    assert graph.fingerprint != replace(graph, unit=SAMPLE).fingerprint


def test_a_failure_that_is_not_of_sizes_is_told_at_once(monkeypatch):
    """A model that runs on both batches, and can't be captured, is captured once."""
    asked: list[int] = []

    def watched(size: int):
        asked.append(size)
        return batch(size)

    def fails(*args, **kwargs):
        raise RuntimeError("an export that fails")

    monkeypatch.setattr(torch.export, "export", fails)
    with pytest.raises(CaptureError, match="an export that fails"):
        capture_source(source(NO_UNITS[0], watched))
    assert asked == [2, 3]


def test_a_graph_with_units_survives_json():
    """Its fingerprint tells units apart; that of other graphs is what it was without."""
    graph = capture_source(source(chunked))
    again = from_json(to_json(graph))
    assert again == graph
    assert again.unit.shown_by == graph.unit.shown_by
    alone, stacked = (replace(graph, unit=Unit(size=2, runs=runs)) for runs in (1, 2))
    assert graph.fingerprint == stacked.fingerprint != alone.fingerprint
    assert "unit" not in to_json(replace(graph, unit=SAMPLE))
