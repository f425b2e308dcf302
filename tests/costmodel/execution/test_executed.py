"""Plans priced for other runtimes: ours is what it was, others differ in what their records say."""

from dataclasses import replace

import pytest

from costmodel.estimate import Estimate, cost_cache, estimate
from costmodel.execution import Execution, execution_names, find_execution
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_program import price_program
from costmodel.memory.parts import MemoryParts
from costmodel.time.stage_costs.times import RunTimes
from costmodel.topology import lowered_groups
from planner.errors import PlannerError
from planner.language.graph import ModelGraph
from planner.language.layout.axes import Degrees
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.templates import Transformer, build_transformer
from planner.language.templates.splits import cp_layouts, tp_layouts
from profiles import Profile, load_profile

LLAMA = Transformer(
    layers=8,
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn_hidden=14336,
    vocab=128256,
    seq_len=4096,
)
GRAPH = build_transformer(LLAMA)
CAPTURED = build_transformer(replace(LLAMA, code="huggingface"))
RATED = [name for name in execution_names() if find_execution(name).prices == "rates"]


@pytest.fixture(scope="module")
def h100() -> Profile:
    return load_profile("h100-sxm5-80gb")


def plan_of(tp: int = 1, cp: int = 1, **sizes: int) -> Plan:
    """A bf16 plan with the usual layouts."""
    bare = default_plan(GRAPH, **{"num_microbatches": 8, **sizes})
    degrees = {**dict(bare.degrees), "tp": tp, "cp": cp}
    layouts = tp_layouts(LLAMA, sequence_parallel=True) if tp > 1 else ()
    if cp > 1:
        layouts += cp_layouts(LLAMA, tp=tp, sequence_parallel=True, microbatch_size=1)
    changed = {"degrees": type(bare.degrees)(**degrees), "layouts": layouts, "precision": "bf16"}
    return bare.model_copy(update=changed)


def priced(name: str, h100: Profile, plan: Plan) -> Estimate:
    return estimate(GRAPH, h100, plan, execution=find_execution(name))


GOLDEN = {"dp": 0.32108826757757347, "pp": 0.5064460419808506}
"""Frozen seconds of a step: the template is what a capture of the model is."""


def test_a_backward_makes_what_needs_a_gradient(h100: Profile) -> None:
    """Frozen weights have no products for their gradients, and what nothing trained precedes has no
    backward at all, on the device or on the host."""
    core = find_execution("megatron-core")
    profile = cost_cache(GRAPH, h100, 8, execution=core).profile
    layer = GRAPH.classes[1].bind(1)

    def priced_with(needs) -> RunTimes:
        tensors = tuple(
            replace(meta, requires_grad=meta.requires_grad and needs(meta))
            for meta in layer.tensors
        )
        axes = lowered_groups(h100.cluster, Degrees())
        program = replace(layer, tensors=tensors)
        return price_program(program, profile, axes=axes, execution=core).times

    trained = priced_with(lambda meta: True)
    frozen = priced_with(lambda meta: meta.kind != "param")
    nothing = priced_with(lambda meta: False)
    assert trained.forward_s == frozen.forward_s == nothing.forward_s
    assert frozen.weight_s == 0
    # Half of the products' backward, which is most of a layer's; attention's stays whole.
    assert 0.45 < frozen.backward_s / trained.backward_s < 0.65
    assert (nothing.backward_s, nothing.host_backward_s, nothing.comm_backward_s) == (0, 0, 0)


@pytest.mark.parametrize("name", ["dp", "pp"])
def test_our_own_runtime_is_priced_as_ever(h100: Profile, name: str) -> None:
    plan = {
        "dp": default_plan(CAPTURED, dp=8, zero_stage=3),
        "pp": default_plan(CAPTURED, dp=2, pp=4, zero_stage=1, num_microbatches=8),
    }[name]
    found = estimate(CAPTURED, h100, plan)
    assert found.step_s == pytest.approx(GOLDEN[name], rel=1e-12)
    named = estimate(CAPTURED, h100, plan, execution=find_execution("ours-eager"))
    assert named.to_dict() == found.to_dict()


