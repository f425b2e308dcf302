"""Configurations made concrete: tables, chain problems, plans and their estimates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise, product

import numpy as np

from costmodel import CostCache, Estimate, estimate
from costmodel.estimate import cost_cache
from costmodel.execution import find_execution
from costmodel.memory.bound import NOTHING, OnHost
from planner.cluster import ClusterSpec
from planner.errors import LayoutError
from planner.graph import ModelGraph
from planner.graph.encoder_decoder import first_decoder_block
from planner.layout.axes import Degrees
from planner.layout.placement import parse_placement
from planner.plan import (
    OURS,
    ClusterRef,
    ModelRef,
    Plan,
    Precision,
    Recompute,
    StagePlan,
    recompute_fields,
)
from planner.plan.defaults import model_ref
from planner.schedule import find_schedule, stage_to_pp_rank
from profiles import Profile
from search.bounds.copied_jobs import CopiedRow
from search.on_host import offload_fallbacks
from search.op_layout.layouts import LayoutSolver
from search.partition.balance import balanced_cut
from search.partition.chain_problem import ChainProblem, Cut, Floats, InfeasibleStage
from search.partition.interleaved import InterleavedStages
from search.partition.least_recompute import with_recompute
from search.partition.quick_step import quick_step_s
from search.request import SearchRequest
from search.space.configuration import Configuration, Shape, recompute_choices
from search.space.job_tables import (
    copied_rows,
    in_flight_of,
)
from search.space.shapes import list_shapes
from search.stages.layout_candidates import LayoutCandidates
from search.stages.rank_stages import RankStages
from search.stages.stage_table import StageTable, TableKey


@dataclass(kw_only=True)
class Candidates:
    """Everything about one model on one machine that configurations share; remembers answers.

    Attributes:
        graph: the model.
        profile: the machine.
        solver: finds layouts of blocks.
        costs: the cost model's prices.
        model_file: where the model came from, as plans name it.
        execution: the runtime that plans are priced for, by name.
        precision: of parameters and their optimizer.
        receive_ahead: jobs that a receive is posted ahead of its use.
        on_host: what plans put on the host.
        cuts: stage boundaries that the request fixes, empty if it does not.
        split_rank: the pp rank that a decoder begins, if the request fixes it.
        given: sizes on axes that a search does not try, as the request gives them.
        group_solvers: of a cluster of several groups of devices, what finds layouts on each; then
            `solver` is that on the first, and so are `costs` but for those of groups in them.
    """

    graph: ModelGraph
    profile: Profile
    solver: LayoutSolver
    costs: CostCache
    execution: str = OURS
    model_file: str = ""
    precision: Precision = "model"
    receive_ahead: int = 2
    on_host: OnHost = NOTHING
    cuts: tuple[int, ...] = ()
    split_rank: int | None = None
    given: Degrees = field(default_factory=Degrees)
    group_solvers: Mapping[str, LayoutSolver] = field(default_factory=dict)
    _group_tables: dict[tuple[int, int, int], tuple[Mapping[str, StageTable], ...]] = field(
        default_factory=dict
    )
    _even_cuts: dict[tuple[TableKey, int], tuple[int, ...]] = field(default_factory=dict)
    _interleaved: dict[tuple[TableKey, str, int, int], InterleavedStages] = field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls,
        graph: ModelGraph,
        profile: Profile,
        request: SearchRequest,
        on_host: OnHost | None = None,
    ) -> Candidates:
        """Return what searches share that ask the same of placements, stages, precision and
        offload; `on_host` is, if not given, what the request tries first.
        """
        if profile.groups:
            _check_groups(profile, request)
        on_host = on_host or offload_fallbacks(request.offload, profile)[0][0]
        costs = cost_cache(
            graph,
            profile,
            request.num_devices,
            execution=find_execution(request.execution),
            clips_gradients=request.clip_gradients,
        )
        pins = {(index, name): parse_placement(text) for index, name, text in request.pins}
        return cls(
            graph=graph,
            profile=profile if profile.groups else costs.profile,
            solver=LayoutSolver(graph=graph, profile=costs.profile, pins=pins),
            group_solvers={
                name: LayoutSolver(graph=graph, profile=own.profile, pins=pins)
                for name, own in costs.groups.items()
            },
            costs=costs,
            execution=request.execution,
            model_file=request.model_file,
            precision=request.precision,
            receive_ahead=request.receive_ahead,
            on_host=on_host,
            cuts=tuple(accumulate(request.balance, initial=0)) if request.balance else (),
            split_rank=request.split_rank,
            given=Degrees(**dict(request.axes)),
        )

    def shapes(self, request: SearchRequest) -> list[Shape]:
        """Return every shape that divides; raise LayoutError when there is none."""
        can_split = self.solver.can_split
        return list_shapes(request, self.graph, self.smallest_nodes, can_split=can_split)

    @property
    def smallest_nodes(self) -> ClusterSpec:
        """The cluster; of several groups that of the smallest nodes, of any number of devices: what
        some axes stay in.
        """
        clusters = [costs.profile.cluster for costs in self.costs.groups.values()]
        if not clusters:
            return self.profile.cluster
        smallest = min(clusters, key=lambda cluster: cluster.devices_per_node)
        return replace(smallest, max_devices=None)

    def limits(self, request: SearchRequest) -> Mapping[str, float]:
        """Return the bytes of a device of each group; by "" where all devices are equal."""
        groups = self.costs.groups or {"": self.costs}
        return {
            name: float(request.memory_limit_bytes or costs.profile.memory_bytes)
            for name, costs in groups.items()
        }

    @property
    def solvers(self) -> Sequence[LayoutSolver]:
        """All that find layouts."""
        return tuple(self.group_solvers.values()) or (self.solver,)

    @cached_property
    def layouts(self) -> LayoutCandidates:
        """The layouts there are, each with its table."""
        return LayoutCandidates(
            solver=self.solver,
            costs=self.costs,
            precision=self.precision,
            on_host=self.on_host,
            given=self.given,
        )

    @cached_property
    def _layouts_of_groups(self) -> Mapping[str, LayoutCandidates]:
        return {
            name: LayoutCandidates(
                solver=solver,
                costs=self.costs.of_group(name),
                precision=self.precision,
                on_host=self.on_host,
                given=self.given,
            )
            for name, solver in self.group_solvers.items()
        }

    def tables_of_groups(
        self, tp: int, microbatch_size: int, cp: int = 1
    ) -> tuple[Mapping[str, StageTable], ...]:
        """Return, for each layout worth trying on any group of devices, its table on every group.

        Stages of equal degrees have one layout, wherever they lie.
        """
        key = tp, microbatch_size, cp
        if key not in self._group_tables:
            found = {
                table.layouts: table
                for layouts in self._layouts_of_groups.values()
                for table in layouts.tables(tp, microbatch_size, cp)
            }
            self._group_tables[key] = tuple(
                {
                    name: StageTable(
                        costs=costs,
                        layouts=layouts,
                        degrees=table.degrees,
                        microbatch_size=microbatch_size,
                        precision=self.precision,
                        on_host=self.on_host,
                    )
                    for name, costs in self.costs.groups.items()
                }
                for layouts, table in found.items()
            )
        return self._group_tables[key]

    def tables(self, tp: int, microbatch_size: int, cp: int = 1) -> tuple[StageTable, ...]:
        """Return one table per layout worth trying at these degrees and microbatch size."""
        return self.layouts.tables(tp, microbatch_size, cp)

    def problem(
        self,
        configuration: Configuration,
        table: StageTable,
        memory_limit_bytes: float,
        *,
        infeasible: tuple[InfeasibleStage, ...] = (),
        is_conservative: bool = False,
        is_mixed: bool = False,
    ) -> ChainProblem:
        """Return the chain problem of a configuration with one stage a rank.

        Without the stages that are known to be infeasible, and with those only that pass the
        conservative memory check, if that is set. Transfers that do not overlap are part of the
        jobs that wait for them, and on the way between stages each counts as the cheapest; where
        neighbours may have other meshes (`is_mixed`), they are on the way alone.
        """
        order = find_schedule(configuration.schedule).job_order(
            pp=configuration.pp, num_microbatches=configuration.num_microbatches
        )
        stages = RankStages(table=table, configuration=configuration, is_mixed=is_mixed)
        forward_s, backward_s, weight_s = stages.least_block_s
        transfer_s, back_transfer_s = table.transfers_s(configuration)
        if stages.pp_group is not None:
            transfer_s, back_transfer_s = _cheapest(transfer_s), _cheapest(back_transfer_s)
        return ChainProblem(
            stages=stages,
            block_forward_s=forward_s,
            block_backward_s=backward_s,
            block_weight_s=weight_s,
            transfer_s=transfer_s,
            back_transfer_s=back_transfer_s,
            in_flight=in_flight_of(configuration),
            num_microbatches=configuration.num_microbatches,
            memory_limit_bytes=memory_limit_bytes,
            order=order,
            start_s=table.least_inputs_s(configuration),
            choices=(*stages.choices, *("partial",) * len(stages.partial)),
            needs=stages.least_needs(memory_limit_bytes),
            cuts=self.cuts,
            infeasible=(*self._kept_apart(configuration.pp, stages.num_choices), *infeasible),
            copied=self._copied(configuration),
            is_conservative=is_conservative,
        )

    def _kept_apart(self, num_stages: int, num_choices: int) -> Iterator[InfeasibleStage]:
        """Yield that no stage holds blocks of both an encoder and a decoder, if that is asked for:
        those before `split_rank` no first block of the decoder, others no last one of the encoder.
        """
        decoder = first_decoder_block(self.graph) if self.split_rank else None
        if decoder is None or self.split_rank is None:
            return
        for stage, choice in product(range(num_stages), range(num_choices)):
            block = decoder if stage < self.split_rank else decoder - 1
            yield InfeasibleStage(
                stage=stage, first=block, end=block + 1, choice=choice, and_longer=True
            )

    def _copied(self, configuration: Configuration) -> tuple[CopiedRow, ...]:
        """Return each rank's jobs beside copies of activations; none where none are made."""
        if not self.on_host.activations:
            return ()
        return copied_rows(*configuration.pipeline)

    def one_stage(
        self,
        configuration: Configuration,
        table: StageTable,
        memory_limit_bytes: float,
        infeasible: tuple[InfeasibleStage, ...] = (),
    ) -> Cut | None:
        """Return the whole chain as one stage, recomputed only if it must be; None if too big."""
        problem = self.problem(configuration, table, memory_limit_bytes, infeasible=infeasible)
        cuts = (0, table.num_blocks)
        cut = with_recompute(problem, Cut(cuts=cuts, choices=(0,), value=0.0))
        if cut is None:
            return None
        return replace(cut, value=self.quick_step_s(configuration, table, cut))

    def interleaved(self, configuration: Configuration, table: StageTable) -> InterleavedStages:
        """Return a configuration's interleaved stages, as even as blocks allow."""
        key = (table.key, configuration.schedule, configuration.pp, configuration.vpp)
        if key not in self._interleaved:
            stages = configuration.pp * configuration.vpp
            if (table.key, stages) not in self._even_cuts:
                seconds = table.forward_s + table.backward_s
                cuts = self.cuts or balanced_cut(seconds.tolist(), stages)
                self._even_cuts[table.key, stages] = cuts
            cuts = self._even_cuts[table.key, stages]
            self._interleaved[key] = InterleavedStages.of(configuration, table, cuts)
        return self._interleaved[key]

    def even_cut(
        self,
        configuration: Configuration,
        table: StageTable,
        memory_limit_bytes: float,
        infeasible: Sequence[InfeasibleStage] = (),
        *,
        ceiling: float = float("inf"),
    ) -> Cut | None:
        """Return the cut of interleaved stages, or None when some rank cannot hold its stages.

        Its value is a bound of the step time of this very cut, the first found at the ceiling or
        above.
        """
        stages = self.interleaved(configuration, table)
        levels = stages.least_levels(configuration, memory_limit_bytes, infeasible)
        if levels is None:
            return None
        choices, until = stages.levels(configuration).of_stages(levels)
        cut = Cut(cuts=stages.cuts, choices=choices, until=until, value=0.0)
        recomputed = recompute_by_block(configuration, table, cut)
        bound = stages.least_step_s(configuration, recomputed)
        if bound < ceiling:
            bound = stages.step_bound(configuration, recomputed)
        if bound < ceiling and self.on_host.activations:
            bound = stages.step_bound(configuration, recomputed, self._copied(configuration))
        return replace(cut, value=bound)

    def infeasible_ranks(
        self,
        configuration: Configuration,
        table: StageTable,
        cut: Cut,
        memory_limit_bytes: float,
    ) -> tuple[InfeasibleStage, ...]:
        """Return stages of an even cut whose ranks cannot hold what their job table has alive."""
        stages = self.interleaved(configuration, table)
        levels = stages.levels(configuration).of_cut(cut.choices, cut.until)
        return stages.levels_too_low(configuration, levels, memory_limit_bytes)

    def seems_to_fit(
        self, configuration: Configuration, table: StageTable, cut: Cut, memory_limit_bytes: float
    ) -> bool:
        """Whether an even cut fits as far as can be guessed without an estimate."""
        guess = self.interleaved(configuration, table).guess_bytes(
            configuration, recompute_by_block(configuration, table, cut)
        )
        return bool((guess <= memory_limit_bytes).all())

    def quick_step_s(self, configuration: Configuration, table: StageTable, cut: Cut) -> float:
        """Return the simulated step time without making a plan."""
        return quick_step_s(
            configuration, table, cut, recompute_by_block(configuration, table, cut)
        )

    def plan(self, configuration: Configuration, table: StageTable, cut: Cut) -> Plan:
        """Return the plan, without its estimate."""
        by_block = recompute_by_block(configuration, table, cut)
        homes = stage_to_pp_rank(configuration.schedule, configuration.pp, configuration.vpp)
        return Plan(
            model=self.model,
            cluster=ClusterRef(
                name=self.profile.name,
                device=", ".join(
                    dict.fromkeys(
                        costs.profile.cluster.device
                        for costs in self.costs.groups.values() or (self.costs,)
                    )
                ),
                devices_per_node=self.smallest_nodes.devices_per_node,
            ),
            degrees=configuration.degrees,
            pp=configuration.pp,
            vpp=configuration.vpp,
            microbatch_size=configuration.microbatch_size,
            num_microbatches=configuration.num_microbatches,
            schedule=configuration.schedule,
            precision=self.precision,
            execution=self.execution,
            receive_ahead=self.receive_ahead,
            optimizer_on_host=self.on_host.optimizer,
            zero_stage=configuration.zero,  # type: ignore[arg-type]
            stages=tuple(
                StagePlan(
                    pp_rank=homes[stage],
                    first_block=first,
                    last_block=end - 1,
                    activations_on_host=self.on_host.activations,
                    **recompute_fields(by_block[first:end], first_block=first),
                )
                for stage, (first, end) in enumerate(pairwise(cut.cuts))
            ),
            layouts=table.layouts,
        )

    @cached_property
    def model(self) -> ModelRef:
        """How plans name the model."""
        return model_ref(self.graph, file=self.model_file)

    def estimate(self, plan: Plan) -> Estimate:
        """Return the cost model's answer for a plan."""
        return estimate(self.graph, self.profile, plan, costs=self.costs)


