"""M23, M24: the optimizer and its state on the host train as they do on the device.

On a CPU device and host are one, so results are equal bit for bit; copies run on threads of
their own there, as they run on streams of their own on a GPU.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor

import planner
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan, Precision
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.process.recorder import Recorder
from planner.runtime.stage.host import Host
from planner.runtime.state.optimizers import host_optimizer
from planner.runtime.state.optimizers.host_optimizer import HostMasters, HostUpdates
from planner.timeline import load_timeline
from tests.builders import gpt_batch
from tests.captures import capture_module
from tests.runtime.beside import OneProcess
from tests.runtime.test_precision import GPT, TiedGPT, seeded
from tests.spawn import run_ranks

STEPS = 2
SMALL_BUCKET_BYTES = 20_000  # a few parameters each, so that slots are used again


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan without offload, and how it is trained."""

    plan: Plan
    kind: type[GPT] = GPT
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    max_grad_norm: float | None = None


def plan_for(precision="model", kind: type[GPT] = GPT, **choices) -> Plan:
    return default_plan(captured(precision, kind), **choices).model_copy(
        update={"precision": precision}
    )


@cache
def captured(precision: Precision, kind: type[GPT]) -> ModelGraph:
    return capture_module(kind(), gpt_batch(2), gpt_batch(3), precision=precision)


@dataclass(frozen=True)
class Outcome:
    """Losses, norms, and whole parameters and gradients (rank 0's) after the steps."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    params: dict[str, Tensor]
    grads: dict[str, Tensor]


def train_both(cases: list[Case]) -> list[tuple[Outcome, Outcome]]:
    """Each case without and with the optimizer on the host."""
    host_optimizer.BUCKET_BYTES = SMALL_BUCKET_BYTES
    return [(_train(case, case.plan), _train(case, with_offload(case.plan))) for case in cases]


def with_offload(plan: Plan) -> Plan:
    return plan.model_copy(update={"optimizer_on_host": True})


def _train(case: Case, plan: Plan) -> Outcome:
    module = seeded(case.kind)
    engine = planner.apply(
        plan,
        module,
        optimizer=case.optimizer(module.parameters(), lr=1e-2),
        max_grad_norm=case.max_grad_norm,
    )
    losses, norms = [], []
    for step in range(STEPS):
        batch = {k: v[-plan.global_batch :] for k, v in gpt_batch(plan.global_batch + step).items()}
        losses.append(engine.step(batch).item())
        norms.append(0.0 if engine.grad_norm is None else engine.grad_norm.item())
    return Outcome(tuple(losses), tuple(norms), engine.full_state_dict(), engine.full_gradients())


def bitwise_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class CountsSteps(torch.optim.SGD):
    """Not PyTorch's own: may take a second call of `step` for a second step."""

    def step(self, closure=None):
        self.steps = getattr(self, "steps", 0) + 1
        for group in self.param_groups:
            group["lr"] = 1e-2 / self.steps
        return super().step(closure)


def _cases() -> dict[str, Case]:
    both = {"num_microbatches": 2}
    return {
        "dp2": Case(plan=plan_for(dp=2, **both)),
        "dp2 bf16": Case(plan=plan_for("bf16", dp=2, **both)),
        "tp2 bf16 clipped": Case(plan=plan_for("bf16", tp=2, **both), max_grad_norm=0.1),
        "pp2 tied": Case(plan=plan_for(kind=TiedGPT, pp=2, **both), kind=TiedGPT),
        "pp2 W apart, bf16": Case(
            plan=plan_for("bf16", pp=2, schedule="zb_h1", num_microbatches=4)
        ),
        "own optimizer": Case(plan=plan_for(dp=2, **both), optimizer=CountsSteps),
        **{
            f"ZeRO-{zero} {precision}": Case(
                plan=plan_for(precision, dp=2, zero_stage=zero, **both), max_grad_norm=0.1
            )
            for zero, precision in ((1, "model"), (1, "bf16"), (2, "bf16"), (3, "model"))
        },
    }


