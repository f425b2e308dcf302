"""Records of a plan: the model's batch, a stage's blocks, what may be predicted."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from planner.plan.parts import ClusterRef, ModelRef, Predicted, StagePlan

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
