"""The bounds of a step's time in the catalogue.

Legend, for all of them:

    m   microbatches               pp  pipeline ranks, S stages where each has one
    t_i seconds of block i for a microbatch, forward and backward, recomputation included
    T   seconds of a microbatch through all blocks, with what replicas exchange meanwhile
    U   seconds that all ranks together exchange and update once a step

What the first stage loads of the batch before its first job comes to each (`TableBounds`).
"""

from __future__ import annotations

from planner.schedule import RoundTrips, find_schedule
from search.bounds.catalogue import schedule_bound, step_bound
from search.bounds.least_costs import LeastCosts
from search.bounds.pipeline_line import pipeline_line
from search.space.shapes import Configuration


@step_bound
def share_of_work(costs: LeastCosts, config: Configuration) -> float:
    """(m T + U) / pp: some rank does at least its share of all work."""
    work_s = config.num_microbatches * costs.microbatch_s(config)
    return (work_s + costs.exchange(config).once_s(config.pp)) / config.pp


@step_bound
def longest_block(costs: LeastCosts, config: Configuration) -> float:
    """M max_i t_i: a block is not divided, so one rank runs all microbatches of it."""
    seconds = costs.block_s(config.recompute) + costs.exchange(config).each_of_blocks_s
    return config.num_microbatches * float(seconds.max())


@step_bound
def one_microbatch(costs: LeastCosts, config: Configuration) -> float:
    """T - w: a microbatch passes every block, forward and back, one after the other. A gradient
    may leave a stage before some weight gradients there are made (w: those of all blocks but the
    first, behind which no rank waits).
    """
    early_s = costs.early_sends(config).after_first_s if config.pp > 1 else 0.0
    return costs.microbatch_s(config) - early_s


@schedule_bound
def round_trips(costs: LeastCosts, config: Configuration) -> float:
    """C T - d w: ranks wait for round trips through the later stages. c and d follow from the order
    of jobs that the schedule states (`pipeline_line`): (m + pp - 1) / pp and 0 for equal stages of
    1F1B. w: the most of a block's backward that may come after its gradient is sent on.
    """
    m, pp = config.num_microbatches, config.pp
    order = find_schedule(config.schedule).job_order(pp=pp, num_microbatches=m)
    if order.splits_backward:
        return 0.0
    early = costs.early_sends(config)
    # Rounded up, so that few different lines are computed.
    part = round(early.part, 6) + 1e-6 if early.part else 0.0
    factor, firsts = pipeline_line(config.schedule, pp, m, part)
    return costs.microbatch_s(config) * factor - firsts * early.longest_s


@schedule_bound
def split_round_trips(costs: LeastCosts, config: Configuration) -> float:
    """The same for backwards split in I and W jobs, where W fills part of the waits: the dual of a
    linear program (`zero_bubble`).
    """
    m, pp = config.num_microbatches, config.pp
    order = find_schedule(config.schedule).job_order(pp=pp, num_microbatches=m)
    is_stated = order.round_trips is RoundTrips.FIRST_AND_LAST and order.late_weights
    if not is_stated or pp == 1:
        return 0.0
    each_s = costs.exchange(config).each_s(pp)
    return costs.zero_bubble(config).least_step_s(order, m, each_s)
