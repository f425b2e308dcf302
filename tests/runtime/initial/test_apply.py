"""`planner.apply` on a function: what ranks hold is what one process would, and no more is made."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import planner
from planner.errors import ModelError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.initial.build import StartWarning
from planner.runtime.proofs.dryrun import dry_run
from tests.builders import MlpWithTarget, PlainGPT, gpt_batch, mlp_batch
from tests.captures import capture_module
from tests.spawn import run_ranks

LAYERS, WIDTH = 8, 256


def gpt_plans() -> list[Plan]:
    graph = capture_module(PlainGPT(), gpt_batch(2), gpt_batch(3))
    short = capture_module(PlainGPT().bfloat16(), gpt_batch(2), gpt_batch(3), precision="bf16")
    plans = [
        default_plan(graph, dp=2, zero_stage=3),
        default_plan(graph, dp=2, zero_stage=1),
        default_plan(graph, tp=2),
        default_plan(graph, pp=2),
    ]
    for sizes in ({"dp": 2, "zero_stage": 3}, {"tp": 2}):
        made = default_plan(short, **sizes)  # type: ignore[arg-type]
        plans.append(made.model_copy(update={"precision": "bf16"}))
    return plans


def values_under(plans: list[Plan]) -> list[list[str]]:
    """The parameters that differ from one process's, and whether draws go on as there."""
    found = []
    for plan in plans:
        build = (lambda: PlainGPT().bfloat16()) if plan.precision == "bf16" else PlainGPT
        # Rank 0's seed counts.
        torch.manual_seed(7 + dist.get_rank())
        engine = planner.apply(plan, build)
        after = torch.rand(3)
        torch.manual_seed(7)
        expected = build().state_dict()
        state = engine.full_state_dict()
        wrong = [n for n, t in state.items() if not torch.equal(t, expected[n].to(t.dtype))]
        if dist.get_rank() == 0 and not torch.equal(after, torch.rand(3)):
            wrong.append("draws")
        assert torch.isfinite(engine.step(gpt_batch(plan.global_batch)))
        found.append(wrong)
        engine.close()
    return found


def test_ranks_hold_what_one_process_would():
    plans = gpt_plans()
    for wrong in run_ranks(values_under, 2, plans):
        assert wrong == [[]] * len(plans)


class Deep(nn.Module):
    """A layer's weights are small beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x, target):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.mse_loss(x, target)


def deep_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, WIDTH), torch.ones(size, WIDTH)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_a_stage_is_never_whole_on_its_device(zero_stage):
    """By a dry run: shards, and what a start needs beside them."""
    graph = capture_module(Deep(), deep_batch(2), deep_batch(3))
    plan = default_plan(graph, dp=8, zero_stage=zero_stage)
    run = dry_run(plan, graph, Deep)
    shard = LAYERS * (WIDTH * WIDTH + WIDTH) * 4 / 8
    assert shard <= run.start_bytes <= 1.2 * shard
    # One layer's weight at a time: it is smaller than a piece.
    assert run.start_host_bytes == WIDTH * WIDTH * 4


def mlp_plan(**sizes: int) -> Plan:
    return default_plan(capture_module(MlpWithTarget(), mlp_batch(2), mlp_batch(3)), **sizes)


def test_a_model_on_the_meta_device_begins_as_its_modules_do():
    with torch.device("meta"):
        model = MlpWithTarget()
    plan = mlp_plan()
    torch.manual_seed(1)
    engine = planner.apply(plan, model)
    torch.manual_seed(1)
    expected = MlpWithTarget().state_dict()
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_what_nothing_gives_values_is_refused_by_name():
    def build() -> nn.Module:
        model = MlpWithTarget()
        name, weight = next(iter(model.named_parameters()))
        model.get_submodule(name.rpartition(".")[0]).weight = nn.Parameter(
            torch.empty(weight.shape)
        )
        return model

    with pytest.raises(ModelError, match=r"nothing gives '.*weight' its first values"):
        planner.apply(mlp_plan(), build)
    with pytest.raises(ModelError, match=r"returned NoneType; return an nn\.Module"):
        planner.apply(mlp_plan(), lambda: None)
    with pytest.raises(ModelError, match=r"was given a str as the model"):
        planner.apply(mlp_plan(), "model")


def test_what_reads_drawn_values_is_built_whole_with_a_warning():
    def build() -> nn.Module:
        model = MlpWithTarget()
        assert all(p.abs().max().item() < 1 for p in model.parameters())
        return model

    plan = mlp_plan()
    torch.manual_seed(1)
    with pytest.warns(StartWarning, match=r"whole model \(.*a number that was drawn is read"):
        engine = planner.apply(plan, build)
    torch.manual_seed(1)
    expected = build().state_dict()
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, expected[name]), name


def built_otherwise_by_rank(plan: Plan) -> str:
    def build() -> nn.Module:
        model = MlpWithTarget()
        nn.init.normal_(next(model.parameters()), std=0.1 * (1 + dist.get_rank()))
        return model

    try:
        planner.apply(plan, build)
    except ModelError as error:
        return str(error)
    return ""


def test_a_function_that_differs_by_rank_is_refused():
    for said in run_ranks(built_otherwise_by_rank, 2, mlp_plan(dp=2)):
        assert "does not do the same on all ranks" in said


class Rotary(nn.Module):
    """A buffer that is not in the state dict, so in no file."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.arange(4) * 0.5, persistent=False)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, target):
        x = torch.tanh(self.first(x)) * self.rate
        return nn.functional.mse_loss(self.second(x), target)


def rotary_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(size, 4), torch.zeros(size, 4)


def test_weights_from_files_leave_buffers_to_the_function(tmp_path: Path):
    kept = Rotary()
    torch.save(kept.state_dict(), tmp_path / "weights.pt")
    plan = default_plan(capture_module(kept, rotary_batch(2), rotary_batch(3)))
    state = torch.get_rng_state()
    engine = planner.apply(plan, Rotary, weights=tmp_path / "weights.pt")
    assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn
    batch = rotary_batch(plan.global_batch)
    torch.testing.assert_close(engine.forward(batch), kept(*batch).detach())


class Tall(nn.Module):
    """40 layers, about 1 GiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2592, 2592) for _ in range(40))

    forward = Deep.forward


def tall_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(size, 2592), torch.ones(size, 2592)


def growth_at_start(warm_up: Plan, plan: Plan) -> float:
    """By how much this process grows in `apply` at its height, as a multiple of its shard."""
    torch.set_num_threads(1)
    planner.apply(warm_up, Deep).close()  # what Python loads is no part of a start
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    engine = planner.apply(plan, Tall)
    grown = _status("VmHWM") - before
    params = (p for stage in engine.stages.values() for p in stage.parameters())
    shard = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in params)
    assert shard >= 0.24 * 2**30
    engine.close()
    return grown / shard


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"dp": 4, "zero_stage": 3}, {"dp": 2, "pp": 2, "zero_stage": 1}, {"tp": 2, "pp": 2}]
)
def test_n13_no_process_ever_holds_a_whole_model(sizes):
    """N13: at most 1.2 times its shard, of host and device memory, which here are the same."""
    warm_up = default_plan(capture_module(Deep(), deep_batch(2), deep_batch(3)), **sizes)
    with torch.device("meta"):
        graph = capture_module(Tall(), tall_batch(2), tall_batch(3))
    for times in run_ranks(growth_at_start, 4, warm_up, default_plan(graph, **sizes)):
        assert times <= 1.2
