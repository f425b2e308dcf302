"""fp16 with fp32 masters and a loss scale whose skips all ranks agree on.

Beside a plan runs one process written out plainly: the module cast to fp16, fp32 copies, each
microbatch's gradient of the scaled loss added to an fp32 sum, and torch's own GradScaler.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.state.gradients.loss_scale import LossScaler
from planner.runtime.step.engine import Engine
from planner.runtime.step.update.values import ValuesError
from tests.builders import VOCABULARY, PlainGPT, gpt_batch
from tests.captures import capture_module
from tests.experts import RoutedGPT
from tests.runtime.beside import InShortDtype, gap_to_largest, sums_in_fp32
from tests.spawn import run_ranks

STEPS, BAD = 4, 1
"""Steps of a training, and which of them has an infinite gradient."""


class GPT(PlainGPT):
    """Each sample's loss counts as much as the batch says: as much as fp16 does not bear, too."""

    def __init__(self) -> None:
        super().__init__(layers=2)

    def forward(self, ids, labels, amount):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        losses = F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1), reduction="none")
        return (losses.view(labels.shape).mean(1) * amount).mean()


class RoutedInFp16(RoutedGPT):
    """Casts its logits for the loss: by hand a loss in fp16 would be infinite times the scale."""

    def forward(self, ids, labels):
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))


def batch_of(size: int, seed: int = 0, kind: type[nn.Module] = GPT) -> dict[str, Tensor]:
    batch = {k: v[-size:] for k, v in gpt_batch(size + seed).items()}
    return batch | {"amount": torch.ones(size)} if kind is GPT else batch


def seeded(kind: type[nn.Module] = GPT) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6)


def plan_for(
    precision="fp16", kind: type[nn.Module] = GPT, optimizer_on_host=False, **choices
) -> Plan:
    two, three = (batch_of(size, kind=kind) for size in (2, 3))
    graph = capture_module(kind(), two, three, precision=precision)
    decided = {"precision": precision, "optimizer_on_host": optimizer_on_host}
    return default_plan(graph, **choices).model_copy(update=decided)


class InFp16(InShortDtype):
    """The same arithmetic, by hand: `module` has the masters."""

    def __init__(self, kind: type[nn.Module], plan: Plan) -> None:
        parts = {"replicas": plan.dp, "num_microbatches": plan.num_microbatches}
        super().__init__(seeded(kind), adamw, nn.Module.half, **parts)
        self.scaler = torch.amp.GradScaler("cpu")
        self.scaler.scale(torch.zeros(()))  # (its scale is made with the first loss)
        self.norm = 0.0

    def step(self, batch: dict[str, Tensor], *, is_bad: bool = False) -> float:
        (optimizer,), masters = self.optimizers, tuple(self.module.parameters())
        sums, loss = sums_in_fp32(self.cast, batch, **self.parts, scaled=self.scaler.scale)
        for param, grad in zip(masters, sums, strict=True):
            param.grad = grad
        if is_bad:
            masters[0].grad.view(-1)[0] = math.inf
        self.scaler.unscale_(optimizer)
        self.norm = torch.nn.utils.clip_grad_norm_(masters, math.inf).item()
        self.scaler.step(optimizer)
        self.scaler.update()
        self.read_back()
        return loss


@dataclass
class Seen:
    """What a rank saw of a training: gaps are 0 on ranks without the whole."""

    loss_gap: float = 0.0
    norm_gap: float = 0.0
    gradient_gap: float = 0.0
    parameter_gap: float = 0.0
    moved_while_skipped: float = 0.0
    skips: tuple[bool, ...] = ()
    scales: tuple[float, ...] = ()
    expected_scales: tuple[float, ...] = ()
    updates: frozenset[int] = frozenset()
    steps: int = 0


def train(cases: list[tuple[type[nn.Module], Plan, str, float | None]]) -> list[Seen]:
    return [_train(*case) for case in cases]


