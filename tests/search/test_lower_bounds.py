"""Quick counts beside what they stand for: bytes by a line, layouts before they are priced."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from costmodel.execution import find_execution
from costmodel.memory.bound import RankBound
from costmodel.memory.parts import Ranks
from costmodel.time.stage_costs.load import StageLoad
from planner.language.plan.replication import Replication
from planner.language.schedule import (
    build_schedule,
    find_schedule,
    forward,
    full_backward,
    register_schedule,
)
from planner.language.schedule.jobs import Job
from planner.language.schedule.registry import SCHEDULES
from planner.language.schedule.timing.job_seconds import JobSeconds
from planner.language.schedule.timing.simulate import simulate
from planner.units import GIB
from search import SearchRequest
from search.bounds.round_trips import ZeroBubbleBound
from search.candidates import Candidates
from search.partition.chain_problem import Cut
from search.partition.chain_windows import fixed_windows
from search.priced_configuration import PricedConfiguration
from search.space.configuration import recompute_choices
from tests.builders import gpt_batch, tiny_models
from tests.captures import capture_module
from tests.experts import ExpertModules, RoutedExperts, RoutedGPT
from tests.model_matrix import model_matrix
from tests.search.machine import Machine

MACHINE = Machine(context_bytes=1e6, devices_per_node=4)
WIDE = 512


class Masked(nn.Module):
    """Layers read one mask of 1 MiB, made once for all microbatches; the first and the last block
    do not.
    """

    def __init__(self):
        super().__init__()
        self.token, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.layers = nn.ModuleList(Mixing() for _ in range(5))

    def forward(self, ids):
        mask = torch.ones(WIDE, WIDE, device=ids.device).tril()
        x = self.token(ids)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x).square().mean()


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, x, mask):
        return x + torch.tanh(mask @ self.mix(x))


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("splits_backward", [False, True])
@pytest.mark.parametrize("precision", ["model", "bf16"])
def test_what_may_fit_is_what_the_least_says(zero, splits_backward, precision):
    """M17: `may_fit` is `least` within the limit for every number of microbatches in flight."""
    rng = np.random.default_rng(17)
    sizes = {name: rng.uniform(0, GIB, 50) for name in ("saved_bytes", "param_bytes")}
    rank = RankBound(
        load=StageLoad(**sizes), num_microbatches=6, recompute="none",
        ranks=Ranks.under(
            Replication(replicas=2, zero_stage=zero, precision=precision),
            find_execution("ours-eager"),
            MACHINE,
        ),
        profile=MACHINE, splits_backward=splits_backward,
    )  # fmt: skip
    for in_flight in range(1, 7):
        least = rank.least(in_flight)
        for limit in (2 * GIB, 5 * GIB, float(np.median(least)) + 1.0):
            assert np.array_equal(rank.may_fit(in_flight, limit), least <= limit)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("gpt", "model"),
        ("gpt", "bf16"),
        ("tied", "model"),
        ("masked", "model"),
        ("experts", "bf16"),
        pytest.param("experts of modules", "bf16", marks=pytest.mark.slow),
    ],
)
def test_the_least_is_never_above_the_estimate(name, precision):
    """M17, X1: what refuses without asking the cost model is below its count on every rank, for
    all schedules, ZeRO stages and kinds of recompute, and not by much where nothing is cut; where
    blocks share weights, too, or some share a table that is made once."""
    model = tiny_models()["gpt"]
    if name == "masked":
        batches = (torch.zeros(size, WIDE, dtype=torch.long) for size in (2, 3))
        graph = capture_module(Masked(), *batches, name=name)
        (mask,) = graph.preamble.outputs
        assert [mask in block.inputs for block in graph.blocks] == [False, *[True] * 5, False]
    elif name.startswith("experts"):
        kind = ExpertModules if name.endswith("modules") else RoutedExperts
        batches = (gpt_batch(size) for size in (2, 3))
        graph = capture_module(RoutedGPT(6, kind=kind), *batches, name=name, precision=precision)
    else:
        module = model.build()
        if name == "tied":
            module.head.weight = module.token.weight
        graph = capture_module(
            module, model.batch(2), model.batch(3), loss=model.loss, name=name, precision=precision
        )
    rng = np.random.default_rng(3)
    parts = []
    for batch in (2, 8):
        request = SearchRequest(num_devices=4, global_batch=batch, precision=precision)
        candidates = Candidates.of(graph, MACHINE, request)
        for shape in candidates.shapes(request):
            if shape.cp > 1 or shape.microbatch_size > 1:
                continue
            for configuration in shape.configurations():
                degrees = configuration.degrees
                sizes = degrees["tp"], configuration.microbatch_size, 1, degrees["ep"]
                for table in candidates.tables(*sizes, degrees["etp"])[:1]:
                    parts += list(_parts_of_estimate(candidates, configuration, table, rng))
    assert len(parts) > 80
    assert max(parts) <= 1 + 1e-9
    assert np.median(parts) > 0.7


class Decoders(nn.Module):
    """Six decoders, each of which reads what one encoder made."""

    def __init__(self):
        super().__init__()
        self.encoder, self.token = nn.Linear(4, 64), nn.Embedding(8, 16)
        self.layers = nn.ModuleList(Decoder() for _ in range(6))
        self.head = nn.Linear(16, 1)

    def forward(self, ids, source):
        memory, x = torch.tanh(self.encoder(source)), self.token(ids)
        for layer in self.layers:
            x = layer(x, memory)
        return self.head(x).square().mean()


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.key, self.mix = nn.Linear(64, 16), nn.Linear(16, 16)

    def forward(self, x, memory):
        scores = x @ self.key(memory).transpose(1, 2)
        return x + self.mix(scores.softmax(-1) @ self.key(memory))


def decoders_batch(size):
    return {"ids": torch.zeros(size, 8, dtype=torch.long), "source": torch.randn(size, 64, 4)}


@pytest.mark.parametrize("schedule", ["fthenb", "1f1b"])
@pytest.mark.parametrize("name", ["decoders", "tied-embedding", "einsum-attention"])
def test_what_several_blocks_read_is_held_once(name, schedule):
    """M17, X1: an encoder's output, or a stream that a norm and the layer beside it read."""
    if name == "decoders":
        graph = capture_module(Decoders(), decoders_batch(2), decoders_batch(3), name=name)
    else:
        tiny = model_matrix()[name]
        batches = tiny.batch(2), tiny.batch(3)
        graph = capture_module(tiny.build(), *batches, loss=tiny.loss, name=name)
    request = SearchRequest(num_devices=2, global_batch=8, schedule=schedule, pp=2, offload="none")
    candidates, rng = Candidates.of(graph, MACHINE, request), np.random.default_rng(11)
    parts: list[float] = []
    for shape in candidates.shapes(request):
        for configuration in shape.configurations():
            if configuration.num_microbatches == 8:
                table = candidates.tables(configuration.tp, configuration.microbatch_size)[0]
                for _ in range(12):
                    parts += list(_parts_of_estimate(candidates, configuration, table, rng))
    assert len(parts) >= 20
    assert max(parts) <= 1 + 1e-9


