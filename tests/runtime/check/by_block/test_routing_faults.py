"""N6: faults of rows that each rank routes itself are found in the blocks with experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from planner.language.graph import Program
from planner.language.lowering.lowering import local_program
from planner.runtime.proofs.by_block import blocks
from planner.runtime.proofs.by_block.prove import Derived, prove
from planner.runtime.proofs.by_block.report import Part
from planner.runtime.stage.calls import local_ops
from planner.runtime.stage.program_fx import to_graph_module
from tests.routing_faults import ends_of_all_rows, in_the_order_of_experts, router_without_its_sum
from tests.runtime.scenarios import capture, models
from tests.runtime.test_experts import plan_of, with_own_rows
from tests.runtime.test_verify_faults import source_of

MODEL = "biased-routed-gpt"


@cache
def plan() -> Any:
    return with_own_rows(plan_of(MODEL, tp=2), MODEL)


def blocks_of(change: Callable[[Derived], Derived] = lambda derived: derived) -> Part:
    """The part of the proof that runs each block on its ranks."""
    source = source_of(models()[MODEL].build, models()[MODEL].batch)
    proof = prove(plan(), capture(MODEL, torch.float64), source, change=change)
    return next(part for part in proof.parts if part.name.startswith("blocks"))


def test_rows_of_each_ranks_own_are_proven() -> None:
    assert not blocks_of().faults


@pytest.mark.parametrize(
    ("name", "broken"),
    [("sort_rows", ends_of_all_rows), ("unsort_rows", in_the_order_of_experts)],
)
def test_a_fault_of_an_op_is_found_in_the_block_with_experts(monkeypatch, name, broken) -> None:
    """Ranks run the broken op; the whole block beside them the right one."""

    def broken_program(*given: Any) -> Any:
        with mock.patch.object(local_ops, name, broken):
            return to_graph_module(*given)

    monkeypatch.setattr(blocks, "to_graph_module", broken_program)
    assert any(re.search(r"output .* of block class layers", fault) for fault in blocks_of().faults)


def test_a_router_without_the_sum_of_its_gradients_is_named() -> None:
    def local(graph, plan, index, degrees, size, rank) -> Program:
        own = local_program(graph, plan, index, degrees=degrees, microbatch_size=size)
        return router_without_its_sum(own) if "layers" in own.name else own

    found = blocks_of(lambda derived: replace(derived, local=local)).faults
    assert any(re.search(r"gradient.*router", fault) for fault in found)
