"""How much a stage recomputes by the exact memory model, where the bound let too little pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from costmodel.estimate import rank_bytes
from search.partition.chain_problem import ChainProblem, Cut, InfeasibleStage
from search.partition.least_recompute import with_recompute
from search.priced_configuration import PricedConfiguration
from search.space.configuration import recompute_choices
from search.space.job_tables import in_flight_of


@dataclass(frozen=True, kw_only=True, eq=False)
class ExactRecompute:
    """The memory of single ranks of a configuration's partitions, walked job by job."""

    priced: PricedConfiguration
    limit_bytes: float
    _walked: dict[tuple, int] = field(default_factory=dict)

    def infeasible(
        self, problem: ChainProblem, cut: Cut, known: InfeasibleStage
    ) -> Iterator[InfeasibleStage]:
        """Yield the choices under which a stage does not fit, the fastest first, until the fastest
        that is left does. `known` says that the cut's own choice does not.
        """
        while True:
            known = self._least(cut, known)
            yield known
            stage = known.stage
            # The next fastest choice that the bound lets
            # pass; it may be another pair, or a whole choice.
            problem = replace(problem, infeasible=(*problem.infeasible, known))
            chosen = with_recompute(problem, cut)
            if chosen is None or self._over(chosen, stage) <= 0:
                return
            cut, known = chosen, replace(known, choice=chosen.choices[stage], until=None)

    def too_low(self, cut: Cut, ranks: Sequence[int]) -> Iterator[InfeasibleStage]:
        """Yield the highest level of recomputation at which ranks with several stages do not fit,
        given that they do not at that of a cut.
        """
        stages = self.priced.interleaved
        of_ranks = stages.levels
        # Invariant, by rank: `low` does not fit, `high` does (or is beyond the highest level).
        low = of_ranks.of_cut(cut.choices, cut.until)
        high, reach = of_ranks.most + 1, 1
        while open_ranks := [rank for rank in ranks if high[rank] - low[rank] > 1]:
            # All ranks at once: a rank's memory depends on its own recomputation alone.
            # The answer is seldom far from the bound's: steps from it double, then halve.
            middle = np.minimum((low + high) // 2, low + reach)
            reach *= 2
            choices, until = of_ranks.of_stages(np.minimum(middle, of_ranks.most))
            plan = self.priced.plan(replace(cut, choices=choices, until=until))
            found = rank_bytes(plan, self.priced.candidates.costs, open_ranks)
            for rank, num_bytes in zip(open_ranks, found, strict=True):
                (low if num_bytes > self.limit_bytes else high)[rank] = middle[rank]
        yield from (stages.too_low(rank, int(low[rank])) for rank in ranks)

    def _least(self, cut: Cut, known: InfeasibleStage) -> InfeasibleStage:
        """Return how far a stage's choice is infeasible: for a pair of choices, before which block
        the heavier may not end.
        """
        over = self._over(cut, known.stage)
        in_flight = in_flight_of(self.priced.configuration)[known.stage]
        edges = self.priced.table.most_edge_bytes(
            known.first,
            known.end,
            in_flight=in_flight,
            receive_ahead=self.priced.candidates.receive_ahead,
        )
        choices = recompute_choices(self.priced.configuration.recompute)
        # A choice of the whole stage has no block to move.
        if known.choice < len(choices):
            return replace(known, and_longer=over > edges)
        partial = self.priced.table.partial(choices)[known.choice - len(choices)]
        # Up to these blocks the run would free more than now.
        steps = partial.steps(known.first, known.end, cut.until[known.stage])

        def over_at(step: int) -> float:
            return self._over(_with_until(cut, known.stage, steps[step]), known.stage)

        # The first step that fits, which is seldom far: more recomputation never needs more memory.
        low, high, reach = 0, len(steps), 1
        freed = partial.freed[known.end] - partial.freed[cut.until[known.stage]]
        # Where the last step frees too little by the bound, its walk mostly spares all others.
        if steps and over > in_flight * freed and (at_last := over_at(high - 1)) > 0:
            low, over = high, at_last
        while low < high:
            middle = min((low + high) // 2, low + reach - 1)
            reach *= 2
            if (still_over := over_at(middle)) > 0:
                low, over = middle + 1, still_over
            else:
                high = middle
        until = steps[low] if low < len(steps) else None
        return replace(known, until=until, and_longer=over > edges)

    def _over(self, cut: Cut, stage: int) -> float:
        """By how many bytes a stage's rank is over the limit."""
        # Two pairs of choices may end in the same recomputation of all blocks.
        key = stage, cut.cuts[stage : stage + 2], self.priced.recompute_of_stage(cut, stage)
        if key not in self._walked:
            plan = self.priced.plan(cut)
            rank = plan.stages[stage].pp_rank
            (self._walked[key],) = rank_bytes(plan, self.priced.candidates.costs, [rank])
        return self._walked[key] - self.limit_bytes


def _with_until(cut: Cut, stage: int, until: int) -> Cut:
    return replace(cut, until=(*cut.until[:stage], until, *cut.until[stage + 1 :]))
