"""Lanes of a simulated step: what they expose is what the estimate adds, and bars lie where it
says.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from costmodel import estimate
from costmodel.estimate import cost_cache
from costmodel.execution import find_execution
from costmodel.lanes import COPIES, timeline_with_lanes
from costmodel.time.plan_price import price_plan
from planner.language.layout.placement import Shard
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.propagate import propagate_graph
from planner.timeline import (
    COLLECTIVE,
    JOB_KINDS,
    MESSAGE,
    REPLICAS,
    STAGES,
    bubbles,
    exchanges,
    load_timeline,
    save_timeline,
    save_trace,
)
from profiles import load_profile
from tests.costmodel.time.test_replica_views import cluster, on
from tests.cpu_profile import CpuProfile
from tests.runtime.scenarios import capture
from tests.search.machine import Machine
from tests.search.test_referee import graph_of

OF_BLOCKS = ("tp", "cp", "hp", "ep")
OURS = ("ours-eager", "ours-compiled")


@pytest.fixture(scope="module")
def h100():
    return load_profile("h100-sxm5-80gb")


def lanes_of(plan, graph, profile, execution="ours-eager"):
    """The estimate, the timeline, and by pp rank and lane what is hidden and what is exposed."""
    costs = cost_cache(graph, profile, plan.world_size, execution=find_execution(execution))
    found = estimate(graph, profile, plan, costs=costs)
    lines = timeline_with_lanes(plan, costs)
    seconds = defaultdict(lambda: [0.0, 0.0])
    for line in lines:
        for each in exchanges(line):
            of_lane = seconds[line.pp_rank, each.lane]
            of_lane[0] += each.hidden_s
            of_lane[1] += each.exposed_s
    return found, lines, seconds


PLANS = {
    "tp": ("gpt", {"tp": 2, "num_microbatches": 2}),
    "tp with full recomputation": ("gpt", {"tp": 2, "recompute": "full"}),
    "sequences": ("gpt", {"cp": 2}),
    "ZeRO 0": ("gpt", {"dp": 2}),
    "ZeRO 1": ("gpt", {"dp": 2, "zero_stage": 1, "num_microbatches": 2}),
    "ZeRO 2": ("gpt", {"dp": 2, "zero_stage": 2, "num_microbatches": 2}),
    "ZeRO 3": ("gpt", {"dp": 2, "zero_stage": 3, "num_microbatches": 2}),
    "ZeRO 3 and copies": ("gpt", {"rp": 2, "dp": 2, "zero_stage": 3, "num_microbatches": 2}),
    "experts": ("routed-gpt", {"dp": 2, "ep": 2}),
    "pp": ("gpt", {"pp": 2, "num_microbatches": 4}),
    "pp with a tied embedding": ("tied-gpt", {"pp": 2, "num_microbatches": 4}),
    "all": ("gpt", {"tp": 2, "dp": 2, "pp": 2, "zero_stage": 1, "num_microbatches": 4}),
}  # fmt: skip


@pytest.mark.parametrize("execution", [*OURS, "megatron-core", "torchtitan"])
@pytest.mark.parametrize("name", PLANS)
def test_exposed_seconds_are_those_that_the_estimate_adds(h100, name, execution):
    model, sizes = PLANS[name]
    graph = capture(model)
    plan = default_plan(graph, **sizes)
    found, lines, seconds = lanes_of(plan, graph, h100, execution)
    assert_sums(found, lines, plan)
    for rank in range(plan.pp):
        waited_s = seconds[rank, STAGES][1]
        assert waited_s == pytest.approx(found.path.by_rank_s["waited_s"][rank], rel=1e-9)
    lanes = {lane for (_, lane), (hidden_s, exposed_s) in seconds.items() if hidden_s + exposed_s}
    expected = {
        "tp" if "tp" in sizes else None,
        "cp" if "cp" in sizes else None,
        "ep" if "ep" in sizes else None,
        REPLICAS if {"dp", "cp"} & sizes.keys() or model == "tied-gpt" else None,
    } - {None}  # fmt: skip
    assert expected <= lanes
    overlaps = find_execution(execution).overlaps if execution not in OURS else ("stages",)
    if plan.pp > 1:
        from_others = {lane for lane in lanes if lane.startswith(STAGES)}
        assert from_others == ({"pp from 0", "pp from 1"} if "stages" in overlaps else {STAGES})


SLOW_LINKS = Machine(flop_per_s=1e10, bytes_per_s=1e15, intra_bytes_per_s=1e9)


@pytest.mark.parametrize("choice", ["overlap", "gather_pieces"])
def test_a_chosen_overlap_is_drawn_as_hidden(choice):
    """Collectives take as long as before, and the step is shorter by what is hidden."""
    graph = capture("small-gpt")
    plan = default_plan(graph, tp=2, microbatch_size=8)
    more = {"overlap": "input-gradients"}
    if choice == "gather_pieces":
        layouts = propagate_graph(graph, microbatch_size=8, axis_size=2, boundary=Shard(1))
        plan, more = plan.model_copy(update={"layouts": layouts}), {"gather_pieces": 2}
    _, _, alone = lanes_of(plan, graph, SLOW_LINKS)
    found, _, seconds = lanes_of(plan.model_copy(update=more), graph, SLOW_LINKS)
    assert alone[0, "tp"][0] == 0
    hidden_s, exposed_s = seconds[0, "tp"]
    assert hidden_s > 0
    assert exposed_s == pytest.approx(found.path.by_rank_s["tp_comm_s"][0])
    # (Each piece of a gather or scatter has a latency of its own.)
    latencies = 0 if choice == "overlap" else seconds[0, "tp"][0]
    assert hidden_s + exposed_s == pytest.approx(alone[0, "tp"][1], abs=latencies)


EVERYTHING = PLANS["all"]


@pytest.mark.parametrize("name", PLANS)
def test_bars_lie_in_their_jobs_or_behind_all_of_them(h100, name):
    model, sizes = PLANS[name]
    graph = capture(model)
    _, lines, _ = lanes_of(default_plan(graph, **sizes), graph, h100)
    for line in lines:
        jobs = {(s.kind, s.stage, s.microbatch): s for s in line.spans if s.kind in JOB_KINDS}
        (update,) = (s for s in line.spans if s.kind == "O")
        ends_s = max(job.end_s for job in jobs.values())
        for bar in (s for s in line.spans if s.kind == COLLECTIVE):
            if bar.microbatch < 0:
                assert bar.hidden_s == 0
                assert ends_s - 1e-12 <= bar.start_s <= bar.end_s <= update.start_s + 1e-12
                continue
            around = [
                job
                for (_, stage, microbatch), job in jobs.items()
                if (stage, microbatch) == (bar.stage, bar.microbatch)
                and job.start_s - 1e-12 <= bar.start_s
                and bar.end_s <= job.end_s + 1e-12
            ]
            assert len(around) == 1


def test_jobs_wait_for_what_makes_their_input_and_for_its_message(h100):
    graph = capture("gpt")
    plan = default_plan(graph, pp=2, num_microbatches=4)
    _, lines, _ = lanes_of(plan, graph, h100)
    found = 0
    for line in lines:
        jobs = [s for s in line.spans if s.kind in JOB_KINDS]
        for before, job in pairwise(jobs):
            waits_s = job.start_s - before.end_s
            messages = [
                each
                for each in exchanges(line)
                if each.span.kind == MESSAGE
                and (each.span.stage, each.span.microbatch) == (job.stage, job.microbatch)
                and ("output" in each.span.name) == (job.kind == "F")
            ]
            if not messages:
                assert waits_s == pytest.approx(0, abs=1e-12)
                continue
            (message,) = messages
            leaves_later_s = max(0.0, message.span.start_s - before.end_s)
            assert waits_s == pytest.approx(leaves_later_s + message.exposed_s, abs=1e-12)
            found += message.exposed_s > 0
    assert found > 0


def test_bytes_are_of_whole_tensors(h100):
    """ZeRO 3 gathers all weights in each forward, and in a backward scatters as many gradients; a
    message for each block. Between stages goes a sequence's hidden states.
    """
    graph = capture("gpt")
    weights = sum(t.bytes_at(1) for t in graph.tensors if t.kind == "param")
    _, (line,), _ = lanes_of(
        default_plan(graph, dp=2, zero_stage=3, num_microbatches=1), graph, h100
    )
    there, back = (s for s in line.spans if s.lane == REPLICAS)
    blocks = len(graph.blocks)
    assert (there.num_bytes, back.num_bytes) == (weights, 2 * weights)
    assert (there.number, back.number) == (blocks, 2 * blocks)
    plan = default_plan(graph, pp=2, num_microbatches=2)
    _, lines, _ = lanes_of(plan, graph, h100)
    crossing = graph.tensor[graph.blocks[plan.stages[1].first_block].inputs[0]]
    assert {s.num_bytes for line in lines for s in line.spans if s.kind == MESSAGE} == {
        crossing.bytes_at(plan.microbatch_size)
    }


def slices(trace):
    """Slices of each track, by process and thread."""
    found = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            found[event["pid"], event["tid"]].append(event)
    return found


@pytest.mark.parametrize("name", PLANS)
def test_a_trace_has_a_named_track_for_each_lane_on_which_slices_nest(h100, name, tmp_path):
    """What viewers of traces ask for: known phases, numbers, and on a track no slice that begins in
    another and ends behind it.
    """
    model, sizes = PLANS[name]
    graph = capture(model)
    _, lines, _ = lanes_of(default_plan(graph, **sizes), graph, h100)
    save_trace(tmp_path / "step.json", {"predicted": lines, "measured": lines})
    trace = json.loads((tmp_path / "step.json").read_text())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} <= {"M", "X", "C"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["pid"]: e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"}
    assert [names[pid] for pid in sorted(names, key=order.__getitem__)][:2] == [
        "predicted rank 0 (pp 0)", "measured rank 0 (pp 0)"
    ]  # fmt: skip
    for track, found in slices(trace).items():
        assert track in tracks
        around: list[float] = []
        for each in sorted(found, key=lambda e: (e["ts"], -e["dur"])):
            assert each["dur"] >= 0
            ends = each["ts"] + each["dur"]
            while around and around[-1] <= each["ts"] + 1e-6:
                around.pop()
            assert not around or ends <= around[-1] + 1e-6
            around.append(ends)
    exposed = {
        (track, each["ts"]): each["dur"]
        for track, found in slices(trace).items()
        for each in found
        if each["name"] == "exposed"
    }
    assert all(tracks[track] != "compute" for track, _ in exposed)


def test_a_simulated_step_is_written_and_read_with_its_lanes(h100, tmp_path):
    graph = capture("gpt")
    _, sizes = EVERYTHING
    plan = default_plan(graph, **sizes)
    found, lines, _ = lanes_of(plan, graph, h100)
    save_timeline(lines, tmp_path)
    for line, read in zip(lines, load_timeline(tmp_path), strict=True):
        for span, again in zip(line.spans, read.spans, strict=True):
            assert replace(again, start_s=0, end_s=0, hidden_s=0) == replace(
                span, start_s=0, end_s=0, hidden_s=0
            )
            assert again.hidden_s == pytest.approx(span.hidden_s, abs=1e-7)
    # What is hidden in a job is not taken off its compute.
    for rank in bubbles(lines):
        busy_s = found.timeline.busy_s[rank.pp_rank]
        assert rank.compute_s + rank.collective_s == pytest.approx(busy_s)
        assert rank.collective_s == pytest.approx(
            found.path.by_rank_s["tp_comm_s"][rank.pp_rank]
            + plan.num_microbatches * hooks_s(plan, graph, h100, rank.pp_rank)
        )


def hooks_s(plan, graph, profile, pp_rank):
    """Seconds of ZeRO's hooks in a microbatch's jobs of a rank."""
    costs = cost_cache(graph, profile, plan.world_size)
    exposed = price_plan(plan, costs).exposed
    return float((exposed.forward_s + exposed.backward_s)[pp_rank])


def assert_sums(found, lines, plan):
    """Exposed seconds of each pp rank are the estimate's."""
    for rank in range(plan.pp):
        exposed = defaultdict(float)
        for each in exchanges(lines[rank]):
            exposed[each.lane] += each.exposed_s
        told = {part: of_rank[rank] for part, of_rank in found.path.by_rank_s.items()}
        in_blocks = sum(exposed[lane] for lane in OF_BLOCKS)
        assert in_blocks == pytest.approx(told["tp_comm_s"], rel=1e-9, abs=1e-15)
        of_replicas = exposed[REPLICAS] + exposed[COPIES]
        assert of_replicas == pytest.approx(told["dp_comm_s"], rel=1e-9, abs=1e-15)


