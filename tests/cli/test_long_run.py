"""Goodput on the command line: `planner estimate --node-mtbf`."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from commands.common.long_run import LongRun
from commands.estimate import estimate
from commands.render.goodput import describe_goodput
from costmodel.failures import Failures, goodput
from planner.errors import PlannerError
from planner.units import DAY_S


def test_options_become_seconds():
    said = LongRun(
        node_mtbf=150.0, checkpoint_seconds=20.0, restart_seconds=300.0, slow_nodes="365,3,1.4"
    )
    assert said.failures() == Failures(
        node_mtbf_s=150 * DAY_S,
        checkpoint_s=20.0,
        restart_s=300.0,
        slow_mtbf_s=365 * DAY_S,
        slow_s=3 * 3600.0,
        slow_factor=1.4,
    )
    assert LongRun().failures() is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"checkpoint_seconds": 20.0}, "--checkpoint-seconds was given; say how often nodes fail"),
        ({"slow_nodes": "1,1,1"}, "--slow-nodes was given; say how often nodes fail"),
        ({"node_mtbf": 9.0}, "give --checkpoint-seconds and --restart-seconds with it"),
        ({"node_mtbf": 9.0, "checkpoint_seconds": 1.0}, "give --restart-seconds with it"),
        (
            {
                "node_mtbf": 9.0,
                "checkpoint_seconds": 1.0,
                "restart_seconds": 1.0,
                "slow_nodes": "often",
            },
            "'often' was given; give DAYS,HOURS,FACTOR",
        ),
        (
            {"node_mtbf": -9.0, "checkpoint_seconds": 1.0, "restart_seconds": 1.0},
            "must be above 0",
        ),
    ],
)
def test_options_that_lack_each_other(given, says):
    with pytest.raises(PlannerError, match=says):
        LongRun(**given).failures()


def test_failures_are_of_one_run():
    with pytest.raises(PlannerError, match="give PLAN and MODEL, not --batch"):
        estimate(batch="runs.csv", out="told.csv", node_mtbf=9.0)  # type: ignore[call-arg]


def test_the_table_says_how_often_to_save():
    """12,500 nodes, six failures in a thousand node-days: every 19 minutes."""
    failures = Failures(node_mtbf_s=1000 / 6 * DAY_S, checkpoint_s=20.0, restart_s=360.0)
    console = Console(width=120, record=True, file=StringIO())
    found = goodput(failures, 12_500)
    console.print(*describe_goodput(found, num_nodes=12_500, step_s=10.0))
    said = console.export_text()
    assert "A failure every 19.2 minutes on 12500 nodes; save every 3." in said
    assert f"{found.useful:.1%}" in said
    assert "waiting for slow nodes" not in said
