"""A configuration with its layouts: its chain problem, its cuts, their steps and plans.

problem, only_cut   what the partition phase solves, or the one cut there is
quick_step_s        the simulated step of a cut
plan                a cut as a plan, for the cost model to estimate
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise, product

import numpy as np

from planner.language.graph.encoder_decoder import first_decoder_block
from planner.language.plan import Plan, Recompute, StagePlan, kernels_of, recompute_fields
from planner.language.schedule.registry import stage_to_pp_rank
from search.bounds.copied_jobs import CopiedRow
from search.candidates import Candidates
from search.partition.chain_problem import ChainProblem, Cut, Floats, InfeasibleStage
from search.partition.interleaved import InterleavedStages
from search.partition.least_recompute import with_recompute
from search.partition.quick_step import quick_step_s
from search.space.configuration import Configuration, recompute_choices
from search.space.job_tables import copied_rows, whole_in_flight_of
from search.stages.rank_stages import RankStages
from search.stages.stage_table import StageTable


@dataclass(frozen=True, eq=False)
class PricedConfiguration:
    """A configuration of one model on one machine, with the layouts of a table."""

    candidates: Candidates
    configuration: Configuration
    table: StageTable

    def problem(
        self,
        memory_limit_bytes: float,
        *,
        infeasible: tuple[InfeasibleStage, ...] = (),
        is_mixed: bool = False,
    ) -> ChainProblem:
        """Return the chain problem of a configuration with one stage a rank.

        Without the stages that are known to be infeasible. Transfers that do not overlap are part
        of the jobs that wait for them, and on the way between stages each counts as the cheapest;
        where neighbours may have other meshes (`is_mixed`), they are on the way alone.
        """
        configuration, table = self.configuration, self.table
        stages = RankStages(table=table, configuration=configuration, is_mixed=is_mixed)
        forward_s, backward_s, weight_s = stages.least_block_s
        transfer_s, back_transfer_s = table.transfers_s(configuration)
        # Where jobs wait for transfers, these are in the jobs; between stages the cheapest bounds.
        if stages.pp_group is not None:
            transfer_s, back_transfer_s = _cheapest(transfer_s), _cheapest(back_transfer_s)
        return ChainProblem(
            stages=stages,
            block_forward_s=forward_s,
            block_backward_s=backward_s,
            block_weight_s=weight_s,
            transfer_s=transfer_s,
            back_transfer_s=back_transfer_s,
            in_flight=whole_in_flight_of(configuration),
            num_microbatches=configuration.num_microbatches,
            memory_limit_bytes=memory_limit_bytes,
            # Of other meshes some may have weight gradients to defer, even if this one has none.
            order=configuration.stated_order if is_mixed else configuration.order,
            start_s=table.least_inputs_s(configuration),
            choices=(*stages.choices, *("partial",) * len(stages.partial)),
            needs=stages.least_needs(memory_limit_bytes),
            cuts=self.candidates.cuts_of(configuration.pp),
            starts=self.candidates.starts,
            infeasible=(*self._kept_apart(stages.num_choices), *infeasible),
            copied=self._copied,
        )

    def _kept_apart(self, num_choices: int) -> Iterator[InfeasibleStage]:
        """Yield that no stage holds blocks of both an encoder and a decoder, if that is asked for:
        those before `split_rank` no first block of the decoder, others no last one of the encoder.
        """
        split_rank = self.candidates.split_rank
        decoder = first_decoder_block(self.candidates.graph) if split_rank else None
        if decoder is None or split_rank is None:
            return
        for stage, choice in product(range(self.configuration.pp), range(num_choices)):
            # With `and_longer` no run that holds this block fits, which keeps the two apart.
            block = decoder if stage < split_rank else decoder - 1
            yield InfeasibleStage(
                stage=stage, first=block, end=block + 1, choice=choice, and_longer=True
            )

    @property
    def _copied(self) -> tuple[CopiedRow, ...]:
        """Each rank's jobs beside copies of activations; none where none are made."""
        if not self.table.on_host.activations:
            return ()
        return copied_rows(self.configuration.pipeline)

    @cached_property
    def interleaved(self) -> InterleavedStages:
        """The configuration's interleaved stages, as even as blocks allow."""
        return self.candidates.interleaved(self.configuration, self.table)

    def only_cut(
        self,
        memory_limit_bytes: float,
        infeasible: tuple[InfeasibleStage, ...] = (),
        *,
        ceiling: float = float("inf"),
    ) -> Cut | None:
        """Return the cut there is to try of a single stage, or of interleaved stages; None if it
        does not fit.
        """
        if self.configuration.vpp > 1:
            return self.even_cut(memory_limit_bytes, infeasible, ceiling=ceiling)
        problem = self.problem(memory_limit_bytes, infeasible=infeasible)
        whole = Cut(cuts=(0, self.table.num_blocks), choices=(0,), value=0.0)
        cut = with_recompute(problem, whole)
        return cut and replace(cut, value=self.quick_step_s(cut))

    def even_cut(
        self,
        memory_limit_bytes: float,
        infeasible: tuple[InfeasibleStage, ...] = (),
        *,
        ceiling: float = float("inf"),
    ) -> Cut | None:
        """Return the cut of interleaved stages, or None when some rank cannot hold its stages.

        Its value is a bound of the step time of this very cut, the first found at the ceiling or
        above.
        """
        stages = self.interleaved
        levels = stages.least_levels(memory_limit_bytes, infeasible)
        if levels is None:
            return None
        # Cheap bounds first, each higher than the one before; the first at the ceiling prunes.
        again_s = stages.levels.again_s(levels)
        bound = stages.least_recomputed_s(again_s)
        if bound < ceiling:
            bound = stages.step_bound(again_s)
        choices, until = stages.levels.of_stages(levels)
        cut = Cut(cuts=stages.cut.cuts, choices=choices, until=until, value=bound)
        if bound < ceiling and self._copied:
            bound = stages.copied_bound(self.recompute_by_block(cut), self._copied)
            cut = replace(cut, value=bound)
        return cut

    def infeasible_ranks(self, cut: Cut, memory_limit_bytes: float) -> tuple[InfeasibleStage, ...]:
        """Return stages of an even cut whose ranks cannot hold what their job table has alive."""
        levels = self.interleaved.levels.of_cut(cut.choices, cut.until)
        return self.interleaved.levels_too_low(levels, memory_limit_bytes)

    def quick_step_s(self, cut: Cut) -> float:
        """Return the simulated step time without making a plan."""
        return quick_step_s(self.configuration, self.table, cut, self.recompute_by_block(cut))

    def plan(self, cut: Cut) -> Plan:
        """Return the plan, without its estimate."""
        configuration, candidates = self.configuration, self.candidates
        by_block = self.recompute_by_block(cut)
        homes = stage_to_pp_rank(configuration.schedule, configuration.pp, configuration.vpp)
        groups = configuration.device_groups or ("",) * len(homes)
        return Plan(
            model=candidates.model,
            cluster=candidates.cluster_ref,
            degrees=configuration.degrees,
            pp=configuration.pp,
            vpp=configuration.vpp,
            microbatch_size=configuration.microbatch_size * configuration.unit,
            num_microbatches=configuration.num_microbatches,
            shares=tuple(share * configuration.unit for share in configuration.shares),
            schedule=configuration.schedule,
            precision=self.table.precision,
            kernels=kernels_of(candidates.costs.execution.name),
            execution=candidates.costs.execution.name,
            overlap="input-gradients" if self.table.beside else "none",
            gather_pieces=self.table.pieces,
            logit_rows=self.table.logit_rows,
            receive_ahead=candidates.receive_ahead,
            optimizer_on_host=self.table.on_host.optimizer,
            tables_on_host=candidates.tables_on_host,
            zero_stage=configuration.zero,  # type: ignore[arg-type]
            stages=tuple(
                StagePlan(
                    pp_rank=homes[stage],
                    device_group=groups[stage],
                    first_block=first,
                    last_block=end - 1,
                    activations_on_host=self.table.on_host.activations,
                    **recompute_fields(by_block[first:end], first_block=first),
                )
                for stage, (first, end) in enumerate(pairwise(cut.cuts))
            ),
            layouts=self.table.layouts,
            accept=candidates.accept,
        )

    def recompute_by_block(self, cut: Cut) -> tuple[Recompute, ...]:
        """Return what each block recomputes under a cut."""
        stages = range(len(cut.choices))
        return tuple(chain.from_iterable(self.recompute_of_stage(cut, stage) for stage in stages))

    def recompute_of_stage(self, cut: Cut, stage: int) -> tuple[Recompute, ...]:
        """Return what each block of a stage recomputes under a cut."""
        choices = recompute_choices(self.configuration.recompute)
        choice, first, end = cut.choices[stage], cut.cuts[stage], cut.cuts[stage + 1]
        if choice < len(choices):
            return (choices[choice],) * (end - first)
        partial = self.table.partial(choices)[choice - len(choices)]
        return partial.by_block(first, end, cut.until[stage])


def _cheapest(transfer_s: Floats) -> Floats:
    """Return the cheapest transfer inside a chain for each place in it (n + 1)."""
    inside = transfer_s[1:-1]
    return np.minimum(transfer_s, inside.min()) if len(inside) else transfer_s
