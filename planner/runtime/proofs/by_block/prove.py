"""The proof of a plan by its blocks: every part that can be shown without its ranks.

`Derived` is what the runtime derives from a plan and what is looked at here. A test breaks one
part of it; the product takes them all from the runtime.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache

from planner.capture import build_without_values
from planner.capture.source.model_file import ModelSource
from planner.errors import LayoutError, PlanError, PlannerError
from planner.language.graph import ModelGraph, Program
from planner.language.layout.axes import Degrees
from planner.language.lowering.holdings import Holdings
from planner.language.lowering.routes import Routes
from planner.language.lowering.wiring import (
    Edge,
    StageWiring,
    block_placements,
    build_edges,
    wire_stage,
)
from planner.language.plan import Plan
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule import Schedule
from planner.runtime.proofs.by_block.blocks import Checked, check_class, simulated_mesh
from planner.runtime.proofs.by_block.coverage import Held, check_coverage
from planner.runtime.proofs.by_block.cut import (
    Cut,
    cut_down,
    of_one_replica,
    program_of_one_replica,
    samples_of,
)
from planner.runtime.proofs.by_block.facts import Facts
from planner.runtime.proofs.by_block.hand_over import check_handover, handovers
from planner.runtime.proofs.by_block.limits import cuts, unproven
from planner.runtime.proofs.by_block.report import Part, Proof
from planner.runtime.proofs.by_block.step_order import check_collectives, check_sums
from planner.runtime.proofs.by_block.tables import (
    Queues,
    check_messages,
    check_table,
    queues_of,
)
from planner.runtime.proofs.by_block.wires import check_routes, check_wires
from planner.runtime.proofs.promote import ReferenceMode
from planner.runtime.stage.calls.opaque_modules import calling_inside, keep_modules, opaque_calls

Progress = Callable[[float, str], None]

MOST_FAULTS = 5
"""Faults of a part that are told; one mistake often shows in many places."""

LocalProgram = Callable[[ModelGraph, Plan, int, Degrees, int, int], Program]
"""From graph, plan, class, degrees, samples and simulated rank to what that rank runs."""


def _same_on_all(
    graph: ModelGraph, plan: Plan, class_index: int, degrees: Degrees, size: int, rank: int
) -> Program:
    return program_of_one_replica(graph, plan, class_index, degrees, size)


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What the runtime derives from a plan.

    Attributes:
        schedule: the job table.
        edges: messages between stages.
        wirings: what each stage takes and hands on.
        held: what each rank holds of parameters.
        routes: who sends which part of a message to whom.
        queues: each pp rank's sends and receives in order.
        local: what a rank runs for a block class.
    """

    schedule: Schedule
    edges: tuple[Edge, ...]
    wirings: tuple[StageWiring, ...]
    held: Held
    routes: Callable[[Plan], Routes] = lambda plan: Routes(plan=plan)
    queues: Queues = queues_of
    local: LocalProgram = _same_on_all


def derive(graph: ModelGraph, plan: Plan) -> Derived:
    """Return what the runtime derives. Raises PlannerError for a plan that can't be run."""
    if plan.degrees.expert_parts > 1:
        raise PlanError(
            f"the plan has ep={plan.degrees['ep']}: how many rows its ranks exchange follows from "
            "values, which a proof by blocks does not have; verify without `by_block`"
        )
    edges = build_edges(graph, plan)
    return Derived(
        schedule=schedule_of(plan),
        edges=edges,
        wirings=tuple(wire_stage(graph, plan, edges, s) for s in range(len(plan.stages))),
        held=lru_cache(maxsize=None)(Holdings(graph, plan).of),
    )


