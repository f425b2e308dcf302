"""One stage cost for all: what a search reads of its runs is what a plan's price is made of."""

import random
from dataclasses import fields

import numpy as np
import pytest

from costmodel import CostCache, estimate
from costmodel.time.communication import DataParallelSeconds
from costmodel.time.plan_price import price_plan, stages_of_rank
from costmodel.time.stage_costs.chain import Split, chain_costs
from costmodel.time.stage_costs.messages import Messages
from costmodel.time.stage_costs.replicas import replica_prices
from costmodel.time.stage_costs.stage_costs import StageCosts, cut_runs, pick
from costmodel.time.stage_costs.times import TIME_FIELDS, RunTimes
from costmodel.time.update import adamw_seconds, rank_update
from costmodel.topology import pipeline_group, replica_mesh
from planner.language.layout.axes import Degrees
from planner.language.plan import Plan, recompute_fields
from planner.language.plan.replication import Replication, gradient_factor
from profiles import load_profile
from search.partition.chain_problem import Cut
from search.partition.chain_windows import Window, fixed_windows
from search.partition.quick_step import quick_step_s
from search.space.configuration import Configuration
from search.stages.rank_stages import RankStages
from search.stages.stage_table import StageTable
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.test_estimate import make_plan

CHOICES = ("none", "selective", "full")


@pytest.fixture(scope="module")
def profile():
    return load_profile("h100-sxm5-80gb")


def graph_of(name):
    model = tiny_models()[name]
    return capture_module(model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name)


@pytest.fixture(scope="module", params=["gpt", "unet", "hf-gpt2"])
def graph(request):
    """A chain; skips that reach past stages; a tied embedding."""
    if request.param.startswith("hf-"):
        pytest.importorskip("transformers")
    return graph_of(request.param)


@pytest.fixture(scope="module")
def costs(graph, profile):
    return CostCache(graph, profile, clips_gradients=True)


def _by_block(rng, num_blocks, is_apart):
    """What a stage's blocks recompute: alike, or each as a die falls."""
    return (
        [rng.choice(CHOICES) for _ in range(num_blocks)]
        if is_apart
        else [rng.choice(CHOICES)] * num_blocks
    )


def random_plan(graph, seed) -> Plan:
    """A plan of random cuts, replicas, ZeRO, precision and recomputation, by block in some."""
    rng = random.Random(seed)
    n = len(graph.blocks)
    pp = rng.randint(1, min(3, n))
    plan = make_plan(
        graph, dp=rng.choice((1, 2, 4)), tp=rng.choice((1, 2)), pp=pp,
        zero=rng.choice((0, 1, 2, 3)), schedule=rng.choice(("1f1b", "fthenb", "zb_h1")),
    )  # fmt: skip
    cuts = [0, *sorted(rng.sample(range(1, n), pp - 1)), n]
    is_apart = seed % 3 == 2
    stages = tuple(
        stage.model_copy(
            update={
                "first_block": cuts[s],
                "last_block": cuts[s + 1] - 1,
                **recompute_fields(
                    _by_block(rng, cuts[s + 1] - cuts[s], is_apart), first_block=cuts[s]
                ),
            }
        )
        for s, stage in enumerate(plan.stages)
    )
    changes = {"stages": stages, "precision": rng.choice(("model", "bf16"))}
    return Plan.model_validate(plan.model_copy(update=changes).model_dump())


def table_of(plan, costs) -> StageTable:
    return StageTable(
        costs=costs,
        layouts=plan.layouts,
        degrees=replica_mesh(plan.degrees),
        microbatch_size=plan.microbatch_size,
        precision=plan.precision,
    )


def configuration_of(plan) -> Configuration:
    return Configuration(
        degrees=plan.degrees, pp=plan.pp, vpp=1,
        microbatch_size=plan.microbatch_size, num_microbatches=plan.num_microbatches,
        schedule=plan.schedule, zero=plan.zero_stage, recompute="mixed",
    )  # fmt: skip


