"""A plan without a search: stages of equal block counts and propagated op layouts.

For trying one layout out, and for tests. `search` finds better plans.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd, lcm

from planner.errors import LayoutError
from planner.language.across.cut.whole_batch import run_whole
from planner.language.graph import ModelGraph
from planner.language.layout.axes import Degrees, OwnSizes, find_axis, lowered_axes
from planner.language.layout.class_layout import ClassLayout
from planner.language.lowering.experts import cuts_rows, grouped_products
from planner.language.lowering.lowering import lower
from planner.language.lowering.propagate import propagate_on
from planner.language.plan import (
    ClusterRef,
    ModelRef,
    Plan,
    Recompute,
    StagePlan,
    ZeroStage,
    batch_spec,
    recompute_fields,
)
from planner.language.schedule.registry import DEFAULT_SCHEDULE, stage_to_pp_rank


def default_plan(
    graph: ModelGraph,
    *,
    pp: int = 1,
    vpp: int = 1,
    by_stage: Mapping[str, Sequence[int]] | None = None,
    balance: Sequence[int] = (),
    microbatch_size: int | None = None,
    num_microbatches: int | None = None,
    schedule: str = DEFAULT_SCHEDULE,
    zero_stage: ZeroStage = 0,
    recompute: Recompute | Sequence[Recompute] = "none",
    file: str = "",
    accept: tuple[str, ...] = (),
    **sizes: int,
) -> Plan:
    """Return a plan with these degrees; num_microbatches defaults to twice pp, microbatch_size to
    one sample, or as many as belong together.

    `sizes` are those of the mesh axes by name (``dp=2, tp=4``), one where not given; etp follows
    from tp's layouts. `balance`
    gives the number of blocks of each stage, else they are as equal as can be. `by_stage` gives
    each stage a size of its own on an axis (``{"tp": (4, 1)}``). `recompute` is of all blocks, or
    one for each; `accept` is as in `Plan`. Raises LayoutError when
    there are fewer blocks than stages, when the model can't be divided over an axis, or when
    stages' sizes do not fit; ScheduleError for an unknown schedule.
    """
    homes = stage_to_pp_rank(schedule, pp, vpp)
    degrees = Degrees(**sizes)
    num_stages, num_blocks = pp * vpp, len(graph.blocks)
    if num_blocks < num_stages:
        raise LayoutError(
            f"pp={pp} times vpp={vpp} makes {num_stages} stages and the model has {num_blocks} "
            f"blocks; use at most {num_blocks} stages"
        )
    own_sizes = _own_sizes(by_stage or {}, degrees, num_stages)
    unit, replicas = graph.unit, degrees.along("batch")
    microbatch_size = unit.size if microbatch_size is None else microbatch_size
    if why := unit.why_not(microbatch_size):
        raise LayoutError(f"microbatch_size={microbatch_size} was given, and {why}")
    samples = microbatch_size // unit.size * replicas
    cuts = [degrees.with_own(own).along("batch") for own in own_sizes]
    # Sizes that all stages can cut are multiples of this.
    step = lcm(*(parts // gcd(parts, replicas) for parts in cuts))
    for parts in cuts:
        if samples % parts:
            raise LayoutError(
                f"by_stage={by_stage}: microbatches of {microbatch_size} with {degrees} can't be "
                f"divided in {parts} parts; use a microbatch_size of "
                f"{-(-microbatch_size // step) * step}"
            )
    if balance:
        check_balance(balance, num_blocks=num_blocks, num_stages=num_stages)
        bounds = [sum(balance[:s]) for s in range(num_stages + 1)]
    else:
        bounds = [num_blocks * s // num_stages for s in range(num_stages + 1)]
    count = num_microbatches or max(2 * pp, 1)
    runs = run_whole(graph, samples * count, num_microbatches=count, accept=accept)
    by_block = [recompute] * num_blocks if isinstance(recompute, str) else recompute
    if len(by_block) != num_blocks:
        raise LayoutError(
            f"recompute names {len(by_block)} blocks and the model has {num_blocks}; give one "
            "choice for all, or one for each"
        )
    stages = tuple(
        StagePlan(
            pp_rank=homes[s],
            first_block=bounds[s],
            last_block=bounds[s + 1] - 1,
            own_sizes=own_sizes[s],
            **recompute_fields(by_block[bounds[s] : bounds[s + 1]], first_block=bounds[s]),
        )
        for s in range(num_stages)
    )
    layouts: list[ClassLayout] = []
    meshes = {degrees.with_own(own): own for own in own_sizes}
    for mesh in sorted(meshes, key=lambda mesh: tuple(mesh.values())[::-1]):
        used = {
            graph.blocks[b].class_index
            for stage in stages
            for b in stage.blocks
            if degrees.with_own(stage.own_sizes) == mesh
        }
        found = default_layouts(runs, degrees=mesh, microbatch_size=samples // mesh.along("batch"))
        layouts += [
            layout.model_copy(update={"own_sizes": meshes[mesh]})
            for layout in found
            if layout.class_index in used
        ]
    if degrees["ep"] > 1 and "etp" not in sizes:
        degrees = degrees.with_sizes(etp=etp_of(graph, layouts, degrees))
    return Plan(
        model=model_ref(graph, file=file),
        cluster=ClusterRef(name="none", device="cpu", devices_per_node=degrees.num_ranks * pp),
        degrees=degrees,
        pp=pp,
        vpp=vpp,
        microbatch_size=microbatch_size,
        num_microbatches=count,
        schedule=schedule,
        zero_stage=zero_stage,
        stages=stages,
        layouts=tuple(layouts),
        accept=accept,
    )


def etp_of(graph: ModelGraph, layouts: Sequence[ClassLayout], degrees: Degrees) -> int:
    """Return the ranks that share an expert's matrices: as tp's layouts cut these, or 1 where they
    give each rank rows of its own.
    """
    on_tp = {layout.class_index: layout for layout in layouts if layout.axis == "tp"}
    own = (
        cuts_rows(program, on_tp.get(index))
        for index, program in enumerate(graph.classes)
        if grouped_products(program)
    )
    return 1 if all(own) else degrees["tp"]


def default_layouts(
    graph: ModelGraph, *, degrees: Degrees, microbatch_size: int
) -> tuple[ClassLayout, ...]:
    """Return propagated layouts of every class, on one axis after the other."""
    axes = [axis for axis in lowered_axes() if degrees[axis.name] > 1]
    layouts: list[ClassLayout] = []
    programs = [program.bind(microbatch_size) for program in graph.classes]
    for axis in axes:
        size = degrees[axis.name]
        found = propagate_on(
            graph, axis, size=size, microbatch_size=microbatch_size, programs=programs
        )
        layouts += found
        if axis is axes[-1]:
            break
        by_class = {layout.class_index: layout for layout in found}
        programs = [
            lower(
                program,
                by_class.get(index),
                axis=axis.name,
                axis_size=size,
                sum_later=axis.whole_params,
            )
            for index, program in enumerate(programs)
        ]
    return tuple(layouts)


def _own_sizes(
    by_stage: Mapping[str, Sequence[int]], degrees: Degrees, num_stages: int
) -> list[OwnSizes]:
    """Return each stage's sizes that are not the plan's; raise LayoutError where they don't fit."""
    for axis, sizes in by_stage.items():
        fits = len(sizes) == num_stages and not any(degrees.num_ranks % size for size in sizes)
        if not (fits and find_axis(axis).own_by_stage):
            raise LayoutError(
                f"by_stage {axis}={tuple(sizes)}: give one {axis} for each of the {num_stages} "
                f"stages, each a divisor of a stage's {degrees.num_ranks} ranks"
            )
    return [
        tuple((axis, sizes[s]) for axis, sizes in by_stage.items() if sizes[s] != degrees[axis])
        for s in range(num_stages)
    ]


def check_balance(balance: Sequence[int], *, num_blocks: int, num_stages: int) -> None:
    """Raise LayoutError unless `balance` deals every block to one of the stages, in order."""
    given = ",".join(map(str, balance))
    if len(balance) != num_stages:
        raise LayoutError(
            f"balance={given} is for {len(balance)} stages and pp*vpp={num_stages}; "
            "give one number of blocks for each stage"
        )
    if min(balance) < 1 or sum(balance) != num_blocks:
        raise LayoutError(
            f"balance={given} deals {sum(balance)} blocks and the model has {num_blocks}; "
            f"the numbers must be 1 or more and add up to {num_blocks}"
        )


def model_ref(graph: ModelGraph, *, file: str) -> ModelRef:
    """Return how a plan names the model of a graph."""
    return ModelRef(
        name=graph.name,
        file=file,
        fingerprint=graph.fingerprint,
        inputs=batch_spec(graph),
        batch_tree=graph.batch_tree,
        unit=graph.unit,
    )
