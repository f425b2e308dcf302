"""When a search has losses make their logits in chunks (`SearchRequest.logits`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from costmodel import CostCache
from costmodel.execution import find_execution
from costmodel.memory.bound import NOTHING, OnHost
from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.lowering.passes.losses_in_chunks import is_of_a_product
from profiles import Profile
from search.request import Logits, SearchRequest

Tried = tuple[OnHost, Logits]
"""What plans put on the host, and how they have logits."""


def may_be_in_chunks(graph: ModelGraph) -> bool:
    """Whether a loss of a model is of the results of a product alone, of whole tensors."""
    return any(is_of_a_product(program.bind(1)) for program in graph.classes)


def check_chunks(costs: CostCache) -> None:
    """Raise LayoutError where chunks are asked for, and plans can't have them."""
    if costs.execution.prices != "profile":
        raise LayoutError(
            f"`logits` chunked was given, and {costs.execution.name} has losses of its own; plan "
            "for this project's runtime, or leave it out"
        )
    if not may_be_in_chunks(costs.graph):
        raise LayoutError(
            "`logits` chunked was given, and no loss of the model is a cross entropy of what a "
            "linear layer makes for it alone; leave it out"
        )


def with_logits(
    fallbacks: Iterable[tuple[OnHost, ...]],
    graph: ModelGraph,
    profile: Profile,
    request: SearchRequest,
) -> Iterator[tuple[Tried, ...]]:
    """Yield what to try in turn until a plan fits, of what to put on the host in turn.

    Chunks take a product more in a backward, copies to a host mostly longer: so they come before
    anything is on the host, and then where they are faster.
    """
    # (Stages that each had their own choice are not searched.)
    is_one_choice = request.meshes == "same" and not profile.groups
    is_ours = find_execution(request.execution).prices == "profile"
    asked = request.logits == "auto" and is_one_choice and is_ours
    falls_back = asked and may_be_in_chunks(graph)
    for fallback in fallbacks:
        if not falls_back:
            yield tuple((on_host, request.logits) for on_host in fallback)
        elif fallback == (NOTHING,):
            yield ((NOTHING, "whole"),)
            yield ((NOTHING, "chunked"),)
        else:
            yield tuple((on_host, "either") for on_host in fallback)
