"""`planner what-if`: the best plan of other devices, links, batches or sizes beside a plan."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commands.common.inputs import (
    graph_of_plan,
    parse_precision,
    parse_price,
    parse_seconds,
    profile_named,
    profile_of_plan,
)
from commands.common.models import GivenModel
from commands.common.options import AcceptOption, JsonOption, PlanFile, PriceOption, spread
from commands.common.question import bytes_of_gib, parse_counts
from commands.render.console import show_json, show_note, show_progress, show_results
from planner.errors import PlannerError

if TYPE_CHECKING:
    from planner.language.plan import Plan
    from search.report.what_if import Case

MOST_CASES = 256


@spread(GivenModel)
def what_if(
    plan: PlanFile,
    given: GivenModel,
    gpus: Annotated[
        str | None,
        typer.Option(help="Other numbers of devices: 16,32 or 8..1024 (doubling)."),
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="Other machines, such as b200,h200 or profile directories.")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="Other memory, GiB per device, such as 40,60.")
    ] = None,
    link_rate: Annotated[
        str | None,
        typer.Option(help="Other rates of the links between nodes, times today's: 0.5,2."),
    ] = None,
    global_batch: Annotated[
        str | None, typer.Option(help="Other samples per step, such as 256,512.")
    ] = None,
    length: Annotated[
        str | None, typer.Option(help="Other sequence lengths, by batch(size, LENGTH): 4096,8192.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="Of model, bf16, fp16, fp8, fp8-tensorwise and mxfp8, as in bf16,fp8."),
    ] = None,
    execution: Annotated[
        str | None, typer.Option(help="Other runtimes, such as ours-compiled,megatron-core.")
    ] = None,
    expert_imbalance: Annotated[
        str | None,
        typer.Option(help="Other imbalances of experts' rows, such as 0,0.3,0.66."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Other arguments of the file's model(): num_hidden_layers=40,80. Repeatable.",
        ),
    ] = None,
    price: PriceOption = None,
    tokens: Annotated[
        float | None, typer.Option(help="Tokens of the whole training, such as 1e12.")
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(help="With --tokens: how many devices finish in this time, such as 30d?"),
    ] = None,
    accept: AcceptOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search again for other machines, batches or sizes.

    All combinations of the values given are searched, each beside the plan as it is.

    Example: planner what-if plan.json model.py --gpus 8..64 --price 2.5
    """
    from commands.render.plans.what_if import Terms, answers_as_data, describe_answers
    from costmodel.execution import find_execution
    from planner.capture.source.capture_cache import load_graph
    from planner.language.plan import load_plan
    from planner.language.plan.accepted import accepted_names
    from search.report.what_if import Explorer, priced

    if deadline is not None and (tokens is None or gpus is not None):
        raise PlannerError(
            f"--deadline {deadline} was given; it goes with --tokens, and without --gpus, which it "
            "answers"
        )
    terms = Terms(
        price=parse_price(price),
        tokens=_tokens(tokens),
        deadline_s=parse_seconds(deadline, "--deadline"),
    )
    runtimes = _words(execution)
    for name in runtimes:
        find_execution(name)
    loaded = load_plan(plan)
    model = given.file_of(loaded)
    machine, note = profile_of_plan(loaded)
    explorer = Explorer(
        model=model,
        graph_of=lambda precision, length, arguments: load_graph(
            model, precision=precision, length=length, arguments=arguments
        ),
        profile_of=lambda name: machine if name is None else profile_named(name)[0],
        accept=accepted_names((*loaded.accept, *(accept or ()))),
    )
    base = _base(loaded)
    names = _words(profile)
    for name in names:
        explorer.profile_of(name)
    cases = base.varied(
        num_devices=_counts_in_range(gpus),
        profile=names,
        memory_limit_bytes=[
            bytes_of_gib(gib) for gib in _numbers("--memory-limit", memory_limit, "GiB: 40,60")
        ],
        link_rate=_numbers("--link-rate", link_rate, "multiples of today's rate, such as 0.5,2"),
        global_batch=parse_counts("--global-batch", global_batch, "samples per step: 256,512"),
        length=parse_counts("--length", length, "lengths of sequences: 4096,8192"),
        precision=[parse_precision(word) for word in _words(precision)],
        execution=runtimes,
        expert_imbalance=_imbalances(expert_imbalance),
        arguments=_arguments(set_ or ()),
    )
    if len(cases) > MOST_CASES:
        raise PlannerError(
            f"{len(cases)} combinations were given; {MOST_CASES} are the most: give fewer values"
        )
    show_note(note)
    with show_progress("searching") as progress:
        graph = graph_of_plan(loaded, model)
        if not loaded.estimate:  # made by hand, or by `default_plan`
            from costmodel import estimate

            told = estimate(graph, machine, loaded).to_dict()
            loaded = loaded.model_copy(update={"estimate": told})
        today = priced(base, loaded, graph, machine)
        if terms.tokens and not today.tokens_per_s:
            raise PlannerError(
                "--tokens was given, but the batch has no tokens (no [samples, length] tensor of "
                "whole numbers); leave --tokens out"
            )
        if terms.deadline_s is None:
            answers = list(explorer.answers([case for case in cases if case != base], progress))
        else:
            answers = [
                answer
                for case in cases
                for answer in explorer.fewest_devices(
                    case, tokens=terms.tokens, deadline_s=terms.deadline_s, progress=progress
                )
            ]
    if as_json:
        show_json(answers_as_data(today, answers, terms))
    else:
        show_results(*describe_answers(today, answers, terms))


