"""Answers to what-if, as a table: what differs, what it brings, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from commands.render.flags import with_flags
from commands.render.plans.search import choices_of
from commands.render.tables import light_table
from planner.plan import Plan
from planner.units import DAY_S, GIB, HOUR_S, format_bytes, format_number, format_seconds
from search.report.what_if import Answer, Case

_BAR = 10
"""Characters of the longest bar."""

_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "num_devices": ("GPUs", str),
    "profile": ("machine", str),
    "memory_limit_bytes": ("memory limit", format_bytes),
    "link_rate": ("links", lambda rate: f"x{rate:g}"),
    "global_batch": ("batch", str),
    "length": ("length", str),
    "precision": ("precision", str),
    "execution": ("runtime", str),
    "arguments": ("model()", lambda pairs: ", ".join(f"{name}={value}" for name, value in pairs)),
}
"""What may differ from the base: its column's name, and how a value is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A price per device and hour, the tokens of a training, a deadline; 0 and None: not given."""

    price: float = 0.0
    tokens: float = 0.0
    deadline_s: float | None = None


def describe_answers(base: Answer, answers: Sequence[Answer], terms: Terms) -> list[Any]:
    """Return a table of the base and of each answer beside it, and what a deadline needs.

    "of one device" compares tokens (samples) per second of one device with the plan's.
    """
    varied = [
        name
        for name in _COLUMNS
        if any(name in answer.case.differences(base.case) for answer in answers)
    ]
    has_tokens = base.tokens_per_s > 0
    table = light_table(
        *(_COLUMNS[name][0] for name in varied), title="The plan (first row), and what if"
    )
    table.add_column("step", justify="right")
    table.add_column("tokens/s" if has_tokens else "samples/s", justify="right")
    table.add_column("of one device")
    table.add_column("memory", justify="right")
    table.add_column("4 of 5 cases", justify="right")
    if terms.price:
        table.add_column("cost" if terms.tokens else "cost a million", justify="right")
    if terms.tokens:
        table.add_column("days", justify="right")
    table.add_column("plan", ratio=1)
    best = max((_per_device(answer) for answer in (base, *answers)), default=0.0)
    for answer in (base, *answers):
        cells: list[RenderableType] = [_case_cell(name, answer.case, base) for name in varied]
        if answer.plan is None:
            why = Text(f"none: {with_flags(answer.reason)}", style="yellow")
            blank = [""] * (5 + bool(terms.price) + bool(terms.tokens))
            table.add_row(*cells, *blank, why)
            continue
        rate = answer.tokens_per_s if has_tokens else answer.samples_per_s
        cells += [
            format_seconds(answer.step_s),
            f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}",
            _scaling(answer, base, best),
            format_bytes(answer.peak_bytes),
            _memory_cell(answer),
        ]
        if terms.price:
            cost = _cost(answer, terms)
            cells.append(f"{cost:,.0f}" if cost >= 1000 else f"{cost:.4g}")
        if terms.tokens:
            cells.append(_days(answer, terms))
        in_time = terms.deadline_s is not None and _in_time(answer, terms)
        table.add_row(
            *cells,
            Text(_short(answer.plan)),
            style="bold" if in_time else "",
            end_section=answer is base,
        )
    parts: list[Any] = [table]
    if terms.deadline_s is not None:
        parts.append(Text(_deadline(answers, terms)))
    if any(answer.may_not_fit for answer in (base, *answers)):
        parts.append(Text("! memory may pass the limit of a device; --memory-limit leaves room"))
    if not answers:
        parts.append(Text("nothing was changed: give another number of devices, machine, ..."))
    return parts