def test_zb_h1_is_never_faster_than_its_bound():
    """M17, X1: of random blocks (of some no weight gradient, or no forward, takes time), random
    boundaries and as many microbatches as ranks or more; equal blocks reach it where F is no
    longer than I and W."""
    rng = np.random.default_rng(29)
    for _ in range(300):
        pp = int(rng.integers(2, 7))
        num_blocks, m = pp + int(rng.integers(9)), pp + int(rng.integers(6))
        seconds = rng.uniform(0, 1, (num_blocks, 3)) * rng.integers(0, 2, (num_blocks, 3))
        seconds[int(rng.integers(num_blocks))] += rng.uniform(0, 5, 3)
        order = find_schedule("zb_h1").job_order(pp=pp, num_microbatches=m)
        bound = ZeroBubbleBound(seconds=seconds).least_step_s(order, m)
        inner = np.sort(rng.choice(np.arange(1, num_blocks), pp - 1, replace=False))
        step_s = _zb_h1_s(np.add.reduceat(seconds, [0, *inner]), m)
        assert bound <= step_s * (1 + 1e-9)
    equal = np.tile([1.0, 1.5, 1.0], (12, 1))
    order = find_schedule("zb_h1").job_order(pp=4, num_microbatches=8)
    assert ZeroBubbleBound(seconds=equal).least_step_s(order, 8) == pytest.approx(
        _zb_h1_s(np.add.reduceat(equal, [0, 3, 6, 9]), 8)
    )


