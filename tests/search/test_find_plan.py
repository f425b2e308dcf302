"""find_plan on small models and a machine with round numbers."""

import itertools
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import count

import pytest

from costmodel import CostCache, estimate
from planner import deadline
from planner.deadline import ends_on_interrupt, is_interrupted, within
from planner.errors import LayoutError, ScheduleError
from planner.language.plan import load_plan, save_plan
from planner.units import GIB
from search import KeptCandidates, SearchRequest, find_pareto, find_plan
from search.candidates import Candidates
from search.op_layout.layouts import LayoutSolver
from search.partition.chain_dp import solve_chain
from search.partition.chain_paths import Paths
from search.priced_configuration import PricedConfiguration
from search.stages.layout_candidates import LayoutCandidates
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.referees.cuts import cut_peak
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=0.0, devices_per_node=4)


def captured(name: str):
    model = tiny_models()[name]
    return capture_module(model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name)


@pytest.fixture(scope="module")
def gpt():
    return captured("gpt")


def ask(gpus: int = 4, batch: int = 8, **choices) -> SearchRequest:
    return SearchRequest(num_devices=gpus, global_batch=batch, **choices)


def test_a_batch_beyond_a_plan_s_numbers_is_cut_within_them():
    """Of 2**22 samples neither one microbatch nor four million are what a plan may say."""
    roomy = replace(MACHINE, memory_bytes=1e6 * GIB)
    plan = find_plan(captured("mlp"), roomy, ask(gpus=2, batch=2**22, schedule="1f1b")).plan
    assert max(plan.microbatch_size, plan.num_microbatches) <= 2**20
    assert plan.global_batch == 2**22


