"""Whole steps of one rank: seconds and bytes, predicted beside measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.cases import (
    StepCase,
    expected,
    graph_of,
    plan_file,
    plan_of,
    predicted,
    step_cases,
)
from benchmarks.gpu.parts.alone import (
    batch_of,
    be_alone,
    builder,
    freed,
    peak_bytes,
    step_seconds,
)
from benchmarks.gpu.results import Result, Setting


def run(setting: Setting) -> Iterator[Result]:
    """Yield a result for each case, as long as there is time."""
    be_alone(setting)
    began, longest = time.monotonic(), 0.0
    for case in step_cases(tiny=setting.tiny):
        if case.name in setting.known:
            continue
        left_s = setting.seconds - (time.monotonic() - began)
        if left_s < longest:  # a case that would be cut tells nothing
            yield Result(part="steps", check=case.name, status="cut", note="no time was left")
            continue
        case_began = time.monotonic()
        with freed(setting):
            yield _trained(case, setting)
        longest = max(longest, time.monotonic() - case_began)


def _trained(case: StepCase, setting: Setting) -> Result:
    began = time.monotonic()
    try:
        plan, said = planned(case, setting)
        measured = _measured(case, plan, setting)
    except Exception as error:
        note = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return Result(part="steps", check=case.name, status="fail", note=note)
    return Result(
        part="steps",
        check=case.name,
        status="pass",
        seconds=time.monotonic() - began,
        measured=measured,
        predicted=said,
    )


def planned(case: StepCase, setting: Setting) -> tuple[Any, dict[str, float]]:
    """Return a case's plan and what is predicted of it: made beforehand, else made here."""
    from planner.language.plan import load_plan
    from profiles import default_profile

    said = expected(setting.expected)
    if setting.expected is not None and case.name in said:
        return load_plan(plan_file(setting.expected, case)), said[case.name]
    graph = graph_of(case)
    plan = plan_of(case, graph)
    if setting.tiny:  # no profile is of a CPU that was not measured
        return plan, {}
    profile, _ = default_profile(setting.device)
    return plan, predicted(plan, graph, profile)


def _measured(case: StepCase, plan: Any, setting: Setting) -> dict[str, float]:
    import planner

    began = time.perf_counter()
    engine = planner.apply(plan, builder(case))
    apply_s = time.perf_counter() - began
    batch = batch_of(case)
    try:
        step_s = step_seconds(lambda: engine.step(batch), setting)
        return {
            "step_s": step_s,
            "apply_s": apply_s,
            **peak_bytes(lambda: engine.step(batch), setting),
        }
    finally:
        engine.close()