def answers_as_data(base: Answer, answers: Sequence[Answer], terms: Terms) -> dict[str, Any]:
    """Return the same as JSON data."""

    def data(answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = {
            "changed": _plain(answer.case.differences(base.case)),
            "fits": answer.plan is not None,
        }
        if answer.plan is None:
            return found | {"reason": with_flags(answer.reason)}
        found |= {
            "num_devices": answer.case.num_devices,
            "step_s": answer.step_s,
            "samples_per_s": answer.samples_per_s,
            "tokens_per_s": answer.tokens_per_s,
            "peak_bytes": answer.peak_bytes,
            "memory_interval": answer.memory and asdict(answer.memory),
            "may_not_fit": answer.may_not_fit,
            "gap": answer.gap,
            "plan": choices_of(answer.plan),
        }
        if terms.tokens:
            found["days"] = answer.days(terms.tokens)
        if terms.price:
            found["cost"] = _cost(answer, terms)
        if terms.deadline_s is not None:
            found["in_time"] = _in_time(answer, terms)
        return found

    return {"plan": data(base), "what_if": [data(answer) for answer in answers]}


def _plain(differences: dict[str, Any]) -> dict[str, Any]:
    if "arguments" in differences:
        differences["arguments"] = dict(differences["arguments"])
    return differences


def _case_cell(name: str, case: Case, base: Answer) -> str:
    value = getattr(case, name)
    if value is None:
        plan = base.plan
        return plan.cluster.name if name == "profile" and plan is not None else "-"
    return _COLUMNS[name][1](value) or "-"


def _short(plan: Plan) -> str:
    """The plan in few words; `choices_of` says all."""
    axes = (*plan.degrees.items(), ("pp", plan.pp), ("vpp", plan.vpp))
    degrees = " ".join(f"{axis}{size}" for axis, size in axes if size > 1) or "one device"
    recompute = "/".join(sorted(set(plan.recompute_by_block)))
    schedule = f" {plan.schedule}" if plan.pp > 1 else ""
    return f"{degrees}{schedule} ZeRO {plan.zero_stage} recompute {recompute}"


def _memory_cell(answer: Answer) -> str:
    """Where memory lies, in GiB, marked where that passes the limit."""
    if answer.memory is None:
        return ""
    low, high = answer.memory.low_bytes / GIB, answer.memory.high_bytes / GIB
    return f"{format_number(low)} to {format_number(high)} GiB{' !' * answer.may_not_fit}"


def _per_device(answer: Answer) -> float:
    return (answer.tokens_per_s or answer.samples_per_s) / answer.case.num_devices


def _scaling(answer: Answer, base: Answer, best: float) -> str:
    """A bar for the tokens (samples) of one device, and their ratio to the plan's."""
    bar = "█" * max(1, round(_BAR * _per_device(answer) / best))
    return f"{bar:<{_BAR}} {_per_device(answer) / _per_device(base):.0%}"


def _cost(answer: Answer, terms: Terms) -> float:
    """Of the whole training, else of a million tokens (samples)."""
    if terms.tokens:
        return answer.cost(terms.price, terms.tokens)
    rate = answer.tokens_per_s or answer.samples_per_s
    return terms.price * answer.case.num_devices * 1e6 / rate / HOUR_S


def _days(answer: Answer, terms: Terms) -> str:
    return f"{answer.days(terms.tokens):,.3g}"


def _in_time(answer: Answer, terms: Terms) -> bool:
    assert terms.deadline_s is not None
    return answer.days(terms.tokens) * DAY_S <= terms.deadline_s


def _deadline(answers: Sequence[Answer], terms: Terms) -> str:
    assert terms.deadline_s is not None
    wanted = f"{terms.tokens:g} tokens in {terms.deadline_s / DAY_S:g} days"
    in_time = [answer for answer in answers if _in_time(answer, terms)]
    if not in_time:
        fastest = min(answers, key=lambda answer: answer.days(terms.tokens))
        return (
            f"{wanted}: out of reach; {fastest.case.num_devices} devices take "
            f"{_days(fastest, terms)} days, and a larger batch would let more of them share it"
        )
    fewest = min(in_time, key=lambda answer: answer.case.num_devices)
    return (
        f"{wanted}: {fewest.case.num_devices} devices are enough "
        f"({_days(fewest, terms)} days), of the numbers tried"
    )
