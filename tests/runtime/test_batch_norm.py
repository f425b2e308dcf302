"""BatchNorm under a plan that cuts the batch: a warning by name, and deferred statistics."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import planner
from planner.errors import PlanError
from planner.language.across.cut.batch_statistics import (
    BatchStatisticsWarning,
    batch_norm_messages,
    batch_norms,
)
from planner.language.across.cut.whole_batch import refuse_cut
from planner.language.graph import ModelGraph
from planner.language.layout.pins import parse_pin
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.propagate import propagate_graph
from planner.language.plan import Plan
from planner.runtime.process.groups.mesh import build_mesh
from planner.runtime.proofs import verify
from planner.runtime.step.engine import Engine
from tests.builders import tiny_models
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, sgd
from tests.spawn import run_ranks

STEPS = 2


class ConvNet(nn.Module):
    """A BatchNorm that sees the batch as it is, and others that see normalised values, of which the
    last one's running statistics are the mean over all steps; and a count of forwards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(2, momentum=0.3)
        self.stages = nn.Sequential(
            nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU()),
            nn.Sequential(nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU()),
        )
        self.head = nn.Linear(6, 3)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        x = self.stages(self.norm(image))
        return F.cross_entropy(self.head(x.mean((2, 3))), label)


def batch(size: int, step: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + size)
    image = torch.randn(size, 2, 8, 8, generator=generator) * 3 + 1
    return {"image": image, "label": torch.randint(0, 3, (size,), generator=generator)}


def captured(dtype: torch.dtype = torch.float32) -> ModelGraph:
    two, three = ({k: _cast(t, dtype) for k, t in batch(size).items()} for size in (2, 3))
    return capture_module(ConvNet().to(dtype), two, three, name="convnet")


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def expected_statistics(module: nn.Module, plan: Plan) -> dict[str, torch.Tensor]:
    """Each layer's statistics over all it is given in a step, microbatch by microbatch.

    Computed by the definition, on one device: the layer's inputs are laid side by side.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    norms = {n: m for n, m in module.named_modules() if isinstance(m, nn.BatchNorm2d)}
    seen: dict[str, list[torch.Tensor]] = {}
    for name, norm in norms.items():
        norm.register_forward_pre_hook(
            lambda _, args, name=name: seen.setdefault(name, []).append(args[0].detach())
        )
    state = {f"{n}.{k}": v.clone() for n, m in norms.items() for k, v in m.named_buffers()}
    for step in range(STEPS):
        seen.clear()
        optimizer.zero_grad()
        whole = batch(plan.global_batch, step)
        for start in range(0, plan.global_batch, plan.microbatch_size):
            piece = {k: v[start : start + plan.microbatch_size] for k, v in whole.items()}
            (module(**piece) / (plan.global_batch // plan.microbatch_size)).backward()
        optimizer.step()
        for name, norm in norms.items():
            values = torch.cat(seen[name]).transpose(0, 1).flatten(1)
            for key, now in (("mean", values.mean(1)), ("var", values.var(1))):
                share = norm.momentum or 1 / (step + 1)
                state[f"{name}.running_{key}"].lerp_(now, share)
            state[f"{name}.num_batches_tracked"] += 1
    return state


def one_device_statistics(plan: Plan) -> dict[str, torch.Tensor]:
    """The first layer's buffers after steps on the whole batch; its input is the image."""
    norm = ConvNet().norm
    for step in range(STEPS):
        norm(batch(plan.global_batch, step)["image"])
    return dict(norm.named_buffers(prefix="norm"))


def plan_of(graph: ModelGraph, layout: dict) -> Plan:
    """A default plan; with tp the channels of two BatchNorms are divided, whatever that costs."""
    plan = default_plan(graph, **layout)
    if plan.tp == 1:
        return plan
    pins = [parse_pin(f"stages.{at}.1.weight: S(0)@tp") for at in (0, 1)]
    layouts = propagate_graph(graph, microbatch_size=2, axis_size=plan.tp, pins=pins)
    return plan.model_copy(update={"layouts": layouts})