def _zb_h1_s(stages, num_microbatches):
    """Simulated seconds of stages of these F, I and W jobs, with nothing to send."""
    forward_s, input_s, weight_s = map(tuple, stages.T.tolist())
    nothing = (0.0,) * len(stages)
    schedule = build_schedule("zb_h1", pp=len(stages), vpp=1, num_microbatches=num_microbatches)
    return simulate(
        schedule,
        JobSeconds(
            forward_s=forward_s, backward_input_s=input_s, backward_weight_s=weight_s,
            receive_forward_s=nothing, receive_backward_s=nothing,
        ),
    ).makespan_s  # fmt: skip


def _parts_of_estimate(candidates, configuration, table, rng):
    """Yield what `least` is of each rank's estimate, for a random cut and random recompute."""
    kinds = recompute_choices(configuration.recompute)
    if configuration.vpp > 1:
        stages = candidates.interleaved(configuration, table)
        levels = stages.levels
        choices, until = levels.of_stages(rng.integers(levels.most + 1))
        cut = Cut(cuts=stages.cut.cuts, choices=choices, until=until, value=0)
        yield from _parts_of_even(candidates, configuration, table, cut)
        return
    inner = np.sort(rng.choice(np.arange(1, table.num_blocks), configuration.pp - 1, replace=False))
    cuts = (0, *inner.tolist(), table.num_blocks)
    choices = tuple(rng.integers(len(kinds), size=configuration.pp).tolist())
    priced = PricedConfiguration(candidates, configuration, table)
    plan = priced.plan(Cut(cuts=cuts, choices=choices, value=0))
    memory = candidates.estimate(plan).memory
    problem = priced.problem(np.inf)
    highest = max(float(parts.total) for parts in memory)
    least = problem.stages.least_needs(highest)
    for stage, choice in enumerate(choices):
        kept = least.kept_bytes[choice][cuts[stage + 1]] - least.kept_bytes[choice][cuts[stage]]
        sizes = least.param_bytes[cuts[stage + 1]] - least.param_bytes[cuts[stage]]
        for live, slope, room in least.lines(problem.in_flight[stage]):
            assert live * kept + slope * sizes <= room
        window = fixed_windows(cuts)[stage]
        costs = problem.stages.cost_window(window)
        total = float(memory[stage].total)
        live = problem.in_flight[stage]
        rank = replace(problem.limit_of(stage), limit_bytes=total * (1 + 1e-9))
        assert costs.on_rank(rank, ...)[1][choice].all()
        # Where weight gradients come late, what they refer to is a part of it.
        assert bool(rank.late_weights) == (configuration.order.late_weights != ())
        yield costs.bounds[choice].least(live)[costs.kinds.of].item() / total


def _parts_of_even(candidates, configuration, table, cut):
    """Virtual stages: what is refused under a limit just at each rank's estimate is no rank."""
    priced = PricedConfiguration(candidates, configuration, table)
    memory = candidates.estimate(priced.plan(cut)).memory
    stages = candidates.interleaved(configuration, table)
    highest = max(float(parts.total) for parts in memory)
    assert not priced.infeasible_ranks(cut, highest * (1 + 1e-9))
    for rank, parts in enumerate(memory):
        total = float(parts.total)
        # At a limit just above the estimate the rank's own level may fit.
        level = stages.levels.of_cut(cut.choices, cut.until)[rank]
        limit = total * (1 + 1e-9)
        assert stages.least_levels(max(limit, highest))[rank] <= level
        whole = stages.least_bytes[-1, rank]
        yield float(whole) / total


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_no_layout_is_faster_than_its_draft_says(name):
    """X1: what spares a layout from being priced is below its price."""
    model = tiny_models()[name]
    graph = capture_module(
        model.build(), model.batch(2), model.batch(3), loss=model.loss, name=name
    )
    candidates = Candidates.of(graph, MACHINE, SearchRequest(num_devices=4, global_batch=8))
    degrees = [(tp, size) for tp in (2, 4) for size in (1, 2, 4)]
    layouts = [layout for pair in degrees for layout in candidates.layouts.at(*pair).every]
    assert any(layout.least_s > 0 for layout in layouts)
    for layout in layouts:
        priced = float((layout.table.forward_s + layout.table.backward_s).sum())
        assert layout.least_s + layout.accumulate_s <= priced * (1 + 1e-9)
    for pair in degrees:
        fastest = candidates.layouts.at(*pair).fastest[0].least_s
        assert fastest == min(layout.least_s for layout in candidates.layouts.at(*pair).every)
        assert 0 < candidates.layouts.at(*pair).optimistic.least_s <= fastest * (1 + 1e-12)