def cuts_of(plan) -> tuple[int, ...]:
    return (*(stage.first_block for stage in plan.stages), plan.stages[-1].last_block + 1)


@pytest.mark.parametrize("seed", range(12))
def test_a_cut_costs_the_search_what_it_costs_the_estimate(graph, costs, seed):
    """M16, M17: seconds of all jobs, exchange, update and bytes, to the last bit where both read
    the cut, and to rounding where a solver reads the runs of a window."""
    plan, choices = random_plan(graph, seed), CHOICES
    price = price_plan(plan, costs)
    table = table_of(plan, costs)
    ranks = RankStages(table=table, configuration=configuration_of(plan), is_mixed=True)
    cut = ranks.cut(cuts_of(plan))
    pp_group = pipeline_group(costs.profile.cluster, plan.degrees, pp=plan.pp)
    assert price.job_seconds == cut.job_seconds(
        plan.recompute_by_block, receive_s=cut.runs.receive_s(pp_group)
    )
    for field in fields(DataParallelSeconds):
        mine, theirs = (getattr(part, field.name) for part in (price.exposed, cut.exposed))
        assert np.array_equal(mine, theirs), field.name
    windows = fixed_windows(cuts_of(plan))
    for s, (stage, window) in enumerate(zip(plan.stages, windows, strict=True)):
        if stage.recompute_blocks:
            continue  # a window has choices of whole stages
        band = ranks.cost_window(window)
        own = choices.index(stage.recompute)
        whole = price.job_seconds.backward_input_s[s] + price.job_seconds.backward_weight_s[s]
        assert band.forward_s[own].item() == pytest.approx(
            price.job_seconds.forward_s[s], rel=1e-12
        )
        assert band.backward_s[own].item() == pytest.approx(whole, rel=1e-12)
        update = price.once.updates[stage.pp_rank].seconds(clips_gradients=True)
        after = price.exposed.once_s[s] + update
        assert band.tail_s.item() == pytest.approx(after, rel=1e-12)
        assert band.costs.runs.load.param_bytes.item() == price.load.param_bytes[s]
        assert band.costs.runs.load.num_params.item() == price.load.num_params[s]


@pytest.mark.parametrize("seed", range(6))
def test_a_quick_price_is_the_estimate(graph, costs, seed):
    """M17: also where skips reach past a stage, and where a parameter is tied."""
    plan = random_plan(graph, seed)
    configuration = configuration_of(plan)
    cut = Cut(cuts=cuts_of(plan), choices=(0,) * plan.pp, value=0.0)
    quick = quick_step_s(configuration, table_of(plan, costs), cut, plan.recompute_by_block)
    assert quick == pytest.approx(
        estimate(costs.graph, costs.profile, plan, costs=costs).step_s, rel=1e-12
    )


def test_a_run_takes_what_its_blocks_take(graph, costs):
    """Seconds add up along the chain, whatever the run."""
    chain = chain_costs(costs, Split(microbatch_size=2))
    n = chain.num_blocks
    for first, end in ((0, n), (1, n), (0, 1)):
        run = chain.run_times(np.array([first]), np.array([end]))
        for name in TIME_FIELDS:
            expected = getattr(chain.times, name)[first:end].sum()
            assert getattr(run, name).item() == pytest.approx(expected), name


def test_a_tied_parameter_of_a_run_counts_once(profile):
    """Its bytes and its tensor: a rank has one copy, which AdamW updates once."""
    pytest.importorskip("transformers")
    graph = graph_of("hf-gpt2")
    chain = chain_costs(CostCache(graph, profile), Split(microbatch_size=2))
    n = chain.num_blocks
    whole, first, last = (
        chain.loads.loads(np.array([i]), np.array([j])) for i, j in ((0, n), (0, n - 1), (n - 1, n))
    )
    ((_, _, tied_bytes),) = chain.ties
    assert whole.param_bytes == first.param_bytes + last.param_bytes - tied_bytes
    assert whole.num_params == first.num_params + last.num_params - 1 == len(graph.params)


