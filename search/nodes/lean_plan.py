"""Plans of little memory: the leanest there is, and one to show where much does not fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from costmodel.estimate import rank_bytes
from search.bounds.catalogue import TableBounds
from search.branch_and_bound import EvaluatedPlan, evaluated_plan
from search.candidates import Candidates
from search.partition.chain_dp import smallest_peak
from search.priced_configuration import PricedConfiguration
from search.search_state import OfBlocks, SearchState
from search.space.configuration import ButForCopies, Configuration, Shape
from search.stages.stage_table import StageTable, TableKey

MOST_TOO_LARGE = 16
"""So many partitions are found too large before a lean plan is sought, to have one."""
_MOST_TRIES = 32
"""Configurations tried for it; where it is not among the leanest, it is seldom anywhere."""


def note_too_large(search: SearchState) -> None:
    """Count what did not fit. Where much did not and nothing has, take a lean plan that does,
    however slow: it is one to show, and prunes. The best may be long in coming.
    """
    search.num_too_large += 1
    is_free = "" in search.limits and search.request.split_rank is None
    if search.num_too_large == MOST_TOO_LARGE and search.best is None and is_free:
        shapes, limit = search.candidates.shapes(search.request), search.memory_limit_bytes
        lean = find_fitting(search.candidates, shapes, limit, most_tries=_MOST_TRIES)
        if lean is not None:
            search.take(evaluated_plan(lean.configuration, lean.plan, lean.estimate))


def find_leanest(candidates: Candidates, shapes: Sequence[Shape]) -> EvaluatedPlan:
    """Return the plan that needs the fewest bytes on its fullest device.

    Best first by the arithmetic bound: a configuration whose bound is no smaller than the
    least found need not be cut. Interleaved stages are left out: they never need less than the
    same pipeline without.
    """
    best: EvaluatedPlan | None = None
    for bound, _, configuration, table in _by_least_bytes(candidates, shapes):
        limit = best.estimate.peak_bytes if best else math.inf
        if bound >= limit:
            break
        done = _leanest_partition(candidates, configuration, table, limit)
        if done and done.estimate.peak_bytes < limit:
            best = done
    assert best is not None, "without a limit every configuration has a cut"
    return best


def find_fitting(
    candidates: Candidates,
    shapes: Sequence[Shape],
    memory_limit_bytes: float,
    *,
    most_tries: int | None = None,
) -> EvaluatedPlan | None:
    """Return a plan that fits, tried as by `find_leanest`; None where there seems to be none."""
    # Peaks are compared with <, and a plan of just the limit fits.
    limit = math.nextafter(memory_limit_bytes, math.inf)
    for bound, _, configuration, table in _by_least_bytes(candidates, shapes)[:most_tries]:
        if bound >= limit:
            break
        done = _leanest_partition(candidates, configuration, table, limit)
        if done and done.estimate.peak_bytes < limit:
            return done
    return None


def _leanest_partition(
    candidates: Candidates, configuration: Configuration, table: StageTable, limit: float
) -> EvaluatedPlan | None:
    """Return the plan of the partition of the least bytes; None where its bound is no less than a
    limit, or there is none.
    """
    priced = PricedConfiguration(candidates, configuration, table)
    if configuration.vpp == 1:
        cut = smallest_peak(priced.problem(math.inf))
        if cut is not None and cut.value >= limit:
            return None
    else:
        cut = priced.even_cut(math.inf)
    if cut is None:
        return None
    plan = priced.plan(cut)
    # The first rank or the last is mostly the fullest, and quicker to walk than all are.
    ends = sorted({0, plan.pp - 1})
    if limit < math.inf and max(rank_bytes(plan, candidates.costs, ends)) >= limit:
        return None
    return EvaluatedPlan(configuration=configuration, plan=plan, estimate=candidates.estimate(plan))


def _by_least_bytes(
    candidates: Candidates, shapes: Sequence[Shape]
) -> list[tuple[float, int, Configuration, StageTable]]:
    """Return (bound in bytes, order, configuration, table), the smallest bound first.

    Raises LayoutError where no layout does what is asked.
    """
    least: dict[OfBlocks, int] = {}
    for shape in shapes:
        key = shape.block_sizes.degrees
        least[key] = min(shape.microbatch_size, least.get(key, shape.microbatch_size))
    # Activations grow with the microbatch, all else stays.
    small = [shape for shape in shapes if shape.microbatch_size == least[shape.block_sizes.degrees]]
    # More copies of shards are larger shards.
    fewest: dict[ButForCopies, int] = {}
    for shape in small:
        copies, alike = shape.degrees["rp"], shape.but_for_copies
        fewest[alike] = min(copies, fewest.get(alike, copies))
    small = [shape for shape in small if shape.degrees["rp"] == fewest[shape.but_for_copies]]
    every = [configuration for shape in small for configuration in shape.configurations()]
    # Interleaved stages never need less than the same pipeline without: they are the last resort.
    plain = [configuration for configuration in every if configuration.vpp == 1] or every
    bounds: dict[TableKey, TableBounds] = {}
    tries = [
        (
            bounds.setdefault(table.key, TableBounds(table=table)).least_peak_bytes(configuration),
            order,
            configuration,
            table,
        )
        for order, configuration in enumerate(plain)
        for table in candidates.tables(*configuration.block_sizes)
    ]
    if not tries:
        assert candidates.layouts.why_none is not None, "only cp and ep can leave no layout"
        raise candidates.layouts.why_none
    return sorted(tries, key=lambda entry: entry[:2])