@pytest.mark.parametrize("name", RATED)
def test_parts_of_other_runtimes_add_up(h100: Profile, name: str) -> None:
    found = priced(name, h100, plan_of(dp=2, pp=2, tp=2, zero_stage=1))
    parts = found.to_dict()["time"]
    after_s = parts["optimizer_s"] + parts["inputs_s"]
    # What stages exchange once a step comes after a rank's last job.
    assert found.step_s >= max(found.timeline.rank_end_s) + after_s - 1e-9
    assert found.step_s <= max(found.timeline.rank_end_s) + after_s + parts["dp_comm_s"] + 1e-9
    assert min(parts.values()) >= 0
    # A host that waits for each kernel is the slowest.
    flop_per_s = found.flop / found.step_s / 8
    assert 0.1 * 989e12 < flop_per_s < 0.75 * 989e12


def test_a_compiler_moves_fewer_bytes(h100: Profile) -> None:
    plan = plan_of(dp=8, zero_stage=3)
    eager, compiled = (priced(n, h100, plan) for n in ("torchtitan", "torchtitan-compiled"))
    assert compiled.path.parts["compute_s"] < 0.95 * eager.path.parts["compute_s"]
    # Its kernels save what they take, not what they make inside.
    assert compiled.peak_bytes < eager.peak_bytes


def test_overlap_hides_what_others_wait_for(h100: Profile) -> None:
    plan = plan_of(dp=4, tp=2, zero_stage=1)
    core = find_execution("megatron-core")
    exposed = [
        estimate(GRAPH, h100, plan, execution=replace(core, overlaps=overlaps)).path.parts
        for overlaps in (core.overlaps, ("gathers", "sums", "stages"))
    ]
    assert exposed[0]["tp_comm_s"] < exposed[1]["tp_comm_s"]
    assert exposed[0]["dp_comm_s"] < exposed[1]["dp_comm_s"]
    assert exposed[0]["compute_s"] == pytest.approx(exposed[1]["compute_s"])


def test_transfers_that_are_not_overlapped_lengthen_each_microbatch(h100: Profile) -> None:
    core = find_execution("megatron-core")
    plan = plan_of(dp=1, pp=8, num_microbatches=32)
    steps = [
        estimate(GRAPH, h100, plan, execution=replace(core, overlaps=overlaps)).step_s
        for overlaps in (core.overlaps, ())
    ]
    assert steps[0] < steps[1]


def test_context_parallel_ranks_share_the_scores(h100: Profile) -> None:
    whole, halves = plan_of(dp=2), plan_of(dp=1, cp=2)
    core = find_execution("megatron-core")
    flop = [estimate(GRAPH, h100, plan, execution=core) for plan in (whole, halves)]
    per_microbatch = [found.path.parts["compute_s"] for found in flop]
    # Half of the work, in products that fill the device a little less.
    assert 1.0 <= per_microbatch[1] / (per_microbatch[0] / 2) < 1.15
    assert flop[1].path.parts["tp_comm_s"] > 0


def test_eight_bits_multiply_faster_in_layers_alone(h100: Profile) -> None:
    core = find_execution("megatron-core")
    costs = cost_cache(GRAPH, h100, 8, execution=core)
    assert isinstance(costs.profile, ExecutedProfile)
    narrow = ExecutedProfile(
        h100, costs.profile.rates, num_nodes=1, execution=core, product_dtype="float8_e4m3fn"
    )
    eight = type(costs)(GRAPH, narrow, execution=core)
    layer, head = (costs.block(i, 1).times.forward_s for i in (1, 2))
    assert eight.block(1, 1).times.forward_s < 0.8 * layer
    assert eight.block(2, 1).times.forward_s == head


def test_a_measured_profile_has_no_rates(h100: Profile) -> None:
    measured = Profile(h100.file.model_copy(update={"source": "measured"}))
    with pytest.raises(PlannerError, match="use a shipped profile, or ours-eager"):
        cost_cache(GRAPH, measured, 8, execution=find_execution("nanotron"))


