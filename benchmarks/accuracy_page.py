"""The page of what published runs show of the cost model: docs/accuracy.md, which is generated."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

VERDICTS = ("fits", "nearly full", "does not fit", "far from full")

HEAD = """# Accuracy

Generated on {date} by `python benchmarks/accuracy.py --page docs/accuracy.md --held-out`; don't
edit it. How rows are priced, what is fitted and what no column tells: [rows](estimate-rows.md).

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

`python -m benchmarks.captured_rows`: the model as Hugging Face's library writes it, which is its
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


def cells_of(line: Mapping[str, Any], *, digits: int) -> list[str]:
    """Return the texts of a line's figures, in the order of TITLES."""
    cells = [line.get(key) for key in TITLES]
    return [
        "-" if v is None else str(v) if isinstance(v, int) else f"{v:.{digits}f}" for v in cells
    ]


def page_of(sections: Sequence[Section], *, date: datetime.date, captured: str = "") -> str:
    """Return the page's text; `captured` is the table of captured models."""
    text = HEAD.format(date=date)
    for section in sections:
        used = [i for i, key in enumerate(TITLES) if any(key in line for line in section.lines)]
        titles = [list(TITLES.values())[i] for i in used]
        text += f"\n## {section.title}\n\n`{section.file}`\n\n"
        text += f"| source | {' | '.join(titles)} |\n{'|---' * (len(titles) + 1)}|\n"
        for line in section.lines:
            cells = cells_of(line, digits=2)
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
    return text


def write_page(path: Path, sections: Sequence[Section], captured: str) -> None:
    """Write the page of today."""
    text = page_of(sections, date=datetime.date.today(), captured=captured)
    path.write_text(text, encoding="utf-8")
