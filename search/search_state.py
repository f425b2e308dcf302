"""The state of one search: the queue, and what nodes of one request share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from search.branch_and_bound import BranchAndBound, EvaluatedPlan, Node, Wave
from search.candidates import Candidates
from search.request import SearchRequest
from search.warm_start import WarmStart


@dataclass(kw_only=True)
class SearchState(BranchAndBound):
    """A branch and bound over the plans of one request.

    Attributes:
        candidates: prices of the model on the machine.
        request: what the user fixed and allowed.
        memory_limit_bytes: of one device.
        every_size: whether larger microbatches are tried even where they are no faster.
        warm_start: bounds and plans of earlier searches under more memory.
        num_other_partitions: plans evaluated beside the best partition of a configuration.
        per_sample_s: least seconds of one sample through all blocks, by (cp, tp).
        least_per_sample_s: the same, with layouts that were pruned before they were priced.
        skipped_sizes: (cp, tp, microbatch size) that a rule left out.
        infeasible_in_flight: microbatches in flight of each stage with which no partition fits,
            by all else that memory depends on.
    """

    candidates: Candidates
    request: SearchRequest
    memory_limit_bytes: float
    every_size: bool = False
    warm_start: WarmStart = field(default_factory=WarmStart)
    num_other_partitions: int = 0
    per_sample_s: dict[tuple[int, int], float] = field(default_factory=dict)
    least_per_sample_s: dict[tuple[int, int], float] = field(default_factory=dict)
    skipped_sizes: set[tuple[int, int, int]] = field(default_factory=set)
    infeasible_in_flight: dict[tuple, list[tuple[int, ...]]] = field(default_factory=dict)


Outcomes = Iterator[Node[SearchState] | EvaluatedPlan]
"""What a node is refined to."""

# Waves, in the order of the search. Plans without cp come before those with it, and plans without
# a pipeline before those with one: they are the quicker to evaluate. What closes the gap of
# evaluated configurations, and what mixes the meshes of stages, needs a good plan to prune with.
PARTITIONS: Wave = (2,)
MIXES: Wave = (3,)
MIXED_PARTITIONS: Wave = (4,)


def degrees_wave(cp: int) -> Wave:
    """Return the wave of all shapes with or without cp."""
    return (int(cp > 1),)


def sizes_wave(cp: int, tp: int) -> Wave:
    """Return the wave in which the microbatch sizes of these degrees are priced."""
    return (int(cp > 1), 0, cp, tp, 0)


def shapes_wave(cp: int, tp: int, pp: int) -> Wave:
    """Return the wave of these degrees' configurations."""
    return (int(cp > 1), 0, cp, tp, 1) if pp == 1 else (int(cp > 1), 1)