def test_keys_and_values_of_a_ring_are_never_whole(h100: Profile) -> None:
    core = find_execution("megatron-core")
    plan = plan_of(dp=1, cp=4)
    found = [
        estimate(GRAPH, h100, plan, execution=replace(core, rings_attention=rings))
        for rings in (True, False)
    ]
    assert found[0].peak_bytes < found[1].peak_bytes
    layer = cost_cache(GRAPH, h100, 8, execution=core).local(
        1, 1, plan.degrees, tuple(own for own in plan.layouts if own.class_index == 1)
    )
    (ring,) = (op for op in layer.ops if op.target == "planner.ring_attention")
    assert layer.tensor[ring.inputs[1]].shape == (1, 8, 1024, 128)
    whole = cost_cache(GRAPH, h100, 8, execution=core).block(1, 1).times.forward_flop
    shared = cost_cache(GRAPH, h100, 8, execution=core).block(1, 1, plan.degrees, plan.layouts[1:2])
    assert shared.times.forward_flop == pytest.approx(whole / 4, rel=1e-3)


def test_rounds_of_a_ring_are_joined_and_issued(h100: Profile) -> None:
    """With r rounds: r ops of the host and r kernels more each way, and passes over the result."""
    core, free = find_execution("megatron-core"), None
    for cp in (1, 4):
        plan = plan_of(dp=1, cp=cp)
        parts = [
            estimate(GRAPH, h100, plan, execution=replace(core, ring_kernels=ops)).path.parts
            for ops in (0, 60)
        ]
        more_s = parts[1]["host_s"] - parts[0]["host_s"]
        assert (more_s > 1e-3) == (cp > 1)
        free = free or parts[0]
    # The work of four ranks: a quarter each of whole attention, and what joins their rounds.
    assert 4 * parts[0]["compute_s"] > 1.01 * free["compute_s"]


def test_the_host_issues_ops_of_jobs_and_of_steps(h100: Profile) -> None:
    """Jobs wait for what the host does about them only where it sets the pace; a step's ops come
    once, whatever the number of microbatches.
    """
    core = find_execution("megatron-core")
    none = replace(core, job_kernels=0, step_kernels=0)

    def more_s(tp: int, microbatches: int, **kernels: int) -> float:
        plan = plan_of(dp=1, pp=2, tp=tp, num_microbatches=microbatches)
        with_ops, without = (
            estimate(GRAPH, h100, plan, execution=replace(none, **ops)).step_s
            for ops in (kernels, {})
        )
        return with_ops - without

    issue_s = 4.5e-5
    assert more_s(1, 8, job_kernels=10) < 0.1 * 9 * 2 * 10 * issue_s
    slow = replace(none, forward_kernels=1000)
    plan = plan_of(dp=1, pp=2, tp=8, num_microbatches=8)
    bound, bare = (
        estimate(GRAPH, h100, plan, execution=replace(slow, job_kernels=ops)).step_s
        for ops in (10, 0)
    )
    # Two ranks: (8 + 1) turns of a forward and a backward.
    assert bound - bare == pytest.approx(9 * 2 * 10 * issue_s, rel=0.05)
    few, many = more_s(1, 8, step_kernels=1000), more_s(1, 32, step_kernels=1000)
    assert few == pytest.approx(many)
    assert 0.3 * 1000 * issue_s < few <= 1000 * issue_s * 1.01


def test_modules_beyond_a_plain_layer_are_issued(h100: Profile) -> None:
    """Norms of queries and keys are two modules; tensors that are filled take a fifth longer."""
    core = find_execution("megatron-core")
    normed = build_transformer(replace(LLAMA, query_key_norm=True))
    plan = plan_of(dp=1)

    def host_s(graph: ModelGraph, **changes: int | bool) -> float:
        execution = replace(core, forward_kernels=5000, **changes)
        return estimate(graph, h100, plan, execution=execution).path.parts["host_s"]

    plain = [host_s(GRAPH, module_kernels=ops) for ops in (0, 100)]
    assert plain[0] == plain[1]
    more_s = host_s(normed, module_kernels=100) - host_s(normed, module_kernels=0)
    # 8 microbatches, 8 layers: 200 ops forward and twice as many back.
    assert more_s == pytest.approx(64 * (200 * 4.529e-5 + 400 * 2.365e-5), rel=0.05)
    assert host_s(GRAPH, deterministic=True) > 1.15 * host_s(GRAPH)


