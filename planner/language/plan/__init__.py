"""Plans: decisions only, as a versioned JSON file.

In: a search's or a user's decisions. Out: a checked `Plan`, which launches, estimates and
verifications read. Read `parts` and `plan` first; `files` reads and writes it, `match_model`
compares it with a model, `buckets` says which other shapes its batches may have, `defaults` makes a
plan without a search, `replication` says how replicas share weights, and `batch_statistics` what a
plan changes in a model that computes across samples.
"""

from planner.language.layout.class_layout import ClassLayout
from planner.language.plan.files import load_plan, save_plan
from planner.language.plan.parts import (
    BlocksRecompute,
    ClassRecompute,
    ClusterRef,
    ModelRef,
    Precision,
    Recompute,
    StagePlan,
    ZeroStage,
    batch_spec,
    low_dtype,
    precision_named,
    recompute_fields,
)
from planner.language.plan.plan import OURS, RUNTIME_OF, Kernels, Overlap, Plan, kernels_of

__all__ = [
    "OURS",
    "RUNTIME_OF",
    "BlocksRecompute",
    "ClassLayout",
    "ClassRecompute",
    "ClusterRef",
    "Kernels",
    "ModelRef",
    "Overlap",
    "Plan",
    "Precision",
    "Recompute",
    "StagePlan",
    "ZeroStage",
    "batch_spec",
    "kernels_of",
    "load_plan",
    "low_dtype",
    "precision_named",
    "recompute_fields",
    "save_plan",
]
