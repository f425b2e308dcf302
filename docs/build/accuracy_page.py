"""The page of what published runs show of the cost model, docs/accuracy.md.

    python -m docs.build.accuracy_page

Prices all tables of published runs, with fits that have not seen them, and captured models.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from benchmarks.published import PUBLISHED
from benchmarks.published.accuracy import (
    TABLES,
    estimated_errors,
    fit_table,
    held_out_of,
    load_cases,
    report,
    stalls,
)
from benchmarks.published.goldens import goldens
from benchmarks.published.layouts.captured_rows import captured_rows
from benchmarks.published.odds import ended_runs, reliability

TITLES = {
    "rows": "rows",
    "mape_pct": "MAPE",
    "median_ape_pct": "median",
    "bias_pct": "bias",
    "kendall_tau": "tau",
    "regret_pct": "regret",
    "median_regret_pct": "median",
    "memory_mape_pct": "memory",
    "without_source_mape_pct": "-source",
    "without_fifth_mape_pct": "-fifth",
}
"""Columns; the last two are of rates fitted without the row's source or fifth."""

FEWEST = 0.99
"""Of the odds that are told, where the last part begins."""

VERDICTS = ("fits", "nearly full", "does not fit", "far from full")

HEAD = """# Accuracy

Generated on {date} by `python -m docs.build.accuracy_page`; don't edit it.
How rows are priced, what is fitted and what no column tells: [rows](estimate-rows.md).

| column | meaning |
|---|---|
| MAPE, median, bias | of the step time in percent: mean and median absolute error, and mean |
| tau | Kendall's, of predicted and measured order; mean over groups of a model, machine and batch |
| regret, median | percent by which the layout predicted to be best is behind the measured best |
| memory | mean absolute error of max-allocated memory in percent, where a source prints it |
| -source, -fifth | MAPE under rates fitted again without the source, or a fifth of all rows |

A source that has stalled runs ([why](estimate-rows.md#nanotrons-ultra-scale-playbook)) has a second
line without them. Nothing is fitted to mixtures of experts and adapters but what their records say
(`costmodel/execution/data`).
"""

CAPTURED = """## Captured models under published layouts

`python -m benchmarks captured_rows`: the model as Hugging Face's library writes it, which is its
capture op for op (`tests/templates/test_published_layouts.py`), on the row's stages and degrees. In
brackets the error against the measurement.

"""

FITS = """## Whether a run fits

By the exact walk of memory. *Far from full*: crashed, and needs less than 0.4 of the device, so
for something else; the 0.4 was chosen looking at these runs. *Nearly full*: fits, and the
allocator reserves more than the device has. Of the runs that crashed for memory, so counted,
{caught} are said not to fit; with those nearly full, {nearly} of all
that crashed are not said to fit.

| source | ran: fits | nearly full | not | crashed: fits | nearly full | not | far from full |
|---|---|---|---|---|---|---|---|
"""


ODDS = """## Odds of fitting

`python -m benchmarks intervals --of odds`: what the odds say that a search compares with
`--memory-odds`, on nanotron's runs; those far from full are left out, and crashes of layouts that
ran in another row. Of the runs that crashed for memory, {told} have odds under a half, and of those
that ran {lost}. *Fitted*: of those that ran, as many more as crash far from a full device, where it
is for something else (14% of the 1B model's runs, 2% of the 8B's).

| odds | runs | mean odds | ran | fitted |
|---|---|---|---|---|
"""

HOSTS = """## Runs that hosts set

`python -m benchmarks goldens`: Megatron-LM's regression runs
([small work](estimate-rows.md#small-work)). *Fitted*: of the half of the cases that set what hosts
take; *aside*: of the other half, and of a machine with a slower host.

| device | kind | half | cases | MAPE | bias |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class Section:
    """What a table of runs shows."""

    title: str
    """What its runs are of."""
    file: str
    """Its name."""
    lines: Sequence[Mapping[str, Any]]
    """Figures by source (`accuracy.report`)."""
    fits: Mapping[str, Mapping[str, int]]
    """Counts of verdicts by source (`accuracy.fit_table`)."""


def cells_of(line: Mapping[str, Any]) -> list[str]:
    """Return the texts of a line's figures, in the order of TITLES."""
    cells = [line.get(key) for key in TITLES]
    return ["-" if v is None else str(v) if isinstance(v, int) else f"{v:.2f}" for v in cells]


