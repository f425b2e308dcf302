"""B7: several engines in one script, each by its own plan, trained in turns beside one process."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import planner
from planner.errors import PlanError
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.runtime.process import environment
from planner.runtime.stage.randomness import unused_seed
from planner.runtime.state import out_of_memory
from planner.runtime.step.engine import Engine
from planner.timeline import load_timeline
from tests.runtime.beside import OneProcess, Optimizers, adamw, gap_to_largest
from tests.runtime.scenarios import capture, models
from tests.spawn import run_ranks

ACTOR, CRITIC = "small-gpt", "mlp"


class Side:
    """One of the two: an engine, and the same model beside it in one process."""

    def __init__(self, name: str, plan: Plan, make: Optimizers) -> None:
        self.tiny, self.size = models()[name], plan.global_batch
        torch.manual_seed(0)
        module = self.tiny.build()
        self.alone = OneProcess(module, make, loss=self.tiny.loss)
        self.engine: Engine = planner.apply(
            plan, module, optimizer=make(module), loss=self.tiny.loss
        )

    def step(self, number: int) -> float:
        """Train both on a batch; return how far the losses are apart."""
        batch: Any = self.tiny.batch(self.size * (number + 1))
        batch = tree_map(lambda t: t[-self.size :], batch)
        return abs(self.engine.step(batch).item() - self.alone.step(batch))

    def gap(self) -> float:
        """How far the parameters are apart; 0 but on rank 0."""
        return gap_to_largest(self.engine.full_state_dict(), self.alone.parameters())


def with_momentum(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)


def sides(plans: tuple[Plan, Plan]) -> tuple[Side, Side]:
    torch.set_default_dtype(torch.float64)
    return (
        Side(ACTOR, plans[0], adamw),
        Side(CRITIC, plans[1], with_momentum),
    )


def train_in_turns(plans: tuple[Plan, Plan], folder: str) -> list[float]:
    """Two engines in turns, the second twice as often, saved as one, and gone on from there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANNER_TIMELINE", f"{folder}/timeline")
        actor, critic = sides(plans)
    gaps = []

    def train(numbers: range) -> None:
        for number in numbers:
            gaps.append(critic.step(2 * number))
            gaps.append(actor.step(number))
            gaps.append(critic.step(2 * number + 1))

    train(range(2))
    actor.engine.save(f"{folder}/run", extra={"critic": critic.engine})
    before = [copy.deepcopy(each.alone) for each in (actor, critic)]
    train(range(2, 3))
    with pytest.raises(PlanError, match="another engine of this script saves there"):
        critic.engine.save(f"{folder}/run")
    # Both go on from the moment of the save.
    actor.engine.load(f"{folder}/run", extra={"critic": critic.engine})
    actor.alone, critic.alone = before
    assert (actor.engine.steps, critic.engine.steps) == (2, 4)
    train(range(2, 3))
    told, _ = out_of_memory.describe(torch.OutOfMemoryError("no"), 0)
    assert "engine 2 of 2, mlp" in told
    gaps += [actor.gap(), critic.gap()]
    critic.engine.close()
    actor.engine.step(actor.tiny.batch(actor.size))  # which goes on without the other
    actor.engine.close()
    return gaps


@pytest.mark.parametrize("swapped", [False, True], ids=["dp2, pp2", "pp2, dp2 zero 2"])
def test_actor_and_critic_train_in_turns_as_in_one_process(tmp_path, swapped):
    """Layouts differ over the same ranks; so do batches, optimizers and numbers of steps.

    Each has its own timeline, checkpoint and table of memory.
    """
    actor, critic = capture(ACTOR, torch.float64), capture(CRITIC, torch.float64)
    zero: Any = 2 if swapped else 0
    degrees: list[dict[str, Any]] = [{"dp": 2, "zero_stage": zero}, {"pp": 2}]
    if swapped:
        degrees.reverse()
    plans = (
        default_plan(actor, microbatch_size=2, num_microbatches=2, **degrees[0]),
        default_plan(critic, microbatch_size=1, num_microbatches=2, **degrees[1]),
    )
    for gaps in run_ranks(train_in_turns, 2, plans, str(tmp_path)):
        assert max(gaps) < 1e-10
    kinds = []
    for folder in ("timeline", "timeline/engine-2"):
        lines = load_timeline(tmp_path / folder)
        kinds.append([max(span.stage for span in line.spans) for line in lines])
    assert kinds == ([[0, 1], [0, 0]] if swapped else [[0, 0], [0, 1]])
    assert max(span.step for span in load_timeline(tmp_path / "timeline")[0].spans) == 4


