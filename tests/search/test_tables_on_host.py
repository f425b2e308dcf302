"""M27: tables go to the host where nothing fits without, and stay on devices with room for them."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from profiles import Profile, load_profile
from search import SearchRequest, SearchResult, find_plan
from search.on_host import offload_fallbacks
from tests.builders import PlainGPT, gpt_batch
from tests.captures import capture_module
from tests.costmodel.test_tables import TABLES, WIDTH, batch
from tests.runtime.test_sparse_tables import Towers

GIB = 2**30


@cache
def graph(rows: int = 4_000_000) -> ModelGraph:
    with torch.device("meta"):
        module = Towers(rows=rows, width=WIDTH)
    return capture_module(module, batch(2), batch(3), name="recommender")


@cache
def h100() -> Profile:
    return load_profile("h100-sxm5-80gb")


def asked(**choices) -> SearchResult:
    return find_plan(graph(), h100(), SearchRequest(num_devices=2, global_batch=64, **choices))


def test_a_budget_too_small_for_tables_gets_a_plan_with_them_on_the_host():
    """Two tables of 256 MB, with gradients and two moments, under 2.1 GiB, of which 2 are the
    context's, and under 80 GiB."""
    small = asked(memory_limit_bytes=int(2.1 * GIB)).plan
    assert small.on_host == ("tables",)
    assert small.tables_on_host == TABLES
    assert small.estimate["peak_bytes"] <= 2.1 * GIB
    on_host = max(rank["host_bytes"] for rank in small.estimate["memory"])
    assert on_host >= 3 * 2 * 4_000_000 * 16 * 4 / small.tp
    large = asked().plan
    assert large.on_host == ()
    assert Plan.model_validate(small.model_dump(mode="json")) == small
    assert small.model.fingerprint == large.model.fingerprint == graph().fingerprint


def test_none_forbids_and_tables_forces():
    assert asked(offload="none", memory_limit_bytes=int(2.1 * GIB)).plan is None
    forced = asked(offload="tables").plan
    assert forced.on_host == ("tables",)
    both = asked(offload="both", dp=2).plan
    assert both.on_host == ("tables", "optimizer", "activations")


def test_zero_goes_with_tables_on_the_host_and_on_devices():
    assert asked(offload="tables", dp=2, zero=3).plan.zero_stage == 3
    assert asked(offload="none", dp=2, zero=3).plan.zero_stage == 3


def test_a_model_without_sparse_tables_has_none_to_move():
    gpt = capture_module(PlainGPT(layers=2), gpt_batch(2), gpt_batch(3))
    kinds = [kind for kinds in offload_fallbacks("auto", h100(), gpt) for kind in kinds]
    assert not any(kind.tables for kind in kinds)
    with pytest.raises(LayoutError, match=r"`offload` tables was given, and the model has no"):
        find_plan(gpt, h100(), SearchRequest(num_devices=2, global_batch=8, offload="tables"))
