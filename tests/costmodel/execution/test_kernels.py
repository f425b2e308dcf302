"""Kernels of a block as other runtimes run them, by hand; and what the host adds to them."""

from dataclasses import replace

import pytest

from costmodel.execution import find_execution
from costmodel.execution.executed import ExecutedProfile
from costmodel.execution.executed_kernels import (
    UNFUSED_SOFTMAX,
    forked_bytes,
    kernel_seconds,
    kernels_of,
    products_of_head,
)
from costmodel.execution.executed_program import executed_times, host_seconds
from costmodel.memory.saved import saved_tensors
from costmodel.table.kernels import load_rates
from costmodel.time.block.compute import bytes_of
from costmodel.topology import lowered_groups
from planner.language.graph import Op, Ref
from planner.language.layout.axes import Degrees
from planner.language.ops.families.products.rings import RING
from profiles import load_profile
from tests.costmodel.programs import CHAIN, program_of

CORE = replace(find_execution("megatron-core"), kernels="eager")
H100 = load_profile("h100-sxm5-80gb")
PROFILE = ExecutedProfile(H100, load_rates(H100), num_nodes=1, execution=CORE)
RATES = PROFILE.rates

QKV = {
    "q": ("aten.mm.default", ("x", "wq")),
    "k": ("aten.mm.default", ("x", "wk")),
    "o": ("aten.mm.default", ("q", "k")),
}


def qkv(**options):
    return program_of(
        QKV, outputs=("o",), params=("wq", "wk"), dtype="bfloat16", inputs=("x",), **options
    )


def seconds_of(local, ops, *, in_head=frozenset()):
    saved = saved_tensors(local, device_type="cuda")
    return kernel_seconds(ops, local, PROFILE, saved, in_head)


def names(kernels):
    return [[op.name for op in ops] for ops in kernels]


def test_weights_of_one_input_are_one_matrix():
    assert names(kernels_of(qkv(), CORE)) == [["q", "k"], ["o"]]
    # A frozen weight has no gradient, so its product is a kernel of its own.
    assert names(kernels_of(qkv(frozen=("wk",)), CORE)) == [["q"], ["k"], ["o"]]


def test_a_joined_product_makes_the_gradients_of_its_input_and_of_all_its_weights():
    """(32, 32) by (32, 64); back, (32, 64) by (64, 32) and (64, 32) by (32, 32)."""
    local = qkv()
    found = seconds_of(local, local.ops[:2])

    def product(m: int, n: int, k: int) -> float:
        return RATES.matmul_seconds(m, n, k, dtype="bfloat16") * PROFILE.waited

    assert found.forward_s == pytest.approx(product(32, 64, 32))
    assert found.weight_s == pytest.approx(product(64, 32, 32))
    assert found.backward_s == pytest.approx(product(32, 32, 64) + found.weight_s)
    assert found.kernels == 1
    first = qkv(frozen=("x",))
    alone = seconds_of(first, first.ops[:2])
    assert alone.backward_s == alone.weight_s == pytest.approx(found.weight_s)
    # What two activations make has gradients of both and none of a weight.
    scores = seconds_of(local, local.ops[2:])
    assert (scores.weight_s, scores.backward_s) == (0.0, pytest.approx(2 * product(32, 32, 32)))


def test_a_pass_reads_from_outside_and_writes_what_is_used_there():
    """Tensors of 4096 bytes: neg reads one and writes one; its gradient is a view of another's."""
    local = program_of(CHAIN, outputs=("d",))
    assert bytes_of(local, ("x", "y")) == 2 * 4096
    found = seconds_of(local, local.ops[4:])
    moved = CORE.pointwise_factor * 2 * 4096
    assert found.forward_s == pytest.approx(PROFILE.pass_seconds(moved))
    assert found.backward_s == 0.0
    # Mul reads two and writes one; back it reads a gradient and both factors, and writes two.
    times = seconds_of(local, local.ops[3:4])
    assert times.forward_s == pytest.approx(PROFILE.pass_seconds(moved * 3 / 2))
    assert times.backward_s == pytest.approx(PROFILE.pass_seconds(moved * 5 / 2))


