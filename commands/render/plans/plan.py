"""A plan for people: what it decides, its timetable, what it should cost. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from commands.render.flags import with_flags
from commands.render.plans.parts import (
    StepParts,
    bottleneck_line,
    bottleneck_words,
    memory_range,
    memory_table,
    memory_warning,
    stage_name,
)
from commands.render.plans.words import KERNELS, experts_words
from commands.render.tables import light_table
from planner.language.graph import ModelGraph
from planner.language.graph.called_modules import called_modules_messages
from planner.language.layout.axes import Degrees, batch_axes, lowered_axes, own_axes, rest_axis
from planner.language.lowering.attention_cut import cut_in_words, uncut_sequences_messages
from planner.language.lowering.captured_ops import WorkOfJobs, work_of_jobs
from planner.language.lowering.match_model import validate_model
from planner.language.lowering.narrow_products import narrow_messages
from planner.language.lowering.routed_experts import routing_messages
from planner.language.ops.held_pairs import held_pairs_messages
from planner.language.ops.registry import ops_without_rule
from planner.language.plan import OURS, ClassLayout, Plan, StagePlan
from planner.language.plan.buckets import shapes_of
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule import Schedule
from planner.language.schedule.draw import Behind, draw_schedule
from planner.language.schedule.step_jobs import ROLES, jobs_of_step, step_jobs
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.units import format_bytes, format_seconds

LINE_WIDTH = 120
"""Characters in a line of a timetable, if the screen has no fewer."""
_BEFORE_JOBS, _BEHIND_JOBS = 9, 27
"""Characters that name the rank, and that count the columns which have no room."""


def describe_plan(plan: Plan, graph: ModelGraph | None = None) -> list[RenderableType]:
    """Return the plan's summary, stages, layouts, timetable and estimate, ready to print.

    Raises PlanError when `graph` is another model than the plan's.
    """
    if graph is not None:
        validate_model(plan, graph)
    parts: list[RenderableType] = [_summary(plan, graph), _stages(plan, graph)]
    if plan.layouts:
        parts += _layouts(plan, graph)
        if graph is not None:
            parts.append(_without_rule(graph))
    if graph is not None:
        told = (narrow_messages, called_modules_messages, held_pairs_messages, routing_messages)
        parts += [Text(message) for messages in told for message in messages(graph)]
        parts += [Text(message) for message in uncut_sequences_messages(graph, plan)]
    schedule = schedule_of(plan)
    if plan.pp > 1:
        drawn = (
            "\nThe order of jobs, as if all F, I and W took as long; `planner simulate` has times"
        )
        parts += [Text(drawn), Timetable(schedule)]
    if graph is not None:
        parts.append(_jobs(schedule, work_of_jobs(graph, plan, schedule)))
    if plan.estimate:
        cluster, execution = plan.cluster.name, plan.execution
        parts += describe_estimate(plan.estimate, plan.stages, cluster=cluster, execution=execution)
    return parts


def _summary(plan: Plan, graph: ModelGraph | None) -> Table:
    table = Table.grid(padding=(0, 2))
    axes = (*plan.degrees.sizes.items(), ("pp", plan.pp), ("vpp", plan.vpp))
    replicas = " x ".join(
        f"{axis.name} {plan.degrees[axis.name]}"
        for axis in batch_axes()
        if axis.name in plan.degrees.sizes
    )
    for name, value in (
        ("model", f"{plan.model.name} ({plan.model.fingerprint[:12]}) from {plan.model.file}"),
        ("cluster", f"{plan.cluster.name}, {plan.cluster.devices_per_node} devices per node"),
        ("ranks", f"{plan.world_size} = " + " · ".join(f"{axis} {n}" for axis, n in axes)),
        (
            "batch",
            f"{plan.global_batch} samples = {replicas} x {plan.num_microbatches} microbatches "
            f"of {plan.microbatch_size}",
        ),
        *([("replicas", f"{plan.shares_spelled} samples")] if plan.shares else []),
        *_sequences(plan, graph),
        *([("experts", _rows(plan))] if plan.degrees["ep"] > 1 else []),
        *([("units", plan.unit.told)] if plan.unit.told else []),
        *(("also takes", shapes_of(bucket.inputs)) for bucket in plan.model.buckets),
        ("schedule", plan.schedule),
        ("ZeRO stage", str(plan.zero_stage)),
        *([("kernels", KERNELS[plan.kernels])] if plan.is_compiled else []),
        *([("overlap", "weight gradients beside collectives")] if plan.makes_beside else []),
        *([("gathers", f"in {plan.gather_pieces} pieces")] if plan.gather_pieces > 1 else []),
        *([("logits", f"of {plan.logit_rows} tokens at a time")] if plan.logit_rows else []),
        *([("priced for", plan.execution)] if plan.execution != plan.runs_as else []),
        *([("on the host", ", ".join(plan.tables_on_host))] if plan.tables_on_host else []),
        *([("on the host", "optimizer and its state")] if plan.optimizer_on_host else []),
    ):
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _rows(plan: Plan) -> str:
    """Say how tokens and experts come together."""
    gathered = sum(layout.axis == "ep" for layout in plan.layouts)
    if not gathered:
        return f"over ep: a token goes to those of {plan.degrees['ep']} ranks that have its experts"
    return f"over ep: all {plan.degrees['ep']} ranks get all tokens, each for its own experts"


def _sequences(plan: Plan, graph: ModelGraph | None) -> Iterator[tuple[str, str]]:
    """Yield how each axis that cuts sequences does."""
    for axis in lowered_axes():
        if axis.cuts_sequences and plan.degrees[axis.name] > 1:
            layouts = [layout for layout in plan.layouts if layout.axis == axis.name]
            yield "sequences", f"over {axis.name}: {cut_in_words(graph, layouts)}"


def _stages(plan: Plan, graph: ModelGraph | None) -> Table:
    table = light_table("stage", "pp rank", "blocks", "recompute", title="Stages")
    has_meshes = any(stage.own_sizes for stage in plan.stages)
    has_trips = any(stage.activations_on_host for stage in plan.stages)
    has_groups = any(plan.device_groups)
    if has_groups:
        table.add_column("devices")
    if has_meshes:
        table.add_column("mesh")
    if has_trips:
        table.add_column("activations wait")
    if graph is not None:
        table.add_column("parameters", justify="right")
    for index, stage in enumerate(plan.stages):
        row = [str(index), str(stage.pp_rank), _block_names(stage, graph), stage.recompute_spelled]
        if has_groups:
            row.append(stage.device_group)
        if has_meshes:
            degrees = plan.stage_degrees(index)
            named = (rest_axis(), *own_axes())
            row.append(" · ".join(f"{axis.name} {degrees[axis.name]}" for axis in named))
        if has_trips:
            row.append("on the host" if stage.activations_on_host else "on the device")
        if graph is not None:
            row.append(f"{_num_params(stage, graph):,}")
        table.add_row(*row)
    return table


def _block_names(stage: StagePlan, graph: ModelGraph | None) -> str:
    first, last = stage.first_block, stage.last_block
    numbers = f"{first}" if first == last else f"{first}..{last}"
    if graph is None:
        return numbers
    names = graph.blocks[first].name, graph.blocks[last].name
    return f"{numbers} ({names[0]})" if first == last else f"{numbers} ({names[0]} .. {names[1]})"


def _num_params(stage: StagePlan, graph: ModelGraph) -> int:
    names = {name for block in stage.blocks for name in graph.blocks[block].params}
    tensors = (graph.tensor[name] for name in names)
    return sum(tensor.numel_at(1) for tensor in tensors if tensor.kind == "param")


def _layouts(plan: Plan, graph: ModelGraph | None) -> list[RenderableType]:
    """One table for each axis and each mesh that stages have."""
    found: dict[tuple[str, Degrees], list[ClassLayout]] = {}
    for layout in plan.layouts:
        degrees = plan.degrees.with_own(layout.own_sizes)
        if layout.axis == "ep":
            continue  # of how tokens come to experts; no op is split
        found.setdefault((layout.axis, degrees), []).append(layout)
    tables: list[RenderableType] = []
    for (axis, degrees), layouts in found.items():
        title = f"Layouts over {axis} {degrees[axis]}"
        others = [own.name for own in own_axes() if own.name != axis]
        if others and any(stage.own_sizes for stage in plan.stages):
            title += f" of stages with {' and '.join(f'{n} {degrees[n]}' for n in others)}"
        table = light_table("block class", "ops split", "parameters", title=title)
        for layout in layouts:
            table.add_row(*_layout_row(layout, graph))
        tables.append(table)
    return tables


def _layout_row(layout: ClassLayout, graph: ModelGraph | None) -> tuple[str, str, str]:
    if graph is None:
        placements = Counter(layout.params)
        held = ", ".join(f"{count} x {text}" for text, count in placements.items())
        return str(layout.class_index), str(len(layout.ops)), held
    program = graph.classes[layout.class_index]
    uses = [block for block in graph.blocks if block.class_index == layout.class_index]
    split: dict[str, list[str]] = {}
    for name, placement in zip(uses[0].params, layout.params, strict=True):
        if placement != "R":
            fqn = graph.tensor[name].fqn or name
            split.setdefault(placement, []).append(fqn.removeprefix(f"{uses[0].name}."))
    held = "\n".join(f"{placement}: {', '.join(names)}" for placement, names in split.items())
    return (
        f"{program.name} x {len(uses)}",
        # (A layout on an outer axis is of the program as lowered before, which has more ops.)
        f"{len({op.name for op in program.ops} & {n for n, _ in layout.ops})} of "
        f"{len(program.ops)}",
        held or "all replicated",
    )


def _without_rule(graph: ModelGraph) -> Text:
    counts: Counter[str] = Counter()
    for block in graph.blocks:
        counts.update(ops_without_rule(graph.classes[block.class_index]))
    if not counts:
        return Text("Every op has a sharding rule.")
    named = ", ".join(f"{target} x {count}" for target, count in counts.most_common())
    return Text(f"{counts.total()} ops have no sharding rule and run replicated: {named}")


def _jobs(schedule: Schedule, work: WorkOfJobs) -> Table:
    """What a step is made of, by kind of job, and how much of the model each microbatch's jobs do
    on all stages together.
    """
    table = light_table("job", "role", "in a step", "one microbatch", title="Jobs")
    jobs = Counter(str(job.kind) for job in jobs_of_step(schedule))
    for kind, role in ROLES.items():
        if not jobs[str(kind)]:
            continue
        parts = Counter(each.part for (k, _), done in work.items() if k is kind for each in done)
        done = ", ".join(f"{count} {_PARTS[part]}" for part, count in parts.items())
        table.add_row(str(kind), str(role), str(jobs[str(kind)]), done)
    return table


_PARTS = {
    "forward": "captured ops",
    "gradients": "gradients of ops",
    "input gradient": "input gradients of products",
    "weight gradient": "weight gradients of products",
    "update": "parameters",
}


def draw_timetable(
    schedule: Schedule,
    times: JobSeconds | None = None,
    behind: Sequence[Behind] | None = None,
    *,
    width: int = LINE_WIDTH,
) -> Text:
    """Return a step's picture over time in lines of `width`; columns that have no room are counted.

    `behind` are the jobs behind each row; by default an optimizer's job as long as a forward.
    """
    if behind is None:
        behind = [
            [(job, float(place > 0), float(place == 0)) for place, job in enumerate(step_jobs(r))]
            for r in range(schedule.pp)
        ]
    last = schedule.num_microbatches - 1
    with_stage = schedule.num_stages > schedule.pp
    label = f"{schedule.num_stages - 1}F{last}" if with_stage else f"F{last}"
    for room in (width - _BEFORE_JOBS, width - _BEFORE_JOBS - _BEHIND_JOBS):
        most = max(1, room // (len(label) + 1))
        drawn = draw_schedule(schedule, times=times, behind=behind, max_columns=most)
        if max(map(len, drawn.splitlines()[1:])) <= width:
            break
    return Text(drawn)


class Timetable:
    """A step's picture over time, as wide as the screen."""

    def __init__(
        self,
        schedule: Schedule,
        times: JobSeconds | None = None,
        behind: Sequence[Behind] | None = None,
    ) -> None:
        self._drawn = schedule, times, behind

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Yield the picture."""
        yield draw_timetable(*self._drawn, width=min(options.max_width, LINE_WIDTH))


_BASES = {
    "measured": "measurements of",
    "shipped": "the shipped description, not on measurements here, of",
}


def describe_estimate(
    estimate: Mapping[str, Any],
    stages: Sequence[StagePlan] = (),
    *,
    cluster: str,
    execution: str = OURS,
) -> list[RenderableType]:
    """Return the expected step time and memory, each in its named parts.

    `estimate` is the JSON form that the search stored in the plan; parts it does not know
    are shown by their key, zero ones are left out. `stages` are the plan's, to name the slowest.
    """
    basis = f"Based on {_BASES.get(estimate['source'], estimate['source'])} {cluster}"
    basis += f", as {execution} runs it" if execution != OURS else ""
    error = estimate.get("relative_error")
    if error is not None:
        basis += f"; expected to be within {error:.0%} in 4 of 5 cases"
    parts: list[RenderableType] = [
        Text(f"\n{format_seconds(estimate['step_s'])} a step", style="bold"),
        StepParts(estimate["time"]),
        *_bottleneck(estimate, stages),
        Text(basis),
    ]
    if experts := estimate.get("experts"):
        parts.append(Text(experts_words(experts).capitalize()))
    if (measured := estimate.get("measured")) is not None:
        parts.append(Text(_measured(measured)))
    parts.append(Text(f"\n{format_bytes(estimate['peak_bytes'])} at most on one device", "bold"))
    parts.append(memory_table([_with_total(rank) for rank in estimate["memory"]]))
    if (interval := estimate.get("memory_interval")) is not None:
        low, high = interval["low_bytes"], interval["high_bytes"]
        # Files of before have no more than the limit.
        has = interval.get("device_bytes") or interval["limit_bytes"]
        parts.append(Text(f"The fullest: {memory_range(low, high, interval['basis'])}"))
        if warning := memory_warning(interval["total_bytes"], high, has):
            parts.append(Text("! ", style="yellow") + Text(with_flags(warning)))
    return parts


def _bottleneck(estimate: Mapping[str, Any], stages: Sequence[StagePlan]) -> list[Text]:
    """Return the line of the slowest pipeline rank, if there are several and it is told."""
    slowest = estimate.get("bottleneck_pp_rank")
    if slowest is None or len(estimate["memory"]) == 1:
        return []
    named = [
        stage_name(index, stage.first_block, stage.last_block)
        for index, stage in enumerate(stages)
        if stage.pp_rank == slowest
    ]
    work_s = estimate["work_by_pp_rank_s"][slowest]
    words = bottleneck_words(estimate["time"], pp_rank=slowest, work_s=work_s, stages=named)
    return [bottleneck_line(words)]


def _with_total(parts: Mapping[str, int]) -> Mapping[str, int]:
    """Return a rank's parts with their sum, which the oldest plans do not have."""
    return parts if "total_bytes" in parts else {**parts, "total_bytes": sum(parts.values())}


def _measured(measured: Mapping[str, Any]) -> str:
    """Say what the plan took when it was run beside others, and in which place it ended."""
    others = sum(not plan["failure"] for plan in measured["compared"])
    return (
        f"Measured: {format_seconds(measured['step_s'])} a step, the median of "
        f"{len(measured['turns_s'])} turns; the fastest of {others} plans that ran"
    )
