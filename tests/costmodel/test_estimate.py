"""estimate as a whole: parts add up, more work takes longer, limits are what they must be."""

from dataclasses import replace

import pytest

from costmodel import CostCache, StageLoad, estimate
from costmodel.estimate import plan_job_seconds
from costmodel.execution import find_execution
from costmodel.memory.bound import RankBound, kept_bytes
from costmodel.memory.exact.rank_walk import walk_rank
from costmodel.memory.exact.stage.jobs import StageJobs
from costmodel.memory.part_table import Phase
from costmodel.memory.parts import COUNTER_BYTES, Ranks
from costmodel.time.communication import data_parallel_seconds
from planner.language.lowering.propagate import propagate_graph
from planner.language.plan import ClassRecompute, ClusterRef, ModelRef, Plan, StagePlan
from planner.language.plan.replication import Replication
from planner.language.schedule import build_schedule
from profiles import Group, Lookup, OpQuery, load_profile
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.costmodel.memory.test_stage import KEPT, block_of, stage_of


@pytest.fixture(scope="module")
def graph():
    model = tiny_models()["gpt"]
    return capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")


@pytest.fixture(scope="module")
def profile():
    return load_profile("h100-sxm5-80gb")


class FreeLinks:
    """A profile whose links are infinitely fast, and memory for copies to and from them."""

    def __init__(self, profile):
        self._profile = profile

    def __getattr__(self, name):
        return getattr(self._profile, name)

    @property
    def cluster(self):
        return replace(self._profile.cluster, memory_bytes_per_s=1e30)

    def collective_seconds(self, kind: str, num_bytes: float, group: Group) -> Lookup:
        return Lookup(seconds=0.0, source="infinite bandwidth", relative_error=0.0)


class OneFlopASecond(FreeLinks):
    """A device that does one flop a second and is never waited for."""

    launch_overhead_s = 0.0

    def op_seconds(self, query: OpQuery) -> Lookup:
        return Lookup(seconds=query.flop, source="one flop a second", relative_error=0.0)