@pytest.mark.parametrize(
    ("shape", "is_fused"),
    [
        ((1, 4, 8, 2048), True),
        ((2, 2, 8, 17), True),
        ((1, 3, 8, 2048), False),  # its thread blocks hold four rows
        ((1, 4, 8, 2049), False),
        ((1, 4, 8, 16), False),
    ],
)
def test_megatron_s_softmax_takes_some_scores_alone(shape, is_fused):
    program = program_of(
        {"s": ("aten.softmax.int", ("x",))}, outputs=("s",), inputs=("x",), params=(), shape=shape
    )
    (op,) = program.ops
    local = replace(program, ops=(replace(op, args=(Ref("x"), -1)),))
    found = seconds_of(local, local.ops)
    assert found.kernels == (1 if is_fused else UNFUSED_SOFTMAX.kernels)
    if not is_fused:
        scores = shape[0] * shape[1] * shape[2] * shape[3]
        assert found.forward_s == pytest.approx(PROFILE.pass_seconds(24 * scores, 7))
        assert found.backward_s == pytest.approx(PROFILE.pass_seconds(26 * scores, 7))


def test_gradients_of_a_tensor_with_two_users_are_added():
    """b is used on both sides of the product: two are read and their sum is written. Of queries and
    keys, one product makes the sum."""
    local = program_of(CHAIN, outputs=("d",))
    assert forked_bytes(local, kernels_of(local, CORE)) == 3 * 4096
    frozen = program_of(CHAIN, outputs=("d",), frozen=("b",))
    assert forked_bytes(frozen, kernels_of(frozen, CORE)) == 0
    assert forked_bytes(qkv(), kernels_of(qkv(), CORE)) == 0


def test_the_head_s_product_is_what_the_loss_takes():
    ops = {
        "h": ("aten.mm.default", ("x", "w")),
        "p": ("aten.mm.default", ("h", "w")),
        "c": ("aten.neg.default", ("p",)),
        "loss": ("aten.cross_entropy_loss.default", ("c", "y")),
    }
    assert products_of_head(program_of(ops, outputs=("loss",))) == {"p"}
    assert products_of_head(qkv()) == frozenset()


DEALT_EVENLY = (0, None, None, None, False, None, None, 0, (0, 1), 2, "cp")


def rings(count: int):
    """Attention over a ring of 2, `count` times: each takes the queries that the last has made."""
    made = [f"r{at}" for at in range(count)]
    program = program_of(
        dict.fromkeys(made, ("aten.neg.default", ("q",))),
        outputs=(made[-1],),
        inputs=("q", "k", "v"),
        params=(),
        shape=(1, 1, 64, 64),
        dtype="bfloat16",
    )
    ops = tuple(
        Op(
            name=name,
            target=RING,
            args=(Ref(before), Ref("k"), Ref("v"), *DEALT_EVENLY),
            outputs=(name,),
        )
        for before, name in zip(("q", *made), made, strict=False)
    )
    return replace(program, ops=ops)


def test_every_ring_of_a_block_costs_what_the_first_does():
    axes = lowered_groups(H100.cluster, Degrees(cp=2))
    single, three = (
        executed_times(rings(count), PROFILE, axes=axes, recomputed=frozenset()) for count in (1, 3)
    )
    assert single.forward_comm_s > 0
    assert three.forward_comm_s == pytest.approx(3 * single.forward_comm_s)
    assert three.backward_comm_s == pytest.approx(3 * single.backward_comm_s)


def test_the_host_shows_where_it_is_as_slow_as_the_device():
    """Of 3 s of device and 4 s of host: (81 + 256) ** (1/4) - 3 s; as slow, 2 ** (1/4) - 1."""
    ahead = replace(CORE, launches_block=False)
    assert host_seconds(ahead, 3.0, 4.0) == pytest.approx(337**0.25 - 3.0)
    assert host_seconds(ahead, 2.0, 2.0) == pytest.approx(2 * (2**0.25 - 1))
    assert host_seconds(ahead, 0.0, 0.0) == 0.0
    assert host_seconds(ahead, 0.0, 5.0) == pytest.approx(5.0)
    assert host_seconds(ahead, 1.0, 0.01) < 1e-8
    assert host_seconds(replace(ahead, launches_block=True), 3.0, 4.0) == 4.0