def other_plans(plans: tuple[Plan, Plan]) -> str:
    """A second engine whose plan is another one on each rank."""
    torch.set_default_dtype(torch.float64)
    planner.apply(plans[0], models()[CRITIC].build())
    rank = torch.distributed.get_rank()
    with pytest.raises(PlanError) as caught:
        planner.apply(plans[rank], models()[CRITIC].build())
    return str(caught.value)


def test_ranks_that_make_a_later_engine_by_unlike_plans_are_told():
    graph = capture(CRITIC, torch.float64)
    plans = (default_plan(graph, dp=2), default_plan(graph, pp=2))
    for told in run_ranks(other_plans, 2, plans):
        assert "the plan is not the same on all nodes" in told


class Shared(nn.Module):
    """A model of a part that another has, too."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x)).square().mean()


def test_engines_that_share_a_part_are_refused_by_its_name():
    from tests.captures import capture_module

    trunk = nn.Linear(4, 4)
    graph = capture_module(Shared(trunk), (torch.zeros(2, 4),), (torch.zeros(3, 4),), name="m")
    planner.apply(default_plan(graph), Shared(trunk))
    with pytest.raises(PlanError, match=r"^trunk.weight of the model is in an engine already"):
        planner.apply(default_plan(graph), Shared(trunk))


def test_engines_that_draw_at_once_draw_from_other_seeds():
    class Stream:
        seed = 3

    from planner.runtime.stage import randomness

    stream: Any = Stream()
    assert unused_seed(3) == 3
    randomness._streams.add(stream)
    assert unused_seed(3) not in (3, unused_seed(4))
    assert unused_seed(3) == unused_seed(3)
    del stream
    gc.collect()
    assert unused_seed(3) == 3


# ------------------------------------------------------------------------------ the launched plan


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Plans of one rank of two models, of which `actor.json` is launched."""
    from planner.language.plan import save_plan
    from planner.runtime.process import launched

    monkeypatch.setattr(launched, "_stands_for", {})
    for name in ("actor", "fast", "critic"):
        graph = capture(CRITIC if name == "critic" else ACTOR)
        size = 2 if name == "fast" else 1
        save_plan(default_plan(graph, num_microbatches=size), tmp_path / f"{name}.json")
    monkeypatch.setenv(environment.LAUNCHED, str(tmp_path / "actor.json"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def followed(*names: str) -> list[tuple[str, int]]:
    from planner.runtime.process.launched import followed_plan

    plans = [followed_plan(name) for name in names]
    return [(plan.model.name, plan.num_microbatches) for plan in plans]


@pytest.mark.parametrize("names", [("actor.json", "critic.json"), ("critic.json", "./actor.json")])
def test_each_engine_follows_the_plan_of_its_own_file(files, names):
    assert sorted(followed(*names)) == [(CRITIC, 1), (ACTOR, 1)]


def test_the_launched_plan_stands_for_the_file_of_a_script_of_one_engine(files, monkeypatch):
    """P24. With another plan in that file the script is told; a file that is not there is none."""
    assert followed("plan.json", "plan.json", "critic.json", "fast.json") == [
        (ACTOR, 1), (ACTOR, 1), (CRITIC, 1), (ACTOR, 2)
    ]  # fmt: skip
    with pytest.raises(PlanError, match=r"make the engine of actor.json first$"):
        followed("actor.json")


def test_a_second_plan_of_the_launched_model_is_not_mistaken_for_it(files):
    assert followed("actor.json", "fast.json") == [(ACTOR, 1), (ACTOR, 2)]


def test_a_launched_plan_in_the_place_of_another_is_told_and_refused_by_name(files):
    with pytest.warns(UserWarning, match=r"follows .*actor.json, which was launched, and not fast"):
        assert followed("fast.json") == [(ACTOR, 1)]
    with pytest.raises(PlanError, match=r"names actor.json, .* first, or launch .*fast.json$"):
        followed("actor.json")


def test_an_elastic_run_puts_its_plan_in_the_place_of_the_launched_one_alone(files, monkeypatch):
    from planner.language.plan import load_plan
    from planner.runtime.process.launched import followed_plan

    monkeypatch.setenv(environment.PLAN, str(files / "fast.json"))
    assert followed("actor.json", "critic.json") == [(ACTOR, 2), (CRITIC, 1)]
    actor, critic = load_plan("actor.json"), load_plan("critic.json")
    assert followed_plan(actor).num_microbatches == 2
    assert followed_plan(critic) is critic