def make_plan(graph, *, dp=1, tp=1, pp=1, m=4, size=2, schedule="1f1b", zero=0, recompute="none"):
    n = len(graph.blocks)
    cuts = [s * n // pp for s in range(pp + 1)]
    layouts = ()
    if tp > 1:
        layouts = propagate_graph(graph, microbatch_size=size, axis_size=tp)
        layouts = tuple(layouts.values()) if isinstance(layouts, dict) else tuple(layouts)
    return Plan(
        model=ModelRef(
            name=graph.name,
            file="m.py",
            fingerprint=graph.fingerprint,
            inputs=(),
            batch_tree={"tuple": []},
        ),
        cluster=ClusterRef(name="h100-sxm5-80gb", device="cuda", devices_per_node=8),
        dp=dp,
        tp=tp,
        pp=pp,
        vpp=1,
        microbatch_size=size,
        num_microbatches=m,
        schedule=schedule,
        zero_stage=zero,
        stages=tuple(
            StagePlan(
                pp_rank=s, first_block=cuts[s], last_block=cuts[s + 1] - 1, recompute=recompute
            )
            for s in range(pp)
        ),
        layouts=layouts,
    )


LAYOUTS = [{}, {"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "pp": 2, "zero": 3}]


@pytest.mark.parametrize("degrees", LAYOUTS, ids=str)
def test_parts_add_up_to_the_step(graph, profile, degrees):
    """M16: an estimate is a sum of named parts, none negative, and not below the table's end."""
    costs = CostCache(graph, profile, clips_gradients=True)
    result = estimate(graph, profile, make_plan(graph, **degrees), costs=costs)
    parts = result.to_dict()["time"]
    assert parts["inputs_s"] > 0
    assert parts["clipping_s"] > 0
    assert sum(parts.values()) == pytest.approx(result.step_s)
    assert min(parts.values()) >= -1e-12
    assert result.step_s >= result.timeline.makespan_s
    for memory in result.to_dict()["memory"]:
        total = memory.pop("total_bytes")
        assert sum(memory.values()) == pytest.approx(total, abs=len(memory))


def test_one_device_communicates_nothing(graph, profile):
    parts = estimate(graph, profile, make_plan(graph)).path.parts
    assert not any(parts[name] for name in ("tp_comm_s", "dp_comm_s", "messages_s", "fill_drain_s"))


@pytest.mark.parametrize("degrees", LAYOUTS[1:], ids=str)
def test_infinite_bandwidth_leaves_compute(graph, profile, degrees):
    parts = estimate(graph, FreeLinks(profile), make_plan(graph, **degrees)).path.parts
    exchanged_s = parts["tp_comm_s"] + parts["dp_comm_s"] + parts["messages_s"]
    assert exchanged_s == pytest.approx(0.0, abs=1e-12)
    assert parts["compute_s"] > 0


def test_more_work_takes_longer_and_more_memory(graph, profile):
    """M16: monotone in microbatches, microbatch size and recompute."""
    costs = CostCache(graph, profile)
    base = estimate(graph, profile, make_plan(graph), costs=costs)
    more = estimate(graph, profile, make_plan(graph, m=8), costs=costs)
    gradient_factor = estimate(graph, profile, make_plan(graph, size=4), costs=costs)
    again = estimate(graph, profile, make_plan(graph, recompute="full"), costs=costs)
    assert more.step_s > base.step_s
    assert (
        gradient_factor.path.parts["compute_s"] > base.path.parts["compute_s"]
    )  # the host is the limit of so tiny a step
    assert gradient_factor.step_s >= base.step_s * (1 - 1e-9)
    assert gradient_factor.peak_bytes > base.peak_bytes
    assert again.step_s > base.step_s
    assert again.memory[0].activation_bytes < base.memory[0].activation_bytes


def test_zero_shards_what_it_says(graph, profile):
    """ZeRO 1 shards optimizer state, 2 gradients too, 3 parameters too."""
    by_stage = {
        z: estimate(graph, profile, make_plan(graph, dp=4, zero=z)).memory[0] for z in (0, 1, 2, 3)
    }
    whole = by_stage[0]
    counters = COUNTER_BYTES * len(graph.params)
    for z in (1, 2, 3):
        samples = by_stage[z].optimizer_bytes - counters
        assert samples == pytest.approx((whole.optimizer_bytes - counters) / 4)
    assert by_stage[1].gradient_bytes == whole.gradient_bytes
    assert by_stage[2].gradient_bytes == pytest.approx(whole.gradient_bytes / 4)
    assert by_stage[3].parameter_bytes < whole.parameter_bytes


@pytest.mark.parametrize(("pp", "m"), [(2, 4), (2, 8), (3, 6), (4, 8), (4, 16)])
def test_1f1b_keeps_fewer_microbatches(graph, profile, pp, m):
    """P18: 1F1B keeps min(m, pp - rank) microbatches, FThenB all m."""
    costs = stage_of(block_of(0), arriving={}, leaving=frozenset())
    jobs = StageJobs(
        walk=costs, last=costs, first_deferred=costs, all_deferred=costs, incoming=(), outgoing=(),
        accumulates=True, sends_first=False, on_host=False, loss_bytes=0,
    )  # fmt: skip

    def most_kept(kind, rank):
        row = build_schedule(kind, pp=pp, vpp=1, num_microbatches=m).jobs[rank]
        samples = walk_rank(row, {rank: jobs}, lambda stage: stage, receive_ahead=0)
        return max(sample.saved_bytes for sample in samples)

    for rank in range(pp):
        assert most_kept("1f1b", rank) == KEPT * min(m, pp - rank)
        assert most_kept("fthenb", rank) == KEPT * m


def test_weight_gradients_take_their_products(graph, profile):
    """M16: a W is one product for each weight, 2 flop an element and token; I + W = B."""
    costs = CostCache(graph, OneFlopASecond(profile))
    seconds = plan_job_seconds(make_plan(graph), costs)
    weights = [t for t in graph.params if len(t.shape) == 2 and "token" not in t.fqn]
    elements = sum(t.numel_at(1) for t in weights if "position" not in t.fqn)
    tokens = graph.tensor[graph.batch_inputs[0]].numel_at(2)
    (input_s,), (weight_s,) = seconds.backward_input_s, seconds.backward_weight_s
    assert weight_s == pytest.approx(2 * tokens * elements)
    whole = sum(costs.block(b.class_index, 2).times.backward_s for b in graph.blocks)
    assert input_s + weight_s == pytest.approx(whole)
    # The other product of each matrix, attention and everything pointwise are I's.
    assert input_s > weight_s


def test_what_zero_reduces_is_made_with_the_input_s_gradient(graph, profile):
    """M16: as the runtime does it (decision 6), where there are replicas: a W has nothing to do."""
    costs = CostCache(graph, OneFlopASecond(profile))
    whole, alone = (plan_job_seconds(make_plan(graph, zero=zero), costs) for zero in (0, 1))
    assert alone.backward_weight_s == whole.backward_weight_s
    sharded = plan_job_seconds(make_plan(graph, dp=2, zero=1), costs)
    assert sharded.backward_weight_s == (0.0,)
    (input_s,), (weight_s,) = whole.backward_input_s, whole.backward_weight_s
    assert sharded.backward_input_s[0] >= input_s + weight_s


def test_a_stage_sends_its_gradient_ahead_of_weight_gradients(graph, profile):
    """P4: all of them in its last backward, its first block's in others; none under ZeRO (with
    replicas to shard over), nor where activations are recomputed."""
    costs = CostCache(graph, profile)
    seconds = plan_job_seconds(make_plan(graph, pp=2), costs)
    assert seconds.last_sends_ahead_s == seconds.backward_weight_s
    for ahead, whole in zip(seconds.sends_ahead_s, seconds.backward_weight_s, strict=True):
        assert 0 <= ahead < whole
    for choices in ({"dp": 2, "zero": 1}, {"recompute": "full"}):
        other = plan_job_seconds(make_plan(graph, pp=2, **choices), costs)
        assert other.sends_ahead_s == other.last_sends_ahead_s == (0.0, 0.0)
    alone = plan_job_seconds(make_plan(graph, pp=2, zero=1), costs)
    assert alone.sends_ahead_s == seconds.sends_ahead_s


def test_recompute_keeps_block_inputs_only(graph, profile):
    costs = CostCache(graph, profile)
    layer = max(graph.blocks, key=lambda b: len(graph.classes[b.class_index].ops))
    load = costs.block(layer.class_index, 2).load
    activation = graph.tensor[layer.inputs[0]].bytes_at(2)
    assert kept_bytes(load, recompute="full") == activation


def test_tied_parameters_of_a_stage_count_once(profile):
    pytest.importorskip("transformers")
    model = tiny_models()["hf-gpt2"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt2")
    whole = estimate(graph, profile, make_plan(graph)).memory[0]
    assert whole.parameter_bytes >= 4 * graph.num_params()
    assert whole.optimizer_bytes == 8 * graph.num_params() + COUNTER_BYTES * len(graph.params)
    split = estimate(graph, profile, make_plan(graph, pp=2)).memory
    tied = next(t for t in graph.params if t.aliases)
    both = sum(parts.optimizer_bytes for parts in split)
    counters = COUNTER_BYTES * (len(graph.params) + 1)
    assert both == 8 * (graph.num_params() + tied.numel_at(1)) + counters


def test_unequal_layouts_cost_communication(graph, profile):
    """Two tensor-parallel ranks: less compute each, and collectives that were not there."""
    single, two = (
        estimate(graph, profile, make_plan(graph, size=8, tp=tp)).path.parts for tp in (1, 2)
    )
    assert two["tp_comm_s"] > single["tp_comm_s"] == 0.0


def test_selective_recompute_lies_between(graph, profile):
    """M16: seconds and kept bytes of selective recompute are between none's and full's."""
    costs = CostCache(graph, profile)
    none, some, full = (
        estimate(graph, profile, make_plan(graph, size=8, recompute=mode), costs=costs)
        for mode in ("none", "selective", "full")
    )
    assert none.path.parts["recompute_s"] == 0 < some.path.parts["recompute_s"]
    assert none.step_s < some.step_s < full.step_s
    kept = [estimated.memory[0].activation_bytes for estimated in (full, some, none)]
    assert kept == sorted(kept)
    assert len(set(kept)) == 3


def test_choosing_every_op_is_full_recomputation(graph, profile):
    """Collectives run again too, and inputs alone are kept: by name or by mode, both cost alike."""
    full = make_plan(graph, tp=2, recompute="full")
    every_op = tuple(
        ClassRecompute(class_index=index, ops=tuple(op.name for op in program.ops))
        for index, program in enumerate(graph.classes)
    )
    by_name = make_plan(graph, tp=2, recompute="selective").model_copy(
        update={"recomputed": every_op}
    )
    mode, name = (estimate(graph, profile, plan) for plan in (full, by_name))
    assert name.memory[0].activation_bytes == mode.memory[0].activation_bytes
    assert name.step_s == pytest.approx(mode.step_s, rel=1e-3)


def test_the_last_microbatch_need_not_be_recomputed(graph, profile):
    """One recomputation less a stage; its activations are whole at the end."""
    plan = make_plan(graph, recompute="full", m=4)
    stage = plan.stages[0].model_copy(update={"recompute_last": False})
    sparing = plan.model_copy(update={"stages": (stage,)})
    costs = CostCache(graph, profile)
    all_four, three = (estimate(graph, profile, p, costs=costs) for p in (plan, sparing))
    assert three.path.parts["recompute_s"] == pytest.approx(
        0.75 * all_four.path.parts["recompute_s"]
    )
    assert sum(three.to_dict()["time"].values()) == pytest.approx(three.step_s)
    assert three.timeline.makespan_s < all_four.timeline.makespan_s
    assert three.peak_bytes > all_four.peak_bytes


def test_bf16_takes_eighteen_bytes_a_parameter(profile):
    """V14: 2 weight, 4 gradient, 4 master and 8 state bytes at ZeRO 0; in fp32 four times 4."""
    bytes_of = {"bf16": 18.0 / 2, "model": 16.0 / 4}
    for precision, factor in bytes_of.items():
        rank = RankBound(
            load=StageLoad(), num_microbatches=1, recompute="none", profile=profile,
            ranks=Ranks.under(
                Replication(replicas=1, zero_stage=0, precision=precision),
                find_execution("ours-eager"),
                profile,
            ),
        )  # fmt: skip
        assert rank.slopes[Phase.AFTER_BACKWARD].per_param_byte == factor


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero_hides_behind_compute(graph, profile, zero):
    """M16: exposed messages are never more than the messages, and never less than the part
    that has nothing to hide behind; on a CPU nothing is hidden."""
    plain = data_parallel_seconds(
        profile,
        Group(ranks_per_node=8),
        Replication(replicas=8, zero_stage=zero),
        param_bytes=1e9,
        num_blocks=10,
    )
    for compute_s in (0.0, 1e-3, 1.0):
        bare = plain.hidden_behind(
            profile, forward_s=compute_s, backward_s=2 * compute_s, num_pieces=10
        )
        for name in ("forward_s", "backward_s", "first_forward_s", "last_backward_s"):
            whole, left = getattr(plain, name), getattr(bare, name)
            assert whole / 10 <= left + 1e-15 <= whole + 2e-15
            if compute_s == 0.0:
                assert left == pytest.approx(whole)
            if compute_s == 1.0:
                assert left < 0.2 * whole or whole == 0.0
