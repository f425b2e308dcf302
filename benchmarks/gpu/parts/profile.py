"""The profile of this machine, and how far the shipped one is off, by family."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.gpu.cases import MODEL
from benchmarks.gpu.measure import errors_by_family, measure
from benchmarks.gpu.results import Result, Setting

RESERVE_S = 25.0
"""What goes on past the budget: a visit that is under way, blocks that are compiled, the end."""

TINY_S = 15.0
"""Of a trial on a CPU: what is always measured takes that long, and longer on a busy machine."""


def run(setting: Setting) -> Iterator[Result]:
    """Yield what was measured once, then the shipped profile's errors by family."""
    from profiles import Profile
    from profiles.devices import profile_for_gpu

    budget_s = max(5.0, setting.seconds - RESERVE_S)
    if setting.tiny:
        budget_s = min(budget_s, TINY_S)
    profile = measure(
        setting.out / "profile",
        budget_s,
        device=setting.device,
        model=MODEL if setting.tiny else None,
        grid=not setting.tiny,
        compiled=not setting.tiny,
        command=setting.about.get("command", ""),
    )
    file = profile.file
    measured = {
        "context_bytes": file.context_bytes.value,
        "launch_s": file.launch_overhead_s.value,
        "memory_bytes_per_s": file.cluster.memory_bytes_per_s.value,
        **{f"{kind}_s": figure.value for kind, figure in file.host_work.items()},
        **{f"slower {kind}": figure.value for kind, figure in file.typical_slowdown.items()},
        **{f"block {kind}": figure.value for kind, figure in file.block_correction.items()},
        **{
            f"compiled block {kind}": figure.value
            for kind, figure in file.compiled_block_correction.items()
        },
        **{
            f"{fit.work}_bytes_per_s": 1 / fit.s_per_byte
            for fit in file.step_fits
            if fit.s_per_byte
        },
    }
    shipped = profile_for_gpu(profile.cluster.device)
    said = {}
    if shipped is not None:
        said = {
            "context_bytes": shipped.context_bytes.value,
            "launch_s": shipped.launch_overhead_s.value,
            "memory_bytes_per_s": shipped.cluster.memory_bytes_per_s.value,
        }
    notes = [*file.findings, *(f"skipped {s.probe}: {s.reason}" for s in file.skipped[:5])]
    yield Result(
        part="profile",
        check="machine",
        status="pass",
        measured=measured,
        predicted=said,
        note="; ".join([f"{len(profile.ops)} records", *notes]),
    )
    if shipped is None:
        return
    for key, errors in sorted(errors_by_family(Profile(shipped), profile).items()):
        median = float(np.median(errors))
        # Shipped over measured, minus 1: a measured time of 1 was predicted as 1 + error.
        yield Result(
            part="profile",
            check=" ".join(key),
            status="pass",
            measured={"relative_s": 1.0},
            predicted={"relative_s": 1.0 + median},
            note=f"{len(errors)} records, median |error| {np.median(np.abs(errors)):.1%}",
        )
