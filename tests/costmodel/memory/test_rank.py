"""One rank: what is resident, what FSDP2 holds, what travels, and what a microbatch keeps."""

from fractions import Fraction

import pytest

from costmodel import CostCache
from costmodel.memory.exact.fsdp_walk import ShardedBytes
from costmodel.memory.exact.messages import Arrival, Receives, Traffic, find_traffic
from costmodel.memory.exact.microbatch import LinkedStages, MicrobatchBytes
from costmodel.memory.exact.plan_memory import plan_memory
from costmodel.memory.exact.resident import resident_parts
from costmodel.memory.exact.stage.fsdp_units import ShardedStage, Unit
from costmodel.memory.exact.stage.jobs import JobVariant
from costmodel.memory.exact.stage.placed_stage import PlacedStages
from costmodel.memory.exact.stage.stage_walk import BackwardBytes, BlockSample, ForwardBytes
from costmodel.memory.part_table import PARTS
from costmodel.memory.parts import MemoryParts, with_overheads
from costmodel.time.plan_price import price_plan
from planner.language.layout.placements import WHOLE
from planner.language.lowering.wiring import Edge, build_edges
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule.jobs import Job, JobKind
from planner.language.schedule.timing.steady import SteadySchedule
from profiles import load_profile
from tests.costmodel.loads import stage_loads
from tests.costmodel.memory.plans import gpt_graph, plan_of

H100 = load_profile("h100-sxm5-80gb")


def test_overheads_are_a_part_of_live_bytes_and_the_context():
    parts = with_overheads(MemoryParts(parameter_bytes=1000, host_bytes=77), H100)
    assert parts.allocator_bytes == 1000 * H100.allocator_overhead_fraction
    assert parts.context_bytes == H100.context_bytes
    assert (parts.tensor_bytes, parts.host_bytes) == (1000, 77)


def test_parts_of_a_rank_sum_to_its_memory():
    """Every part names a field; a rank's parameters and AdamW's two moments are there."""
    graph = gpt_graph()
    costs = CostCache(graph, H100)
    plan = plan_of(graph)
    price = price_plan(plan, costs)
    (parts,) = plan_memory(plan, costs, SteadySchedule.whole(schedule_of(plan)), price.weights([0]))
    assert {part.field for part in PARTS.values()} <= set(MemoryParts.__dataclass_fields__)
    (load,) = stage_loads(price)
    params = load.param_bytes
    assert parts.optimizer_bytes == 2 * params + 4 * load.num_params
    assert parts.parameter_bytes >= params
    assert resident_parts.__doc__


UNIT = Unit(
    gathered_bytes=100, gradient_bytes=100, sum_bytes=100, message_bytes=100, shard_bytes=50,
    own_bytes=50,
    frozen_shard_bytes=0, has_backward=True, has_input_gradient=True, last_part=Fraction(1, 4),
)  # fmt: skip


def sharded(zero_stage):
    return ShardedStage(
        units={0: UNIT, 1: UNIT}, shared=2, zero_stage=zero_stage,
        shards_on_host=False, copies_to_reduce=False,
    )  # fmt: skip


@pytest.mark.parametrize(("zero_stage", "left"), [(1, 200), (2, 200), (3, 0)])
def test_a_forward_under_zero_gathers_blocks(zero_stage, left):
    """The message and the copies of a block's 100 bytes; ZeRO 3 frees a block when it has run."""
    held = ShardedBytes(sharded(zero_stage))
    idle = BlockSample(0, 0, 0, 0)
    height = held.run(ForwardBytes(samples=(idle, idle), last_bytes=0, kept_bytes=0, kept={}))
    assert held.state.live_bytes == held.state.weight_bytes == left
    # The second block's copies and message, the first block's message, and its copies but for 3.
    assert height == ((300, 300) if zero_stage == 3 else (400, 400))


