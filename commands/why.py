"""`planner why`: the plan of the given choices beside the fastest."""

from __future__ import annotations

from dataclasses import replace

from commands.common.inputs import graph_of, profile_named
from commands.common.options import JsonOption, ModelFile, spread
from commands.common.question import Question
from commands.render.console import show_json, show_note, show_progress, show_results


@spread(Question)
def why(model: ModelFile, question: Question, as_json: JsonOption = False) -> None:
    """Say why your choices are refused, or slower.

    Example: planner why model.py --gpus 8 --global-batch 64 --tp 8
    """
    from commands.render.data import comparison_data
    from commands.render.plans.search import describe_comparison
    from search.report.explain import compare_choices

    request = question.request(model)
    profile, note = profile_named(question.profile, question.cluster)
    with show_progress("comparing") as progress:
        graph = graph_of(model, request.precision)
        request = replace(request, pins=question.pins_in(graph))
        comparison = compare_choices(graph, profile, request, progress)
    show_note(note)
    if as_json:
        show_json(comparison_data(comparison))
    else:
        show_results(*describe_comparison(comparison))
