"""`planner doctor`, by the command."""

from __future__ import annotations

import json

import planner.doctor as planner_doctor
from commands.render.doctor import describe_findings
from planner.doctor.finding import judged


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
