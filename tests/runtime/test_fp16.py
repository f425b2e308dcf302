"""fp16 with fp32 masters and a loss scale whose skips all ranks agree on.

Beside a plan runs one process written out plainly: the module cast to fp16, fp32 copies, each
microbatch's gradient of the scaled loss added to an fp32 sum, and torch's own GradScaler.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.state.gradients.loss_scale import LossScaler
from planner.runtime.step.engine import Engine
from planner.runtime.step.values import ValuesError
from tests.builders import VOCABULARY, PlainGPT, gpt_batch
from tests.captures import capture_module
from tests.runtime.beside import gap_to_largest
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


def batch_of(size: int, seed: int = 0) -> dict[str, Tensor]:
    batch = {k: v[-size:] for k, v in gpt_batch(size + seed).items()}
    return batch | {"amount": torch.ones(size)}


def seeded() -> GPT:
    torch.manual_seed(0)
    return GPT()


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, eps=1e-6)


def plan_for(precision="fp16", **choices) -> Plan:
    graph = capture_module(GPT(), batch_of(2), batch_of(3), precision=precision)
    return default_plan(graph, **choices).model_copy(update={"precision": precision})


class InFp16:
    """The same arithmetic, by hand: `masters` are the module's own parameters."""

    def __init__(self, plan: Plan) -> None:
        self.module = seeded()
        self.optimizer = adamw(self.module)
        self.cast = copy.deepcopy(self.module).half()
        self.replicas, self.num_microbatches = plan.dp, plan.num_microbatches
        self.scaler = torch.amp.GradScaler("cpu")
        self.scaler.scale(torch.zeros(()))  # (its scale is made with the first loss)
        self.norm = 0.0

    def step(self, batch: dict[str, Tensor], *, is_bad: bool = False) -> float:
        pieces = {k: v.chunk(self.replicas * self.num_microbatches) for k, v in batch.items()}
        masters = tuple(self.module.parameters())
        sums, total = [], 0.0
        for replica in range(self.replicas):
            own = [torch.zeros_like(p) for p in masters]
            for m in range(self.num_microbatches):
                piece = m * self.replicas + replica
                loss = self.cast(**{k: v[piece] for k, v in pieces.items()})
                share = loss / (self.replicas * self.num_microbatches)
                self.cast.zero_grad()
                self.scaler.scale(share).backward()
                for grad_sum, param in zip(own, self.cast.parameters(), strict=True):
                    grad_sum += param.grad.float()
                total += share.item()
            sums.append(own)
        for param, *terms in zip(masters, *sums, strict=True):
            param.grad = sum(terms[1:], terms[0])
        if is_bad:
            masters[0].grad.view(-1)[0] = math.inf
        self.scaler.unscale_(self.optimizer)
        self.norm = torch.nn.utils.clip_grad_norm_(masters, math.inf).item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for param, master in zip(self.cast.parameters(), masters, strict=True):
                param.copy_(master)
        return total


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


def train(cases: list[tuple[Plan, str, float | None]]) -> list[Seen]:
    return [_train(*case) for case in cases]


def _train(plan: Plan, where: str, clip: float | None) -> Seen:
    """Train with an infinite gradient in one step: `where` is "batch", one sample of which is too
    large, or "rank", where the last rank alone finds it in a gradient of its own.
    """
    module = seeded()
    alone = InFp16(plan) if dist.get_rank() == 0 else None
    engine = planner.apply(plan, module, optimizer=adamw(module), max_grad_norm=clip)
    seen = Seen()
    for step in range(STEPS):
        batch = batch_of(plan.global_batch, step)
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
            seen.moved_while_skipped = max((after[n] - before[n]).abs().max() for n in before)
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
        parameters = dict(alone.module.named_parameters())
        seen.parameter_gap = gap_to_largest(engine.full_state_dict(), parameters)
    counts = [] if engine.optimizer is None else engine.optimizer.state.values()
    seen.updates = frozenset(int(state["step"]) for state in counts)
    seen.steps = engine.steps
    return seen


def _break_last_rank(engine: Engine, patch: pytest.MonkeyPatch) -> None:
    finish = engine.state.trained.finish_sums

    def finish_badly() -> None:
        finish()
        if dist.get_rank() == dist.get_world_size() - 1:
            next(g for g in engine.state.trained.gradients() if g.numel()).view(-1)[-1] = math.inf

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
        "dp2 ZeRO-1": ({"dp": 2, "num_microbatches": 3, "zero_stage": 1}, "rank", math.inf),
    }  # fmt: skip
    close = {
        "dp2 ZeRO-3": ({"dp": 2, "num_microbatches": 3, "zero_stage": 3}, "rank", None),
        "dp2 ZeRO-3, a sample": (
            {"dp": 2, "num_microbatches": 2, "zero_stage": 3}, "batch", math.inf,
        ),
        "tp2": ({"tp": 2, "num_microbatches": 2}, "rank", math.inf),
    }  # fmt: skip
    cases = exact | close
    plans = [(plan_for(**choices), *how) for choices, *how in cases.values()]
    by_rank = run_ranks(train, 2, plans)
    for name, ranks in zip(cases, zip(*by_rank, strict=True), strict=True):
        whole = ranks[0]
        for seen in ranks:
            assert seen.skips == tuple(step == BAD for step in range(STEPS)), name
            assert seen.scales == whole.expected_scales == (65536.0, *[32768.0] * 3), name
            assert seen.updates == {STEPS - 1}, name
            assert seen.steps == STEPS, name
        assert whole.moved_while_skipped == 0, name
        tolerance = 0 if name in exact else 1e-5 if "ZeRO" in name else 2e-2
        assert whole.gradient_gap <= tolerance, f"{name}: {whole}"
        assert whole.parameter_gap <= tolerance, f"{name}: {whole}"
        assert whole.loss_gap < (1e-3 if name == "tp2" else 1e-6), f"{name}: {whole}"
        assert whole.norm_gap < (1e-2 if name == "tp2" else 1e-5), f"{name}: {whole}"
