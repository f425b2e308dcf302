"""Meshes: ranks and groups of a plan, stages with meshes of their own, context parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import planner
from planner.errors import LayoutError, PlanError
from planner.language.graph import ModelGraph, from_json, to_json
from planner.language.layout.axes import find_axis
from planner.language.layout.placement import Replicate, Shard
from planner.language.lowering.defaults import default_plan
from planner.language.lowering.lowering import local_program, lower
from planner.language.lowering.propagate import propagate_graph, propagate_on
from planner.language.lowering.routes import Routes
from planner.language.lowering.wiring import build_edges, sends_pieces
from planner.language.plan import ClassLayout, Plan
from planner.runtime.process.groups.mesh import build_mesh, coordinate_of
from planner.runtime.proofs import verify
from planner.runtime.stage.randomness import RandomStream
from planner.runtime.step.engine import Engine
from tests.captures import capture_module
from tests.runtime.beside import OneProcess, gap_by_tensor
from tests.runtime.scenarios import (
    RTOL,
    Outcome,
    build,
    capture,
    check_plans,
    clip_many,
    train_many,
)
from tests.sharding.models import captured
from tests.spawn import run_ranks


def plan_for(name: str, **choices: Any) -> Plan:
    return default_plan(capture(name, torch.float64), microbatch_size=2, **choices)


def test_a_microbatch_that_a_stage_cannot_cut_is_refused_with_a_size_that_all_can():
    graph = capture("gpt")
    choices = {"tp": 4, "pp": 2, "by_stage": {"tp": (4, 1)}, "num_microbatches": 2}
    with pytest.raises(LayoutError, match=r"in 4 parts; use a microbatch_size of 4$"):
        default_plan(graph, microbatch_size=3, **choices)
    default_plan(graph, microbatch_size=4, **choices)


def check(world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    """Train each on that many ranks and compare with one process."""
    check_plans(world_size, [(name, plan_for(name, **choices)) for name, choices in cases])


# -- ranks and groups -----------------------------------------------------------------------


def test_coordinates_match_ranks():
    """M3, D1: eight ranks as pp 2 x dp 2 x tp 2, and with a pp rank cut its own way."""
    plan = plan_for("gpt", dp=2, tp=2, pp=2)
    expected = [(p, 0, d, 0, 0, t) for p in range(2) for d in range(2) for t in range(2)]
    assert [coordinate_of(plan, rank) for rank in range(8)] == expected
    plan = plan_for("gpt", dp=2, tp=2, pp=2, by_stage={"tp": (4, 1)})
    found = [coordinate_of(plan, rank) for rank in range(8)]
    of_first = [(0, 0, 0, 0, 0, t) for t in range(4)]
    assert found == of_first + [(1, 0, d, 0, 0, 0) for d in range(4)]
    plan = plan_for("gpt", dp=2, cp=2, tp=2)
    expected = [(0, 0, d, c, 0, t) for d in range(2) for c in range(2) for t in range(2)]
    assert [coordinate_of(plan, rank) for rank in range(8)] == expected


def count_groups(plans: list[Plan]) -> list[int]:
    """Groups this rank is in while each plan's mesh is up, and after the last is closed."""
    known = dist.distributed_c10d._world.pg_map
    counts = []
    for plan in plans:
        mesh = build_mesh(plan, torch.device("cpu"))
        counts.append(len(known) - 1)
        mesh.close()
    return [*counts, len(known) - 1]


def test_groups_are_counted_and_given_back():
    """M21: one group for each axis of two or more ranks; none left after ten plans."""
    choices: list[dict[str, Any]] = [
        {"dp": 4},  # data
        {"tp": 4},  # tp
        {"dp": 2, "tp": 2},  # both
        {"dp": 2, "cp": 2},  # data over all four, cp
        {"cp": 2, "tp": 2},  # data, cp, tp
        {"pp": 4},  # none
        {"tp": 2, "pp": 2},
        {"tp": 2, "pp": 2, "by_stage": {"tp": (2, 1)}},  # tp on one pp rank, data on the other
        {"cp": 2, "pp": 2},
        {"dp": 2, "tp": 2, "zero_stage": 3},
    ]
    by_rank = run_ranks(count_groups, 4, [plan_for("gpt", **c) for c in choices])
    assert all(counts == [1, 1, 2, 2, 3, 0, 1, 1, 2, 2, 0] for counts in by_rank), by_rank


