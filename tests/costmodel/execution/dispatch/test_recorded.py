"""How uneven experts' rows were: two ranks record it, a profile learns it, a search reads it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import planner
from costmodel.calibrate import calibrated
from costmodel.compare import first_steady_step
from costmodel.estimate import cost_cache, estimate
from costmodel.execution.dispatch.imbalance import expected_fullest
from costmodel.execution.dispatch.recorded import recorded_imbalance, rows_of_fullest
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.experts import gathered_layout
from planner.language.plan import Plan
from planner.timeline import COLLECTIVE, ROWS, RankTimeline, Span, load_timeline
from profiles import load_profile
from search import SearchRequest, find_plan
from tests.runtime.scenarios import build, capture
from tests.spawn import run_ranks

STEPS = 5


def _record(plan: Plan, folder: Path) -> list[tuple[int, int]]:
    """Train with a recorder; return the rows of each expert in each forward of this rank's."""
    dealt = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANNER_TIMELINE", str(folder))
        from planner.runtime.stage import program_fx
        from planner.runtime.stage.calls.exchanges import experts

        def noted(ends, group, parts):
            found = experts.deal_runs(ends, group, parts)
            dealt.append(tuple(int(n) for n in ends.diff(prepend=ends.new_zeros(1))))
            return found

        patch.setitem(program_fx._OWN, "deal_runs", noted)
        tiny, module = build("routed-gpt")
        engine = planner.apply(plan, module)
        for _ in range(STEPS):
            engine.step(tiny.batch(plan.global_batch))
    return dealt


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("timeline")
    plan = default_plan(capture("routed-gpt"), dp=2, ep=2, num_microbatches=2)
    dealt = run_ranks(_record, 2, plan, folder)
    return plan, dealt, load_timeline(folder)


def test_ranks_record_the_rows_that_came_to_their_experts(ran) -> None:
    plan, dealt, measured = ran
    # Of four experts the first two are rank 0's: what both ranks dealt them, forward by forward.
    came = [
        [sum(counts[2 * rank] + counts[2 * rank + 1] for counts in both) for rank in range(2)]
        for both in zip(*dealt, strict=True)
    ]
    assert len(came) == STEPS * 2 * 2  # microbatches and layers
    for line in measured:
        recorded = [span.rows for span in line.spans if span.name == ROWS]
        assert recorded == [rows[line.rank] for rows in came]
        # There and back lie in the lane of experts, though replicas are the same ranks.
        assert {span.lane for span in line.spans if span.kind == COLLECTIVE} == {"ep"}
    expected = [max(rows) / (sum(rows) / 2) for rows in came]
    assert rows_of_fullest(plan, measured, first_step=0) == pytest.approx(tuple(expected))
    assert max(expected) > 1


def test_gathered_tokens_are_recorded_as_the_rows_that_are_picked_of_them(ran, tmp_path) -> None:
    plan, _, exchanged = ran
    classes = enumerate(capture("routed-gpt").classes)
    found = (gathered_layout(program, index) for index, program in classes)
    layouts = tuple(layout for layout in found if layout is not None)
    run_ranks(_record, 2, plan.model_copy(update={"layouts": layouts}), tmp_path)
    first = [
        rows_of_fullest(plan, [_of_first_step(line) for line in measured], first_step=0)
        for measured in (exchanged, load_timeline(tmp_path))
    ]
    assert first[0] == first[1]
    assert len(first[0]) == 2 * 2  # microbatches and layers


def _of_first_step(line: RankTimeline) -> RankTimeline:
    return replace(line, spans=tuple(span for span in line.spans if span.step == 0))


