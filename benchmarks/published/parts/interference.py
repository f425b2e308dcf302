"""Kernels, collectives and copies that run at once, against the laws that price them.

Rows are of Mist's measurements on A100s and V100s (`interference_a100_v100.csv`): a product of
matrices, an NCCL collective, a copy up and a copy down, any of them absent, and the time until all
have ended. The times of each alone are taken from the same file, so that what is scored is the law
of what happens when they meet, and nothing else:

    messages   product + max(e collective, collective - product)      `exposed_seconds`
    copies     max(product, up, down)                                 `least_job_seconds`
    all        the first of these, or the copies where they are longer

e: the part of a message that work beside it does not hide, `exposed_part` of the device's rates,
fitted to whole training runs; the file's own is the median of what products left unhidden.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.harness import Result, benchmark
from benchmarks.published import PUBLISHED, records_of
from costmodel.table.rows.rows import machine_of

PARTS = ("product", "collective", "up", "down")
COLUMNS = ("gemm_n", "nccl_mb", "h2d_mb", "d2h_mb")
GPUS = {"a100-sxm4-40gb": ("A100-SXM", "40"), "v100-sxm2-16gb": ("V100-SXM", "16")}
"""What rows call these devices elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Parts that ran at once: seconds of each alone, and until all ended."""

    gpu: str
    between_nodes: bool
    alone_s: tuple[float, float, float, float]
    measured_s: float

    @property
    def name(self) -> str:
        """The parts that ran."""
        return " + ".join(p for p, s in zip(PARTS, self.alone_s, strict=True) if s)

    def predicted_s(self, exposed_part: float) -> float:
        """Return what the cost model says they take together."""
        product, collective, *copies = self.alone_s
        exposed = max(exposed_part * collective, collective - product)
        return max(product + exposed, *copies)


def load_meetings(path: Path) -> list[Meeting]:
    """Return the rows of two parts and more of which each part was measured alone."""
    times: dict[tuple, list[float]] = defaultdict(list)
    for row in records_of(path):
        where = row["gpu"], row["nodes"], row["intra_group"], row["inter_group"]
        sizes = tuple(float(row[name]) for name in COLUMNS)
        times[(*where, sizes)].append(float(row["latency_ms"]) / 1e3)
    found = []
    for (gpu, nodes, intra, inter, sizes), seconds in times.items():
        present = [index for index, size in enumerate(sizes) if size]
        if len(present) < 2:
            continue
        alone = [0.0] * len(sizes)
        for index in present:
            only = tuple(size if i == index else 0.0 for i, size in enumerate(sizes))
            alone[index] = float(np.median(times.get((gpu, nodes, intra, inter, only), [0.0])))
        if all(alone[index] for index in present):
            product, collective, up, down = alone
            meeting = Meeting(
                gpu=gpu,
                between_nodes=int(inter) > 1,
                alone_s=(product, collective, up, down),
                measured_s=float(np.median(seconds)),
            )
            found.append(meeting)
    return found


@cache
def exposed_part_of(gpu: str) -> float:
    """Return the part of messages that work does not hide, of the rates that price the device."""
    name, memory = GPUS[gpu]
    _, rates, _ = machine_of({"gpu": name, "gpu_mem_gb": memory})
    return rates.exposed_part


def unhidden_part(meetings: Iterable[Meeting]) -> float | None:
    """Return the median part of a collective that a longer product beside it leaves."""
    parts = [
        (meeting.measured_s - meeting.alone_s[0]) / meeting.alone_s[1]
        for meeting in meetings
        if meeting.name == "product + collective" and meeting.alone_s[1] < meeting.alone_s[0]
    ]
    return float(np.median(parts)) if parts else None


def table(meetings: list[Meeting]) -> list[dict[str, str | int | float | None]]:
    """Return a line for each device, kind of link and parts that met."""
    lines: list[dict[str, str | int | float | None]] = []
    groups: dict[tuple[str, bool, str], list[Meeting]] = defaultdict(list)
    for meeting in meetings:
        groups[meeting.gpu, meeting.between_nodes, meeting.name].append(meeting)
    for (gpu, between, name), mine in sorted(groups.items()):
        measured = np.array([meeting.measured_s for meeting in mine])
        longest = np.array([max(meeting.alone_s) for meeting in mine])
        in_turn = np.array([sum(meeting.alone_s) for meeting in mine])
        predicted = np.array([meeting.predicted_s(exposed_part_of(gpu)) for meeting in mine])
        errors = predicted / measured - 1
        lines.append(
            {
                "gpu": gpu,
                "links": "between nodes" if between else "in a node",
                "parts": name,
                "rows": len(mine),
                "over_longest": float(np.median(measured / longest)),
                "over_in_turn": float(np.median(measured / in_turn)),
                "unhidden_part": unhidden_part(mine),
                "median_error_pct": 100 * float(np.median(np.abs(errors))),
                "bias_pct": 100 * float(np.median(errors)),
            }
        )
    return lines


@benchmark("interference", quick={})
def interference(*, rows: Path = PUBLISHED / "interference_a100_v100.csv") -> Result:
    return Result(table(load_meetings(rows)))