@pytest.fixture
def front_loaded():
    """Four microbatches in flight, once; then three go back, and no more than two are in flight."""

    @register_schedule("front_loaded")
    def front_loaded(pp: int, vpp: int, num_microbatches: int) -> list[list[Job]]:
        first = min(4, num_microbatches)
        table = []
        for rank in range(pp):
            row = [forward(rank, i) for i in range(first)]
            row += [full_backward(rank, i) for i in range(first - 1)]
            for i in range(first, num_microbatches):
                row += [forward(rank, i), full_backward(rank, i - 1)]
            table.append([*row, full_backward(rank, num_microbatches - 1)])
        return table

    yield "front_loaded"
    del SCHEDULES["front_loaded"]


def test_of_an_order_that_is_not_stated_nothing_is_taken_for_granted(front_loaded):
    """M17, X1: the four are in flight before there are gradients, and never again."""
    model = tiny_models()["gpt"]
    graph = capture_module(model.build(), model.batch(2), model.batch(3), loss=model.loss)
    request = SearchRequest(
        num_devices=2, global_batch=8, pp=2, tp=1, schedule=front_loaded, offload="none"
    )
    candidates, rng = Candidates.of(graph, MACHINE, request), np.random.default_rng(7)
    parts: list[float] = []
    for shape in candidates.shapes(request):
        for configuration in shape.configurations():
            if configuration.num_microbatches < 8:
                continue
            table = candidates.tables(1, configuration.microbatch_size)[0]
            for _ in range(6):
                parts += list(_parts_of_estimate(candidates, configuration, table, rng))
    assert len(parts) >= 12
    assert max(parts) <= 1 + 1e-9


def test_weight_gradients_that_come_late_hold_what_they_are_made_of():
    """M17: the last rank of zb_h1 has one microbatch in flight and the weight gradients of four to
    make; what they refer to rules out limits that one microbatch would allow."""
    graph = capture_module(RoutedGPT(6), gpt_batch(2), gpt_batch(3), name="late")
    request = SearchRequest(num_devices=4, global_batch=32, pp=4, schedule="zb_h1", zero=0)
    candidates = Candidates.of(graph, MACHINE, request)
    (configuration,) = (
        configuration
        for shape in candidates.shapes(request)
        for configuration in shape.configurations()
        if configuration.microbatch_size == 4
    )
    priced = PricedConfiguration(candidates, configuration, candidates.tables(1, 4)[0])
    cuts = (0, 2, 4, 6, priced.table.num_blocks)
    memory = candidates.estimate(priced.plan(Cut(cuts=cuts, choices=(0,) * 4, value=0))).memory
    problem = priced.problem(float(memory[-1].total))
    last = problem.limit_of(3)
    assert (last.in_flight, last.late_weights) == (1, 4)
    window = problem.stages.cost_window(fixed_windows(cuts)[3])

    def may_fit(part, late_weights):
        limits = replace(last, limit_bytes=part * last.limit_bytes, late_weights=late_weights)
        return window.on_rank(limits, ...)[1][0].item()

    assert may_fit(1 + 1e-9, 4)
    assert may_fit(0.8, 0)
    assert not may_fit(0.8, 4)
