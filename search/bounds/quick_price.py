"""The step time of a cut configuration by one simulation, without making a plan.

The same formulas as `costmodel.estimate`, fed from the stage table's running sums instead of
joining blocks again, and without memory or parts: about a tenth of the time. A test holds the
two equal. Where skips reach past a stage the transfers counted here may be fewer, so whoever
wins is estimated in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from costmodel import JobSeconds, build_job_table
from costmodel.memory.memory import kept_bytes
from costmodel.time.clipping import last_rank, norm_sum_seconds
from costmodel.time.offload import least_job_seconds
from costmodel.time.simulate import JobTable, simulate
from costmodel.time.tied import exchange_seconds, gradient_bytes
from planner.plan import Recompute
from planner.schedule import build_schedule, stage_to_pp_rank
from planner.schedule.trips import Trip, trips
from search.bounds.copied_jobs import CopiedRow
from search.partition.chain_problem import Cut
from search.space import Configuration
from search.stages.rank_stages import StageRuns
from search.stages.stage_table import StageTable


def quick_step_s(
    config: Configuration, table: StageTable, cut: Cut, choices: tuple[Recompute, ...]
) -> float:
    """Return the simulated step time of a configuration cut this way."""
    ranks = table.with_replicas(dp=config.dp, cp=config.cp, zero=config.zero, choices=choices)
    runs = ranks.runs(cut.cuts)
    again = tuple(choices[choice] for choice in cut.choices)
    key = (
        config.schedule,
        config.pp,
        config.vpp,
        config.num_microbatches,
        config.dp,
        config.zero // 2,
        # ZeRO 0 and 1 differ after the last job, in what is sent ahead of weight gradients, and
        # in FSDP2's own work in every job, where that was measured.
        config.zero == 0 and "none" in again,
        config.is_sharded,
        float(runs.per_forward_s.sum()),
        cut.cuts,
        again,
    )
    if key not in table.rank_ends:
        table.rank_ends[key] = _simulated_rank_ends(config, table, cut, runs, again)
    homes = np.asarray(stage_to_pp_rank(config.schedule, config.pp, config.vpp))
    ready, updates, clips = [], [], []
    for rank, end in enumerate(table.rank_ends[key]):
        mine = homes == rank
        held = float(runs.param_bytes[mine].sum()), float(runs.num_params[mine].sum())
        ready.append(end + float(runs.after_s[mine].sum()))
        updates.append(ranks.adamw_s(*held))
        if table.costs.clips_gradients:
            clips.append(ranks.clip_seconds(*held))
    for i, j, size in table.ties:
        first, second = homes[np.searchsorted(cut.cuts, (i, j), side="right") - 1].tolist()
        if first != second:
            seconds = _tied_s(config, table, size, abs(second - first))
            ready[first] += seconds
            ready[second] += seconds
    world = config.dp * config.cp * config.tp * config.pp
    norm_sum_s = norm_sum_seconds(table.profile, world) if clips else 0.0
    last, clipping_s = last_rank(ready, updates, clips, norm_sum_s=norm_sum_s)
    first_rank = [
        block
        for stage in np.flatnonzero(homes == homes[0])
        for block in range(cut.cuts[stage], cut.cuts[stage + 1])
    ]
    inputs_s = table.inputs_s(first_rank, config.num_microbatches)
    return inputs_s + ready[last] + clipping_s + updates[last]


def _tied_s(config: Configuration, table: StageTable, param_bytes: float, pp_ranks: int) -> float:
    """Return what two stages take to sum the gradient of a parameter both hold."""
    size = gradient_bytes(
        param_bytes, precision=table.precision, shards=config.dp * config.cp if config.zero else 1
    )
    ranks_apart = pp_ranks * config.dp * config.cp * config.tp
    return exchange_seconds(table.profile, num_bytes=size, ranks_apart=ranks_apart)


def _simulated_rank_ends(
    config: Configuration,
    table: StageTable,
    cut: Cut,
    runs: StageRuns,
    recomputed: Sequence[Recompute],
) -> tuple[float, ...]:
    """Return when each pp rank ends its last job."""
    starts = list(cut.cuts[:-1])
    hops = table.hop_s(dp=config.dp, cp=config.cp, pp=config.pp)[starts].tolist()
    backs = table.back_hop_s(dp=config.dp, cp=config.cp, pp=config.pp)[starts].tolist()
    weights = runs.weight_s * (not config.is_sharded)
    inputs = runs.backward_s + runs.per_backward_s + runs.again_s(recomputed) - weights
    sends_ahead = np.array([choice == "none" and config.zero == 0 for choice in recomputed])
    timeline = simulate(
        job_table(config.schedule, config.pp, config.vpp, config.num_microbatches),
        JobSeconds(
            forward_s=tuple((runs.forward_s + runs.per_forward_s).tolist()),
            backward_input_s=tuple(inputs.tolist()),
            backward_weight_s=tuple(weights.tolist()),
            receive_forward_s=tuple(hops),
            receive_backward_s=(*backs[1:], 0.0),
            sends_ahead_s=tuple((runs.first_weight_s * sends_ahead).tolist()),
            last_sends_ahead_s=tuple((runs.weight_s * sends_ahead).tolist()),
        ),
        at_least=_copies_beside_jobs(config, table, cut, recomputed),
    )
    return timeline.rank_end_s


def _copies_beside_jobs(
    config: Configuration, table: StageTable, cut: Cut, recomputed: Sequence[Recompute]
) -> tuple[np.ndarray, ...] | None:
    """Return what copies of activations take beside each job of each rank, if there are any."""
    if not table.on_host.activations:
        return None
    at = np.asarray(cut.cuts)
    loads = table.runs.loads(at[:-1], at[1:])
    moved: dict[int, float] = {}
    for choice in set(recomputed):
        kept = kept_bytes(loads, recompute=choice) - loads.side_bytes
        moved |= {s: float(kept[s]) for s, own in enumerate(recomputed) if own == choice}
    rows = job_table(config.schedule, config.pp, config.vpp, config.num_microbatches).schedule.jobs
    found = _trips(config.schedule, config.pp, config.vpp, config.num_microbatches)
    return tuple(
        least_job_seconds(table.profile, len(row), made, moved)
        for row, made in zip(rows, found, strict=True)
    )


@lru_cache(maxsize=32)
def _trips(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[tuple[Trip, ...], ...]:
    """Return the trips that activations make in each row of a named schedule, of all stages."""
    rows = job_table(schedule, pp, vpp, num_microbatches).schedule.jobs
    return tuple(trips(row, range(pp * vpp)) for row in rows)


@lru_cache(maxsize=1024)
def copied_rows(schedule: str, pp: int, vpp: int, num_microbatches: int) -> tuple[CopiedRow, ...]:
    """Return each rank's jobs beside which activations are copied, where all stages' are."""
    rows = job_table(schedule, pp, vpp, num_microbatches).schedule.jobs
    found = _trips(schedule, pp, vpp, num_microbatches)
    return tuple(CopiedRow.of(row, made) for row, made in zip(rows, found, strict=True))


@lru_cache(maxsize=128)
def job_table(schedule: str, pp: int, vpp: int, num_microbatches: int) -> JobTable:
    """Return a named schedule's table, ready to be simulated; the last ones asked are kept."""
    return build_job_table(
        build_schedule(schedule, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    )
