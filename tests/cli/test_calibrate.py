"""`planner compare --calibrate`: a run corrects the profile."""

import re
from dataclasses import replace

import pytest

from costmodel import estimate
from costmodel.compare import as_rank_timelines
from planner.capture.source.capture_cache import load_graph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import save_plan
from planner.timeline import save_timeline
from profiles import load_profile

H100 = "h100-sxm5-80gb"


@pytest.fixture
def given(planner, write_model):
    """A model, a plan, and a run in which all jobs took twice what the shipped profile says."""
    path = write_model()
    graph = load_graph(path)
    plan = default_plan(graph, pp=2, microbatch_size=2, num_microbatches=2)
    save_plan(plan, "plan.json")
    lines = []
    for line in as_rank_timelines(estimate(graph, load_profile(H100), plan).timeline):
        spans = [
            replace(span, step=step, start_s=2 * span.start_s + step, end_s=2 * span.end_s + step)
            for step in range(6)
            for span in line.spans
        ]
        lines.append(replace(line, spans=tuple(spans)))
    save_timeline(lines, "run")
    return "compare", "plan.json", path, "run"


def test_a_shipped_profile_becomes_a_copy_that_predicts_better(planner, given):
    done = planner(*given, "--profile", H100, "--calibrate")
    assert done.code == 0, done.stderr
    assert f"{H100} is shipped and stays as it is" in done.stderr
    folder = done.stdout.strip().splitlines()[-1].removeprefix("wrote ")
    assert folder.endswith(f"profiles/{H100}-calibrated")
    assert load_profile(H100).file.calibration is None
    shown = planner("profile", "show", folder).stdout
    assert "launch" in shown
    assert "from 3 steps of" in shown
    again = planner(*given, "--profile", folder, "--calibrate").stdout
    # Predicted over measured was 0.5 in each job; a run that is read twice counts once.
    ratios = [float(found) for found in re.findall(r" [FB] .* (\d\.\d\d) +\d+ *$", again, re.M)]
    assert len(ratios) == 4
    assert all(0.9 < ratio < 1.1 for ratio in ratios)
    assert len(load_profile(folder).file.calibration.runs) == 1


def test_where_it_writes_can_be_said(planner, given):
    assert planner(*given, "--profile", H100, "--calibrate", "--out", "mine").code == 0
    assert load_profile("mine").file.calibration is not None
    refused = planner(*given, "--profile", H100, "--out", "mine")
    assert "--out is where --calibrate writes the profile" in refused.complaint
