"""`Engine.loader` on ranks: equal to one process, peers alike, stages read what they need (M4, D13,
N19)."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import planner
from planner.errors import ModelError, PlanError, PlannerError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.batches.sampler import OwnPart
from tests.builders import PlainGPT, gpt_batch
from tests.runtime.scenarios import capture
from tests.spawn import run_ranks

SAMPLES = 14


class Texts(Dataset[Any]):
    """Samples whose ids are partly drawn, as augmentations are; one of them can't be read."""

    def __init__(self, broken: int | None = None) -> None:
        self.data, self.broken = gpt_batch(SAMPLES), broken

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        if number == self.broken:
            raise FileNotFoundError(f"no file for sample {number}")
        sample = {k: v[number].clone() for k, v in self.data.items()}
        sample["ids"][:2] = torch.randint(0, 64, (2,))
        return sample


class Stream(IterableDataset[Any]):
    """The same samples, read from front to back."""

    def __iter__(self) -> Any:
        texts = Texts()
        return (texts[number] for number in range(SAMPLES))


def with_worker(data: Any, **options: Any) -> DataLoader[Any]:
    # Ranks of tests are made by a fork server, and would make workers by another.
    return DataLoader(data, num_workers=1, multiprocessing_context="fork", **options)


def _plan(**choices: Any) -> Plan:
    return default_plan(capture("gpt", torch.float64), **choices)


