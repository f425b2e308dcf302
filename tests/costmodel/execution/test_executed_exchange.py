"""What replicas exchange under runtimes that differ in one habit."""

from dataclasses import replace

import pytest

from costmodel.execution import Execution, find_execution
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_exchange import executed_exchange
from costmodel.table.kernels import load_rates
from costmodel.time.communication import DataParallelSeconds
from planner.language.plan.replication import Replication
from profiles import Group, load_profile

FSDP = find_execution("fsdp-flash")
GROUP = Group(ranks_per_node=2, num_nodes=8)
PARAM_BYTES = 2e9
TENSORS = 200


def exchanged(
    execution: Execution, *, zero_stage: int, group: Group = GROUP
) -> DataParallelSeconds:
    """Exchange of a stage of bf16 weights."""
    h100 = load_profile("h100-sxm5-80gb")
    rates = load_rates(h100)
    return executed_exchange(
        ExecutedProfile(h100, rates, num_nodes=8, execution=execution),
        execution,
        group,
        Replication(zero_stage=zero_stage, replicas=group.size, precision="bf16"),
        param_bytes=PARAM_BYTES,
        num_blocks=32,
        num_tensors=TENSORS,
    )


@pytest.mark.parametrize(("overlaps", "zero_stage"), [("sums", 0), ("scatters", 1)])
def test_sums_and_scatters_overlap_each_by_its_own_habit(overlaps: str, zero_stage: int) -> None:
    both = replace(FSDP, overlaps=())
    beside = exchanged(replace(both, overlaps=(overlaps,)), zero_stage=zero_stage)
    after = exchanged(both, zero_stage=zero_stage)
    assert after.last_backward_s == 0 < after.after_s
    assert beside.after_s == 0
    assert beside.once_s == pytest.approx(after.once_s, rel=1e-12)


def test_a_message_a_tensor_takes_longer_than_all_in_one() -> None:
    few = exchanged(replace(FSDP, sums_tensors=False), zero_stage=0).once_s
    many = exchanged(replace(FSDP, sums_tensors=True), zero_stage=0).once_s
    assert 1.05 * few < many < 3 * few


def test_whole_sums_move_twice_what_a_scatter_moves() -> None:
    habit = replace(FSDP, overlaps=("gathers", "sums"))
    gather_s = exchanged(habit, zero_stage=1).once_s / 3  # 2 bytes gathered, 4 scattered
    more_s = exchanged(replace(habit, scatters=False), zero_stage=1).once_s - 3 * gather_s
    assert more_s == pytest.approx(2 * gather_s, rel=0.1)


def test_gathered_weights_are_unpacked_for_each_replica_and_tensor() -> None:
    unpacked = replace(FSDP, unpack_s=1e-5)
    for group in (GROUP, Group(ranks_per_node=2, num_nodes=4)):
        there = exchanged(FSDP, zero_stage=1, group=group).once_s
        more = exchanged(unpacked, zero_stage=1, group=group).once_s - there
        assert more == pytest.approx(1e-5 * TENSORS * group.size, rel=1e-9)
    # ZeRO 3 gathers block by block into place, and without ZeRO nothing is gathered.
    for zero_stage in (0, 3):
        assert exchanged(unpacked, zero_stage=zero_stage) == exchanged(FSDP, zero_stage=zero_stage)
