"""What training systems express, by their declarations: schedules, placements, names."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from planner.errors import PlanError
from planner.language.layout.placement import Partial, Replicate, Shard
from planner.language.schedule import build_schedule, find_schedule
from planner.language.schedule.placements import fold_placement, loop_placement
from planner.language.schedule.registry import SCHEDULES
from planner.language.stacks import known  # noqa: F401 - declares them
from planner.language.stacks.rules import (
    why_no_cp,
    why_no_precision,
    why_no_recompute,
    why_no_schedule,
    why_no_zero,
    why_not_beside,
    why_not_counted,
    why_not_microbatches,
    why_not_pieces,
    why_not_placed,
)
from planner.language.stacks.stack import (
    STACKS,
    Stack,
    execution_of,
    register_stack,
    stack_named,
    stack_names,
    stack_of,
)
from planner.language.stacks.tensor_parallel import dim_of

TOY = Stack(
    name="toy",
    title="Toy",
    executions=("toy-runtime",),
    degrees=("dp", "pp"),
    zero_stages=(0, 1, 3),
    zero_beside=(("pp", (0, 1)),),
    schedules=("1f1b", "interleaved_1f1b"),
    whole_groups=True,
    cp_kinds=("ring",),
    cp_pieces=2,
    counts_tokens=True,
)
SIZES = [
    {"pp": pp, "vpp": vpp, "num_microbatches": m}
    for pp, vpp, m in itertools.product((1, 2, 4), (1, 2), (2, 4, 8))
]


def test_a_schedule_is_known_by_its_jobs_whatever_it_is_called():
    """A table is refused where none of the stack's own schedules builds it."""
    refused = 0
    for sizes in SIZES:
        own = [
            build_schedule(name, **sizes).jobs
            for name in TOY.schedules
            if find_schedule(name).why_not(**sizes) is None
        ]
        for name in SCHEDULES:
            if find_schedule(name).why_not(**sizes) is None:
                jobs = build_schedule(name, **sizes).jobs
                why = why_no_schedule(TOY, jobs, **sizes)
                assert (why == "") == (jobs in own), (name, sizes)
                refused += why != ""
    assert refused


@pytest.mark.parametrize("name", sorted(STACKS))
def test_every_stack_has_the_schedules_that_it_declares(name):
    stack = STACKS[name]
    for schedule in stack.schedules or ():
        fitting = [s for s in SIZES if find_schedule(schedule).why_not(**s) is None]
        assert fitting, schedule
        for sizes in fitting:
            jobs = build_schedule(schedule, **sizes).jobs
            assert why_no_schedule(stack, jobs, **sizes) == ""


def test_stages_are_dealt_round_robin_or_in_a_v():
    anything = replace(TOY, schedules=None)
    for pp, vpp in itertools.product((1, 2, 3), (1, 2, 3)):
        loop = loop_placement(pp, vpp)
        assert not why_not_placed(TOY, loop, pp=pp, vpp=vpp)
        if vpp == 2 and pp > 1:
            fold = fold_placement(pp, 2)
            assert not why_not_placed(anything, fold, pp=pp, vpp=2)
            assert "in a V" in why_not_placed(TOY, fold, pp=pp, vpp=2)
        if pp > 1:
            assert why_not_placed(anything, loop[::-1], pp=pp, vpp=vpp) or vpp == 2


def test_stages_of_zero_alone_and_beside_a_feature():
    assert why_no_zero(TOY, 2) == "Toy has ZeRO 0, 1 and 3"
    assert why_no_zero(TOY, 3) == ""
    assert why_not_beside(TOY, "pp", 3) == "Toy has this beside ZeRO 0 and 1 alone"
    assert why_not_beside(TOY, "pp", 2) == ""  # refused as such
    assert why_not_beside(TOY, "cp", 3) == ""


def test_sizes_that_have_to_divide():
    assert why_not_microbatches(TOY, pp=4, vpp=2, num_microbatches=6)
    assert not why_not_microbatches(TOY, pp=4, vpp=1, num_microbatches=6)
    assert not why_not_microbatches(TOY, pp=4, vpp=2, num_microbatches=8)
    for cp, length in itertools.product((1, 2, 3), (8, 12, 15)):
        fits = cp == 1 or length % (2 * cp) == 0
        assert (why_not_pieces(TOY, cp, length) == "") == fits
        assert (why_no_cp(TOY, "ring", cp, length) == "") == fits
    assert "passes keys and values on" in why_no_cp(TOY, "heads", 2, 8)
    assert "its own cut" in why_no_cp(TOY, "striped", 2, 8)
    assert why_not_counted(TOY, 0)
    assert not why_not_counted(TOY, 8)
    assert not why_not_counted(replace(TOY, counts_tokens=False), 0)


@pytest.mark.parametrize(
    ("kinds", "says"),
    [
        (["full", "full"], ""),
        (["none"], ""),
        (["none", "full"], "the same of all stages"),
        (["by layer"], "the same of all layers"),
        (["selective"], "recomputes of layers none and full"),
    ],
)
def test_recomputation_is_the_same_everywhere(kinds, says):
    why = why_no_recompute(TOY, kinds)
    assert says in why
    assert bool(says) == bool(why)


def test_dtypes_that_are_kept():
    assert why_no_precision(TOY, "bf16", "float16") == ""
    assert why_no_precision(TOY, "model", "float32") == ""
    assert "beside bf16 alone" in why_no_precision(TOY, "fp16", "float16")
    assert why_no_precision(replace(TOY, precisions=("bf16", "fp16")), "fp16", "float16") == ""
    assert "has no products in 8-bit floats scaled as fp8 scales them" in why_no_precision(
        TOY, "fp8", "bfloat16"
    )
    assert "float32 alone is kept" in why_no_precision(TOY, "model", "float16")
    assert "none is kept" in why_no_precision(replace(TOY, own_dtypes=()), "model", "float16")


def test_names_and_executions_are_of_one_stack(monkeypatch):
    for stack in list(STACKS.values()):
        assert all(stack_of(execution) is stack for execution in stack.executions)
        for name in (stack.name, *stack.aliases):
            assert stack_named(name) is stack
            assert stack_of(execution_of(name)) is stack
    assert execution_of("anything else") == "anything else"
    assert stack_named("anything else") is stack_of("anything else") is None
    monkeypatch.setattr("planner.language.stacks.stack.STACKS", dict(STACKS))
    register_stack(TOY)
    assert "toy" in stack_names()
    for taken in (
        replace(TOY, name="other"),
        replace(TOY, name="other", executions=(), aliases=("toy",)),
    ):
        with pytest.raises(PlanError, match=r"has the name 'toy.*which stack 'toy' has already"):
            register_stack(taken)


def test_features_follow_from_what_is_declared():
    assert {"pp", "cuts", "schedule", "zero"} <= TOY.features
    assert not {"layouts", "stage-placement", "tables-on-host"} & TOY.features
    assert "stage-placement" in replace(TOY, schedules=None).features
    assert "tables-on-host" in replace(TOY, on_host=("tables",)).features


def test_the_dim_that_a_placement_splits():
    assert [dim_of(p) for p in (Shard(2), Replicate(), Partial())] == [2, None, None]
