"""Small profiles with numbers that can be checked by hand."""

from planner.units import GB, GIB
from profiles import Profile
from profiles.records import (
    ClusterRecord,
    CollectiveRecord,
    Figure,
    LinkRecord,
    OpFit,
    OpRecord,
    ProfileFile,
)

WHEN = {
    "device": "test device",
    "driver": "none",
    "torch": "2.13",
    "threads": 1,
    "measured_at": "2026-01-01T00:00:00+00:00",
}


def figure(value):
    return Figure(value=value, origin="assumed", detail="made up for a test")


def link(name, gb_per_s, alpha_s=0.0):
    return LinkRecord(
        name=name, alpha_s=figure(alpha_s), beta_s_per_byte=figure(1 / (gb_per_s * GB))
    )


def file(**changes):
    """Return a profile.json: 8 devices a node, 100 GB/s inside, 10 GB/s between, 1 TFLOP/s."""
    cluster = ClusterRecord(
        device="test device",
        device_type="cpu",
        devices_per_node=8,
        memory_bytes=figure(GIB),
        memory_bytes_per_s=figure(10 * GB),
        peak_flop_per_s={"float32": figure(1e12), "bfloat16": figure(4e12)},
        intra_node=link("inside", 100),
        inter_node=link("between", 10),
    )
    values = {
        "name": "test",
        "source": "measured",
        "complete": True,
        "cluster": cluster,
        "context_bytes": figure(1e6),
        "allocator_overhead_fraction": figure(0.1),
        "launch_overhead_s": figure(1e-6),
    }
    return ProfileFile(**{**values, **changes})


def op_record(target="aten.linear.default", *, seconds, shapes, flop, num_bytes=0.0, **changes):
    values = {
        "target": target,
        "shapes": shapes,
        "dtype": "float32",
        "direction": "forward",
        "arguments": "[]",
        "flop": flop,
        "num_bytes": num_bytes,
        "seconds": seconds,
        "repeats": 100,
        "spread": 0.01,
        **WHEN,
    }
    return OpRecord(**{**values, **changes})


def linear_record(m, n, k, *, seconds=None, rate=1e11, **changes):
    """Return a linear layer that runs at `rate` flop/s unless its time is given."""
    flop = 2.0 * m * n * k
    num_bytes = 4.0 * (m * k + n * k + m * n)
    return op_record(
        seconds=flop / rate if seconds is None else seconds,
        shapes=((m, k), (n, k)),
        flop=flop,
        num_bytes=num_bytes,
        **changes,
    )


def collective_record(kind, num_bytes, seconds, *, ranks_per_node=2, num_nodes=1, **changes):
    values = {
        "kind": kind,
        "num_bytes": num_bytes,
        "ranks_per_node": ranks_per_node,
        "num_nodes": num_nodes,
        "concurrent_groups": 1,
        "seconds": seconds,
        "repeats": 10,
        "spread": 0.02,
        **WHEN,
    }
    return CollectiveRecord(**{**values, **changes})


def profile(ops=(), collectives=(), **changes):
    return Profile(file(**changes), ops, collectives)


def op_fit(family, *, overhead_s=0.0, s_per_flop=0.0, s_per_byte=0.0, **changes):
    values = {
        "dtype": "float32",
        "direction": "forward",
        "relative_error": 0.05,
        "num_samples": 10,
        "origin": "fitted",
        "detail": "made up for a test",
    }
    return OpFit(
        family=family,
        overhead_s=overhead_s,
        s_per_flop=s_per_flop,
        s_per_byte=s_per_byte,
        **{**values, **changes},
    )