def test_a_skip_arrives_where_it_is_used(profile):
    """A U-Net's skip reaches a stage that starts after its maker and holds its user, besides what
    its first block takes; the least of all runs counts the first block's alone."""
    graph = graph_of("unet")
    messages = chain_costs(CostCache(graph, profile), Split(microbatch_size=2)).messages
    assert isinstance(messages, Messages)
    n = len(graph.blocks)
    for start in range(1, n):
        for end in range(start + 1, n + 1):
            names = {
                name
                for block in graph.blocks[start:end]
                for name in block.inputs
                if graph.producer.get(name, n) < start
            }
            expected = sum(graph.tensor[name].bytes_at(2) for name in names)
            found = messages.arriving(np.array([start]), np.array([end]))[0, 0].item()
            assert found == expected, (start, end)
            assert messages.arrivals[0, 0, start] <= found


def test_recomputation_adds_the_forward_or_a_part_of_it():
    """Full: compute and collectives again. Selective: compute of the chosen ops."""
    times = RunTimes(
        forward_s=np.array([3.0, 3.0, 3.0]),
        comm_forward_s=np.array([1.0, 1.0, 1.0]),
        recomputed_s=np.array([0.5, 0.5, 0.5]),
        rerun_s=np.array([4.0, 4.0, 4.0]),
    )
    assert times.recompute_s(CHOICES).tolist() == [0.0, 0.5, 4.0]
    for at, choice in enumerate(CHOICES):
        assert times.recompute_s(choice)[at] == times.recompute_s(CHOICES)[at]


def test_stages_of_meshes_take_their_own_mesh_s_entry():
    """Entry s of the s-th record."""
    first, two = (RunTimes(**{name: np.array(v) for name in TIME_FIELDS}) for v in ([1, 2], [3, 4]))
    assert pick([two, first]).forward_s.tolist() == [3, 2]
    assert pick([first, first]) is first


def test_zero_leaves_no_weight_gradients_for_later(costs):
    """Decision 6: FSDP2 reduces gradients as a block's backward ends; a group of one has nothing
    to shard, so there the weight gradients can still wait."""
    runs = cut_runs(chain_costs(costs, Split(microbatch_size=2)), (0, 1, 3))
    alone, sharded = (
        StageCosts(runs=runs, replication=Replication(replicas=count, zero_stage=1))
        for count in (1, 2)
    )
    assert (alone.weight_s == runs.times.weight_s).all()
    assert not sharded.weight_s.any()
    assert (sharded.exposed.once_s > 0).all()


def test_an_update_is_over_shards_and_in_fp32_for_bf16(profile):
    """1 GB of bf16 weights over 8 ranks of ZeRO: each steps on 1/8 of 2 GB of masters."""
    held = Replication(replicas=8, zero_stage=1, precision="bf16")
    assert (held.shards, held.gradient_factor, held.gradient_bytes(8.0)) == (8, 2, 2.0)
    assert gradient_factor("model") == 1
    update = rank_update(profile, held, param_bytes=1e9, num_tensors=10)
    expected = adamw_seconds(
        profile, param_bytes=1e9 / 8, num_tensors=10, sharded=True, precision="bf16"
    )
    assert update.optimizer_s == expected
    assert update.seconds(clips_gradients=True) > update.seconds(clips_gradients=False) == expected


def test_answers_are_kept_for_search_and_estimate_alike(costs):
    """One chain and one set of replica prices, whoever comes first."""
    split = Split(microbatch_size=2)
    assert chain_costs(costs, split) is chain_costs(costs, Split(microbatch_size=2))
    held = Replication(replicas=2, zero_stage=3)
    assert replica_prices(costs, held, Degrees()) is replica_prices(costs, held, Degrees())
    plan = make_plan(costs.graph)
    table = table_of(plan, costs)
    assert price_plan(plan, costs).meshes[0].runs.chain is table.chain
    kinds, stages = table.window(Window.all_runs(table.num_blocks, table.num_blocks), held)
    assert stages.times.forward_s.shape == kinds.start.shape
    assert stages_of_rank(plan, 0) == [0]