def train(cases: list[tuple[Plan, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each plan, kind of data and options: losses, what this rank was given, its weights."""
    torch.set_default_dtype(torch.float64)
    found = []
    for plan, kind, options in cases:
        torch.manual_seed(0)
        module = PlainGPT()
        engine = planner.apply(
            plan,
            module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            loss_weight=planner.count_tokens("labels"),
        )
        torch.manual_seed(torch.distributed.get_rank())  # as scripts that seed their ranks apart
        data: Any = Texts() if kind == "map" else Stream()
        if kind == "loader":
            data = with_worker(Texts(), batch_size=plan.global_batch, shuffle=True)
        drawn = torch.get_rng_state()
        losses, given = [], []
        for part in engine.loader(data, **options):
            losses.append(engine.step(part).item())
            given.append(part.batch)
        assert torch.equal(drawn, torch.get_rng_state())
        found.append({"losses": losses, "given": given, "state": engine.full_state_dict()})
    return found


def test_loaders_of_ranks_equal_one_process():
    """N19: the same samples, drawn numbers included, whatever reads them under whichever plan."""
    two = {"num_microbatches": 2, "microbatch_size": 4}
    plans = {
        "dp": _plan(dp=2, num_microbatches=2, microbatch_size=2),
        "tp": _plan(tp=2, num_microbatches=2, microbatch_size=4),
        "pp": _plan(pp=2, num_microbatches=2, microbatch_size=4),
    }
    short = {"at_end": "short", "shuffle": True, "seed": 3}
    cases = [
        (plans["dp"], "map", short),
        (plans["pp"], "map", short),
        (plans["tp"], "loader", {"at_end": "drop", "seed": 3}),
        (plans["dp"], "stream", {"at_end": "short"}),
    ]
    first, second = run_ranks(train, 2, cases)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        alone = run_ranks(train, 1, [(_plan(**two), kind, options) for _, kind, options in cases])
    finally:
        torch.set_default_dtype(before)
    for own, peer, expected in zip(first, second, alone[0], strict=True):
        assert own["losses"] == peer["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        for name, value in expected["state"].items():
            assert torch.allclose(own["state"][name], value, rtol=1e-9, atol=1e-12), name
    assert [len(each["losses"]) for each in alone[0]] == [2, 2, 1, 2]
    on_pp = first[1]["given"], second[1]["given"]
    # D13: ids for the first stage; the last counts tokens, so it reads all of its batch.
    assert all(part["labels"] is None and part["ids"] is not None for part in on_pp[0])
    assert all(part["labels"] is not None for part in on_pp[1])
    on_tp = first[2]["given"], second[2]["given"]
    assert all(torch.equal(a["ids"], b["ids"]) for a, b in zip(*on_tp, strict=True))


def read_by(plan: Plan) -> list[Any]:
    engine = planner.apply(plan, PlainGPT())
    (part,) = engine.loader(Texts(), at_end="drop", collate_fn=None)
    engine.step(part)
    return [sorted(engine.reads), part.batch and {k: v is not None for k, v in part.batch.items()}]


def test_a_stage_between_reads_nothing():
    """D13: nor is anything loaded for it."""
    plan = default_plan(capture("gpt"), pp=3, num_microbatches=3, microbatch_size=4)
    assert run_ranks(read_by, 3, plan) == [
        [["ids"], {"ids": True, "labels": False}],
        [[], None],
        [["labels"], {"ids": False, "labels": True}],
    ]


def fail_on_one(plan: Plan) -> list[str]:
    engine = planner.apply(plan, PlainGPT())
    rank = torch.distributed.get_rank()
    said = []
    data = Texts(broken=6 if rank else None)
    for each in (data, with_worker(data, batch_size=plan.global_batch)):
        try:
            for part in engine.loader(each):
                engine.step(part)
        except PlannerError as error:
            said.append(str(error))
    return said


def test_data_that_fail_on_one_rank_end_all():
    """No rank waits for one whose data have failed."""
    plan = default_plan(capture("gpt"), dp=2, num_microbatches=2, microbatch_size=2)
    first, second = run_ranks(fail_on_one, 2, plan)
    assert first == second
    assert len(first) == 2
    for said in first:
        assert said.startswith("rank 1: its data failed: FileNotFoundError")
        assert "no file for sample 6" in said


def train_and_save(plan: Plan, folder: Path, steps: int) -> list[float]:
    torch.manual_seed(0)
    engine = planner.apply(plan, PlainGPT())
    loader = engine.loader(Texts(), shuffle=True)
    losses = []
    for part in loader:
        losses.append(engine.step(part).item())
        if len(losses) == steps:
            break
    engine.save(folder, extra={"loader": loader})
    engine.close()
    return losses


def test_a_run_goes_on_under_another_dp(tmp_path):
    """M4: the position is in the checkpoint, with what the samples' numbers are drawn from."""
    two = default_plan(capture("gpt"), dp=2, num_microbatches=1, microbatch_size=2)
    alone = default_plan(capture("gpt"), num_microbatches=2, microbatch_size=2)
    (losses, _) = run_ranks(train_and_save, 2, two, tmp_path / "run", 2)
    torch.manual_seed(0)
    expected_engine = planner.apply(alone, PlainGPT())
    expected = [
        expected_engine.step(part).item() for part in expected_engine.loader(Texts(), shuffle=True)
    ]
    engine = planner.apply(alone, PlainGPT())
    loader = engine.loader(Texts(), shuffle=True)
    engine.load(tmp_path / "run", extra={"loader": loader})
    assert (loader.epoch, loader.samples, len(loader)) == (0, 8, 4)
    losses += [engine.step(part).item() for part in loader]
    assert losses == pytest.approx(expected, rel=1e-5)
    assert engine.samples == 16
    assert loader.epoch == 1


def test_what_a_collate_fn_may_not_do():
    engine = planner.apply(
        default_plan(capture("gpt"), num_microbatches=2, microbatch_size=2), PlainGPT()
    )

    def without_last(samples: list[Any]) -> Any:
        return torch.utils.data.default_collate(samples[:-1])

    with pytest.raises(PlanError, match="its loader made 3 samples of 4; a collate_fn keeps"):
        next(iter(engine.loader(Texts(), collate_fn=without_last)))
    other = DataLoader(Texts(), batch_size=3)
    with pytest.raises(ModelError, match=r"batch_size=3 and the plan's global batch is 4; give"):
        engine.loader(other)
    part = next(iter(engine.loader(Texts())))
    assert isinstance(part, OwnPart)
    same = copy.copy(part)
    assert engine.evaluate(part).item() == engine.evaluate(same).item()
