"""Answers to what-if, as a table: what differs, what it brings, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from commands.render.flags import with_flags
from commands.render.plans.parts import WIDE, memory_digits
from commands.render.plans.search import choices_of
from commands.render.tables import light_table
from planner.units import DAY_S, GIB, HOUR_S, format_bytes, format_seconds
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
    "expert_imbalance": ("imbalance", str),
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
    """Return a table of the base and of each answer beside it, and what a deadline needs."""
    parts: list[Any] = [AnswerTable(base, answers, terms)]
    if terms.deadline_s is not None:
        parts.append(Text(_deadline(answers, terms)))
    if any(answer.may_not_fit for answer in (base, *answers)):
        parts.append(Text("! memory may pass the limit of a device; --memory-limit leaves room"))
    if not answers:
        parts.append(Text("nothing was changed: give another number of devices, machine, ..."))
    return parts


class AnswerTable:
    """Figures of the base and of each answer, and their plans: beside them on a wide screen, in a
    table of their own on a narrow one. Why there is no plan is told in lines below.
    """

    def __init__(self, base: Answer, answers: Sequence[Answer], terms: Terms) -> None:
        self._base, self._answers, self._terms = base, (base, *answers), terms
        self._varied = [
            name
            for name in _COLUMNS
            if any(name in answer.case.differences(base.case) for answer in answers)
        ]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Any]:
        """Yield the tables, then a line for each case without a plan."""
        is_wide = options.max_width >= WIDE
        yield self._figures(is_wide)
        if not is_wide and any(answer.plan for answer in self._answers):
            yield self._plans()
        for answer in self._answers:
            if answer.plan is None:
                named = ", ".join(
                    f"{_COLUMNS[name][0]} {self._cell(name, answer)}" for name in self._varied
                )
                yield Text(f"! {named or 'the plan'}: none: {with_flags(answer.reason)}", "yellow")

    def _figures(self, is_wide: bool) -> Table:
        terms, has_tokens = self._terms, self._base.tokens_per_s > 0
        digits = memory_digits(max(answer.peak_bytes for answer in self._answers))
        numbers = ["step", "tokens/s" if has_tokens else "samples/s", "per device", "memory, GiB"]
        numbers += ["in 4 of 5 cases"]
        numbers += ["cost" if terms.tokens else "cost of 1 M"] * bool(terms.price)
        numbers += ["days"] * bool(terms.tokens)
        varied = [_COLUMNS[name][0] for name in self._varied]
        table = light_table(
            *varied, *numbers, *["plan"] * is_wide,
            title="The plan (first row), and what if", numbers=numbers,
        )  # fmt: skip
        best = max(map(_per_device, self._answers), default=0.0)
        for answer in self._answers:
            cells = [self._cell(name, answer) for name in self._varied]
            if answer.plan is None:
                table.add_row(*cells, *["-"] * len(numbers), *["none"] * is_wide, style="yellow")
                continue
            rate = answer.tokens_per_s if has_tokens else answer.samples_per_s
            cells += [
                format_seconds(answer.step_s),
                f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}",
                _scaling(answer, self._base, best, with_bar=is_wide),
                f"{answer.peak_bytes / GIB:.{digits}f}",
                _memory_cell(answer, digits),
            ]
            if terms.price:
                cost = _cost(answer, terms)
                cells.append(f"{cost:,.0f}" if cost >= 1000 else f"{cost:.3g}")
            if terms.tokens:
                cells.append(_days(answer, terms))
            in_time = terms.deadline_s is not None and _in_time(answer, terms)
            table.add_row(
                *cells,
                *[Text(choices_of(answer.plan))] * is_wide,
                style="bold" if in_time else "",
                end_section=answer is self._base,
            )
        return table

    def _plans(self) -> Table:
        table = light_table(*(_COLUMNS[name][0] for name in self._varied), "plan", title="Plans")
        for answer in self._answers:
            if answer.plan is not None:
                cells = [self._cell(name, answer) for name in self._varied]
                table.add_row(*cells, Text(choices_of(answer.plan)))
        return table

    def _cell(self, name: str, answer: Answer) -> str:
        return _case_cell(name, answer.case, self._base)


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


def _memory_cell(answer: Answer, digits: int) -> str:
    """Where memory lies, marked where that passes the limit."""
    if answer.memory is None:
        return ""
    low, high = answer.memory.low_bytes / GIB, answer.memory.high_bytes / GIB
    return f"{low:.{digits}f} to {high:.{digits}f}{' !' * answer.may_not_fit}"


def _per_device(answer: Answer) -> float:
    return (answer.tokens_per_s or answer.samples_per_s) / answer.case.num_devices


def _scaling(answer: Answer, base: Answer, best: float, *, with_bar: bool) -> str:
    """The tokens (samples) of one device against the plan's, and a bar of them."""
    share = f"{_per_device(answer) / _per_device(base):.0%}"
    if not with_bar:
        return share
    return f"{'█' * max(1, round(_BAR * _per_device(answer) / best)):<{_BAR}} {share:>4}"


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