def test_an_update_in_place_needs_no_copy(h100: Profile) -> None:
    core = find_execution("megatron-core")
    plan = plan_of(dp=1, tp=8, num_microbatches=1)
    peaks = [
        estimate(GRAPH, h100, plan, execution=replace(core, copies_update=copies)).peak_bytes
        for copies in (True, False)
    ]
    assert peaks[0] > peaks[1]


@pytest.mark.parametrize("zero", [0, 1])
def test_sums_of_gradients_may_stay_whole_with_buckets_beside(h100: Profile, zero: int) -> None:
    """Of one microbatch: sums, 4 bytes a parameter, are there ahead of its backward, with ZeRO 1
    too. Buckets, 2 bytes, are of replicas without ZeRO.
    """
    plan = plan_of(dp=2, tp=4, num_microbatches=1).model_copy(update={"zero_stage": zero})
    core = find_execution("megatron-core")

    def memory(**said: bool | int) -> MemoryParts:
        return estimate(GRAPH, h100, plan, execution=replace(core, **said)).memory[0]

    params = memory().optimizer_bytes / 12 * (2 if zero else 1)
    stays = memory(sums_stay=True)
    assert stays.gradient_bytes == pytest.approx(4 * params, rel=0.01)
    buckets = memory(sums_stay=True, bucket_bytes=2).gradient_bytes - stays.gradient_bytes
    assert buckets == pytest.approx(0 if zero else 2 * params, rel=0.01)
    assert memory(sums_stay=True, adds_late=True).total >= stays.total


def test_narrow_sums_of_gradients_are_widened_for_the_update(h100: Profile) -> None:
    """2 bytes of a sum in place of 4; the optimizer's step makes fp32 copies of them all."""
    core = replace(find_execution("megatron-core"), copies_update=False, sums_stay=False)

    def memory(size: int, num_microbatches: int) -> MemoryParts:
        plan = plan_of(dp=1, tp=8, num_microbatches=num_microbatches)
        narrowed = replace(core, gradient_bytes=size)
        return estimate(GRAPH, h100, plan, execution=narrowed).memory[0]

    wide, narrow = memory(4, 2), memory(2, 2)
    assert wide.optimizer_bytes == narrow.optimizer_bytes
    assert wide.gradient_bytes == pytest.approx(2 * narrow.gradient_bytes)
    assert wide.total > narrow.total
    # Of one microbatch no sums lie beside the activations; the update is the fullest moment.
    assert memory(4, 1).total < memory(2, 1).total


def test_hosts_that_poll_between_nodes_are_late_for_collectives(h100: Profile) -> None:
    """Ranks 0 .. 7 share a node: pp 4 of tp 2 stays in it, pp 4 of tp 4 does not."""
    nanotron = find_execution("nanotron")
    patient = replace(nanotron, polled_late_s=0.0)

    def host_s(execution: Execution, **sizes: int) -> float:
        return estimate(GRAPH, h100, plan_of(**sizes), execution=execution).path.parts["host_s"]

    assert host_s(nanotron, pp=4, tp=2) == host_s(patient, pp=4, tp=2)
    assert host_s(nanotron, dp=16, tp=4) == host_s(patient, dp=16, tp=4)
    assert host_s(nanotron, pp=4, tp=4) > host_s(patient, pp=4, tp=4)
    # Each host of a group is late by itself, so twice as many make the others wait twice as long.
    more = [host_s(nanotron, pp=4, tp=tp) - host_s(patient, pp=4, tp=tp) for tp in (4, 8)]
    assert 1.7 < more[1] / more[0] < 2.5