def page_of(
    sections: Sequence[Section],
    *,
    date: datetime.date,
    captured: str = "",
    more: Sequence[str] = (),
) -> str:
    """Return the page's text; `captured` is the table of captured models, `more` are sections
    behind all others.
    """
    text = HEAD.format(date=date)
    for section in sections:
        used = [i for i, key in enumerate(TITLES) if any(key in line for line in section.lines)]
        titles = [list(TITLES.values())[i] for i in used]
        text += f"\n## {section.title}\n\n`{section.file}`\n\n"
        text += f"| source | {' | '.join(titles)} |\n{'|---' * (len(titles) + 1)}|\n"
        for line in section.lines:
            cells = cells_of(line)
            text += f"| {line['source']} | {' | '.join(cells[i] for i in used)} |\n"
    if captured:
        text += f"\n{CAPTURED}{captured}\n"
    counts: dict[str, dict[str, int]] = {}
    for section in sections:
        for source, found in section.fits.items():
            of = counts.setdefault(source, {})
            for what, count in found.items():
                of[what] = of.get(what, 0) + count
    crashed = {v: sum(of.get(f"crashed, said: {v}", 0) for of in counts.values()) for v in VERDICTS}
    whole = sum(crashed[v] for v in VERDICTS[:3])
    caught = f"{crashed['does not fit']} of {whole}"
    if whole:
        caught += f" ({100 * crashed['does not fit'] / whole:.1f}%; of all that crashed "
        caught += f"{100 * crashed['does not fit'] / sum(crashed.values()):.1f}%)"
    told = crashed["does not fit"] + crashed["nearly full"]
    nearly = f"{told} ({100 * told / max(1, sum(crashed.values())):.1f}%)"
    text += "\n" + FITS.format(caught=caught, nearly=nearly)
    for source, of in counts.items():
        ran = [str(of.get(f"ran, said: {v}", 0)) for v in VERDICTS[:3]]
        out = [str(of.get(f"crashed, said: {v}", 0)) for v in VERDICTS]
        text += f"| {source} | {' | '.join(ran + out)} |\n"
    return "\n".join([text, *more])


def odds_section(lines: Sequence[Mapping[str, float]]) -> str:
    """Return how often runs ran of those said to fit with some odds (`odds.reliability`)."""
    parts = [line for line in lines if line["odds_to"] <= 1 or line["odds_from"] == FEWEST]
    ran = {line["odds_from"]: line["runs"] * line["ran_pct"] / 100 for line in parts}
    crashed = {line["odds_from"]: line["runs"] - ran[line["odds_from"]] for line in parts}

    def part(of: Mapping[float, float]) -> str:
        whole = sum(of.values())
        return f"{of.get(0.0, 0):.0f} of {whole:.0f} ({100 * of.get(0.0, 0) / whole:.1f}%)"

    text = ODDS.format(told=part(crashed), lost=part(ran))
    for line in parts:
        most = min(100, 100 * line["odds_to"])
        text += f"| {100 * line['odds_from']:.0f} to {most:.0f}% | {line['runs']} | "
        text += f"{line['odds_pct']:.0f}% | {line['ran_pct']:.0f}% | "
        text += f"{line['fit_pct']:.0f}% |\n"
    return text


def hosts_section(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return errors of runs that hosts set (`goldens`)."""
    text = HOSTS
    for line in lines:
        text += f"| {line['gpu']} | {line['kind']} | {line['half']} | {line['cases']} | "
        text += f"{line['mape_pct']:.2f} | {line['bias_pct']:.2f} |\n"
    return text


def sections_of(folder: Path) -> list[Section]:
    """Return what all tables in a folder show; rates are fitted to dense models alone."""
    sections = []
    for title, file, experts in TABLES:
        cases, _ = load_cases(folder / file, experts=experts)
        fits = fit_table(cases)
        cases, errors = estimated_errors([case for case in cases if case.ran])
        stalled = stalls(cases, errors)
        unseen = None
        if file == "measured.csv" and not experts:
            unseen = held_out_of(cases)
        lines = report(cases, errors, unseen, stalled)
        sections.append(Section(title=title, file=file, lines=tuple(lines), fits=fits))
    return sections


def captured_table() -> str:
    """Return the table of captured models under published layouts."""
    lines = [
        "| model | source | dp, cp, tp, pp, vpp, ep | measured | row | captured | difference |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in captured_rows().rows:
        degrees = ", ".join(str(row[axis]) for axis in ("dp", "cp", "tp", "pp", "vpp", "ep"))
        prices = [f"{row[f'{of}_s']:.3f} s ({row[f'{of}_error_pct']:+.1f}%)"
                  for of in ("row", "captured")]  # fmt: skip
        lines.append(
            f"| {row['model']} | {row['source']} | {degrees} | {row['measured_s']:.3f} s | "
            f"{prices[0]} | {prices[1]} | {row['difference_pct']:+.1f}% |"
        )
    return "\n".join(lines)


def main() -> None:
    """Write the page of today."""
    sections, captured = sections_of(PUBLISHED), captured_table()
    more = [odds_section(reliability(ended_runs(PUBLISHED))), hosts_section(goldens().rows)]
    text = page_of(sections, date=datetime.date.today(), captured=captured, more=more)
    (ROOT / "docs" / "accuracy.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
