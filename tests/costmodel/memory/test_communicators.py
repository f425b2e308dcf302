"""What NCCL adds to a rank's memory: buffers of communicators, and messages that streams keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel import CostCache
from costmodel.execution import find_execution
from costmodel.memory.exact.plan_memory import plan_memory
from costmodel.memory.parts import MemoryParts
from costmodel.time.plan_price import price_plan
from planner.language.lowering.defaults import default_plan
from planner.language.plan import OURS, Plan
from planner.language.plan.schedule_of import schedule_of
from planner.language.schedule.timing.steady import SteadySchedule
from planner.language.templates import Transformer, build_transformer
from planner.nodes.nccl import CONNECTION_BYTES, LINE_CHANNELS
from profiles import Profile, load_profile

H100 = load_profile("h100-sxm5-80gb")
GRAPH = build_transformer(
    Transformer(layers=6, hidden=64, heads=4, kv_heads=4, ffn_hidden=64, vocab=64, seq_len=16)
)
MESSAGE_BYTES = 16 * 64 * 2  # of one sample, in bf16


def memory_of(
    plan: Plan, profile: Profile = H100, *, runtime: str = OURS
) -> tuple[MemoryParts, ...]:
    """The memory of each rank; another runtime is one of another name here."""
    execution = replace(find_execution(OURS), name=runtime)
    costs = CostCache(GRAPH, profile, execution=execution)
    price = price_plan(plan, costs)
    steady = SteadySchedule.whole(schedule_of(plan))
    return plan_memory(plan, costs, steady, price.weights(range(plan.pp)))


def communicators(parts: tuple[MemoryParts, ...], profile: Profile = H100) -> list[float]:
    return [(each.context_bytes - profile.context_bytes) / CONNECTION_BYTES for each in parts]


def test_each_direction_of_messages_has_a_communicator():
    """Eight channels for each: two at the ends of a pipeline, four in its middle."""
    assert CONNECTION_BYTES == 4194304 + 4915200 + 524288
    plan = default_plan(GRAPH, pp=3, tp=2, dp=2)
    assert communicators(memory_of(plan)) == [16, 32, 16]
    assert communicators(memory_of(default_plan(GRAPH, dp=2, tp=2))) == [0]


def test_a_measured_context_has_the_communicator_of_all_ranks_alone():
    measured = Profile(H100.file.model_copy(update={"source": "measured"}), H100.ops)
    plan = default_plan(GRAPH, pp=2, tp=2, dp=2)
    found = communicators(memory_of(plan, measured), measured)
    assert found == [16 + 2 * LINE_CHANNELS] * 2


@pytest.mark.parametrize("ahead", [0, 2, 3])
def test_messages_that_were_freed_wait_for_those_received_behind_them(ahead):
    """Of as many jobs as receives are posted ahead; each job gets one message."""
    plan = default_plan(GRAPH, pp=2, num_microbatches=4)
    plan = plan.model_copy(update={"receive_ahead": ahead})
    for ours, other in zip(memory_of(plan), memory_of(plan, runtime="another"), strict=True):
        assert ours.communication_bytes - other.communication_bytes == ahead * MESSAGE_BYTES
        assert ours.activation_bytes == other.activation_bytes


@pytest.mark.parametrize("pp", [1, 2, 3])
def test_ranks_on_cpus_and_other_runtimes_have_neither(pp):
    plan = default_plan(GRAPH, pp=pp)
    cluster = H100.file.cluster.model_copy(update={"device_type": "cpu"})
    cpu = Profile(H100.file.model_copy(update={"cluster": cluster}), H100.ops)
    assert cpu.cluster.device_type == "cpu"
    on_cpu, other = memory_of(plan, cpu), memory_of(plan, runtime="another")
    assert communicators(on_cpu, cpu) == communicators(other) == [0] * pp
    for a, b in zip(on_cpu, other, strict=True):
        assert a.communication_bytes == b.communication_bytes