def _train(kind: type[nn.Module], plan: Plan, where: str, clip: float | None) -> Seen:
    """Train with an infinite gradient in one step: `where` is "batch", one sample of which is too
    large, or "rank", where the last rank alone finds it in a gradient of its own.
    """
    module = seeded(kind)
    alone = InFp16(kind, plan) if dist.get_rank() == 0 else None
    engine = planner.apply(plan, module, optimizer=adamw(module), max_grad_norm=clip)
    seen = Seen()
    for step in range(STEPS):
        batch = batch_of(plan.global_batch, step, kind)
        is_bad = step == BAD
        if is_bad and where == "batch":
            batch["amount"][-1] = 1e6  # of the last replica's last microbatch
        before = engine.full_state_dict()
        with pytest.MonkeyPatch.context() as patch:
            if is_bad and where == "rank":
                _break_last_rank(engine, patch)
            loss = engine.step(batch).item()
        seen.skips += (engine.is_skipped,)
        seen.scales += (engine.scaler.scale,)
        after = engine.full_state_dict()
        if is_bad and before:
            seen.moved_while_skipped = max(
                (after[n] - before[n]).abs().max().item() for n in before
            )
        gradients = {} if is_bad else engine.full_gradients()
        if alone is None:
            continue
        expected = alone.step(batch, is_bad=is_bad)
        seen.expected_scales += (alone.scaler.get_scale(),)
        seen.loss_gap = max(seen.loss_gap, abs(loss - expected) / expected)
        if not is_bad:
            wanted = {n: p.grad for n, p in alone.module.named_parameters()}
            seen.gradient_gap = max(seen.gradient_gap, gap_to_largest(gradients, wanted))
            if clip is not None:
                gap = abs(engine.grad_norm.item() - alone.norm) / alone.norm
                seen.norm_gap = max(seen.norm_gap, gap)
    if alone is not None:
        seen.parameter_gap = gap_to_largest(after, dict(alone.module.named_parameters()))
    counts = [] if engine.optimizer is None else engine.optimizer.state.values()
    seen.updates = frozenset(int(state["step"]) for state in counts)
    seen.steps = engine.steps
    return seen