def test_a_plain_model_gets_a_plan(gpt, tmp_path):
    """M17, D22: no annotation; the plan covers all blocks, uses all devices, says its price."""
    result = find_plan(gpt, MACHINE, ask(model_file="model.py"))
    plan = result.plan
    assert plan is not None
    assert plan.world_size == 4
    assert plan.global_batch == 8
    assert plan.model.fingerprint == gpt.fingerprint
    assert plan.model.file == "model.py"
    assert plan.stages[-1].last_block == len(gpt.blocks) - 1
    assert plan.estimate["step_s"] == pytest.approx(
        estimate(gpt, MACHINE, plan, costs=CostCache(gpt, MACHINE)).step_s
    )
    save_plan(plan, tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded.model_dump(mode="json") == plan.model_dump(mode="json")


def test_the_certificate_accounts_for_every_configuration(gpt):
    """X1: considered = evaluated + pruned + unexplored; the bound is not above the best."""
    certificate = find_plan(gpt, MACHINE, ask()).certificate
    assert certificate is not None
    pruned = sum(count for _, count in certificate.pruned)
    total = certificate.evaluated + pruned + certificate.unexplored
    assert certificate.considered == total
    assert 0 < certificate.lower_bound_s <= certificate.best_s
    assert certificate.to_dict()["under"] == "the cost model"


def test_nothing_the_user_can_fix_is_faster(gpt):
    """X1: whichever choice is fixed, the answer is never faster than the free search's."""
    free = find_plan(gpt, MACHINE, ask()).plan
    assert free is not None
    best = free.estimate["step_s"]
    for choice in (
        {"pp": 2}, {"tp": 2}, {"dp": 2}, {"microbatch_size": 2}, {"zero": 1}, {"recompute": "full"},
        {"schedule": "fthenb", "pp": 2},
    ):  # fmt: skip
        plan = find_plan(gpt, MACHINE, ask(**choice)).plan
        assert plan is not None
        assert plan.estimate["step_s"] >= best * (1 - 1e-9)


@pytest.mark.parametrize(
    "fixed",
    [
        {"dp": 2, "tp": 2},
        {"pp": 2, "dp": 2},
        {"tp": 4},
        {"pp": 4, "microbatch_size": 1, "schedule": "fthenb"},
        {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"},
        {"zero": 3, "dp": 4},
        {"recompute": "full"},
    ],
)
def test_what_the_user_fixes_is_in_the_plan(gpt, fixed):
    """M14, V11: fixed choices are honoured exactly."""
    plan = find_plan(gpt, MACHINE, ask(**fixed)).plan
    assert plan is not None
    for name, value in fixed.items():
        if name == "recompute":
            assert {stage.recompute for stage in plan.stages} == {value}
        else:
            assert getattr(plan, {"zero": "zero_stage"}.get(name, name)) == value


def test_degrees_need_not_be_powers_of_two(gpt):
    """M8: 6 devices, 3 replicas: dp=3 divides a batch of 12."""
    plan = find_plan(gpt, MACHINE, ask(6, 12, dp=3)).plan
    assert plan is not None
    assert (plan.dp, plan.dp * plan.tp * plan.pp) == (3, 6)


@pytest.mark.parametrize("name", ["hf-gpt2", "hf-llama", "unet", "mlp"])
def test_every_split_of_four_devices_has_a_plan_that_holds_together(name):
    """M8, D22: tied embeddings, skips and grouped queries; tied parameters lie one way only."""
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    graph = captured(name)
    for tp, pp in itertools.product((1, 2), (1, 2)):
        plan = find_plan(graph, MACHINE, ask(tp=tp, pp=pp)).plan
        assert plan is not None
        lies: dict[str, set[str]] = {}
        for block in graph.blocks if tp > 1 else ():
            for param, place in zip(
                block.params, plan.layouts[block.class_index].params, strict=True
            ):
                lies.setdefault(param, set()).add(place)
        assert all(len(places) == 1 for places in lies.values())
        assert "P" not in {p for places in lies.values() for p in places}, (
            "a parameter must rest whole or split"
        )


def test_nothing_fits_names_the_smallest_limit_and_that_limit_fits(gpt):
    """The answer is a result; asking again with the limit it names succeeds, a bit less fails."""
    result = find_plan(gpt, MACHINE, ask(memory_limit_bytes=1000, offload="none"))
    assert result.plan is None
    assert "the smallest limit that would fit is" in result.reasons[0]
    limit = result.smallest_memory_bytes
    assert limit is not None
    assert find_plan(gpt, MACHINE, ask(memory_limit_bytes=limit, offload="none")).plan is not None
    less = ask(memory_limit_bytes=int(0.998 * limit), offload="none")
    assert find_plan(gpt, MACHINE, less).plan is None


def test_less_memory_is_never_faster(gpt):
    roomy = find_plan(gpt, MACHINE, ask()).plan
    assert roomy is not None
    limit = int(roomy.estimate["peak_bytes"]) - 1
    tight = find_plan(gpt, MACHINE, ask(memory_limit_bytes=limit)).plan
    assert tight is not None
    assert tight.estimate["peak_bytes"] <= limit
    assert tight.estimate["step_s"] >= roomy.estimate["step_s"]


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"gpus": 0}, r"`num_devices` 0 was given; training needs at least one device"),
        ({"batch": 0}, r"`global_batch` 0 was given; a step needs at least one sample"),
        ({"tp": 0}, r"`tp` 0 was given; it counts something, so it must be 1 or more"),
        (
            {"gpus": 16},
            r"`num_devices` 16 was given, but profile 'test-machine' describes at mo",
        ),
        (
            {"pp": 8},
            r"pp=8 does not divide `num_devices` 4, and degrees are never changed silently",
        ),
        ({"tp": 3}, r"tp=3 does not divide `num_devices` 4"),
        ({"gpus": 5, "tp": 5, "batch": 10}, r"tp=5 divides no tensor dimension .* use tp in 1"),
        (
            {"dp": 2, "tp": 2, "pp": 2},
            r"does not divide `num_devices` 4.* so leave one of them out, or use `num_devices` 8$",
        ),
        (
            {"dp": 4, "batch": 6},
            r"dp=4 does not divide `global_batch` 6; .* use dp in 1, 2 or `global_batch` 8$",
        ),
        (
            {"microbatch_size": 3},
            r"`microbatch_size` 3 does not divide .* use a divisor: 1, 2, 4, 8",
        ),
        (
            {"microbatch_size": 3, "pp": 4},
            r"`microbatch_size` 3 does not divide .* use a divisor: 1, 2$",
        ),
        (
            {"pp": 4, "batch": 2},
            r"pp=4 needs at least 4 microbatches, but the batch gives at most 2 per replica; use "
            r"`global_batch` 4 or a smaller `pp`$",
        ),
        (
            {"pp": 4, "batch": 8, "microbatch_size": 4},
            r"at most 2 per replica; use `global_batch` 16, `microbatch_size` 2 or a smaller `pp`$",
        ),
        ({"pp": 2, "vpp": 9}, r"makes 18 stages, but the model has \d+ blocks"),
        ({"cp": 4, "gpus": 6, "batch": 6}, r"cp=4 does not divide `num_devices` 6"),
        ({"zero": 4}, r"`zero` 4 was given; ZeRO stages are 0, 1, 2 and 3"),
        ({"recompute": "some"}, r"`recompute` some was given; use none, selective or full"),
        ({"gpus": 7, "batch": 4}, r"7 devices with a global batch of 4 cannot be used: .*dp=7"),
        (
            {"gpus": 7, "batch": 4, "pp": 1},
            r"; take `global_batch` 7 or take `num_devices` 4$",
        ),
    ],
)
def test_bad_input_says_what_was_given_the_rule_and_what_to_try(gpt, choices, message):
    """V4, V11: one line each, and never another plan than the one asked for."""
    machine = Machine(context_bytes=0.0, devices_per_node=4, max_devices=8)
    with pytest.raises(LayoutError, match=message) as caught:
        find_plan(gpt, machine, ask(**choices))
    assert "\n" not in str(caught.value)


