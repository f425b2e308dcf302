"""Gathers and scatters of a forward travel in pieces beside products (N11, D18)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from costmodel.time.block.in_pieces import seconds_in_pieces
from costmodel.topology import Axis
from planner.language.graph import Program
from planner.language.layout.placement import Shard
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.lowering import local_program
from planner.language.lowering.propagate import propagate_graph
from planner.language.ops.recompute_choice import ops_made_again
from planner.language.ops.weight_products import in_pieces
from planner.language.plan import Plan
from planner.runtime.process import collectives
from planner.runtime.stage import in_pieces as running
from planner.timeline import BESIDE, COLLECTIVE, load_timeline
from profiles import Group
from tests.runtime.scenarios import capture, check_plans
from tests.runtime.stage.test_beside_collectives import calls_of_a_step
from tests.search.machine import Machine
from tests.spawn import run_ranks


def split_plan(name: str = "small-gpt", dtype=torch.float64, *, pieces=2, **choices: Any) -> Plan:
    """A plan on tp that keeps tensors between products split along the sequence."""
    graph = capture(name, dtype)
    plan = default_plan(graph, tp=2, **choices)
    layouts = propagate_graph(
        graph, microbatch_size=plan.microbatch_size, axis_size=2, boundary=Shard(1)
    )
    return plan.model_copy(update={"layouts": layouts, "gather_pieces": pieces})


def layer(plan: Plan) -> Program:
    """A layer of a plan on one of its ranks."""
    graph = capture("small-gpt", torch.float64)
    index = graph.blocks[1].class_index
    of = {"degrees": plan.degrees, "microbatch_size": plan.microbatch_size}
    return local_program(graph, plan, index, **of)


def test_gathers_and_scatters_of_a_layer_are_found():
    """Of attention and MLP each: a gather ahead of the first products, a scatter at the last."""
    plan = split_plan()
    program = layer(plan)
    found = in_pieces(program, 2)
    assert sorted(map(len, found.gathered.values())) == [1, 3]
    assert len(found.scattered) == 2
    assert len(set(found.products)) == len(found.products)
    assert not in_pieces(program, 1).products
    # Of 16 tokens a rank has 8: in three pieces they do not divide.
    assert not in_pieces(program, 3).products
    # One of a pair alone would run its collective again for the other.
    for name in found.gathered:
        assert name not in in_pieces(program, 2, {name}).gathered
    whole = capture("small-gpt", torch.float64).classes[1].bind(plan.microbatch_size)
    again = ops_made_again(whole, program, None)
    assert in_pieces(program, 2, again).products == found.products


def test_factors_with_one_scale_stay_whole():
    program = layer(split_plan())
    found = in_pieces(program, 2)
    narrow = replace(
        program,
        ops=tuple(
            replace(op, target="planner.linear.tensorwise") if op.name in found.products else op
            for op in program.ops
        ),
    )
    assert not in_pieces(narrow, 2).products


def test_trains_as_one_process_on_two_ranks():
    """Recomputed, beside weight gradients, in stages, and without pieces where none divides."""
    plans = [
        split_plan(num_microbatches=2),
        split_plan(pieces=4, num_microbatches=2),
        split_plan(recompute="full"),
        split_plan(recompute="selective"),
        split_plan(pieces=3),
        split_plan().model_copy(update={"overlap": "input-gradients"}),
    ]
    check_plans(2, [("small-gpt", plan) for plan in plans])


@pytest.mark.slow
def test_trains_as_one_process_on_four_ranks():
    """With replicas, ZeRO, and a schedule with W jobs."""
    cases = [
        {"dp": 2, "num_microbatches": 2},
        {"dp": 2, "zero_stage": 1, "num_microbatches": 2},
        {"dp": 2, "zero_stage": 3, "recompute": "full"},
        {"pp": 2, "schedule": "zb_h1", "num_microbatches": 2},
    ]
    check_plans(4, [("small-gpt", split_plan(**choices)) for choices in cases])


def test_a_piece_is_multiplied_while_the_next_is_under_way(tmp_path):
    plan = split_plan(dtype=torch.float32, num_microbatches=1)
    told, _ = run_ranks(calls_of_a_step, 2, plan, str(tmp_path), running.Multiplied, "times")
    under_way, beside = 0, 0
    for call in told:
        # (Ops of ours that communicate inside start theirs elsewhere, and wait here.)
        under_way = max(0, under_way + {"start": 1, "wait": -1, "product": 0}[call])
        beside += call == "product" and under_way > 0
    # Of two pieces one product of each is alone: of a gather the last, of a scatter the first.
    assert told.count("product") == 2 * beside >= 4
    for line in load_timeline(tmp_path):
        found = [span for span in line.spans if span.kind == BESIDE]
        whole = [span for span in line.spans if span.kind == COLLECTIVE]
        assert found
        for span in found:
            assert sum(s.start_s <= span.start_s and span.end_s <= s.end_s for s in whole) == 1


class LateParts:
    """Collectives of a link that carries one after another, each for `transfer_s`."""

    def __init__(self, transfer_s: float, now: Callable[[], float], until: Callable) -> None:
        self._transfer_s, self._now, self._until = transfer_s, now, until
        self._free_s = 0.0
        self._there_s: dict[int, float] = {}
        self.waited_s = 0.0

    def _start(self, found: torch.Tensor) -> torch.Tensor:
        self._free_s = max(self._free_s, self._now()) + self._transfer_s
        self._there_s[id(found)] = self._free_s
        return found

    def all_gather_into_tensor(self, x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        return self._start(torch.cat([x] * ranks))

    def reduce_scatter_tensor(
        self, x: torch.Tensor, how: str, ranks: int, group: str
    ) -> torch.Tensor:
        return self._start(x.chunk(ranks)[0].clone())

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        began_s = self._now()
        self._until(self._there_s.pop(id(x)))
        self.waited_s += self._now() - began_s
        return x


@pytest.mark.parametrize("pieces", [2, 4])
@pytest.mark.parametrize("transfer_s", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("way", ["gathered", "scattered"])
def test_what_shows_of_delayed_pieces_is_what_is_predicted(way, transfer_s, pieces, monkeypatch):
    """D18: with delays injected, on a clock that products and waits alone move; a product of a
    piece takes a second.
    """
    clock_s = 0.0

    def until(then_s: float) -> None:
        nonlocal clock_s
        clock_s = max(clock_s, then_s)

    times = running.Multiplied.times

    def product(self: Any, x: torch.Tensor) -> torch.Tensor:
        until(clock_s + 1.0)
        return times(self, x)

    link = LateParts(transfer_s, lambda: clock_s, until)
    monkeypatch.setattr(collectives, "_funcol", link)
    monkeypatch.setattr(collectives, "size", lambda group: 2)
    monkeypatch.setattr(running.Multiplied, "times", product)
    weight = torch.randn(8, 8)
    if way == "gathered":
        pair = running.GatheredInPieces("tp", 1, pieces, [(weight, None, True, "")])
        pair.gather(torch.randn(3, 8, 8))
    else:
        of_sum = running.ScatteredInPieces("tp", 1, pieces, (weight, None, True, ""))
        of_sum.multiply(torch.randn(3, 16, 8))
    shown_s = transfer_s + max(0.0, (pieces - 1) * (transfer_s - 1.0))
    assert link.waited_s == pytest.approx(shown_s, rel=0.1)


def test_the_price_is_of_what_shows_and_of_smaller_products():
    """By the formula: a gather's first piece, and what others outlast their products."""
    program = layer(split_plan())
    machine = Machine()
    axes = {"tp": Axis(size=2, group=Group(ranks_per_node=2))}
    for pieces in (2, 4):
        found = in_pieces(program, pieces)
        shown = seconds_in_pieces(program, machine, axes, found, pieces)
        assert set(shown.moved) == {*found.gathered, *found.scattered.values()}
        assert set(shown.products) == set(found.products)
        assert all(seconds > 0 for seconds in (*shown.moved.values(), *shown.products.values()))


def test_compiled_blocks_are_refused():
    plan = default_plan(capture("small-gpt"), tp=2)
    assert "gather_pieces" not in plan.model_dump(mode="json")
    with pytest.raises(ValueError, match="use eager kernels, or gather_pieces 1"):
        Plan.model_validate(
            plan.model_dump(mode="json") | {"gather_pieces": 2, "kernels": "compiled"}
        )