def test_replicas_on_unlike_devices_are_drawn_as_the_slowest():
    """Step, jobs and exposed seconds are those of the replicas that the estimate waits for."""
    machine = cluster(1.0, 2.0)
    plan = on(["a+b", "a+b"], dp=2, pp=2, num_microbatches=3, zero_stage=0)
    costs = cost_cache(graph_of("equal"), machine, plan.world_size)
    found = estimate(costs.graph, machine, plan, costs=costs)
    lines = timeline_with_lanes(plan, costs)
    assert_sums(found, lines, plan)
    assert [max(s.end_s for s in line.spans if s.kind in JOB_KINDS) for line in lines] == (
        pytest.approx(found.timeline.rank_end_s)
    )


@pytest.mark.parametrize("schedule", ["fthenb", "interleaved_1f1b", "zb_h1", "zb_v"])
def test_every_kind_of_table_has_its_lanes(h100, schedule):
    """Split backwards, several stages on a rank, stages in a V; activations on their way to the
    host lengthen jobs, and the last microbatch alone is not recomputed.
    """
    graph = capture("deep-gpt")
    vpp = 2 if schedule in ("interleaved_1f1b", "zb_v") else 1
    plan = default_plan(
        graph, tp=2, pp=2, vpp=vpp, num_microbatches=4, schedule=schedule, recompute="full"
    )
    away = schedule in ("fthenb", "interleaved_1f1b")
    stages = [
        stage.model_copy(update={"recompute_last": False, "activations_on_host": away})
        for stage in plan.stages
    ]
    plan = plan.model_copy(update={"stages": tuple(stages)})
    found, lines, _ = lanes_of(plan, graph, h100)
    assert_sums(found, lines, plan)
    jobs = {
        (line.pp_rank, s.kind, s.stage, s.microbatch): s
        for line in lines
        for s in line.spans
        if s.kind in JOB_KINDS
    }
    sent = [(line.pp_rank, s) for line in lines for s in line.spans if s.kind == MESSAGE]
    # Between stages of one rank nothing travels.
    homes = plan.stage_to_pp_rank
    crossed = sum(a != b for a, b in pairwise(homes))
    assert len(sent) == 2 * crossed * plan.num_microbatches
    for rank, message in sent:
        is_gradient = message.name.startswith("gradient")
        kinds = "BI" if is_gradient else "F"
        (takes,) = (
            job
            for kind in kinds
            if (job := jobs.get((rank, kind, message.stage, message.microbatch)))
        )
        assert message.end_s <= takes.start_s + 1e-12
        made = message.stage + (1 if is_gradient else -1)
        assert message.lane == f"pp from {homes[made]}"


def test_on_cpus_nothing_is_hidden():
    graph = capture("gpt")
    plan = default_plan(graph, tp=2, dp=2, zero_stage=3).model_copy(
        update={"overlap": "input-gradients"}
    )
    _, _, seconds = lanes_of(plan, graph, CpuProfile())
    assert seconds
    assert all(hidden_s == pytest.approx(0, abs=1e-12) for hidden_s, _ in seconds.values())
