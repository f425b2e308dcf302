"""Ops of a model file with rules of their own, in commands and ranks; a wrong rule is found."""

from __future__ import annotations

import pytest

from planner.language.ops.users import rules, unregister_rule
from planner.language.plan import load_plan
from tests.ops.users.own_ops import ATTEND, PROJECT, model_file


@pytest.fixture(autouse=True)
def as_before():
    """Rules of a test are gone after it."""
    yield
    for target in list(rules._RULES):
        unregister_rule(target)


def searched(planner, path, pin: str):
    """A plan on two ranks of tp, as pinned, beside the model file."""
    plan = path.with_suffix(".json")
    found = planner(
        "search", path, "--gpus", "2", "--tp", "2", "--global-batch", "8", "--pin", pin,
        "--profile", "h100-sxm5-80gb", "--out", plan,
    )  # fmt: skip
    assert found.code == 0, found.stderr
    return plan


def test_an_op_of_the_model_file_is_cut_and_trains_as_one_process(planner, tmp_path, forked_ranks):
    path = tmp_path / "model.py"
    path.write_text(model_file("mine_cut", PROJECT, ATTEND))
    plan = searched(planner, path, "layers.*.into.0: S(1)@tp")
    cut = dict(load_plan(plan).layouts[0].ops)
    assert str(cut["project"]) == "R,S(1),S(0)->S(2)"
    assert str(cut["attend"]) == "S(2),S(2),S(2)->S(2)"
    verified = planner("verify", plan, path, "--device", "cpu", "--steps", "2")
    assert verified.code == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize(
    ("wrong", "pin"),
    [
        # Each rank adds the bias to its term of the sum.
        ((PROJECT.replace("+f", "f"), ATTEND), "layers.*.out: S(0)@tp"),
        # Softmax over scores of other heads: num_heads stays what it is on half of the entries.
        ((PROJECT, ATTEND.replace('divided={"num_heads": "h"},', "")), "layers.*.into.0: S(1)@tp"),
    ],
    ids=["bias", "heads"],
)
def test_a_wrong_rule_is_found(planner, tmp_path, forked_ranks, wrong, pin):
    path = tmp_path / "model.py"
    path.write_text(model_file("mine_cut", *wrong))
    plan = searched(planner, path, pin)
    by_block = planner("verify", "--by-block", plan, path)
    assert by_block.code == 1
    assert "NOT proven: output" in by_block.stdout.replace("\n", " ")
    if wrong[0] is PROJECT:
        return  # a verification takes seconds
    trained = planner("verify", plan, path, "--device", "cpu", "--steps", "1")
    assert trained.code == 1
    assert "NOT the same as one process" in trained.stdout.replace("\n", " ")
