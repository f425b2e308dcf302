"""N6: each part of a proof by itself: silent on what the runtime derives, and not on a fault."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch

from planner.language.layout.axes import Degrees, lowered_axes
from planner.language.layout.placement import Shard
from planner.language.lowering.lowering import local_program
from planner.language.lowering.routes import Routes
from planner.language.lowering.wiring import block_placements
from planner.runtime.proofs.by_block.blocks import check_class, simulated_mesh
from planner.runtime.proofs.by_block.coverage import check_coverage
from planner.runtime.proofs.by_block.cut import Cut, cut_down
from planner.runtime.proofs.by_block.facts import CPU, Facts, held_values
from planner.runtime.proofs.by_block.hand_over import check_handover, handovers
from planner.runtime.proofs.by_block.limits import cuts, unproven
from planner.runtime.proofs.by_block.prove import Derived, derive
from planner.runtime.proofs.by_block.simulate.lockstep import Call
from planner.runtime.proofs.by_block.step_order import check_collectives, check_sums
from planner.runtime.proofs.by_block.tables import check_messages, check_table, queues_of
from planner.runtime.proofs.by_block.wires import check_routes, check_wires
from planner.runtime.stage.program_fx import to_graph_module
from tests.runtime.check.by_block.cases import captured, plan_of

GRAPH, SOURCE = captured("gpt")
OPTIONS = {"tp": 2, "pp": 2, "dp": 2, "zero_stage": 1}


@cache
def derived() -> Derived:
    return derive(GRAPH, plan_of("gpt", **OPTIONS))


@cache
def cut() -> Cut:
    return cut_down(GRAPH, plan_of("gpt", **OPTIONS), SOURCE)


@cache
def facts() -> Facts:
    return Facts(cut(), GRAPH, SOURCE, 2)


def held_by(change=None):
    """What each rank holds; `change` breaks what rank 3 does."""

    def of(rank):
        own = dict(derived().held(rank))
        if rank == 3 and change is not None:
            change(own)
        return own

    return of


def matrix(own):
    """The name of a matrix that a rank holds a part of."""
    return next(n for n, each in own.items() if len(each.piece.shape) == 2)


# ------------------------------------------------------------------------------------- tables


def test_a_table_is_the_plans():
    plan, schedule = plan_of("gpt", **OPTIONS), derived().schedule
    assert list(check_table(plan, schedule)) == []
    first, *rest = schedule.jobs
    missing = replace(schedule, jobs=(first[1:], *rest))
    assert len(list(check_table(plan, missing))) == 1
    other = plan.model_copy(update={"num_microbatches": plan.num_microbatches + 1})
    assert re.search("microbatches and the plan", next(check_table(other, schedule)))


def test_messages_are_sent_and_taken_in_an_order_that_ends():
    schedule, edges, wirings = derived().schedule, derived().edges, derived().wirings
    assert list(check_messages(schedule, edges, wirings)) == []
    deaf = wirings[0], replace(wirings[1], incoming=())
    assert "taken 0 times" in next(check_messages(schedule, edges, deaf))

    def backwards(schedule, edges):
        first, second = queues_of(schedule, edges)
        return first, second[::-1]

    assert len(list(check_messages(schedule, edges, wirings, backwards))) == 1


# -------------------------------------------------------------------------------------- wires


def test_stages_are_wired_as_blocks_take():
    plan, edges, wirings = plan_of("gpt", **OPTIONS), derived().edges, derived().wirings
    assert list(check_wires(GRAPH, plan, edges, wirings)) == []
    assert "does not go from stage 0 to stage 1" in next(check_wires(GRAPH, plan, (), wirings))
    (edge,) = edges
    back = replace(edge, producer=1, consumer=0)
    found = list(check_wires(GRAPH, plan, (edge, back), wirings))
    assert any("from stage 1 to stage 0, which does not take it there" in each for each in found)


def test_each_element_of_a_message_comes_once():
    plan, edges = plan_of("gpt", **OPTIONS), derived().edges
    assert list(check_routes(plan, edges, Routes(plan=plan))) == []

    class Broken(Routes):
        def parts(self, edge, cut, *, is_grad):
            found = super().parts(edge, cut, is_grad=is_grad)
            return found if is_grad else (*found, found[0])

    (fault,) = check_routes(plan, edges, Broken(plan=plan))
    assert "each element must come once" in fault


# ----------------------------------------------------------------------------------- coverage


def test_ranks_hold_each_element_once():
    plan = plan_of("gpt", **OPTIONS)
    assert list(check_coverage(GRAPH, plan, held_by())) == []

    def drop(own):
        del own[matrix(own)]

    (fault,) = check_coverage(GRAPH, plan, held_by(drop))
    assert fault.startswith("rank 3 lacks ")

    def shift(own):
        name = matrix(own)
        piece = own[name].piece
        runs = (tuple((start + 1, length) for start, length in piece.runs[0]), *piece.runs[1:])
        own[name] = replace(own[name], piece=replace(piece, runs=runs))

    found = list(check_coverage(GRAPH, plan, held_by(shift)))
    assert "rank 3 holds the" in found[0]
    assert any("in no piece" in each or "in two pieces" in each for each in found)


# --------------------------------------------------------------------------------- step order


def test_ranks_of_a_line_run_the_same_collectives():
    plan, schedule = plan_of("gpt", **OPTIONS), derived().schedule
    call = Call("tp", "all_reduce", "sum", (2, 8), "float64")
    kinds = {(block.class_index, plan.stage_degrees(0)) for block in GRAPH.blocks}

    def calls(of_rank_1):
        return {kind: {0: ((call,), ()), 1: ((of_rank_1,), ())} for kind in kinds}

    total, faults = check_collectives(GRAPH, plan, schedule, calls(call))
    assert faults == []
    # Each rank runs, for each microbatch, a collective a block of its stage.
    blocks = sum(len(stage.blocks) for stage in plan.stages)
    assert total == plan.num_microbatches * blocks * plan.dp * plan.tp
    other = call._replace(how="max")
    _, faults = check_collectives(GRAPH, plan, schedule, calls(other))
    assert len(faults) == plan.dp * plan.pp
    assert faults[0].startswith("on tp, rank 0 runs")


def test_ranks_sum_gradients_of_the_same_pieces():
    plan = plan_of("gpt", **(OPTIONS | {"zero_stage": 0}))
    whole = derive(GRAPH, plan)
    total, faults = check_sums(GRAPH, plan, whole.held)
    assert (total > 0, faults) == (True, [])

    def held(rank):
        own = dict(whole.held(rank))
        if rank == 3:
            name = matrix(own)
            own[name] = replace(own[name], piece=whole.held(2)[name].piece)
        return own

    _, faults = check_sums(GRAPH, plan, held)
    assert faults
    assert all("sum the gradient of" in fault and "3" in fault for fault in faults)


# --------------------------------------------------------------------------- facts and blocks


def layer() -> int:
    return next(i for i, each in enumerate(GRAPH.classes) if "layers" in each.name)


def test_facts_are_runs_of_a_block_and_their_rounding():
    fact = facts().of(layer())
    assert {t.dtype for t in fact.run.outputs} == {torch.float64}
    for run, moved in zip(fact.run.outputs, fact.moved.outputs, strict=True):
        apart = (run - moved).abs().max() / run.abs().max()
        assert 0 < apart < 1e-12
    # The gradients are those of finite differences, along a direction of the input.
    run, program = fact.run, fact.program
    name = program.inputs[0]
    module = to_graph_module(program, dict.fromkeys(a.name for a in lowered_axes()), CPU)
    along = torch.randn(run.values[name].shape, dtype=torch.float64) * 1e-5

    def value(x):
        outputs = module(*(run.values | {name: x}).values())
        return sum((c * o).sum() for c, o in zip(run.cotangents, outputs, strict=True))

    rise = value(run.values[name] + along) - value(run.values[name] - along)
    torch.testing.assert_close(2 * (run.input_grads[name] * along).sum(), rise, rtol=1e-5, atol=0)
    assert all(g.make().abs().max() > 0 for g in run.param_grads.values())


def test_buffers_and_constants_have_the_models_values():
    model = SOURCE.build()
    state = dict(model.named_buffers())
    found = held_values(GRAPH, SOURCE)
    buffers = {n: GRAPH.tensor[n].fqn for n in found if GRAPH.tensor[n].kind == "buffer"}
    for name, fqn in buffers.items():
        torch.testing.assert_close(found[name], state[fqn].to(found[name].dtype))
    assert {GRAPH.tensor[n].kind for n in found} <= {"buffer", "constant"}


def test_a_local_program_is_compared_with_the_whole_block():
    plan, index, degrees = plan_of("gpt", **OPTIONS), layer(), Degrees(dp=2, tp=2)
    block = facts().first_block(index)

    def check(change):
        own = local_program(cut().graph, plan, index, degrees=degrees, microbatch_size=2)
        return check_class(
            facts().of(index),
            lambda rank: change(own),
            block_placements(GRAPH, plan, block.index, 0),
            degrees,
            draws=nullcontext,
        )

    right = check(lambda program: program)
    assert right.faults == ()
    assert set(right.calls) == set(simulated_mesh(degrees).ranks)
    assert 0 < right.times_rounding < 10

    def scaled(program):
        at, op = next((i, o) for i, o in enumerate(program.ops) if "attention" in o.target)
        changed = replace(op, kwargs=(*op.kwargs, ("scale", 0.25)))
        return replace(program, ops=(*program.ops[:at], changed, *program.ops[at + 1 :]))

    assert "differs by" in check(scaled).faults[0]


# ------------------------------------------------------------------------ handovers and words


def test_what_goes_between_blocks_arrives():
    plan, edges = plan_of("gpt", **OPTIONS), derived().edges
    found = handovers(GRAPH, plan, edges)
    assert sum(each.edge is not None for each in found) == len(edges) == 1
    routes = derived().routes
    assert [
        f for each, name in found.items() for f in check_handover(each, name, plan, routes)
    ] == []
    (between,) = (each for each in found if each.edge is not None)
    lies = replace(between.edge, taken=between.edge.taken.on("tp", Shard(2)))
    broken = replace(between, edge=replace(lies, sent=lies.sent.on("tp", Shard(1))))
    assert check_handover(broken, found[between], plan, routes)


def test_what_is_not_shown_is_said():
    plan = plan_of("gpt", **OPTIONS)
    said = " ".join(unproven(plan, GRAPH, cut()))
    assert "recomputation" not in said
    again = tuple(s.model_copy(update={"recompute": "full"}) for s in plan.stages)
    other = plan.model_copy(update={"stages": again, "precision": "bf16"})
    said = " ".join(unproven(other, GRAPH, replace(cut(), too_large=((layer(), 2**40),))))
    assert "recomputation in the backward" in said
    assert "bf16" in said
    assert re.search(r"was not run: it takes 1024\S* GiB", said)
    shorter = replace(cut(), length=4, planned_length=8)
    assert any("cut from 8 to 4" in each for each in cuts(plan, GRAPH, shorter))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_the_precision_of_the_run_is_said(dtype):
    plan = plan_of("gpt", **OPTIONS)
    said = " ".join(cuts(plan, GRAPH, replace(cut(), dtype=dtype)))
    assert ("fp64" if dtype == "float64" else "fp32") in said