def gaps_on_ranks(graph: ModelGraph, layouts: dict[str, dict]) -> dict[str, dict[str, float]]:
    """By layout and buffer: how far deferred statistics are from those of the definition."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for label, layout in layouts.items():
        plan = plan_of(graph, layout)
        torch.manual_seed(0)
        module = ConvNet()
        alone = copy.deepcopy(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        mesh = build_mesh(plan, torch.device("cpu"))
        engine = Engine(plan, graph, module, mesh, optimizer=optimizer, deferred_batch_norm=True)
        for step in range(STEPS):
            engine.step(batch(plan.global_batch, step))
            engine.evaluate(batch(plan.global_batch, step + 7))
        state = engine.full_state_dict()
        if state:
            expected = expected_statistics(alone, plan) | one_device_statistics(plan)
            found[label] = {n: (state[n] - t).abs().max().item() for n, t in expected.items()}
    return found


LAYOUTS = {
    "two replicas": {"dp": 2, "microbatch_size": 2, "num_microbatches": 3},
    "two stages": {"pp": 2, "microbatch_size": 3, "num_microbatches": 4},
    "recomputed": {"dp": 2, "microbatch_size": 2, "num_microbatches": 2, "recompute": "full"},
    "zero 3": {"dp": 2, "microbatch_size": 2, "num_microbatches": 2, "zero_stage": 3},
    "channels divided": {"tp": 2, "microbatch_size": 2, "num_microbatches": 2},
    "one sample each": {"dp": 2, "microbatch_size": 1, "num_microbatches": 2},
}


def test_deferred_statistics_are_those_of_the_whole_batch():
    """G7, P33: to rounding in fp64 over microbatches and dp; evaluation moves nothing.

    The first layer's equal those of one device on the whole batch. A later layer's input was
    normalised by microbatch: there they are those of all values that it was given.
    """
    gaps = run_ranks(gaps_on_ranks, 2, captured(torch.float64), LAYOUTS)[0]
    assert gaps.keys() == LAYOUTS.keys()
    for label, by_buffer in gaps.items():
        assert len(by_buffer) == 9, by_buffer
        for name, gap in by_buffer.items():
            assert gap < 1e-12, f"{label}: {name} is {gap} apart"


def test_uneven_microbatches_weigh_by_their_samples():
    """G7: three samples in two microbatches are the statistics of three."""
    model = ConvNet()
    plan = default_plan(captured(), microbatch_size=2, num_microbatches=2)
    engine = planner.apply(plan, model, deferred_batch_norm=True)
    engine.step(batch(3))
    norm = ConvNet().norm
    norm(batch(3)["image"])
    state = engine.full_state_dict()
    assert state["forwards"] == 1  # a count of the model's own is one of batches
    for name, expected in norm.named_buffers(prefix="norm"):
        torch.testing.assert_close(state[name], expected)


class NormedTwice(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.norm.num_batches_tracked = None

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(image), label)


def apply_alone(model: nn.Module, **settings) -> None:
    graph = capture_module(model, batch(2), batch(3), name="convnet")
    plan = default_plan(graph, microbatch_size=2, num_microbatches=settings.pop("m"))
    planner.apply(plan, model, **settings)


def test_channels_are_divided():
    """P33: so the layout above does test a BatchNorm whose channels are on two ranks."""
    plan = plan_of(captured(), LAYOUTS["channels divided"])
    norms = [text for layout in plan.layouts for op, text in layout.ops if "batch_norm" in op]
    assert "S(1),S(0),S(0),R,R->S(1)" in norms


def test_a_cut_batch_is_warned_of_once_and_by_name():
    """P33: at apply; not when the batch stays whole, nor when statistics are deferred."""
    with pytest.warns(BatchStatisticsWarning) as caught:
        apply_alone(ConvNet(), m=3)
    (warning,) = caught
    text = str(warning.message)
    assert text.startswith("BatchNorm norm, stages.0.1, stages.1.1: the plan cuts a batch of 6 ")
    assert "3 parts (dp=1, num_microbatches=3)" in text
    assert "deferred_batch_norm=True" in text
    assert warning.filename == __file__
    dist.destroy_process_group()
    apply_alone(ConvNet(), m=1)
    dist.destroy_process_group()
    apply_alone(ConvNet(), m=3, deferred_batch_norm=True)


def test_a_mean_over_all_steps_moves_by_microbatches_without_deferral():
    """As one process goes by microbatches: each counts as a step."""
    torch.set_default_dtype(torch.float64)
    model = ConvNet()
    alone = OneProcess(model, sgd)
    plan = default_plan(
        captured(torch.float64), microbatch_size=2, num_microbatches=2, recompute="full"
    )
    with pytest.warns(BatchStatisticsWarning):
        engine = planner.apply(plan, model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(STEPS):
        whole = batch(4, step)
        engine.step(whole)
        alone.update([{k: v[start : start + 2] for k, v in whole.items()} for start in (0, 2)])
    state = engine.full_state_dict()
    assert state.pop("forwards") == STEPS  # (of batches; the one process went by halves)
    for name, expected in alone.module.state_dict().items():
        if name in state:
            torch.testing.assert_close(state[name], expected, rtol=1e-12, atol=1e-12)
    whole = batch(4, 7)
    expected = alone.module.eval()(**whole)
    torch.testing.assert_close(engine.evaluate(whole), expected, rtol=1e-12, atol=0)


class Synced(ConvNet):
    """A model that was made for DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(2)


