"""From raw records to profile.json: fits, rates, links and memory, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.errors import ProfileError
from profiles.families import MATMUL, family_of
from profiles.fit import fit_collectives, fit_nonnegative, fit_ops
from profiles.grid import COPY_BYTES
from profiles.records import (
    ClusterRecord,
    CollectiveRecord,
    Figure,
    LinkRecord,
    OpRecord,
    OptimizerFit,
    ProfileFile,
    SkippedProbe,
)


def summarize(
    ops: Sequence[OpRecord],
    collectives: Sequence[CollectiveRecord],
    *,
    about: Sequence[Mapping[str, Any]],
    device_type: str,
    nproc: int,
    memory: Mapping[str, float],
    optimizer: Sequence[tuple[bool, int, int, float]],
    overlap: Mapping[str, float],
    skipped: Sequence[SkippedProbe],
    complete: bool,
    conditions: Mapping[str, Any],
) -> ProfileFile:
    """Return the contents of profile.json. Raise ProfileError if the basics are missing."""
    first = about[0]
    link = _link(collectives, nproc)
    share = nproc if device_type == "cpu" else 1
    cluster = ClusterRecord(
        device=conditions["device"],
        device_type=device_type,
        devices_per_node=nproc,
        max_devices=nproc,
        memory_bytes=_measured(
            min(answer["memory_bytes"] for answer in about) / share,
            f"memory of the machine over {share} ranks" if share > 1 else "as the driver reports",
        ),
        memory_bytes_per_s=_measured(
            _copy_rate(ops), f"copy of {COPY_BYTES} bytes, read and written, all ranks at once"
        ),
        peak_flop_per_s=_best_rates(ops),
        intra_node=link,
        inter_node=link.model_copy(update={"name": "none: one node was measured"}),
    )
    return ProfileFile(
        name=first["node"],
        source="measured",
        complete=complete,
        conditions=dict(conditions),
        cluster=cluster,
        context_bytes=_measured(
            memory["context_bytes"], "a rank with its libraries and communicator, before tensors"
        ),
        allocator_overhead_fraction=_measured(
            memory["allocator_overhead_fraction"], "peak held over peak live, synthetic training"
        ),
        launch_overhead_s=_measured(
            _launch_overhead(ops), "aten.neg of one element, called back to back"
        ),
        overlap_slowdown={
            part: _measured(factor, "a long matmul chain beside an all-reduce of equal length")
            for part, factor in overlap.items()
        },
        optimizer_fits=_optimizer_fits(optimizer),
        op_fits=fit_ops(ops),
        collective_fits=fit_collectives(collectives),
        skipped=tuple(skipped),
    )


def _optimizer_fits(
    samples: Sequence[tuple[bool, int, int, float]],
) -> tuple[OptimizerFit, ...]:
    """Fit AdamW steps, given as (sharded, tensors, elements of each, seconds)."""
    fits = []
    for sharded in (False, True):
        chosen = [sample[1:] for sample in samples if sample[0] == sharded]
        if len(chosen) < 2:
            continue
        terms = np.array([[tensors, 4.0 * tensors * numel] for tensors, numel, _ in chosen])
        line, residual = fit_nonnegative(terms, np.array([s for _, _, s in chosen]))
        fits.append(
            OptimizerFit(
                sharded=sharded,
                s_per_tensor=line[0],
                s_per_byte=line[1],
                relative_error=float(np.median(np.abs(residual))),
                origin="measured",
                detail=f"torch.optim.AdamW over {len(chosen)} sets of float32 parameters",
            )
        )
    return tuple(fits)


def _measured(value: float, detail: str) -> Figure:
    return Figure(value=value, origin="measured", detail=detail)


def _forward(ops: Sequence[OpRecord], target: str) -> list[OpRecord]:
    found = [r for r in ops if r.target == target and r.direction == "forward"]
    if not found:
        raise ProfileError(
            f"the basic probe {target} gave no number; give more --budget and run again"
        )
    return found


def _launch_overhead(ops: Sequence[OpRecord]) -> float:
    return min(r.seconds for r in _forward(ops, "aten.neg.default"))


def _copy_rate(ops: Sequence[OpRecord]) -> float:
    return 2 * COPY_BYTES / min(r.seconds for r in _forward(ops, "aten.copy_.default"))


def _best_rates(ops: Sequence[OpRecord]) -> dict[str, Figure]:
    """Return the best matmul rate per dtype: a peak that was reached, not a data sheet's."""
    rates: dict[str, Figure] = {}
    for record in ops:
        if family_of(record.target) != MATMUL or not record.flop:
            continue
        rate = record.flop / record.seconds
        if record.dtype not in rates or rate > rates[record.dtype].value:
            shapes = " x ".join(str(list(shape)) for shape in record.shapes[:2])
            rates[record.dtype] = _measured(rate, f"best: {record.target} of {shapes}")
    return rates


def _link(collectives: Sequence[CollectiveRecord], nproc: int) -> LinkRecord:
    """Return the link between two ranks of a node, from send_recv; free for a single rank."""
    name = "inside the node"
    messages = [record for record in collectives if record.kind == "send_recv"]
    if messages:
        terms = np.array([[1.0, record.num_bytes] for record in messages])
        line, _ = fit_nonnegative(terms, np.array([record.seconds for record in messages]))
        return LinkRecord(
            name=name,
            alpha_s=_measured(line[0], "one line through send_recv of all sizes"),
            beta_s_per_byte=_measured(line[1], "one line through send_recv of all sizes"),
        )
    reason = "one rank: nothing to measure" if nproc == 1 else "no send_recv probe succeeded"
    free = Figure(value=0.0, origin="assumed", detail=reason)
    return LinkRecord(name=name, alpha_s=free, beta_s_per_byte=free)