def _break_last_rank(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    finish = engine.state.trained.finish_sums

    def finish_badly() -> None:
        finish()
        if dist.get_rank() == dist.get_world_size() - 1:
            [g for g in engine.state.trained.gradients() if g.numel()][-1].view(-1)[-1] = math.inf

    patch.setattr(engine.state.trained, "finish_sums", finish_badly)


def test_fp16_plans_compute_what_one_process_computes_with_torchs_scaler():
    """Bit for bit where sums have the same order; else as far as rounding to fp16 reaches. The
    step with an infinite gradient on one rank changes nothing on any.
    """
    exact = {
        "pp2": ({"pp": 2, "num_microbatches": 4}, "rank", None),
        "pp2, a sample": ({"pp": 2, "num_microbatches": 2}, "batch", math.inf),
        "pp2, weight gradients apart": (
            {"pp": 2, "num_microbatches": 4, "schedule": "zb_h1"}, "batch", None,
        ),
        "dp2": ({"dp": 2, "num_microbatches": 3}, "batch", math.inf),
        "dp2, one rank": ({"dp": 2, "num_microbatches": 1}, "rank", None),
        "pp2, optimizer on the host": (
            {"pp": 2, "num_microbatches": 2, "optimizer_on_host": True}, "rank", None,
        ),
        "dp2 ZeRO-1": ({"dp": 2, "num_microbatches": 3, "zero_stage": 1}, "rank", math.inf),
    }  # fmt: skip
    close = {
        "dp2 ZeRO-3": ({"dp": 2, "num_microbatches": 3, "zero_stage": 3}, "rank", None),
        "dp2 ZeRO-3, a sample": (
            {"dp": 2, "num_microbatches": 2, "zero_stage": 3}, "batch", math.inf,
        ),
        "tp2": ({"tp": 2, "num_microbatches": 2}, "rank", math.inf),
        # Each rank has other experts: their gradients are the last of its own.
        "ep2": ({"dp": 2, "ep": 2, "num_microbatches": 2, "kind": RoutedInFp16}, "rank", math.inf),
    }  # fmt: skip
    cases = exact | close
    plans = [
        (choices.get("kind", GPT), plan_for(**choices), *how) for choices, *how in cases.values()
    ]
    by_rank = run_ranks(train, 2, plans)
    for name, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        whole = ranks[0]
        for seen in ranks:
            assert seen.skips == tuple(step == BAD for step in range(STEPS)), name
            assert seen.scales == whole.expected_scales == (65536.0, *[32768.0] * 3), name
            assert seen.updates == {STEPS - 1}, name
            assert seen.steps == STEPS, name
        assert whole.moved_while_skipped == 0, name
        is_rounded = name in ("tp2", "ep2")
        tolerance = 0 if name in exact else 2e-2 if is_rounded else 1e-5
        assert whole.gradient_gap <= tolerance, f"{name}: {whole}"
        assert whole.parameter_gap <= tolerance, f"{name}: {whole}"
        assert whole.loss_gap < (1e-3 if is_rounded else 1e-6), f"{name}: {whole}"
        assert whole.norm_gap < (1e-2 if is_rounded else 1e-5), f"{name}: {whole}"


@pytest.mark.slow
def test_one_rank_of_four_is_enough_for_a_skip():
    """Of stages with replicas and shards, the last rank of the last stage alone."""
    cases = {
        "dp2 pp2": {"dp": 2, "pp": 2, "num_microbatches": 2},
        "dp2 pp2 ZeRO-1": {"dp": 2, "pp": 2, "num_microbatches": 2, "zero_stage": 1},
        "tp2 dp2": {"tp": 2, "dp": 2, "num_microbatches": 2},
    }
    plans = [(GPT, plan_for(**choices), "rank", None) for choices in cases.values()]
    for name, ranks in zip(cases, zip(*run_ranks(train, 4, plans), strict=True), strict=True):
        assert {seen.skips for seen in ranks} == {(False, True, False, False)}, name
        assert {seen.scales for seen in ranks} == {ranks[0].expected_scales}, name
        assert {seen.updates for seen in ranks} == {frozenset({STEPS - 1})}, name
        assert ranks[0].moved_while_skipped == 0, name
        assert ranks[0].parameter_gap <= (2e-2 if "tp2" in name else 0), f"{name}: {ranks[0]}"


def test_the_scale_follows_steps_as_torchs_scaler_does():
    """Halved by a skip, doubled after a run of good steps, and on from a state of either."""
    ours = LossScaler(growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    theirs.scale(torch.zeros(()))
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for step, is_bad in enumerate([0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1]):
        weight.grad = torch.full((1,), math.nan if is_bad else 1.0)
        theirs.step(optimizer)
        theirs.update()
        ours.follow(is_skipped=bool(is_bad))
        assert ours.scale == theirs.get_scale(), step
        state = theirs.state_dict()
        assert {name: ours.state_dict()[name] for name in state} == state
        if step == 9:  # in the middle of a run of good steps
            ours, kept = LossScaler(), ours.state_dict()
            ours.load_state_dict(state | {"skipped_steps": kept["skipped_steps"]})
    assert ours.skipped_steps == 4


def resumed(folder: str, plans: list[Plan]) -> list[tuple[dict[str, Tensor], dict]]:
    """Train 4 steps at once, and in two trainings under two plans with a checkpoint between."""
    found = []
    for run in (plans[:1], plans):
        for number, plan in enumerate(run):
            module = seeded()
            optimizer = adamw(module)
            rate = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            engine = planner.apply(plan, module, optimizer=optimizer, scheduler=rate)
            if number:
                engine.load(folder)
            last = STEPS if len(run) == 1 or number else 2
            for step in range(engine.steps, last):
                batch = batch_of(plan.global_batch, step)
                if step == BAD:
                    batch["amount"][0] = 1e6
                engine.step(batch)
            if len(run) > 1 and not number:
                engine.save(folder)
            told = {
                "lr": rate.get_last_lr()[0],
                "scaler": engine.scaler.state_dict(),
                "steps": engine.steps,
            }
            state = engine.full_state_dict()
            engine.close()
        found.append((state, told))
    return found


def test_a_checkpoint_has_the_scale_and_goes_on_under_another_plan(tmp_path):
    """The step behind the skip is the checkpoint's last; schedules did not move in the skip."""
    plans = [plan_for(dp=2, num_microbatches=2), plan_for(pp=2, num_microbatches=4)]
    (whole, told), (parts, told_of_parts) = run_ranks(resumed, 2, str(tmp_path / "run"), plans)[0]
    assert told == told_of_parts
    assert told["lr"] == 1e-3 * 0.5 ** (STEPS - 1)
    assert told["steps"] == STEPS
    assert told["scaler"]["scale"] == 32768
    assert told["scaler"]["_growth_tracker"] == STEPS - 1 - BAD
    assert told["scaler"]["skipped_steps"] == 1
    # Microbatches are summed in another order.
    assert gap_to_largest(parts, whole) < 1e-5


def losses_of(plans: list[Plan]) -> list[list[float]]:
    found = []
    for plan in plans:
        module = seeded()
        made = torch.optim.AdamW(module.parameters(), lr=3e-3)
        engine = planner.apply(plan, module, optimizer=made, max_grad_norm=1.0)
        batch = batch_of(plan.global_batch)
        found.append([engine.step(batch).item() for _ in range(50)])
        if engine.scaler is not None:
            assert engine.scaler.skipped_steps == 0
    return found


def test_fifty_steps_in_fp16_stay_close_to_fp32():
    choices = {"pp": 2, "num_microbatches": 2}
    plans = [plan_for(precision, **choices) for precision in ("model", "fp16")]
    in_fp32, in_fp16 = run_ranks(losses_of, 2, plans)[0]
    assert in_fp32[-1] < 0.25 * in_fp32[0]
    assert max(abs(a - b) for a, b in zip(in_fp32, in_fp16, strict=True)) < 0.01 * in_fp32[0]


def scaled_by(plan: Plan, scale: float, **how) -> tuple[Engine, dict[str, Tensor]]:
    """Train two updates of two batches each, on this rank alone, from a scale."""
    module = seeded()
    engine = planner.apply(plan, module, optimizer=adamw(module), **how)
    engine.scaler.scale = scale
    for update in range(2):
        engine.step(batch_of(plan.global_batch, 2 * update), update=False)
        engine.step(batch_of(plan.global_batch, 2 * update + 1))
    return engine, engine.full_state_dict()


def test_a_power_of_two_changes_nothing():
    """Several batches an update, and the norm that is told is that of the loss itself."""
    plan = plan_for(num_microbatches=2)
    first, expected = scaled_by(plan, 2.0**10, max_grad_norm=0.1)
    second, found = scaled_by(plan, 2.0**12, max_grad_norm=0.1)
    assert first.grad_norm.item() == pytest.approx(second.grad_norm.item(), rel=1e-3)
    # (But for gradients below what fp16 has, of which a larger scale has more.)
    assert gap_to_largest(found, expected) < 1e-4


def scale_after(steps: int, *, check_values: bool) -> float:
    """The scale, from 4, after steps on a loss that is infinite itself."""
    batch = batch_of(2)
    batch["amount"][:] = math.inf
    plan = plan_for(num_microbatches=1, microbatch_size=2)
    engine = planner.apply(plan, seeded(), check_values=check_values)
    engine.scaler.scale = 4.0
    for _ in range(steps):
        engine.step(batch)
    assert engine.scaler.skipped_steps == steps
    return engine.scaler.scale


def test_a_loss_that_no_scale_mends_ends_the_run():
    """From 4 a scale falls to 1; the next step tells where it began. Unchecked it goes on."""
    assert scale_after(2, check_values=True) == 1
    with pytest.raises(ValuesError, match="step 3: the loss is inf; first in"):
        scale_after(3, check_values=True)
    assert scale_after(3, check_values=False) == 0.5


def test_the_log_tells_the_scale():
    plan = plan_for(num_microbatches=1, microbatch_size=2)
    module = seeded()
    engine = planner.apply(plan, module)
    told: list[dict[str, float]] = []
    planner.StepLog(engine, every=1, to=(lambda step, figures: told.append(dict(figures)),))
    bad = batch_of(2)
    bad["amount"][0] = 1e6
    for batch in (batch_of(2), bad, batch_of(2)):
        engine.step(batch)
    assert [each["loss_scale"] for each in told] == [65536, 32768, 32768]
    assert [each["skipped_steps"] for each in told] == [0, 1, 1]
    assert told[0]["loss"] < 10


@pytest.mark.parametrize("fused", [False, True])
def test_a_loop_that_updates_apart_skips_too(fused):
    """With kernels that pass a wrong step over by themselves, and without; clipped the first time
    alone: the norm of that update says nothing of the next.
    """
    module = seeded()
    made = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=fused)
    engine = planner.apply(plan_for(num_microbatches=2), module, optimizer=made)
    states = [engine.full_state_dict()]
    for step in range(3):
        batch = batch_of(2, step)
        if step == BAD:
            batch["amount"][0] = 1e6
        engine.add(batch)
        engine.finish_gradients(factor=0.5)
        if step == 0:
            norm = engine.clip(math.inf).item()
            gradients = engine.state.trained.gradients()
            squares = sum(g.square().sum().item() for g in gradients)
            assert norm == pytest.approx(math.sqrt(squares), rel=1e-5)
            assert norm < 10  # of half the loss, and not of 65536 times it
        engine.update()
        assert engine.is_skipped == (step == BAD)
        states.append(engine.full_state_dict())
    moved = [any(not torch.equal(old[n], new[n]) for n in old) for old, new in pairwise(states)]
    assert moved == [True, False, True]
    assert {int(state["step"]) for state in engine.optimizer.state.values()} == {2}


class Table(nn.Module):
    """A table whose gradient is rows, under a head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 8, sparse=True)
        self.head = nn.Linear(8, 4)

    def forward(self, ids, amount):
        return (self.head(self.table(ids)).float().square().mean((1, 2)) * amount).mean()


def of_table(plans: list[Plan]) -> list[list[dict[str, Tensor]]]:
    """States after each of three steps, the second of which is passed over in fp16."""
    found = []
    for plan in plans:
        torch.manual_seed(0)
        module = Table()
        made = torch.optim.SGD(module.parameters(), lr=0.5)
        engine = planner.apply(plan, module, optimizer=made)
        states = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(0, 32, (4, 3), generator=generator)
            amount = torch.tensor([1, 1, 1, 1e9 if step == BAD else 1])
            if engine.scaler is not None or step != BAD:
                engine.step({"ids": ids, "amount": amount})
            states.append(engine.full_state_dict())
        found.append(states)
    return found


def test_rows_of_a_table_are_scaled_and_passed_over():
    """On one replica a row is infinite; in fp32 that step is left out by hand."""
    sizes = [{"ids": torch.zeros(n, 3, dtype=torch.int64), "amount": torch.ones(n)} for n in (2, 3)]
    plans = []
    for precision in ("model", "fp16"):
        graph = capture_module(Table(), *sizes, precision=precision)
        plan = default_plan(graph, dp=2, num_microbatches=1, microbatch_size=2)
        plans.append(plan.model_copy(update={"precision": precision}))
    expected, found = run_ranks(of_table, 2, plans)[0]
    for step, (in_fp32, in_fp16) in enumerate(zip(expected, found, strict=True)):
        assert gap_to_largest(in_fp16, in_fp32) < 2e-3, step
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    assert not torch.equal(found[0]["table.weight"], found[2]["table.weight"])