def train_and_close(plans: list[tuple[str, Plan]]) -> list[int]:
    """Groups left after each of these was trained a step and closed."""
    left = []
    for name, plan in plans:
        tiny, module = build(name)
        engine = planner.apply(plan, module)
        engine.step(tiny.batch(plan.global_batch))
        engine.close()
        left.append(len(dist.distributed_c10d._world.pg_map) - 1)
    return left


def test_an_engine_gives_its_groups_back():
    """M21: those of tied copies and of FSDP2 too."""
    tied = default_plan(capture("tied-gpt"), pp=2)
    sharded = default_plan(capture("gpt"), dp=2, zero_stage=3)
    assert run_ranks(train_and_close, 2, [("tied-gpt", tied), ("gpt", sharded)]) == [[0, 0]] * 2


def draws(plans: list[Plan]) -> list[float]:
    """The first number of this rank's stream under each plan."""
    found = []
    for plan in plans:
        mesh = build_mesh(plan, torch.device("cpu"))
        with RandomStream(7, mesh).drawn():
            found.append(torch.rand(()).item())
    return found


def test_replicas_of_one_computation_draw_alike():
    """M5, D19: equal along tp and cp, different along dp and pp, whatever the meshes."""
    cases = [
        ({"cp": 2, "tp": 2}, [0, 0, 0, 0]),
        ({"cp": 2, "dp": 2}, [0, 0, 1, 1]),
        ({"tp": 2, "pp": 2, "by_stage": {"tp": (2, 1)}}, [0, 0, 1, 2]),
        ({"tp": 2, "pp": 2, "by_stage": {"tp": (1, 2)}}, [0, 1, 2, 2]),
    ]
    by_rank = run_ranks(draws, 4, [plan_for("gpt", **choices) for choices, _ in cases])
    for (_, streams), found in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert [sorted(set(found), key=found.index).index(n) for n in found] == streams


# -- stages with meshes of their own ------------------------------------------------------------


def test_stages_with_different_dp_and_tp():
    """D12, G8: tp 2 beside dp 2, both ways; side inputs, tied weights, ZeRO, virtual stages
    and split backwards.
    """
    two = {"pp": 2, "tp": 2}
    vpp = {"vpp": 2, "schedule": "interleaved_1f1b", "by_stage": {"tp": (2, 1, 2, 1)}}
    check(
        4,
        [
            ("encoder-decoder", {**two, "by_stage": {"tp": (1, 2)}}),
            ("small-tied-gpt", {**two, "by_stage": {"tp": (2, 1)}, "zero_stage": 1}),
            ("small-tied-gpt", {"pp": 2, "dp": 2, "by_stage": {"tp": (1, 2)}, "schedule": "zb_h1"}),
            ("deep-gpt", {**two, **vpp, "num_microbatches": 4}),
        ],
    )


@pytest.mark.slow
def test_four_ways_to_cut_on_eight_ranks():
    """D12: dp 1 x tp 4 to dp 4 x tp 1, and to dp 2 x tp 2."""
    base = {"pp": 2, "dp": 2, "tp": 2}
    cases = [("gpt", {**base, "by_stage": {"tp": tps}}) for tps in [(4, 1), (1, 4), (2, 4)]]
    check(8, [*cases, ("tied-gpt", {**base, "by_stage": {"tp": (4, 1)}, "zero_stage": 2})])


def test_gradients_are_clipped_over_different_meshes():
    """D12: every element of the model counts once in the norm."""
    plan = plan_for("small-tied-gpt", pp=2, tp=2, by_stage={"tp": (2, 1)}, zero_stage=1)
    plans = [("small-tied-gpt", plan)]
    for by_rank in zip(*run_ranks(clip_many, 4, plans, 0.1), strict=True):
        assert len({rank[0] for rank in by_rank}) == 1
        assert by_rank[0][0] == pytest.approx(by_rank[0][1], rel=1e-10)
        assert by_rank[0][2] < RTOL


