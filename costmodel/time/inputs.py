"""Seconds of loading a batch's tensors, from the host's memory onto devices.

Before its first job the engine copies the tensors of all its microbatches that its stages take
(`engine.Engine.step`). Every job of the step waits, directly or not, for the first stage's first
forward, and so for the copies of the rank that has the first stage; other ranks copy theirs while
they wait for it. A batch in pinned memory is assumed (DataLoader's `pin_memory`). A CPU uses the
batch where it lies.
"""

from __future__ import annotations

from collections.abc import Iterable

from costmodel.cache import CostCache


def input_seconds(
    costs: CostCache, blocks: Iterable[int], *, microbatch_size: int, num_microbatches: int
) -> float:
    """Return what the rank that has these blocks copies before its first job."""
    profile = costs.profile
    if profile.cluster.device_type == "cpu":
        return 0.0
    names = frozenset().union(*map(costs.batch_inputs, blocks))
    tensor = costs.graph.tensor
    each = sum(tensor[name].bytes_at(microbatch_size) for name in names)
    # The host issues a copy for each tensor of each microbatch; all of them share the link.
    copies = num_microbatches * len(names)
    moved = profile.step_seconds(
        "host_to_device", num_bytes=float(num_microbatches * each), num_tensors=copies
    )
    return moved.seconds + copies * profile.launch_overhead_s
