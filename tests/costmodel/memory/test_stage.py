"""One stage's jobs by hand: two blocks of known sizes, with and without ZeRO."""

from dataclasses import replace
from fractions import Fraction

import pytest

from costmodel.memory.block.copies import Copy
from costmodel.memory.block.placed_block import (
    BackwardWalk,
    BlockBytes,
    BlockKind,
    Edge,
    Given,
    PlacedBlock,
)
from costmodel.memory.exact.stage.backward import backward_job
from costmodel.memory.exact.stage.fsdp_units import Unit, sharded_stage
from costmodel.memory.exact.stage.jobs import StageJobs, job_variants
from costmodel.memory.exact.stage.stage_walk import BackwardVariant, BlockSample, StageWalk
from costmodel.memory.saved import saved_tensors
from planner.language.graph import Program
from planner.language.plan.replication import Replication
from planner.language.schedule import build_schedule

NO_OPS = Program(name="none", inputs=(), params=(), outputs=(), ops=(), tensors=())
VALUE, KEPT, RISE = 10, 50, 80
"""Bytes of each value between blocks, kept inside a block, and of a block's height."""


def block_of(index, copies=(None,), params=()):
    """A block that takes value index and makes value index + 1, and keeps what it takes."""
    sizes = BlockBytes(
        inputs=(Edge("x", VALUE, True, True),),
        outputs=(Edge("y", VALUE, True, False),),
        params=dict.fromkeys(params, 100),
        frozen={},
        param_shapes=dict.fromkeys(params, (3,)),
        kept_bytes=KEPT,
        recomputed_bytes=0,
        forward_rise_bytes=RISE,
        recompute_rise_bytes=0,
        backward=lambda **how: BackwardWalk(
            30, frozenset(params), (), {"x": Given(VALUE, None, False)}
        ),
        saved=saved_tensors(NO_OPS),
    )
    return PlacedBlock(
        kind=BlockKind(bytes=sizes, copies=copies),
        inputs=(f"v{index}",),
        outputs=(f"v{index + 1}",),
        params={name: name for name in params},
        frozen={},
    )


def stage_of(*blocks, **options):
    given = {"arriving": {"v0": VALUE}, "side": {}, "leaving": frozenset({f"v{len(blocks)}"})}
    return StageWalk(blocks=blocks, **{**given, "sent_copies": {}, **options})


def test_a_forward_keeps_what_blocks_keep_and_the_values_between():
    """v0 arrived and v2 leaves: others hold those too. v1 is kept by the second block."""
    forward = stage_of(block_of(0), block_of(1)).forward
    assert forward.samples == (
        BlockSample(0, RISE, KEPT + VALUE, 0),
        BlockSample(KEPT + VALUE, KEPT + VALUE + RISE, 2 * KEPT + 2 * VALUE, KEPT + VALUE),
    )
    assert forward.kept_bytes == 2 * KEPT + VALUE
    assert forward.kept == {"v0": VALUE}
    assert forward.rise_bytes == KEPT + VALUE + RISE


def test_a_copied_input_is_counted_while_its_block_keeps_it():
    copy = Copy(num_bytes=20, making_bytes=35, returning_bytes=5, passes_on=True)
    forward = stage_of(block_of(0, copies=(copy,))).forward
    (sample,) = forward.samples
    assert (sample.start_bytes, sample.beside_bytes) == (20, 35)
    assert forward.kept_bytes == KEPT + 20


@pytest.mark.parametrize("first", [True, False])
def test_a_backward_frees_what_the_forward_kept(first):
    """Above its start: nothing is left but the gradient of v0 and, the first time, parameters'."""
    stage = stage_of(block_of(0, params=("w",)), block_of(1))
    variant = BackwardVariant(received=("v2",), first=first)
    backward = backward_job(stage, variant)
    assert backward_job(stage, variant) is backward, "an equal job is not simulated twice"
    gradients = 100 if first else 0
    assert backward.new_gradient_bytes == gradients
    assert backward.samples[0].peak_bytes == backward.rise_bytes == 30
    assert backward.samples[-1].end_bytes == gradients + VALUE - 2 * KEPT - VALUE


def units_of(stage, replication, **options):
    return sharded_stage(
        stage.blocks,
        stage.shared,
        replication,
        gradient_factor=stage.gradient_factor,
        device_type="cuda",
        **options,
    )


def test_units_are_padded_to_equal_shards():
    """3 rows of 100 bytes over 2 ranks: 4 rows of 33 bytes; sums are fp32 in bf16."""
    stage = stage_of(block_of(0, params=("w",)), block_of(1), gradient_factor=2)
    found = units_of(stage, Replication(replicas=2, zero_stage=3))
    assert found.units == {
        0: Unit(
            gathered_bytes=132, gradient_bytes=100, sum_bytes=200, message_bytes=264,
            shard_bytes=132, own_bytes=66, frozen_shard_bytes=0, has_backward=True,
            has_input_gradient=True, last_part=Fraction(1),
        ),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "shards_tensors", "own", "gathered", "turned"),
    [
        (3, True, 100, 300, 300),  # [2, 2, 25] each
        (4, True, 150, 600, 0),  # which divide no dim: an expert each, of two
        (4, False, 75, 300, 0),  # flat memory, as Megatron-LM has it
    ],
)
def test_few_rows_on_many_ranks(ranks, shards_tensors, own, gathered, turned):
    """Two experts [2, 6, 25] of a byte an element, all of them a unit's last parameter."""
    block = block_of(0, params=("experts",))
    sizes = {"params": {"experts": 300}, "param_shapes": {"experts": (2, 6, 25)}}
    kind = replace(block.kind, bytes=replace(block.kind.bytes, **sizes))
    stage = stage_of(replace(block, kind=kind), block_of(1))
    replication = Replication(replicas=ranks, zero_stage=3)
    (unit,) = units_of(stage, replication, shards_tensors=shards_tensors).units.values()
    assert (unit.own_bytes, unit.gathered_bytes, unit.turned_bytes) == (own, gathered, turned)
    assert unit.turned_part == (turned > 0)
    assert unit.last_part == 1


def test_experts_are_sharded_over_the_ranks_that_have_the_same():
    """3 rows of 100 bytes: of 4 ranks, all have the router, and 2 the same experts."""
    block = block_of(0, params=("router", "experts"))
    kind = replace(block.kind, bytes=replace(block.kind.bytes, spread=frozenset({"experts"})))
    stage = stage_of(replace(block, kind=kind), block_of(1))
    replication = Replication(replicas=4, expert_replicas=2, zero_stage=1)
    (unit,) = units_of(stage, replication).units.values()
    assert unit.shard_bytes == 33 + 2 * 33
    assert unit.gathered_bytes == 4 * 33 + 2 * 2 * 33


def test_the_last_microbatch_and_the_first_gradients_are_variants_of_their_own():
    walk, last = stage_of(block_of(0)), stage_of(block_of(0))
    jobs = StageJobs(
        walk=walk, last=last, first_deferred=walk, all_deferred=walk, incoming=(), outgoing=(),
        accumulates=False, sends_first=False, on_host=False, loss_bytes=0,
    )  # fmt: skip
    row = build_schedule("1f1b", pp=1, vpp=1, num_microbatches=3).jobs[0]
    variants = list(job_variants(row, {0: jobs}))
    assert [v.walk for v in variants] == ["walk"] * 4 + ["last"] * 2
    assert [v.is_first for v in variants[1::2]] == [True, False, False]
    assert [v.is_last for v in variants[1::2]] == [False, False, True]
