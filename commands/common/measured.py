"""The choice between a search's best plans by what they took when they ran.

The cost model may put plans in a wrong order that are nearly as fast as each other. Where the
machine is at hand, a few steps of each decide (`planner.runtime.proofs.trials`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from planner.errors import PlannerError
from planner.language.plan import Plan
from planner.language.plan.parts import Compared, Measured
from profiles import Profile
from search.request import SearchResult

if TYPE_CHECKING:
    from planner.runtime.proofs.trials import Trial


def best_plans(result: SearchResult) -> tuple[Plan, ...]:
    """Return the best plan of a search and the next best, as many as were sought."""
    assert result.plan is not None, "a search without a plan has no best ones"
    return (result.plan, *result.next_best)


def check_measurable(profile: Profile, num_devices: int) -> str:
    """Return the device of a profile whose plans can be run on this machine.

    Raises PlannerError where it has not so many devices, or they are not the profile's kind.
    """
    # The runtime takes as long to import as a small search does: only where plans are run.
    from planner.runtime.start.launch import check_ranks

    here = profile.cluster.devices_per_node
    if num_devices > here:
        raise PlannerError(
            f"`measure` runs plans on this machine alone: `num_devices` {num_devices} was given "
            f"and {profile.name} has {here} devices a node; search for {here} or fewer, or leave "
            "`measure` out"
        )
    device = "cpu" if profile.cluster.device_type == "cpu" else "cuda"
    try:
        return check_ranks(num_devices, device)
    except PlannerError as error:
        raise PlannerError(f"`measure` can't run plans for {profile.name} here: {error}") from None


def choose_measured(
    result: SearchResult, trials: Sequence[Trial], *, steps_of_turn: int
) -> SearchResult:
    """Return a search's result with the plan that was measured fastest as its answer.

    `trials` are of `best_plans`. The plan's estimate keeps what was measured, of the others too;
    its certificate is about the plan chosen. Raises PlannerError where none ran.
    """
    plans = best_plans(result)
    ran = [index for index, trial in enumerate(trials) if not trial.failure]
    if not ran:
        raise PlannerError(
            f"none of the {len(plans)} best plans ran on this machine; the first: "
            f"{trials[0].failure}"
        )
    fastest = min(ran, key=lambda index: trials[index].step_s)
    plan, trial = plans[fastest], trials[fastest]
    measured = Measured(
        step_s=trial.step_s,
        turns_s=trial.turns_s,
        steps_of_turn=steps_of_turn,
        compared=tuple(
            Compared(
                predicted_s=each.estimate["step_s"],
                measured_s=None if found.failure else found.step_s,
                failure=found.failure,
            )
            for each, found in zip(plans, trials, strict=True)
        ),
    )
    estimate = {**plan.estimate, "measured": measured.model_dump(mode="json")}
    proof = result.certificate
    if proof is not None:
        # The bound is that of all plans; how far this one is from it is another distance.
        proof = replace(proof, best_s=plan.estimate["step_s"])
        estimate["certificate"] = proof.to_dict()
    chosen = plan.model_copy(update={"estimate": estimate})
    others = tuple(other for index, other in enumerate(plans) if index != fastest)
    return replace(result, plan=chosen, next_best=others, certificate=proof)


def turns_spread(trial: Trial) -> float:
    """Return the largest distance of a turn from the median of all, as a part of it."""
    middle = median(trial.turns_s)
    return max(abs(turn - middle) for turn in trial.turns_s) / middle
