"""A mesh axis is an entry of a table: two more, added here, are planned with and trained with.

`xp` cuts the batch a second time, between replicas that are farther apart than those of dp. `qp`
cuts parameters a second time, outside tp.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from costmodel import estimate
from planner.errors import LayoutError, PlanError
from planner.language.layout import axes
from planner.language.layout.axes import Axis, Degrees, register_axis
from planner.language.layout.placement import Replicate, Shard
from planner.language.layout.placements import Placements, moves_between
from planner.language.lowering.defaults import default_plan
from planner.language.plan import Plan, load_plan, save_plan
from planner.runtime.process.groups.mesh import build_mesh
from search import SearchRequest, find_plan
from tests.runtime.scenarios import Outcome, assert_alike, capture, train_many
from tests.search.machine import Machine
from tests.spawn import run_ranks

RTOL = 1e-10


@contextmanager
def more_axes() -> Iterator[None]:
    before = axes.AXES
    register_axis(
        Axis(name="xp", divides="samples, again", cuts_batch=True, whole_params=True), outside="dp"
    )
    register_axis(
        Axis(name="qp", divides="parameters, again", cuts_batch=False, whole_params=False),
        outside="tp",
    )
    try:
        yield
    finally:
        axes.AXES = before


@pytest.fixture
def registered() -> Iterator[None]:
    with more_axes():
        yield


def plan_of(name: str = "gpt", **choices: Any) -> Plan:
    return default_plan(capture(name, torch.float64), **choices)


# -- planned ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
def test_its_size_counts_in_a_plan(tmp_path):
    plan = plan_of(xp=2, dp=3, tp=2, microbatch_size=5, num_microbatches=7)
    assert plan.world_size == 12
    assert plan.global_batch == 2 * 3 * 5 * 7
    assert plan.stage_microbatch_size(0) == 5
    save_plan(plan, tmp_path / "plan.json")
    assert json.loads((tmp_path / "plan.json").read_text())["xp"] == 2
    assert load_plan(tmp_path / "plan.json") == plan


def test_a_file_with_an_axis_that_is_not_there_is_refused(tmp_path):
    with more_axes():
        save_plan(plan_of(xp=2), tmp_path / "plan.json")
    with pytest.raises(PlanError, match="damaged at xp"):
        load_plan(tmp_path / "plan.json")


def test_a_file_older_than_the_axis_means_one(tmp_path):
    save_plan(plan_of(dp=2), tmp_path / "plan.json")
    with more_axes():
        plan = load_plan(tmp_path / "plan.json")
        assert (plan.degrees["xp"], plan.degrees["dp"]) == (1, 2)


@pytest.mark.parametrize(("size", "says"), [(0, "greater than or equal to 1"), ("x", "integer")])
def test_a_size_must_be_a_count(tmp_path, size, says):
    with more_axes():
        save_plan(plan_of(xp=2), tmp_path / "plan.json")
        data = json.loads((tmp_path / "plan.json").read_text())
        (tmp_path / "plan.json").write_text(json.dumps(data | {"xp": size}))
        with pytest.raises(PlanError, match=f"damaged at xp.*{says}"):
            load_plan(tmp_path / "plan.json")


@pytest.mark.usefixtures("registered")
def test_its_ranks_are_the_farthest_apart():
    """rank = ((xp_rank * dp + dp_rank) * qp + qp_rank) * tp + tp_rank."""
    mesh = plan_of(xp=2, dp=2, tp=2).mesh(0)
    assert list(mesh.groups("tp")) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert list(mesh.groups("xp")) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert list(mesh.groups(*axes.members("data"))) == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert [mesh.number(rank, *axes.members("batch")) for rank in range(8)] == [
        *(0, 0, 1, 1),
        *(2, 2, 3, 3),
    ]


def test_an_axis_without_a_table_entry_has_no_size():
    with pytest.raises(LayoutError, match="mesh axis 'xp' is unknown; axes are rp, dp, cp, hp, tp"):
        Degrees(xp=2)


def test_a_name_is_taken_once():
    again = Axis(name="dp", divides="", cuts_batch=True, whole_params=True)
    with pytest.raises(LayoutError, match="'dp' is there already"):
        register_axis(again, outside="tp")


def test_who_takes_other_samples_needs_all_parameters():
    with pytest.raises(LayoutError, match="needs all parameters"):
        Axis(name="yp", divides="", cuts_batch=True, whole_params=False)


@pytest.mark.usefixtures("registered")
def test_a_coarse_cut_changes_while_nothing_finer_cuts_the_dim():
    """tp cuts first, then qp, then cp: the order of lowering."""
    src = Placements.of({"tp": Shard(1), "qp": Shard(1), "cp": Shard(1)})
    dst = Placements.of({"tp": Replicate(), "qp": Shard(0), "cp": Shard(1)})
    assert [(m.axis, str(m.src), str(m.dst)) for m in moves_between(src, dst)] == [
        ("cp", "S(1)", "R"),
        ("qp", "S(1)", "R"),
        ("tp", "S(1)", "R"),
        ("qp", "R", "S(0)"),
        ("cp", "R", "S(1)"),
    ]


# -- priced -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("choices", [{}, {"zero_stage": 1}, {"zero_stage": 3}, {"pp": 2}], ids=str)
def test_a_second_cut_of_the_batch_costs_what_one_of_both_sizes_does(choices):
    """The same ranks take the same samples, and sum gradients over the same group; stages send
    between nodes of four.
    """
    graph, machine = capture("gpt", torch.float32), Machine(devices_per_node=4)
    both, alone = (
        estimate(graph, machine, default_plan(graph, **sizes, **choices))
        for sizes in ({"xp": 2, "dp": 2, "tp": 2}, {"dp": 4, "tp": 2})
    )
    assert both.to_dict() == alone.to_dict()
    single = estimate(graph, machine, default_plan(graph, tp=2, **choices))
    assert both.step_s > single.step_s, "the sum over four ranks takes its time"


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("choices", [{}, {"dp": 2, "zero_stage": 1}], ids=str)
def test_an_axis_that_blocks_are_lowered_on_costs_what_tp_does(choices):
    """Ranks as near to each other hold the same pieces and exchange the same values."""
    graph, machine = capture("gpt", torch.float32), Machine(devices_per_node=2)
    on_hp, on_tp = (
        estimate(graph, machine, default_plan(graph, **sizes, **choices))
        for sizes in ({"qp": 2}, {"tp": 2})
    )
    assert on_hp.to_dict() == on_tp.to_dict()


@pytest.mark.usefixtures("registered")
def test_the_outer_of_two_axes_has_the_slower_links():
    """qp is outside tp: between nodes of two. Both cut parameters, each a part of them."""
    graph = capture("gpt", torch.float32)
    near, far = (
        estimate(graph, Machine(devices_per_node=count), default_plan(graph, qp=2, tp=2))
        for count in (4, 2)
    )
    assert far.step_s > near.step_s
    alone = estimate(graph, Machine(), default_plan(graph, tp=2))
    assert near.memory[0].parameter_bytes < alone.memory[0].parameter_bytes


# -- searched ---------------------------------------------------------------------------------


def search(**choices: Any) -> Plan:
    graph = capture("gpt", torch.float32)
    found = find_plan(graph, Machine(), SearchRequest(num_devices=4, global_batch=8, **choices))
    assert found.plan is not None
    return found.plan


def test_a_search_honours_its_size():
    """The best plan is as good as with one cut, and its file trains (`planner.apply`)."""
    with more_axes():
        found, alone = search(axes=(("xp", 2),), tp=1), search(tp=1)
        assert found.degrees["xp"] == 2
        assert found.degrees.along("batch") == alone.degrees.along("batch") == 4
        assert found.estimate["step_s"] == alone.estimate["step_s"]
        assert Plan.model_validate_json(found.model_dump_json()) == found


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("tp", [1, 2])
def test_a_search_places_what_is_lowered_on_it(tp):
    """Its answer is the estimate of its plan, which trains: ZeRO takes one axis that cuts."""
    found = search(axes=(("qp", 2),), tp=tp)
    assert (found.degrees["qp"], found.degrees["tp"]) == (2, tp)
    assert {layout.axis for layout in found.layouts} == ({"qp", "tp"} if tp > 1 else {"qp"})
    assert found.zero_stage == 0 or tp == 1
    again = estimate(capture("gpt", torch.float32), Machine(), found)
    assert again.step_s == pytest.approx(found.estimate["step_s"])


@pytest.mark.usefixtures("registered")
def test_a_search_that_is_not_given_its_size_takes_one():
    assert search().degrees["xp"] == 1


@pytest.mark.usefixtures("registered")
def test_sizes_that_do_not_go_together_are_refused():
    with pytest.raises(LayoutError, match=r"xp=3 does not divide `num_devices` 4"):
        search(axes=(("xp", 3),))
    with pytest.raises(
        LayoutError, match=r"rp \* xp \* dp \* cp \* hp \* qp \* tp \* pp must equal 4"
    ):
        search(axes=(("xp", 2),), dp=4)
    with pytest.raises(LayoutError, match="an axis that has a field here is fixed by it"):
        search(axes=(("dp", 2),))


# -- trained ----------------------------------------------------------------------------------


def train_with_axes(cases: list[tuple[str, str]]) -> list[Outcome]:
    """Train each (model, plan in JSON) on this process group, with the axes registered."""
    with more_axes():
        return train_many([(name, Plan.model_validate_json(text)) for name, text in cases])


def check(world_size: int, cases: list[tuple[str, dict[str, Any]]]) -> None:
    with more_axes():
        files = [(name, plan_of(name, **choices).model_dump_json()) for name, choices in cases]
    by_case = zip(*run_ranks(train_with_axes, world_size, files), strict=True)
    for case, outcomes in zip(cases, by_case, strict=True):
        assert_alike(outcomes, str(case))


def test_a_second_cut_of_the_batch_trains_as_one_process():
    """Alone, and with ZeRO over it."""
    check(2, [("gpt", {"xp": 2}), ("gpt", {"xp": 2, "zero_stage": 3, "recompute": "full"})])


@pytest.mark.parametrize(
    "layout",
    [
        {"tp": 2, "zero_stage": 1},
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ({"dp": 2, "zero_stage": 1}, {"cp": 2})
        ),
    ],
    ids=str,
)
def test_it_goes_with_the_other_axes(layout):
    check(4, [("gpt", {"xp": 2, **layout})])


def test_tied_weights_on_two_stages_of_it():
    check(4, [("tied-gpt", {"xp": 2, "pp": 2})])


def test_a_second_cut_of_parameters_trains_as_one_process():
    """Pieces of pieces: blocks are lowered on tp, then on qp."""
    check(4, [("gpt", {"qp": 2, "tp": 2}), ("gpt", {"qp": 2, "cp": 2})])


def numbers(text: str) -> tuple[int, ...]:
    """This rank's part of the batch, how many there are, and how many ranks sum gradients."""
    with more_axes():
        mesh = build_mesh(Plan.model_validate_json(text), torch.device("cpu"))
        data = mesh.group("data")
        found = (mesh.rank("batch"), mesh.size("batch"), 0 if data is None else data.size())
        mesh.close()
        return found


def test_gradients_are_summed_over_it():
    with more_axes():
        text = plan_of(xp=2, tp=2).model_dump_json()
    assert run_ranks(numbers, 4, text) == [(0, 2, 2), (0, 2, 2), (1, 2, 2), (1, 2, 2)]