def test_each_rank_is_sent_exactly_what_it_needs():
    """D4, D12: from tp 2 pieces to dp 2 halves and back, every element once."""
    plan = plan_for("gpt", tp=2, pp=2, by_stage={"tp": (2, 1)})
    (edge,) = build_edges(capture("gpt", torch.float64), plan)
    sharded = replace(edge, sent=edge.sent.on("tp", Shard(2)))
    routes = Routes(plan=plan)
    samples, (_, sequence, hidden) = 2 * plan.microbatch_size, edge.shape
    boxes = {
        (p.source, p.target): p.box
        for p in routes.parts(sharded, (samples // 4,) * 2, is_grad=False)
    }
    half = (0, sequence), (0, hidden // 2)
    other = (0, sequence), (hidden // 2, hidden)
    assert boxes == {
        (0, 2): ((0, 1), *half),
        (1, 2): ((0, 1), *other),
        (0, 3): ((1, 2), *half),
        (1, 3): ((1, 2), *other),
    }
    back = {(p.source, p.target) for p in Routes(plan=plan).parts(sharded, (1, 1), is_grad=True)}
    assert back == {(2, 0), (3, 0), (2, 1), (3, 1)}


def test_an_uneven_microbatch_is_cut_alike_on_both_meshes():
    """D12: three samples are one and two on the dp 2 side; boxes still tile the tensor."""
    plan = plan_for("gpt", tp=2, pp=2, by_stage={"tp": (2, 1)})
    (edge,) = build_edges(capture("gpt", torch.float64), plan)
    parts = Routes(plan=plan).parts(edge, (1, 2), is_grad=False)
    assert [(p.target, p.box[0]) for p in parts] == [(2, (0, 1)), (3, (1, 3))]


class PoolsFirst(nn.Module):
    """The first block hands on a value without samples, the second uses it for each."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, y):
        mean = self.first(x).mean(0)
        return F.mse_loss(self.second(mean) + y, y)


def test_values_that_samples_can_not_be_told_apart_in_are_refused():
    """D12, G9: both blocks and the tensor are named."""
    batches = [(torch.randn(n, 8), torch.randn(n, 8)) for n in (2, 3)]
    graph = capture_module(PoolsFirst(), *batches, name="pools")
    plan = default_plan(graph, pp=2, tp=2, by_stage={"tp": (1, 2)}, microbatch_size=2)
    with pytest.raises(LayoutError, match=r"block \S+ hands \S+ to block .*no dim counts samples"):
        build_edges(graph, plan)


def test_batch_statistics_over_different_meshes_are_not_verified():
    """D12, P33: no one process sees two sizes of microbatch at once."""
    graph = captured("batchnorm-mlp")
    plan = default_plan(graph, pp=2, tp=2, by_stage={"tp": (2, 1)}, microbatch_size=2)
    with pytest.raises(PlanError, match=r"see 1 and 2 samples at a time; give those stages"):
        verify._replicas(graph, plan)
    assert verify._replicas(graph, default_plan(graph, dp=2, microbatch_size=3)) == 2
    assert verify._replicas(captured("gpt"), plan) is None


def test_degrees_of_a_stage_must_fit():
    """D12, V11: refused, with what would fit."""
    with pytest.raises(LayoutError, match=r"by_stage tp=\(3, 1\): give one tp for each of the 2"):
        plan_for("gpt", tp=2, pp=2, by_stage={"tp": (3, 1)})
    with pytest.raises(ValueError, match="stages of one pp rank share its mesh"):
        plan_for(
            "gpt", tp=2, pp=2, vpp=2, schedule="interleaved_1f1b", by_stage={"tp": (2, 1, 1, 2)}
        )


# -- whole tensors sent in pieces -----------------------------------------------------------------


def with_nodes_of(plan: Plan, devices: int) -> Plan:
    return plan.model_copy(
        update={"cluster": plan.cluster.model_copy(update={"devices_per_node": devices})}
    )


def train_and_count(plans: list[Plan]) -> list[tuple[Outcome, int]]:
    """How each plan's training compares with one process, and the bytes a step sent."""
    outcomes = train_many([("gpt", plan) for plan in plans])
    sent = []
    for plan in plans:
        tiny, module = build("gpt")
        engine = planner.apply(plan, module)
        engine.step(tiny.batch(plan.global_batch))
        sent.append(engine._executor._post.bytes_sent)
    return list(zip(outcomes, sent, strict=True))


@pytest.mark.slow
def test_between_nodes_a_whole_tensor_goes_in_pieces():
    """D4, D12, P5: each rank of a tp group sends its half, and the receivers gather; exact
    forward and backward, also towards a mesh of another shape.
    """
    graph = capture("gpt", torch.float64)
    plan = plan_for("gpt", tp=2, pp=2)
    on_one, on_two = with_nodes_of(plan, 4), with_nodes_of(plan, 2)
    assert not sends_pieces(on_one, 0, 1)
    assert sends_pieces(on_two, 0, 1)
    # A tp group over nodes gathers there too: nothing is saved.
    assert not sends_pieces(with_nodes_of(plan, 1), 0, 1)
    (whole,), (cut,) = build_edges(graph, on_one), build_edges(graph, on_two)
    assert (whole.sent["tp"], cut.sent["tp"]) == (Replicate(), Shard(1))
    other = with_nodes_of(plan_for("gpt", tp=2, pp=2, by_stage={"tp": (1, 2)}), 2)
    by_rank = run_ranks(train_and_count, 4, [on_one, on_two, other])
    for outcome, _ in by_rank[0]:
        assert outcome.gaps.largest < RTOL
    tensor = graph.tensor[whole.tensor].bytes_at(plan.microbatch_size) * plan.num_microbatches
    assert [found[0][1] for found in by_rank] == [tensor] * 4
    assert [found[1][1] for found in by_rank] == [tensor // 2] * 4
    # With dp 2 a rank holds half of the samples, and sends each tp rank its half of those.
    assert [found[2][1] for found in by_rank] == [tensor // 2] * 4


# -- two meshes of 2 x 2 --------------------------------------------------------------------------


class TwoMatmuls(nn.Module):
    """The example of two products, each on its own mesh."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x, y):
        return F.mse_loss(self.second(torch.relu(self.first(x))), y)


def two_matmuls(captured: Any, plan: Plan) -> tuple[float, float, list[tuple[int, ...]]]:
    """Train one step on this rank; return the gaps to one process and local weight shapes."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    module = TwoMatmuls()
    alone = OneProcess(module)
    graph: ModelGraph = from_json(captured)
    engine = Engine(plan, graph, module, build_mesh(plan, torch.device("cpu")))
    generator = torch.Generator().manual_seed(1)
    batch = tuple(torch.randn(plan.global_batch, 16, generator=generator) for _ in range(2))
    loss_gap = abs(engine.step(batch).item() - alone.step(batch))
    gap = gap_by_tensor(engine.full_gradients(), alone.gradients())
    shapes = [tuple(p.shape) for stage in engine.stages.values() for p in stage.parameters()]
    return loss_gap, gap, shapes


def test_two_matmuls_on_two_meshes():
    """D11: dp 2 x tp 2 x pp 2 on eight ranks; the first weight is cut by columns of the
    product, the second by rows, and their hand-off goes from mesh [[0,1],[2,3]] to
    [[4,5],[6,7]] in the pieces it is made in.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        batches = [tuple(torch.randn(n, 16) for _ in range(2)) for n in (2, 3)]
        graph = capture_module(TwoMatmuls(), *batches, name="two-matmuls")
    finally:
        torch.set_default_dtype(before)
    assert len(graph.blocks) == 2
    plan = default_plan(graph, dp=2, tp=2, pp=2, microbatch_size=2)
    assert [plan.mesh(p).ranks for p in range(2)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    first, second = graph.classes
    layouts = (
        _column_parallel(0, first),
        _row_parallel(1, second),
    )
    plan = plan.model_copy(update={"layouts": layouts})
    (edge,) = build_edges(graph, plan)
    assert edge.sent["tp"] == Shard(1)
    found = run_ranks(two_matmuls, 8, to_json(graph), plan)
    assert max(loss_gap for loss_gap, _, _ in found) < RTOL
    assert found[0][1] < RTOL
    assert [shapes for _, _, shapes in found] == [[(16, 16)]] * 8


def _column_parallel(index: int, program: Any) -> ClassLayout:
    linear, relu = program.ops
    return ClassLayout(
        class_index=index,
        inputs=("R",),
        params=("S(0)",),
        outputs=("S(1)",),
        ops=((linear.name, "R,S(0)->S(1)"), (relu.name, "S(1)->S(1)")),
    )


def _row_parallel(index: int, program: Any) -> ClassLayout:
    linear = program.ops[0]
    return ClassLayout(
        class_index=index,
        inputs=tuple("S(1)" if name == linear.inputs[0] else "R" for name in program.inputs),
        params=("S(1)",),
        outputs=("R",),
        ops=((linear.name, "S(1),S(1)->P"),),
    )


# -- context parallelism --------------------------------------------------------------------


def test_context_parallelism():
    """D19: each rank has a part of every sequence; beside dp, tp, pp and ZeRO."""
    check(
        4,
        [
            ("small-gpt", {"cp": 2, "tp": 2}),
            ("small-gpt", {"cp": 2, "dp": 2, "zero_stage": 2}),
            ("small-tied-gpt", {"cp": 2, "pp": 2, "schedule": "zb_h1", "recompute": "full"}),
        ],
    )


def in_sequence(name: str, **choices: Any) -> Plan:
    """A plan of tp and cp with sequences divided between blocks on both."""
    plan, graph = plan_for(name, **choices), capture(name, torch.float64)
    size = plan.microbatch_size
    tp = propagate_graph(graph, microbatch_size=size, axis_size=plan.tp, boundary=Shard(1))
    programs = [
        lower(program.bind(size), layout, axis_size=plan.tp)
        for program, layout in zip(graph.classes, tp, strict=True)
    ]
    cp = propagate_on(graph, find_axis("cp"), size=plan.cp, microbatch_size=size, programs=programs)
    return plan.model_copy(update={"layouts": (*tp, *cp)})


@pytest.mark.slow
def test_sequences_on_tp_inside_cp():
    """D7, D19: 1/(cp tp) of the positions on a rank, with ZeRO and recomputation."""
    plans = [
        ("gpt", in_sequence("gpt", cp=2, tp=2, zero_stage=3)),
        ("tied-gpt", in_sequence("tied-gpt", cp=2, tp=2, recompute="selective", zero_stage=1)),
    ]
    check_plans(4, plans)


@pytest.mark.slow
def test_sequences_on_tp_inside_cp_between_stages():
    """D7, D19: and so they go from stage to stage, in a split backward too."""
    choices = {"cp": 2, "tp": 2, "pp": 2}
    plans = [
        ("tied-gpt", in_sequence("tied-gpt", **choices, schedule="zb_h1", recompute="full")),
        ("gpt", in_sequence("gpt", **choices, vpp=2, schedule="interleaved_1f1b")),
    ]
    check_plans(8, plans)


@pytest.mark.slow
def test_context_parallelism_beside_different_meshes():
    """D12, D19: a sequence in two on both sides, dp and tp changing places between them."""
    check(
        8,
        [("gpt", {"cp": 2, "tp": 2, "pp": 2, "by_stage": {"tp": tps}}) for tps in [(2, 1), (1, 2)]],
    )


def test_every_layer_works_on_its_part_of_the_sequence():
    """D19: projections run on half of the positions, weights move nowhere inside a step."""
    graph = capture("gpt", torch.float64)
    plan = plan_for("gpt", cp=2)
    layer = next(b for b in graph.blocks if "layers" in b.name)
    local = local_program(graph, plan, layer.class_index, degrees=plan.degrees, microbatch_size=2)
    products = [op for op in local.ops if op.target == "aten.linear.default"]
    assert {local.tensor[op.outputs[0]].shape[1] for op in products} == {8}
    moved = [op.inputs[0] for op in local.ops if op.target == "planner.redistribute"]
    assert not set(moved) & set(local.params)
    assert moved, "attention meets all keys somehow"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mlp", r"block fc1 hands on relu of shape \[1, 32\].*not \[batch, sequence, hidden\]"),
        ("resnet", r"block stem hands on .* \[1, 4, 4, 4\].*use cp=1"),
        ("vit", r"block patch hands on .* \[1, 17, 32\].*sequence of 17 does not divide by 2"),
    ],
)
def test_models_without_sequences_are_refused(name, message):
    """D19, V11: the block and the tensor are named."""
    with pytest.raises(LayoutError, match=message):
        default_plan(captured(name), cp=2)


# -- encoders and decoders ------------------------------------------------------------------


def test_the_encoder_comes_first_and_the_decoder_after():
    """V8, G8: two stages are cut between the two; the encoder's output crosses once, and with
    a stage for each decoder layer it goes straight to both.
    """
    graph = capture("encoder-decoder", torch.float64)
    plan = plan_for("encoder-decoder", pp=2)
    names = [block.name for block in graph.blocks]
    last = plan.stages[0].last_block
    assert (names[last], names[last + 1]) == ("encoder.1", "target")
    (edge,) = build_edges(graph, plan)
    assert graph.producer[edge.tensor] == last
    # The first stage has the encoder, the other two a decoder layer each.
    bounds = [(0, last), (last + 1, last + 2), (last + 3, len(names) - 1)]
    stages = [
        stage.model_copy(update={"first_block": first, "last_block": end})
        for stage, (first, end) in zip(
            plan_for("encoder-decoder", pp=3).stages, bounds, strict=True
        )
    ]
    split = plan_for("encoder-decoder", pp=3).model_copy(update={"stages": tuple(stages)})
    crossing = [
        (e.producer, e.consumer) for e in build_edges(graph, split) if e.tensor == edge.tensor
    ]
    assert crossing == [(0, 1), (0, 2)]
    check_plans(3, [("encoder-decoder", split)])
