"""What test ranks run: save an engine under one plan, load it under another, and go on."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import planner
from planner.errors import PlannerError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.state.gather import gather
from planner.runtime.step.engine import Engine
from tests.runtime.scenarios import capture, models

STEPS = 2

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "plain-sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, eps=1e-3),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2, eps=1e-3),
}


@dataclass(frozen=True)
class Case:
    """A model, the plan it is saved under, the one it is loaded under, and the folder between."""

    model: str
    saved: Plan
    loaded: Plan
    folder: str
    optimizer: str = "adamw"


@dataclass(frozen=True)
class Moment:
    """All of a training, whole: on rank 0; elsewhere empty."""

    state: dict[str, Tensor]
    optimizer: dict[str, dict[str, Tensor]]
    loss: float


def make_engine(name: str, plan: Plan, optimizer: str, *, seed: int = 0) -> Engine:
    """An engine in fp64 (fp32 for precision bf16, which has another graph)."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    module = models()[name].build()
    return planner.apply(plan, module, optimizer=OPTIMIZERS[optimizer](module.parameters()))


def batch_of(name: str, plan: Plan, step: int) -> Any:
    """Batches of one size for all plans of a case, which differ by step."""
    batch = models()[name].batch(plan.global_batch * (step + 1))
    take = slice(plan.global_batch * step, None)
    if isinstance(batch, dict):
        return {key: _cast(value[take]) for key, value in batch.items()}
    return tuple(_cast(value[take]) for value in batch)


def _cast(tensor: Tensor) -> Tensor:
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def moment(engine: Engine, loss: float) -> Moment:
    """Bring all of it to rank 0, by another way than checkpoints go."""
    params = engine.state.trained.stepped_by_name()
    names = {
        name
        for copies in params.values()
        for param in copies
        for name in (engine.optimizer.state.get(param, {}) if engine.optimizer else ())
    }
    optimizer = {}
    for name in sorted(_of_all_ranks(names)):
        wanted = [meta for meta in engine.graph.params if meta.requires_grad]
        optimizer[name] = gather(
            engine.graph, engine.plan, engine.mesh, wanted, lambda m, n=name: _state(engine, m, n)
        )
    return Moment(engine.full_state_dict(), optimizer, loss)


def _of_all_ranks(names: set[str]) -> set[str]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, names)
    return set().union(*found)


def _state(engine: Engine, meta: Any, name: str) -> tuple[Tensor, Any]:
    param = engine.state.trained.stepped_by_name()[meta.fqn][0]
    placements = engine.state.placements[meta.name]
    value = engine.optimizer.state[param][name]
    if not isinstance(value, Tensor) or value.dim() == 0:
        # A number: the same for every element.
        value = torch.zeros_like(param) + torch.as_tensor(value, dtype=param.dtype)
    return value, placements


def train_and_save(cases: list[Case]) -> list[tuple[Moment, Moment]]:
    """The moment of saving, and that after one more step, undisturbed."""
    found = []
    for case in cases:
        engine = make_engine(case.model, case.saved, case.optimizer)
        loss = 0.0
        for step in range(STEPS):
            loss = engine.step(batch_of(case.model, case.saved, step)).item()
        now = moment(engine, loss)
        engine.evaluate(batch_of(case.model, case.saved, 0))  # leaves ZeRO's weights gathered
        for name, tensor in engine.full_state_dict().items():
            assert torch.equal(tensor, now.state[name]), name
        engine.evaluate(batch_of(case.model, case.saved, 0))
        engine.save(case.folder)
        after = engine.step(batch_of(case.model, case.saved, STEPS)).item()
        found.append((now, moment(engine, after)))
        engine.close()
    return found


def load_and_train(cases: list[Case]) -> list[tuple[Moment, Moment]]:
    """The moment of loading, into an engine with other values, and that after one more step."""
    found = []
    for case in cases:
        engine = make_engine(case.model, case.loaded, case.optimizer, seed=1)
        loaded = engine.load(case.folder)
        assert (loaded.step, loaded.samples) == (STEPS, STEPS * case.saved.global_batch)
        assert (engine.steps, engine.samples) == (loaded.step, loaded.samples)
        now = moment(engine, 0.0)
        after = engine.step(batch_of(case.model, case.loaded, STEPS)).item()
        found.append((now, moment(engine, after)))
        engine.close()
    return found


def random_plan(choose: random.Random, name: str, world: int, batch: int) -> Plan:
    """A plan of all ranks for a model, of a global batch; every field drawn."""
    graph = capture(name, torch.float64)
    while True:
        sizes = _random_sizes(choose, world)
        choices: dict[str, Any] = dict(sizes)
        choices["zero_stage"] = choose.choice([0, 0, 1, 2, 3])
        on_host = choose.random() < 0.25
        if sizes["pp"] > 1 and choose.random() < 0.3:
            choices |= {"vpp": 2, "schedule": "interleaved_1f1b"}
        if sizes["pp"] == 2 and world == 4 and choose.random() < 0.5:
            tps = choose.choice([(1, 2), (2, 1)])
            stages = choices.get("vpp", 1)
            choices["by_stage"] = {"tp": tps * stages}
        dp = max(sizes["dp"], world // sizes["pp"] if "by_stage" in choices else 1) * sizes["rp"]
        count = choices["pp"] if choices["pp"] > 1 else choose.choice([1, 2])
        if batch % (count * dp):
            continue
        choices |= {
            "num_microbatches": count,
            "microbatch_size": batch // (count * sizes["dp"] * sizes["rp"]),
        }
        try:
            plan = default_plan(graph, **choices)
            return plan.model_copy(update={"optimizer_on_host": on_host})
        except (PlannerError, ValueError):
            continue


def _random_sizes(choose: random.Random, world: int) -> dict[str, int]:
    sizes = dict.fromkeys(("rp", "dp", "tp", "pp", "cp"), 1)
    while world > 1:
        sizes[choose.choice(list(sizes))] *= 2
        world //= 2
    return sizes


def with_folder(case: Case, folder: Any) -> Case:
    """The same case saved in a folder."""
    return replace(case, folder=str(folder))
