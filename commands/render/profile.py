"""What a profile holds, for people: text tables, and plots as one HTML file."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

from planner.files import replacing
from planner.units import GB, KIB, TFLOP, format_bytes, format_seconds
from profiles.lookup.families import MATMUL, family_of
from profiles.profile import Profile
from profiles.records import COLLECTIVE_KINDS, Calibration, CollectiveFit, Group, OpFit

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from rich.console import Console, ConsoleOptions

WORST_FITS = 5
MESSAGE_BYTES = tuple(KIB * 4**k for k in range(0, 11, 2))


def describe_profile(profile: Profile) -> tuple[Any, ...]:
    """Return rich renderables: the machine, rates, collectives per group, the worst fits."""
    parts = [_heading(profile), _machine(profile), _rates(profile), _Collectives(profile)]
    parts += [
        *describe_calibration(profile),
        *describe_runtimes(profile),
        _others(profile),
        _worst(profile),
        _skipped(profile),
        _legend(profile),
    ]
    return tuple(part for part in parts if part is not None)


def _heading(profile: Profile) -> str:
    cluster, file = profile.cluster, profile.file
    what = "measured here" if file.source == "measured" else "shipped: not measured here"
    state = "" if file.complete else "; not all probes fitted the budget, run again to add the rest"
    return (
        f"{profile.name}: {cluster.devices_per_node} x {cluster.device} a node "
        f"({what}; {len(profile.ops)} op and {len(profile.collectives)} collective records{state})"
    )


def _machine(profile: Profile) -> Any:
    from commands.render.tables import light_table

    file, cluster = profile.file, profile.file.cluster
    table = light_table("figure", "value", "from", title="machine")

    def row(name: str, value: str, figure: Any) -> None:
        table.add_row(name, value, f"{figure.origin}: {figure.detail}")

    row("memory per device", format_bytes(cluster.memory_bytes.value), cluster.memory_bytes)
    rate = cluster.memory_bytes_per_s
    row("memory rate", f"{rate.value / GB:.1f} GB/s", rate)
    for dtype, figure in cluster.peak_flop_per_s.items():
        row(f"peak {dtype}", f"{figure.value / TFLOP:.4g} TFLOP/s", figure)
    for link in (cluster.intra_node, cluster.inter_node, *(tier.link for tier in cluster.tiers)):
        beta = link.beta_s_per_byte
        row(f"{link.name}, alpha", format_seconds(link.alpha_s.value), link.alpha_s)
        each = f"{1 / beta.value / GB:.3g} GB/s" if beta.value else "free"
        row(f"{link.name}, 1/beta", each, beta)
    row("context per process", format_bytes(file.context_bytes.value), file.context_bytes)
    overhead = file.allocator_overhead_fraction
    seen = "" if overhead.high is None else f" ({overhead.low:.1%} to {overhead.high:.1%})"
    row("allocator overhead", f"{overhead.value:.1%}{seen}", overhead)
    launch = file.launch_overhead_s
    row("launch overhead per op", format_seconds(launch.value), launch)
    for work, figure in file.host_work.items():
        row(f"host, {work.replace('_', ' ')}", format_seconds(figure.value), figure)
    for pace, slow in file.typical_slowdown.items():
        seen = "" if slow.high is None else f" ({slow.low:.2f} to {slow.high:.2f})"
        row(f"typical slowdown, {pace}", f"x {slow.value:.2f}{seen}", slow)
    for direction, figure in file.block_correction.items():
        row(f"whole blocks, {direction}", f"x {figure.value:.2f} the sum of ops", figure)
    for direction, figure in file.compiled_block_correction.items():
        row(f"compiled blocks, {direction}", f"x {figure.value:.2f} the sum of ops", figure)
    for fit in file.step_fits:
        terms = (
            (fit.s_per_call, "block"), (fit.s_per_tensor, "tensor"), (fit.s_per_byte * GB, "GB"),
        )  # fmt: skip
        told = [f"{format_seconds(seconds)} a {each}" for seconds, each in terms if seconds]
        name, line = fit.work.replace("_", " "), " + ".join(told) or format_seconds(0.0)
        table.add_row(name, line, f"{fit.origin}: {fit.detail}")
    for part, figure in file.overlap_slowdown.items():
        row(f"{part} slowed by overlap", f"x {figure.value:.2f}", figure)
    wait = file.collective_wait
    if wait is not None:
        part = f"{wait.s_per_compute_s:.1%} of the compute before"
        around = format_seconds(wait.s_per_redistribution)
        line = f"{format_seconds(wait.s_per_call)} + {part}; {around} more inside a block"
        table.add_row("waits at a collective", line, f"{wait.origin}: {wait.detail}")
    return table


def describe_calibration(profile: Profile) -> tuple[Any, ...]:
    """Return the factors that recorded runs taught a profile, and which runs; () without any."""
    from rich.text import Text

    from commands.render.tables import light_table

    found = profile.file.calibration
    if found is None:
        return ()
    table = light_table(
        *("work", "takes longer by", "one sigma"),
        title="calibration: factors on what is said above",
        numbers=("takes longer by", "one sigma"),
    )
    for term, factor in found.factors.items():
        table.add_row(term, f"x {factor.value:.2f}", f"{factor.sigma:.2f}")
    runs = ", ".join(
        f"{run.num_steps} steps of {run.model} (plan {run.plan[:8]})" for run in found.runs
    )
    errors = f"median error of what was recorded: {found.error_before:.1%} without, "
    told = f"from {runs}; {errors}{found.error_after:.1%} with these factors"
    if (sigma := profile.expert_imbalance) is not None:
        told += f"; experts' rows were uneven by {sigma:.2f} (--expert-imbalance)"
    return table, Text(told)


def describe_runtimes(profile: Profile, runtimes: Iterable[str] | None = None) -> tuple[Any, ...]:
    """Return what logs of other runtimes taught a profile, with the logs, of some or all of them;
    () without any.
    """
    from rich.text import Text

    from commands.render.tables import light_table
    from costmodel.runtime_calibration import next_run, told_runs

    shown: list[Any] = []
    for runtime, known in profile.file.runtime_calibrations.items():
        if runtimes is not None and runtime not in runtimes:
            continue
        table = light_table(
            *("work", "takes longer by", "one sigma"),
            title=f"{runtime}: calibrated by {told_runs(known)}",
            numbers=("takes longer by", "one sigma"),
        )
        for term, factor in known.factors.items():
            table.add_row(term, f"x {factor.value:.2f}", f"{factor.sigma:.2f}")
        files = ", ".join(
            f"{each.file} ({each.digest[:8]})" for run in known.runs for each in run.evidence
        )
        before, after = next_run(runtime, known)
        told = (
            f"from {files}; median error {known.error_before:.1%} without these factors, "
            f"{known.error_after:.1%} with them; a next run like these lies within {before:.0%} "
            f"without and {after:.0%} with them, in 4 of 5 cases"
        )
        if ratios := [run.memory_ratio for run in known.runs if run.memory_ratio is not None]:
            told += f"; memory x {median(ratios):.2f} of the estimate"
        shown += [table, Text(told)]
    return tuple(shown)


def factors_words(known: Calibration) -> str:
    """Return factors in words, those of nothing that changes left out: ``kernels x 1.08``."""
    told = [f"{term} x {factor.value:.2f}" for term, factor in known.factors.items()]
    return ", ".join(each for each in told if not each.endswith(" 1.00")) or "all as they were"


def _rates(profile: Profile) -> Any | None:
    from commands.render.tables import light_table

    fits = [fit for fit in profile.file.op_fits if "." not in fit.family]
    if not fits:
        return None
    numbers = ("overhead", "flop/s", "bytes/s", "median error")
    table = light_table(
        *("family", "dtype", "direction", *numbers),
        title="ops: overhead + flop/rate + bytes/rate",
        numbers=numbers,
    )
    for fit in fits:
        table.add_row(
            fit.family,
            fit.dtype,
            fit.direction,
            format_seconds(fit.overhead_s),
            f"{1 / fit.s_per_flop / TFLOP:.3g} T" if fit.s_per_flop else "-",
            f"{1 / fit.s_per_byte / GB:.3g} G" if fit.s_per_byte else "-",
            _error(fit),
        )
    return table


class _Collectives:
    """What collectives take; a narrow screen has fewer sizes of messages, and no rates."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Yield the table."""
        from commands.render.plans.parts import WIDE

        yield _collectives(self._profile, is_wide=options.max_width >= WIDE)