def prove(
    plan: Plan,
    graph: ModelGraph,
    source: ModelSource,
    *,
    progress: Progress | None = None,
    memory_bytes: int | None = None,
    change: Callable[[Derived], Derived] = lambda derived: derived,
) -> Proof:
    """Return what can be shown of a plan on this machine, and what is wrong with it.

    `graph` is the capture that the plan is for, `source` its model file. `memory_bytes` may be
    used for blocks (None: three quarters of what is free). `change` breaks what was derived, in a
    test. Raises PlannerError for a plan that can't be run at all.
    """
    tell = progress or (lambda share, text: None)
    tell(0.0, "deriving tables, wiring and pieces")
    derived = change(derive(graph, plan))
    parts = [*_without_values(plan, graph, derived, tell)]
    tell(0.15, "cutting the model down")
    cut = cut_down(graph, plan, source, memory_bytes=memory_bytes)
    parts.append(_timed("values between blocks and stages", lambda: _handovers(plan, derived, cut)))
    checked: dict[tuple[int, Degrees], Checked] = {}
    start = time.perf_counter()
    with _called_modules(cut, source):
        parts.append(_blocks(plan, graph, source, derived, cut, checked, tell))
    parts[-1] = replace(parts[-1], seconds=time.perf_counter() - start)
    tell(0.98, "comparing the order of collectives")
    parts.append(
        _timed(
            "collectives of a step, matched in order on all ranks",
            lambda: _collectives(plan, graph, derived, checked),
        )
    )
    tell(1.0, "done")
    return Proof(
        world_size=plan.world_size,
        parts=tuple(parts),
        cuts=tuple(cuts(plan, graph, cut)),
        unproven=tuple(unproven(plan, graph, cut)),
    )


@contextmanager
def _called_modules(cut: Cut, source: ModelSource) -> Iterator[None]:
    """Inside, modules that run as they are can be called, in the dtype that blocks are run in."""
    if not any(map(opaque_calls, cut.graph.classes)):
        yield
        return
    keep_modules(cut.graph, build_without_values(source.build))
    with calling_inside(ReferenceMode if cut.dtype == "float64" else nullcontext):
        yield


Shown = tuple[str, Iterable[str]]
"""How much was looked at, and its faults."""


def _timed(name: str, look: Callable[[], Shown]) -> Part:
    start = time.perf_counter()
    try:
        counted, found = look()
        faults = list(found)
    except PlannerError as error:  # what is derived contradicts itself
        counted, faults = "", [str(error).splitlines()[0]]
    if len(faults) > MOST_FAULTS:
        faults = [*faults[:MOST_FAULTS], f"and {len(faults) - MOST_FAULTS} more"]
    return Part(
        name=name, counted=counted, faults=tuple(faults), seconds=time.perf_counter() - start
    )


def _without_values(
    plan: Plan, graph: ModelGraph, derived: Derived, tell: Progress
) -> Iterator[Part]:
    schedule, edges, wirings = derived.schedule, derived.edges, derived.wirings

    def table() -> Shown:
        jobs = sum(map(len, schedule.jobs))
        return f"{jobs} jobs on {schedule.pp} pp ranks", check_table(plan, schedule)

    yield _timed("job table: each job once, on its rank, and it ends", table)
    yield _timed(
        "wiring: each tensor made once, sent once, taken as it was sent",
        lambda: (
            f"{len(graph.blocks)} blocks, {len(edges)} tensors between stages",
            check_wires(graph, plan, edges, wirings),
        ),
    )
    yield _timed(
        "messages: each sent once and taken once, in an order that ends",
        lambda: (
            f"{sum(1 + e.requires_grad for e in edges) * plan.num_microbatches} messages a step",
            check_messages(schedule, edges, wirings, derived.queues),
        ),
    )
    yield _timed(
        "parts of messages: each element to each rank that needs it, once",
        lambda: (
            f"{plan.world_size} ranks, both directions",
            check_routes(plan, edges, derived.routes(plan)),
        ),
    )
    tell(0.05, "counting parameters on all ranks")
    counted = f"{graph.num_params():,} elements on {plan.world_size} ranks"
    what = "and optimizer shards " if plan.zero_stage else ""
    yield _timed(
        f"parameters {what}each element exactly once among its copies",
        lambda: (counted, check_coverage(graph, plan, derived.held)),
    )


