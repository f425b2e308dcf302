"""X12: A training saved under one plan and loaded under another is the same, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from tests.runtime.checkpoint.scenarios import (
    Case,
    Moment,
    load_and_train,
    random_plan,
    train_and_save,
)
from tests.runtime.scenarios import capture
from tests.spawn import run_ranks

RTOL = 1e-10


def plan_for(name: str, *, on_host: bool = False, **choices: Any) -> Plan:
    plan = default_plan(capture(name, torch.float64), **choices)
    return plan.model_copy(update={"optimizer_on_host": on_host})


def check(cases: list[Case]) -> None:
    """Save all and load all, on as many ranks as the plans have."""
    saved = run_by_world(train_and_save, cases, [case.saved for case in cases])
    loaded = run_by_world(load_and_train, cases, [case.loaded for case in cases])
    for case, (then, after), (now, later) in zip(cases, saved, loaded, strict=True):
        told = f"{case.model} {case.optimizer}: {describe(case.saved)} -> {describe(case.loaded)}"
        assert then.state, told
        assert_same(now.state, then.state, told)
        assert set(now.optimizer) == set(then.optimizer), told
        for name in then.optimizer:
            assert_same(now.optimizer[name], then.optimizer[name], f"{name}, {told}")
        rtol = 0.0 if case.saved == case.loaded else RTOL
        assert_close(later, after, rtol, told)


def describe(plan: Plan) -> str:
    return str(plan.model_dump(include={"pp", "vpp", "degrees", "zero_stage", "optimizer_on_host"}))


def run_by_world(function: Any, cases: list[Case], plans: list[Plan]) -> list[Any]:
    """What rank 0 returned for each case, each run on the ranks of its plan."""
    found: dict[int, Any] = {}
    for world in {plan.world_size for plan in plans}:
        numbers = [at for at, plan in enumerate(plans) if plan.world_size == world]
        by_rank = run_ranks(function, world, [cases[at] for at in numbers])
        found |= dict(zip(numbers, by_rank[0], strict=True))
    return [found[at] for at in range(len(cases))]


def assert_same(found: dict[str, Any], expected: dict[str, Any], told: str) -> None:
    assert set(found) == set(expected), told
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}, {told}"
        assert found[name].dtype == tensor.dtype, f"{name}, {told}"


def assert_close(found: Moment, expected: Moment, rtol: float, told: str) -> None:
    assert found.loss == pytest.approx(expected.loss, rel=rtol, abs=0), told
    for name, tensor in expected.state.items():
        scale = tensor.abs().max().item() if tensor.numel() else 0.0
        gap = (found.state[name] - tensor).abs().max().item() if tensor.numel() else 0.0
        assert gap <= rtol * max(scale, 1e-3), f"{name} {gap}, {told}"


@pytest.mark.parametrize("is_whole", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_between_plans(tmp_path, is_whole):
    """dp, tp, pp, cp, meshes by stage, ZeRO 1 and 3 and the host, on one, two and four ranks."""
    batch: dict[str, Any] = {"num_microbatches": 2}
    single = plan_for("small-tied-gpt", **batch, microbatch_size=4)
    zero3 = plan_for("small-tied-gpt", **batch, dp=2, tp=2, zero_stage=3, microbatch_size=2)
    own = plan_for(
        "small-tied-gpt", **batch, pp=2, tp=2, by_stage={"tp": (2, 1)}, microbatch_size=4
    )
    host = plan_for("small-tied-gpt", **batch, cp=2, zero_stage=1, microbatch_size=4, on_host=True)
    pair = (zero3, own) if is_whole else (host, single)
    check([Case("small-tied-gpt", *pair, str(tmp_path))])


def test_copies_of_shards_are_written_once(tmp_path):
    """HSDP: of the ranks with the same shards one writes each; any plan reads them, and back."""
    copied = plan_for("small-gpt", rp=2, dp=2, zero_stage=3, num_microbatches=1, microbatch_size=2)
    other = plan_for("small-gpt", dp=2, pp=2, num_microbatches=2, microbatch_size=2)
    check(
        [
            Case("small-gpt", copied, other, str(tmp_path / "from")),
            Case("small-gpt", other, copied, str(tmp_path / "to")),
        ]
    )


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_shards_of_any_dim_are_read_by_any_plan(tmp_path, there):
    """Three experts on four ranks, in shards of their second dim, on two beside tp, and whole."""
    name, batch = "stacked-gpt", {"num_microbatches": 2}
    four = plan_for(name, **batch, dp=4, zero_stage=3, microbatch_size=2)
    both = plan_for(name, **batch, dp=2, tp=2, zero_stage=1, microbatch_size=4)
    whole = plan_for(name, **batch, dp=2, pp=2, microbatch_size=4)
    pairs = ((four, both), (whole, four)) if there else ((both, four), (four, whole))
    check([Case(name, *pair, str(tmp_path / str(at))) for at, pair in enumerate(pairs)])


def test_the_same_plan_goes_on_to_the_last_bit(tmp_path):
    """Running statistics that each replica moves for itself, momentum, state that is no tensor."""
    bn = plan_for("batchnorm-mlp", dp=2, microbatch_size=2)
    tp = plan_for("small-gpt", tp=2, microbatch_size=2)
    zero = plan_for("small-gpt", dp=2, zero_stage=2)
    cases = [
        Case("batchnorm-mlp", bn, bn, str(tmp_path / "bn"), optimizer="sgd"),
        Case("small-gpt", tp, tp, str(tmp_path / "tp"), optimizer="rmsprop"),
        Case("small-gpt", zero, zero, str(tmp_path / "zero"), optimizer="nadam"),
        Case("small-gpt", tp, zero, str(tmp_path / "plain"), optimizer="plain-sgd"),
    ]
    check(cases)


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_random_pairs_of_plans(tmp_path: Path):
    """Sixty pairs on one, two and four ranks, models and optimizers at random."""
    choose = random.Random(25)
    cases = []
    for number in range(60):
        # (Not those of Hugging Face: their norms compute in fp32, whatever the model's dtype.)
        name = choose.choice(["gpt", "tied-gpt", "deep-gpt", "encoder-decoder", "vit"])
        saved, loaded = (random_plan(choose, name, choose.choice([1, 2, 4]), 8) for _ in range(2))
        optimizer = choose.choice(["adamw", "adamw", "sgd", "rmsprop", "nadam"])
        cases.append(Case(name, saved, loaded, str(tmp_path / str(number)), optimizer))
    for start in range(0, len(cases), 10):
        check(cases[start : start + 10])