def test_advice_for_a_request_without_shapes_was_tried(gpt, monkeypatch):
    """A block of two dtypes takes no ZeRO: another batch is no way out, and is not told."""
    from search.space import shapes

    monkeypatch.setattr(shapes, "why_no_zero", lambda graph, precision: "ZeRO takes no such block")
    with pytest.raises(LayoutError) as caught:
        find_plan(gpt, MACHINE, ask(4, 8, dp=4, zero=1))
    told = str(caught.value)
    assert "ZeRO takes no such block" in told
    assert told.endswith("; leave `dp` out or leave `zero` out")
    for changes in ({"zero": 1}, {"dp": 4}):
        assert find_plan(gpt, MACHINE, ask(4, 8, **changes)).plan is not None


def test_an_unknown_schedule_is_refused_with_the_nearest_name(gpt):
    with pytest.raises(ScheduleError, match=r"'1f1c' is unknown; did you mean '1f1b'"):
        find_plan(gpt, MACHINE, ask(schedule="1f1c"))


def test_interleaving_takes_any_number_of_microbatches_or_says_why_not(gpt):
    """V4: 6 microbatches on 4 pipeline ranks."""
    request = ask(4, 6, pp=4, vpp=1, schedule="interleaved_1f1b")
    with pytest.raises(LayoutError, match="needs vpp>=2"):
        find_plan(gpt, MACHINE, request)


def test_search_needs_no_torch():
    code = "import sys, search; assert 'torch' not in sys.modules, 'search imports torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_bigger_model_than_one_device_is_split():
    """Parameters, gradients and moments of 4 x the limit: some sharding must be in the plan."""
    graph = captured("gpt")
    whole = find_plan(graph, MACHINE, ask(1, 8)).plan
    assert whole is not None
    limit = int(whole.estimate["peak_bytes"]) // 2
    plan = find_plan(graph, MACHINE, ask(memory_limit_bytes=limit)).plan
    assert plan is not None
    assert plan.pp > 1 or plan.tp > 1 or plan.zero_stage > 0
    assert plan.estimate["peak_bytes"] <= limit < GIB


