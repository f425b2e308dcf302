"""A question searched and drawn: first what a moment finds, then the proved best.

A search that lasts longer than a moment is looked at once for a first answer and goes on. Models,
machines and the prices of blocks are kept from question to question.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from commands.common.answering import answer_of, predict_result
from commands.common.inputs import graph_of, profile_named
from commands.page.asked import Asked
from commands.page.fields import CHOICES
from commands.render.flags import with_flags
from commands.render.html.chart import Chart
from commands.render.html.page import fill_template, render_report, words_of
from commands.render.html.timeline_charts import memory_chart, timeline_chart
from commands.render.plans.answer import Answer, bottleneck_in_words, proof_in_words
from commands.render.plans.words import labelled
from costmodel import CostCache
from costmodel.memory.bound import NOTHING
from planner.errors import LayoutError
from planner.language.graph import ModelGraph
from planner.language.plan import Plan
from planner.language.templates import build_transformer
from profiles import Profile
from profiles.link_rates import with_link_rate
from search import FirstLook, KeptCandidates, SearchResult
from search.report.report_numbers import ReportNumbers, gather_report
from search.result_cache import find_plan_once

MOMENT_S = 0.4
"""After which a search that is not done shows the best so far: with what it takes to draw it,
within a second."""
MOST_KEPT = 8
"""Models and machines that are kept."""

Tell = Callable[[float, str], None]
"""Called with the fraction done and what is being done; may raise to stop."""
Message = dict[str, Any]
"""What the page gets: {"kind": "answer", ...} or {"kind": "nothing fits", ...}."""

_Kept = TypeVar("_Kept")


class Answerer:
    """Answers questions one after another, each the quicker for those before. Mutable."""

    def __init__(self, *, time_limit_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._candidates = KeptCandidates(most=MOST_KEPT)
        self._graphs: OrderedDict[Hashable, ModelGraph] = OrderedDict()
        self._profiles: OrderedDict[Hashable, Profile] = OrderedDict()

    def answer(self, asked: Asked, tell: Tell, show: Callable[[Message], None]) -> None:
        """Show the answer after a moment, if the search is not done then, and the last one.

        Raises PlannerError for a question that has no meaning.
        """
        started = time.perf_counter()
        graph, profile = self._read(asked, tell)
        tell(0.0, "searching")

        def draw(result: SearchResult, *, is_last: bool) -> None:
            show(self._drawn(asked, graph, profile, result, is_last=is_last, started=started))

        look = FirstLook(after_s=MOMENT_S, show=partial(draw, is_last=False))
        result = self._search(asked, graph, profile, tell, first_look=look)
        if result.plan is None:
            show({"kind": "nothing fits", "reasons": [with_flags(text) for text in result.reasons]})
        else:
            draw(result, is_last=True)

    def report(self, asked: Asked, tell: Tell) -> str:
        """Return the full report of a question's plan, as `planner show --html` writes it."""
        return render_report(self._numbers(asked, tell)[1])

    def plan(self, asked: Asked, tell: Tell) -> str:
        """Return the plan as `planner search` writes it."""
        from planner.language.plan.files import plan_text

        return plan_text(self._numbers(asked, tell)[0].plan)

    def _numbers(self, asked: Asked, tell: Tell) -> tuple[Answer, ReportNumbers]:
        graph, profile = self._read(asked, tell)
        result = self._search(asked, graph, profile, tell)
        if result.plan is None:
            raise LayoutError(result.reasons[0])
        return self._priced(asked, graph, profile, result, result.plan)

    def _read(self, asked: Asked, tell: Tell) -> tuple[ModelGraph, Profile]:
        machine = _kept(
            self._profiles, asked.profile, lambda: profile_named(asked.profile or None)[0]
        )
        profile = _kept(
            self._profiles,
            (asked.profile, asked.link_rate),
            lambda: with_link_rate(machine, asked.link_rate),
        )
        if (sizes := asked.sizes) is not None:
            return (
                _kept(self._graphs, sizes, lambda: build_transformer(sizes)),
                profile,
            )
        assert asked.model is not None, "what has no sizes has a file"
        tell(0.0, f"reading {asked.model_given}")
        # Kept on disk until the file changes: what is read again is the same graph, another object.
        graph = graph_of(asked.model, asked.request.precision, asked.length)
        key = asked.model, asked.request.precision, asked.length, graph.fingerprint
        return _kept(self._graphs, key, lambda: graph), profile

    def _search(
        self,
        asked: Asked,
        graph: ModelGraph,
        profile: Profile,
        tell: Tell,
        first_look: FirstLook | None = None,
    ) -> SearchResult:
        return find_plan_once(
            graph,
            profile,
            replace(asked.request, model_file=asked.model_given, time_limit_s=self._time_limit_s),
            progress=tell,
            candidates_of=self._candidates,
            first_look=first_look,
        )

    def _costs(self, asked: Asked, graph: ModelGraph, profile: Profile) -> CostCache:
        request = replace(asked.request, model_file=asked.model_given)
        return self._candidates(graph, profile, request, NOTHING).costs

    def _priced(
        self, asked: Asked, graph: ModelGraph, profile: Profile, result: SearchResult, plan: Plan
    ) -> tuple[Answer, ReportNumbers]:
        costs = self._costs(asked, graph, profile)
        predicted = predict_result(graph, profile, asked.request, plan, costs=costs)
        answer = answer_of(
            predicted, asked.request, result, model=asked.model_given, out=Path("plan.json")
        )
        numbers = gather_report(answer.plan, costs, predicted.estimate, answer.overview.interval)
        return answer, numbers

    def _drawn(
        self,
        asked: Asked,
        graph: ModelGraph,
        profile: Profile,
        result: SearchResult,
        *,
        is_last: bool,
        started: float,
    ) -> Message:
        assert result.plan is not None
        answer, numbers = self._priced(asked, graph, profile, result, result.plan)
        return draw(asked, answer, numbers, is_last=is_last) | {
            "seconds": time.perf_counter() - started
        }


