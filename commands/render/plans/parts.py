"""What a step and a device's memory are made of, and how sure that is: for every command alike.

Comes from the estimate of a plan as its file has it (`Plan.estimate`) or from an `Overview`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import floor, log10

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from commands.render.plans.words import labelled
from commands.render.tables import light_table
from planner.units import GIB, format_bytes, format_number, format_seconds

WIDE = 100
"""Columns from which on there is room for explanations."""
MOST_ROWS = 12
"""Pipeline ranks in a table; those between are counted."""

MEMORY_COLUMNS = (
    ("weights", ("parameter_bytes",)),
    ("grads", ("gradient_bytes",)),
    ("optim.", ("optimizer_bytes",)),
    ("activ.", ("activation_bytes", "transient_bytes")),
    ("other", ("communication_bytes", "batch_bytes", "allocator_bytes", "context_bytes")),
    ("total", ("total_bytes",)),
)
"""Columns of memory, GiB, with the parts that each adds up."""
_STATE, _REST = MEMORY_COLUMNS[:3], MEMORY_COLUMNS[3:]
NARROW_MEMORY_COLUMNS = (("state", tuple(part for _, parts in _STATE for part in parts)), *_REST)
"""The same with weights, gradients and optimizer as one."""


class StepParts:
    """A table of a step's parts by cause, as wide as the screen; its time is their sum."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self._seconds = seconds

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """Yield the table; explanations stand in it where there is room."""
        is_wide = options.max_width >= WIDE
        table = light_table()
        table.add_column("part of a step", no_wrap=True)
        table.add_column("time", justify="right", no_wrap=True)
        table.add_column("share", justify="right", no_wrap=True)
        table.add_column("", no_wrap=True)
        if is_wide:
            table.add_column("which is", ratio=1)
        step_s, rest_s, rest = sum(self._seconds.values()), 0.0, []
        for label, meaning, seconds in labelled(self._seconds):
            share = seconds / step_s
            if share < 1e-6:  # what sums of floats leave
                continue
            if share < 0.0005:
                rest_s += seconds
                rest.append(label)
                continue
            row = [label, format_seconds(seconds), f"{share:.1%}", _bar(share)]
            table.add_row(*map(Text, [*row, *[meaning] * is_wide]))
        if rest:
            listed = ", ".join(rest)
            row = ["the rest", format_seconds(rest_s), f"{rest_s / step_s:.1%}", ""]
            table.add_row(*map(Text, [*row, *[listed] * is_wide]))
        yield table


def _bar(share: float) -> str:
    """Return a bar of up to twenty characters, in eighths of one."""
    eighths = max(1, round(160 * share))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def bottleneck_words(
    seconds: Mapping[str, float], *, pp_rank: int, work_s: float, stages: Sequence[str]
) -> str:
    """Return which pipeline rank sets the pace: `pp_rank`, which works `work_s` of the step, and
    the `stages` that it has, named.
    """
    step_s, imbalance_s = sum(seconds.values()), seconds["imbalance_s"]
    even = imbalance_s / step_s
    return f"pp rank {pp_rank} ({'; '.join(stages)}) works {work_s / step_s:.1%} of the step; " + (
        "the others work as long"
        if even < 0.005
        else f"with even stages it would work {format_seconds(imbalance_s)} ({even:.1%}) less"
    )


def bottleneck_line(words: str) -> Text:
    """Return the line that `bottleneck_words` stand in."""
    return Text("Bottleneck: ", style="bold") + Text(words)


def stage_name(stage: int, first_block: int, last_block: int) -> str:
    """Return what a stage is called where its blocks matter."""
    if first_block == last_block:
        return f"stage {stage}, block {first_block}"
    return f"stage {stage}, blocks {first_block}..{last_block}"


def ranks_shown(count: int, important: int) -> list[int]:
    """Return the pipeline ranks that a table shows: all, or the first, the last and one more."""
    if count <= MOST_ROWS:
        return list(range(count))
    return sorted({*range(4), important, *range(count - 4, count)})


def memory_cells(
    parts: Mapping[str, int],
    digits: int,
    columns: Sequence[tuple[str, tuple[str, ...]]] = MEMORY_COLUMNS,
) -> list[str]:
    """Return the GiB of columns of memory."""
    return [f"{sum(parts.get(part, 0) for part in names) / GIB:.{digits}f}" for _, names in columns]


def memory_digits(peak_bytes: float) -> int:
    """Return how many decimals GiB are shown with."""
    return 1 if peak_bytes > 4 * GIB else 3


def memory_table(memory: Sequence[Mapping[str, int]]) -> Table:
    """Return the memory of a device of each pipeline rank in parts."""
    table = light_table()
    table.add_column("pp rank", justify="right")
    for name, _ in MEMORY_COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    totals = [parts["total_bytes"] for parts in memory]
    digits, last = memory_digits(max(totals)), -1
    for rank in ranks_shown(len(memory), totals.index(max(totals))):
        if rank > last + 1:
            table.add_row("⋮", f"{rank - last - 1} more")
        last = rank
        table.add_row(str(rank), *memory_cells(memory[rank], digits))
    table.caption = Text("memory in GiB per device")
    table.caption_justify = "left"
    return table


def memory_range(low_bytes: float, high_bytes: float, basis: str) -> str:
    """Return where memory lies in four of five cases, in words."""
    return f"{format_bytes(low_bytes)} to {format_bytes(high_bytes)} in 4 of 5 cases, from {basis}"


def memory_warning(peak_bytes: float, high_bytes: float, device_bytes: float) -> str:
    """Return what to know where memory may pass a device's; nothing where it hardly can.

    `device_bytes` is what the device has: a lower limit of a search leaves room, and the warning
    names that limit, so whoever follows it is not warned again.
    """
    if high_bytes <= device_bytes:
        return ""
    safe = device_bytes * peak_bytes / high_bytes / GIB
    step = 10 ** (floor(log10(safe)) - 2)  # three digits, rounded down: up could pass the device's
    return (
        f"memory is tight: the fullest device has {format_bytes(device_bytes)} and needs more than "
        f"{format_bytes(high_bytes)} in one case of ten; to leave room, search with "
        f"`memory_limit_bytes` {format_number(floor(safe / step) * step)} GiB"
    )
