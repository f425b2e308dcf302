"""Messages of every schedule go through by NCCL's rules: in one order on both ends, none stuck."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch

from planner.errors import LayoutError, ScheduleError
from planner.language.graph import ModelGraph
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.wiring import build_edges
from planner.language.plan import Plan
from planner.language.schedule.registry import SCHEDULES
from planner.language.templates import Transformer, build_transformer
from tests.runtime.scenarios import capture
from tests.runtime.step.messages.played import (
    Given,
    OutOfOrderError,
    StuckError,
    follow_the_rules,
    messages_of,
    play,
)

AHEAD = range(6)


@pytest.fixture(autouse=True)
def _rules(monkeypatch):
    follow_the_rules(monkeypatch)


@cache
def chain() -> ModelGraph:
    """A model whose stages hand on to the next alone, of blocks enough for 16 stages."""
    return build_transformer(
        Transformer(layers=18, hidden=8, heads=2, kv_heads=2, ffn_hidden=8, vocab=16, seq_len=4)
    )


def shapes(name: str, pps: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    """Numbers of stages and microbatches that a schedule takes."""
    spec = SCHEDULES[name]
    least = max(spec.min_vpp, 1)
    for pp in pps:
        for vpp in {least, 2 * least if spec.max_vpp is None else least}:
            for rounds in (1, 2, 4):
                yield {"pp": pp, "vpp": vpp, "num_microbatches": rounds * pp, "schedule": name}


def plan_of(graph: ModelGraph, **choices: Any) -> Plan | None:
    """A plan, or None where the schedule or the model does not take these numbers."""
    try:
        return default_plan(graph, **choices)
    except (LayoutError, ScheduleError):
        return None


def step_of(graph: ModelGraph, plan: Plan, *, ahead: int = 2, **options: Any) -> list[list[Given]]:
    """What each rank gives in a step."""
    plan = plan.model_copy(update={"receive_ahead": ahead})
    edges = build_edges(graph, plan)
    return [messages_of(plan, edges, rank, **options) for rank in range(plan.world_size)]


def played(graph: ModelGraph, plans: Iterator[Plan | None], ahead: Any) -> int:
    """Play a step of each plan for each number of jobs that receives are posted ahead."""
    count = 0
    for plan in plans:
        for jobs in ahead if plan is not None else ():
            try:
                assert play(step_of(graph, plan, ahead=jobs))
            except AssertionError as error:
                error.add_note(f"{plan.schedule} pp={plan.pp} vpp={plan.vpp} ahead={jobs}")
                raise
            count += 1
    return count


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_messages_of_a_schedule_meet(name):
    ways = [way for way in shapes(name, (2, 3)) if way["num_microbatches"] <= 2 * way["pp"]]
    plans = (plan_of(chain(), **way) for way in ways)
    assert played(chain(), plans, (0, 3)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_messages_of_a_schedule_meet_whatever_its_numbers(name):
    plans = (plan_of(chain(), **way) for way in shapes(name, (2, 3, 4)))
    assert played(chain(), plans, AHEAD) >= 6 * 9


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize("model", ["unet", "encoder-decoder"])
def test_messages_that_skip_stages_meet(name, model):
    graph = capture(model, torch.float64)
    plans = (plan_of(graph, **way) for way in shapes(name, (2, 3)))
    assert played(graph, plans, AHEAD) >= 6


def unlike(schedule: str, **sizes: Any) -> Plan:
    return default_plan(chain(), num_microbatches=4, microbatch_size=4, schedule=schedule, **sizes)


def test_messages_between_unlike_meshes_meet():
    plans = [
        unlike("1f1b", pp=2, tp=2, by_stage={"tp": (2, 1)}),
        unlike("zb_h1", pp=2, tp=2, by_stage={"tp": (1, 2)}),
        unlike("interleaved_1f1b", pp=2, vpp=2, tp=2, by_stage={"tp": (2, 1, 2, 1)}),
    ]
    assert played(chain(), iter(plans), (0, 2, 5)) == 9


def swap(given: list[Given], kind: str) -> None:
    """Swap two neighbours of a kind between the same two ranks."""
    places = [at for at, each in enumerate(given) if each.kind == kind]
    first, second = next(
        (a, b)
        for a, b in pairwise(places)
        if given[a].ends == given[b].ends and given[a].communicator == given[b].communicator
    )
    given[first], given[second] = given[second], given[first]


@pytest.mark.parametrize("kind", ["send", "receive"])
def test_a_swapped_order_is_caught_as_such(kind):
    plan = default_plan(chain(), pp=2, num_microbatches=4)
    ranks = step_of(chain(), plan)
    swap(ranks[0], kind)
    with pytest.raises(OutOfOrderError, match=r"send .* microbatch \d meets receive"):
        play(ranks)


def test_directions_that_share_a_communicator_are_stuck():
    """What groups for each direction are for: sends stand behind receives that wait for them."""
    plan = default_plan(chain(), pp=2, num_microbatches=4)
    with pytest.raises(StuckError, match=r"rank 0 is at wait 1>0") as stuck:
        play(step_of(chain(), plan, one_a_pair=True))
    assert "communicator 0 of (0, 1), rank 1: receive 0>1" in str(stuck.value)
