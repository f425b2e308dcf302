"""Nothing depends on when things happen: random delays, late messages, two engines.

P16 (every schedule, losses and gradients bitwise equal under random delays, and those of one
process), G12 (what is sent lives until it has left), G13, V9 (two engines in one process).
"""

from __future__ import annotations

import hashlib
import random
import time
import weakref
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
import torch

import planner
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan
from planner.language.schedule.registry import SCHEDULES
from planner.runtime.step.engine import Engine
from tests.runtime.beside import OneProcess, gap_by_tensor
from tests.runtime.scenarios import build, capture
from tests.runtime.slow_links import Sent, SlowLink
from tests.spawn import run_ranks

LONGEST_DELAY_S = 1e-3


def _plans(pp: int, names: list[str]) -> list[Plan]:
    """One fp64 plan for each schedule, with two stages on a rank where it takes them."""
    graph = capture(_model(pp), torch.float64)
    return [
        default_plan(
            graph,
            pp=pp,
            vpp=1 if SCHEDULES[name].max_vpp == 1 else 2,
            num_microbatches=2 * pp,
            schedule=name,
        )
        for name in names
    ]


def _model(pp: int) -> str:
    """The smallest model with enough layers for two stages on each of `pp` ranks."""
    return "gpt" if pp == 2 else "deep-gpt"


def _engine(plan: Plan) -> tuple[Engine, Any]:
    """An engine in fp64 whose weights no step changes, and its batch."""
    torch.set_default_dtype(torch.float64)
    tiny, module = build(_model(plan.pp))
    engine = planner.apply(plan, module, optimizer=lambda p: torch.optim.SGD(p, lr=0.0))
    return engine, tiny.batch(plan.global_batch)


def _delay(engine: Engine, seed: int) -> None:
    """Sleep at random before each job, and before each message is handed on."""
    draw, executor = random.Random(seed), engine._executor
    for owner, name in ((executor, "_do"), (executor._post, "put")):
        inner = getattr(owner, name)

        def late(*args: Any, inner: Any = inner) -> None:
            time.sleep(draw.random() * LONGEST_DELAY_S)
            inner(*args)

        setattr(owner, name, late)


def _digest(engine: Engine, loss: torch.Tensor) -> str:
    """All bits of a loss and of this rank's gradients."""
    bits = hashlib.sha256(loss.numpy().tobytes())
    for stage in engine.stages.values():
        for param in stage.parameters():
            assert param.grad is not None
            bits.update(param.grad.numpy().tobytes())
    return bits.hexdigest()


def run_delayed(plans: list[Plan], repeats: int) -> list[tuple[int, float, float]]:
    """For each plan: how many results its runs had, and the gaps of loss and gradients to one
    process (relative; on rank 0, which alone has the gradients).
    """
    torch.set_default_dtype(torch.float64)
    tiny, module = build(_model(plans[0].pp))
    alone = OneProcess(module)
    expected = alone.step(tiny.batch(plans[0].global_batch))
    found = []
    for plan in plans:
        engine, batch = _engine(plan)
        _delay(engine, seed=engine.mesh.rank("pp"))
        digests = set()
        for _ in range(repeats):
            loss = engine.step(batch)
            digests.add(_digest(engine, loss))
        gap = gap_by_tensor(engine.full_gradients(), alone.gradients())
        found.append((len(digests), abs(loss.item() / expected - 1), gap))
    return found


def _check(pp: int, names: list[str], repeats: int) -> None:
    for outcomes in run_ranks(run_delayed, pp, _plans(pp, names), repeats):
        for name, (num_results, loss_gap, gradient_gap) in zip(names, outcomes, strict=True):
            assert num_results == 1, name
            assert loss_gap < 1e-12, name
            assert gradient_gap < 1e-10, name


@pytest.mark.slow
def test_delays_change_nothing_on_two_ranks():
    """P16, every schedule, two stages on a rank where it takes them."""
    _check(2, sorted(SCHEDULES), repeats=2)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(SCHEDULES), 2))
@pytest.mark.parametrize("pp", [2, 4])
def test_delayed_runs_are_equal(pp, first):
    """P16, every schedule (two at a time): 100 runs each on 2 ranks and on 4, 200 in all."""
    _check(pp, sorted(SCHEDULES)[first : first + 2], repeats=100)


class LateGroup:
    """Sends much later, and until then knows the tensor by a weak reference only."""

    def __init__(self, group: Any, link: SlowLink, lost: list[int]) -> None:
        self._group, self._link, self._lost = group, link, lost
        self.recv = group.recv

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Sent:
        (tensor,) = tensors
        seen, like = weakref.ref(tensor), (tensor.shape, tensor.dtype)

        def send_now() -> Any:
            alive = seen()
            if alive is None:
                self._lost.append(tag)
                alive = torch.zeros(like[0], dtype=like[1])
            return self._group.send([alive], peer, tag)

        return self._link.send(send_now)


class Careless(deque[Any]):
    """What a sender keeps of what is under way, were it to keep nothing."""

    def append(self, item: Any) -> None:
        pass


def count_lost(plan: Plan, careless: bool) -> tuple[int, float]:
    """Messages whose tensor was gone when it left, and the loss."""
    engine, batch = _engine(plan)
    post, lost = engine._executor._post, []
    link, find = SlowLink(3e-3), post._find_crossing

    def find_late(*key: Any) -> Any:
        crossing = find(*key)
        legs = (replace(leg, group=LateGroup(leg.group, link, lost)) for leg in crossing.legs)
        return replace(crossing, legs=tuple(legs))

    post._find_crossing = find_late
    if careless:
        post._sending = Careless()
    loss = engine.step(batch).item()
    return len(lost), loss


def what_is_lost(plan: Plan) -> list[tuple[int, float]]:
    return [count_lost(plan, careless) for careless in (False, True)]


def train_in_turns(plans: list[Plan]) -> tuple[list[float], list[float]]:
    """Losses of two engines that train in turns in this process, and of each by itself."""
    together, alone = [], []
    pair = [_trained(plan) for plan in plans]
    for _ in range(3):
        together += [step() for step in pair]
    for plan in plans:
        step = _trained(plan)
        alone.append([step() for _ in range(3)])
    return together, [loss for losses in zip(*alone, strict=True) for loss in losses]


def _trained(plan: Plan) -> Any:
    torch.set_default_dtype(torch.float64)
    tiny, module = build(_model(plan.pp))
    engine = planner.apply(plan, module, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    batch = tiny.batch(plan.global_batch)
    return lambda: engine.step(batch).item()


def run_others(late: Plan, pair: list[Plan]) -> Any:
    """Both of the following tests' runs, in one group of ranks."""
    return what_is_lost(late), train_in_turns(pair)


@pytest.fixture(scope="module")
def others() -> list[Any]:
    (late,) = _plans(2, ["1f1b"])
    return run_ranks(run_others, 2, late, _plans(2, ["interleaved_1f1b", "zb_h1"]))


@pytest.mark.slow
def test_what_is_sent_lives_until_it_has_left(others):
    """G12: with links that send late, nothing is let go too early. A sender that keeps nothing,
    for comparison, loses messages and finds another loss."""
    for (kept, right), (lost, wrong) in (rank[0] for rank in others):
        assert kept == 0
        assert lost > 0
        assert wrong != right


def test_two_engines_in_one_process_do_not_interfere(others):
    """V9: stages and microbatches are the jobs' own data; nothing is global."""
    for _, (together, alone) in others:
        assert together == alone
        assert len(set(together)) == 3  # as many as steps: both train alike