def draw(asked: Asked, answer: Answer, numbers: ReportNumbers, *, is_last: bool) -> Message:
    """Return an answer as the page shows it."""
    overview = answer.overview
    charts: list[Chart] = [timeline_chart(numbers.predicted, ())]
    charts.append(memory_chart(numbers.memory, overview.limit_bytes))
    longest = max(labelled(overview.path.parts), key=lambda part: part[2])
    values = {
        **words_of(numbers),
        "charts": {chart.name: chart for chart in charts},
        "is_last": is_last,
        "bottleneck": bottleneck_in_words(overview),
        "longest": longest[:2],
        "longest_share": f"{longest[2] / overview.step_s:.1%}",
        "certificate": with_flags(proof_in_words(answer.result)),
        "warnings": [with_flags(warning) for warning in answer.warnings],
        "has_pipeline": numbers.plan.pp > 1,
        "command": asked.command,
    }
    return {
        "kind": "answer",
        "is_last": is_last,
        "head": fill_template("head.html.j2", "commands.page", **values),
        "rest": fill_template("rest.html.j2", "commands.page", **values),
        "figures": {chart.name: chart.figure for chart in charts},
        "choices": {chart.name: chart.choice.traces for chart in charts if chart.choice},
        "details": values["model"]["details"],
        "chosen": chosen_of(answer.plan),
        "numbers": {
            "step_s": overview.step_s,
            "samples_per_s": overview.samples_per_s,
            "tokens_per_s": overview.tokens_per_s,
            "mfu": overview.mfu,
            "peak_bytes": overview.peak_bytes,
        },
    }


def chosen_of(plan: Plan) -> dict[str, str]:
    """Return what a plan has of each choice of the form."""
    experts = plan.estimate.get("experts")
    own: dict[str, Any] = {
        **plan.degrees,
        "ep": plan.degrees["ep"],
        "pp": plan.pp,
        "vpp": plan.vpp,
        "expert_imbalance": f"{experts['imbalance']:g}" if experts else "no exchange",
        "microbatch_size": plan.microbatch_size,
        "schedule": plan.schedule if plan.pp > 1 else "no pipeline",
        "zero": plan.zero_stage if plan.degrees.along("data") > 1 else "one copy",
        "recompute": " or ".join(sorted(set(plan.recompute_by_block))),
        "offload": " and ".join(plan.on_host) or "none",
        "precision": plan.precision,
        "execution": plan.execution,
        "accept": " and ".join(plan.accept) or "nothing",
    }
    return {field.name: str(own[field.name]) for field in CHOICES}


def _kept(kept: OrderedDict[Hashable, _Kept], key: Hashable, make: Callable[[], _Kept]) -> _Kept:
    """Return what was made under a key, made now if it was not; the oldest are let go."""
    if key not in kept:
        kept[key] = make()
    kept.move_to_end(key)
    while len(kept) > MOST_KEPT:
        kept.popitem(last=False)
    return kept[key]
