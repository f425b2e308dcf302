"""Issue 19, 7: what `planner launch --preflight` prints of its findings."""

from __future__ import annotations

from rich.console import Console

from commands.render.node_checks import describe_preflight, problem_lines
from planner.runtime.preflight import Report
from planner.runtime.preflight.report import check_of

LONG = "slow link between nodes, ranks 0, 4 on a, b: " + "send_recv of 64 MiB at 0.1 GB/s, " * 9


def report(*checks) -> Report:
    return Report(
        nodes=("a", "b"), checks=checks, rates=(), start_s=12.34, checks_s=5.0, is_first=True
    )


def printed(parts) -> list[str]:
    console = Console(width=100, no_color=True)
    with console.capture() as capture:
        console.print(*parts)
    return capture.get().splitlines()


def test_every_check_has_a_row_with_what_was_planned_and_found():
    lines = printed(
        describe_preflight(
            report(
                check_of("data groups", "9 GB/s", (), planned="10 GB/s"),
                check_of("clocks", "0.1 s apart", ["a is late", "b is late"]),
            )
        )
    )
    (data,) = [line for line in lines if "data groups" in line]
    (clocks,) = [line for line in lines if "clocks" in line]
    assert data.index("10 GB/s") < data.index(" 9 GB/s") < data.index("ok")
    assert "2 problems" in clocks
    assert "0.1 s apart" not in clocks
    assert clocks.count("problem") == 2  # (their number, and the state)


def test_problems_are_lines_of_their_own_with_flags_and_a_count():
    told = problem_lines(
        report(
            check_of("nodes", "", ["give both the same `rendezvous`"]),
            check_of("pairs of nodes", "", [LONG]),
            check_of("clocks", "0.1 s apart", ()),
        )
    )
    assert told == [
        "problem: give both the same --rendezvous",
        f"problem: {LONG}",
        "2 problems; ranks took 12.3 s to start, the checks 5.0 s",
    ]


def test_one_problem_is_not_several_and_none_are_counted_too():
    (_, count) = problem_lines(report(check_of("nodes", "", ["b has another plan"])))
    assert count.startswith("1 problem;")
    (count,) = problem_lines(report())
    assert count.startswith("0 problems;")
