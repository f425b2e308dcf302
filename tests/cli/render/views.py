"""A plan's figures, small enough to check by hand, for what draws and tells them."""

from __future__ import annotations

from typing import Any

from costmodel.time.step_path import StepPath
from costmodel.uncertainty import Interval, MemoryInterval
from planner.units import GIB
from search.report.overview import Overview, StageView


def step_path(**changes: Any) -> StepPath:
    """Return a step of 10 s: rank 0 works 6 s of it, rank 1 works 9 s."""
    parts: dict[str, Any] = {
        "work_s": {"compute_s": 6.0, "tp_comm_s": 1.5, "offload_s": 0.0},
        "by_rank_s": {"compute_s": (5.0, 7.0), "tp_comm_s": (1.0, 2.0), "offload_s": (0.0, 0.0)},
        "imbalance_s": 1.5,
        "fill_drain_s": 0.5,
        "messages_s": 0.25,
        "inputs_s": 0.25,
        "clipping_s": 0.0,
    }
    return StepPath(**(parts | changes))


def stage_view(stage: int, **changes: Any) -> StageView:
    """Return a stage on a pp rank of its own, of two devices each."""
    parts: dict[str, Any] = {
        "stage": stage, "pp_rank": stage, "first_block": 2 * stage, "last_block": 2 * stage + 1,
        "blocks": f"layers.{2 * stage}..{2 * stage + 1}", "first_rank": 2 * stage,
        "last_rank": 2 * stage + 1, "device_group": "", "mesh": (("tp", 2),), "recompute": "none",
        "num_params": 1_500_000, "forward_s": 0.001, "backward_s": 0.002, "share": 0.6,
    }  # fmt: skip
    return StageView(**(parts | changes))


def overview(**changes: Any) -> Overview:
    """Return two pp ranks of two devices: rank 1 holds 6 of 8 GiB, rank 0 holds 4 of 16."""
    parts: dict[str, Any] = {
        "model": "tiny", "device": "test device", "num_devices": 4, "step_s": 10.0,
        "interval": Interval(low_s=9.0, high_s=12.0, basis="a test"), "samples_per_s": 0.8,
        "tokens_per_s": 2048.0, "mfu": 0.41, "dtype": "bfloat16",
        "peak_flop_per_s": (("bfloat16", 1e14),), "peak_bytes": 6 * GIB,
        "limit_bytes": (16.0 * GIB, 8.0 * GIB), "device_bytes": (16.0 * GIB, 8.0 * GIB),
        "memory": ({"total_bytes": 4 * GIB}, {"total_bytes": 6 * GIB}),
        "memory_intervals": (
            MemoryInterval(low_bytes=3 * GIB, high_bytes=5 * GIB, basis="dry runs"),
            MemoryInterval(low_bytes=5 * GIB, high_bytes=9 * GIB, basis="dry runs"),
        ),
        "path": step_path(), "stages": (stage_view(0), stage_view(1)), "source": "shipped",
        "device_type": "cuda",
    }  # fmt: skip
    return Overview(**(parts | changes))
