"""Plans: decisions only, as a versioned JSON file.

In: a search's or a user's decisions. Out: a checked `Plan`, which launches, estimates and
verifications read. Read `plan` first; `defaults` makes a plan without a search, `describe` prints
a plan, and `batch_statistics` says what a plan changes in a model that computes across samples.
"""

from planner.plan.plan import (
    ClassLayout,
    ClassRecompute,
    ClusterRef,
    ModelRef,
    Plan,
    Precision,
    Recompute,
    StagePlan,
    ZeroStage,
    batch_spec,
    load_plan,
    save_plan,
    validate_model,
)

__all__ = [
    "ClassLayout",
    "ClassRecompute",
    "ClusterRef",
    "ModelRef",
    "Plan",
    "Precision",
    "Recompute",
    "StagePlan",
    "ZeroStage",
    "batch_spec",
    "load_plan",
    "save_plan",
    "validate_model",
]
