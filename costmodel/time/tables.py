"""What tables with a gradient of rows take: rows on their way, and the optimizer's steps on them.

Of a table on the host, for each microbatch and lookup:

    forward    numbers down, the host gathers rows (3 passes over them), rows up
    backward   gradients of rows down, the host adds them up, and its optimizer steps on them

All on the path of its job: the runtime waits for each (`planner.runtime.state.tables`). Of a table
on the device it is the optimizer's steps on the rows of a microbatch. All numbers of a microbatch
are taken for different. Left out: what replicas exchange at the end of a step, and steps on the
rows of others.
"""

from __future__ import annotations

from costmodel.time.offload import copy_seconds
from planner.language.graph import Program
from planner.language.graph.tables import TABLE_LOOKUP
from planner.units import DTYPE_BYTES
from profiles import Profile
from profiles.hosts import REACHED_FRACTION

_NUMBER_BYTES, _MASTER_BYTES = 8, 4
_PASSES = 3
"""Rows are read from the table, and written to and read from what is sent; a sum reads two."""


def table_seconds(local: Program, profile: Profile) -> tuple[float, float]:
    """Return what the lookups of a bound local program add to its forward and its backward."""
    forward_s = backward_s = 0.0
    for op in local.ops:
        if op.target != TABLE_LOOKUP:
            continue
        count = local.tensor[op.inputs[1]].numel_at(1)
        made = local.tensor[op.outputs[0]]
        num_bytes, numbers_bytes = made.bytes_at(1), _NUMBER_BYTES * count
        # The rows in fp32, in which they are summed and stepped on.
        master_bytes = num_bytes // DTYPE_BYTES[made.dtype] * _MASTER_BYTES
        if not local.tensor[op.inputs[0]].on_host:
            backward_s += profile.optimizer_seconds(
                param_bytes=master_bytes, num_tensors=1, sharded=False
            ).seconds
            continue
        forward_s += copy_seconds(profile, numbers_bytes, to_host=True)
        forward_s += _host_seconds(profile, _PASSES * num_bytes)
        forward_s += copy_seconds(profile, num_bytes, to_host=False)
        backward_s += copy_seconds(profile, num_bytes, to_host=True)
        backward_s += _host_seconds(profile, _PASSES * master_bytes)
        backward_s += profile.host_optimizer_seconds(
            param_bytes=master_bytes, weight_bytes=0, num_tensors=1
        ).seconds
    return forward_s, backward_s


def _host_seconds(profile: Profile, num_bytes: float) -> float:
    """Return a pass of all devices of a node over so many bytes each of the host's memory."""
    if profile.cluster.device_type == "cpu":
        return profile.step_seconds("cast", num_bytes=num_bytes).seconds
    # All devices of a node pass over its memory at once and share the rate it reaches.
    share = profile.cluster.devices_per_node
    return num_bytes * share / (profile.host.memory_bytes_per_s * REACHED_FRACTION)