def test_a_synced_norm_is_a_plain_one_beside_other_ranks_and_alone():
    """It looked for ranks: the plan of a search was of another model than that of a rank."""
    examples = batch(2), batch(3)
    before = capture_module(Synced(), *examples, name="synced")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert capture_module(Synced(), *examples, name="synced") == before
    (message,) = batch_norm_messages(before, default_plan(before, num_microbatches=4))
    assert message.startswith("BatchNorm norm, stages.0.1, stages.1.1: the plan cuts a batch")


def test_statistics_that_move_twice_are_not_deferred():
    """G7: a layer that runs twice in a step would have to move in one device's order."""
    with pytest.raises(PlanError, match="norm runs more than once in a step"):
        apply_alone(NormedTwice(), m=2, deferred_batch_norm=True)


def test_layers_in_evaluation_mode_are_no_matter():
    """P33: frozen statistics do not depend on the batch."""
    model = ConvNet()
    model.norm.eval()
    graph = capture_module(model, batch(2), batch(3), name="convnet")
    assert [norm.module for norm in batch_norms(graph)] == ["stages.0.1", "stages.1.1"]
    model.stages.eval()
    graph = capture_module(model, batch(2), batch(3), name="convnet")
    assert batch_norm_messages(graph, default_plan(graph, num_microbatches=4)) == ()


class Contrast(nn.Module):
    """Two views of each sample, which shall be nearer to each other than to all others."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        similar = self.left(x) @ self.right(x).T
        return F.cross_entropy(similar, torch.arange(len(x), device=x.device))


def test_samples_compared_with_each_other_are_refused():
    """P33: a contrastive loss changes with the microbatch, too; attention does not."""
    graph = capture_module(
        Contrast(), {"x": torch.randn(2, 8)}, {"x": torch.randn(3, 8)}, name="contrast"
    )
    plan = default_plan(graph, microbatch_size=2, num_microbatches=3)
    with pytest.raises(PlanError, match="each meets only the 2 of its own") as caught:
        refuse_cut(graph, plan)
    message = str(caught.value)
    assert "samples are compared with each other (matmul in block " in message
    assert "test_batch_norm.py:" in message
    assert "`similar = self.left(x) @ self.right(x).T`" in message
    assert batch_norm_messages(graph, plan) == ()
    refuse_cut(graph, default_plan(graph, microbatch_size=6, num_microbatches=1))
    assert verify._replicas(graph, plan) == 1
    model = tiny_models()["gpt"]
    attends = capture_module(model.build(), model.batch(2), model.batch(3), name="gpt")
    refuse_cut(attends, default_plan(attends, num_microbatches=4))
