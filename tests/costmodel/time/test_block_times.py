"""What a block takes in our own runtime: its ops, its weights' part, and the host's launches."""

from dataclasses import dataclass, replace

import pytest

from costmodel.execution.dispatch.dispatcher import find_dispatcher
from costmodel.table.fusion import num_kernels
from costmodel.time.block.compute import ProgramTimes, Spent, op_seconds
from costmodel.time.block.program import profiled_times
from costmodel.topology import lowered_groups
from planner.language.layout.axes import Degrees
from planner.language.layout.placement import Partial, Replicate
from planner.language.layout.redistribute import redistribute_op
from tests.costmodel.programs import CHAIN, program_of
from tests.search.machine import Machine

OURS = find_dispatcher("sorted-rows")

PASS_S = 32 * 32 * 4 / Machine().bytes_per_s
"""Seconds of reading or writing one tensor."""
FORWARD_S = (2 + 3 + 3 + 3 + 2) * PASS_S
"""Of gelu, add, a product (which its bytes limit), mul and neg."""


def times(*, kernels="eager", recomputed=(), launch_s=0.0, frozen=()) -> ProgramTimes:
    machine = Machine(launch_overhead_s=launch_s)
    return profiled_times(
        program_of(CHAIN, outputs=("d",), frozen=frozen),
        machine,
        axes=lowered_groups(machine.cluster, Degrees()),
        dispatcher=OURS,
        recomputed=frozenset(recomputed),
        kernels=kernels,
    )


def test_a_block_takes_what_its_ops_take():
    program = program_of(CHAIN, outputs=("d",))
    backward_s = [op_seconds(op, program.tensor, Machine())[1] for op in program.ops]
    found = times()
    assert found.forward == Spent(pytest.approx(FORWARD_S), 0.0)
    assert found.backward == Spent(pytest.approx(sum(backward_s)), 0.0)
    assert found.recomputed == Spent(0.0, 0.0)
    assert found.weight_s == pytest.approx(backward_s[2] / 2)
    product = 2 * 32**3
    assert product <= found.forward_flop < product + 20 * 32 * 32
    assert found.forward_comm_s == found.backward_comm_s == 0.0


def test_a_product_whose_input_needs_no_gradient_makes_its_weight_s_alone():
    before = ("x", "y", "a", "b")
    program = program_of(CHAIN, outputs=("d",), frozen=before)
    found = times(frozen=before)
    assert found.weight_s == pytest.approx(op_seconds(program.ops[2], program.tensor, Machine())[1])
    assert found.weight_s < found.backward.device_s


def test_the_host_launches_every_op_and_a_part_of_what_it_adds_is_the_weights():
    """1 s a launch, 5 ops: the device is never ahead of 5 s. One of the ops is a product."""
    found = times(launch_s=1.0)
    assert sum(found.forward) == sum(found.backward) == pytest.approx(5.0)
    share = found.backward.host_s / 5
    assert found.weight_s == pytest.approx(times().weight_s + share)


@dataclass(frozen=True)
class SlowHost(Machine):
    """1 s a launch; a product 10 s more, a redistribution 100 s more."""

    launch_overhead_s: float = 1.0

    def host_seconds(self, direction, *, ops, products=0, redistributions=0):
        return ops + 10.0 * products + 100.0 * redistributions


def test_products_and_redistributions_take_the_host_longer_unless_compiled():
    program = program_of(CHAIN, outputs=("d",))
    summed = redistribute_op("d", "s", axis="tp", src=Partial(), dst=Replicate(), grad_partial=True)
    meta = replace(program.tensor["d"], name="s")
    moved = replace(
        program, ops=(*program.ops, summed), tensors=(*program.tensors, meta), outputs=("s",)
    )
    machine = SlowHost()

    def host(of, kernels):
        found = profiled_times(
            of,
            machine,
            axes=lowered_groups(machine.cluster, Degrees(tp=2)),
            dispatcher=OURS,
            recomputed=frozenset(),
            kernels=kernels,
        )
        return sum(found.forward), sum(found.backward)

    assert host(program, "eager") == pytest.approx((15.0, 15.0))
    assert host(program, "fused") == pytest.approx((3.0, 3.0))
    assert host(moved, "eager")[0] == pytest.approx(116.0)


@pytest.mark.parametrize(("kernels", "launches"), [("eager", 5), ("fused", 3)])
def test_a_block_that_runs_again_is_launched_as_before(kernels, launches):
    """Compiled, gelu and add are one kernel, and mul and neg another; so they are again."""
    assert num_kernels(program_of(CHAIN, outputs=("d",))) == 3
    found = times(kernels=kernels, recomputed=CHAIN, launch_s=1.0)
    assert sum(found.forward) == pytest.approx(launches)
    assert found.recomputed == pytest.approx(found.forward)
    two = times(kernels=kernels, recomputed=("c", "d"), launch_s=1.0)
    assert sum(two.recomputed) == pytest.approx({"eager": 2, "fused": 1}[kernels])


def test_a_sum_over_tp_is_time_of_its_own():
    """All-reduce of 4096 bytes on a ring of 2: two passes of half of them, and its gradient is
    whole already."""
    program = program_of(CHAIN, outputs=("d",))
    machine = Machine()
    summed = redistribute_op(
        "d", "s", axis="tp", src=Partial(), dst=Replicate(), grad_partial=False
    )
    tensors = (*program.tensors, program_of({"s": CHAIN["d"]}, outputs=("s",)).tensor["s"])
    local = replace(program, ops=(*program.ops, summed), tensors=tensors, outputs=("s",))
    found = profiled_times(
        local,
        machine,
        axes=lowered_groups(machine.cluster, Degrees(tp=2)),
        dispatcher=OURS,
        recomputed=frozenset(),
        kernels="eager",
    )
    expected = 2 * (machine.alpha_s + 4096 / 2 / machine.intra_bytes_per_s)
    assert found.forward_comm_s == pytest.approx(expected)
    assert found.backward_comm_s == 0.0
    assert found.forward == Spent(pytest.approx(FORWARD_S), 0.0)
