"""From raw records to profile.json: fits, rates, links and memory, each with its origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from planner.errors import ProfileError
from profiles.lookup.families import MATMUL, family_of
from profiles.lookup.fit import fit_collectives, fit_nonnegative, fit_ops
from profiles.lookup.op_model import OpModel, record_key
from profiles.measure.grid import COPY_BYTES
from profiles.measure.nodes.links import between_link, inside_link
from profiles.measure.probes import BlockProbe
from profiles.measure.session import Session
from profiles.measure.timing.surroundings import StepSample, Surroundings
from profiles.measure.visits import at_pace, midmean, undisturbed_pace
from profiles.records import (
    ClusterRecord,
    DeviceSection,
    Direction,
    Figure,
    NodeLinkRecord,
    OpRecord,
    PaceKind,
    ProfileFile,
    StepFit,
    StepWork,
    WaitFit,
    ZeroWork,
)


def summarize(
    session: Session,
    surroundings: Surroundings,
    *,
    blocks: Sequence[BlockProbe],
    complete: bool,
    stragglers: Sequence[str],
    command: str = "",
) -> ProfileFile:
    """Return the contents of profile.json. Raise ProfileError if the basics are missing.

    On a cluster of several kinds of devices the slowest stands for all, because the others
    wait for it; each of the others has a section, and the records of all stay in ops.csv.
    """
    device = _slowest_kind(session)
    ops = [record for record in session.ops.values() if record.device == device]
    others = [kind for kind in session.ranks.kinds if kind != device]
    mixed = [f"mixed devices: {device} is the slowest and stands for all; also {', '.join(others)}"]
    cluster = _cluster(session, device, ops, surroundings.node_links)
    fits = fit_ops(ops)
    model = OpModel(cluster.spec(device), ops, fits)
    eager = [block for block in blocks if not block.compiled]
    compiled = [block for block in blocks if block.compiled]
    overheads = surroundings.allocator_overheads
    return ProfileFile(
        name=session.ranks.hosts[0],
        source="measured",
        complete=complete,
        conditions=dict(session.conditions),
        cluster=cluster,
        context_bytes=_measured(
            surroundings.context_bytes,
            "a rank with its libraries, communicator and a first tiny step, before tensors",
        ),
        allocator_overhead_fraction=Figure(
            value=float(np.median(overheads)),
            low=min(overheads),
            high=max(overheads),
            origin="measured",
            detail=f"peak held over peak live, {len(overheads)} rounds of synthetic training",
        ),
        launch_overhead_s=_launch_overhead(ops, surroundings.launch_s),
        host_work={
            kind: _measured(seconds, "host time of a call in a chain of them, with autograd")
            for kind, seconds in surroundings.host_work.items()
        },
        typical_slowdown={
            pace: _typical_slowdown(pace, paces)
            for (kind, pace), paces in session.paces.items()
            if kind == device and paces
        }
        | _under_load(surroundings.sustained),
        overlap_slowdown={
            part: _measured(factor, "a long matmul chain beside an all-reduce of equal length")
            for part, factor in surroundings.overlap.items()
        },
        step_fits=_step_fits(
            surroundings.steps, undisturbed_pace(session.paces.get((device, "light"), ()))
        ),
        collective_wait=_wait_fit(surroundings.waits),
        block_correction=_block_correction(eager, ops, model),
        compiled_block_correction=_block_correction(compiled, ops, model),
        op_fits=fits,
        collective_fits=fit_collectives(tuple(session.collectives.values())),
        other_devices=tuple(_section(session, kind) for kind in others),
        skipped=tuple(session.skipped),
        node_links=surroundings.node_links,
        notes=(
            *(mixed if others else []),
            *surroundings.links,
            *([f"measured by {command}"] if command else []),
        ),
        findings=(
            *surroundings.findings,
            *stragglers,
            *throttled(session.clocks),
            *session.ranks.differences(),
        ),
    )


def _section(session: Session, kind: str) -> DeviceSection:
    ops = [record for record in session.ops.values() if record.device == kind]
    return DeviceSection(
        device=kind,
        num_ranks=len(session.ranks.kinds[kind]),
        memory_bytes_per_s=_measured(_copy_rate(ops), f"copy of {COPY_BYTES} bytes"),
        peak_flop_per_s=_best_rates(ops),
        op_fits=fit_ops(ops),
    )


def _block_correction(
    blocks: Sequence[BlockProbe], ops: Sequence[OpRecord], model: OpModel
) -> dict[Direction, Figure]:
    """Return time of whole blocks over the sum of their ops, blocks weighted by their uses."""
    known = {(record_key(record), record.arguments): record.seconds for record in ops}
    corrections: dict[Direction, Figure] = {}
    directions: tuple[Direction, ...] = ("forward", "backward")
    for direction in directions:
        measured = summed = 0.0
        ratios = []
        for block in blocks:
            for query in block.queries:
                seconds = known.get((record_key(query), block.arguments))
                if query.direction != direction or seconds is None:
                    continue
                parts = [part for part in block.parts if part.direction == direction]
                total = sum(model.seconds(part).seconds for part in parts)
                if total:
                    measured += block.weight * seconds
                    summed += block.weight * total
                    ratios.append(seconds / total)
        if summed:
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            detail = f"{len(ratios)} whole blocks over the sums of their ops ({spread})"
            corrections[direction] = _measured(measured / summed, detail)
    return corrections


def _typical_slowdown(pace: PaceKind, paces: Sequence[float]) -> Figure:
    """Return by how much the machine was slower than undisturbed."""
    undisturbed = undisturbed_pace(paces) or 1.0
    low, high = np.percentile(paces, [10, 90]) / undisturbed
    work = {"product": "a small matmul", "light": "a small norm and its gradient"}[pace]
    return Figure(
        value=midmean(paces) / undisturbed,
        low=float(low),
        high=float(high),
        origin="measured",
        detail=f"{work} beside {len(paces)} records' visits, over its fastest quarter",
    )


THROTTLED_VISITS = 0.05
"""Of all visits; a clock that falls for a moment decides nothing."""


def throttled(clocks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each rank whose GPU was held back by power or heat in many visits."""
    lines = []
    for rank in sorted({state["rank"] for state in clocks}):
        mine = [state for state in clocks if state["rank"] == rank]
        held = [state for state in mine if state["throttled"]]
        if len(held) < THROTTLED_VISITS * len(mine) or not held:
            continue
        why = ", ".join(dict.fromkeys(reason for state in held for reason in state["throttled"]))
        low, high = (pick(state["sm_mhz"] for state in mine) for pick in (min, max))
        power_w = max(state["power_w"] for state in mine)
        lines.append(
            f"rank {rank}: held back by {why} in {len(held)} of {len(mine)} visits; clocks of "
            f"{low:.0f} to {high:.0f} MHz, of {mine[0]['most_sm_mhz']:.0f} possible; up to "
            f"{power_w:.0f} W"
        )
    return lines