def _collectives(profile: Profile, *, is_wide: bool) -> Any:
    from commands.render.tables import light_table

    cluster = profile.cluster
    groups = {fit.group for fit in profile.file.collective_fits}
    if not groups:
        groups = {Group(ranks_per_node=cluster.devices_per_node)}
    sizes = MESSAGE_BYTES if is_wide else MESSAGE_BYTES[1::2]
    numbers = ["alpha", *["1/beta, large"] * is_wide, *(format_bytes(n) for n in sizes)]
    table = light_table(
        *("collective", "group", *numbers, "from"),
        title="collectives: time by size of the full tensor",
        numbers=numbers,
    )
    fits = {(fit.kind, fit.group): fit for fit in profile.file.collective_fits}
    for group in sorted(groups, key=lambda g: (g.num_nodes, g.ranks_per_node)):
        if group.size == 1:
            continue
        for kind in COLLECTIVE_KINDS:
            if kind == "send_recv" and group.size != 2:
                continue
            answers = [profile.collective_seconds(kind, n, group) for n in sizes]
            fit = fits.get((kind, group))
            last = fit.pieces[-1].beta_s_per_byte if fit else 0.0
            table.add_row(
                kind,
                str(group),
                format_seconds(fit.pieces[0].alpha_s) if fit else "-",
                *[f"{1 / last / GB:.3g} GB/s" if last else "-"] * is_wide,
                *(format_seconds(answer.seconds) for answer in answers),
                answers[-1].source if fit is None else f"{fit.origin}, {_error(fit)} off",
            )
    return table


