"""Issue 19, 7: what must be equal on all nodes, and how a difference is told."""

from __future__ import annotations

from importlib import metadata

from planner.language.lowering.defaults import default_plan
from planner.language.templates import Transformer, build_transformer
from planner.runtime.process.groups.alike import differences, names, release, told_of_run

GRAPH = build_transformer(
    Transformer(layers=2, hidden=32, heads=4, kv_heads=2, ffn_hidden=96, vocab=100, seq_len=8)
)


def test_only_what_differs_is_told_with_all_its_values():
    nodes = [
        ("a", [("torch", "2.13"), ("Python", "3.11"), ("plan", "x")]),
        ("b", [("torch", "2.12"), ("Python", "3.11"), ("plan", "x")]),
        ("c", [("torch", "2.13"), ("Python", "3.11"), ("plan", "y"), ("NCCL", "2.27")]),
        ("a", [("torch", "2.13"), ("Python", "3.11"), ("plan", "x")]),
    ]
    assert differences(iter(nodes)) == [
        "torch is not the same on all nodes: 2.13 on a, c; 2.12 on b",
        "plan is not the same on all nodes: x on a, b; y on c",
    ]
    assert differences(nodes[:1] * 3) == []
    assert differences([]) == []


def test_of_many_nodes_the_first_few_are_named_each_once():
    assert names(["b", "a", "b"]) == "b, a"
    many = [f"n{at // 2}" for at in range(24)]
    assert names(many) == "n0, n1, n2, n3, n4, n5, n6, n7 and 4 more"
    assert names(many, most=11).endswith("n10 and 1 more")
    assert names(many, most=12).endswith(", n11")


def test_a_run_differs_by_its_plan_and_not_by_what_was_predicted_of_it():
    """JSON takes it to the others: as lists, of which the first is this node's name."""
    plan = default_plan(GRAPH, dp=2)
    estimate = {
        "step_s": 1.0, "peak_bytes": 1, "time": {}, "memory": [], "source": "shipped",
    }  # fmt: skip
    priced = plan.model_copy(update={"estimate": estimate})
    other = default_plan(GRAPH, tp=2)
    assert told_of_run(plan) == told_of_run(priced)
    (line,) = differences([told_of_run(plan), ("other", told_of_run(other)[1])])
    assert line.startswith("the plan is not the same on all nodes: ")
    what = [name for name, _ in told_of_run(plan)[1]]
    assert what == ["planner", "torch", "Python", "the plan"]


def test_a_source_tree_that_is_not_installed_says_so(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", {"planner": "7.8.9"}.__getitem__)
    assert release() == "7.8.9"
    monkeypatch.setattr(metadata, "version", missing)
    assert release() == "not installed"
