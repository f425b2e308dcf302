"""What an emitter expresses, from the declaration of its stack (`planner.language.stacks`).

An emitter adds to it words: the option that says each feature, and what a user may accept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from planner.emit.emitter import Rule
from planner.emit.view import PlanView
from planner.errors import PlanError
from planner.language.plan.parts import scaling_named
from planner.language.stacks import Stack, rules
from planner.language.stacks.narrow_layers import why_not_narrow, why_not_rows
from planner.language.stacks.tensor_parallel import UsualTp

_Why = Callable[[Stack, PlanView], str]


def expresses(
    stack: Stack, how: Mapping[str, str], instead: Mapping[str, str] | None = None
) -> dict[str, str | Rule]:
    """Return how each feature of a stack is written, with the cases that it can't.

    Raises PlanError where a feature of the stack has no words, or words are of none.
    """
    if differing := set(how) ^ stack.features:
        raise PlanError(
            f"stack {stack.name!r} is declared with {', '.join(sorted(stack.features))}; its "
            f"emitter differs in {', '.join(sorted(differing))}"
        )
    instead = instead or {}
    found: dict[str, str | Rule] = {}
    for name, words in how.items():
        if name in _RULES or stack.zeros_beside(name) != stack.zero_stages:
            unless = partial(_why_not, stack, name)
            found[name] = Rule(how=words, unless=unless, instead=instead.get(name, ""))
        else:
            found[name] = words
    return found


def _why_not(stack: Stack, feature: str, view: PlanView) -> str:
    own = _RULES[feature](stack, view) if feature in _RULES else ""
    return own or rules.why_not_beside(stack, feature, view.plan.zero_stage)


def _tp(stack: Stack, view: PlanView) -> str:
    if stack.tensor_parallel is None or view.graph is None:
        return ""
    usual = UsualTp(model=view.layered("heads on tp"), ways=stack.tensor_parallel)
    return rules.why_not_tp(usual, view.plan.tp)


def _cp(stack: Stack, view: PlanView) -> str:
    return rules.why_no_cp(stack, view.cp_kind(), view.plan.cp, view.seq_len)


def _ep(stack: Stack, view: PlanView) -> str:
    return "" if view.graph is None else rules.why_not_ep(stack, view.graph)


def _etp(stack: Stack, view: PlanView) -> str:
    return "" if view.plan.degrees["ep"] > 1 else "etp is written beside ep"


def _microbatches(stack: Stack, view: PlanView) -> str:
    return rules.why_not_counted(stack, view.seq_len)


def _schedule(stack: Stack, view: PlanView) -> str:
    plan = view.plan
    sizes = {"pp": plan.pp, "vpp": plan.vpp, "num_microbatches": plan.num_microbatches}
    if stack.schedules is None or (plan.vpp > 1 and "vpp" not in stack.degrees):
        return ""  # any table is taken, or vpp is refused itself
    return rules.why_not_microbatches(stack, **sizes) or rules.why_no_schedule(
        stack, view.schedule.jobs, **sizes
    )


def _placement(stack: Stack, view: PlanView) -> str:
    plan = view.plan
    return rules.why_not_placed(stack, plan.stage_to_pp_rank, pp=plan.pp, vpp=plan.vpp)


def _cuts(stack: Stack, view: PlanView) -> str:
    if stack.cuts == "between layers":
        return ""  # `view.parts` refuses others
    own = view.layered("the cuts of the plan").places_by_products(view.plan.pp)
    if not own:
        return f"{stack.title} cuts by sizes that the model's graph does not tell"
    planned = [s for s, part in enumerate(view.parts) for _ in part.layers]
    planned.append(next(s for s, part in enumerate(view.parts) if part.head))
    if view.parts[0].embedding and list(own) == planned:
        return ""
    counts = ",".join(str(own[:-1].count(rank)) for rank in range(view.plan.pp))
    return f"{stack.title} cuts stages of {counts} layers, and can't be told otherwise"


def _zero(stack: Stack, view: PlanView) -> str:
    return rules.why_no_zero(stack, view.plan.zero_stage)


def _precision(stack: Stack, view: PlanView) -> str:
    plan = view.plan
    found = rules.why_no_precision(stack, plan.precision, view.trained_dtype)
    if found or not scaling_named(plan.precision):
        return found
    rows = plan.microbatch_size * view.seq_len // plan.cp
    found = why_not_narrow(stack, view.widths_of_layers, plan.precision)
    return found or why_not_rows(stack, rows, plan.precision)


def _recompute(stack: Stack, view: PlanView) -> str:
    if not stack.recomputes_first or "by layer" not in view.recomputed:
        return rules.why_no_recompute(stack, view.recomputed)
    if view.first_layers_in_full is not None:
        return ""
    return (
        f"{stack.title} recomputes in full the first layers of each stage, as many in all, and "
        "keeps all of the others"
    )


def _layouts(stack: Stack, view: PlanView) -> str:
    if view.plan.tp == 1 or stack.tensor_parallel is None:
        return rules.why_not_placed_on_tp(stack) if view.plan.tp > 1 else ""
    laid = view.laid_out
    own_experts = rules.why_not_experts(stack, laid) if view.plan.degrees["ep"] == 1 else ""
    return own_experts or rules.why_not_laid_out(stack, laid)


_RULES: Mapping[str, _Why] = {
    "tp": _tp,
    "cp": _cp,
    "ep": _ep,
    "etp": _etp,
    "microbatches": _microbatches,
    "schedule": _schedule,
    "stage-placement": _placement,
    "cuts": _cuts,
    "zero": _zero,
    "precision": _precision,
    "recompute": _recompute,
    "layouts": _layouts,
}
"""By feature, why a stack does not express what a plan has of it."""