def test_a_last_backward_under_zero_leaves_shards_of_gradients():
    held = ShardedBytes(sharded(3))
    idle = BlockSample(0, 0, 0, 0)
    held.run(ForwardBytes(samples=(idle, idle), last_bytes=0, kept_bytes=0, kept={}))
    backward = BackwardBytes(samples=(idle, idle), rise_bytes=0, new_gradient_bytes=0, deferred=())
    height = held.run(backward, is_last=True)
    assert held.state.live_bytes == held.state.gradient_bytes == 2 * 50
    assert held.state.weight_bytes == 0
    assert height.peak_bytes > height.weight_bytes > 0


def test_gathered_weights_of_a_rank_are_weights():
    """ZeRO 1 holds all of a rank's weights whole from the first forward to the last backward."""
    graph = gpt_graph()
    costs = CostCache(graph, H100)
    found = {}
    for zero_stage in (0, 1):
        plan = plan_of(graph, dp=2, zero_stage=zero_stage)
        price = price_plan(plan, costs)
        (found[zero_stage],) = plan_memory(
            plan, costs, SteadySchedule.whole(schedule_of(plan)), price.weights([0])
        )
    assert found[1].parameter_bytes >= found[0].parameter_bytes


def test_a_receive_brings_those_sent_before_it():
    """Receives from a rank are posted in the order in which it sends."""
    early, late = (Arrival(edge, False, 0) for edge in (3, 5))
    receives = Receives(Traffic(orders={0: [early, late]}))
    assert receives.expect(0, late) == [early, late]
    assert receives.expect(0, early) == []
    assert receives.expect(7, early) == [early], "a rank without an order: in the order of need"


def test_traffic_is_kept_only_where_messages_are():
    graph = gpt_graph()
    plan = plan_of(graph, pp=2, num_microbatches=2)
    schedule, edges = schedule_of(plan), build_edges(graph, plan)
    home = schedule.stage_to_pp_rank.__getitem__
    gone, kept = (
        find_traffic(schedule.jobs, edges, home, 0, keeps_sent=keeps) for keeps in (False, True)
    )
    assert not gone.taken_at
    assert len(kept.taken_at) == 2 * sum(edge.producer == 0 for edge in edges)


def test_what_spreads_over_more_tp_ranks_is_kept_to_the_end_of_its_takers_row():
    """Stage 0 sends to stages 1 (tp 2) and 2 (tp 1), whose ranks have rows of other lengths."""
    edges = tuple(
        Edge(
            index=index, tensor="x", producer=0, consumer=consumer, shape=(8,), batch_dim=None,
            dtype="float32", sent=WHOLE, taken=WHOLE, requires_grad=False,
        )
        for index, consumer in enumerate((1, 2))
    )  # fmt: skip
    rows = [
        [Job(kind=JobKind.FORWARD, stage_index=s, microbatch_index=m) for m in range(length)]
        for s, length in enumerate((3, 3, 1))
    ]
    traffic = find_traffic(
        rows, edges, lambda stage: stage, 0, keeps_sent=True, tp=lambda stage: (1, 2, 1)[stage]
    )
    to_the_end = {Arrival(0, False, m): 3 for m in range(3)}
    assert traffic.taken_at == {**to_the_end, Arrival(1, False, 0): 0}


def test_a_microbatch_holds_nothing_after_its_last_job():
    graph = gpt_graph()
    costs = CostCache(graph, H100)
    plan = plan_of(graph, pp=2, num_microbatches=2)
    placed = PlacedStages(plan, costs, build_edges(graph, plan))
    unseen = MicrobatchBytes(LinkedStages({0: placed.jobs(0)}, keeps_sent=False))
    forward, backward = (
        JobVariant(kind, 0, "walk", is_first=False, num_deferred=0, is_last=False)
        for kind in (JobKind.FORWARD, JobKind.FULL_BACKWARD)
    )
    there, microbatch = unseen.after(forward)
    gone, _ = microbatch.after(backward)
    assert there.kept_bytes == -gone.kept_bytes > 0
    assert unseen.after(forward)[1] is microbatch, "an equal job is not simulated twice"
