"""The catalogue of bounds that need no stage boundaries, and the highest of them for a table.

A bound is one function. It returns seconds (or bytes) that no plan of a configuration is below:

    @step_bound
    def longest_block(costs: LeastCosts, config: Configuration) -> float:
        return config.num_microbatches * float(costs.block_s(config.recompute).max())

`tests/search/test_bounds.py` holds every one in the catalogue to that on random plans. Before a
configuration has stage boundaries the search leaves it out where the highest bound of its step is
no less than the best step found, or the highest bound of its memory is over the limit.

Legend, for all of them:

    m   microbatches               pp  pipeline ranks, S stages where each has one
    t_i seconds of block i for a microbatch, forward and backward, recomputation included
    T   seconds of a microbatch through all blocks, with what replicas exchange meanwhile
    U   seconds that all ranks together exchange and update once a step

What the first stage loads of the batch before its first job comes to each (`TableBounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from costmodel.time.stage_costs.load import StageLoad
from planner.language.schedule.job_order import RoundTrips
from profiles.profile import Amount
from search.bounds.least_costs import LeastCosts
from search.bounds.round_trips import pipeline_line
from search.partition.chain_problem import Floats
from search.space.configuration import Configuration, Shape, recompute_choices

Formula = Callable[[LeastCosts, Configuration], float]
"""From a table's least costs and a configuration to seconds or bytes; 0 where it says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A bound by name. With `reads_schedule` it depends on the schedule and holds for one stage a
    rank; without, it is one number for all schedules of a shape, asked once for them.
    """

    name: str
    formula: Formula
    reads_schedule: bool


STEP_BOUNDS: list[Bound] = []
"""Lower bounds of a step, in seconds; filled by `step_bound`."""

MEMORY_BOUNDS: list[Bound] = []
"""Lower bounds of the fullest rank, in bytes; filled by `memory_bound`. None reads the schedule."""


def step_bound(formula: Formula) -> Formula:
    """Register a bound of a step that holds for every schedule and number of stages a rank."""
    STEP_BOUNDS.append(Bound(name=formula.__name__, formula=formula, reads_schedule=False))
    return formula


def schedule_bound(formula: Formula) -> Formula:
    """Register a bound of a step that depends on the schedule; one stage a rank."""
    STEP_BOUNDS.append(Bound(name=formula.__name__, formula=formula, reads_schedule=True))
    return formula


def memory_bound(formula: Formula) -> Formula:
    """Register a bound of the fullest rank's bytes."""
    MEMORY_BOUNDS.append(Bound(name=formula.__name__, formula=formula, reads_schedule=False))
    return formula


@step_bound
def share_of_work(costs: LeastCosts, config: Configuration) -> float:
    """(m T + U) / pp: some rank does at least its share of all work."""
    work_s = config.num_microbatches * costs.microbatch_s(config)
    return (work_s + costs.exchange(config).once_s(config.pp)) / config.pp


@step_bound
def longest_block(costs: LeastCosts, config: Configuration) -> float:
    """A block is not divided, so a rank runs all microbatches of it: m max_i t_i."""
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
    """Ranks wait for round trips through the later stages: c T - d w. c and d follow from the order
    of jobs that the schedule states (`pipeline_line`): (m + pp - 1) / pp and 0 for equal stages of
    1F1B. w: the most of a block's backward that may come after its gradient is sent on.
    """
    m, pp = config.num_microbatches, config.pp
    order = config.order
    if order.splits_backward:
        return 0.0
    early = costs.early_sends(config)
    # Rounded up, so that few different lines are computed.
    part = round(early.part, 6) + 1e-6 if early.part else 0.0
    factor, firsts = pipeline_line(order, pp, m, part)
    return costs.microbatch_s(config) * factor - firsts * early.longest_s


@schedule_bound
def split_round_trips(costs: LeastCosts, config: Configuration) -> float:
    """The same for backwards split in I and W jobs, where W fills part of the waits: the dual of a
    linear program (`zero_bubble`).
    """
    m, pp = config.num_microbatches, config.pp
    order = config.order
    # Its paths need the number of late weight gradients: where that is not stated it says nothing.
    is_stated = order.round_trips is RoundTrips.FIRST_AND_LAST and order.late_weights
    if not is_stated or pp == 1:
        return 0.0
    each_s = costs.exchange(config).each_s(pp)
    return costs.zero_bubble(config).least_step_s(order, m, each_s)


@memory_bound
def share_of_parameters(costs: LeastCosts, config: Configuration) -> float:
    """What a rank needs for 1 / pp of the parameters: some rank holds at least its share. What
    several blocks use counts once, as its users may share a rank.
    """
    names = "param_bytes", "frozen_bytes", "frozen_param_bytes"
    whole = costs.table.whole
    # The load has no activations, so what is recomputed makes no difference.
    load = StageLoad(**{name: float(getattr(whole, name)) / config.pp for name in names})
    return float(costs.rank_bytes(load, config, ("none",)))


@memory_bound
def largest_block(costs: LeastCosts, config: Configuration) -> float:
    """What a rank needs for the largest block and one microbatch of it: a block is not divided."""
    choices = recompute_choices(config.recompute)
    return float(costs.rank_bytes(costs.table.blocks, config, choices).max())


@memory_bound
def backward_of_a_block(costs: LeastCosts, config: Configuration) -> float:
    """What a rank needs for the backward of any block: all that it saves, kept or made again, its
    gradients; and its weights, where these are gathered for it.
    """
    load = costs.table.blocks
    whole: Amount = load.saved_bytes + costs.table.chain.backward_bytes
    if config.replication.is_sharded and config.zero == 3:
        # (Experts may have no replicas to be gathered from.)
        whole = whole + load.param_bytes - load.spread_bytes
    return float(costs.rank_bytes(replace(load, saved_bytes=whole), config, ("none",)).max())


@dataclass(frozen=True, kw_only=True, eq=False)
class TableBounds(LeastCosts):
    """The highest bounds of the configurations that share a table."""

    def least_step_of_shape(self, shape: Shape) -> float:
        """Return a step time that no schedule and no stage boundaries of a shape can beat."""
        of_all = [bound.formula for bound in STEP_BOUNDS if not bound.reads_schedule]
        # These bounds are equal for all schedules; ZeRO stages differ, so the least of them counts.
        any_option = replace(shape, options=shape.options[:1])
        least_s = min(
            max(formula(self, config) for formula in of_all)
            for config in any_option.configurations()
        )
        return least_s + self.table.least_inputs_s(shape)

    def least_step_s(self, config: Configuration) -> float:
        """Return a step time that no stage boundaries can beat, for `vpp` 1."""
        least_s = max(bound.formula(self, config) for bound in STEP_BOUNDS)
        return least_s + self.table.least_inputs_s(config)

    def least_peak_bytes(self, config: Configuration) -> float:
        """Return bytes that the fullest rank of any stage boundaries needs at least."""
        # All configurations of a shape with the same ZeRO stage share it.
        key = "peak", config.degrees, config.pp, config.zero, config.recompute
        return self.once(key, lambda: max(each.formula(self, config) for each in MEMORY_BOUNDS))


@dataclass(frozen=True, kw_only=True, eq=False)
class DividedBounds(TableBounds):
    """Bounds of steps whose blocks are divided once more than the table's: at best they take that
    part of the table's seconds, and replicas exchange as much as with the table.
    """

    parts: int

    def block_s(self, recompute: str) -> Floats:
        """Return each block's least seconds of a microbatch, forward and backward."""
        return super().block_s(recompute) / self.parts