QUICK = "tp2 bf16 clipped", "ZeRO-3 model"


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_offloaded_optimizers_give_bitwise_equal_parameters(every):
    """M23: fp32 and bf16, replicas, ZeRO 1-3, tensor parallel, tied weights, clipping."""
    cases = {name: case for name, case in _cases().items() if every or name in QUICK}
    answers = run_ranks(train_both, 2, list(cases.values()))[0]
    for name, (without, with_host) in zip(cases, answers, strict=True):
        assert with_host.losses == without.losses, name
        assert with_host.norms == without.norms, name
        assert bitwise_equal(with_host.params, without.params), name
        assert bitwise_equal(with_host.grads, without.grads), name
    clipped = list(cases).index("tp2 bf16 clipped")
    assert answers[clipped][0].norms[0] > 0.1  # the clipping clipped


def test_result_equals_reference_adamw():
    """M24: beside torch's AdamW on the user's own module, in one process."""
    host_optimizer.BUCKET_BYTES, before = SMALL_BUCKET_BYTES, host_optimizer.BUCKET_BYTES
    try:
        module = seeded()
        alone = OneProcess(module, lambda each: torch.optim.AdamW(each.parameters(), lr=1e-2))
        plan = with_offload(plan_for(num_microbatches=1, microbatch_size=4))
        engine = planner.apply(
            plan, module, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2)
        )
    finally:
        host_optimizer.BUCKET_BYTES = before
    for _ in range(STEPS):
        batch = gpt_batch(plan.global_batch)
        alone.step(batch)
        engine.step(batch)
    found = engine.full_state_dict()
    for name, value in alone.module.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)


DELAY_S = 0.02


class SlowHost(Host):
    """Every copy takes a while, as on a slow link."""

    @torch.no_grad()
    def _copy(self, pairs, name):
        with self._span("COPY", name):
            time.sleep(DELAY_S)
            for source, target in pairs:
                target.copy_(source)


class SlowSGD(torch.optim.SGD):
    """An optimizer whose steps take a while; steps by parameter, as PyTorch's own do."""

    __module__ = torch.optim.SGD.__module__

    def step(self, closure=None):
        time.sleep(DELAY_S)
        return super().step(closure)


def test_updates_overlap_copies_in_the_timeline(tmp_path):
    """M23: with injected delays, the update of a bucket runs while the next ones' gradients
    come down and the weights of the one before go up.
    """
    num_buckets = 6
    weights = [torch.nn.Parameter(torch.full((100,), float(i))) for i in range(num_buckets)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    host = SlowHost(torch.device("cpu"))
    host.recorder = Recorder(tmp_path, build_mesh(plan_for(), torch.device("cpu")))
    names = {str(i): weight for i, weight in enumerate(weights)}
    masters = HostMasters(names, names, host)
    trained = list(masters.trained.values())
    before, host_optimizer.BUCKET_BYTES = host_optimizer.BUCKET_BYTES, 400  # one weight each
    try:
        optimizer = SlowSGD([parameter.master for parameter in trained], lr=1.0)
        updates = HostUpdates(trained, optimizer, host)
    finally:
        host_optimizer.BUCKET_BYTES = before
    start_s = time.perf_counter()
    updates.step()
    step_s = time.perf_counter() - start_s
    for i, weight in enumerate(weights):
        assert torch.equal(weight, torch.full((100,), i - 1.0))
    host.recorder.end_step()
    host.recorder._file.close()
    (line,) = load_timeline(tmp_path)
    spans = {span.name: span for span in line.spans}

    def overlap(a: str, b: str) -> bool:
        return spans[a].start_s < spans[b].end_s and spans[b].start_s < spans[a].end_s

    for k in range(num_buckets - 1):
        assert overlap(f"update {k}", f"down gradients {k + 1}")
        assert overlap(f"up weights {k}", f"update {k + 1}")
        assert spans[f"down gradients {k}"].end_s <= spans[f"update {k}"].start_s
        assert spans[f"update {k}"].end_s <= spans[f"up weights {k}"].start_s
    one_after_the_other_s = 3 * num_buckets * DELAY_S
    assert step_s < 0.75 * one_after_the_other_s