@pytest.mark.parametrize("name", ["gpt", "hf-gpt2"])
def test_the_quick_price_is_the_estimate(name):
    """The search's own fast path may not drift from the cost model it speaks for."""
    if name.startswith("hf"):
        pytest.importorskip("transformers")
    graph = captured(name)
    for choices in (
        {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2, "recompute": "full"}, {"dp": 4, "zero": 3},
        {"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}, {"pp": 4, "schedule": "zb_h1"},
        {"pp": 2, "dp": 2, "zero": 1, "schedule": "fthenb"}, {"pp": 4, "zero": 0},
        {"pp": 2, "dp": 2, "zero": 0, "schedule": "fthenb"},
    ):  # fmt: skip
        request = ask(4, 16, **choices)
        solver = LayoutSolver(graph=graph, profile=MACHINE)
        costs = CostCache(graph, MACHINE, clips_gradients=bool(request.zero))
        candidates = Candidates(
            graph=graph,
            profile=MACHINE,
            costs=costs,
            layouts=LayoutCandidates(solver=solver, costs=costs),
        )
        configuration = next(candidates.shapes(request)[0].configurations())
        table = candidates.tables(configuration.tp, configuration.microbatch_size)[0]
        priced = PricedConfiguration(candidates, configuration, table)
        cut = (
            priced.even_cut(float("inf"))
            if configuration.vpp > 1
            else solve_chain(priced.problem(float("inf"))).cut
        )
        assert cut is not None
        answer = candidates.estimate(priced.plan(cut))
        quick = priced.quick_step_s(cut)
        assert quick == pytest.approx(answer.step_s, rel=1e-9)
        assert cut.value <= answer.step_s * (1 + 1e-9)
        if configuration.vpp == 1:
            problem = priced.problem(float("inf"))
            peak = cut_peak(Paths.of_all(problem), cut.cuts, cut.choices)
            # The insides of jobs, and what FSDP holds, are walked only in the estimate.
            assert 0.6 * answer.peak_bytes < peak <= answer.peak_bytes


@pytest.mark.parametrize("solver", ["recursive", "ilp"])
def test_other_searchers_of_stage_boundaries_agree_or_report_a_gap(gpt, solver):
    """M18, X1: never faster than the exact one; the integer program agrees with it."""
    exact = find_plan(gpt, MACHINE, ask(pp=2)).plan
    result = find_plan(gpt, MACHINE, ask(pp=2, solver=solver))
    assert exact is not None
    assert result.plan is not None
    assert result.certificate is not None
    best = exact.estimate["step_s"]
    # Cuts of equal bound may differ in the simulator; the gap says by how much at most.
    assert result.plan.estimate["step_s"] * (1 - result.certificate.gap) <= best * (1 + 1e-9)
    if solver == "recursive":
        assert dict(result.certificate.proved_by)["stage boundaries"].startswith("nobody")
    assert result.certificate.lower_bound_s <= best * (1 + 1e-9)


def find_plan_in(readings: int, graph, **settings):
    """Search until the clock was read so often: the same work on every machine."""
    with within(readings, clock=count().__next__):
        return find_plan(graph, MACHINE, ask(time_limit_s=readings), **settings)


def first_plan_after(graph) -> int:
    """Return how often the clock is read before there is a plan, about (it is doubled)."""
    return next(2**i for i in range(30) if find_plan_in(2**i, graph).plan is not None)


def test_a_search_cut_short_anywhere_tells_the_truth_and_leaves_nothing_half_made(gpt):
    kept = KeptCandidates()
    whole = find_plan(gpt, MACHINE, ask())
    best_s, without_plan = whole.certificate.best_s, 0
    for readings in (1, 4, 30, 100, 300, 1000, 2000, 4000, 8000, 16000, 32000):
        found = find_plan_in(readings, gpt, candidates_of=kept)
        if found.plan is None:
            without_plan += 1
            assert found.is_out_of_time
            assert found.reasons[0].startswith(f"no plan was found in `time_limit_s` {readings} s")
            continue
        proof = found.certificate
        assert proof.lower_bound_s <= best_s * (1 + 1e-9) <= proof.best_s * (1 + 2e-9)
        assert found.plan.estimate["certificate"]["gap"] == proof.gap
        counted = proof.evaluated + proof.unexplored + sum(n for _, n in proof.pruned)
        assert counted == proof.considered
    assert without_plan > 1
    assert proof.gap == 0, "the last search ends before its limit"
    assert find_plan(gpt, MACHINE, ask(), candidates_of=kept) == whole


def test_late_degrees_are_bounded_not_laid_out(gpt):
    """Past the limit, what has no bound gets a quick one: the gap is below 100%."""
    best = find_plan(gpt, MACHINE, ask()).certificate
    readings = itertools.chain([0.0] * first_plan_after(gpt), itertools.repeat(10.2))
    with within(10.0, clock=readings.__next__):
        proof = find_plan(gpt, MACHINE, ask(time_limit_s=10.0)).certificate
    assert proof.stopped_early == "`time_limit_s` 10.0 s passed"
    assert 0 < proof.lower_bound_s <= best.best_s * (1 + 1e-9)
    assert proof.unexplored > 0


def test_an_interrupt_ends_a_search_with_the_best_so_far(gpt, monkeypatch):
    """P: the proof says so; without a plan, the reason does."""

    def interrupt_when(is_time):
        def progress(fraction, doing):
            if is_time(doing) and not is_interrupted():
                signal.raise_signal(signal.SIGINT)

        with ends_on_interrupt(lambda: None):
            return find_plan(gpt, MACHINE, ask(), progress)

    proof = interrupt_when(lambda doing: "best" in doing).certificate
    assert proof.stopped_early == "it was interrupted"
    assert proof.unexplored > 0
    monkeypatch.setattr(deadline, "INTERRUPT_GRACE_S", 0.0)
    found = interrupt_when(lambda doing: True)
    assert found.is_out_of_time
    assert found.reasons == (
        "no plan was found before the search was interrupted, and it is not known whether any "
        "fits; give more time, or fix `tp` and `pp`",
    )


def test_a_gap_or_a_time_limit_stops_early_and_says_so(gpt):
    """X1: what is left is counted, and the bound stays a bound."""
    best = find_plan(gpt, MACHINE, ask()).certificate
    loose = find_plan(gpt, MACHINE, ask(max_gap=0.5)).certificate
    hurried = find_plan_in(first_plan_after(gpt) + 1, gpt).certificate
    assert best is not None
    for certificate, flag in ((loose, "`max_gap`"), (hurried, "`time_limit_s`")):
        assert certificate is not None
        assert certificate.best_s >= best.best_s * (1 - 1e-9)
        assert certificate.lower_bound_s <= best.best_s * (1 + 1e-9)
        assert flag in certificate.stopped_early
        assert certificate.unexplored > 0


@pytest.mark.slow  # (`test_pareto` compares the set of a smaller model with every plan there is)
def test_the_pareto_set_has_no_dominated_point_and_misses_no_best(gpt):
    """X4: step time against peak memory; the ends are the fastest and the leanest."""
    request = ask(2, 4, schedule="1f1b")
    points = find_pareto(gpt, MACHINE, request)
    steps = [point.step_s for point in points]
    peaks = [point.peak_bytes for point in points]
    assert steps == sorted(steps)
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(points) > 1
    fastest = find_plan(gpt, MACHINE, request).plan
    assert fastest is not None
    assert steps[0] == pytest.approx(fastest.estimate["step_s"])
    for point in points:
        under = find_plan(gpt, MACHINE, replace(request, memory_limit_bytes=point.peak_bytes)).plan
        assert under is not None
        assert under.estimate["step_s"] == pytest.approx(point.step_s)
