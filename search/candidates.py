"""What all configurations of one model on one machine share: layouts, tables, estimates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from costmodel import CostCache, Estimate, estimate
from costmodel.estimate import cost_cache
from costmodel.execution import find_execution
from costmodel.memory.bound import OnHost
from planner.cluster import ClusterSpec
from planner.errors import LayoutError
from planner.language.across.cut.whole_batch import Across, run_whole, unaccepted
from planner.language.graph import ModelGraph
from planner.language.graph.tables import with_table_lookups
from planner.language.layout.axes import Degrees
from planner.language.layout.placement import Placement, parse_placement
from planner.language.lowering.defaults import model_ref
from planner.language.plan import ClusterRef, ModelRef, Plan
from planner.language.stacks import Expressed, expressed_of
from planner.language.stacks.tensor_parallel import dim_of
from profiles import Profile
from search.ilp import check_ortools
from search.on_host import offload_fallbacks, tables_to_host
from search.op_layout.layouts import LayoutSolver
from search.partition.balance import balanced_cut
from search.partition.interleaved import EvenCut, InterleavedStages
from search.request import SearchRequest
from search.space.configuration import BlockSizes, Configuration, Shape
from search.space.shapes import Space, list_shapes, space_of
from search.stages.layout_candidates import LayoutCandidates
from search.stages.logit_rows import check_chunks, least_logit_bytes
from search.stages.rank_stages import RankStages
from search.stages.stage_table import StageTable, TableKey


@dataclass(kw_only=True)
class Candidates:
    """Everything about one model on one machine that configurations share; remembers answers.

    Attributes:
        graph: the model as plans run it, with tables on the host where they have any there.
        captured: the model as it was captured; None: the same.
        tables_on_host: these tables.
        profile: the machine.
        costs: the cost model's prices.
        layouts: the layouts there are, each with its table.
        group_layouts: of a cluster of several groups of devices, those on each; then `layouts` are
            those on the first, and so are `costs` but for those of groups in them.
        model_file: where the model came from, as plans name it.
        receive_ahead: jobs that a receive is posted ahead of its use.
        accept: what users accept of a batch that is cut, copied into plans.
        cuts: stage boundaries that the request fixes, empty if it does not.
        split_rank: the pp rank that a decoder begins, if the request fixes it.
        expressed: what the stack expresses that plans are for; None: everything.
    """

    graph: ModelGraph
    profile: Profile
    costs: CostCache
    layouts: LayoutCandidates
    captured: ModelGraph | None = None
    tables_on_host: tuple[str, ...] = ()
    group_layouts: Mapping[str, LayoutCandidates] = field(default_factory=dict)
    model_file: str = ""
    receive_ahead: int = 2
    accept: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()
    split_rank: int | None = None
    expressed: Expressed | None = None
    _group_tables: dict[BlockSizes, tuple[Mapping[str, StageTable], ...]] = field(
        default_factory=dict
    )
    """Tables of each layout on each group of devices."""
    _even_cuts: dict[tuple[TableKey, int], tuple[int, ...]] = field(default_factory=dict)
    """The most even stage boundaries, by table and number of stages."""
    _even_stages: dict[tuple[TableKey, str, int, int, bool], EvenCut] = field(default_factory=dict)
    """Interleaved stages, by table, schedule, pp, vpp and whether hosts poll for messages."""

    @classmethod
    def of(
        cls,
        graph: ModelGraph,
        profile: Profile,
        request: SearchRequest,
        on_host: OnHost | None = None,
    ) -> Candidates:
        """Return what searches of equal pins, solver, stage boundaries and precision share.

        `on_host` is what their plans put on the host; None: what the request tries first.
        """
        if profile.groups:
            _check_groups(profile, request)
        expressed = expressed_of(request.execution, graph, request.accept)
        if profile.groups and expressed is not None:
            raise LayoutError(
                f"cluster {profile.name!r} has several groups of devices, and "
                f"{expressed.stack.title} plans for equal ones; plan for another `execution`"
            )
        on_host = on_host or offload_fallbacks(request.offload, profile, graph, expressed)[0][0]
        captured, tables = graph, tables_to_host(graph) if on_host.tables else ()
        # What keeps the batch whole leaves all plans one microbatch.
        graph = run_whole(graph, request.global_batch, num_microbatches=1, accept=request.accept)
        graph = with_table_lookups(graph, tables)
        costs = cost_cache(
            graph,
            profile,
            request.num_devices,
            execution=find_execution(request.execution),
            clips_gradients=request.clip_gradients,
            imbalance=request.imbalance(profile),
        )
        if request.solver == "ilp":
            check_ortools()
        if request.logits == "chunked":
            check_chunks(costs)
        pins = {(index, name): parse_placement(text) for index, name, text in request.pins}
        if expressed is not None:
            _check_pins(expressed, pins)

        def layouts(costs: CostCache, profile: Profile) -> LayoutCandidates:
            solver = LayoutSolver(
                graph=graph,
                profile=profile,
                pins=pins,
                usual=None if expressed is None else expressed.usual,
                prefers_ilp=request.solver == "ilp",
            )
            return LayoutCandidates(
                solver=solver,
                costs=costs,
                precision=request.precision,
                on_host=on_host,
                given=Degrees(**dict(request.axes)),
                expressed=expressed,
                # Compiled graphs have an order of their own; other runtimes, theirs.
                beside=request.overlap == "auto",
                # (A choice for the whole plan, which stages that choose for themselves lack.)
                logits="whole" if request.meshes == "own" or profile.groups else request.logits,
                least_logit_bytes=least_logit_bytes(request, profile),
            )

        return cls(
            graph=graph,
            captured=captured,
            tables_on_host=tables,
            profile=profile if profile.groups else costs.profile,
            costs=costs,
            layouts=layouts(costs, costs.profile),
            group_layouts={
                name: layouts(costs.of_group(name), own.profile)
                for name, own in costs.groups.items()
            },
            model_file=request.model_file,
            receive_ahead=request.receive_ahead,
            accept=request.accept,
            cuts=tuple(accumulate(request.balance, initial=0)) if request.balance else (),
            expressed=expressed,
            split_rank=request.split_rank,
        )

    def under(self, request: SearchRequest) -> Candidates:
        """Return those of a request that may differ in its limit of memory: which logits are worth
        making in chunks depends on it.
        """
        layouts = self.layouts.under(least_logit_bytes(request, self.layouts.costs.profile))
        return self if layouts is self.layouts else replace(self, layouts=layouts)

    def shapes(self, request: SearchRequest) -> list[Shape]:
        """Return every shape that divides; raise LayoutError when there is none."""
        return list_shapes(self._space(request), self._space)

    def has_shapes(self, request: SearchRequest) -> bool:
        """Whether any shape divides: without the advice of a refusal, which tries requests."""
        try:
            return self._space(request).has_shapes()
        except LayoutError:
            return False

    def _space(self, request: SearchRequest) -> Space:
        return space_of(
            request,
            self.graph,
            self.smallest_nodes,
            can_split=self.layouts.solver.can_split,
            across=self.across_samples,
            expressed=self.expressed,
            on_host=("optimizer-on-host",) if self.layouts.on_host.optimizer else (),
        )

    @cached_property
    def across_samples(self) -> Across:
        """What keeps the batch whole: where the model computes across samples, unaccepted."""
        return unaccepted(self.captured or self.graph, self.accept)

    @property
    def smallest_nodes(self) -> ClusterSpec:
        """The cluster; of several groups that of the smallest nodes, of any number of devices: what
        some axes stay in.
        """
        clusters = [costs.profile.cluster for costs in self.costs.groups.values()]
        if not clusters:
            return self.profile.cluster
        # What stays in a node has to stay in the smallest node of any group.
        smallest = min(clusters, key=lambda cluster: cluster.devices_per_node)
        return replace(smallest, max_devices=None)

    @property
    def _nodes_of_groups(self) -> tuple[tuple[str, int, int], ...]:
        """Of each group of devices: its name, devices of a node, nodes."""
        sizes = {
            name: costs.profile.cluster.devices_per_node
            for name, costs in self.costs.groups.items()
        }
        return tuple(
            (name, each, self.costs.group_sizes[name] // each) for name, each in sizes.items()
        )

    def limits(self, request: SearchRequest) -> Mapping[str, float]:
        """Return the bytes of a device of each group; by "" where all devices are equal."""
        groups = self.costs.groups or {"": self.costs}
        return {name: request.limit_bytes(costs.profile) for name, costs in groups.items()}

    @property
    def solvers(self) -> Sequence[LayoutSolver]:
        """All that find layouts."""
        every = self.group_layouts.values() or (self.layouts,)
        return [layouts.solver for layouts in every]

    def tables_of_groups(
        self, tp: int, microbatch_size: int, *others: int
    ) -> tuple[Mapping[str, StageTable], ...]:
        """Return, for each layout worth trying on any group of devices, its table on every group.

        Stages of equal degrees have one layout, wherever they lie. `others` are of `BlockSizes`.
        """
        key = BlockSizes(tp, microbatch_size, *others)
        if key not in self._group_tables:
            found = {
                table.layouts: table
                for layouts in self.group_layouts.values()
                for table in layouts.at(*key).tables
            }
            self._group_tables[key] = tuple(
                # A layout of one group is tried on all: stages of equal degrees have equal layouts.
                {name: replace(table, costs=costs) for name, costs in self.costs.groups.items()}
                for table in found.values()
            )
        return self._group_tables[key]

    def tables_of_parts(
        self, tp: int, microbatch_size: int, *others: int, pp: int
    ) -> Iterator[Mapping[str, StageTable]]:
        """Yield the same for pipelines that have a part of each of `pp` stages on every group."""
        for tables in self.tables_of_groups(tp, microbatch_size, *others):
            yield {
                name: replace(table, costs=table.costs.part(self.costs.group_sizes[name] // pp))
                for name, table in tables.items()
            }

    def tables(self, tp: int, microbatch_size: int, *others: int) -> tuple[StageTable, ...]:
        """Return one table per layout worth trying at these sizes (`BlockSizes`)."""
        return self.layouts.at(tp, microbatch_size, *others).tables

    def interleaved(self, configuration: Configuration, table: StageTable) -> InterleavedStages:
        """Return a configuration's interleaved stages, as even as blocks allow."""
        ranks = RankStages(table=table, configuration=configuration)
        pipeline = configuration.schedule, configuration.pp, configuration.vpp
        key = (table.key, *pipeline, ranks.polls)
        if key not in self._even_stages:
            cuts = self._even_cuts_of(table, configuration.pp * configuration.vpp)
            self._even_stages[key] = InterleavedStages.between(ranks, cuts).cut
        return InterleavedStages(ranks=ranks, cut=self._even_stages[key])

    def have_equal_cuts(self, configuration: Configuration, table: StageTable) -> bool:
        """Whether interleaved stages lie alike under all tables that a table stands for."""
        stages = configuration.pp * configuration.vpp
        return len({self._even_cuts_of(own, stages) for own in table.members}) == 1

    def _even_cuts_of(self, table: StageTable, num_stages: int) -> tuple[int, ...]:
        """Return the most even stage boundaries."""
        key = table.key, num_stages
        if key not in self._even_cuts:
            seconds = table.forward_s + table.backward_s
            cuts = self.cuts_of(num_stages) or self._even_cut(seconds.tolist(), num_stages)
            self._even_cuts[key] = cuts
        return self._even_cuts[key]

    def cuts_of(self, num_stages: int) -> tuple[int, ...]:
        """Return the boundaries of so many stages where the request or the stack fixes them."""
        if self.cuts or self.expressed is None:
            return self.cuts
        return self.expressed.cuts(num_stages)

    @property
    def starts(self) -> tuple[int, ...]:
        """Blocks that a stage may begin with; none: any."""
        return () if self.expressed is None else self.expressed.starts

    def _even_cut(self, seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
        """Return cuts into stages as equal as what lies between possible cuts allows."""
        starts = self.starts or tuple(range(len(seconds)))
        pieces = np.add.reduceat(seconds, starts).tolist()
        return tuple([*starts, len(seconds)][at] for at in balanced_cut(pieces, num_stages))

    @cached_property
    def cluster_ref(self) -> ClusterRef:
        """How plans name the machine."""
        costs = self.costs.groups.values() or (self.costs,)
        devices = dict.fromkeys(own.profile.cluster.device for own in costs)
        return ClusterRef(
            name=self.profile.name,
            device=", ".join(devices),
            devices_per_node=self.smallest_nodes.devices_per_node,
            nodes=self._nodes_of_groups,
        )

    @cached_property
    def model(self) -> ModelRef:
        """How plans name the model."""
        return model_ref(self.captured or self.graph, file=self.model_file)

    def estimate(self, plan: Plan) -> Estimate:
        """Return the cost model's answer for a plan."""
        return estimate(self.graph, self.profile, plan, costs=self.costs)


def _check_pins(expressed: Expressed, pins: Mapping[tuple[int, str], Placement]) -> None:
    """Raise LayoutError for a pin of what a stack splits otherwise."""
    dims = expressed.usual.dims if expressed.usual is not None else {}
    for (index, name), place in pins.items():
        own = dims.get((index, name), (dim_of(place),))
        if dim_of(place) not in own:
            has = " or ".join("R" if dim is None else f"S({dim})" for dim in own)
            fqn = expressed.graph.classes[index].tensor[name].fqn
            raise LayoutError(
                f"`pins` {fqn}: {place}@tp was given, and {expressed.stack.title} has {has}; drop "
                "the pin, or plan for another `execution`"
            )


def _check_groups(profile: Profile, request: SearchRequest) -> None:
    """Raise LayoutError for a request that a cluster of several groups of devices cannot meet."""
    if request.overlap == "auto":
        raise LayoutError(
            f"`overlap` auto was given, and cluster {profile.name!r} has several groups of "
            "devices, on which other collectives hide; drop it"
        )
    if request.logits == "chunked":
        raise LayoutError(
            f"`logits` chunked was given, and cluster {profile.name!r} has several groups of "
            "devices, whose stages would each choose; drop it"
        )
    counts = [group.num_devices for group in profile.groups]
    if request.num_devices != sum(counts):
        raise LayoutError(
            f"`num_devices` {request.num_devices} was given; the groups of cluster "
            f"{profile.name!r} have {' + '.join(map(str, counts))}, and plans use all of them: "
            f"give {sum(counts)}, or write a file of fewer nodes"
        )


def with_estimate(plan: Plan, answer: Estimate) -> Plan:
    """Return the plan with the estimate's parts written in."""
    return plan.model_copy(update={"estimate": answer.to_dict()})


CandidatesOf = Callable[[ModelGraph, Profile, SearchRequest, OnHost], Candidates]
"""Returns the candidates of a request, new or kept."""
