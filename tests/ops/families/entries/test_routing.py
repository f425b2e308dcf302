"""Rows in the order of their experts: which shards compute the right shards, and what is saved."""

from __future__ import annotations

from planner.graph import Op, Ref, TensorMeta
from planner.ops.families.entries import routing
from planner.ops.record import family
