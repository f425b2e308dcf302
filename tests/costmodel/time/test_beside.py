"""Weight gradients beside collectives: what shows of these, and what no later job makes (D18)."""

from __future__ import annotations

import pytest

from costmodel import CostCache
from costmodel.execution import find_execution
from costmodel.time.block.compute import op_seconds, redistribute_seconds
from costmodel.topology import lowered_groups
from planner.language.layout.axes import Degrees
from planner.language.layout.redistribute import REDISTRIBUTE
from planner.language.lowering.defaults import default_plan
from planner.language.ops.weight_products import products_beside
from tests.cpu_profile import CpuProfile
from tests.runtime.scenarios import capture
from tests.search.machine import Machine

TP = Degrees(tp=2)


def layer_of(graph):
    """The class of a GPT's layers."""
    return graph.blocks[1].class_index


def priced(profile, *, beside, execution="ours-eager"):
    graph = capture("small-gpt")
    plan = default_plan(graph, tp=2)
    layer = layer_of(graph)
    layouts = tuple(layout for layout in plan.layouts if layout.class_index == layer)
    costs = CostCache(graph, profile, execution=find_execution(execution))
    times = costs.block(layer, 8, TP, layouts, beside=beside).times
    return costs.local(layer, 8, TP, layouts), times


def test_products_wait_for_the_next_sum_of_the_backward():
    """Of a layer on tp the MLP's two for the sum of its input's gradient, then attention's."""
    local, _ = priced(Machine(), beside=False)
    found = products_beside(local)
    order = [op.name for op in local.ops]
    waited = [name for names in found.values() for name in names]
    assert [len(names) >= 2 for names in found.values()] == [True, True]
    assert len(waited) == len(set(waited))
    for name, products in found.items():
        # The backward comes to them before it comes to the redistribution, last first.
        places = [order.index(product) for product in products]
        assert places == sorted(places, reverse=True)
        assert order.index(name) < min(places)


@pytest.mark.parametrize("intra_bytes_per_s", [1e6, 3e8, 1e9, 3e9, 1e12])
def test_what_outlasts_the_products_shows(intra_bytes_per_s):
    """max(0, s - C) of each, by hand from the seconds of single ops."""
    machine = Machine(flop_per_s=1e10, bytes_per_s=1e15, intra_bytes_per_s=intra_bytes_per_s)
    local, alone = priced(machine, beside=False)
    _, beside = priced(machine, beside=True)
    axes = lowered_groups(machine.cluster, TP)
    ops, products = {op.name: op for op in local.ops}, products_beside(local)
    shows_s = weight_s = 0.0
    for op in local.ops:
        if op.target != REDISTRIBUTE:
            continue
        _, collective_s = redistribute_seconds(op, local.tensor, machine, axes)
        beside_s = sum(
            op_seconds(ops[name], local.tensor, machine)[1] / 2
            for name in products.get(op.name, ())
        )
        shows_s += max(0.0, collective_s - beside_s)
        weight_s += beside_s
    assert beside.comm_backward_s == pytest.approx(shows_s, rel=1e-9, abs=1e-15)
    assert beside.comm_backward_s <= alone.comm_backward_s
    # No later job makes those: what may be deferred is less, what a backward computes is not.
    assert alone.weight_s - beside.weight_s == pytest.approx(weight_s)
    same = ("forward_s", "backward_s", "comm_forward_s", "recomputed_s", "rerun_s")
    assert all(getattr(alone, name) == getattr(beside, name) for name in same)


def test_a_cpu_hides_nothing():
    _, alone = priced(CpuProfile(), beside=False)
    _, beside = priced(CpuProfile(), beside=True)
    assert beside.comm_backward_s == alone.comm_backward_s
    assert beside.weight_s < alone.weight_s


@pytest.mark.parametrize(("kernels", "launches"), [("ours-eager", 0), ("ours-compiled", 1)])
def test_each_cut_of_a_compiled_backward_is_a_launch_more(kernels, launches):
    """The host alone takes time: a launch of 1 s, beside which all else is nothing."""
    machine, how = Machine(launch_overhead_s=1.0), kernels
    local, alone = priced(machine, beside=False, execution=how)
    _, beside = priced(machine, beside=True, execution=how)
    cuts = len(products_beside(local))
    assert cuts > 1
    rise_s = beside.backward_s - alone.backward_s
    assert rise_s == pytest.approx(launches * cuts, abs=1e-3)
