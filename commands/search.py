"""`planner search`: the fastest plan that fits, and its certificate."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress, product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commands.common.answering import answer_of, predict_result
from commands.common.inputs import (
    graph_of,
    machine_options,
    parse_price,
    parse_seconds,
    profile_named,
)
from commands.common.models import GivenModel
from commands.common.options import (
    CHOICES,
    COMPARED,
    SEARCHING,
    JsonOption,
    PriceOption,
    spread,
)
from commands.common.question import Question, parse_choices, parse_counts
from commands.render.console import (
    check_writable,
    show_json,
    show_note,
    show_progress,
    show_results,
    show_written,
)
from planner.errors import CaptureError, PlannerError
from planner.files import write_atomically
from planner.units import format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from planner.language.graph import ModelGraph
    from planner.language.plan import Precision
    from profiles import Profile
    from search import Point, SearchRequest, SearchResult


_ENDS = "ending with the best plan so far; Ctrl-C again gives up"


@spread(Question)
@spread(GivenModel)
def search(
    given: GivenModel,
    question: Question,
    out: Annotated[Path, typer.Option(help="Where to write the plan.")] = Path("plan.json"),
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Search only these, such as schedule=1f1b,zb_v or cp=1,2. Repeatable.",
            rich_help_panel=CHOICES,
        ),
    ] = None,
    forbid: Annotated[
        list[str] | None,
        typer.Option(
            help="Rule a choice out, such as schedule=zb_v or tp=8. Repeatable.",
            rich_help_panel=CHOICES,
        ),
    ] = None,
    solver: Annotated[
        str,
        typer.Option(
            help="Of stage boundaries: dp, recursive or ilp; ilp also places ops inside blocks.",
            rich_help_panel=SEARCHING,
        ),
    ] = "dp",
    pareto: Annotated[
        Path | None,
        typer.Option(
            help="Also write plans that trade time for memory, as JSON.", rich_help_panel=COMPARED
        ),
    ] = None,
    pareto_gpus: Annotated[
        str | None,
        typer.Option(
            help="Compare these numbers of devices too, such as 2,4,8.", rich_help_panel=COMPARED
        ),
    ] = None,
    price: PriceOption = None,
    gap: Annotated[
        float,
        typer.Option(
            help="Stop when proved within this fraction of the best.", rich_help_panel=SEARCHING
        ),
    ] = 0.0,
    time_limit: Annotated[
        str | None,
        typer.Option(
            help="Stop after this time, such as 30s, and say how sure; Ctrl-C does so at once.",
            rich_help_panel=SEARCHING,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Plan for batch(size, LENGTH) of these, too, such as 128,256; batch(size) is the "
            "longest."
        ),
    ] = None,
    measure: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Run the best so many for a few steps here; take the fastest.",
            rich_help_panel=SEARCHING,
        ),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            "--cache/--no-cache", help="Keep answers, and use kept ones.", rich_help_panel=SEARCHING
        ),
    ] = True,
    as_json: JsonOption = False,
) -> None:
    """Find the fastest plan that fits, and write it.

    Example: planner search model.py --gpus 8 --global-batch 64
    """
    from commands.common.measured import check_measurable
    from commands.render.data import refused_search
    from commands.render.plans.answer import as_data
    from commands.render.plans.search import describe_advice, describe_pareto
    from costmodel.memory.bound import NOTHING
    from planner.deadline import ends_on_interrupt, is_interrupted, is_late, within
    from planner.language.across.cut.batch_statistics import batch_norm_messages
    from planner.language.across.cut.whole_batch import accepted_messages
    from planner.language.graph.called_modules import called_modules_messages
    from planner.language.lowering.attention_cut import uncut_sequences_messages
    from planner.language.lowering.narrow_products import narrow_messages
    from planner.language.lowering.routed_experts import routing_messages
    from planner.language.ops.held_pairs import held_pairs_messages
    from planner.language.plan import RUNTIME_OF, save_plan
    from planner.language.plan.buckets import check_bucket, with_buckets
    from planner.language.plan.short_sums import short_sums_messages
    from planner.language.stacks import stack_of
    from search import KeptCandidates, find_advice, find_pareto, find_plan_once

    model, question, said = question.with_model(given)
    request = question.request(
        model,
        allow=parse_choices("--allow", allow or ()),
        forbid=parse_choices("--forbid", forbid or ()),
        solver=solver,
        max_gap=gap,
        time_limit_s=parse_seconds(time_limit, "--time-limit"),
        num_best=measure or 1,
    )
    if measure is not None and request.execution not in RUNTIME_OF.values():
        raise PlannerError(
            f"--measure runs plans as {' or '.join(RUNTIME_OF.values())} and --execution "
            f"{request.execution} was given; drop one of them"
        )
    stack = stack_of(request.execution)
    if lengths is not None and stack is not None:
        raise PlannerError(
            f"--lengths {lengths} was given, and plans for {stack.title} have batches of one "
            "shape; drop it, or plan for another --execution"
        )
    check_writable(out, "the plan", (model, given.model))
    check_writable(pareto, "the Pareto set", (model, out))
    counts = parse_counts("--pareto-gpus", pareto_gpus, "numbers of devices, such as 2,4,8")
    sizes = parse_counts("--lengths", lengths, "lengths of sequences, such as 128,256,512")
    per_device_hour = parse_price(price)
    points: tuple[Point, ...] = ()
    candidates = KeptCandidates()
    late = ""
    left_out: list[str] = []
    profile, note = profile_named(question.profile, question.cluster)
    executions = question.executions_on(profile)
    device = None if measure is None else check_measurable(profile, request.num_devices)
    with show_progress("searching") as progress:
        graphs, untried = _graphs(model, question.precisions, profile, request.execution)
        buckets_of = {
            precision: [graph_of(model, precision, length) for length in sizes]
            for precision in graphs
        }
        for precision, graph in graphs.items():
            for bucket in buckets_of[precision]:  # told before a long search
                check_bucket(graph, bucket)
        # The capture is not counted.
        with ends_on_interrupt(lambda: show_note(_ENDS)), within(request.time_limit_s):
            found = []
            for (precision, graph), name in product(graphs.items(), executions):
                pins = question.pins_in(graph)
                asked = replace(request, precision=precision, execution=name, pins=pins)
                found.append((asked, find_plan_once(
                    graph, profile, asked,
                    progress=progress, use_cache=cache, candidates_of=candidates,
                    names_riskier=True,
                )))  # fmt: skip
            request, result = min(found, key=lambda each: _step_s(each[1]))
            graph, buckets = graphs[request.precision], buckets_of[request.precision]
            if result.plan is None and (profile.groups or result.is_out_of_time):
                raise PlannerError(result.reasons[0])
            if result.plan is None:
                advice = find_advice(
                    graph, profile, request, result,
                    recapture=lambda precision: graph_of(model, precision), progress=progress,
                )  # fmt: skip
            elif pareto or pareto_gpus or per_device_hour:
                points = find_pareto(
                    graph, profile, request,
                    num_devices=counts, price_per_device_hour=per_device_hour, progress=progress,
                    leave_out=lambda count, why: left_out.append(f"--pareto-gpus {count}: {why}"),
                )  # fmt: skip
                if is_late():
                    late = (
                        "interrupted" if is_interrupted() else f"--time-limit {time_limit} passed"
                    )
    if result.plan is None:
        limit = request.limit_bytes(profile)
        if as_json:
            show_json(refused_search(result, advice))
        else:
            show_results(*describe_advice(result, advice, limit))
        raise PlannerError(result.reasons[0])
    for line in (*said, note, *untried, *_told(found)):
        show_note(line)
    if device is not None:
        result, trials = _measured(model, graph, request, result, device)
        if not as_json:
            show_results(trials)
    assert result.plan is not None, "there is a plan, or its reasons were told"
    # What the search has priced is not priced again.
    costs = None if result.was_kept else candidates(graph, profile, request, NOTHING).costs
    predicted = predict_result(graph, profile, request, result.plan, costs=costs)
    answer = answer_of(
        predicted, request, result,
        model=given.words, out=out, points=points,
        machine=machine_options(question.profile, question.cluster),
    )  # fmt: skip
    chosen = with_buckets(answer.plan, graph, buckets)
    save_plan(chosen, out)
    for message in (
        *([graph.unit.told] if graph.unit.told else []),
        *batch_norm_messages(graph, chosen),
        *accepted_messages(graph, chosen),
        *short_sums_messages(graph, chosen),
        *narrow_messages(graph),
        *called_modules_messages(graph),
        *held_pairs_messages(graph),
        *uncut_sequences_messages(graph, chosen),
        *routing_messages(graph),
    ):
        show_note(message)
    if as_json:
        told = [point.to_dict() for point in points]
        show_json({"fits": True, **as_data(answer), "front": told})
    else:
        front = describe_pareto(points, pareto) if points else None
        show_results(replace(answer, front=front))
    show_written(f"wrote {out}", as_json)
    if request.meshes == "own" and request.tp is not None:
        show_note(
            f"--meshes own with --tp {request.tp}: every stage has this tp, so no meshes were "
            "mixed; leave --tp out, or write --allow tp=... for some values"
        )
    for line in left_out:
        show_note(line)
    if late:
        show_note(f"{late}: more plans may trade time for memory")
    if pareto:
        text = json.dumps([point.to_dict() for point in points], indent=1)
        write_atomically(pareto, text + "\n")
        show_written(f"wrote {pareto}", as_json)


def _graphs(
    model: Path, precisions: Sequence[Precision], profile: Profile, execution: str
) -> tuple[dict[Precision, ModelGraph], list[str]]:
    """Capture in each precision; of several those without a product in 8 bits are left out, and
    told, and those that an execution's system has not. Of ways to scale products in 8 bits the
    device's own are tried; that it has none is told.
    """
    from planner.language.ops.families.products.narrow import rate_dtype
    from planner.language.plan.parts import scaling_named
    from planner.language.stacks import expressed_of

    if len(precisions) == 1:
        return {precisions[0]: graph_of(model, precisions[0])}, []
    graphs: dict[Precision, ModelGraph] = {}
    untried: list[str] = []
    rates = dict(profile.cluster.peak_flop_per_s)
    narrow = [precision for precision in precisions if scaling_named(precision)]
    missing = [p for p in narrow if rate_dtype(scaling_named(p)) not in rates]
    if missing == narrow and narrow:
        untried.append(
            f"precision {' and '.join(narrow)} was not tried: profile {profile.name!r} has no rate "
            "of products of 8-bit floats"
        )
    for precision in precisions:
        if precision in missing:
            continue
        try:
            graph = graph_of(model, precision)
        except CaptureError as error:
            if precision not in narrow:
                raise
            untried.append(f"precision {precision} was not tried: {error}")
            continue
        expressed = expressed_of(execution, graph)
        why = "" if expressed is None else expressed.why_no_precision(precision)
        if why:
            untried.append(f"precision {precision} was not tried: {why}")
        else:
            graphs[precision] = graph
    return graphs, untried


def _told(found: Sequence[tuple[SearchRequest, SearchResult]]) -> Iterator[str]:
    """Say what was compared, where plans of several runtimes were."""
    from planner.language.plan import kernels_of

    if len(found) > 1:
        ways = [(request.precision, kernels_of(request.execution)) for request, _ in found]
        differ = [len({way[at] for way in ways}) > 1 for at in (0, 1)]
        each = (
            " ".join(compress(way, differ))
            + (" no plan" if result.plan is None else f" {format_seconds(_step_s(result))} a step")
            for way, (_, result) in zip(ways, found, strict=True)
        )
        yield f"{' and '.join(compress(('precision', 'kernels'), differ))}: {', '.join(each)}"


def _step_s(result: SearchResult) -> float:
    """Seconds of a step; infinite without a plan."""
    return inf if result.plan is None else float(result.plan.estimate["step_s"])


def _measured(
    model: Path, graph: ModelGraph, request: SearchRequest, result: SearchResult, device: str
) -> tuple[SearchResult, Table]:
    """Run the best plans on this machine; return the measured best as the answer."""
    from commands.common.measured import best_plans, choose_measured
    from commands.render.plans.search import describe_trials
    from planner.runtime.proofs.trials import WARM_UP_STEPS, TrialSettings, run_trials

    plans = best_plans(result)
    settings = TrialSettings(clips_gradients=request.clip_gradients)
    about_s = settings.about_s([plan.estimate["step_s"] for plan in plans])
    fewer = "" if len(plans) == request.num_best else "; the search found no more"
    kind = "CPU" if device == "cpu" else "GPU"
    ranks = f"{request.num_devices} {kind} rank{'s' * (request.num_devices > 1)}"
    show_note(
        f"measuring: {len(plans)} plan{'s' * (len(plans) > 1)} in turns on {ranks} of this "
        f"machine, {settings.turns} turns each of {WARM_UP_STEPS} + {settings.steps} steps, about "
        f"{format_seconds(about_s)}{fewer}"
    )
    with show_progress("measuring") as progress:
        trials = run_trials(
            plans, graph, model, device=device, settings=settings, progress=progress
        )
    measured = choose_measured(result, trials, steps_of_turn=settings.steps)
    return measured, describe_trials(plans, trials)
