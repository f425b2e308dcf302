"""A whole step in characters: a row for each pipeline rank, as wide as the screen.

    rank 0 |FFBFBFB...W|   F forward  B backward  . waits  O optimizer

Each character is the same part of the step and names what the rank does for most of it. With more
jobs than characters letters would be noise: then it is shaded by how much of it the rank works.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from planner.timeline import JOB_KINDS, OPTIMIZER, RankTimeline

MOST_RANKS = 16
"""Ranks that are drawn; of more, the first and the last."""

_STYLES = {"F": "blue", "B": "dark_orange", "I": "yellow", "W": "green", "O": "magenta"}
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward of inputs",
    "W": "weight gradients",
    "O": "optimizer",
}
_SHADES = ((0.95, "█"), (0.7, "▓"), (0.35, "▒"), (0.05, "░"))
WAITS = "·"


def draw_step(lines: Sequence[RankTimeline], step_s: float, *, width: int) -> Text:
    """Return a step's picture, no wider than `width`; `lines` are of one simulated step."""
    label = len(f"rank {len(lines) - 1}")
    columns = max(10, width - label - 4)
    jobs = max(sum(span.kind in JOB_KINDS for span in line.spans) for line in lines)
    is_shaded = columns < jobs
    text, kinds = Text(), set()
    half = MOST_RANKS // 2
    for place, line in enumerate(lines):
        if len(lines) > MOST_RANKS and half <= place < len(lines) - half:
            if place == half:
                text.append(f"{'⋮':>{label}} {len(lines) - MOST_RANKS} more\n")
            continue
        text.append(f"rank {line.pp_rank}".rjust(label) + " |")
        for worked in _columns(line, step_s, columns):
            busy = sum(worked.values())
            if is_shaded:
                text.append(next((mark for least, mark in _SHADES if busy >= least), WAITS))
            elif busy < 0.5:
                text.append(WAITS, style="dim")
            else:
                kind = max(worked, key=worked.__getitem__)
                kinds.add(kind)
                text.append(kind, style=_STYLES.get(kind, ""))
        text.append("|\n")
    if is_shaded:
        legend = f"█ works  ▒ works half of it  {WAITS} waits"
    else:
        legend = "  ".join(
            [
                *(f"{kind} {word}" for kind, word in _WORDS.items() if kind in kinds),
                f"{WAITS} waits",
            ]
        )
    return text + Text(" " * (label + 2) + legend, style="dim")


def _columns(line: RankTimeline, step_s: float, count: int) -> list[dict[str, float]]:
    """Return what part of each column of a row each kind of job takes."""
    found: list[dict[str, float]] = [{} for _ in range(count)]
    for span in line.spans:
        if span.kind not in (*JOB_KINDS, OPTIMIZER):
            continue
        start, end = (seconds / step_s * count for seconds in (span.start_s, span.end_s))
        for column in range(int(start), min(count, int(end) + 1)):
            part = min(end, column + 1) - max(start, column)
            if part > 0:
                found[column][span.kind] = found[column].get(span.kind, 0.0) + part
    return found
