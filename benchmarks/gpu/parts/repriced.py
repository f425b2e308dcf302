"""What the measured profile predicts of the steps that were measured."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.gpu.cases import graph_of, plan_of, predicted, step_cases
from benchmarks.gpu.results import Result, Setting, read


def run(setting: Setting) -> Iterator[Result]:
    """Yield for each measured step what it is said to take, under the profile of this run."""
    from profiles import load_profile
    from profiles.store import PROFILE_FILE

    folder = setting.out / "profile"
    if not (folder / PROFILE_FILE).exists():
        yield Result(part="repriced", check="profile", status="not run", note="none was measured")
        return
    profile = load_profile(folder)
    steps = {r.check: r for r in read(setting.out) if r.part == "steps" and r.status == "pass"}
    for case in step_cases(tiny=setting.tiny):
        if case.name not in steps or case.name in setting.known:
            continue
        graph = graph_of(case)
        plan = plan_of(case, graph)
        yield Result(
            part="repriced",
            check=case.name,
            status="pass",
            measured=steps[case.name].measured,
            predicted=predicted(plan, graph, profile),
        )
