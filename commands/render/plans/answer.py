"""A search's answer on one screen: the plan, what it costs and why, what lost to it, what is next.

The same as data is `as_data`, which `--json` prints.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.table import Table
from rich.text import Text

from commands.render.flags import with_flags
from commands.render.plans.parts import (
    MEMORY_COLUMNS,
    NARROW_MEMORY_COLUMNS,
    WIDE,
    StepParts,
    bottleneck_line,
    bottleneck_words,
    memory_cells,
    memory_digits,
    memory_range,
    memory_warning,
    ranks_shown,
    stage_name,
)
from commands.render.plans.pipeline import draw_step
from commands.render.plans.words import compact, experts_words, loses, plan_sentence
from commands.render.tables import NextCommands, light_table
from planner.language.plan import Plan
from planner.timeline import RankTimeline
from planner.units import TFLOP, format_bytes, format_seconds
from search.report.overview import Overview
from search.request import RunnerUp, SearchResult

MOST_ALTERNATIVES = 2
"""Runners-up that are shown; --json has all."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a search answers with, and what the screen shows of it."""

    result: SearchResult
    """The plan as it is written, its certificate and what lost to it."""
    plan: Plan
    """The plan."""
    overview: Overview
    """Its price at a glance."""
    predicted: tuple[RankTimeline, ...]
    """Its simulated step."""
    model_file: str
    """The model, as it was given: words of a command."""
    out: Path
    """Where the plan is written."""
    front: Table | None = None
    """Plans of which none is worse than another in all that is compared."""
    machine: str = ""
    """Options that name the machine in other commands, where the plan's file alone does not."""
    odds_of_riskier: float = 0.0
    """The odds that the riskier plan of the result fits."""

    @property
    def warnings(self) -> list[str]:
        """What to know before the plan is used, most important first."""
        return _warnings(self)

    @property
    def next_commands(self) -> list[tuple[str, str]]:
        """(command, what it does) that come next."""
        plan, model = self.out, self.model_file
        return [
            (f"planner show {plan} {model} --html report.html{self.machine}", "see it drawn"),
            (f"planner verify {plan} {model}", "prove that it trains as one device would"),
            (f"planner launch {plan} train.py", "train, by your script that calls planner.apply")
            if self.plan.execution == self.plan.runs_as
            else (f"planner emit {plan} {model} --to SYSTEM", "write it for what trains it"),
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Yield the screen, as wide as it is."""
        width = options.max_width
        yield _heading(self)
        yield ""
        if self.plan.pp > 1:
            yield draw_step(self.predicted, self.overview.step_s, width=width)
            yield ""
        yield _stages(self.overview, width)
        yield ""
        yield StepParts(self.overview.path.parts)
        yield from _bottleneck(self.overview)
        yield ""
        yield _certificate(self.result)
        yield from _alternatives(self.result.runners_up, self.overview)
        for warning in self.warnings:
            yield Text("! ", style="yellow") + Text(with_flags(warning))
        if self.front is not None:
            yield self.front
        yield NextCommands(*self.next_commands)


def as_data(answer: Answer) -> dict[str, Any]:
    """Return all of an answer as JSON data."""
    certificate = answer.result.certificate
    return {
        "sentence": plan_sentence(answer.plan, answer.overview),
        "plan_file": str(answer.out),
        **answer.overview.to_dict(),
        "certificate": None if certificate is None else certificate.to_dict(),
        "runners_up": [asdict(runner) for runner in answer.result.runners_up],
        "measured": answer.plan.estimate.get("measured"),
        "search_s": answer.result.search_s,
        "was_kept": answer.result.was_kept,
        "warnings": [with_flags(warning) for warning in answer.warnings],
        "next": [command for command, _ in answer.next_commands],
        "plan": answer.plan.model_dump(mode="json", exclude={"estimate"}),
    }


def _heading(answer: Answer) -> Text:
    overview = answer.overview
    interval = overview.interval
    lines = Text("Best plan: ", style="bold") + Text(plan_sentence(answer.plan, overview) + "\n")
    rate = (
        f"{compact(overview.tokens_per_s)} tokens/s"
        if overview.tokens_per_s
        else f"{compact(overview.samples_per_s)} samples/s"
    )
    figures = [f"{format_seconds(overview.step_s)} a step", rate]
    if overview.mfu is not None:
        figures.append(f"MFU {overview.mfu:.1%} of {overview.dtype}")
    lines += Text("  ".join(figures), style="bold")
    lines += Text(
        f"\n±{interval.relative:.0%}: {format_seconds(interval.low_s)} to "
        f"{format_seconds(interval.high_s)} in 4 of 5 cases, from {interval.basis}\n"
    )
    measured = answer.plan.estimate.get("measured")
    if measured is not None:
        lines += Text(f"measured: {format_seconds(measured['step_s'])} a step\n")
    if experts := answer.plan.estimate.get("experts"):
        lines += Text(f"{experts_words(experts)}\n")
    fullest = overview.fullest
    parts, limit = overview.memory[fullest], overview.limit_bytes[fullest]
    total, interval_bytes = parts["total_bytes"], overview.memory_intervals[fullest]
    assumed = parts["allocator_bytes"] + parts["context_bytes"]
    low, high = interval_bytes.low_bytes, interval_bytes.high_bytes
    return (
        lines
        + Text(f"{format_bytes(total)} of {format_bytes(limit)}", style="bold")
        + Text(
            f" on the fullest device: {format_bytes(total - assumed)} of tensors and "
            f"{format_bytes(assumed)} for allocator and context\n"
            f"{memory_range(low, high, interval_bytes.basis)}"
        )
    )


def _stages(overview: Overview, width: int) -> Table:
    table = light_table()
    is_wide = width >= WIDE
    has_groups = any(stage.device_group for stage in overview.stages)
    recomputes = is_wide and any(stage.recompute != "none" for stage in overview.stages)
    table.add_column("pp rank", justify="right")
    table.add_column("devices", no_wrap=True)
    if is_wide:
        table.add_column("mesh", no_wrap=True)
    table.add_column("blocks", ratio=1, overflow="fold")
    if recomputes:
        table.add_column("recomputes")
    table.add_column("work", justify="right", no_wrap=True)
    columns = MEMORY_COLUMNS if is_wide else NARROW_MEMORY_COLUMNS
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    prefix = _common_prefix([stage.blocks for stage in overview.stages])
    ranks = sorted({stage.pp_rank for stage in overview.stages})
    last = -1
    for rank in ranks_shown(len(ranks), overview.path.bottleneck):
        if rank > last + 1:
            table.add_row("⋮", f"{rank - last - 1} more")
        last = rank
        mine = [stage for stage in overview.stages if stage.pp_rank == rank]
        devices = f"{mine[0].first_rank}-{mine[0].last_rank}"
        if mine[0].first_rank == mine[0].last_rank:
            devices = str(mine[0].first_rank)
        if has_groups:
            devices += f" {mine[0].device_group}"
        memory = memory_cells(overview.memory[rank], memory_digits(overview.peak_bytes), columns)
        # The rank's own figures stand beside its first stages; equal recomputation shares a row.
        alike = [list(some) for _, some in groupby(mine, key=lambda stage: stage.recompute)]
        for stages in alike:
            is_first, stage = stages is alike[0], stages[0]
            row = [str(rank), devices] if is_first else ["", ""]
            if is_wide:
                mesh = " x ".join(f"{axis} {size}" for axis, size in stage.mesh) or "alone"
                row.append(mesh if is_first else "")
            row.append(_joined([each.blocks.replace(prefix, "") for each in stages]))
            if recomputes:
                row.append(_shortened(stage.recompute))
            row.append(format_seconds(overview.path.rank_work_s[rank]) if is_first else "")
            row += memory if is_first else [""] * len(memory)
            is_slowest = len(ranks) > 1 and rank == overview.path.bottleneck
            table.add_row(*map(Text, row), style="bold" if is_slowest else "")
    state = "" if is_wide else "; state: weights, gradients, optimizer"
    table.caption = Text(f"memory in GiB per device{state}{_without(prefix)}")
    table.caption_justify = "left"
    return table


def _without(prefix: str) -> str:
    return f"; names of blocks without {prefix!r}" if prefix else ""


def _shortened(recompute: str) -> str:
    """Return ``selective 8/9`` of ``selective in 8 of 9 blocks``."""
    return recompute.replace(" in ", " ").replace(" of ", "/").removesuffix(" blocks")


def _joined(stages: Sequence[str]) -> str:
    """Return blocks of several stages, a repeated name left out: ``layers.0..1; 8..9``."""
    told, base = "", ""
    for blocks in stages:
        told += f"{'; ' if told else ''}{blocks.removeprefix(base)}"
        numbered = re.match(r"(?:.*, )?(\D+\.)\d", blocks)
        base = numbered[1] if numbered else ""
    return told


def _common_prefix(blocks: Sequence[str]) -> str:
    """Return what all names of blocks begin with, up to a dot: ``model.``."""
    names = [name for text in blocks for name in text.split(", ")]
    first = names[0].split(".")
    for count in range(len(first) - 1, 0, -1):
        prefix = ".".join(first[:count]) + "."
        if all(name.startswith(prefix) for name in names):
            return prefix
    return ""


def _bottleneck(overview: Overview) -> Iterator[Text]:
    if told := bottleneck_in_words(overview):
        yield bottleneck_line(told)


def bottleneck_in_words(overview: Overview) -> str:
    """Say which pipeline rank works longest, and by how much; nothing where there is one."""
    if len({stage.pp_rank for stage in overview.stages}) == 1:
        return ""
    path = overview.path
    return bottleneck_words(
        path.parts,
        pp_rank=path.bottleneck,
        work_s=path.rank_work_s[path.bottleneck],
        stages=[
            stage_name(stage.stage, stage.first_block, stage.last_block)
            for stage in overview.bottleneck
        ],
    )


_FATES = {"memory": "do not fit", "layout": "can't be laid out"}
"""What became of configurations, by the first word of the rule that removed them."""


def _certificate(result: SearchResult) -> Text:
    return Text("Proof: ", style="bold") + Text(proof_in_words(result))


def proof_in_words(result: SearchResult) -> str:
    """Say how sure a plan is the fastest, and what became of all configurations."""
    certificate = result.certificate
    assert certificate is not None, "a plan comes with its certificate"
    if certificate.gap == 0:
        verdict = "the fastest there is under the cost model"
    elif certificate.lower_bound_s > 0:
        verdict = f"within {certificate.gap:.2%} of the fastest there is under the cost model"
    else:  # some degrees were not looked at
        verdict = "the fastest of those looked at under the cost model"
    fates: Counter[str] = Counter()
    for rule, count in certificate.pruned:
        fates[_FATES.get(rule.partition(":")[0], "can't be faster")] += count
    told = [f"{count:,} {fate}" for fate, count in fates.most_common() if count]
    told.append(f"{certificate.evaluated:,} priced in full")
    if certificate.unexplored:
        told.append(f"{certificate.unexplored:,} not looked at")
    text = f"{verdict}: of {certificate.considered:,} configurations {', '.join(told)}"
    text += f"; it took {format_seconds(result.search_s)}"
    if result.was_kept:
        text += ", kept from an earlier search (--no-cache searches again)"
    if certificate.stopped_early:
        text += f"; stopped early: {with_flags(certificate.stopped_early)}"
    if certificate.placements_gap:
        text += (
            "; placements inside blocks were too many to solve exactly, others may save up to "
            f"{certificate.placements_gap:.2g} of a block's seconds"
        )
    return text


def _alternatives(runners_up: Sequence[RunnerUp], overview: Overview) -> Iterator[RenderableType]:
    for number, runner in enumerate(runners_up[:MOST_ALTERNATIVES]):
        slower = runner.step_s / overview.step_s - 1
        unsure = " (too close to call)" if overview.interval.holds(runner.step_s) else ""
        yield Text("Second: " if not number else "Third: ", style="bold") + Text(
            f"{runner.label}, {slower:+.1%}{unsure}, {format_bytes(runner.peak_bytes)}: "
            f"{loses(runner.differences)}"
        )


def _warnings(answer: Answer) -> list[str]:
    overview, plan = answer.overview, answer.plan
    found = [answer.result.whole_batch, answer.result.not_written]
    peaks = dict(overview.peak_flop_per_s)
    own, half = peaks.get(overview.dtype, 0.0), peaks.get("bfloat16", 0.0)
    if overview.device_type != "cpu" and overview.dtype == "float32" and half > own > 0:
        found.append(
            f"the model multiplies in float32, {own / TFLOP:.0f} of the {half / TFLOP:.0f} TFLOP/s "
            "that this device has in bfloat16; `precision` bf16 searches with bf16 and fp32 master "
            "weights"
        )
    fullest = overview.fullest
    found.append(
        memory_warning(
            overview.memory[fullest]["total_bytes"],
            overview.memory_intervals[fullest].high_bytes,
            overview.device_bytes[fullest],
        )
    )
    if answer.result.riskier is not None:
        step_s = float(answer.result.riskier.estimate["step_s"])
        found.append(
            f"a plan that is {overview.step_s / step_s - 1:.1%} faster fits in "
            f"{10 * answer.odds_of_riskier:.0f} of ten: `memory_odds` 0.5 finds it"
        )
    if overview.source == "shipped":
        found.append(
            f"times are of a shipped description ({plan.cluster.name}); `planner profile` on the "
            "machine itself narrows the interval"
        )
    close = [r for r in answer.result.runners_up if overview.interval.holds(r.step_s)]
    if close and answer.plan.estimate.get("measured") is None:
        others = "runners-up are" if len(close) > 1 else "runner-up is"
        found.append(
            f"{len(close)} {others} within what the estimate may be off by; on the machine, "
            f"`measure` {len(close) + 1} lets a few steps decide"
        )
    return [warning for warning in found if warning]