def _under_load(sustained: float | None) -> dict[PaceKind, Figure]:
    """Return by how much products slow under a load that goes on; light ops wait for memory, whose
    clock stays.
    """
    if sustained is None:
        return {}
    detail = "bfloat16 products for seconds on end over those after gaps"
    return {"product": _measured(max(1.0, sustained), detail)}


def _slowest_kind(session: Session) -> str:
    def matmul_seconds(kind: str) -> float:
        mine = [r for r in session.ops.values() if r.device == kind]
        return max(r.seconds for r in _forward(mine, "aten.mm.default"))

    # Ranks wait for each other, so the kind with the slowest product sets the pace.
    return max(session.ranks.kinds, key=matmul_seconds)


def _cluster(
    session: Session,
    device: str,
    ops: Sequence[OpRecord],
    node_links: Sequence[NodeLinkRecord],
) -> ClusterRecord:
    nodes = session.ranks.nodes
    per_node = min(len(ranks) for ranks in nodes)
    device_type = str(session.conditions["device_type"])
    # Ranks on CPU share their node's memory; each GPU has its own.
    share = per_node if device_type == "cpu" else 1
    collectives = tuple(session.collectives.values())
    inside = inside_link(collectives)
    between = between_link(collectives, node_links)
    if len(nodes) == 1:
        between = inside.model_copy(update={"name": "none: one node was measured"})
    return ClusterRecord(
        device=device,
        device_type=device_type,
        devices_per_node=per_node,
        max_devices=per_node * len(nodes),
        memory_bytes=_measured(
            session.ranks.memory_bytes,
            f"memory of the machine over {share} ranks" if share > 1 else "as the system reports",
        ),
        memory_bytes_per_s=_measured(
            _copy_rate(ops), f"copy of {COPY_BYTES} bytes, read and written, all ranks at once"
        ),
        peak_flop_per_s=_best_rates(ops),
        intra_node=inside,
        inter_node=between,
    )


