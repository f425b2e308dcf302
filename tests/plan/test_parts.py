"""Records of a plan: the model's batch, a stage's blocks, what may be predicted."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from planner.language.plan.parts import (
    BlocksRecompute,
    ClusterRef,
    ModelRef,
    Predicted,
    StagePlan,
    recompute_fields,
)

MODEL = {"name": "m", "file": "m.py", "fingerprint": "0" * 64, "inputs": ()}


def test_the_tree_of_a_batch_names_tensors_that_there_are():
    with pytest.raises(ValidationError, match="batch_tree has the tensor x"):
        ModelRef(**MODEL, batch_tree={"tensor": "x"})
    # Kept captures have tuples for lists: equal plans compare equal.
    as_tuple = ModelRef(**MODEL, batch_tree={"tuple": ()})
    assert as_tuple == ModelRef(**MODEL, batch_tree={"tuple": []})


def test_a_stage_is_a_run_of_blocks():
    stage = StagePlan(pp_rank=0, first_block=2, last_block=4)
    assert list(stage.blocks) == [2, 3, 4]
    with pytest.raises(ValidationError):
        StagePlan(pp_rank=-1, first_block=0, last_block=0)
    with pytest.raises(ValidationError):
        ClusterRef(name="c", device="cpu", devices_per_node=0)


def test_a_prediction_is_of_finite_numbers():
    given = {"step_s": 1.0, "peak_bytes": 1.0, "time": {}, "memory": [{"weights": 1.0}]}
    assert Predicted(**given, source="s").step_s == 1.0
    for change in ({"step_s": 0.0}, {"peak_bytes": float("inf")}, {"memory": []}):
        with pytest.raises(ValidationError):
            Predicted(**(given | change), source="s")


@pytest.mark.parametrize(
    ("by_block", "spelled"),
    [
        (("full",), "full"),
        (("full", "full", "none"), "full, none in 6"),
        (("full", "none"), "none, full in 4"),
        (
            ("full", "none", "selective", "selective", "full"),
            "full, none in 5, selective in 6..7",
        ),
    ],
)
def test_blocks_of_a_stage_recompute_what_they_say(by_block, spelled):
    """The fields are what most blocks do and the runs that differ; they read back the same."""
    last = 4 + len(by_block) - 1
    stage = StagePlan(
        pp_rank=0, first_block=4, last_block=last, **recompute_fields(by_block, first_block=4)
    )
    assert stage.recompute_by_block == by_block
    assert stage.recompute_spelled == spelled
    assert stage.is_recomputed
    assert StagePlan.model_validate_json(stage.model_dump_json()) == stage


@pytest.mark.parametrize(
    "runs", [((1, 2),), ((4, 7),), ((5, 5), (5, 6)), ((6, 5),), ((6, 6), (4, 4))]
)
def test_runs_of_recomputed_blocks_are_in_their_stage(runs):
    of_stage = tuple(
        BlocksRecompute(first_block=first, last_block=last, recompute="full")
        for first, last in runs
    )
    with pytest.raises(ValidationError, match=r"of a stage of blocks 4\.\.6: runs are in order"):
        StagePlan(pp_rank=0, first_block=4, last_block=6, recompute_blocks=of_stage)
