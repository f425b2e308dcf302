"""The doctor as a whole: checks one after the other."""

from __future__ import annotations

from planner.doctor import diagnose
from planner.nodes.check import Check, judged


def test_a_check_that_breaks_is_a_finding_and_others_go_on():
    def breaks():
        raise ImportError("libcudart.so.12: cannot open shared object file")

    told: list[str] = []
    found = diagnose(
        lambda fraction, name: told.append(name),
        {"a": breaks, "b": lambda: [judged("b", "fine")]},
    )
    assert told == ["a", "b"]
    assert [finding.state for finding in found] == ["problem", "ok"]
    assert "libcudart.so.12" in found[0].found


def test_a_state_follows_from_the_advice():
    assert judged("a", "x") == Check(name="a", found="x")
    assert judged("a", "x", warning="do") == Check(name="a", found="x", warnings=("do",))
    assert judged("a", "x", problem="do") == Check(name="a", found="x", problems=("do",))
    states = [judged("a", "x", **given) for given in ({}, {"warning": "w"}, {"problem": "p"})]
    assert [(check.state, check.advice) for check in states] == [
        ("ok", ""), ("warning", "w"), ("problem", "p"),
    ]  # fmt: skip