def _others(profile: Profile) -> str | None:
    """Say what other kinds of devices reach."""
    lines = []
    for section in profile.file.other_devices:
        rates = ", ".join(
            f"{dtype} {figure.value / TFLOP:.4g} TFLOP/s"
            for dtype, figure in section.peak_flop_per_s.items()
        )
        memory = section.memory_bytes_per_s.value / GB
        lines.append(f"also {section.num_ranks} x {section.device}: {rates}, {memory:.1f} GB/s")
    return "\n".join(lines) or None


def _worst(profile: Profile) -> str | None:
    fits: list[OpFit | CollectiveFit] = [
        *profile.file.op_fits,
        *profile.file.collective_fits,
    ]
    fits = sorted((f for f in fits if f.num_samples), key=lambda f: -f.relative_error)
    if not fits:
        return None
    names = [
        f"{fit.family} {fit.direction} {fit.dtype} {_error(fit)}"
        if isinstance(fit, OpFit)
        else f"{fit.kind} on {fit.group} {_error(fit)}"
        for fit in fits[:WORST_FITS]
    ]
    return "worst fits (median residual): " + "; ".join(names)


def _skipped(profile: Profile) -> str | None:
    skipped = profile.file.skipped
    if not skipped:
        return None
    lines = [f"  {skip.probe}: {skip.reason}" for skip in skipped]
    return "\n".join(["probes that gave no number:", *lines])


def _legend(profile: Profile) -> str | None:
    file = profile.file
    return "\n".join((*file.notes, *file.findings)) or None


def _error(fit: OpFit | CollectiveFit) -> str:
    return f"{fit.relative_error:.1%}" if fit.num_samples else "not measured"


def write_plots(profile: Profile, path: Path) -> None:
    """Write one HTML file: achieved flop/s by size, bus bandwidth by message size.

    Points are records, lines are what `op_seconds` and `collective_seconds` answer. The
    file needs no network: the plotting library is inside it.
    """
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=1, cols=2, subplot_titles=("matmul and attention", "bus bandwidth of collectives")
    )
    _plot_rates(figure, profile)
    _plot_collectives(figure, profile)
    figure.update_xaxes(type="log", title_text="flop", row=1, col=1)
    figure.update_yaxes(title_text="TFLOP/s", row=1, col=1)
    figure.update_xaxes(type="log", title_text="bytes of the full tensor", row=1, col=2)
    figure.update_yaxes(type="log", title_text="GB/s", row=1, col=2)
    figure.update_layout(title_text=_heading(profile))
    with replacing(path) as scratch:
        figure.write_html(str(scratch), include_plotlyjs=True)


def _plot_rates(figure: Any, profile: Profile) -> None:
    from plotly import graph_objects as go

    series: dict[str, list[tuple[float, float, str]]] = {}
    for record in profile.ops:
        family = family_of(record.target)
        if family in (MATMUL, "attention") and record.flop:
            name = f"{family} {record.dtype} {record.direction}"
            point = record.flop, record.flop / record.seconds / TFLOP, str(record.shapes)
            series.setdefault(name, []).append(point)
    for name, points in series.items():
        x, y, text = zip(*sorted(points), strict=True)
        figure.add_trace(go.Scatter(x=x, y=y, text=text, mode="markers", name=name), row=1, col=1)
    if not series:  # a shipped profile: its fits as lines
        for fit in profile.file.op_fits:
            if fit.family in (MATMUL, "attention"):
                flop = [2.0**k for k in range(24, 46)]
                rates = [f / (fit.overhead_s + f * fit.s_per_flop) / TFLOP for f in flop]
                name = f"{fit.family} {fit.dtype} {fit.direction}"
                figure.add_trace(go.Scatter(x=flop, y=rates, name=name), row=1, col=1)


def _plot_collectives(figure: Any, profile: Profile) -> None:
    from plotly import graph_objects as go

    from profiles.lookup.wire import wire_share

    sizes = [KIB * 2.0**k for k in range(21 if profile.source == "shipped" else 17)]
    for fit in profile.file.collective_fits:
        share = wire_share(fit.kind, fit.group.size)
        seconds = [profile.collective_seconds(fit.kind, n, fit.group).seconds for n in sizes]
        rates = [share * n / s / GB for n, s in zip(sizes, seconds, strict=True)]
        name = f"{fit.kind} {fit.group}"
        figure.add_trace(go.Scatter(x=sizes, y=rates, mode="lines", name=name), row=1, col=2)
        points = [
            (r.num_bytes, share * r.num_bytes / r.seconds / GB)
            for r in profile.collectives
            if (r.kind, r.ranks_per_node, r.num_nodes)
            == (fit.kind, fit.ranks_per_node, fit.num_nodes)
        ]
        if points:
            x, y = zip(*points, strict=True)
            figure.add_trace(go.Scatter(x=x, y=y, mode="markers", name=name), row=1, col=2)