def _base(plan: Plan) -> Case:
    from search.report.what_if import Case

    return Case(
        num_devices=plan.world_size,
        profile=None,
        memory_limit_bytes=None,
        link_rate=1.0,
        global_batch=plan.global_batch,
        length=None,
        precision=plan.precision,
        execution=plan.execution,
        expert_imbalance=_given_imbalance(plan),
    )


def _given_imbalance(plan: Plan) -> float | None:
    from costmodel.execution.dispatch.imbalance import GIVEN

    told = plan.estimate.get("experts", {})
    return told["imbalance"] if told.get("imbalance_from") == GIVEN else None


def _counts_in_range(text: str | None) -> tuple[int, ...]:
    """Parse 16,32 or 8..1024, which doubles from the first number up to the last."""
    what = "numbers of devices, such as 16,32, or a range that doubles, such as 8..1024"
    first, dots, last = (text or "").partition("..")
    if not dots:
        return parse_counts("--gpus", text, what)
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise PlannerError(
            f"--gpus {text} is not understood; the first of a range is the least: write {what}"
        )
    counts = [int(first)]
    while counts[-1] * 2 <= int(last):
        counts.append(counts[-1] * 2)
    return tuple(counts)


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",") if word.strip()]


def _numbers(flag: str, text: str | None, what: str) -> list[float]:
    try:
        values = [float(word) for word in _words(text)]
    except ValueError:
        values = [0.0]
    if any(not 0 < value < math.inf for value in values):
        raise PlannerError(f"{flag} {text} is not understood; write {what} (numbers above 0)")
    return values


def _imbalances(text: str | None) -> list[float]:
    from costmodel.execution.dispatch.imbalance import check_imbalance

    try:
        values = [float(word) for word in _words(text)]
    except ValueError:
        raise PlannerError(
            f"--expert-imbalance {text} is not understood; write numbers of 0 or more: 0,0.3,0.66"
        ) from None
    for value in values:
        check_imbalance(value)
    return values


def _arguments(texts: Sequence[str]) -> list[tuple[tuple[str, Any], ...]]:
    """Parse NAME=VALUE,VALUE texts: the arguments of each combination of values."""
    combined: list[tuple[tuple[str, Any], ...]] = [()]
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not name.isidentifier() or not _words(values):
            raise PlannerError(
                f"--set {text} is not understood; write an argument of model() and its values, "
                "such as num_hidden_layers=40,80"
            )
        chosen = [(name, _value(word)) for word in _words(values)]
        combined = [(*before, pair) for before in combined for pair in chosen]
    return combined if texts else []


def _value(word: str) -> Any:
    try:
        return ast.literal_eval(word)
    except (ValueError, SyntaxError):
        return word


def _tokens(tokens: float | None) -> float:
    if tokens is None:
        return 0.0
    if not 0 < tokens < math.inf:
        raise PlannerError(f"--tokens {tokens:g} was given; it counts tokens, such as 1e12")
    return tokens
