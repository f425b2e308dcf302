"""Emitters by name, and the check that all of them share.

An emitter states for each feature of a plan how it expresses it, in words for people (an option's
name) or as a `Rule` with the cases that it can't. A feature without an entry is refused, so a new
feature of plans is refused by all systems until each says how it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches

from planner.emit.features import WHOLE_BATCH, plan_features, used_features
from planner.emit.view import PlanView
from planner.errors import PlanError
from planner.language.across.cut.whole_batch import graph_under
from planner.language.plan import OURS
from planner.language.stacks import stack_named


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How a feature is expressed, and where it can't be."""

    how: str
    """The option or field that says it."""
    unless: Callable[[PlanView], str]
    """Why it can't say it for a plan, in words; empty where it can."""
    instead: str = ""
    """What the system does of its own where a user accepts that it differs from the plan; empty:
    this can't be accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """What was written for a plan."""

    files: Mapping[str, str]
    """Text by file name, the main file first."""
    notes: tuple[str, ...] = ()
    """What the files leave open, or have otherwise than the plan because a user accepted it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitter:
    """A system that plans can be written for."""

    name: str
    """As the command line names it."""
    summary: str
    """One line for people: what is written."""
    expresses: Mapping[str, str | Rule]
    """By feature (`planner.emit.features`), how it is written."""
    write: Callable[[PlanView], Emitted]
    """The files of a plan that it can express."""
    executions: tuple[str, ...] = ()
    """Runtimes (`costmodel/execution/data`) whose prices are those of this system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A feature of a plan that a system can't express."""

    feature: str
    """Its name."""
    used: str
    """What the plan uses of it."""
    why: str
    """Why the system can't."""
    instead: str
    """What the system would do, where that may be accepted."""

    def __str__(self) -> str:
        accept = f"; `accept` {self.feature} has {self.instead} instead" if self.instead else ""
        return f"{self.feature}: the plan has {self.used}; {self.why}{accept}"


EMITTERS: dict[str, Emitter] = {}
"""Every emitter by name, filled by `register_emitter`."""


def register_emitter(emitter: Emitter) -> Emitter:
    """Make an emitter known by its name.

    Raises PlanError where the name is taken, or where it expresses a feature that plans have not.
    """
    if emitter.name in EMITTERS:
        raise PlanError(f"an emitter is called {emitter.name!r} already; choose another name")
    unknown = set(emitter.expresses) - {feature.name for feature in plan_features()}
    if unknown:
        raise PlanError(
            f"emitter {emitter.name!r} expresses {min(unknown)!r}, which no plan has; see "
            "planner/emit/features.py"
        )
    EMITTERS[emitter.name] = emitter
    return emitter


def find_emitter(name: str) -> Emitter:
    """Return the emitter of a name, or of another name of its stack (`planner.language.stacks`);
    raise PlanError naming the valid and the nearest ones.
    """
    stack = stack_named(name)
    name = name if stack is None else stack.name
    if name in EMITTERS:
        return EMITTERS[name]
    near = get_close_matches(name.lower(), EMITTERS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise PlanError(
        f"no target is called {name!r}; {hint}valid names: {', '.join(sorted(EMITTERS))}"
    )


def refusals(view: PlanView, emitter: Emitter) -> tuple[Refusal, ...]:
    """Return every feature of a plan that the system can't express and the user did not accept.

    Raises PlanError where a feature is accepted that the system expresses or can't do without.
    """
    found = tuple(_refused(view, emitter))
    may_be = {refusal.feature for refusal in found if refusal.instead}
    for name in view.accepted:
        if not may_be:
            raise PlanError(
                f"`accept` {name} was given; {emitter.name} differs from this plan in nothing that "
                "may be accepted"
            )
        if name not in may_be:
            raise PlanError(
                f"`accept` {name} was given; {emitter.name} has this of its own: "
                f"{', '.join(sorted(may_be))}"
            )
    return tuple(refusal for refusal in found if refusal.feature not in view.accepted)


def _refused(view: PlanView, emitter: Emitter) -> Iterable[Refusal]:
    for name, used in used_features(view.plan).items():
        rule = emitter.expresses.get(name)
        if rule is None:
            why, instead = f"{emitter.name} has no such thing", ""
        elif isinstance(rule, str):
            continue
        else:
            why, instead = rule.unless(view), rule.instead
        if why:
            yield Refusal(feature=name, used=used, why=why, instead=instead)
    graph, plan = view.graph, view.plan
    if graph is None or WHOLE_BATCH in emitter.expresses or plan.batch_parts == 1:
        return
    if graph_under(graph, plan) is not graph:
        yield Refusal(
            feature=WHOLE_BATCH,
            used="ops that compute across the samples of all replicas",
            why=f"{emitter.name} runs them on each replica's own",
            instead="",
        )


def emit(view: PlanView, emitter: Emitter) -> Emitted:
    """Return the files of a plan for a system.

    Raises PlanError naming every feature that the system can't express.
    """
    refused = refusals(view, emitter)
    if refused:
        raise PlanError(f"{emitter.name} can't express this plan: " + "; ".join(map(str, refused)))
    emitted = emitter.write(view)
    return Emitted(files=emitted.files, notes=(*_own_notes(view, emitter), *emitted.notes))


def _own_notes(view: PlanView, emitter: Emitter) -> Iterable[str]:
    for name in view.accepted:
        rule = emitter.expresses[name]
        assert isinstance(rule, Rule)
        yield f"{name} differs from the plan, as accepted: {emitter.name} has {rule.instead}"
    frozen = [] if view.graph is None else [t for t in view.graph.params if not t.requires_grad]
    if frozen and emitter.executions:
        yield (
            f"frozen in the model: {len(frozen)} parameters, such as {frozen[0].fqn}; freeze them "
            f"in the model that {emitter.name} trains"
        )
    priced_for = view.plan.execution
    if emitter.executions and priced_for not in emitter.executions:
        yield (
            f"the plan is priced for {priced_for or OURS}; a search with `execution` "
            f"{emitter.executions[0]} prices plans for this system"
        )


@dataclass(slots=True)
class Lines:
    """Lines of a file as they are written. Mutable: it grows."""

    text: list[str] = field(default_factory=list)

    def add(self, *lines: str) -> None:
        """Append lines."""
        self.text += lines

    def __str__(self) -> str:
        return "\n".join(self.text) + "\n"