def recompute_by_block(
    configuration: Configuration, table: StageTable, cut: Cut
) -> tuple[Recompute, ...]:
    """Return what each block recomputes under a cut."""
    choices = recompute_choices(configuration.recompute)
    by_block: list[Recompute] = []
    for stage, (choice, (first, end)) in enumerate(
        zip(cut.choices, pairwise(cut.cuts), strict=True)
    ):
        if choice < len(choices):
            by_block += [choices[choice]] * (end - first)
        else:
            partial = table.partial(choices)[choice - len(choices)]
            by_block += partial.by_block(first, end, cut.until[stage])
    return tuple(by_block)


def _check_groups(profile: Profile, request: SearchRequest) -> None:
    """Raise LayoutError for a request that a cluster of several groups of devices cannot meet."""
    counts = [group.num_devices for group in profile.groups]
    if request.num_devices != sum(counts):
        raise LayoutError(
            f"`num_devices` {request.num_devices} was given; the groups of cluster "
            f"{profile.name!r} have {' + '.join(map(str, counts))}, and plans use all of them: "
            f"give {sum(counts)}, or write a file of fewer nodes"
        )


def _cheapest(transfer_s: Floats) -> Floats:
    """Return the cheapest transfer inside a chain for each place in it (n + 1)."""
    inside = transfer_s[1:-1]
    return np.minimum(transfer_s, inside.min()) if len(inside) else transfer_s


def with_estimate(plan: Plan, answer: Estimate) -> Plan:
    """Return the plan with the estimate's parts written in."""
    return plan.model_copy(update={"estimate": answer.to_dict()})
