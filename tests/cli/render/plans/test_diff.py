"""The difference of two plans as tables: units, shares, and what is too long."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from commands.render.plans.diff import MOST_ROWS, describe_difference
from planner.language.plan.diff import Amount, Change, Difference, Moved

NOTHING = Difference(decisions=(), blocks=(), layouts=(), parameters=(), costs=(), rest=())
CHANGE = (Change(name="tp", before="1", after="2"),)


def difference(**changes) -> Difference:
    parts = {name: getattr(NOTHING, name) for name in Difference.__slots__}
    return Difference(**(parts | changes))


def rows(table) -> list[tuple[str, ...]]:
    assert isinstance(table, Table)
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_every_kind_of_difference_has_its_table():
    moved = (Moved(names=("w", "b"), num_bytes=2048, before="rank 0", after="rank 1"),)
    found = describe_difference(
        difference(
            decisions=CHANGE, blocks=CHANGE, layouts=CHANGE, parameters=moved,
            costs=(Amount(name="step_s", unit="seconds", before=2.0, after=1.0),), rest=("/name",),
        )
    )  # fmt: skip
    assert [str(table.title).strip() for table in found if isinstance(table, Table)] == [
        "Decisions", "Blocks", "Layouts", "Parameters on other ranks", "Predicted cost", "Else"
    ]  # fmt: skip
    assert rows(found[0]) == [("tp", "1", "2")]
    assert rows(found[3]) == [("w and 1 more", "2.00 KiB", "rank 0", "rank 1")]
    assert rows(found[5]) == [("/name",)]


def test_costs_change_from_the_first_plan_to_the_second():
    costs = (
        Amount(name="step_s", unit="seconds", before=2.0, after=1.5),
        Amount(name="peak_bytes", unit="bytes", before=2.0**30, after=2.0**31),
        Amount(name="tp_comm_s", unit="seconds", before=0.0, after=0.02),
    )
    assert rows(describe_difference(difference(costs=costs))[0]) == [
        ("step", "2 s", "1.5 s", "-25.0%"),
        ("memory of the fullest device", "1.00 GiB", "2.00 GiB", "+100.0%"),
        ("tensor parallel messages", "0 s", "20 ms", ""),
    ]


def test_rows_beyond_the_most_are_counted():
    rest = tuple(f"/stages/{number}" for number in range(MOST_ROWS + 3))
    found = rows(describe_difference(difference(rest=rest))[0])
    assert len(found) == MOST_ROWS + 1
    assert found[-1] == ("and 3 more",)
    full = describe_difference(difference(rest=rest[:MOST_ROWS]))[0]
    assert rows(full)[-1] == (f"/stages/{MOST_ROWS - 1}",)


def test_plans_that_decide_the_same_are_told_in_a_line():
    (line,) = describe_difference(NOTHING)
    console = Console(width=80)
    with console.capture() as shown:
        console.print(line)
    assert shown.get() == "the plans decide the same\n"