def _handovers(plan: Plan, derived: Derived, cut: Cut) -> Shown:
    found = handovers(cut.graph, plan, derived.edges)
    faults = [
        fault
        for handover, name in found.items()
        for fault in check_handover(handover, name, plan, derived.routes)
    ]
    between = sum(handover.edge is not None for handover in found)
    return f"{len(found)} kinds, {between} of them between stages", faults


def _blocks(
    plan: Plan,
    graph: ModelGraph,
    source: ModelSource,
    derived: Derived,
    cut: Cut,
    checked: dict[tuple[int, Degrees], Checked],
    tell: Progress,
) -> Part:
    """Check every class under each of its layouts; `checked` gets what came of each."""
    kinds = _kinds(plan, graph)
    skipped = {index for index, _ in cut.too_large}
    made: dict[int, Facts] = {}
    sizes: set[int] = set()
    ranks = uncut = 0
    for at, ((index, degrees), (stage, block)) in enumerate(kinds.items()):
        if index in skipped:
            continue
        name = graph.classes[index].name
        try:
            size = samples_of(cut.graph, plan, stage, index)
        except LayoutError as error:
            fault = f"block class {name} ({degrees}) can't be run as planned: {error}"
            checked[index, degrees] = Checked(faults=(fault,))
            continue
        sizes.add(size * graph.unit.size)
        tell(0.2 + 0.75 * at / len(kinds), f"block class {name}")

        def local(
            rank: int, index: int = index, degrees: Degrees = degrees, size: int = size
        ) -> Program:
            return derived.local(cut.graph, plan, index, degrees, size, rank)

        alone = replace(cut, graph=of_one_replica(cut.graph, plan, size))
        whole = alone.graph.classes[index].bind(size)
        # No axis cuts the block: comparing it with itself would show nothing.
        if all(local(rank) == whole for rank in simulated_mesh(degrees).ranks):
            checked[index, degrees] = Checked(faults=())
            uncut += 1
            continue
        if size not in made:
            made[size] = Facts(alone, graph, source, size)
        facts = made[size]

        found = check_class(
            facts.of(index),
            local,
            block_placements(graph, plan, block, stage),
            degrees,
            draws=facts.draws,
        )
        checked[index, degrees] = found
        ranks = max(ranks, len(found.calls))
    faults = [fault for found in checked.values() for fault in found.faults]
    if len(faults) > MOST_FAULTS:
        faults = [*faults[:MOST_FAULTS], f"and {len(faults) - MOST_FAULTS} more"]
    classes = {index for index, _ in checked}
    return Part(
        name="blocks: outputs, gradients and buffers of every rank equal the whole block's",
        counted=_counted(len(classes), len(graph.blocks), len(checked), uncut, ranks, sizes),
        faults=tuple(faults),
        times_rounding=max((found.times_rounding for found in checked.values()), default=None),
    )


def _counted(
    classes: int, blocks: int, layouts: int, uncut: int, ranks: int, sizes: set[int]
) -> str:
    shown = f"{classes} classes of {blocks} blocks, {layouts} layouts"
    if uncut:
        shown += f", {uncut} of them whole on each rank: nothing to compare"
    if ranks:
        samples = " or ".join(map(str, sorted(sizes)))
        shown += f"; up to {ranks} ranks in one process, {samples} samples"
    return shown


def _kinds(plan: Plan, graph: ModelGraph) -> Mapping[tuple[int, Degrees], tuple[int, int]]:
    """Return the first stage and block of each class and mesh, in the order of the chain."""
    found: dict[tuple[int, Degrees], tuple[int, int]] = {}
    for stage, planned in enumerate(plan.stages):
        for block in planned.blocks:
            key = graph.blocks[block].class_index, plan.stage_degrees(stage)
            found.setdefault(key, (stage, block))
    return found


def _collectives(
    plan: Plan,
    graph: ModelGraph,
    derived: Derived,
    checked: Mapping[tuple[int, Degrees], Checked],
) -> Shown:
    calls = {key: found.calls for key, found in checked.items()}
    inside, faults = check_collectives(graph, plan, derived.schedule, calls)
    sums, more = check_sums(graph, plan, derived.held)
    return f"{inside:,} inside blocks, {sums:,} sums of gradients", [*faults, *more]
