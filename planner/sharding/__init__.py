"""Sharding: which placements of an op's inputs and outputs compute the right thing.

Each op family has one file of rules; `strategies` asks them, `local_ops` says what then
runs on a rank, `propagate_layout` chooses for a whole block without a solver. All of it
works on the IR alone, free of torch, so a search can run where torch is not installed.
"""

from __future__ import annotations

from planner.sharding import (  # noqa: F401 - importing a family registers its rules
    attention,
    convolution,
    creation,
    embedding,
    indexing,
    loss,
    matmul,
    nested,
    normalization,
    pointwise,
    reductions,
    views,
)
from planner.sharding.call import divides, local_shape
from planner.sharding.context import (
    check_hands_on_sequences,
    longest_sequence,
    propagate_cp,
)
from planner.sharding.pins import Pin, parse_pin
from planner.sharding.propagate import propagate_graph, propagate_layout
from planner.sharding.registry import (
    apart_strategies_of,
    grad_is_partial,
    has_rule,
    is_linear,
    local_ops,
    ops_without_rule,
    repeated,
    rule,
    segment_counts,
    strategies,
    strategies_of,
    without_names,
)

__all__ = [
    "Pin",
    "apart_strategies_of",
    "check_hands_on_sequences",
    "divides",
    "grad_is_partial",
    "has_rule",
    "is_linear",
    "local_ops",
    "local_shape",
    "longest_sequence",
    "ops_without_rule",
    "parse_pin",
    "propagate_cp",
    "propagate_graph",
    "propagate_layout",
    "repeated",
    "rule",
    "segment_counts",
    "strategies",
    "strategies_of",
    "without_names",
]
