"""D14, V14: bytes of parameters, gradients and optimizer state of a rank, by formula.

Counted by a dispatch mode over the live storages of the real engine (`dry_run`), and, on
two ranks, as the sizes of what the engine and its optimizer hold.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import planner
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan, Precision, ZeroStage
from planner.runtime.proofs.dryrun import dry_run
from planner.runtime.step.engine import Engine
from tests.builders import MlpWithTarget, mlp_batch
from tests.captures import capture_module
from tests.spawn import run_ranks

NUM_PARAMS = (8 * 32 + 32) + (32 * 32 + 32) + (32 * 4 + 4)
FIRST_BLOCK_PARAMS = 8 * 32 + 32
NUM_MICROBATCHES = 2
# AdamW counts the steps of each of the six parameters in fp32; a loss has an fp32 weight for
# each microbatch.
COUNTERS_BYTES = 6 * 4
LOSS_WEIGHTS_BYTES = 4 * NUM_MICROBATCHES


@cache
def graph(precision: Precision) -> ModelGraph:
    return capture_module(MlpWithTarget(), mlp_batch(2), mlp_batch(3), precision=precision)


def plan_for(zero_stage: ZeroStage, precision: Precision = "model") -> Plan:
    plan = default_plan(
        graph(precision), dp=2, num_microbatches=NUM_MICROBATCHES, zero_stage=zero_stage
    )
    return plan.model_copy(update={"precision": precision})


@pytest.mark.parametrize(
    ("precision", "zero_stage", "bytes_per_param"),
    [
        # weight, gradient, and the two moments of AdamW, in fp32
        ("model", 0, 4 + 4 + 8),
        # halved where they are sharded over two ranks
        *[("model", zero_stage, (4 + 4 + 8) / 2) for zero_stage in (1, 2, 3)],
        # bf16 weight and fp32 copy, gradient and moments
        ("bf16", 0, 2 + 4 + 4 + 8),
        # no bf16 weight rests: what is gathered is cast
        *[("bf16", zero_stage, (4 + 4 + 8) / 2) for zero_stage in (1, 2, 3)],
    ],
)
def test_state_between_steps_is_the_formula_to_the_byte(precision, zero_stage, bytes_per_param):
    """D14: what rests is exactly parameters, gradients and optimizer state, cut by dp."""
    run = dry_run(plan_for(zero_stage, precision), graph(precision), MlpWithTarget)
    expected = NUM_PARAMS * bytes_per_param + COUNTERS_BYTES + LOSS_WEIGHTS_BYTES
    assert run.rest_bytes - run.batch_bytes == expected


@pytest.mark.parametrize(("precision", "weight_bytes"), [("model", 4), ("bf16", 2)])
def test_gradients_between_microbatches(precision, weight_bytes):
    """ZeRO-1 sums whole gradients in fp32; ZeRO-2 and 3 keep shards of the sums."""

    def after_first_backward(zero_stage: ZeroStage) -> int:
        run = dry_run(plan_for(zero_stage, precision), graph(precision), MlpWithTarget)
        (moment,) = (m for m in run.samples if m.name == "B0.0")
        return moment.end_bytes - run.batch_bytes

    one_loss = 4
    at_rest = NUM_PARAMS * (4 + 8) / 2 + COUNTERS_BYTES + LOSS_WEIGHTS_BYTES + one_loss
    gathered, whole, shard = weight_bytes * NUM_PARAMS, 4 * NUM_PARAMS, 4 * NUM_PARAMS / 2
    # FSDP2 lets go of what it reduced last (the first block's gradients) with the next one.
    reducing = 4 * FIRST_BLOCK_PARAMS
    assert after_first_backward(1) == at_rest + gathered + whole
    assert after_first_backward(2) == at_rest + gathered + shard + reducing
    assert after_first_backward(3) == at_rest + shard + reducing


def train_each(plans: list[Plan]) -> list[tuple[dict[str, int], dict[str, Tensor]]]:
    """Bytes this rank holds, by kind, and the whole parameters, after five steps of each plan."""
    answers = []
    for plan in plans:
        torch.manual_seed(0)
        engine = planner.apply(plan, MlpWithTarget())
        for step in range(5):
            x, target = mlp_batch(plan.global_batch + step)
            engine.step((x[-plan.global_batch :], target[-plan.global_batch :]))
        answers.append((_held_bytes(engine), engine.full_state_dict()))
    return answers


def _held_bytes(engine: Engine) -> dict[str, int]:
    params = [p for copies in engine.state.trained.by_name().values() for p in copies]
    moments = [
        t for state in engine.optimizer.state.values() for t in state.values() if t.dim() > 0
    ]
    kinds = {"parameters": params, "gradients": [p.grad for p in params], "moments": moments}
    return {kind: sum(map(_bytes, tensors)) for kind, tensors in kinds.items()}


def _bytes(tensor: Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def test_two_ranks_hold_half_each_and_train_alike():
    """D14: moments 1/dp from ZeRO-1 on; the same parameters after five steps, bit for bit."""
    zero_stages: tuple[ZeroStage, ...] = (0, 1, 2, 3)
    by_rank = run_ranks(train_each, 2, [plan_for(zero_stage) for zero_stage in zero_stages])
    whole = {"parameters": 4 * NUM_PARAMS, "gradients": 4 * NUM_PARAMS, "moments": 8 * NUM_PARAMS}
    for answers in by_rank:
        assert answers[0][0] == whole
        for held, _ in answers[1:]:
            assert held == {kind: count // 2 for kind, count in whole.items()}
    plain, zero_1, *others = [state for _, state in by_rank[0]]
    assert all(torch.equal(plain[name], zero_1[name]) for name in plain)
    for state in others:  # sums over ranks and microbatches in another order
        for name in plain:
            torch.testing.assert_close(state[name], plain[name], rtol=1e-5, atol=1e-6)
