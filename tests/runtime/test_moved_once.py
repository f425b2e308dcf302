"""Buffers that no sample decides move once for a batch, however it is cut: as in one process."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

import planner
from planner.capture.source.model_file import ModelSource
from planner.language.across.cut.moved_once import moved_once
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.holdings import Holdings
from planner.language.plan import Plan
from planner.runtime.proofs.verify import VerifyReport, compare_with_one_process
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, sgd
from tests.runtime.test_recompute import in_mode
from tests.spawn import run_ranks

WIDTH = 4


class Block(nn.Module):
    """A temperature that falls, an average of the weights, and a count that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("heat", torch.ones(()))
        self.register_buffer("slow", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        self.heat.mul_(0.9)
        with torch.no_grad():
            self.slow.mul_(0.5).add_(self.fc.weight.sum(0))
        return x + torch.tanh(self.fc(x) / self.heat + 0.1 * self.slow)


class Scheduled(nn.Module):
    """Blocks with schedules of their own, spectral norm, and a loss that is warmed up."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH) if normed else nn.Identity()
        self.out = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x, target):
        for layer in self.layers:
            x = layer(x)
        y = self.out(self.norm(x))
        if self.training:
            self.seen += 1
        share = (self.seen / 10).clamp(max=1).to(x.dtype)
        return F.mse_loss(y, target) + share * x.pow(2).mean()


def batch(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = torch.randn(2, size, WIDTH, generator=generator, dtype=torch.float64)
    return x, target


def model(normed: bool = False) -> Scheduled:
    torch.manual_seed(0)
    return Scheduled(normed).double()


def captured():
    return capture_module(model(), batch(2), batch(3))


def gaps(cases: list[tuple[Plan, Path | None]]) -> list[float]:
    """How far losses, parameters and buffers are from those of one process."""
    found = []
    for plan, folder in cases:
        module = model()
        alone = OneProcess(module, sgd)
        engine = planner.apply(plan, module, optimizer=torch.optim.SGD(module.parameters(), 0.1))
        worst = 0.0
        for step in range(4):
            if step == 2 and folder is not None:
                engine.save(folder)
                engine.close()
                module = model()
                optimizer = torch.optim.SGD(module.parameters(), 0.1)
                engine = planner.apply(plan, module, optimizer=optimizer)
                engine.load(folder)
            # The first update is of two batches: one process runs the model once for each.
            parts = [batch(plan.global_batch, seed=10 * step + n) for n in range(1 + (step == 0))]
            for n, (part, loss) in enumerate(zip(parts, alone.update(parts), strict=True)):
                made = engine.step(part, update=n == len(parts) - 1)
                worst = max(worst, abs(made.item() - loss))
        given = batch(plan.global_batch)
        judged = copy.deepcopy(alone.module).eval()(*given)
        worst = max(worst, abs(engine.evaluate(given) - judged).item())
        state = engine.full_state_dict()
        for name, value in alone.module.state_dict().items() if state else ():
            worst = max(worst, (state[name] - value).abs().max().item())
        engine.close()
        found.append(worst)
    return found


def test_every_buffer_is_found():
    graph = captured()
    names = {graph.tensor[name].fqn for name in moved_once(graph)}
    assert names == {name for name, _ in model().named_buffers()}
    # All replicas have the same, so checkpoints store it once.
    held = Holdings(graph, default_plan(graph, dp=2)).of(1)
    assert all(each.replica is None for each in held.values())


@pytest.mark.parametrize(
    "layouts",
    [
        [({"dp": 2, "zero_stage": 3}, "full"), ({"pp": 2}, "none")],
        pytest.param(
            [
                ({"dp": 2}, "none"),
                ({"pp": 2, "vpp": 2, "schedule": "interleaved_1f1b"}, "selective"),
                ({"pp": 2, "vpp": 2, "schedule": "dualpipe_v"}, "full"),
                ({"tp": 2}, "full"),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["few", "many"],
)
def test_as_one_process(tmp_path, layouts):
    """The first goes on from a checkpoint half way."""
    graph = captured()
    cases = []
    for choices, recompute in layouts:
        plan = default_plan(graph, microbatch_size=2, num_microbatches=3, **choices)
        cases.append((in_mode(plan, recompute), None if cases else tmp_path / "run"))
    found = run_ranks(gaps, 2, cases)[0]
    for (plan, _), gap in zip(cases, found, strict=True):
        assert gap < 1e-10, (plan.degrees, plan.schedule, plan.zero_stage, found)


def test_a_count_of_the_users_beside_deferred_statistics():
    """Merged statistics drop the counts of their own layers alone, which they move themselves."""
    module = model(normed=True)
    graph = capture_module(module, batch(2), batch(3))
    plan = default_plan(graph, microbatch_size=2, num_microbatches=4)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    engine = planner.apply(plan, module, optimizer=optimizer, deferred_batch_norm=True)
    for _ in range(2):
        engine.step(batch(plan.global_batch))
    state = engine.full_state_dict()
    assert {state[f"layers.{n}.calls"].item() for n in range(3)} == {2}
    assert state["seen"] == 2
    assert state["norm.num_batches_tracked"] == 2


def proof(plan: Plan) -> VerifyReport | None:
    source = ModelSource(
        path=Path("moved"), build=partial(model, True), batch=batch, loss=None, dependencies=()
    )
    return compare_with_one_process(plan, source, steps=2)


def test_verified_beside_statistics_of_the_batch():
    """The one process goes microbatch by microbatch then, and moves these once all the same."""
    graph = capture_module(model(normed=True), batch(2), batch(3))
    plan = default_plan(graph, microbatch_size=2, num_microbatches=2, dp=2)
    report = run_ranks(proof, 2, plan)[0]
    assert report is not None
    assert report.passed, report
