"""`planner why`: the plan of the given choices beside the fastest."""

from __future__ import annotations

from dataclasses import replace

from commands.common.inputs import graph_of, profile_named
from commands.common.models import GivenModel
from commands.common.options import JsonOption, spread
from commands.common.question import Question
from commands.render.console import show_json, show_note, show_progress, show_results
from planner.errors import PlannerError


@spread(Question)
@spread(GivenModel)
def why(given: GivenModel, question: Question, as_json: JsonOption = False) -> None:
    """Say why your choices are refused, or slower.

    Example: planner why model.py --gpus 8 --global-batch 64 --tp 8
    """
    from commands.render.data import comparison_data
    from commands.render.plans.search import describe_comparison
    from search.report.explain import compare_choices

    model, question, said = question.with_model(given)
    if len(question.executions) > 1:
        raise PlannerError(
            f"--kernels {question.kernels} was given, and why compares plans of one kind; give "
            "eager or compiled"
        )
    if len(question.precisions) > 1:
        raise PlannerError(
            f"--precision {question.precision} was given, and why compares plans of one precision; "
            f"give one of {', '.join(question.precisions)}"
        )
    request = question.request(model)
    profile, note = profile_named(question.profile, question.cluster)
    with show_progress("comparing") as progress:
        graph = graph_of(model, request.precision)
        request = replace(request, pins=question.pins_in(graph))
        comparison = compare_choices(graph, profile, request, progress)
    for line in (*said, note):
        show_note(line)
    if as_json:
        show_json(comparison_data(comparison))
    else:
        show_results(*describe_comparison(comparison))