def _step_fits(samples: Sequence[StepSample], undisturbed_s: float | None) -> tuple[StepFit, ...]:
    """Return a line through each kind of work, at the undisturbed pace as ops are."""
    fits = []
    for work in get_args(StepWork):
        chosen = [sample for sample in samples if sample.work == work]
        if len(chosen) < 2:
            continue
        # Only what is done block by block has a time of its own for each call.
        call = float(work in get_args(ZeroWork))
        # (samples, 3): calls, tensors, and bytes of float32.
        terms = np.array([[call, s.num_tensors, 4.0 * s.num_tensors * s.numel] for s in chosen])
        seconds = [midmean(at_pace(s.visits, s.paces, undisturbed_s)) for s in chosen]
        line, residual = fit_nonnegative(terms, np.array(seconds))
        fits.append(
            StepFit(
                work=work,
                s_per_call=line[0],
                s_per_tensor=line[1],
                s_per_byte=line[2],
                relative_error=float(np.median(np.abs(residual))),
                origin="measured",
                detail=f"over {len(chosen)} sets of float32 tensors",
            )
        )
    return tuple(fits)


def _wait_fit(rounds: Sequence[Sequence[tuple[float, float, float]]]) -> WaitFit | None:
    """Return the line through the midmeans of all rounds."""
    if not rounds:
        return None
    from scipy.optimize import nnls

    # (Least squares: a short wait is lost in noise, and may come out below nothing.)
    each_length = zip(*rounds, strict=True)
    waits = [tuple(midmean(part) for part in zip(*found, strict=True)) for found in each_length]
    terms = np.array([[1.0, compute_s] for compute_s, _, _ in waits])
    line, _ = nnls(terms, np.array([wait_s for _, wait_s, _ in waits]))
    lengths = ", ".join(f"{compute_s * 1e3:.1f}" for compute_s, _, _ in waits)
    return WaitFit(
        s_per_call=line[0],
        s_per_compute_s=line[1],
        s_per_redistribution=max(0.0, float(np.median([inside_s for _, _, inside_s in waits]))),
        least_compute_s=min(compute_s for compute_s, _, _ in waits),
        origin="measured",
        detail=f"all-reduces after {lengths} ms of a layer over those one after another",
    )


def _measured(value: float, detail: str) -> Figure:
    return Figure(value=value, origin="measured", detail=detail)


def _forward(ops: Sequence[OpRecord], target: str) -> list[OpRecord]:
    found = [r for r in ops if r.target == target and r.direction == "forward"]
    if not found:
        raise ProfileError(
            f"the basic probe {target} gave no number; give more `budget_s` and run again"
        )
    return found


def _launch_overhead(ops: Sequence[OpRecord], launch_s: float | None) -> Figure:
    if launch_s is not None:
        return _measured(launch_s, "host time of torch.neg of one element, many issued at once")
    seconds = min(r.seconds for r in _forward(ops, "aten.neg.default"))
    return _measured(seconds, "aten.neg of one element, called back to back")


def _copy_rate(ops: Sequence[OpRecord]) -> float:
    # A copy reads and writes: each byte crosses memory twice.
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
