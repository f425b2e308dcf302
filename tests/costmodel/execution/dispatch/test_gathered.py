"""B11: Tokens gathered over ep: what they take, by hand, and which form a search takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.cache import CostCache
from costmodel.execution.dispatch.choice import GATHERED
from costmodel.execution.dispatch.dispatcher import find_dispatcher
from costmodel.execution.dispatch.exchange import exchange_seconds, exchanges_of
from costmodel.topology import lowered_groups
from planner.language.graph import ModelGraph
from planner.language.layout.axes import Degrees
from planner.language.lowering.experts import gathered_layout
from planner.language.templates import Experts, Transformer, build_transformer
from profiles import load_profile
from search import SearchRequest, find_plan

TOKENS, HIDDEN = 1024, 512


def routed(per_token: int) -> ModelGraph:
    model = Transformer(
        layers=4, hidden=HIDDEN, heads=8, kv_heads=8, ffn_hidden=1024, vocab=1024, seq_len=TOKENS,
        experts=Experts(number=16, per_token=per_token, width=256), code="huggingface",
    )  # fmt: skip
    return build_transformer(model)


def test_seconds_are_those_of_the_tokens_of_all_ranks() -> None:
    graph, profile, ep = routed(8), load_profile("h100-sxm5-80gb"), 4
    costs = CostCache(graph, profile)
    layout = gathered_layout(graph.classes[1], 1)
    assert layout is not None
    degrees = Degrees(dp=ep, ep=ep)
    local = costs.local(1, 1, degrees.with_sizes(dp=1), (layout,))
    axis = lowered_groups(profile.cluster, degrees)["ep"]
    there, back = exchanges_of(local)

    def seconds(kind: str, num_bytes: int) -> float:
        return profile.collective_seconds(kind, num_bytes, axis.group).seconds

    tokens = ep * local.tensor[there.inputs[0]].bytes_at(1)
    numbers = ep * TOKENS * 8 * 8  # of experts, 8 bytes each
    weights = ep * local.tensor[back.inputs[2]].bytes_at(1)
    dispatcher = find_dispatcher(GATHERED)
    forward, gradient = exchange_seconds(there, local, profile, axis, dispatcher)
    assert forward == pytest.approx(seconds("all_gather", tokens) + seconds("all_gather", numbers))
    assert gradient == pytest.approx(seconds("reduce_scatter", tokens))
    sums = ep * local.tensor[back.outputs[0]].bytes_at(1)
    forward, gradient = exchange_seconds(back, local, profile, axis, dispatcher)
    assert forward == pytest.approx(
        seconds("reduce_scatter", sums) + seconds("all_gather", weights)
    )
    assert gradient == pytest.approx(
        seconds("all_gather", sums) + seconds("reduce_scatter", weights)
    )
    exchanging = costs.local(1, 1, degrees.with_sizes(dp=1), ())
    assert costs.block(1, 1, degrees.with_sizes(dp=1), (layout,)).dispatcher == GATHERED
    assert costs.block(1, 1, degrees.with_sizes(dp=1), ()).dispatcher == "sorted-rows"
    assert [op.target for op in exchanges_of(exchanging)] == ["planner.exchange_rows"] * 2


@pytest.mark.parametrize(
    ("per_token", "ep", "form"),
    [
        # A token has 8 experts on 2 ranks, or 1 on 8: rows are 4 times the tokens, or 1/8.
        (8, 2, GATHERED),
        (1, 8, "sorted-rows"),
    ],
)
def test_a_search_takes_the_form_of_fewer_bytes(per_token: int, ep: int, form: str) -> None:
    request = SearchRequest(num_devices=8, global_batch=64, precision="bf16", ep=ep, pp=1)
    found = find_plan(routed(per_token), load_profile("a100-sxm4-80gb"), request)
    assert found.plan is not None
    assert found.certificate is not None
    assert found.certificate.gap == 0
    assert found.plan.estimate["experts"]["dispatchers"] == [form]
    assert any(layout.axis == "ep" for layout in found.plan.layouts) == (form == GATHERED)


def test_other_runtimes_have_one_form() -> None:
    request = SearchRequest(num_devices=8, global_batch=64, precision="bf16", ep=2)
    request = replace(request, execution="torchtitan")
    found = find_plan(routed(8), load_profile("a100-sxm4-80gb"), request)
    assert found.plan is not None
    assert all(layout.axis != "ep" for layout in found.plan.layouts)
