"""`planner doctor`, by the command."""

from __future__ import annotations

import json

import pytest

import planner.doctor as planner_doctor
from commands.doctor import _profile_here, doctor
from commands.render.node_checks import describe_findings
from planner.errors import ProfileError
from planner.nodes.check import judged


def test_the_command_ends_with_1_where_something_keeps_it_from_training(planner, monkeypatch):
    findings = [judged("disk", "full", problem="free some"), judged("clock", "off", warning="set")]
    monkeypatch.setattr(planner_doctor, "diagnose", lambda progress: findings)
    done = planner("doctor")
    assert done.code == 1
    lines = done.stdout.splitlines()
    assert lines.index("problem: disk: free some") < lines.index("warning: clock: set")
    assert lines[-1] == "1 problem: this machine can't train yet"
    data = json.loads(planner("doctor", "--json").stdout)["findings"]
    assert data[0] == {"name": "disk", "found": "full", "state": "problem", "advice": "free some"}
    assert data[-1]["name"] == "profile"


def test_a_machine_in_order_is_told_in_the_last_line(planner, monkeypatch):
    monkeypatch.setattr(planner_doctor, "diagnose", lambda progress: [judged("cores", "2")])
    done = planner("doctor")
    assert done.code == 0
    assert "planner profile measures this machine" in done.stdout
    assert str(describe_findings([judged("cores", "2")])[-1]) == "this machine can train"


@pytest.mark.parametrize(
    ("finding", "code"),
    [
        (judged("clock", "off", warning="set it"), 0),
        (judged("disk", "full", problem="free some"), 1),
        (judged("cores", "2"), 0),
    ],
)
def test_only_a_problem_keeps_a_machine_from_training(monkeypatch, capsys, finding, code):
    monkeypatch.setattr(planner_doctor, "diagnose", lambda progress: [finding])
    assert doctor(as_json=True) == code
    told = json.loads(capsys.readouterr().out)["findings"]
    assert [each["name"] for each in told] == [finding.name, "profile"]


def test_a_machine_that_was_not_measured_is_warned_of(monkeypatch):
    """Plans then stand on another's numbers; a damaged profile is told as it is."""
    named = type("Named", (), {"name": "h100"})()
    monkeypatch.setattr("profiles.default_profile", lambda: (named, ""))
    (here,) = _profile_here()
    assert (here.state, here.found) == ("ok", "measured: h100")
    monkeypatch.setattr("profiles.default_profile", lambda: (named, "a note"))
    (other,) = _profile_here()
    assert (other.state, other.found) == ("warning", "not measured; plans assume h100")

    def damaged():
        raise ProfileError("profile.json is damaged")

    monkeypatch.setattr("profiles.default_profile", damaged)
    (broken,) = _profile_here()
    assert (broken.state, broken.found) == ("warning", "profile.json is damaged")
    assert "measure it again" in broken.advice