def test_a_profile_learns_it_and_searches_read_it_back(ran) -> None:
    plan, _, measured = ran
    graph, profile = capture("routed-gpt"), load_profile("h100-sxm5-80gb")
    sigma = recorded_imbalance(plan, measured, first_step=first_steady_step(measured))
    learned = calibrated(profile, graph, plan, measured)
    assert learned.expert_imbalance == pytest.approx(sigma)
    request = SearchRequest(num_devices=2, global_batch=4)
    assert profile.expert_imbalance is None
    assert request.imbalance(profile).source == "the runtime's record"
    assert request.imbalance(learned).sigma == pytest.approx(sigma)
    assert request.imbalance(learned).source == "recorded runs"
    told = replace(request, expert_imbalance=0.5)
    assert (told.imbalance(learned).sigma, told.imbalance(learned).source) == (0.5, "given")
    found = estimate(graph, learned, plan).to_dict()["experts"]
    assert found["fullest"] == pytest.approx(expected_fullest(sigma, 2))
    assert found["dispatchers"] == ["sorted-rows"]


def test_a_fullest_rank_is_told_exchange_by_exchange() -> None:
    plan = default_plan(capture("routed-gpt"), dp=4, ep=2)
    rows = {0: (30, 10), 1: (10, 30), 2: (20, 0), 3: (20, 0)}  # two groups, two exchanges
    measured = [
        RankTimeline(
            rank=rank,
            pp_rank=0,
            clock_offset_s=0.0,
            spans=tuple(
                Span(kind=COLLECTIVE, name=ROWS, step=0, start_s=0.0, end_s=1.0, stage=0,
                     microbatch=0, rows=came)
                for came in of_rank
                if came
            ),
        )
        for rank, of_rank in rows.items()
    ]  # fmt: skip
    assert rows_of_fullest(plan, measured, first_step=0) == (1.5, 1.5, 1.0)
    assert rows_of_fullest(plan, measured, first_step=1) == ()
    assert recorded_imbalance(plan, measured, first_step=1) is None


def test_an_imbalance_is_paid_in_time_and_held_in_memory_with_the_odds() -> None:
    graph, profile = capture("routed-gpt", torch.float32), load_profile("h100-sxm5-80gb")
    plan = default_plan(graph, dp=8, ep=4, num_microbatches=2)

    def priced(sigma: float, odds: float = 0.5):
        asked = SearchRequest(num_devices=8, global_batch=16, expert_imbalance=sigma)
        imbalance = replace(asked.imbalance(profile), odds=odds)
        costs = cost_cache(graph, profile, 8, imbalance=imbalance)
        return estimate(graph, costs.profile, plan, costs=costs)

    even, uneven, sure = priced(0.0), priced(0.5), priced(0.5, odds=0.95)
    assert even.step_s < uneven.step_s == sure.step_s
    assert even.peak_bytes < uneven.peak_bytes < sure.peak_bytes
    # A plan that carries what it was told is priced so again.
    told = plan.model_copy(update={"estimate": sure.to_dict()})
    again = estimate(graph, profile, told)
    assert (again.step_s, again.peak_bytes) == (sure.step_s, sure.peak_bytes)
    with pytest.raises(PlannerError, match="`expert_imbalance` -1 was given"):
        SearchRequest(num_devices=8, global_batch=16, expert_imbalance=-1)


def test_a_search_prices_what_it_is_told_and_its_plan_says_so() -> None:
    graph, profile = capture("routed-gpt", torch.float32), load_profile("h100-sxm5-80gb")

    def searched(sigma: float):
        request = SearchRequest(num_devices=4, global_batch=8, ep=4, expert_imbalance=sigma)
        result = find_plan(graph, profile, request)
        assert result.plan is not None
        assert result.certificate is not None
        assert result.certificate.gap == 0
        return result.plan

    even, uneven = searched(0.0), searched(1.0)
    assert even.estimate["step_s"] < uneven.estimate["step_s"]
    told = uneven.estimate["experts"]
    assert (told["imbalance"], told["imbalance_from"], told["memory_odds"]) == (1.0, "given", 0.9)
    # Of 4 experts, 2 a token, a rank of 4 has one: at most twice the mean.
    assert told["fullest"] == 2
    assert estimate(graph, profile, uneven).step_s == uneven.estimate["step_s"]
